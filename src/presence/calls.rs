//! Whether the calls of a pipeline fail: the failures of its handler since the last success, in one
//! process. They show a broken target within moments, also if no event is retried, and whichever
//! bots the events belong to.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

/// Maximum length of a kept reason, in bytes.
const REASON_MAX: usize = 300;

/// The calls of the handler of one pipeline.
#[derive(Debug, Default)]
pub struct Calls {
    /// Whether there are failures. Usually there are none, and no worker takes the lock.
    any: AtomicBool,
    failures: Mutex<Option<Failures>>,
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

impl Calls {
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
}
