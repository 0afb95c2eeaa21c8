//! The lanes of a bot that are set aside, for operators.

use std::collections::HashMap;

use redis::{Pipeline, Value};
use serde::Serialize;
use utoipa::ToSchema;

use super::Queue;
use super::inspect::QueuedEvent;
use super::letters::PORTION_BYTES;
use super::next::sequence_of;
use crate::event::Event;
use crate::id::{BotId, Lane};
use crate::redis::scripts::{Attempts, Part, Peek};
use crate::redis::{RedisError, Reply};

/// Number of lanes whose first events are looked at for the age of the oldest one, but at least one of
/// each bot.
const LOOKED_AT: usize = 512;

/// A lane that is set aside after a failure, with its first events.
#[derive(Debug, Serialize, ToSchema)]
pub struct LaneAside {
    /// The number of the lane, 0 to 63. A hash puts each ordering key into one lane.
    #[schema(value_type = u8, minimum = 0, maximum = 63)]
    pub lane: Lane,
    /// Events in the lane.
    pub depth: u64,
    /// Failed attempts at its first event.
    pub attempts: u32,
    /// When it is tried again, ms since 1970. It may be in the past.
    pub due_ms: u64,
    /// Its first events, oldest first. Their keys are those of the lane.
    pub next: Vec<QueuedEvent>,
}

impl Queue {
    /// Maximum number of bytes of the events of [`Self::lanes_aside`], but at least one event.
    pub const ASIDE_BYTES: usize = PORTION_BYTES;

    /// The lanes of a bot that are set aside, in the order in which they are due. All together have at
    /// most `limit` events and `bytes` of them. Each lane has the same share of `limit`, but at least one.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn lanes_aside(
        &self,
        bot: &BotId,
        limit: usize,
        bytes: usize,
    ) -> Result<Vec<LaneAside>, RedisError> {
        let keys = self.keys_of(bot);
        let mut pipe = Pipeline::new();
        pipe.cmd("HGET").arg(keys.attempts()).arg(bot.as_str());
        let mut reply = self.replies(&pipe).await?;
        let (_, aside) = self.read("view", Attempts::read(&mut reply))?;
        if aside.is_empty() {
            return Ok(Vec::new());
        }
        let mut pipe = Pipeline::new();
        for waiting in aside.lanes() {
            pipe.cmd("LLEN").arg(keys.lane(waiting.lane, bot));
        }
        let mut depths = self.replies(&pipe).await?;
        let share = limit.div_ceil(aside.lanes().len());
        let (mut lanes, mut left, mut bytes_left) = (Vec::new(), limit, bytes);
        for waiting in aside.lanes() {
            let depth = self.read("view", depths.number())?;
            let mut next = Vec::new();
            if left > 0 && bytes_left > 0 {
                let peek = Peek {
                    keys,
                    bot,
                    lane: Some(waiting.lane),
                    place: 0,
                    before: 0,
                    limit: share.min(left),
                    bytes: bytes_left,
                    part: Part::Whole,
                };
                for record in self.link().call(&peek).await?.records {
                    left -= 1;
                    bytes_left = bytes_left.saturating_sub(record.len());
                    let event = Event::decode(&record, bot).ok().map(|(_, event)| event);
                    next.push(QueuedEvent { sequence: sequence_of(&record), event });
                }
            }
            let (lane, attempts, due_ms) = (waiting.lane, waiting.attempts, waiting.due_ms);
            lanes.push(LaneAside { lane, depth, attempts, due_ms, next });
        }
        Ok(lanes)
    }

    /// For each of these bots that has lanes set aside, the sequence of the oldest event in them. Many bots
    /// share the lanes that are looked at, so that a bot with many lanes hides no other.
    pub(super) async fn oldest_aside(
        &self,
        bots: &[BotId],
    ) -> Result<HashMap<BotId, u64>, RedisError> {
        let mut oldest = HashMap::new();
        if bots.is_empty() {
            return Ok(oldest);
        }
        let mut pipe = Pipeline::with_capacity(bots.len());
        for bot in bots {
            pipe.cmd("HGET").arg(self.keys_of(bot).attempts()).arg(bot.as_str());
        }
        let mut reply = self.replies(&pipe).await?;
        let mut with_lanes = Vec::new();
        for bot in bots {
            let (_, aside) = self.read("view", Attempts::read(&mut reply))?;
            if !aside.is_empty() {
                with_lanes.push((bot, aside));
            }
        }
        let share = (LOOKED_AT / with_lanes.len().max(1)).max(1);
        let mut lanes: Vec<(&BotId, Option<Lane>)> = Vec::new();
        for (bot, aside) in &with_lanes {
            let first = aside.lanes().iter().take(share);
            lanes.extend(first.map(|waiting| (*bot, Some(waiting.lane))));
        }
        for (bot, head) in self.heads_of(&lanes, true).await? {
            if head.depth > 0 {
                let first = oldest.entry(bot).or_insert(head.sequence);
                *first = head.sequence.min(*first);
            }
        }
        Ok(oldest)
    }

    async fn replies(&self, pipe: &Pipeline) -> Result<Reply, RedisError> {
        let values = self.link().run_checked("view", pipe).await?;
        self.read("view", Reply::new(Value::Array(values)))
    }
}
