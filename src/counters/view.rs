//! Views of ads: the ids, and what the records of the counters pipeline say.
//!
//! A record of that pipeline is an event like any other. What it does to the counters was decided
//! where it entered, and is written on it as the extension attribute `counter`: a stamp that no
//! producer can set, since every entrance overwrites it.
//!
//! | stamp | what the record does |
//! |---|---|
//! | `2026-11-20` | adds its `n` views to its ad on that day |
//! | `replace` | puts its total and days in the place of all that was counted before it |
//! | `forget` | the same with nothing, and the documents go |
//! | none | nothing: it could not be read as a view when it arrived, and becomes a dead letter |

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::clock::SharedClock;
use crate::event::{Event, EventBuilder};
use crate::id::BotId;
use crate::ledger::{Account, Change};

/// Longest id of an ad, in bytes.
pub const AD_ID_MAX_BYTES: usize = 128;
/// Most views of one record.
pub const VIEWS_MAX: u64 = 1_000;
/// The largest total that can be set: far from where a double loses digits.
pub const TOTAL_MAX: u64 = 1_000_000_000_000_000;
/// Most days that can be set at once: 24 months.
pub const DAYS_MAX: usize = 24 * 31;
/// The type of a view that came by HTTP.
pub const VIEWED: &str = "ad.viewed";

const STAMP: &str = "counter";
const REPLACE: &str = "replace";
const FORGET: &str = "forget";

/// What is counted: 1 to 128 bytes of UTF-8 without control characters. Everything else is legal.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdId(Arc<str>);

/// Why something is no view, or no record of one.
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
    /// The id of the ad holds a control character.
    #[error("the id of the ad holds {found:?} at byte {at}; control characters are not allowed")]
    Control {
        /// The character.
        found: char,
        /// Where.
        at: usize,
    },
    /// So many views are not counted at once.
    #[error("n is {n}; write a whole number from 1 to {VIEWS_MAX}")]
    Views {
        /// How many.
        n: i64,
    },
    /// `data` has another shape.
    #[error("data is not {{\"ad\": …, \"n\": …}}: {0}")]
    Data(#[source] serde_json::Error),
    /// The record carries no stamp that this version knows.
    #[error("it was not counted when it arrived")]
    Stamp,
}

impl AdId {
    /// Checks the bounds and takes a copy.
    ///
    /// # Errors
    /// When the text is empty, longer than [`AD_ID_MAX_BYTES`] or holds a control character.
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

        // Some deserializers tell where the text is only to what fails in the visitor.
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

/// What a record of the counters pipeline does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// To which ad.
    pub ad: AdId,
    /// What.
    pub deed: Deed,
}

/// What is done to the counters of one ad.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Deed {
    /// So many views more.
    Add {
        /// 1 to [`VIEWS_MAX`].
        n: u64,
        /// On which day.
        day: Date,
    },
    /// All that was counted before is replaced.
    Replace(Replacement),
}

impl Deed {
    /// What the ledger has of it.
    #[must_use]
    pub fn change(&self) -> Change {
        match self {
            Self::Add { n, .. } => Change::Add(*n),
            Self::Replace(_) => Change::Replace,
        }
    }
}

/// What replaces all that was counted of an ad before.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Replacement {
    /// The total, up to [`TOTAL_MAX`].
    pub total: u64,
    /// The days that are not 0, at most [`DAYS_MAX`]; their sum is not above the total.
    pub days: BTreeMap<Date, u64>,
    /// The documents go; total and days are 0 then.
    pub forget: bool,
}

impl Replacement {
    /// Checks the bounds.
    ///
    /// # Errors
    /// The field that is out of them, and why.
    pub fn checked(total: u64, days: BTreeMap<Day, u64>) -> Result<Self, (&'static str, String)> {
        if total > TOTAL_MAX {
            let detail = format!("it is {total}; write a whole number from 0 to {TOTAL_MAX}");
            return Err(("total", detail));
        }
        if days.len() > DAYS_MAX {
            let detail = format!("there are {}; at most {DAYS_MAX} are allowed", days.len());
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

/// A day in the one form in which it is taken: `2026-11-01`.
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

/// A line of an import: what is counted of an ad is replaced by it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// Its number, from 1.
    pub number: u64,
    /// The line that it follows; empty ones aside, the one before.
    pub before: u64,
    /// The last of the empty lines behind it; its own number without any.
    pub upto: u64,
    /// The ad.
    pub ad: AdId,
    /// What it gets.
    pub with: Replacement,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    ad: AdId,
    total: u64,
    #[serde(default)]
    days: BTreeMap<Day, u64>,
}

/// Reads the lines of an import, the first of which has this number: each like
/// `{"ad": "x", "total": 9, "days": {"2026-11-01": 3}}`, or empty.
///
/// # Errors
/// The numbers of those that say something else, and what is wrong with them.
pub fn lines(text: &[u8], first: u64) -> Result<Vec<Line>, Vec<(u64, String)>> {
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    let (mut lines, mut bad) = (Vec::<Line>::new(), Vec::new());
    let mut before = first.saturating_sub(1);
    for (number, text) in (first..).zip(text.split(|byte| *byte == b'\n')) {
        let text = text.trim_ascii();
        match row(text) {
            _ if text.is_empty() => {}
            Ok((ad, with)) => lines.push(Line { number, before, upto: number, ad, with }),
            Err(reason) => bad.push((number, reason)),
        }
        if let Some(last) = lines.last_mut() {
            last.upto = number;
            before = number;
        }
    }
    if bad.is_empty() { Ok(lines) } else { Err(bad) }
}

fn row(text: &[u8]) -> Result<(AdId, Replacement), String> {
    let row: Row = serde_json::from_slice(text)
        // The parser was given one line and calls it the first.
        .map_err(|error| error.to_string().replace(" at line 1 column ", " at column "))?;
    let with = Replacement::checked(row.total, row.days);
    Ok((row.ad, with.map_err(|(field, detail)| format!("{field}: {detail}"))?))
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
/// When it is not 1 to [`VIEWS_MAX`].
pub fn views(n: i64) -> Result<u64, ViewError> {
    u64::try_from(n).ok().filter(|n| (1..=VIEWS_MAX).contains(n)).ok_or(ViewError::Views { n })
}

/// Which ad an event says was viewed, and how often: `{"ad": "x", "n": 2}`, where `n` is 1 if
/// absent.
///
/// # Errors
/// When its data says nothing of that kind.
pub fn viewed(event: &Event) -> Result<(AdId, u64), ViewError> {
    let Viewed { ad, n } = event.data_as().map_err(ViewError::Data)?;
    Ok((ad, views(n)?))
}

/// The event of `n` views that came without one.
#[must_use]
pub fn view(bot: &BotId, ad: &AdId, n: u64) -> Event {
    // Views wait in memory while MongoDB is unavailable, so the id is short: unique among those of a bot.
    let id = base36(rand::random());
    let data = if n == 1 {
        serde_json::json!({ "ad": ad })
    } else {
        serde_json::json!({ "ad": ad, "n": n })
    };
    built(Event::builder(VIEWED, bot).id(id), &data)
}

/// The event that replaces what was counted of an ad.
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

/// Tells on which day something is counted.
#[derive(Clone)]
pub struct Calendar {
    clock: SharedClock,
    zone: TimeZone,
}

impl Calendar {
    /// Days of `zone`, by `clock`.
    #[must_use]
    pub fn new(clock: SharedClock, zone: TimeZone) -> Self {
        Self { clock, zone }
    }

    /// The day it is now.
    #[must_use]
    pub fn today(&self) -> Date {
        Timestamp::from_duration(self.now()).unwrap_or_default().to_zoned(self.zone.clone()).date()
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

/// The record of an event that came by itself, and what it counts: nothing when it is no view, or
/// its time had passed before it was counted.
#[must_use]
pub fn arrived(event: &Event, calendar: &Calendar) -> (Event, Option<(AdId, u64)>) {
    let expired = event.expirytime().is_some_and(|at| at.as_duration() <= calendar.now());
    match viewed(event) {
        Ok(counts) if !expired => (on_day(event.clone(), Some(calendar.today())), Some(counts)),
        _ => (on_day(event.clone(), None), None),
    }
}

/// Writes on the event that it is counted on `day`; `None`: that it is not.
#[must_use]
pub fn on_day(event: Event, day: Option<Date>) -> Event {
    match day {
        // Whether it has expired was asked when it arrived.
        Some(day) => stamped(event, Some(&day.to_string())).without_expirytime(),
        None => stamped(event, None),
    }
}

fn stamped(event: Event, stamp: Option<&str>) -> Event {
    event.with_extension(STAMP, stamp.map(Into::into))
}

/// What a record of the counters pipeline does.
///
/// # Errors
/// When it was not counted where it entered: [`ViewError::Stamp`] or why it could not be.
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
mod tests {
    use jiff::civil::date;

    use super::*;

    #[test]
    fn the_lines_of_an_import_follow_each_other_over_empty_ones() {
        let text = b"\n{\"ad\":\"a\",\"total\":9,\"days\":{\"2026-11-01\":3,\"2026-11-02\":0}}\r\n\n  \n{\"total\":0,\"ad\":\"b\"}\n";
        let read = lines(text, 11).unwrap();
        let places: Vec<_> =
            read.iter().map(|line| (line.before, line.number, line.upto)).collect();
        assert_eq!(places, [(10, 12, 14), (14, 15, 15)]);
        assert_eq!(read[0].ad.as_str(), "a");
        let days = [(date(2026, 11, 1), 3)].into();
        assert_eq!(read[0].with, Replacement { total: 9, days, forget: false });
        assert_eq!(read[1].with, Replacement::default());
        assert_eq!(lines(b"", 1), Ok(Vec::new()));
        assert_eq!(lines(b"\n\n", 1), Ok(Vec::new()));
    }

    #[test]
    fn every_bad_line_of_an_import_is_told_with_its_number() {
        let text = br#"{"ad":"a","total":1}
nonsense
{"ad":"","total":1}
{"ad":"b"}
{"ad":"b","total":-1}
{"ad":"b","total":1,"days":{"2026-11-01":2}}
{"ad":"b","total":1,"days":{"1.11.2026":1}}
{"ad":"b","total":1,"views":1}
{"ad":"b","total":1000000000000001}"#;
        let bad = lines(text, 1).unwrap_err();
        let parts = [
            "at column 2",
            "empty",
            "missing field `total`",
            "invalid value",
            "days: they have 2 views",
            "it is no day",
            "unknown field `views`",
            "total: it is 1000000000000001",
        ];
        assert_eq!(bad.len(), parts.len(), "{bad:?}");
        for ((number, reason), (expected, part)) in bad.iter().zip((2..).zip(parts)) {
            assert!(*number == expected && reason.contains(part), "{number}: {reason}");
        }
    }
}
