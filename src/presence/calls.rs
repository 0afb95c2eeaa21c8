//! Whether the calls of a pipeline fail: the failures of its handler since the last success, in one
//! process. They show a broken target within moments, also if no event is retried, and whichever
//! bots the events belong to.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Maximum length of a kept reason, in bytes.
const REASON_MAX: usize = 300;

/// The calls of the handler of one pipeline.
#[derive(Debug, Default)]
pub struct Calls {
    /// Whether there are failures. Usually there are none, and no worker takes the lock.
    any: AtomicBool,
    failures: Mutex<Option<Failures>>,
    /// Their number, and the sum of their durations in µs.
    count: AtomicU64,
    sum_us: AtomicU64,
    /// The slowest one since the last look, µs.
    max_us: AtomicU64,
    /// The number of those that failed.
    failed: AtomicU64,
}

/// The calls of one pipeline in a short time, in one process or all of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct CallPace {
    /// Calls per second.
    pub per_second: f64,
    /// Failed calls per second.
    pub failed_per_second: f64,
    /// Their mean duration.
    pub mean_ms: f64,
    /// The duration of the slowest one.
    pub max_ms: f64,
}

/// The numbers at the last look.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counted {
    count: u64,
    sum_us: u64,
    failed: u64,
}

/// The failures since the last success.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failures {
    /// Their number.
    pub calls: u64,
    /// The time of the first one, ms since 1970.
    pub since_ms: u64,
    /// The time of the last one, ms since 1970.
    pub time_ms: u64,
    /// The reason of the last one.
    pub reason: String,
}

impl CallPace {
    /// The calls of several processes: the sums, the mean over all calls, and the slowest.
    pub(super) fn sum<'a>(all: impl Iterator<Item = &'a Self>) -> Self {
        let (mut sum, mut ms) = (Self::default(), 0.0);
        for of in all {
            sum.per_second += of.per_second;
            sum.failed_per_second += of.failed_per_second;
            sum.max_ms = sum.max_ms.max(of.max_ms);
            ms += of.mean_ms * of.per_second;
        }
        sum.mean_ms = if sum.per_second > 0.0 { ms / sum.per_second } else { 0.0 };
        sum
    }
}

impl Calls {
    /// The handler was called, and took this long.
    pub(crate) fn took(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.count.fetch_add(1, Ordering::Relaxed);
        self.sum_us.fetch_add(us, Ordering::Relaxed);
        self.max_us.fetch_max(us, Ordering::Relaxed);
    }

    /// The calls since `last`, `seconds` ago, and the current numbers. `None`: there were none.
    pub(super) fn pace(&self, last: Counted, seconds: f64) -> (Option<CallPace>, Counted) {
        let now = Counted {
            count: self.count.load(Ordering::Relaxed),
            sum_us: self.sum_us.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
        };
        let max_us = self.max_us.swap(0, Ordering::Relaxed);
        let (count, failed) = (now.count - last.count, now.failed - last.failed);
        if count + failed == 0 {
            return (None, now);
        }
        #[expect(clippy::cast_precision_loss, reason = "calls of a few seconds")]
        let [count, failed, sum_us, max_us] =
            [count, failed, now.sum_us - last.sum_us, max_us].map(|number| number as f64);
        let pace = CallPace {
            per_second: count / seconds,
            failed_per_second: failed / seconds,
            mean_ms: if count > 0.0 { sum_us / count / 1_000.0 } else { 0.0 },
            max_ms: max_us / 1_000.0,
        };
        (Some(pace), now)
    }

    /// A call succeeded, at least for a part of its events.
    pub(crate) fn succeeded(&self) {
        if self.any.load(Ordering::Relaxed) {
            let mut failures = self.lock();
            *failures = None;
            self.any.store(false, Ordering::Relaxed);
        }
    }

    /// A call failed. `now_ms` is Unix time in milliseconds.
    pub(crate) fn failed(&self, reason: &str, now_ms: u64) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        let mut failures = self.lock();
        let end =
            (0..=REASON_MAX.min(reason.len())).rev().find(|&end| reason.is_char_boundary(end));
        let reason = reason[..end.unwrap_or(0)].to_owned();
        let before = failures.as_ref().map(|before| (before.calls, before.since_ms));
        let (calls, since_ms) = before.unwrap_or((0, now_ms));
        *failures = Some(Failures { calls: calls + 1, since_ms, time_ms: now_ms, reason });
        self.any.store(true, Ordering::Relaxed);
    }

    /// The failures since the last success. `None`: the last call succeeded, or there was none.
    pub(super) fn failing(&self) -> Option<Failures> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Failures>> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_count_from_the_first_one_until_a_success() {
        let calls = Calls::default();
        assert_eq!(calls.failing(), None);
        calls.failed("HTTP 500", 10);
        calls.failed(&"é".repeat(REASON_MAX), 20);
        let found = calls.failing().unwrap();
        assert_eq!((found.calls, found.since_ms, found.time_ms), (2, 10, 20));
        assert_eq!(found.reason, "é".repeat(REASON_MAX / 2));
        calls.succeeded();
        assert_eq!(calls.failing(), None);
    }

    #[test]
    fn durations_and_failures_are_those_since_the_last_look() {
        let calls = Calls::default();
        let (none, counted) = calls.pace(Counted::default(), 5.0);
        assert_eq!(none, None);
        calls.took(Duration::from_millis(10));
        calls.took(Duration::from_millis(30));
        calls.failed("HTTP 500", 10);
        let (pace, counted) = calls.pace(counted, 5.0);
        let expected =
            CallPace { per_second: 0.4, failed_per_second: 0.2, mean_ms: 20.0, max_ms: 30.0 };
        assert_eq!(pace, Some(expected));
        calls.took(Duration::from_millis(2));
        let (pace, _) = calls.pace(counted, 1.0);
        let expected =
            CallPace { per_second: 1.0, mean_ms: 2.0, max_ms: 2.0, ..CallPace::default() };
        assert_eq!(pace, Some(expected));
    }

    #[test]
    fn the_mean_of_several_processes_counts_each_call_once() {
        let busy =
            CallPace { per_second: 30.0, mean_ms: 10.0, max_ms: 15.0, ..CallPace::default() };
        let slow = CallPace { per_second: 10.0, mean_ms: 50.0, max_ms: 90.0, ..busy };
        let sum = CallPace::sum([busy, slow].iter());
        assert_eq!((sum.per_second, sum.mean_ms, sum.max_ms), (40.0, 20.0, 90.0));
        assert_eq!(CallPace::sum([].iter()), CallPace::default());
    }
}
