//! The counters in MongoDB: totals, and days by month. However often and by whomever a change is
//! applied, each view counts once: every document carries the sequence of the last record that was
//! applied to it, and an update adds only what is above.
//!
//! | collection | document |
//! |---|---|
//! | `counters_totals` | `{_id: "<bot>\u{1f}<ad>", bot, ad, total, s}` |
//! | `counters_daily` | `{_id: "<bot>\u{1f}<ad>\u{1f}2026-11", bot, ad, month: "2026-11", days: [31 numbers], s}` |
//!
//! A document that was forgotten stays for 7 days as zeros with `gone`, the time it was: somebody
//! late finds its `s` and does not bring old views back.
//!
//! | file | holds |
//! |---|---|
//! | `statement.rs` | from changes to statements; why they may be repeated |
//! | `write.rs` | statements into commands, and what their replies ask for |
//! | `groups.rs` | calls made at the same time share commands |
//! | `read.rs` | what is found, and the pages of an export |

mod read;
mod statement;
mod write;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use futures_util::{FutureExt as _, Stream, StreamExt as _, TryStreamExt as _, stream};
use jiff::civil::Date;
use mongodb::bson::doc;
use mongodb::options::IndexOptions;
use tokio::sync::OnceCell;

use self::read::{Pages, Totals};
use self::statement::{Plan, Statement, Statements};
use self::write::{Item, Refusals, Writer};
use crate::counters::view::{AdId, Replacement};
use crate::id::{BotId, Sequence};
use crate::store::groups::{Groups, Rules};
use crate::store::mongo::{ANSWER_TIMEOUT, Mongo, MongoError};
use crate::store::turns::{Turn, Turns};

/// The totals.
pub const TOTALS: &str = "counters_totals";
/// The days.
pub const DAILY: &str = "counters_daily";

/// Who is late by more than this may bring back views of an ad that was forgotten.
const FORGOTTEN_FOR: Duration = Duration::from_secs(7 * 24 * 3_600);
/// Most totals asked for at once.
const FIND_MAX: usize = 1_000;
/// Reading totals. A request waits for it, so it gives up soon.
const READS: Rules = Rules { items_max: FIND_MAX, under_way: 4, pause: Duration::from_secs(1) };
/// Writing to one collection. Two at once, so that a long slice does not hold up the short ones.
const WRITES: Rules =
    Rules { items_max: write::STATEMENTS_MAX, under_way: 2, pause: Duration::ZERO };

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

/// The counters of every bot. Cheap to clone; clones share their questions and writes.
#[derive(Debug, Clone)]
pub struct CounterStore {
    mongo: Mongo,
    reads: Groups<Arc<str>, Totals>,
    totals: Groups<Item, Refusals>,
    daily: Groups<Item, Refusals>,
    turns: Turns,
    /// Set once [`CounterStore::prepare`] was tried.
    prepared: Arc<OnceCell<()>>,
}

impl CounterStore {
    /// The counters in the database of `mongo`.
    #[must_use]
    pub fn new(mongo: Mongo) -> Self {
        Self::writing_within(mongo, ANSWER_TIMEOUT)
    }

    /// The same; the server works on a write for `within` at most, or for 5 s if that is less.
    #[must_use]
    pub fn writing_within(mongo: Mongo, within: Duration) -> Self {
        let within = within.min(ANSWER_TIMEOUT);
        let asked = mongo.clone();
        let reads = Groups::new(READS, move |ids, _| read::totals(asked.clone(), ids).boxed());
        let writes = |collection| {
            let writer = Writer { mongo: mongo.clone(), collection, within };
            Groups::new(WRITES, move |items, place| writer.clone().write(items, place).boxed())
        };
        let (totals, daily) = (writes(TOTALS), writes(DAILY));
        let (turns, prepared) = (Turns::default(), Arc::default());
        Self { mongo, reads, totals, daily, turns, prepared }
    }

    /// Creates the indexes. May be repeated. Takes at most 15 s; where there is much to index, the
    /// server goes on by itself.
    ///
    /// # Errors
    /// When MongoDB does not answer or refuses.
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
        // Refused while the first write is doing the same.
        let _ = self.prepared.set(());
        Ok(())
    }

    /// Documents do not come before the indexes of their collection, unless those are refused.
    async fn prepared(&self) -> Result<(), MongoError> {
        let first = async || match self.prepare().await {
            Err(away @ (MongoError::Away { .. } | MongoError::Lookup { .. })) => Err(away),
            Ok(()) | Err(_) => Ok(()),
        };
        self.prepared.get_or_try_init(first).await.map(drop)
    }

    /// What is stored of these ads; those that are missing were never counted. Calls made at the
    /// same time share a question. The answer holds whatever was applied before the call. After a
    /// failure, calls fail at once for a second, and then until one that tries is answered.
    ///
    /// # Errors
    /// When MongoDB does not answer within 2 s or refuses.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn totals(
        &self,
        bot: &BotId,
        ads: &[AdId],
    ) -> Result<HashMap<AdId, Stored>, MongoError> {
        let parts = ads.chunks(FIND_MAX).map(async |ads| {
            let ids: Vec<Arc<str>> =
                ads.iter().map(|ad| statement::total_id(bot, ad).into()).collect();
            let (totals, _) = self.reads.join(ids.clone()).await?;
            let found = ads.iter().zip(ids).filter_map(|(ad, id)| Some((ad, totals.get(&*id)?)));
            found
                .map(|(ad, stored)| match stored {
                    Some(stored) => Ok((ad.clone(), *stored)),
                    None => Err(self.mongo.not_understood("find", "numbers in total and s")),
                })
                .collect::<Result<Vec<_>, _>>()
        });
        Ok(try_join_all(parts).await?.into_iter().flatten().collect())
    }

    /// Applies the changes of a slice, in order for each ad, to both collections. Returns once a
    /// majority has both. Calls made at the same time share their writes.
    ///
    /// Who calls knows that all records of the bot before the first one here were applied. Then it
    /// may be called again with the same, with less or more, by others, at the same time or late.
    ///
    /// # Errors
    /// When MongoDB does not answer in time, refuses, or has no majority. What was applied stays
    /// so, and applying the same again changes nothing of that.
    ///
    /// # Cancel safety
    /// As after an error.
    pub async fn apply(&self, bot: &BotId, changes: Vec<Change>) -> Result<(), MongoError> {
        let turn = self.turn(bot).await;
        self.apply_in(&turn, bot, changes).await
    }

    /// Waits until the server works on nothing of this bot that this process sent: on nothing that
    /// was given up on either.
    pub(crate) async fn turn(&self, bot: &BotId) -> Turn {
        self.turns.of(bot).await
    }

    /// [`Self::apply`] in the turn of the bot.
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

    /// Views of ads per day, from `from` to `to`, days without any among them. One question for all.
    ///
    /// # Errors
    /// When MongoDB does not answer within 5 s or refuses.
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

    /// The views of one day, ads without any left out, in the order of their ids. Read from a
    /// secondary if there is one: it may be seconds behind. What is counted meanwhile may be in it
    /// or not.
    ///
    /// # Errors
    /// When the first page cannot be read; the stream's items, when a later one cannot.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn export(
        &self,
        bot: &BotId,
        day: Date,
    ) -> Result<
        impl Stream<Item = Result<(AdId, u64), MongoError>> + Send + Unpin + 'static,
        MongoError,
    > {
        let mut pages = Pages::new(self.mongo.clone(), bot, day);
        let first = pages.next().await?;
        let later = stream::try_unfold(pages, async |mut pages| {
            Ok(pages.next().await?.map(|page| (page, pages)))
        });
        let pages = stream::iter(first.map(Ok)).chain(later);
        Ok(pages.map_ok(|page| stream::iter(page.into_iter().map(Ok))).try_flatten().boxed())
    }
}

/// Has a slice's statements for one collection carried out.
async fn written(
    groups: &Groups<Item, Refusals>,
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
