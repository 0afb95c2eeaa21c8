//! Time. Code that decides by time asks a [`Clock`], so that tests own it.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Where the wall clock's time comes from.
///
/// Deadlines of leases use the monotonic clock of the runtime instead (`tokio::time`), which
/// tests can pause.
pub trait Clock: Send + Sync + 'static {
    /// Time since 1970.
    fn now(&self) -> Duration;
}

/// The clock every part shares.
pub type SharedClock = Arc<dyn Clock>;

/// The operating system's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the wall clock")]
    fn now(&self) -> Duration {
        // A clock before 1970 is treated as 1970: events then look young, none is lost.
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
    }
}

/// Whole milliseconds of a duration, capped.
#[must_use]
pub fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Whole microseconds of a duration, capped.
#[must_use]
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
