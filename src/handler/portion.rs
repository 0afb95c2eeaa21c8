//! The maximum size of one write to a store, adapted to its speed.
//!
//! A portion that the store does not accept within the time limit halves the next one. A portion
//! that it accepts within a quarter of the limit doubles it. All bots of a process share the
//! portion, because they share the store. A slice is settled as far as its portions succeeded, so a
//! slow store causes slow progress instead of none.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// The current portion. Each handler chooses the unit.
#[derive(Debug)]
pub(crate) struct Portion(AtomicUsize);

impl Portion {
    /// Starts without a limit.
    pub(crate) fn new() -> Self {
        Self(AtomicUsize::new(usize::MAX))
    }

    /// The current portion, at least 1.
    pub(crate) fn now(&self) -> usize {
        // Relaxed here and below: a slightly old number is fine.
        self.0.load(Ordering::Relaxed)
    }

    /// Notes that a portion of this size timed out. Concurrent timeouts halve it only once.
    pub(crate) fn too_much(&self, size: usize) {
        self.0.fetch_min((size / 2).max(1), Ordering::Relaxed);
    }

    /// Notes that a portion of this size took this long, of the time limit.
    pub(crate) fn taken(&self, size: usize, took: Duration, within: Duration) {
        if took > within / 2 {
            self.0.fetch_min((size - size / 4).max(1), Ordering::Relaxed);
        } else if took <= within / 4 && size >= self.now() / 2 {
            self.0.fetch_max(size.saturating_mul(2).max(1), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WITHIN: Duration = Duration::from_secs(4);

    /// A handler with `waiting` units to write, and a store that accepts `per_second` units.
    fn handle(portion: &Portion, waiting: usize, per_second: u32) -> Duration {
        let size = waiting.min(portion.now());
        let took = Duration::from_secs(1) * u32::try_from(size).unwrap() / per_second;
        if took > WITHIN {
            portion.too_much(size);
        } else {
            portion.taken(size, took, WITHIN);
        }
        took.min(WITHIN)
    }

    #[test]
    fn it_is_halved_until_it_goes_through_and_grows_when_the_store_recovers() {
        let portion = Portion::new();
        handle(&portion, 5_000, 10_000);
        assert_eq!(portion.now(), usize::MAX);
        let times: Vec<_> = (0..20).map(|_| handle(&portion, 5_000, 100)).collect();
        assert_eq!(times.iter().filter(|took| **took == WITHIN).count(), 4, "{times:?}");
        assert!((100..=200).contains(&portion.now()), "{portion:?}");
        for _ in 0..6 {
            handle(&portion, 5_000, 10_000);
        }
        assert!(portion.now() >= 5_000, "{portion:?}");
    }

    #[test]
    fn concurrent_failures_halve_it_once_and_small_portions_do_not_raise_it() {
        let portion = Portion::new();
        for _ in 0..16 {
            portion.too_much(1_000);
        }
        assert_eq!(portion.now(), 500);
        portion.taken(10, Duration::ZERO, WITHIN);
        assert_eq!(portion.now(), 500);
        for _ in 0..20 {
            portion.too_much(portion.now());
        }
        assert_eq!(portion.now(), 1);
        portion.taken(1, WITHIN, WITHIN);
        assert_eq!(portion.now(), 1);
        portion.taken(1, Duration::ZERO, WITHIN);
        assert_eq!(portion.now(), 2);
    }
}
