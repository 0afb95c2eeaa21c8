//! Delayed notifications: their ids, and what one says.
//!
//! A notification calls a URL at its time. It belongs to a bot and, usually, to a user of that bot.

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

/// Longest id of a user, in bytes.
pub const UID_MAX_BYTES: usize = 256;
/// Longest type, in bytes.
pub const KIND_MAX_BYTES: usize = 64;
/// Longest `key`, in bytes.
pub const KEY_MAX_BYTES: usize = 255;
/// Longest body that is sent, in bytes.
pub const BODY_MAX_BYTES: usize = 64 * 1024;
/// Longest delay and longest `expires_in`: a year.
pub const DELAY_MAX: Duration = Duration::from_secs(366 * 24 * 3_600);
/// The type of a notification that names none.
pub const NO_KIND: &str = "none";
/// The type in the statistics of those that have no place of their own.
pub const OTHER_KINDS: &str = "other";

/// When a notification falls due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// So long after Redis has it.
    After(Duration),
    /// At this time, since 1970.
    At(Duration),
}

impl When {
    /// Checks that it is not more than [`DELAY_MAX`] ahead, at `now` since 1970.
    ///
    /// # Errors
    /// Names the parameter that says it.
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

    /// The time in ms since 1970 or 0, and the delay in ms. Rounded up: never early.
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

/// What is done when another notification of the bot has the key.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Duplicates {
    /// It stays, and the new one is not accepted. So does one that has ended, unless it was
    /// cancelled, for five minutes after it was accepted: a request may be repeated.
    #[default]
    Ignore,
    /// It is cancelled.
    Replace,
    /// It stays, and the new one is not accepted, as long as the old one is known: until a week
    /// after its end.
    #[serde(skip)]
    Once,
}

/// A notification to accept.
#[derive(Debug, Clone)]
pub struct NewNotification {
    /// Whose.
    pub bot: BotId,
    /// For which user; empty for none.
    pub uid: String,
    /// What it is called in the statistics and by the thresholds.
    pub kind: String,
    /// When it falls due.
    pub when: When,
    /// It is given up so long after that.
    pub expires_in: Duration,
    /// Whether it waits, once due, until the user is online.
    pub waits: bool,
    /// The URL that is called.
    pub url: String,
    /// The method.
    pub method: String,
    /// The body.
    pub body: String,
    /// This URL must answer `ok` before each attempt; empty for none.
    pub recheck: String,
    /// The set of `callbacks.headers` that is sent with it; empty for none.
    pub headers: String,
    /// A name of the caller's for it, and what is done when it is taken.
    pub key: Option<(String, Duplicates)>,
}

/// A setting of a notification that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{parameter} {problem}")]
pub struct Unusable {
    /// Which, as callers write it.
    pub parameter: &'static str,
    /// What is wrong, and what helps.
    pub problem: String,
}

impl NewNotification {
    /// Checks the bounds, at `now` since 1970; not the URLs, which depend on who asks.
    ///
    /// # Errors
    /// With the first that is not kept.
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

/// What is counted of notifications: that one was received or tried again, and how it ended.
pub const OUTCOMES: [&str; 8] =
    ["received", "sent", "refused", "throttled", "expired", "retried", "dead", "cancelled"];

/// How a notification is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It falls due, or is due.
    Scheduled,
    /// It waits until its user is online.
    Waiting,
    /// It is being sent.
    Sending,
    /// The receiver has it.
    Sent,
    /// The recheck did not want it sent.
    Refused,
    /// The user had got another one shortly before, or as many as the caps allow.
    Throttled,
    /// Its time passed before it could be sent.
    Expired,
    /// It was given up after attempts.
    Dead,
    /// Somebody cancelled or replaced it.
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

/// A notification as it is kept, times in ms since 1970.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// Its id.
    pub id: NotificationId,
    /// Whose.
    pub bot: BotId,
    /// For which user; empty for none.
    pub uid: String,
    /// Its type.
    pub kind: String,
    /// How it is.
    pub state: State,
    /// When it is or was due.
    pub due_ms: u64,
    /// When it is given up.
    pub expires_ms: u64,
    /// When it was accepted.
    pub created_ms: u64,
    /// When it ended.
    pub ended_ms: Option<u64>,
    /// When it is looked at next.
    pub next_ms: Option<u64>,
    /// Whether it waits for its user.
    pub waits: bool,
    /// How often it was begun to send.
    pub attempts: u32,
    /// Why it ended, or why the last attempt failed.
    pub reason: String,
    /// The URL that is called.
    pub url: String,
    /// Its type in the statistics.
    pub label: String,
    /// The key that it was accepted with; empty for none.
    pub key: String,
}

/// A send that was begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Begun {
    /// Which.
    pub id: NotificationId,
    /// Ends this send and no other.
    pub token: u64,
    /// Whose.
    pub bot: BotId,
    /// For which user; empty for none.
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
    /// To be asked before; empty for none.
    pub recheck: String,
    /// The set of headers; empty for none.
    pub headers: String,
    /// When it was due, ms since 1970.
    pub due_ms: u64,
    /// When it is given up, ms since 1970.
    pub expires_ms: u64,
    /// 1 for the first.
    pub attempts: u32,
    /// When it could be sent: when it was due, or when its user could get another one; ms since
    /// 1970.
    pub ready_ms: u64,
    /// Whether nothing was told yet of how late it is. What waited for its user is not late.
    pub counts_late: bool,
}

/// How a send ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// The receiver has it.
    Sent,
    /// The recheck does not want it sent.
    Refused(String),
    /// It failed; again after this long.
    Retry(Duration, String),
    /// It was not tried; again after this long.
    Postpone(Duration, String),
    /// It failed for good.
    Dead(String),
}

impl Ending {
    /// How `lua/finish.lua` calls it.
    #[must_use]
    pub fn word(&self) -> &'static str {
        self.parts().0
    }

    /// The word of `lua/finish.lua`, the pause and the reason.
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
    /// Which.
    pub begun: Begun,
    /// How.
    pub ending: Ending,
    /// From the due time to this send, where it was the first one.
    pub late: Option<Duration>,
}

/// The steps by which lateness is counted, in ms: each counts what is later than the one before.
pub const LATE_STEPS: [u64; 42] = [
    1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1_000, 1_500, 2_000,
    3_000, 5_000, 7_000, 10_000, 15_000, 20_000, 30_000, 45_000, 60_000, 90_000, 120_000, 180_000,
    300_000, 450_000, 600_000, 900_000, 1_800_000, 3_600_000, 7_200_000, 14_400_000, 43_200_000,
    86_400_000,
];

/// The step that a lateness counts in; the last one takes what is later too.
#[must_use]
pub fn late_step(late: Duration) -> u64 {
    let millis =
        crate::clock::millis(late) + u64::from(!late.subsec_micros().is_multiple_of(1_000));
    let at = LATE_STEPS.partition_point(|&step| step < millis);
    LATE_STEPS[at.min(LATE_STEPS.len() - 1)]
}

#[cfg(test)]
mod tests;
