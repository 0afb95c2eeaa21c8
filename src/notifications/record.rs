//! Delayed notifications: their ids, and what one says.
//!
//! A notification calls a URL at its time. It belongs to a bot and, usually, to a user of that bot.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize, Serializer};
use uuid::Uuid;

use crate::filter::Glob;
use crate::id::{BotId, Shard, ShardCount};
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

/// The id of a notification: `<shard>.<32 hexadecimal digits>`, so it is found without its bot.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NotificationId {
    shard: Shard,
    unique: Uuid,
}

impl NotificationId {
    /// A new one, of a bot in this shard.
    #[must_use]
    pub fn new(shard: Shard) -> Self {
        Self { shard, unique: Uuid::now_v7() }
    }

    /// The shard of its bot; `None` when there is no such shard.
    #[must_use]
    pub fn shard(self, shards: ShardCount) -> Option<Shard> {
        (self.shard.index() < usize::from(shards.get())).then_some(self.shard)
    }
}

impl fmt::Display for NotificationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.shard, self.unique.simple())
    }
}

impl fmt::Debug for NotificationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for NotificationId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A text that is no id of a notification.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not the id of a notification, which looks like 3.0192f1b0c1d27c3e8f00112233445566"
)]
pub struct NotificationIdError(String);

impl FromStr for NotificationId {
    type Err = NotificationIdError;

    fn from_str(text: &str) -> Result<Self, NotificationIdError> {
        let parse = || {
            let (shard, unique) = text.split_once('.')?;
            let unique = Uuid::try_parse(unique).ok()?;
            let id = Self { shard: Shard::from_digits(shard)?, unique };
            // One notification has one name.
            (id.to_string() == text).then_some(id)
        };
        parse().ok_or_else(|| NotificationIdError(text.chars().take(100).collect()))
    }
}

impl<'de> Deserialize<'de> for NotificationId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

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

/// A user gets at most so many in any window of so long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cap {
    /// How many: 1 to [`Self::N_MAX`].
    pub n: u32,
    /// In how long: [`Self::WINDOW_MIN`] to [`Self::WINDOW_MAX`].
    pub window: Duration,
}

/// A text that is no cap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CapError {
    /// Not of the form.
    #[error("write NUMBER/TIME, such as \"10/day\", \"3/1h\" or \"100/7d\"")]
    Form,
    /// Too many, or none.
    #[error("write a number from 1 to {} before the stroke", Cap::N_MAX)]
    Number,
    /// Too short or too long.
    #[error("write a time from 1s to 366d behind the stroke")]
    Window,
}

impl Cap {
    /// A user's log takes 6 bytes each.
    pub const N_MAX: u32 = 1_000;
    /// Shortest window.
    pub const WINDOW_MIN: Duration = Duration::from_secs(1);
    /// Longest window: so long a user is remembered.
    pub const WINDOW_MAX: Duration = DELAY_MAX;
}

impl FromStr for Cap {
    type Err = CapError;

    fn from_str(text: &str) -> Result<Self, CapError> {
        let (n, window) = text.split_once('/').ok_or(CapError::Form)?;
        let (n, window) = (n.trim(), window.trim());
        if n.is_empty() || !n.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(CapError::Form);
        }
        let n = n.parse().ok().filter(|n| (1..=Self::N_MAX).contains(n)).ok_or(CapError::Number)?;
        let window = match window {
            "minute" => Duration::from_secs(60),
            "hour" => Duration::from_secs(3_600),
            "day" => Duration::from_secs(86_400),
            "week" => Duration::from_secs(7 * 86_400),
            window => humantime::parse_duration(window).map_err(|_| CapError::Form)?,
        };
        if !(Self::WINDOW_MIN..=Self::WINDOW_MAX).contains(&window) {
            return Err(CapError::Window);
        }
        Ok(Self { n, window })
    }
}

/// How many notifications a user gets, at most.
///
/// Those of a bot count every type together; those of a type count that type by itself, beside them.
/// A type without any is not counted at all.
#[derive(Debug, Clone, Default)]
pub struct Caps {
    /// Of every bot.
    pub all: Vec<Cap>,
    /// Of bots whose ids match, instead; the first that matches.
    pub by_bot: Vec<(Glob, Vec<Cap>)>,
    /// Of types.
    pub by_kind: Vec<(String, Vec<Cap>)>,
}

impl Caps {
    /// Those of a bot.
    #[must_use]
    pub fn of_bot(&self, bot: &BotId) -> &[Cap] {
        let named = self.by_bot.iter().find(|(glob, _)| glob.matches(bot.as_str()));
        named.map_or(&self.all, |(_, caps)| caps)
    }

    /// Those of a type beside those of its bot; `None` when it has none of its own.
    #[must_use]
    pub fn of_kind(&self, kind: &str) -> Option<&[Cap]> {
        self.by_kind.iter().find(|(name, _)| name == kind).map(|(_, caps)| &**caps)
    }
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
mod tests {
    use super::*;

    #[test]
    fn an_id_reads_back_and_has_one_name_only() {
        let shards = ShardCount::new(16).unwrap();
        for shard in shards.shards() {
            let id = NotificationId::new(shard);
            let text = id.to_string();
            assert_eq!(text.parse(), Ok(id));
            assert_eq!(id.shard(shards), Some(shard));
            for other in [text.to_uppercase(), format!("0{text}"), format!("+{text}")] {
                assert!(other == text || other.parse::<NotificationId>().is_err(), "{other}");
            }
        }
        let beyond = format!("16.{}", Uuid::now_v7().simple()).parse::<NotificationId>().unwrap();
        assert_eq!(beyond.shard(shards), None);
        for text in ["", "3", "3.", ".x", "3.x", "-1.0192f1b0c1d27c3e8f00112233445566"] {
            assert!(text.parse::<NotificationId>().is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_beyond_a_bound_is_refused_by_the_name_callers_know() {
        let new = NewNotification {
            bot: BotId::parse("b").unwrap(),
            uid: "u".repeat(UID_MAX_BYTES),
            kind: "k".repeat(KIND_MAX_BYTES),
            when: When::After(DELAY_MAX),
            expires_in: DELAY_MAX,
            waits: true,
            url: "u".repeat(URL_MAX_BYTES),
            method: "GET".to_owned(),
            body: "\n".repeat(BODY_MAX_BYTES),
            recheck: String::new(),
            headers: "h".repeat(KIND_MAX_BYTES),
            key: Some(("k".repeat(KEY_MAX_BYTES), Duplicates::Ignore)),
        };
        let now = Duration::from_secs(1_800_000_000);
        assert_eq!(new.check(now), Ok(()));
        let key = |text: String| Some((text, Duplicates::Ignore));
        let more = |text: &str| format!("{text}x");
        let late = DELAY_MAX + Duration::from_millis(1);
        for (parameter, wrong) in [
            ("uid", NewNotification { uid: more(&new.uid), ..new.clone() }),
            ("uid", NewNotification { uid: String::new(), ..new.clone() }),
            ("uid", NewNotification { uid: "a\nb".to_owned(), ..new.clone() }),
            ("type", NewNotification { kind: more(&new.kind), ..new.clone() }),
            ("type", NewNotification { kind: String::new(), ..new.clone() }),
            ("delay", NewNotification { when: When::After(late), ..new.clone() }),
            ("at", NewNotification { when: When::At(now + late), ..new.clone() }),
            ("expires_in", NewNotification { expires_in: late, ..new.clone() }),
            ("expires_in", NewNotification { expires_in: Duration::ZERO, ..new.clone() }),
            ("url", NewNotification { url: more(&new.url), ..new.clone() }),
            ("url", NewNotification { url: String::new(), ..new.clone() }),
            ("recheck_url", NewNotification { recheck: more(&new.url), ..new.clone() }),
            ("method", NewNotification { method: String::new(), ..new.clone() }),
            ("headers_from", NewNotification { headers: more(&new.headers), ..new.clone() }),
            ("body", NewNotification { body: more(&new.body), ..new.clone() }),
            ("key", NewNotification { key: key("k".repeat(KEY_MAX_BYTES + 1)), ..new.clone() }),
            ("key", NewNotification { key: key(String::new()), ..new.clone() }),
        ] {
            let error = wrong.check(now).unwrap_err();
            assert_eq!(error.parameter, parameter, "{error}");
        }
    }

    #[test]
    fn a_cap_is_a_number_in_a_time() {
        let cap = |n, seconds| Ok(Cap { n, window: Duration::from_secs(seconds) });
        for (text, expected) in [
            ("10/day", cap(10, 86_400)),
            ("3/1h", cap(3, 3_600)),
            (" 100 / 7d ", cap(100, 604_800)),
            ("1/minute", cap(1, 60)),
            ("5/week", cap(5, 604_800)),
            ("2/1h 30m", cap(2, 5_400)),
            ("1000/366d", cap(1_000, 31_622_400)),
            ("0/day", Err(CapError::Number)),
            ("1001/day", Err(CapError::Number)),
            ("99999999999/day", Err(CapError::Number)),
            ("1/999ms", Err(CapError::Window)),
            ("1/367d", Err(CapError::Window)),
            ("10", Err(CapError::Form)),
            ("/day", Err(CapError::Form)),
            ("+1/day", Err(CapError::Form)),
            ("10/", Err(CapError::Form)),
            ("10/fortnight", Err(CapError::Form)),
            ("ten/day", Err(CapError::Form)),
        ] {
            assert_eq!(text.parse(), expected, "{text}");
        }
    }

    #[test]
    fn the_first_pattern_that_matches_a_bot_decides_its_caps() {
        let cap = |text: &str| text.parse::<Cap>().unwrap();
        let glob = |text: &str| Glob::new(text);
        let caps = Caps {
            all: vec![cap("1/day")],
            by_bot: vec![(glob("shop-7"), vec![cap("2/day")]), (glob("shop-*"), Vec::new())],
            by_kind: vec![("promo".to_owned(), vec![cap("3/day")])],
        };
        let of = |bot: &str| caps.of_bot(&BotId::parse(bot).unwrap()).to_vec();
        assert_eq!(of("other"), [cap("1/day")]);
        assert_eq!(of("shop-7"), [cap("2/day")]);
        assert_eq!(of("shop-8"), []);
        assert_eq!(caps.of_kind("promo"), Some(&[cap("3/day")][..]));
        assert_eq!(caps.of_kind("other"), None);
    }

    #[test]
    fn lateness_counts_in_the_step_that_is_not_below_it() {
        for (late_us, step) in [
            (0, 1),
            (1_000, 1),
            (1_001, 2),
            (20_000, 20),
            (20_001, 30),
            (86_400_000_000, 86_400_000),
            (u64::MAX, 86_400_000),
        ] {
            assert_eq!(late_step(Duration::from_micros(late_us)), step, "{late_us} us");
        }
        assert!(LATE_STEPS.is_sorted());
    }

    #[test]
    fn times_are_rounded_up() {
        let parts = |nanos| When::After(Duration::from_nanos(nanos)).parts();
        assert_eq!((parts(0), parts(1), parts(1_000_000)), ((0, 0), (0, 1), (0, 1)));
        assert_eq!(parts(1_000_001), (0, 2));
        assert_eq!(When::At(Duration::ZERO).parts(), (1, 0));
        assert_eq!(When::At(Duration::from_micros(1_500)).parts(), (2, 0));
    }
}
