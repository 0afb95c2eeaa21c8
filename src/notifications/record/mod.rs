//! Delayed notifications: their ids and their content.
//!
//! A notification calls a URL at its due time. It belongs to a bot and, usually, to a user of that
//! bot.

mod cap;
mod id;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::cap::{Cap, CapError, Caps};
pub use self::id::{NotificationId, NotificationIdError};
use crate::id::BotId;
use crate::outbound::URL_MAX_BYTES;
use crate::trace::TraceContext;

/// Maximum length of a user's id, in bytes.
pub const UID_MAX_BYTES: usize = 256;
/// Maximum length of a type, in bytes.
pub const KIND_MAX_BYTES: usize = 64;
/// Maximum length of `key`, in bytes.
pub const KEY_MAX_BYTES: usize = 255;
/// Maximum length of the body, in bytes.
pub const BODY_MAX_BYTES: usize = 64 * 1024;
/// Maximum delay and maximum `expires_in`: a year.
pub const DELAY_MAX: Duration = Duration::from_secs(366 * 24 * 3_600);
/// The type of a notification without a type.
pub const NO_KIND: &str = "none";
/// The type in the statistics for all types without a separate count.
pub const OTHER_KINDS: &str = "other";

/// When a notification is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// This long after Redis stores it.
    After(Duration),
    /// At this time, since 1970.
    At(Duration),
}

impl When {
    /// Checks that the time is at most [`DELAY_MAX`] ahead of `now` since 1970.
    ///
    /// # Errors
    /// Names the invalid parameter.
    pub fn check(self, now: Duration) -> Result<(), Unusable> {
        let (parameter, ahead) = match self {
            Self::After(delay) => ("delay", delay),
            Self::At(time) => ("at", time.saturating_sub(now)),
        };
        if ahead > DELAY_MAX {
            let problem = format!("is more than {} days from now", days(DELAY_MAX));
            return Err(Unusable { parameter, problem });
        }
        Ok(())
    }

    /// The due time in ms since 1970 (0: by the delay), and the delay in ms. Both are rounded up,
    /// so that no notification is early.
    pub(crate) fn parts(self) -> (u64, u64) {
        let up = |time: Duration| {
            crate::clock::millis(time) + u64::from(!time.subsec_nanos().is_multiple_of(1_000_000))
        };
        match self {
            Self::After(delay) => (0, up(delay)),
            Self::At(time) => (up(time).max(1), 0),
        }
    }
}

fn days(time: Duration) -> u64 {
    time.as_secs() / 86_400
}

/// The behaviour if another notification of the bot has the same key.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Duplicates {
    /// The old one stays, and the new one is not accepted. An old one that has ended counts for
    /// five minutes after its acceptance, because a request may be repeated. A cancelled one does
    /// not count.
    #[default]
    Ignore,
    /// The new one is accepted. The old one is cancelled, unless it has ended or is in flight.
    Replace,
    /// The old one stays. The new one is not accepted while the record of the old one exists: until
    /// a week after its end, or for at least an hour if the results of the bot exceed their quota.
    #[serde(skip)]
    Once,
}

/// A notification to accept.
#[derive(Debug, Clone)]
pub struct NewNotification {
    /// Its bot.
    pub bot: BotId,
    /// Its user; empty for none.
    pub uid: String,
    /// Its type in the statistics and in the caps.
    pub kind: String,
    /// When it is due.
    pub when: When,
    /// The time from its due time to its expiry.
    pub expires_in: Duration,
    /// Whether it waits after the due time until its user is online.
    pub waits: bool,
    /// The URL to call.
    pub url: String,
    /// The method.
    pub method: String,
    /// The body.
    pub body: String,
    /// This URL must answer `ok` before each attempt; empty for none.
    pub recheck: String,
    /// The name of the set in `callbacks.headers` that is sent with it; empty for none.
    pub headers: String,
    /// The caller's key for it, and the behaviour if the key is in use.
    pub key: Option<(String, Duplicates)>,
    /// The context of its trace; `None`: it belongs to no trace.
    pub trace: Option<TraceContext>,
}

/// An invalid setting of a notification.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{parameter} {problem}")]
pub struct Unusable {
    /// The parameter as callers write it.
    pub parameter: &'static str,
    /// The problem and its remedy.
    pub problem: String,
}

impl NewNotification {
    /// Checks the bounds at `now` since 1970. Does not check the URLs, because their rules depend
    /// on the caller.
    ///
    /// # Errors
    /// The first setting that exceeds its bound.
    pub fn check(&self, now: Duration) -> Result<(), Unusable> {
        let unusable = |parameter, problem| Err(Unusable { parameter, problem });
        let key = self.key.as_ref().map_or("-", |(key, _)| key);
        for (parameter, text, most) in [
            ("uid", &*self.uid, UID_MAX_BYTES),
            ("type", &self.kind, KIND_MAX_BYTES),
            ("key", key, KEY_MAX_BYTES),
            ("method", &self.method, KIND_MAX_BYTES),
            ("url", &self.url, URL_MAX_BYTES),
            ("recheck_url", &self.recheck, URL_MAX_BYTES),
            ("headers_from", &self.headers, KIND_MAX_BYTES),
            ("body", &self.body, BODY_MAX_BYTES),
        ] {
            if text.len() > most {
                return unusable(
                    parameter,
                    format!("has {} bytes; at most {most} are allowed", text.len()),
                );
            }
            if parameter != "body" && text.chars().any(char::is_control) {
                return unusable(parameter, "holds a control character; remove it".to_owned());
            }
        }
        for (parameter, text) in
            [("url", &*self.url), ("type", &self.kind), ("key", key), ("method", &self.method)]
        {
            if text.is_empty() {
                return unusable(parameter, "is empty".to_owned());
            }
        }
        if self.waits && self.uid.is_empty() {
            return unusable(
                "uid",
                "is empty; name the user whose being online it waits for".to_owned(),
            );
        }
        self.when.check(now)?;
        if self.expires_in > DELAY_MAX {
            return unusable("expires_in", format!("is more than {} days", days(DELAY_MAX)));
        }
        if self.expires_in.is_zero() {
            let problem = "is 0, so that it would have expired when it is due";
            return unusable("expires_in", problem.to_owned());
        }
        Ok(())
    }
}

/// The outcomes that the statistics count: received, retried, and each way to end.
pub const OUTCOMES: [&str; 8] =
    ["received", "sent", "refused", "throttled", "expired", "retried", "dead", "cancelled"];

/// The state of a notification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It is not due yet, or it is due and not sent yet.
    Scheduled,
    /// It waits until its user is online.
    Waiting,
    /// It is being sent.
    Sending,
    /// The receiver accepted it.
    Sent,
    /// The recheck did not approve the send.
    Refused,
    /// It was dropped: the user had got another one shortly before, or as many as the caps allow.
    Throttled,
    /// It expired before it could be sent.
    Expired,
    /// It failed permanently and became a dead letter.
    Dead,
    /// It was cancelled or replaced.
    Cancelled,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl FromStr for State {
    type Err = serde::de::value::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::deserialize(serde::de::IntoDeserializer::into_deserializer(text))
    }
}

/// A stored notification. Times are in ms since 1970.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// Its id.
    pub id: NotificationId,
    /// Its bot.
    pub bot: BotId,
    /// Its user; empty for none.
    pub uid: String,
    /// Its type.
    pub kind: String,
    /// Its state.
    pub state: State,
    /// The due time.
    pub due_ms: u64,
    /// The expiry time.
    pub expires_ms: u64,
    /// When it was accepted.
    pub created_ms: u64,
    /// When it ended.
    pub ended_ms: Option<u64>,
    /// The time of the next attempt or check.
    pub next_ms: Option<u64>,
    /// Whether it waits for its user.
    pub waits: bool,
    /// Number of sends started.
    pub attempts: u32,
    /// Why it ended, or why the last attempt failed.
    pub reason: String,
    /// The URL to call.
    pub url: String,
    /// Its type in the statistics.
    pub label: String,
    /// The key that it was accepted with; empty for none.
    pub key: String,
}

/// A send that was started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Begun {
    /// The notification.
    pub id: NotificationId,
    /// Identifies this send: only this token can end it.
    pub token: u64,
    /// Its bot.
    pub bot: BotId,
    /// Its user; empty for none.
    pub uid: String,
    /// Its type.
    pub kind: String,
    /// Its type in the statistics.
    pub label: String,
    /// The URL to call.
    pub url: String,
    /// The method.
    pub method: String,
    /// The body.
    pub body: String,
    /// The URL to check before sending; empty for none.
    pub recheck: String,
    /// The set of headers; empty for none.
    pub headers: String,
    /// The caller's key for it; empty for none.
    pub key: String,
    /// The due time, ms since 1970.
    pub due_ms: u64,
    /// The expiry time, ms since 1970.
    pub expires_ms: u64,
    /// Number of this attempt, from 1.
    pub attempts: u32,
    /// When it could be sent, ms since 1970: its due time, or the later time at which the limits of
    /// its user allowed it.
    pub ready_ms: u64,
    /// Whether to record its lateness: it was not recorded yet, and the notification did not wait
    /// for its user.
    pub counts_late: bool,
    /// Whether the last attempt was postponed.
    pub postponed: bool,
    /// The context of its trace in one text; empty for none.
    pub trace: String,
}

/// The result of a send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// The receiver accepted it.
    Sent,
    /// The recheck did not approve the send.
    Refused(String),
    /// It failed; retry after this time.
    Retry(Duration, String),
    /// It was not tried; retry after this time.
    Postpone(Duration, String),
    /// It failed permanently.
    Dead(String),
}

impl Ending {
    /// Its name in `lua/finish.lua`.
    #[must_use]
    pub fn word(&self) -> &'static str {
        self.parts().0
    }

    /// The name for `lua/finish.lua`, the pause and the reason.
    pub(crate) fn parts(&self) -> (&'static str, Duration, &str) {
        match self {
            Self::Sent => ("sent", Duration::ZERO, ""),
            Self::Refused(reason) => ("refused", Duration::ZERO, reason),
            Self::Retry(pause, reason) => ("retry", *pause, reason),
            Self::Postpone(pause, reason) => ("postpone", *pause, reason),
            Self::Dead(reason) => ("dead", Duration::ZERO, reason),
        }
    }
}

/// A send that ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// The send.
    pub begun: Begun,
    /// Its result.
    pub ending: Ending,
    /// The time from [`Begun::ready_ms`] to this send, if it was the first one.
    pub late: Option<Duration>,
}

/// The upper bounds of the lateness buckets, in ms.
pub const LATE_STEPS: [u64; 42] = [
    1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1_000, 1_500, 2_000,
    3_000, 5_000, 7_000, 10_000, 15_000, 20_000, 30_000, 45_000, 60_000, 90_000, 120_000, 180_000,
    300_000, 450_000, 600_000, 900_000, 1_800_000, 3_600_000, 7_200_000, 14_400_000, 43_200_000,
    86_400_000,
];

/// The bucket of a lateness. The last bucket also takes higher values.
#[must_use]
pub fn late_step(late: Duration) -> u64 {
    let millis =
        crate::clock::millis(late) + u64::from(!late.subsec_micros().is_multiple_of(1_000));
    let at = LATE_STEPS.partition_point(|&step| step < millis);
    LATE_STEPS[at.min(LATE_STEPS.len() - 1)]
}

#[cfg(test)]
mod tests;
