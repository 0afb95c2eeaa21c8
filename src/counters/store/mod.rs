//! The counters in MongoDB: totals, and days grouped by month. Changes may be applied repeatedly
//! and by several processes. Every document contains the sequence of the last record applied to it,
//! and an update adds only later records.
//!
//! | collection | document |
//! |---|---|
//! | `counters_totals` | `{_id: "<bot>\u{1f}<ad>", bot, ad, total, s}` |
//! | `counters_daily` | `{_id: "<bot>\u{1f}<ad>\u{1f}2026-11", bot, ad, month: "2026-11", days: [31 numbers], s}` |
//!
//! A forgotten document stays for 7 days as zeros with `gone`, the time of the deletion. A late
//! write finds its `s` there and does not bring old views back.
//!
//! | file | content |
//! |---|---|
//! | `statement` | from changes to statements; why they may be repeated |
//! | `write.rs` | from statements to commands, and the handling of replies |
//! | `mongo::coalescer` | concurrent calls share commands |
//! | `read.rs` | lookups, and the pages of an export |

mod read;
mod statement;
mod write;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use futures_util::{FutureExt as _, Stream, StreamExt as _, stream};
use jiff::civil::Date;
use mongodb::bson::doc;
use mongodb::options::IndexOptions;
use tokio::sync::OnceCell;

#[cfg(any(test, fuzzing))]
pub(crate) use self::read::fuzz;
use self::read::{Pages, Totals};
use self::statement::{Plan, Statement, Statements};
use self::write::{Item, Refusals, Writer};
use crate::counters::large::Size;
use crate::counters::view::{AdId, Replacement};
use crate::id::{BotId, Sequence};
use crate::mongo::client::{ANSWER_TIMEOUT, Mongo, MongoError};
use crate::mongo::coalescer::{BatchLimits, Coalescer};
use crate::mongo::turns::{Turn, Turns};
use crate::request_deadline;

/// The collection of totals.
pub const TOTALS: &str = "counters_totals";
/// The collection of days.
pub const DAILY: &str = "counters_daily";

/// How long the documents of a forgotten ad are kept. A later write may bring back its views.
const FORGOTTEN_FOR: Duration = Duration::from_secs(7 * 24 * 3_600);
/// Maximum number of totals per query.
const FIND_MAX: usize = 1_000;
/// Limits of each kind of reading totals. After a failure, reads fail immediately for a while, because
/// requests wait for them.
const READS: BatchLimits =
    BatchLimits { items_max: FIND_MAX, in_flight: 4, pause: Duration::from_secs(1) };
/// Limits of writes to one collection. Two run concurrently, so that a long slice does not block
/// short ones. Replacements, which take long, run one at a time beside them.
const WRITES: BatchLimits =
    BatchLimits { items_max: write::STATEMENTS_MAX, in_flight: 2, pause: Duration::ZERO };

/// The stored state of an ad.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stored {
    /// Its total.
    pub total: u64,
    /// The last applied record; 0 for none.
    pub sequence: Sequence,
}

/// A change of one ad.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The ad.
    pub ad: AdId,
    /// The change.
    pub effect: Effect,
}

/// The kind of change of an ad.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Views, in the order of the queue; at least one.
    Add(Vec<Added>),
    /// A replacement of everything counted before.
    Replace(Sequence, Replacement),
}

/// One record of views.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Added {
    /// The sequence of the record.
    pub sequence: Sequence,
    /// The day on which they count.
    pub day: Date,
    /// The number of views.
    pub n: u64,
}

/// The counters of every bot. Cheap to clone; clones share their queries and writes.
#[derive(Debug, Clone)]
pub struct CounterStore {
    mongo: Mongo,
    /// The groups of small reads, and those of the others, which take longer.
    small: Coalescer<Arc<str>, Totals>,
    others: Coalescer<Arc<str>, Totals>,
    totals: Coalescer<Item, Refusals>,
    daily: Coalescer<Item, Refusals>,
    turns: Turns,
    /// Set after the first attempt of [`CounterStore::prepare`].
    prepared: Arc<OnceCell<()>>,
}

impl CounterStore {
    /// The counters in the database of `mongo`.
    #[must_use]
    pub fn new(mongo: Mongo) -> Self {
        Self::writing_within(mongo, ANSWER_TIMEOUT)
    }

    /// Like [`Self::new`], with a time limit: the server works on a write for at most `within`, and
    /// at most 5 s.
    #[must_use]
    pub fn writing_within(mongo: Mongo, within: Duration) -> Self {
        let within = within.min(ANSWER_TIMEOUT);
        // One query serves many callers, so no single caller's deadline applies to it.
        let reads = || {
            let asked = mongo.clone();
            Coalescer::new(READS, move |ids, _| {
                read::totals(asked.clone(), ids, read::TOTALS_TIMEOUT).boxed()
            })
        };
        let writes = |collection| {
            let writer = Writer { mongo: mongo.clone(), collection, within };
            Coalescer::new(WRITES, move |items, place| writer.clone().write(items, place).boxed())
        };
        let (small, others) = (reads(), reads());
        let (totals, daily) = (writes(TOTALS), writes(DAILY));
        let (turns, prepared) = (Turns::default(), Arc::default());
        Self { mongo, small, others, totals, daily, turns, prepared }
    }

    /// Creates the indexes. May be repeated. Takes at most 15 s. With much data the server
    /// continues afterwards.
    ///
    /// # Errors
    /// If MongoDB is unavailable or refuses.
    pub async fn prepare(&self) -> Result<(), MongoError> {
        for collection in [TOTALS, DAILY] {
            let options = IndexOptions::builder()
                .name("gone".to_owned())
                .expire_after(FORGOTTEN_FOR)
                .sparse(true)
                .build();
            self.mongo.index(collection, doc! { "gone": 1 }, options).await?;
        }
        let options = IndexOptions::builder().name("export".to_owned()).build();
        self.mongo.index(DAILY, doc! { "bot": 1, "month": 1, "_id": 1 }, options).await?;
        // Fails while the first write prepares the collections itself.
        let _ = self.prepared.set(());
        Ok(())
    }

    /// Creates the indexes before the first documents. Continues without them if MongoDB refuses
    /// them.
    async fn prepared(&self) -> Result<(), MongoError> {
        let first = async || match self.prepare().await {
            Err(error) if error.is_unreachable() => Err(error),
            Ok(()) | Err(_) => Ok(()),
        };
        self.prepared.get_or_try_init(first).await.map(drop)
    }

    /// The stored state of these ads; missing ones were never counted. Concurrent calls share a
    /// query; small ones do not wait for others. The answer includes everything applied before the
    /// call. After a failure, calls fail immediately for a second, and then until a probing call
    /// succeeds.
    ///
    /// # Errors
    /// If MongoDB does not answer within 2 s or refuses.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn totals(
        &self,
        bot: &BotId,
        ads: &[AdId],
    ) -> Result<HashMap<AdId, Stored>, MongoError> {
        let is_small = Size::of(ads.len()) == Size::Small;
        let reads = if is_small { &self.small } else { &self.others };
        let parts = ads.chunks(FIND_MAX).map(async |ads| {
            let ids: Vec<Arc<str>> =
                ads.iter().map(|ad| statement::total_id(bot, ad).into()).collect();
            let (totals, _) = reads.join(ids.clone()).await?;
            self.found(ads, ids, &totals)
        });
        Ok(try_join_all(parts).await?.into_iter().flatten().collect())
    }

    /// Like [`Self::totals`], with a query of its own, which delays no other call. The server works
    /// on it for as long as the caller waits, and at most 2 s.
    ///
    /// # Errors
    /// If MongoDB does not answer in time or refuses.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(crate) async fn totals_apart(
        &self,
        bot: &BotId,
        ads: &[AdId],
    ) -> Result<HashMap<AdId, Stored>, MongoError> {
        let ids: Vec<Arc<str>> = ads.iter().map(|ad| statement::total_id(bot, ad).into()).collect();
        let within = request_deadline::at_most(read::TOTALS_TIMEOUT);
        let totals = read::totals(self.mongo.clone(), ids.clone(), within).await?;
        self.found(ads, ids, &totals).map(|found| found.into_iter().collect())
    }

    /// The state of those ads that were found.
    fn found(
        &self,
        ads: &[AdId],
        ids: Vec<Arc<str>>,
        totals: &Totals,
    ) -> Result<Vec<(AdId, Stored)>, MongoError> {
        let found = ads.iter().zip(ids).filter_map(|(ad, id)| Some((ad, totals.get(&*id)?)));
        found
            .map(|(ad, stored)| match stored {
                Some(stored) => Ok((ad.clone(), *stored)),
                None => Err(self.mongo.not_understood("find", "numbers in total and s")),
            })
            .collect()
    }

    /// Applies the changes of a slice, in order for each ad, to both collections. Returns once a
    /// majority has both. Concurrent calls share their writes.
    ///
    /// The caller must know that all records of the bot before the first one here were applied.
    /// Then the call may be repeated with the same, fewer or more changes, by other processes,
    /// concurrently or late.
    ///
    /// # Errors
    /// If MongoDB does not answer in time, refuses, or has no majority. Applied changes stay, and
    /// applying them again has no effect.
    ///
    /// # Cancel safety
    /// The same as after an error.
    pub async fn apply(&self, bot: &BotId, changes: Vec<Change>) -> Result<(), MongoError> {
        let turn = self.turn(bot).await;
        self.apply_in(&turn, bot, changes).await
    }

    /// Waits until the server has finished all writes of this bot that this process sent, including
    /// those that timed out.
    pub(crate) async fn turn(&self, bot: &BotId) -> Turn {
        self.turns.of(bot).await
    }

    /// Like [`Self::apply`], for a caller that has the bot's turn.
    pub(crate) async fn apply_in(
        &self,
        turn: &Turn,
        bot: &BotId,
        changes: Vec<Change>,
    ) -> Result<(), MongoError> {
        self.prepared().await?;
        let Plan { totals, daily } = Plan::new(bot, changes);
        tokio::try_join!(written(&self.totals, totals, turn), written(&self.daily, daily, turn))?;
        Ok(())
    }

    /// Views of ads per day, from `from` to `to`, including days without views. One query for all.
    ///
    /// # Errors
    /// If MongoDB does not answer within 5 s or refuses.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn daily(
        &self,
        bot: &BotId,
        ads: &[AdId],
        from: Date,
        to: Date,
    ) -> Result<Vec<Vec<(Date, u64)>>, MongoError> {
        let months = read::months(&self.mongo, bot, ads, from, to).await?;
        let views = |at, day| months.get(&(at, day)).copied().unwrap_or(0);
        let of = |at| read::days(from, to).map(|day| (day, views(at, day))).collect();
        Ok((0..ads.len()).map(of).collect())
    }

    /// The views of one day, in pages sorted by ad, without ads that have none. So a page may be
    /// empty. Read from a secondary if there is one that is at most 90 s behind. Views counted
    /// meanwhile may or may not be included.
    ///
    /// # Errors
    /// If the first page cannot be read. If a later page cannot be read, an item of the stream is
    /// the error.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn export(
        &self,
        bot: &BotId,
        day: Date,
    ) -> Result<
        impl Stream<Item = Result<Vec<(AdId, u64)>, MongoError>> + Send + Unpin + 'static,
        MongoError,
    > {
        let mut pages = Pages::new(self.mongo.clone(), bot, day);
        let first = pages.next().await?;
        let later = stream::try_unfold(pages, async |mut pages| {
            Ok(pages.next().await?.map(|page| (page, pages)))
        });
        Ok(stream::iter(first.map(Ok)).chain(later).boxed())
    }
}

/// The number of documents that hold the days of an ad.
pub(crate) fn months(from: Date, to: Date) -> usize {
    let month = |day: Date| 12 * i32::from(day.year()) + i32::from(day.month());
    usize::try_from(month(to) - month(from) + 1).unwrap_or(0)
}

/// Executes a slice's statements for one collection.
async fn written(
    groups: &Coalescer<Item, Refusals>,
    statements: Statements,
    turn: &Turn,
) -> Result<(), MongoError> {
    let items = |statements: Vec<Statement>| -> Vec<Item> {
        let item = |statement| Item { statement, turn: turn.clone() };
        statements.into_iter().map(item).collect()
    };
    let (free, ordered) = (items(statements.free), items(statements.ordered));
    let free = async {
        if free.is_empty() {
            return Ok(());
        }
        let (refusals, own) = groups.join(free).await?;
        refusals.iter().find(|(place, _)| own.contains(place)).map_or(Ok(()), refused)
    };
    let ordered = async {
        if ordered.is_empty() {
            return Ok(());
        }
        let (refusals, _) = groups.alone(ordered).await?;
        refusals.first().map_or(Ok(()), refused)
    };
    tokio::try_join!(free, ordered).map(drop)
}

fn refused((_, error): &(usize, MongoError)) -> Result<(), MongoError> {
    Err(error.clone())
}
