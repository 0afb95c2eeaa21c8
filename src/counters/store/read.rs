//! Reads the stored counters.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::ToSpan as _;
use jiff::civil::Date;
use mongodb::bson::{RawBsonRef, RawDocument, RawDocumentBuf, doc};
use mongodb::options::{FindOptions, ReadPreference, ReadPreferenceOptions, SelectionCriteria};

use super::statement::{self, Month};
use super::{DAILY, Stored, TOTALS};
use crate::counters::view::AdId;
use crate::id::{BotId, Sequence};
use crate::mongo::client::{ANSWER_TIMEOUT, Mongo, MongoError};
use crate::request_deadline;

/// Time limit of reading totals in the server. It is short because requests wait for it.
pub(super) const TOTALS_TIMEOUT: Duration = Duration::from_secs(2);
/// Number of documents per page of an export.
const PAGE: u32 = 1_000;
/// The server of an export is at most so far behind. The driver accepts no less.
const BEHIND_MAX: Duration = Duration::from_secs(90);

/// The totals found, by document id; `None` for a document without numbers.
pub(super) type Totals = HashMap<Box<str>, Option<Stored>>;

/// Reads totals by document id.
pub(super) async fn totals(
    mongo: Mongo,
    ids: Vec<Arc<str>>,
    within: Duration,
) -> Result<Totals, MongoError> {
    let options = FindOptions::builder()
        .projection(doc! { "total": 1, "s": 1 })
        .batch_size(batch(ids.len()))
        .selection_criteria(primary())
        .build();
    let ids: Vec<&str> = ids.iter().map(AsRef::as_ref).collect();
    let filter = doc! { "_id": { "$in": ids } };
    let found = mongo.find(TOTALS, filter, options, within).await?;
    let stored = |document: &RawDocumentBuf| {
        let total = number(document, "total")?;
        Some(Stored { total, sequence: Sequence::new(number(document, "s")?) })
    };
    let id = |document: &RawDocumentBuf| document.get_str("_id").ok().map(Into::into);
    Ok(found.iter().filter_map(|document| Some((id(document)?, stored(document)))).collect())
}

/// The views of ads on all days of the months from `from` to `to`, by the index of the ad and the
/// day. Months without a document are missing.
pub(super) async fn months(
    mongo: &Mongo,
    bot: &BotId,
    ads: &[AdId],
    from: Date,
    to: Date,
) -> Result<HashMap<(usize, Date), u64>, MongoError> {
    let firsts = || from.first_of_month().series(1.month()).take_while(move |first| *first <= to);
    let months: HashMap<String, (usize, Date)> = ads
        .iter()
        .enumerate()
        .flat_map(|(at, ad)| firsts().map(move |first| (at, ad, first)))
        .map(|(at, ad, first)| (statement::month_id(bot, ad, Month::of(first)), (at, first)))
        .collect();
    let options = FindOptions::builder()
        .projection(doc! { "days": 1 })
        .batch_size(batch(months.len()))
        .selection_criteria(primary())
        .build();
    let ids: Vec<&str> = months.keys().map(String::as_str).collect();
    let filter = doc! { "_id": { "$in": ids } };
    let found =
        mongo.find(DAILY, filter, options, request_deadline::at_most(ANSWER_TIMEOUT)).await?;
    let mut views = HashMap::new();
    for document in &found {
        let first = document.get_str("_id").ok().and_then(|id| months.get(id));
        let numbers = slots(document).zip(first);
        let (numbers, &(at, first)) =
            numbers.ok_or_else(|| mongo.not_understood("find", "numbers in days"))?;
        let days = days(first, first.last_of_month()).map(|day| (at, day));
        views.extend(days.zip(numbers));
    }
    Ok(views)
}

/// The days from `from` to `to`.
pub(super) fn days(from: Date, to: Date) -> impl Iterator<Item = Date> {
    from.series(1.day()).take_while(move |day| *day <= to)
}

/// The days of one bot's ads, one page at a time.
pub(super) struct Pages {
    mongo: Mongo,
    bot: BotId,
    day: Date,
    /// The ids of the remaining pages are above the first and below the second id.
    left: Option<(String, String)>,
}

impl Pages {
    pub(super) fn new(mongo: Mongo, bot: &BotId, day: Date) -> Self {
        Self { mongo, bot: bot.clone(), day, left: Some(statement::ids_of_bot(bot)) }
    }

    /// The ads of the next page that have views; `None` after the last page. Every page costs the
    /// same, even if few of its ads have views.
    pub(super) async fn next(&mut self) -> Result<Option<Vec<(AdId, u64)>>, MongoError> {
        let Some((after, before)) = self.left.take() else { return Ok(None) };
        let slot = i32::try_from(statement::slot(self.day)).unwrap_or(i32::MAX);
        let options = FindOptions::builder()
            .projection(doc! { "ad": 1, "n": { "$arrayElemAt": ["$days", slot] } })
            .sort(doc! { "_id": 1 })
            .limit(i64::from(PAGE))
            .batch_size(PAGE + 1)
            .selection_criteria(secondary())
            .build();
        let filter = doc! {
            "bot": self.bot.as_str(),
            "month": Month::of(self.day).to_string(),
            "_id": { "$gt": after, "$lt": &before },
        };
        let found = self
            .mongo
            .find(DAILY, filter, options, request_deadline::at_most(ANSWER_TIMEOUT))
            .await?;
        let mut page = Vec::with_capacity(found.len());
        for document in &found {
            let ad = document.get_str("ad").ok().and_then(|ad| AdId::parse(ad).ok());
            let entry = ad.zip(number(document, "n"));
            page.push(entry.ok_or_else(|| self.mongo.not_understood("find", "ad and number"))?);
        }
        if found.len() == PAGE as usize {
            let last = found.last().and_then(|document| document.get_str("_id").ok());
            let last =
                last.ok_or_else(|| self.mongo.not_understood("find", "ids that are texts"))?;
            self.left = Some((last.to_owned(), before));
        }
        page.retain(|(_, n)| *n > 0);
        Ok(Some(page))
    }
}

/// Reads from the primary, so that a process reads its own writes.
fn primary() -> SelectionCriteria {
    SelectionCriteria::ReadPreference(ReadPreference::Primary)
}

/// Reads from a secondary, if there is one that is not far behind.
fn secondary() -> SelectionCriteria {
    let options = ReadPreferenceOptions::builder().max_staleness(BEHIND_MAX).build();
    ReadPreference::SecondaryPreferred { options: Some(options) }.into()
}

/// The batch size for a number of documents. One more, so that all come in the first batch and the
/// server knows that there is no other.
fn batch(documents: usize) -> u32 {
    u32::try_from(documents + 1).unwrap_or(u32::MAX)
}

fn slots(document: &RawDocument) -> Option<Vec<u64>> {
    document.get_array("days").ok()?.into_iter().map(|value| whole(value.ok()?)).collect()
}

/// For [`crate::fuzzing`]: reads a document.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz(document: &RawDocument) {
    let _ = (number(document, "total"), number(document, "s"), slots(document));
}

/// A number; 0 if it is missing.
fn number(document: &RawDocument, key: &str) -> Option<u64> {
    document.get(key).ok()?.map_or(Some(0), whole)
}

/// Numbers that were edited by hand may have any type.
fn whole(value: RawBsonRef<'_>) -> Option<u64> {
    match value {
        RawBsonRef::Int64(number) => u64::try_from(number).ok(),
        RawBsonRef::Int32(number) => u64::try_from(number).ok(),
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "whole, and within the bounds of both types"
        )]
        RawBsonRef::Double(number) if number.fract() == 0.0 && (0.0..1e18).contains(&number) => {
            Some(number as u64)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use mongodb::bson::{Bson, rawdoc};

    use super::*;

    #[test]
    fn numbers_are_read_whatever_their_type_and_nothing_else_is() {
        for (value, expected) in [
            (Bson::Int64(7), Some(7)),
            (Bson::Int32(7), Some(7)),
            (Bson::Double(7.0), Some(7)),
            (Bson::Int64(-1), None),
            (Bson::Double(0.5), None),
            (Bson::Double(f64::NAN), None),
            (Bson::Double(1e300), None),
            (Bson::Null, None),
            (Bson::from("7"), None),
        ] {
            let document = RawDocumentBuf::try_from(&doc! { "n": &value }).unwrap();
            assert_eq!(number(&document, "n"), expected, "{value}");
        }
        assert_eq!(number(&rawdoc! {}, "n"), Some(0));
    }

    #[test]
    fn days_are_counted_to_the_last_one_of_the_calendar_and_backwards_there_are_none() {
        let day = |text: &str| text.parse::<Date>().unwrap();
        let found: Vec<_> = days(day("2024-02-28"), day("2024-03-01")).collect();
        assert_eq!(found, [day("2024-02-28"), day("2024-02-29"), day("2024-03-01")]);
        assert_eq!(days(day("9999-12-30"), Date::MAX).count(), 2);
        assert_eq!(days(day("2024-03-01"), day("2024-02-28")).count(), 0);
    }

    /// Documents as the first version wrote them. Every later version must read them.
    #[test]
    fn stored_totals_and_days_are_still_read() {
        let total = rawdoc! { "_id": "b\u{1f}ad", "total": 12_i64, "s": 7_i64 };
        assert_eq!((number(&total, "total"), number(&total, "s")), (Some(12), Some(7)));
        let month = rawdoc! {
            "_id": "b\u{1f}ad\u{1f}2026-02", "bot": "b", "ad": "ad", "month": "2026-02",
            "days": [0_i64, 5_i64, 7_i64], "s": 7_i64,
        };
        assert_eq!(slots(&month), Some(vec![0, 5, 7]));
    }
}
