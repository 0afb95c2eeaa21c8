//! The lanes of a bot that are set aside, for operators.

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

    async fn replies(&self, pipe: &Pipeline) -> Result<Reply, RedisError> {
        let values = self.link().run_checked("view", pipe).await?;
        self.read("view", Reply::new(Value::Array(values)))
    }
}
