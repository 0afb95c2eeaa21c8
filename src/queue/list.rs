//! Paged lists of bots, sorted by depth or age.
//!
//! 1. Every bot with queued events is in the control set, in the busy set, or paused. The list
//!    reads these ids, in portions, and scans nothing.
//! 2. A script returns the length of their queues, 500 per call, four shards concurrently. For the age it
//!    returns the first sequence, too: it reads the first events for that, a few MiB per write, and does
//!    not send them.
//! 3. Only the bots of the page are read completely.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use redis::{Pipeline, Value};
use serde::{Deserialize, Serialize};

use super::Queue;
use super::inspect::{BotState, BotView};
use crate::id::{BotId, Lane, Shard};
use crate::redis::keys::ShardKeys;
use crate::redis::scripts::Head;
use crate::redis::{RedisError, Reply, ReplyError};

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

/// Which bots a list has.
#[derive(Clone, Copy)]
pub struct BotFilter<'a> {
    /// The bots that the viewer may see and asks for.
    pub wanted: &'a (dyn Fn(&BotId) -> bool + Sync),
    /// Only bots in this state. Idle bots are in lists of failing bots only.
    pub state: Option<BotState>,
    /// Only failing bots: their last attempt failed, they have lanes that are set aside, or dead letters.
    pub failing: bool,
}

impl BotFilter<'_> {
    /// Whether bots of a set of a shard may be in this list.
    fn reads(&self, set: Set) -> bool {
        match self.state {
            None => true,
            Some(BotState::Ready) => set == Set::Ready,
            Some(BotState::Leased | BotState::Parked) => set == Set::Busy,
            Some(BotState::Paused) => set == Set::Paused,
            Some(BotState::Idle) => set == Set::Dead,
        }
    }
}

/// The sets of a shard that a list reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Set {
    Ready,
    Busy,
    Paused,
    /// The newest dead letters. Their bots may have no queued event.
    Dead,
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
        let filter = BotFilter { wanted, state: None, failing: false };
        self.list_some(order, after, limit, filter, now).await
    }

    /// The same with a filter. A list of failing bots also has bots without queued events, if they are
    /// among those of the newest 1,000 dead letters of their shard.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn list_some(
        &self,
        order: BotOrder,
        after: Option<&BotCursor>,
        limit: usize,
        filter: BotFilter<'_>,
        now: Duration,
    ) -> Result<BotPage, RedisError> {
        let (bots, next) = self.rank_bots(order, after, limit, filter, now).await?;
        Ok(BotPage { bots: bots.into_iter().map(|(_, view)| view).collect(), next })
    }

    /// The same, each with its place: so that lists of several pipelines can be merged.
    pub(crate) async fn rank_bots(
        &self,
        order: BotOrder,
        after: Option<&BotCursor>,
        limit: usize,
        filter: BotFilter<'_>,
        now: Duration,
    ) -> Result<(Vec<(BotCursor, BotView)>, Option<BotCursor>), RedisError> {
        let shards: Vec<Vec<BotCursor>> = stream::iter(self.shard_count().shards())
            .map(|shard| self.ranked(shard, order, after, limit, filter))
            .buffer_unordered(CONCURRENT)
            .try_collect()
            .await?;
        let mut found = shards.concat();
        found.sort_unstable();
        let more = found.len() > limit;
        found.truncate(limit);
        let next = found.last().filter(|_| more).cloned();
        let bots: Vec<BotId> = found.iter().map(|cursor| cursor.bot.clone()).collect();
        let views = self.view_each(&bots, now).await?.into_iter();
        let mut views: HashMap<BotId, BotView> =
            views.map(|view| (view.bot.clone(), view)).collect();
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
        filter: BotFilter<'_>,
    ) -> Result<Vec<BotCursor>, RedisError> {
        let keys = self.keys(shard);
        let mut first = BTreeSet::new();
        for (set, key) in [(Set::Ready, keys.ready()), (Set::Busy, keys.busy())] {
            if !filter.reads(set) {
                continue;
            }
            for start in (0..SHARD_MAX).step_by(PORTION) {
                let mut range = redis::cmd("ZRANGE");
                range.arg(key).arg(start).arg(start + PORTION - 1);
                let bots = self.bots_of("ZRANGE", range).await?;
                let is_last = bots.len() < PORTION;
                let wanted = self.sieve(keys, bots.into_iter().flatten(), filter).await?;
                self.rank(wanted, order, after, limit, &mut first).await?;
                if is_last {
                    break;
                }
            }
        }
        if filter.reads(Set::Paused) {
            let paused = self.bots_of("SMEMBERS", redis::Cmd::smembers(keys.paused())).await?;
            let paused: Vec<BotId> = paused.into_iter().flatten().collect();
            for portion in paused.chunks(PORTION) {
                let wanted = self.sieve(keys, portion.iter().cloned(), filter).await?;
                self.rank(wanted, order, after, limit, &mut first).await?;
            }
        }
        if filter.failing && filter.reads(Set::Dead) {
            let dead = self.bots_of_newest_letters(shard).await?;
            let wanted = self.sieve(keys, dead.into_iter(), filter).await?;
            self.rank(wanted, order, after, limit, &mut first).await?;
        }
        // A bot that moved meanwhile was read twice.
        let mut seen = HashSet::new();
        Ok(first.into_iter().filter(|cursor| seen.insert(cursor.bot.clone())).collect())
    }

    /// Those of some bots of a shard that a list has.
    async fn sieve(
        &self,
        keys: &ShardKeys,
        bots: impl Iterator<Item = BotId> + Send,
        filter: BotFilter<'_>,
    ) -> Result<Vec<BotId>, RedisError> {
        let mut bots: Vec<BotId> = bots.filter(|bot| (filter.wanted)(bot)).collect();
        if bots.is_empty() {
            return Ok(bots);
        }
        if let Some(state) = filter.state {
            let mut pipe = Pipeline::with_capacity(4);
            pipe.cmd("HMGET").arg(keys.owners()).arg(names(&bots));
            pipe.cmd("ZMSCORE").arg(keys.busy()).arg(names(&bots));
            pipe.cmd("SMISMEMBER").arg(keys.paused()).arg(names(&bots));
            pipe.cmd("ZMSCORE").arg(keys.ready()).arg(names(&bots));
            let [leased, busy, paused, ready] = self.columns("states", &pipe).await?;
            let mut rows = leased.into_iter().zip(busy).zip(paused).zip(ready);
            bots.retain(|_| {
                let Some((((leased, busy), paused), ready)) = rows.next() else { return false };
                let is = match (leased, busy, paused, ready) {
                    (Value::Nil, Value::Nil, Value::Int(1), _) => BotState::Paused,
                    (Value::Nil, Value::Nil, _, Value::Nil) => BotState::Idle,
                    (Value::Nil, Value::Nil, ..) => BotState::Ready,
                    (Value::Nil, ..) => BotState::Parked,
                    _ => BotState::Leased,
                };
                is == state
            });
        }
        if filter.failing && !bots.is_empty() {
            self.failing_of(keys, bots).await
        } else {
            Ok(bots)
        }
    }

    /// The failing ones of these bots of a shard.
    async fn failing_of(
        &self,
        keys: &ShardKeys,
        mut bots: Vec<BotId>,
    ) -> Result<Vec<BotId>, RedisError> {
        let mut pipe = Pipeline::with_capacity(2);
        pipe.cmd("HMGET").arg(keys.attempts()).arg(names(&bots));
        let dead: Vec<String> = bots.iter().map(|bot| format!("d{}", bot.as_str())).collect();
        pipe.cmd("HMGET").arg(keys.held()).arg(dead);
        let [attempts, dead] = self.columns("failures", &pipe).await?;
        let mut rows = attempts.into_iter().zip(dead);
        let mut rest = Vec::new();
        let mut failing = HashSet::new();
        for bot in &bots {
            let (attempts, dead) = rows.next().unwrap_or((Value::Nil, Value::Nil));
            let attempts: String = self.link().read("failures", attempts).unwrap_or_default();
            if dead != Value::Nil || tells_failure(&attempts) {
                failing.insert(bot.clone());
            } else {
                rest.push(bot.clone());
            }
        }
        // A handler that was unavailable counts no attempt.
        failing.extend(self.still_failing(&rest).await?);
        bots.retain(|bot| failing.contains(bot));
        Ok(bots)
    }

    /// The answers of some commands, each a list.
    async fn columns<const N: usize>(
        &self,
        name: &'static str,
        pipe: &Pipeline,
    ) -> Result<[Vec<Value>; N], RedisError> {
        let values = self.link().run_checked(name, pipe).await?;
        let lists = values.into_iter().map(|value| match value {
            Value::Array(values) => values,
            value => vec![value],
        });
        let lists: Vec<Vec<Value>> = lists.collect();
        lists.try_into().map_err(|lists: Vec<_>| {
            let found = lists.len().to_string();
            self.link().misread(name, ReplyError::unexpected("an answer per command", &found))
        })
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
        bots: Vec<BotId>,
        order: BotOrder,
        after: Option<&BotCursor>,
        limit: usize,
        first: &mut BTreeSet<BotCursor>,
    ) -> Result<(), RedisError> {
        let queues: Vec<(&BotId, Option<Lane>)> = bots.iter().map(|bot| (bot, None)).collect();
        for (bot, head) in self.heads_of(&queues, order == BotOrder::Age).await? {
            let cursor = BotCursor { place: order.place(head), bot };
            if after.is_none_or(|after| cursor > *after) {
                first.insert(cursor);
            }
            if first.len() > limit + 1 {
                first.pop_last();
            }
        }
        Ok(())
    }

    /// These bots, in any order.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub(crate) async fn view_each(
        &self,
        bots: &[BotId],
        now: Duration,
    ) -> Result<Vec<BotView>, RedisError> {
        let mut shards: HashMap<Shard, Vec<BotId>> = HashMap::new();
        for bot in bots {
            shards.entry(self.shard_of(bot)).or_default().push(bot.clone());
        }
        let views: Vec<Vec<BotView>> = stream::iter(shards)
            .map(|(shard, bots)| async move { self.view_bots(self.keys(shard), &bots, now).await })
            .buffer_unordered(CONCURRENT)
            .try_collect()
            .await?;
        Ok(views.concat())
    }
}

fn names(bots: &[BotId]) -> Vec<&str> {
    bots.iter().map(BotId::as_str).collect()
}

/// Whether the attempts of a bot tell a failure or a lost lease since its last progress, or lanes that
/// are set aside. See `att` in [`crate::redis::keys`].
fn tells_failure(attempts: &str) -> bool {
    let mut parts = attempts.splitn(5, '|').skip(1);
    let lost_or_failed =
        parts.by_ref().take(2).any(|count| count.parse().is_ok_and(|n: u64| n > 0));
    lost_or_failed || parts.nth(1).is_some_and(|lanes| !lanes.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bot_fails_by_its_attempts_and_by_its_lanes() {
        for failing in ["0|1|0|0", "0|0|2|0", "1|0|3|5|", "0|0|0|0|00000000;;3:1:2:0"] {
            assert!(tells_failure(failing), "{failing}");
        }
        for fine in ["", "0|0|0|0", "0|0|0|4", "1|0|0|0|", "damaged"] {
            assert!(!tells_failure(fine), "{fine}");
        }
    }
}
