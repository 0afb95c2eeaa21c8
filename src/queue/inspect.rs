//! Read-only views of queues: for operators, metrics and pages.
//!
//! A view needs several commands, so it is not a consistent snapshot: the queues may change between
//! two commands.

use std::collections::HashMap;
use std::time::Duration;

use redis::{Pipeline, Value};
use serde::Serialize;
use tracing::warn;
use utoipa::ToSchema;

use super::letters::READ_BYTES;
use super::{PauseNote, Queue};
use crate::event::Event;
use crate::id::{BotId, Lane, Sequence, Shard};
use crate::rate::{BotLimits, BotRate, Weight};
use crate::redis::keys::ShardKeys;
use crate::redis::scripts::{Head, Heads};
use crate::redis::{RedisError, Reply, ReplyError, parse_score};
use crate::telemetry::OncePerMinute;

/// Number of bots per shard whose ages are sampled.
const SAMPLE: i64 = 64;

/// Number of commands of [`Queue::view`] per shard.
const SHARD_COMMANDS: usize = 11;

/// When an unreadable shard, or one with a negative depth, was last logged.
static DAMAGED: OncePerMinute = OncePerMinute::new();
static NEGATIVE: OncePerMinute = OncePerMinute::new();

/// The summary of a pipeline.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct PipelineView {
    /// Events queued.
    pub depth: u64,
    /// Bots waiting for a worker.
    pub ready: u64,
    /// Bots leased by a worker or a receiver.
    pub leased: u64,
    /// Bots leased by a receiver: it answered 202 and has not completed the lease yet.
    pub open: u64,
    /// Parked bots: in backoff, waiting to batch, or without tokens.
    pub parked: u64,
    /// Paused bots.
    pub paused: u64,
    /// Bots with lanes that are set aside after a failure (`order_by`).
    pub set_aside: u64,
    /// Events that are not due yet.
    pub delayed: u64,
    /// Dead letters kept.
    pub dead: u64,
    /// Age of the oldest event in a sample of up to 64 ready, leased or parked bots per shard, ms.
    /// Bots whose events wait because of their rate do not count.
    pub oldest_age_ms: u64,
    /// The sequence of that event.
    #[serde(skip)]
    #[schema(ignore)]
    pub oldest: Option<Sequence>,
    /// Bots whose events waited for tokens of their rate after their last slice.
    #[serde(skip)]
    #[schema(ignore)]
    pub throttled: u64,
    /// Whether the whole pipeline is paused.
    pub stopped: bool,
    /// Since when it is paused, by whom, and why; absent: unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause: Option<PauseNote>,
}

/// The state of a bot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum BotState {
    /// Waiting for a worker, in the control set.
    Ready,
    /// Leased by a worker or a receiver.
    Leased,
    /// In backoff, waiting to batch, or without tokens.
    Parked,
    /// Paused by an operator.
    Paused,
    /// Nothing queued.
    Idle,
}

/// One bot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct BotView {
    /// Its id.
    pub bot: BotId,
    /// Its state.
    pub state: BotState,
    /// Events queued.
    pub depth: u64,
    /// Those of them in lanes that are set aside after a failure (`order_by`).
    #[serde(skip_serializing_if = "is_zero")]
    pub set_aside: u64,
    /// Age of its first event, ms.
    pub oldest_age_ms: u64,
    /// Fence of the current lease.
    pub fence: Option<u64>,
    /// When the lease or park ends, ms since 1970.
    pub until_ms: Option<u64>,
    /// Failures and lost leases since its last progress.
    pub attempts: u32,
    /// Relative share of the service.
    #[schema(value_type = f64)]
    pub weight: Weight,
    /// The rate that is set for it; absent: that of the pipeline.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub rate: Option<BotRate>,
    /// The burst that is set for it; absent: that of the pipeline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u32>,
    /// Since when its events wait for tokens of its rate, ms since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throttled_since_ms: Option<u64>,
    /// Since when it is paused, by whom, and why; absent: it is not paused, or unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause: Option<PauseNote>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// One event at the head of a queue.
#[derive(Debug, Serialize, ToSchema)]
pub struct QueuedEvent {
    /// Its sequence.
    pub sequence: u64,
    /// The event; `None` if the record cannot be read.
    pub event: Option<Event>,
}

impl Queue {
    /// The summary of the pipeline. `now` is the time since 1970.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn view(&self, now: Duration) -> Result<PipelineView, RedisError> {
        let mut pipe = Pipeline::new();
        for keys in self.shards().iter() {
            pipe.cmd("HMGET").arg(keys.meta()).arg("depth").arg("paused").arg("open").arg("lanes");
            pipe.cmd("ZCARD").arg(keys.ready());
            pipe.cmd("HLEN").arg(keys.owners());
            pipe.cmd("ZCARD").arg(keys.busy());
            pipe.cmd("SCARD").arg(keys.paused());
            pipe.cmd("ZCARD").arg(&keys.due);
            pipe.cmd("XLEN").arg(&keys.dlq);
            pipe.cmd("ZCARD").arg(&keys.slow);
            // The busiest bots wait at the end of the control set, so both of its ends are sampled.
            // Parked bots are at both ends of the busy set, so one end suffices.
            pipe.cmd("ZRANGE").arg(keys.ready()).arg(0).arg(SAMPLE / 2 - 1);
            pipe.cmd("ZRANGE").arg(keys.ready()).arg(-SAMPLE / 4).arg(-1);
            pipe.cmd("ZRANGE").arg(keys.busy()).arg(0).arg(SAMPLE / 4 - 1);
        }
        let values = self.link().run(&pipe).await?;
        let mut view = PipelineView::default();
        let (mut sampled, mut with_lanes, mut with_rates) = (Vec::new(), Vec::new(), Vec::new());
        for (keys, values) in self.shards().iter().zip(values.chunks(SHARD_COMMANDS)) {
            let (aside, throttled) = (view.set_aside, view.throttled);
            let bots = match self.view_shard(&mut view, values) {
                Ok(bots) => bots,
                Err(error) if error.is_passing() => return Err(error),
                // A damaged shard must not hide the others.
                Err(error) => {
                    if let Some(suppressed) = DAMAGED.take() {
                        let (pipeline, key) = (self.name(), keys.meta());
                        warn!(%pipeline, key, %error, suppressed,
                            "cannot read a shard; the view leaves it out");
                    }
                    continue;
                }
            };
            if view.set_aside > aside {
                with_lanes.extend_from_slice(&bots);
            }
            if view.throttled > throttled {
                with_rates.extend(bots.iter().map(|bot| (keys, bot.clone())));
            }
            sampled.extend(bots);
        }
        // Their events wait because of a setting, as those of paused bots.
        let throttled = self.throttled_among(with_rates, now).await?;
        sampled.retain(|bot| !throttled.contains(bot));
        with_lanes.retain(|bot| !throttled.contains(bot));
        let heads = self.heads(&sampled).await?;
        let aside = self.oldest_aside(&with_lanes).await?;
        let sequences = heads.values().map(|head| head.sequence).chain(aside.into_values());
        let oldest = sequences.filter(|sequence| *sequence > 0).min();
        view.oldest_age_ms = oldest.map_or(0, |sequence| age_ms(sequence, now));
        view.oldest = oldest.map(Sequence::new);
        Ok(view)
    }

    /// One bot.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn view_bot(&self, bot: &BotId, now: Duration) -> Result<BotView, RedisError> {
        let keys = self.keys(self.shard_of(bot));
        let mut views = self.view_bots(keys, std::slice::from_ref(bot), now).await?;
        views
            .pop()
            .ok_or_else(|| self.link().misread("view", ReplyError::unexpected("one bot", "none")))
    }

    /// The states of these bots' queues, without their events.
    pub(super) async fn heads(&self, bots: &[BotId]) -> Result<HashMap<BotId, Head>, RedisError> {
        let queues: Vec<(&BotId, Option<Lane>)> = bots.iter().map(|bot| (bot, None)).collect();
        Ok(self.heads_of(&queues, true).await?.into_iter().collect())
    }

    /// The states of these queues, and of lanes that are set aside, in any order. Only if they are `aged`,
    /// their sequences are read: Redis reads whole events for them, so a write reads the first ones that
    /// fit into [`READ_BYTES`], but at least one of each shard, and the next write goes on behind them.
    pub(super) async fn heads_of(
        &self,
        lists: &[(&BotId, Option<Lane>)],
        aged: bool,
    ) -> Result<Vec<(BotId, Head)>, RedisError> {
        let mut shards: HashMap<Shard, Vec<(&BotId, Option<Lane>)>> = HashMap::new();
        for &(bot, lane) in lists {
            shards.entry(self.shard_of(bot)).or_default().push((bot, lane));
        }
        let mut calls: Vec<Heads<'_>> = shards
            .iter()
            .flat_map(|(shard, lists)| {
                let keys = self.keys(*shard);
                lists.chunks(Heads::MAX).map(move |lists| Heads { keys, lists, bytes: 0 })
            })
            .collect();
        let mut found = Vec::with_capacity(lists.len());
        while !calls.is_empty() {
            if aged {
                let bytes = (READ_BYTES / calls.len()).max(1);
                for call in &mut calls {
                    call.bytes = bytes;
                }
            }
            let mut left = Vec::new();
            for (call, heads) in calls.iter().zip(self.link().call_all(&calls).await?) {
                let heads = heads?;
                let parts = call.lists.split_at_checked(heads.len());
                let (read, rest) = parts.filter(|(read, _)| !read.is_empty()).ok_or_else(|| {
                    let count = heads.len().to_string();
                    self.link().misread("heads", ReplyError::unexpected("some heads", &count))
                })?;
                found.extend(read.iter().map(|&(bot, _)| bot.clone()).zip(heads));
                if !rest.is_empty() {
                    left.push(Heads { keys: call.keys, lists: rest, bytes: 0 });
                }
            }
            calls = left;
        }
        Ok(found)
    }

    pub(super) async fn view_bots(
        &self,
        keys: &ShardKeys,
        bots: &[BotId],
        now: Duration,
    ) -> Result<Vec<BotView>, RedisError> {
        let mut pipe = Pipeline::new();
        for bot in bots {
            let id = bot.as_str();
            pipe.cmd("LLEN").arg(keys.queue(bot));
            pipe.cmd("ZSCORE").arg(keys.ready()).arg(id);
            pipe.cmd("ZSCORE").arg(keys.busy()).arg(id);
            pipe.cmd("HGET").arg(keys.owners()).arg(id);
            pipe.cmd("HGET").arg(keys.attempts()).arg(id);
            pipe.cmd("SISMEMBER").arg(keys.paused()).arg(id);
            pipe.cmd("HGET").arg(&keys.weight).arg(id);
            pipe.cmd("ZSCORE").arg(&keys.slow).arg(id);
            pipe.cmd("HGET").arg(keys.held()).arg(format!("a{id}"));
            pipe.cmd("HGET").arg(&keys.pauses).arg(id);
        }
        let values = self.link().run_checked("view", &pipe).await?;
        let mut reply = self.read("view", Reply::new(Value::Array(values)))?;
        let heads = self.heads(bots).await?;
        let first = |bot: &BotId| heads.get(bot).map_or(0, |head| head.sequence);
        let views = bots.iter().map(|bot| view_bot(bot, first(bot), &mut reply, now));
        let mut views: Vec<BotView> = self.read("view", views.collect())?;
        let with_lanes = views.iter().filter(|view| view.set_aside > 0);
        let with_lanes: Vec<BotId> = with_lanes.map(|view| view.bot.clone()).collect();
        let aside = self.oldest_aside(&with_lanes).await?;
        for view in &mut views {
            if let Some(sequence) = aside.get(&view.bot).filter(|sequence| **sequence > 0) {
                view.oldest_age_ms = view.oldest_age_ms.max(age_ms(*sequence, now));
            }
        }
        Ok(views)
    }

    /// Adds the counts of one shard; returns the bots to sample. An unreadable shard adds nothing.
    fn view_shard(
        &self,
        view: &mut PipelineView,
        values: &[Value],
    ) -> Result<Vec<BotId>, RedisError> {
        if let Some(Value::ServerError(error)) =
            values.iter().find(|value| matches!(value, Value::ServerError(_)))
        {
            return Err(self.link().refused("view", error));
        }
        let reply = Reply::new(Value::Array(values.to_vec()));
        let (shard, depth, bots) =
            self.read("view", reply.and_then(|mut reply| look(&mut reply)))?;
        if depth < 0
            && let Some(suppressed) = NEGATIVE.take()
        {
            warn!(pipeline = %self.name(), depth, suppressed,
                "the depth of a shard is negative: Redis lost its last writes; `fairlane check --audit` corrects it");
        }
        view.add(&shard);
        Ok(bots)
    }

    pub(super) fn read<T>(
        &self,
        command: &'static str,
        result: Result<T, ReplyError>,
    ) -> Result<T, RedisError> {
        result.map_err(|source| self.link().misread(command, source))
    }
}

impl PipelineView {
    fn add(&mut self, shard: &Self) {
        self.depth += shard.depth;
        self.ready += shard.ready;
        self.leased += shard.leased;
        self.open += shard.open;
        self.parked += shard.parked;
        self.paused += shard.paused;
        self.set_aside += shard.set_aside;
        self.delayed += shard.delayed;
        self.dead += shard.dead;
        self.throttled += shard.throttled;
        self.stopped |= shard.stopped;
        // The shards are paused one after the other, all with the same note.
        if self.pause.is_none() {
            self.pause.clone_from(&shard.pause);
        }
    }
}

/// One shard: its counts, its stored depth, and its bots to sample. After Redis lost its last
/// writes, counts may be wrong or negative.
fn look(reply: &mut Reply) -> Result<(PipelineView, i64, Vec<BotId>), ReplyError> {
    let mut meta = Reply::new(reply.next().unwrap_or(Value::Nil))?;
    let depth = meta.optional::<i64>()?.unwrap_or(0);
    let paused = meta.bytes()?;
    let stopped = paused.is_some();
    let pause = paused.and_then(|text| PauseNote::read(&String::from_utf8_lossy(&text)));
    let open = meta.optional::<i64>()?.unwrap_or(0);
    let lanes = meta.optional::<i64>()?.unwrap_or(0);
    let (ready, leased) = (reply.number()?, reply.number::<u64>()?);
    let view = PipelineView {
        depth: u64::try_from(depth).unwrap_or(0),
        ready,
        leased,
        open: u64::try_from(open).unwrap_or(0),
        parked: reply.number::<u64>()?.saturating_sub(leased),
        paused: reply.number()?,
        set_aside: u64::try_from(lanes).unwrap_or(0),
        delayed: reply.number()?,
        dead: reply.number()?,
        oldest_age_ms: 0,
        oldest: None,
        throttled: reply.number()?,
        stopped,
        pause,
    };
    let mut bots = Vec::new();
    for _ in 0..3 {
        let mut names = Reply::new(reply.next().unwrap_or(Value::Nil))?;
        while names.len() > 0 {
            if let Ok(bot) = BotId::parse(&names.text()?) {
                bots.push(bot);
            }
        }
    }
    Ok((view, depth, bots))
}

/// `first` is the sequence of its first event; 0 for none.
fn view_bot(
    bot: &BotId,
    first: u64,
    reply: &mut Reply,
    now: Duration,
) -> Result<BotView, ReplyError> {
    let depth: u64 = reply.number()?;
    let ready = reply.bytes()?.is_some();
    let until = reply.bytes()?;
    let own = reply.text()?;
    let attempts = reply.text()?;
    let paused = reply.number::<i64>()? == 1;
    let limits = reply.text()?;
    let limits = BotLimits::parse(&limits)
        .ok_or_else(|| ReplyError::unexpected("the limits of a bot", &limits))?;
    let slow = reply.score()?;
    // Events in lanes that are set aside are queued, too.
    let set_aside = reply.optional::<u64>()?.unwrap_or(0);
    let pause = PauseNote::read(&reply.text()?).filter(|_| paused);
    let depth = depth + set_aside;
    let state = match (own.is_empty(), until.is_some(), paused, ready) {
        (false, ..) => BotState::Leased,
        (_, true, ..) => BotState::Parked,
        (_, _, true, _) => BotState::Paused,
        (.., true) => BotState::Ready,
        _ => BotState::Idle,
    };
    Ok(BotView {
        bot: bot.clone(),
        state,
        depth,
        set_aside,
        oldest_age_ms: if first == 0 { 0 } else { age_ms(first, now) },
        fence: numbers(&own).first().copied(),
        until_ms: until
            .and_then(|text| parse_score(&String::from_utf8_lossy(&text)))
            .map(i64::unsigned_abs),
        attempts: u32::try_from(counted(&attempts)).unwrap_or(u32::MAX),
        weight: limits.weight.unwrap_or_default(),
        rate: limits.rate,
        burst: limits.burst,
        // A bot without events waits for nothing.
        throttled_since_ms: slow.filter(|_| depth > 0).map(i64::unsigned_abs),
        pause,
    })
}

/// The failures and lost leases of a bot since its last progress.
pub(super) fn counted(attempts: &str) -> u64 {
    numbers(attempts).get(1..3).map_or(0, |counts| counts.iter().sum())
}

fn numbers(text: &str) -> Vec<u64> {
    text.split('|').filter_map(|part| part.parse().ok()).collect()
}

fn age_ms(sequence: u64, now: Duration) -> u64 {
    crate::clock::micros(now).saturating_sub(sequence) / 1_000
}

#[cfg(test)]
mod tests;
