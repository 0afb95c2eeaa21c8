//! Time. Code that depends on time uses a [`Clock`], so that tests can control it.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A source of wall-clock time.
///
/// Deadlines of leases use the monotonic clock of the runtime instead (`tokio::time`), which
/// tests can pause.
pub trait Clock: Send + Sync + 'static {
    /// Time since 1970.
    fn now(&self) -> Duration;
}

/// The clock that all components share.
pub type SharedClock = Arc<dyn Clock>;

/// The operating system's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the wall clock")]
    fn now(&self) -> Duration {
        // A clock before 1970 is treated as 1970: events then look young, and none is lost.
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
    }
}

/// A duration in whole milliseconds, capped.
#[must_use]
pub fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A duration in whole microseconds, capped.
#[must_use]
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Formats milliseconds since 1970 as RFC 3339, in UTC.
#[must_use]
pub fn rfc3339(millis: u64) -> String {
    let time = i64::try_from(millis).ok().and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok());
    time.unwrap_or(jiff::Timestamp::MAX).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_in_utc_with_its_milliseconds() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(1_795_000_000_250), "2026-11-18T11:06:40.25Z");
        assert!(rfc3339(u64::MAX).starts_with("9999-"));
    }
}
