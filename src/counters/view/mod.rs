//! Views of ads: the ids, and the meaning of the records of the counters pipeline.
//!
//! A record of that pipeline is an event like any other. Its effect on the counters is decided when
//! it enters, and stored in the extension attribute `counter`. No producer can set this stamp,
//! because every entry point overwrites it.
//!
//! | stamp | effect of the record |
//! |---|---|
//! | `2026-11-20` | adds its `n` views to its ad on that day |
//! | `replace` | replaces everything counted before by its total and days |
//! | `forget` | replaces everything by zeros, and deletes the documents |
//! | none | no effect: it was not a valid view when it arrived, and becomes a dead letter |

mod import;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp, ToSpan as _};
use serde::{Deserialize, Serialize};

pub use self::import::{BAD_MAX, BadLine, Line, lines};
use crate::clock::SharedClock;
use crate::event::{Event, EventBuilder};
use crate::id::BotId;
use crate::ledger::{Account, Change};

/// Maximum length of an ad's id, in bytes.
pub const AD_ID_MAX_BYTES: usize = 128;
/// Maximum number of views in one record.
pub const VIEWS_MAX: u64 = 1_000;
/// The largest total that can be set. It is far below 2^53, so a double represents it exactly.
pub const TOTAL_MAX: u64 = 1_000_000_000_000_000;
/// Maximum number of days in one replacement: 24 months.
pub const DAYS_MAX: usize = 24 * 31;
/// The first day that a replacement may have. Each month of an ad is a document, and every later
/// replacement writes all of them. So no tenant may create months of any year.
pub const FIRST_DAY: Date = Date::constant(2000, 1, 1);
/// The type of a view that came over HTTP.
pub const VIEWED: &str = "ad.viewed";

const STAMP: &str = "counter";
const REPLACE: &str = "replace";
const FORGET: &str = "forget";
/// The stamp of a replacement that must have no effect any more: it became a dead letter.
const VOID: &str = "void";

/// The id of a counted ad: 1 to 128 bytes of UTF-8 without control characters. All other characters
/// are allowed.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdId(Arc<str>);

/// Why an event is not a view, or not a record of the counters pipeline.
#[derive(Debug, thiserror::Error)]
pub enum ViewError {
    /// The id of the ad is empty.
    #[error("the id of the ad is empty")]
    Empty,
    /// The id of the ad is too long.
    #[error("the id of the ad has {bytes} bytes; at most {AD_ID_MAX_BYTES} are allowed")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// The id of the ad contains a control character.
    #[error("the id of the ad holds {found:?} at byte {at}; control characters are not allowed")]
    Control {
        /// The character.
        found: char,
        /// Its position.
        at: usize,
    },
    /// The number of views in one event is out of bounds.
    #[error("n is {n}; write a whole number from 1 to {VIEWS_MAX}")]
    Views {
        /// The number.
        n: i64,
    },
    /// `data` has another structure.
    #[error("data is not {{\"ad\": …, \"n\": …}}: {0}")]
    Data(#[source] serde_json::Error),
    /// The record has no stamp that this version knows.
    #[error("it was not counted when it arrived")]
    Stamp,
}

impl AdId {
    /// Checks the bounds and takes a copy.
    ///
    /// # Errors
    /// If the text is empty, longer than [`AD_ID_MAX_BYTES`] or contains a control character.
    pub fn parse(text: &str) -> Result<Self, ViewError> {
        match text.len() {
            0 => return Err(ViewError::Empty),
            bytes if bytes > AD_ID_MAX_BYTES => return Err(ViewError::TooLong { bytes }),
            _ => {}
        }
        match text.char_indices().find(|(_, c)| c.is_control()) {
            Some((at, found)) => Err(ViewError::Control { found, at }),
            None => Ok(Self(text.into())),
        }
    }

    /// The text of the id.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Its account in the ledger.
    #[must_use]
    pub fn account(&self) -> Account {
        Arc::clone(&self.0).into()
    }
}

impl fmt::Display for AdId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for AdId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

impl<'de> Deserialize<'de> for AdId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Parsed;

        // Some deserializers report the position only for errors of the visitor.
        impl serde::de::Visitor<'_> for Parsed {
            type Value = AdId;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the id of an ad")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<AdId, E> {
                AdId::parse(text).map_err(E::custom)
            }
        }

        deserializer.deserialize_str(Parsed)
    }
}

impl Serialize for AdId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// The effect of a record of the counters pipeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The ad.
    pub ad: AdId,
    /// The effect.
    pub deed: Deed,
}

/// A change of the counters of one ad.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Deed {
    /// Adds views.
    Add {
        /// 1 to [`VIEWS_MAX`].
        n: u64,
        /// The day on which they count.
        day: Date,
    },
    /// Replaces everything counted before.
    Replace(Replacement),
}

impl Deed {
    /// The change as a ledger entry.
    #[must_use]
    pub fn change(&self) -> Change {
        match self {
            Self::Add { n, .. } => Change::Add(*n),
            Self::Replace(_) => Change::Replace,
        }
    }

    /// The number of months that a replacement sets; 0 for views.
    pub(crate) fn months(&self) -> usize {
        let Self::Replace(Replacement { days, .. }) = self else { return 0 };
        // The days are in order.
        let months: Vec<_> = days.keys().map(|day| (day.year(), day.month())).collect();
        months.chunk_by(|one, next| one == next).count()
    }
}

/// Replaces everything that was counted for an ad before.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Replacement {
    /// The total, up to [`TOTAL_MAX`].
    pub total: u64,
    /// The days that are not 0, at most [`DAYS_MAX`]; their sum is not above the total.
    pub days: BTreeMap<Date, u64>,
    /// Deletes the documents. Then total and days are 0.
    pub forget: bool,
}

impl Replacement {
    /// Checks the bounds. `within`: the days that it may have ([`Calendar::days`]).
    ///
    /// # Errors
    /// The field that is out of bounds, and the problem.
    pub fn checked(
        total: u64,
        days: BTreeMap<Day, u64>,
        within: &RangeInclusive<Date>,
    ) -> Result<Self, (&'static str, String)> {
        if total > TOTAL_MAX {
            let detail = format!("it is {total}; write a whole number from 0 to {TOTAL_MAX}");
            return Err(("total", detail));
        }
        if days.len() > DAYS_MAX {
            let detail = format!("there are {}; at most {DAYS_MAX} are allowed", days.len());
            return Err(("days", detail));
        }
        if let Some(Day(day)) = days.keys().find(|day| !within.contains(&day.0)) {
            let (first, last) = (within.start(), within.end());
            let detail = format!(
                "they have {day}; write days from {first} to {last}, the day after today (counters.time_zone)"
            );
            return Err(("days", detail));
        }
        let sum = days.values().fold(0, |sum: u64, views| sum.saturating_add(*views));
        if sum > total {
            let detail = format!("they have {sum} views, above the total ({total}); raise that");
            return Err(("days", detail));
        }
        let viewed = days.into_iter().filter(|(_, views)| *views > 0);
        let days = viewed.map(|(Day(day), views)| (day, views)).collect();
        Ok(Self { total, days, forget: false })
    }
}

/// A day in the only accepted form: `2026-11-01`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Day(pub Date);

impl Day {
    /// Reads `2026-11-01`; from year 1 on.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let shape = |(at, byte): (usize, u8)| match at {
            4 | 7 => byte == b'-',
            _ => byte.is_ascii_digit(),
        };
        let shaped = text.len() == 10 && text.bytes().enumerate().all(shape);
        text.parse().ok().filter(|day: &Date| shaped && day.year() > 0).map(Self)
    }
}

impl<'de> Deserialize<'de> for Day {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl serde::de::Visitor<'_> for Visitor {
            type Value = Day;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a day such as \"2026-11-01\"")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Day, E> {
                let refused = || E::custom("it is no day; write YYYY-MM-DD, such as 2026-11-01");
                Day::parse(text).ok_or_else(refused)
            }
        }

        deserializer.deserialize_str(Visitor)
    }
}

#[derive(Deserialize)]
struct Viewed {
    ad: AdId,
    #[serde(default = "one")]
    n: i64,
}

#[derive(Serialize, Deserialize)]
struct Replaced {
    ad: AdId,
    total: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    days: BTreeMap<Date, u64>,
}

fn one() -> i64 {
    1
}

/// Checks a number of views.
///
/// # Errors
/// If it is not 1 to [`VIEWS_MAX`].
pub fn views(n: i64) -> Result<u64, ViewError> {
    u64::try_from(n).ok().filter(|n| (1..=VIEWS_MAX).contains(n)).ok_or(ViewError::Views { n })
}

/// The viewed ad and the number of views in an event: `{"ad": "x", "n": 2}`. Without `n`, the
/// number is 1.
///
/// # Errors
/// If its data has another structure.
pub fn viewed(event: &Event) -> Result<(AdId, u64), ViewError> {
    let Viewed { ad, n } = event.data_as().map_err(ViewError::Data)?;
    Ok((ad, views(n)?))
}

/// The event for `n` views that were reported without an event.
#[must_use]
pub fn view(bot: &BotId, ad: &AdId, n: u64) -> Event {
    // Views wait in the memory of Redis while MongoDB is unavailable. So the id is short, and
    // unique only within its bot.
    let id = base36(rand::random());
    let data = if n == 1 {
        serde_json::json!({ "ad": ad })
    } else {
        serde_json::json!({ "ad": ad, "n": n })
    };
    built(Event::builder(VIEWED, bot).id(id), &data)
}

/// The event that replaces the counters of an ad.
#[must_use]
pub fn replacement(bot: &BotId, ad: &AdId, with: &Replacement) -> Event {
    let data = Replaced { ad: ad.clone(), total: with.total, days: with.days.clone() };
    let kind = if with.forget { "counter.forgotten" } else { "counter.replaced" };
    let stamp = if with.forget { FORGET } else { REPLACE };
    stamped(built(Event::builder(kind, bot), &data), Some(stamp))
}

fn built(event: EventBuilder, data: &impl Serialize) -> Event {
    let event = event.source("http").data(data).expect("ids, numbers and days are values of JSON");
    event.build().expect("a bot id, an ad id and a word are within the bounds of attributes")
}

/// Determines the day on which views count.
#[derive(Clone)]
pub struct Calendar {
    clock: SharedClock,
    zone: TimeZone,
}

impl Calendar {
    /// The days of the time zone `zone`, by `clock`.
    #[must_use]
    pub fn new(clock: SharedClock, zone: TimeZone) -> Self {
        Self { clock, zone }
    }

    /// The current day.
    #[must_use]
    pub fn today(&self) -> Date {
        Timestamp::from_duration(self.now()).unwrap_or_default().to_zoned(self.zone.clone()).date()
    }

    /// The days that a replacement may have: from [`FIRST_DAY`] to the day after today, because the
    /// day of another system may already have begun.
    #[must_use]
    pub fn days(&self) -> RangeInclusive<Date> {
        FIRST_DAY..=self.today().saturating_add(1.day())
    }

    fn now(&self) -> SignedDuration {
        SignedDuration::try_from(self.clock.now()).unwrap_or_default()
    }
}

impl fmt::Debug for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calendar").field("zone", &self.zone).finish_non_exhaustive()
    }
}

/// The record of an incoming event, and its views; `None`: it is not a view, or it expired before
/// it was counted.
#[must_use]
pub fn arrived(event: &Event, calendar: &Calendar) -> (Event, Option<(AdId, u64)>) {
    let expired = event.expirytime().is_some_and(|at| at.as_duration() <= calendar.now());
    match viewed(event) {
        Ok(counts) if !expired => (on_day(event.clone(), Some(calendar.today())), Some(counts)),
        _ => (on_day(event.clone(), None), None),
    }
}

/// The record of a dead letter that is redriven, and its views. Views that arrived in time keep the
/// day of their arrival. Their stamp is Fairlane's own, because [`arrived`] overwrites all others. A
/// replacement is not repeated: what it replaced may have changed since. Other events are as if
/// they arrived now.
#[must_use]
pub fn returned(event: &Event, calendar: &Calendar) -> (Event, Option<(AdId, u64)>) {
    match read(event) {
        Ok(Record { ad, deed: Deed::Add { n, .. } }) => (event.clone(), Some((ad, n))),
        Ok(Record { deed: Deed::Replace(_), .. }) => (stamped(event.clone(), Some(VOID)), None),
        Err(_) if has_stamp(event, VOID) => (event.clone(), None),
        Err(_) => arrived(event, calendar),
    }
}

/// Stamps the event with the `day` on which it counts; with `None`, as not counted.
#[must_use]
pub fn on_day(event: Event, day: Option<Date>) -> Event {
    match day {
        // Its expiry was checked when it arrived.
        Some(day) => stamped(event, Some(&day.to_string())).without_expirytime(),
        None => stamped(event, None),
    }
}

fn stamped(event: Event, stamp: Option<&str>) -> Event {
    event.with_extension(STAMP, stamp.map(Into::into))
}

fn has_stamp(event: &Event, stamp: &str) -> bool {
    event.extension(STAMP).and_then(serde_json::Value::as_str) == Some(stamp)
}

/// The effect of a record of the counters pipeline.
///
/// # Errors
/// If the event was not counted on arrival: [`ViewError::Stamp`], or the reason why it could not be
/// counted.
pub fn read(event: &Event) -> Result<Record, ViewError> {
    match event.extension(STAMP).and_then(serde_json::Value::as_str) {
        None => {
            viewed(event)?;
            Err(ViewError::Stamp)
        }
        Some(kind @ (REPLACE | FORGET)) => {
            let Replaced { ad, total, days } = event.data_as().map_err(ViewError::Data)?;
            let deed = Deed::Replace(Replacement { total, days, forget: kind == FORGET });
            Ok(Record { ad, deed })
        }
        Some(day) => {
            let day: Date = day.parse().map_err(|_| ViewError::Stamp)?;
            let (ad, n) = viewed(event)?;
            Ok(Record { ad, deed: Deed::Add { n, day } })
        }
    }
}

fn base36(mut number: u64) -> String {
    let mut digits = Vec::with_capacity(13);
    loop {
        let digit = u32::try_from(number % 36).unwrap_or_default();
        digits.push(char::from_digit(digit, 36).unwrap_or('0'));
        number /= 36;
        if number == 0 {
            return digits.into_iter().collect();
        }
    }
}

#[cfg(test)]
mod tests;
