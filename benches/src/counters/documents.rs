//! The documents in MongoDB. They are written before the service runs, and read afterwards.

use fairlane::counters::store::{DAILY, TOTALS};
use futures_util::TryStreamExt as _;
use jiff::civil::Date;
use mongodb::bson::{Bson, Document, doc};
use mongodb::{Collection, Database};

use super::exact::Found;
use super::plan::{Ads, Place, ad_name, bot_name};
use crate::error::BenchError;

/// Number of views of each ad that is in MongoDB before the run.
pub(super) const STORED: u64 = 7;
/// Separates the parts of an id.
const UNIT: char = '\u{1f}';
/// Number of documents per write.
const BATCH: usize = 5_000;

/// Stores the ads that should be only in MongoDB, as if they had been viewed on `day`.
pub(super) async fn store(database: &Database, ads: Ads, day: Date) -> Result<(), BenchError> {
    let (totals, daily) = collections(database);
    let stored: Vec<usize> = (0..ads.count).filter(|ad| ads.place(*ad) == Place::Stored).collect();
    let month = day.strftime("%Y-%m").to_string();
    let views = i64::try_from(STORED).unwrap_or(i64::MAX);
    for ads_of_batch in stored.chunks(BATCH) {
        let documents = ads_of_batch.iter().map(|ad| {
            let (bot, ad) = (bot_name(ads.bot(*ad)), ad_name(*ad));
            doc! { "_id": format!("{bot}{UNIT}{ad}"), "bot": bot, "ad": ad, "total": views, "s": 0_i64 }
        });
        totals.insert_many(documents).await.map_err(BenchError::Documents)?;
        let documents = ads_of_batch.iter().map(|ad| {
            let (bot, ad) = (bot_name(ads.bot(*ad)), ad_name(*ad));
            let days: Vec<i64> =
                (1..=31).map(|number| if number == day.day() { views } else { 0 }).collect();
            let id = format!("{bot}{UNIT}{ad}{UNIT}{month}");
            doc! { "_id": id, "bot": bot, "ad": ad, "month": &month, "days": days, "s": 0_i64 }
        });
        daily.insert_many(documents).await.map_err(BenchError::Documents)?;
    }
    Ok(())
}

/// Reads the stored figures of each ad. Returns the number of documents of unexpected ads.
pub(super) async fn read(
    database: &Database,
    ads: Ads,
    found: &mut [Found],
) -> Result<u64, BenchError> {
    let (totals, daily) = collections(database);
    let mut strange = 0;
    for (collection, field) in [(totals, "total"), (daily, "days")] {
        let all = collection.find(doc! {}).projection(doc! { "bot": 1, "ad": 1, field: 1 });
        let mut all = all.batch_size(10_000).await.map_err(BenchError::Documents)?;
        while let Some(document) = all.try_next().await.map_err(BenchError::Documents)? {
            let number = number(&document, ads).filter(|ad| *ad < found.len());
            let Some(found) = number.map(|ad| &mut found[ad]) else {
                strange += 1;
                continue;
            };
            match document.get(field) {
                Some(Bson::Array(days)) => found.days += days.iter().map(count).sum::<u64>(),
                Some(total) => found.total += count(total),
                None => {}
            }
        }
    }
    Ok(strange)
}

fn collections(database: &Database) -> (Collection<Document>, Collection<Document>) {
    (database.collection(TOTALS), database.collection(DAILY))
}

/// The number of the ad, if it belongs to its bot.
fn number(document: &Document, ads: Ads) -> Option<usize> {
    let ad: usize = document.get_str("ad").ok()?.strip_prefix("ad-")?.parse().ok()?;
    (document.get_str("bot").ok()? == bot_name(ads.bot(ad))).then_some(ad)
}

/// A number of any type. A value that is not a number, or is negative, counts as wrong.
fn count(value: &Bson) -> u64 {
    let number = match value {
        Bson::Int32(number) => Some(i64::from(*number)),
        Bson::Int64(number) => Some(*number),
        #[expect(clippy::cast_possible_truncation, reason = "whole and far below 2^53")]
        Bson::Double(number) if number.fract() == 0.0 => Some(*number as i64),
        _ => None,
    };
    number.and_then(|number| u64::try_from(number).ok()).unwrap_or(1 << 40)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ad_is_known_by_its_name_under_its_own_bot_only() {
        let ads = Ads::new(10, 3, 1.0);
        assert_eq!(number(&doc! { "bot": "bot-1", "ad": "ad-4" }, ads), Some(4));
        assert_eq!(number(&doc! { "bot": "bot-0", "ad": "ad-4" }, ads), None);
        assert_eq!(number(&doc! { "bot": "bot-0", "ad": "else" }, ads), None);
    }

    #[test]
    fn numbers_of_every_type_are_read_and_nothing_else_passes_for_one() {
        for (value, expected) in
            [(Bson::Int32(3), 3), (Bson::Int64(4), 4), (Bson::Double(5.0), 5), (Bson::Int32(0), 0)]
        {
            assert_eq!(count(&value), expected);
        }
        for wrong in [Bson::Int32(-1), Bson::Double(0.5), Bson::Null] {
            assert!(count(&wrong) > 1_000_000_000_000, "{wrong}");
        }
    }
}
