//! Who asks for much more than the others: counts per caller over about a second, in a table of
//! fixed size.
//!
//! Two callers that fall on one place of the table share their count, which matters only if one of
//! them is heavy. Which do is another question in every process.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Places of the table.
const PLACES: usize = 4_096;
/// How long is counted.
const PERIOD: Duration = Duration::from_secs(1);
/// Twice as much as the others ask for on average, and some more, is heavy.
const TIMES: u64 = 2;
const AT_LEAST: u64 = 16;

/// Counts of two periods: the last one, and this one.
pub(super) struct Shares {
    period: AtomicU64,
    counts: [Box<[AtomicU32]>; 2],
    callers: [AtomicU64; 2],
    total: [AtomicU64; 2],
    seed: RandomState,
}

impl Shares {
    pub(super) fn new() -> Self {
        let counts = || (0..PLACES).map(|_| AtomicU32::new(0)).collect();
        Self {
            period: AtomicU64::new(0),
            counts: [counts(), counts()],
            callers: Default::default(),
            total: Default::default(),
            seed: RandomState::new(),
        }
    }

    /// Counts a request; answers whether its caller is a heavy one. 0 is nobody, and never is.
    pub(super) fn note(&self, caller: u64, now: Duration) -> bool {
        if caller == 0 {
            return false;
        }
        let period = now.as_secs() / PERIOD.as_secs();
        self.turn(period);
        let this = usize::from(period % 2 == 1);
        let last = 1 - this;
        #[expect(clippy::cast_possible_truncation, reason = "the low bits of a hash")]
        let place = self.seed.hash_one(caller) as usize % PLACES;
        let count = self.counts[this][place].fetch_add(1, Ordering::Relaxed);
        if count == 0 {
            self.callers[this].fetch_add(1, Ordering::Relaxed);
        }
        self.total[this].fetch_add(1, Ordering::Relaxed);
        let before = self.counts[last][place].load(Ordering::Relaxed);
        let fair = |table: usize| {
            let callers = self.callers[table].load(Ordering::Relaxed);
            let total = self.total[table].load(Ordering::Relaxed);
            (callers >= 2).then(|| total / callers)
        };
        let Some(fair_before) = fair(last) else { return false };
        let is_heavy = |count: u32, fair: u64| u64::from(count) > fair * TIMES + AT_LEAST;
        // Where all ask for more than in the last period, the others of this one are the measure.
        is_heavy(before, fair_before)
            || is_heavy(count, fair(this).unwrap_or_default().max(fair_before))
    }

    /// Begins a period, if nobody did.
    fn turn(&self, period: u64) {
        let known = self.period.load(Ordering::Acquire);
        if known >= period {
            return;
        }
        let turned =
            self.period.compare_exchange(known, period, Ordering::AcqRel, Ordering::Relaxed);
        if turned.is_err() {
            return;
        }
        let this = usize::from(period % 2 == 1);
        // After a pause, what was counted last is too old as well.
        let old = if period - known > 1 { [0, 1].as_slice() } else { &[this][..] };
        for &table in old {
            for count in &self.counts[table] {
                count.store(0, Ordering::Relaxed);
            }
            self.callers[table].store(0, Ordering::Relaxed);
            self.total[table].store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_with_ten_times_the_others_requests_is_heavy_and_they_are_not() {
        let shares = Shares::new();
        let mut verdicts = Vec::new();
        for second in 0..3 {
            for n in 0..20 {
                let now = Duration::from_millis(second * 1_000 + n * 50);
                let light: Vec<bool> = (1..=50).map(|caller| shares.note(caller, now)).collect();
                let heavy: Vec<bool> = (0..10).map(|_| shares.note(99, now)).collect();
                if second == 2 {
                    verdicts.push((light, heavy));
                }
            }
        }
        for (light, heavy) in verdicts {
            assert!(heavy.into_iter().all(|heavy| heavy));
            // Where one falls on the heavy one's place, it is counted with it.
            assert!(light.iter().filter(|light| **light).count() <= 1);
        }
    }

    #[test]
    fn when_all_ask_for_more_at_once_nobody_is_heavy() {
        let shares = Shares::new();
        for second in 0..4 {
            let times = if second < 2 { 1 } else { 50 };
            for n in 0..100 {
                let now = Duration::from_millis(second * 1_000 + n * 10);
                for caller in 1..=20 {
                    for _ in 0..times {
                        let is_heavy = shares.note(caller, now);
                        // Where two fall on one place, they are counted together.
                        assert!(!is_heavy || second > 2, "second {second}, {n}");
                    }
                }
            }
        }
    }

    #[test]
    fn alone_or_after_a_pause_nobody_is_heavy() {
        let shares = Shares::new();
        for n in 0..3_000 {
            assert!(!shares.note(7, Duration::from_millis(n)), "it is alone");
        }
        for n in 0..100 {
            assert!(!shares.note(7 + n % 2, Duration::from_millis(60_000 + n)), "after a pause");
        }
        assert!(!shares.note(0, Duration::from_secs(61)));
    }
}
