//! How much of a slice is written to a store at a time.
//!
//! A store that does not take a portion within the time gets half of it the next time; one that
//! takes it in a quarter of the time gets twice as much. All bots of a process share the portion:
//! what is slow is the store, and what their handlers write at the same time shares it. A slice is
//! settled as far as its portions went through, so that a slow store makes slow progress instead of
//! none.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// How much is written at a time. In what it is counted is the handler's own affair.
#[derive(Debug)]
pub(crate) struct Portion(AtomicUsize);

impl Portion {
    /// Everything, until the store is slow.
    pub(crate) fn new() -> Self {
        Self(AtomicUsize::new(usize::MAX))
    }

    /// At least 1.
    pub(crate) fn now(&self) -> usize {
        // Relaxed here and below: a number that is a little old is as good.
        self.0.load(Ordering::Relaxed)
    }

    /// So much was not taken in time. Those that failed together do not halve it together.
    pub(crate) fn too_much(&self, size: usize) {
        self.0.fetch_min((size / 2).max(1), Ordering::Relaxed);
    }

    /// So much was taken, and this long it took of the time that there is.
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

    /// A handler with so much to write, and a store that takes so much in a second.
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
    fn handlers_that_fail_together_halve_it_once_and_what_is_small_says_nothing_of_more() {
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
