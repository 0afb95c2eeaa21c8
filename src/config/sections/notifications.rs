//! `[notifications]`.

use std::time::Duration;

use crate::config::Cap;

/// The section `[notifications]`: delayed notifications.
#[derive(Debug, Clone)]
pub struct NotificationsConfig {
    /// Minimum time between two notifications to a user. At most 3,650 days.
    pub user_poll_threshold: Duration,
    /// Exceptions for single types: at most 100, each once.
    pub type_thresholds: Vec<(String, Duration)>,
    /// Maximum numbers of notifications to a user of a bot, per sliding window. At most 8.
    pub caps: Vec<Cap>,
    /// Caps that replace those for bots whose ids match: at most 100 globs, each once; none: no
    /// bound.
    pub bot_caps: Vec<(String, Vec<Cap>)>,
    /// Additional caps for single types; at most 100, each once. None: the type is not counted.
    pub type_caps: Vec<(String, Vec<Cap>)>,
    /// What happens to a notification that comes too soon or exceeds a cap.
    pub on_throttle: OnThrottle,
    /// Minimum time between two waiting notifications to a user that is online. At most 3,650 days.
    pub online_threshold: Duration,
    /// Maximum requests per second to one host and port from this process; 0: no bound. At most
    /// 1,000,000.
    pub host_rate: u64,
}

/// What happens to a notification that comes too soon after the last one of its user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnThrottle {
    /// The notification ends, and is counted as throttled.
    Drop,
    /// The notification is sent later, as soon as the rules allow it.
    Defer,
}
