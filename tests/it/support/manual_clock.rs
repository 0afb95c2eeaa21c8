//! A clock that the test sets by hand.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fairlane::clock::Clock;

/// A clock that stands still until the test moves it. It holds seconds since 1970.
#[derive(Debug)]
pub(crate) struct ManualClock(AtomicU64);

impl ManualClock {
    /// Starts at a time, written as in `2026-11-20T12:00:00Z`.
    pub(crate) fn at(time: &str) -> Self {
        Self(AtomicU64::new(seconds(time)))
    }

    /// Moves the clock to another time.
    pub(crate) fn set(&self, time: &str) {
        self.0.store(seconds(time), Ordering::Relaxed);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        Duration::from_secs(self.0.load(Ordering::Relaxed))
    }
}

fn seconds(time: &str) -> u64 {
    let time: jiff::Timestamp = time.parse().unwrap();
    time.as_second().try_into().unwrap()
}
