//! The keys of the notifications, in addition to those of their queues ([`crate::redis::keys`]).
//!
//! | key | type | meaning |
//! |---|---|---|
//! | `fl:{p:s}:n:<id>` | hash | the record, kept for up to a week after its end |
//! | `fl:{p:s}:user:<bot>\n<uid>` | hash, TTL | the times of the user's last notification, last release and recent sends, and the notification in flight |
//! | `fl:{p:s}:online:<bot>\n<uid>` | sorted set | notifications that wait for the user: id → due, ms |
//! | `fl:{p:s}:key:<bot>\n<key>` | string, TTL | the notification with this caller's key |
//! | `fl:{p:s}:results:<bot>` | string, TTL | meter of its ended notifications: when the whole quota is free again, µs |
//! | `fl:{p:s}:stats:day:<days since 1970>`, `fl:{p:s}:stats:hour:<hours>` | hash, TTL | `type\|outcome` → count |
//! | `fl:notification-kinds` | hash | the types with their own entry in the statistics, at most about 50 → `<last use, ms> <bot that was the first>` |
//! | `fl:auditor` | string, TTL | the lock of the process that audits the notifications |

use std::time::Duration;

use super::record::NotificationId;
use crate::id::{BotId, PipelineName, Prefix};
use crate::redis::keys::ShardKeys;

/// The types with their own entry in the statistics.
#[must_use]
pub fn kinds(prefix: &Prefix) -> String {
    format!("{prefix}:notification-kinds")
}

/// The lock of the process that audits the notifications.
#[must_use]
pub fn auditor(prefix: &Prefix) -> String {
    format!("{prefix}:auditor")
}

/// The pattern of the records of notifications of `pipeline`.
#[must_use]
pub fn records(prefix: &Prefix, pipeline: &PipelineName) -> String {
    format!("{prefix}:{{{pipeline}:*}}:n:*")
}

/// The id of the notification whose record is `key`.
#[must_use]
pub fn notification_of(key: &[u8]) -> Option<NotificationId> {
    let (_, rest) = std::str::from_utf8(key).ok()?.split_once('}')?;
    rest.strip_prefix(":n:")?.parse().ok()
}

impl ShardKeys {
    /// The record of a notification.
    #[must_use]
    pub fn notification(&self, id: NotificationId) -> String {
        format!("{}n:{id}", self.prefix())
    }

    /// The state of a user of a bot.
    #[must_use]
    pub fn user(&self, bot: &BotId, uid: &str) -> String {
        self.of_bot("user:", bot) + "\n" + uid
    }

    /// The notifications that wait for a user.
    #[must_use]
    pub fn online(&self, bot: &BotId, uid: &str) -> String {
        self.of_bot("online:", bot) + "\n" + uid
    }

    /// The notification with this caller's key.
    #[must_use]
    pub fn notification_key(&self, bot: &BotId, key: &str) -> String {
        self.of_bot("key:", bot) + "\n" + key
    }

    /// The meter of the ended notifications of one bot.
    #[must_use]
    pub fn results_meter(&self, bot: &BotId) -> String {
        self.of_bot("results:", bot)
    }

    /// The statistics of the day and of the hour of a time since 1970.
    #[must_use]
    pub fn stats(&self, now: Duration) -> [String; 2] {
        let hours = now.as_secs() / 3_600;
        [self.stats_of_day(hours / 24), self.stats_of_hour(hours)]
    }

    /// The statistics of a day, by its number since 1970.
    #[must_use]
    pub fn stats_of_day(&self, day: u64) -> String {
        format!("{}stats:day:{day}", self.prefix())
    }

    /// The statistics of an hour, by its number since 1970.
    #[must_use]
    pub fn stats_of_hour(&self, hour: u64) -> String {
        format!("{}stats:hour:{hour}", self.prefix())
    }
}
