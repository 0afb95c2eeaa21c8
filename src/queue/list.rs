//! Paged lists of bots, sorted by depth or age.
//!
//! 1. Every bot with queued events is in the control set, in the busy set, or paused. The list
//!    reads these ids, in portions, and scans nothing.
//! 2. A script returns the length and the first sequence of their queues, 500 per call, four shards
//!    concurrently. It does not read the events.
//! 3. Only the bots of the page are read completely.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use redis::{Pipeline, Value};
use serde::{Deserialize, Serialize};

use super::Queue;
use super::inspect::BotView;
use crate::id::{BotId, Shard};
use crate::redis::keys::ShardKeys;
use crate::redis::scripts::{Head, Heads};
use crate::redis::{RedisError, Reply};

/// Maximum number of bots read from the control set and from the busy set of a shard. Beyond it,
/// the list covers only the first ones.
const SHARD_MAX: usize = 100_000;
/// Number of bots that one command reads.
const PORTION: usize = 2_000;
/// Number of shards that are queried concurrently. Each takes a connection, and half of a pool
/// stays free for other callers.
const CONCURRENT: usize = 4;

/// The order of a list.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum BotOrder {
    /// Bots with the longest queues first.
    #[default]
    Depth,
    /// Bots with the oldest events first.
    Age,
}

/// What an operator sets for a bot. It stays without any event of the bot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// The bot is paused.
    Paused,
    /// Its weight is not 1.
    Weight,
}

/// The end of a page: the next page starts after it. Bots that change their position meanwhile may
/// be listed twice or not at all.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BotCursor {
    place: u64,
    bot: BotId,
}

/// A page of a list of bots.
#[derive(Debug, Clone)]
pub struct BotPage {
    /// The bots, in order.
    pub bots: Vec<BotView>,
    /// The start of the next page; `None`: this is the last one.
    pub next: Option<BotCursor>,
}

impl BotOrder {
    /// The sort key, ascending.
    fn place(self, head: Head) -> u64 {
        match self {
            Self::Depth => u64::MAX - head.depth,
            Self::Age if head.depth == 0 => u64::MAX,
            Self::Age => head.sequence,
        }
    }
}

impl Queue {
    /// The bots of the pipeline that have queued events, are parked or paused, and are `wanted`: at
    /// most `limit` after `after`. `now` is the time since 1970.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn list_bots(
        &self,
        order: BotOrder,
        after: Option<&BotCursor>,
        limit: usize,
        wanted: &(dyn Fn(&BotId) -> bool + Sync),
        now: Duration,
    ) -> Result<BotPage, RedisError> {
        let (bots, next) = self.rank_bots(order, after, limit, wanted, now).await?;
        Ok(BotPage { bots: bots.into_iter().map(|(_, view)| view).collect(), next })
    }

    /// The same, each with its place: so that lists of several pipelines can be merged.
    pub(crate) async fn rank_bots(
        &self,
        order: BotOrder,
        after: Option<&BotCursor>,
        limit: usize,
        wanted: &(dyn Fn(&BotId) -> bool + Sync),
        now: Duration,
    ) -> Result<(Vec<(BotCursor, BotView)>, Option<BotCursor>), RedisError> {
        let shards: Vec<Vec<BotCursor>> = stream::iter(self.shard_count().shards())
            .map(|shard| self.ranked(shard, order, after, limit, wanted))
            .buffer_unordered(CONCURRENT)
            .try_collect()
            .await?;
        let mut found = shards.concat();
        found.sort_unstable();
        let more = found.len() > limit;
        found.truncate(limit);
        let next = found.last().filter(|_| more).cloned();
        let bots: Vec<BotId> = found.iter().map(|cursor| cursor.bot.clone()).collect();
        let mut views = self.view_many(&bots, now).await?;
        let seen = |cursor: BotCursor| Some((cursor.clone(), views.remove(&cursor.bot)?));
        Ok((found.into_iter().filter_map(seen).collect(), next))
    }

    /// Number of bots with this mark that are `wanted`.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn count_marked(
        &self,
        mark: Mark,
        wanted: &(dyn Fn(&BotId) -> bool + Sync),
    ) -> Result<usize, RedisError> {
        let mut pipe = Pipeline::new();
        for keys in self.shards().iter() {
            match mark {
                Mark::Paused => pipe.cmd("SMEMBERS").arg(keys.paused()),
                Mark::Weight => pipe.cmd("HKEYS").arg(&keys.weight),
            };
        }
        let mut count = 0;
        for value in self.link().run_checked("marks", &pipe).await? {
            let values = match value {
                Value::Set(values) => Value::Array(values),
                value => value,
            };
            let mut reply = self.read("marks", Reply::new(values))?;
            while reply.len() > 0 {
                let text = self.read("marks", reply.text())?;
                count += usize::from(BotId::parse(&text).is_ok_and(|bot| wanted(&bot)));
            }
        }
        Ok(count)
    }

    /// The first bots of one shard, one more than `limit`. Reads their ids in portions: bots are as
    /// many as tenants invent.
    async fn ranked(
        &self,
        shard: Shard,
        order: BotOrder,
        after: Option<&BotCursor>,
        limit: usize,
        wanted: &(dyn Fn(&BotId) -> bool + Sync),
    ) -> Result<Vec<BotCursor>, RedisError> {
        let keys = self.keys(shard);
        let mut first = BTreeSet::new();
        for set in [keys.ready(), keys.busy()] {
            for start in (0..SHARD_MAX).step_by(PORTION) {
                let mut range = redis::cmd("ZRANGE");
                range.arg(set).arg(start).arg(start + PORTION - 1);
                let bots = self.bots_of("ZRANGE", range).await?;
                let is_last = bots.len() < PORTION;
                let wanted = bots.into_iter().flatten().filter(wanted).collect();
                self.rank(keys, wanted, order, after, limit, &mut first).await?;
                if is_last {
                    break;
                }
            }
        }
        let paused = self.bots_of("SMEMBERS", redis::Cmd::smembers(keys.paused())).await?;
        let wanted = paused.into_iter().flatten().filter(wanted).collect();
        self.rank(keys, wanted, order, after, limit, &mut first).await?;
        // A bot that moved meanwhile was read twice.
        let mut seen = HashSet::new();
        Ok(first.into_iter().filter(|cursor| seen.insert(cursor.bot.clone())).collect())
    }

    /// The bots in a reply; `None` for each name that is not a bot id.
    async fn bots_of(
        &self,
        name: &'static str,
        command: redis::Cmd,
    ) -> Result<Vec<Option<BotId>>, RedisError> {
        let values = match self.link().command(name, command).await? {
            Value::Set(values) => Value::Array(values),
            value => value,
        };
        let mut reply = self.read(name, Reply::new(values))?;
        let mut bots = Vec::with_capacity(reply.len());
        while reply.len() > 0 {
            bots.push(BotId::parse(&self.read(name, reply.text())?).ok());
        }
        Ok(bots)
    }

    /// Adds these bots to the first ones of a shard, of which it keeps one more than `limit`.
    async fn rank(
        &self,
        keys: &ShardKeys,
        bots: Vec<BotId>,
        order: BotOrder,
        after: Option<&BotCursor>,
        limit: usize,
        first: &mut BTreeSet<BotCursor>,
    ) -> Result<(), RedisError> {
        let calls: Vec<_> = bots.chunks(Heads::MAX).map(|bots| Heads { keys, bots }).collect();
        if calls.is_empty() {
            return Ok(());
        }
        for (call, heads) in calls.iter().zip(self.link().call_all(&calls).await?) {
            for (bot, head) in call.bots.iter().zip(heads?) {
                let cursor = BotCursor { place: order.place(head), bot: bot.clone() };
                if after.is_none_or(|after| cursor > *after) {
                    first.insert(cursor);
                }
                if first.len() > limit + 1 {
                    first.pop_last();
                }
            }
        }
        Ok(())
    }

    /// These bots.
    pub(crate) async fn view_many(
        &self,
        bots: &[BotId],
        now: Duration,
    ) -> Result<HashMap<BotId, BotView>, RedisError> {
        let mut shards: HashMap<Shard, Vec<BotId>> = HashMap::new();
        for bot in bots {
            shards.entry(self.shard_of(bot)).or_default().push(bot.clone());
        }
        let views: Vec<Vec<BotView>> = stream::iter(shards)
            .map(|(shard, bots)| async move { self.view_bots(self.keys(shard), &bots, now).await })
            .buffer_unordered(CONCURRENT)
            .try_collect()
            .await?;
        Ok(views.into_iter().flatten().map(|view| (view.bot.clone(), view)).collect())
    }
}
