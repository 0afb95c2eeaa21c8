//! Paged lists of bots, sorted by depth or age.
//!
//! 1. Every bot with queued events is in the control set, in the busy set, or paused. The list
//!    reads these ids and scans nothing.
//! 2. A script returns the length and the first sequence of their queues, 500 per call, four shards
//!    concurrently. It does not read the events.
//! 3. Only the bots of the page are read completely.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use redis::{Pipeline, Value};
use serde::{Deserialize, Serialize};

use super::Queue;
use super::inspect::BotView;
use crate::id::{BotId, Shard};
use crate::redis::scripts::{Head, Heads};
use crate::redis::{RedisError, Reply};

/// Maximum number of bots read from the control set and from the busy set of a shard. Beyond it,
/// the list covers only the first ones.
const SHARD_MAX: usize = 100_000;
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
        let mut views = self.view_many(&found, now).await?;
        let bots = found.iter().filter_map(|cursor| views.remove(&cursor.bot)).collect();
        Ok(BotPage { bots, next })
    }

    /// The first bots of one shard, one more than `limit`.
    async fn ranked(
        &self,
        shard: Shard,
        order: BotOrder,
        after: Option<&BotCursor>,
        limit: usize,
        wanted: &(dyn Fn(&BotId) -> bool + Sync),
    ) -> Result<Vec<BotCursor>, RedisError> {
        let keys = self.keys(shard);
        let mut pipe = Pipeline::with_capacity(3);
        pipe.cmd("ZRANGE").arg(keys.ready()).arg(0).arg(SHARD_MAX);
        pipe.cmd("ZRANGE").arg(keys.busy()).arg(0).arg(SHARD_MAX);
        pipe.cmd("SMEMBERS").arg(keys.paused());
        let mut bots = BTreeSet::new();
        for value in self.link().run_checked("ZRANGE", &pipe).await? {
            let values = match value {
                Value::Set(values) => Value::Array(values),
                value => value,
            };
            let mut reply = self.read("ZRANGE", Reply::new(values))?;
            while reply.len() > 0 {
                let text = self.read("ZRANGE", reply.text())?;
                bots.extend(BotId::parse(&text).ok().filter(wanted));
            }
        }
        let bots: Vec<BotId> = bots.into_iter().collect();
        let calls: Vec<_> = bots.chunks(Heads::MAX).map(|bots| Heads { keys, bots }).collect();
        if calls.is_empty() {
            return Ok(Vec::new());
        }
        let mut heads = Vec::with_capacity(bots.len());
        for reply in self.link().call_all(&calls).await? {
            heads.extend(reply?);
        }
        let mut ranked: Vec<BotCursor> = bots
            .into_iter()
            .zip(heads)
            .map(|(bot, head)| BotCursor { place: order.place(head), bot })
            .filter(|cursor| after.is_none_or(|after| cursor > after))
            .collect();
        ranked.sort_unstable();
        ranked.truncate(limit + 1);
        Ok(ranked)
    }

    async fn view_many(
        &self,
        found: &[BotCursor],
        now: Duration,
    ) -> Result<HashMap<BotId, BotView>, RedisError> {
        let mut shards: HashMap<Shard, Vec<BotId>> = HashMap::new();
        for BotCursor { bot, .. } in found {
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
