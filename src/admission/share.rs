//! Finds callers that send much more than the others: counts requests per caller over about a
//! second, in tables of fixed size.
//!
//! A caller may appear heavier than it is if it shares its cells with others; the sharing
//! differs between processes. It never appears lighter, except for concurrent increments by two
//! threads.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::Request;

/// Number of rows. Each caller has a cell in each row, and its count is the lowest of them (a
/// count-min sketch, Cormode and Muthukrishnan). Only a caller that shares a cell with others in
/// every row is counted too high.
const ROWS: usize = 4;
/// Number of cells per row.
const PLACES: usize = 4_096;
/// Duration of a period.
const PERIOD: Duration = Duration::from_secs(1);
/// A caller with more than twice the average of the others, plus a margin, is heavy.
const TIMES: u64 = 2;
const AT_LEAST: u64 = 16;

/// The counts of two periods: the last one, and the current one.
pub(super) struct Shares {
    period: AtomicU64,
    counts: [Box<[AtomicU32]>; 2],
    callers: [AtomicU64; 2],
    total: [AtomicU64; 2],
    seed: RandomState,
}

impl Shares {
    pub(super) fn new() -> Self {
        let counts = || (0..ROWS * PLACES).map(|_| AtomicU32::new(0)).collect();
        Self {
            period: AtomicU64::new(0),
            counts: [counts(), counts()],
            callers: Default::default(),
            total: Default::default(),
            seed: RandomState::new(),
        }
    }

    /// Whether the caller of a request is heavy. Counts the request, unless it asks again.
    pub(super) fn judge(&self, ask: &Request, now: Duration) -> bool {
        if ask.asks_again { self.is_heavy(ask.caller, now) } else { self.note(ask.caller, now) }
    }

    /// Counts a request; returns whether its caller is heavy. 0 means no caller, which is never
    /// heavy.
    pub(super) fn note(&self, caller: u64, now: Duration) -> bool {
        if caller == 0 {
            return false;
        }
        let (this, places) = (self.table(now), places(self.seed.hash_one(caller)));
        let count = self.count(this, places);
        // Cells above the lowest one contain requests of other callers.
        for at in places {
            self.counts[this][at].fetch_max(count + 1, Ordering::Relaxed);
        }
        if count == 0 {
            self.callers[this].fetch_add(1, Ordering::Relaxed);
        }
        self.total[this].fetch_add(1, Ordering::Relaxed);
        self.is_above(this, count, places)
    }

    /// Whether the caller of a request that was counted before is heavy.
    fn is_heavy(&self, caller: u64, now: Duration) -> bool {
        if caller == 0 {
            return false;
        }
        let (this, places) = (self.table(now), places(self.seed.hash_one(caller)));
        // The request itself is one of them.
        self.is_above(this, self.count(this, places).saturating_sub(1), places)
    }

    /// The table of the current period, which is started if need be.
    fn table(&self, now: Duration) -> usize {
        let period = now.as_secs() / PERIOD.as_secs();
        self.turn(period);
        usize::from(period % 2 == 1)
    }

    /// How many requests of a caller a table counts.
    fn count(&self, table: usize, places: [usize; ROWS]) -> u32 {
        let counts = places.map(|at| self.counts[table][at].load(Ordering::Relaxed));
        counts.into_iter().min().unwrap_or_default()
    }

    /// Whether a caller sent much more than the others: in the last period, or `count` in this one.
    fn is_above(&self, this: usize, count: u32, places: [usize; ROWS]) -> bool {
        let last = 1 - this;
        let before = self.count(last, places);
        let fair = |table: usize| {
            let callers = self.callers[table].load(Ordering::Relaxed);
            let total = self.total[table].load(Ordering::Relaxed);
            (callers >= 2).then(|| total / callers)
        };
        let Some(fair_before) = fair(last) else { return false };
        let is_heavy = |count: u32, fair: u64| u64::from(count) > fair * TIMES + AT_LEAST;
        // If all callers send more than in the last period, the current period is the measure.
        is_heavy(before, fair_before)
            || is_heavy(count, fair(this).unwrap_or_default().max(fair_before))
    }

    /// Starts a period, if no other thread has.
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
        // After a pause, the last counts are too old as well.
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

/// The indexes of a caller's cells, one in each row.
fn places(hash: u64) -> [usize; ROWS] {
    const BITS: u32 = PLACES.ilog2();
    #[expect(clippy::cast_possible_truncation, reason = "some bits of a hash")]
    std::array::from_fn(|row| row * PLACES + (hash >> (row as u32 * BITS)) as usize % PLACES)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::{Admission, Class, Decision, Operation, Settings};
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
            assert!(light.into_iter().all(|light| !light));
        }
    }

    #[test]
    fn when_all_ask_for_more_together_none_is_heavy() {
        let shares = Shares::new();
        for second in 0..4 {
            let times = if second < 2 { 1 } else { 50 };
            for n in 0..100 {
                let now = Duration::from_millis(second * 1_000 + n * 10);
                for caller in 1..=20 {
                    for _ in 0..times {
                        assert!(!shares.note(caller, now), "second {second}, {n}");
                    }
                }
            }
        }
    }

    #[test]
    fn among_a_thousand_equal_callers_none_is_heavy() {
        let shares = Shares::new();
        for second in 0..3 {
            for n in 0..100 {
                let now = Duration::from_millis(second * 1_000 + n * 10);
                for caller in 1..=1_000 {
                    assert!(!shares.note(caller, now), "second {second}, {n}: {caller}");
                }
            }
        }
    }

    #[test]
    fn alone_or_after_a_pause_no_caller_is_heavy() {
        let shares = Shares::new();
        for n in 0..3_000 {
            assert!(!shares.note(7, Duration::from_millis(n)), "it is alone");
        }
        for n in 0..100 {
            assert!(!shares.note(7 + n % 2, Duration::from_millis(60_000 + n)), "after a pause");
        }
        assert!(!shares.note(0, Duration::from_secs(61)));
    }

    #[test]
    fn twice_the_average_and_a_margin_is_not_heavy_and_one_more_is() {
        let shares = Shares::new();
        let (first, second) = (Duration::from_secs(4), Duration::from_secs(5));
        assert!(!shares.note(1, first) && !shares.note(2, first));
        // The average is 1, so 18 requests before this one are the most.
        let heavy = (0..20).filter(|_| shares.note(1, second)).count();
        assert_eq!(heavy, 1);
    }

    #[test]
    fn a_request_that_asks_again_counts_once_and_is_judged_as_before() {
        let admission = Admission::new(Settings::default(), Arc::new(|| Duration::from_secs(5)));
        let shares = &admission.shares;
        assert!(!shares.note(1, Duration::from_secs(4)) && !shares.note(2, Duration::from_secs(4)));
        let begins = |asks_again| {
            let ask = Request {
                class: Class::P2,
                operation: Operation(0),
                continues: false,
                caller: 1,
                asks_again,
                is_stranger: false,
                deadline: None,
                places: 1,
            };
            assert!(matches!(admission.ask(&ask), Decision::Begin(_)));
            shares.is_heavy(1, Duration::from_secs(5))
        };
        // The average is 1, so 18 requests before one are the most.
        for _ in 0..19 {
            assert!(!begins(false) && !begins(true));
        }
        assert!(begins(false) && begins(true) && !shares.is_heavy(2, Duration::from_secs(5)));
    }

    #[test]
    fn counts_are_of_the_last_two_periods_only() {
        let shares = Shares::new();
        let at = |second| Duration::from_secs(second);
        for caller in 1..=50 {
            shares.note(caller, at(10));
        }
        let heavy = |second| (0..40).filter(|_| shares.note(99, at(second))).count();
        assert_eq!(heavy(10), 0, "nothing is known of the period before");
        assert_eq!(heavy(11), 40);
        assert_eq!((heavy(12), heavy(13)), (0, 0), "there were no others");
        for caller in 1..=50 {
            shares.note(caller, at(20));
        }
        heavy(20);
        assert_eq!((heavy(22), heavy(23)), (0, 0), "after a pause nothing is known");
    }
}
