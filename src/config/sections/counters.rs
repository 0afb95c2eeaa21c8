//! `[counters]`.

use std::time::Duration;

use jiff::tz::TimeZone;

/// The section `[counters]`: view counters.
#[derive(Debug, Clone)]
pub struct CountersConfig {
    /// The time zone whose midnight ends the day of a daily figure.
    pub time_zone: TimeZone,
    /// Maximum number of ads per bot whose totals are cached, in each of two generations: 1,000 to
    /// 10,000,000.
    pub cached_ads: u64,
    /// Timeout of the stores for requests that read totals, days, rules or profiles: 10 ms to 10 s.
    pub read_timeout: Duration,
}
