//! Lists of bots, page by page, in the order of what matters to whoever looks.
//!
//! 1. Every bot with something queued is in the control set or in the busy set, or paused: their
//!    ids are read, nothing is scanned.
//! 2. A script tells the length and the first sequence of their queues, 500 a call, all shards at
//!    once. The events stay where they are.
//! 3. Only the bots of the page are looked at whole.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use redis::{Pipeline, Value};
use serde::{Deserialize, Serialize};

use super::Queue;
use super::inspect::BotView;
use crate::id::{BotId, Shard};
use crate::keyspace::scripts::{Head, Heads};
use crate::keyspace::{Reply, StoreError};

/// Most bots read per shard and kind; beyond it the list covers the first ones found.
const SHARD_MAX: usize = 100_000;
/// Shards asked concurrently. Each takes a connection, and half of a pool is left for others.
const CONCURRENT: usize = 4;

/// Which bots come first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum BotOrder {
    /// Those with most events.
    #[default]
    Depth,
    /// Those whose first event is oldest.
    Age,
}

/// Where a page ends: the next begins after it. Bots that change their place meanwhile may be met
/// twice or not at all.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BotCursor {
    place: u64,
    bot: BotId,
}

/// A page of a list of bots.
#[derive(Debug, Clone)]
pub struct BotPage {
    /// In order.
    pub bots: Vec<BotView>,
    /// Where the next page begins; `None`: there is none.
    pub next: Option<BotCursor>,
}

impl BotOrder {
    /// The lower, the earlier in the list.
    fn place(self, head: Head) -> u64 {
        match self {
            Self::Depth => u64::MAX - head.depth,
            Self::Age if head.depth == 0 => u64::MAX,
            Self::Age => head.sequence,
        }
    }
}

impl Queue {
    /// The bots of the pipeline that have something queued, are parked or paused, and are `wanted`:
    /// at most `limit` after `after`. `now` since 1970.
    ///
    /// # Errors
    /// When Redis does not answer or refuses.
    pub async fn list_bots(
        &self,
        order: BotOrder,
        after: Option<&BotCursor>,
        limit: usize,
        wanted: &(dyn Fn(&BotId) -> bool + Sync),
        now: Duration,
    ) -> Result<BotPage, StoreError> {
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
    ) -> Result<Vec<BotCursor>, StoreError> {
        let keys = self.keys(shard);
        let mut pipe = Pipeline::with_capacity(3);
        pipe.cmd("ZRANGE").arg(keys.ctl()).arg(0).arg(SHARD_MAX);
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
    ) -> Result<HashMap<BotId, BotView>, StoreError> {
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
