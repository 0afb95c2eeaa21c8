//! The counters in MongoDB: totals, and days by month. However often and by whomever a change is
//! applied, each view counts once: every document carries the sequence of the last record that was
//! applied to it, and an update adds only what is above.
//!
//! | collection | document |
//! |---|---|
//! | `counters_totals` | `{_id: "<bot>\u{1f}<ad>", bot, ad, total, s}` |
//! | `counters_daily` | `{_id: "<bot>\u{1f}<ad>\u{1f}2026-11", bot, ad, month: "2026-11", days: [31 numbers], s}` |

use std::collections::HashMap;

use futures_util::Stream;
use jiff::civil::Date;

use super::mongo::{Mongo, MongoError};
use crate::id::{BotId, Sequence};
use crate::view::{AdId, Replacement};

/// The totals.
pub const TOTALS: &str = "counters_totals";
/// The days.
pub const DAILY: &str = "counters_daily";

/// What is stored of an ad.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stored {
    /// Its total.
    pub total: u64,
    /// The last record that was applied; 0 for none.
    pub sequence: Sequence,
}

/// What happens to one ad.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The ad.
    pub ad: AdId,
    /// What.
    pub effect: Effect,
}

/// What happens to an ad.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Views, in the order of the queue; at least one.
    Add(Vec<Added>),
    /// All that was counted before is replaced.
    Replace(Sequence, Replacement),
}

/// One record of views.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Added {
    /// Of the record.
    pub sequence: Sequence,
    /// Counted on this day.
    pub day: Date,
    /// How many.
    pub n: u64,
}

/// The counters of every bot. Cheap to clone.
#[derive(Debug, Clone)]
pub struct CounterStore {
    mongo: Mongo,
}

impl CounterStore {
    /// The counters in the database of `mongo`.
    #[must_use]
    pub fn new(mongo: Mongo) -> Self {
        Self { mongo }
    }

    /// Creates the indexes. May be repeated.
    ///
    /// # Errors
    /// When MongoDB does not answer or refuses.
    pub async fn prepare(&self) -> Result<(), MongoError> {
        unimplemented!("{:?}", self.mongo)
    }

    /// What is stored of these ads; those that are missing were never counted. Calls made at the
    /// same time share a question.
    ///
    /// # Errors
    /// When MongoDB does not answer in time or refuses.
    pub async fn totals(
        &self,
        bot: &BotId,
        ads: &[AdId],
    ) -> Result<HashMap<AdId, Stored>, MongoError> {
        unimplemented!("{bot} {ads:?}")
    }

    /// Applies the changes of a slice, in order for each ad, to both collections. Returns once a
    /// majority has both. Calls made at the same time share their writes.
    ///
    /// # Errors
    /// When MongoDB does not answer in time, refuses, or has no majority. What was applied stays
    /// so, and applying the same again changes nothing of that.
    pub async fn apply(&self, bot: &BotId, changes: Vec<Change>) -> Result<(), MongoError> {
        unimplemented!("{bot} {changes:?}")
    }

    /// Views per day, from `from` to `to`, days without any among them.
    ///
    /// # Errors
    /// When MongoDB does not answer in time or refuses.
    pub async fn daily(
        &self,
        bot: &BotId,
        ad: &AdId,
        from: Date,
        to: Date,
    ) -> Result<Vec<(Date, u64)>, MongoError> {
        unimplemented!("{bot} {ad} {from} {to}")
    }

    /// The views of one day, ads without any left out, in the order of their ids.
    ///
    /// # Errors
    /// When the first page cannot be read; the stream's items, when a later one cannot.
    pub async fn export(
        &self,
        bot: &BotId,
        day: Date,
    ) -> Result<
        impl Stream<Item = Result<(AdId, u64), MongoError>> + Send + Unpin + 'static,
        MongoError,
    > {
        if day.year() == 0 {
            return Ok(futures_util::stream::empty());
        }
        unimplemented!("{bot}")
    }
}
