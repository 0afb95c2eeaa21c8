//! The call that puts events of the bus into a queue again.

use redis::{Cmd, Value};

use super::{Call, Index, Limits, evalsha};
use crate::id::{BotId, Offset};
use crate::redis::keys::ShardKeys;
use crate::redis::reply::{Reply, ReplyError};

/// `lua/replay.lua`.
#[derive(Debug)]
pub struct Replay<'a> {
    /// The shard of `bot`.
    pub keys: &'a ShardKeys,
    /// The limits of the queue, with the quotas of the bot.
    pub limits: Limits,
    /// The id of the replay.
    pub id: &'a str,
    /// How long the positions are kept, ms.
    pub keep_ms: u64,
    /// The number of the stream in the replay.
    pub stream: usize,
    /// The bot.
    pub bot: &'a BotId,
    /// Offsets and serialised events, in order; at least one.
    pub events: &'a [(Offset, Vec<u8>)],
}

/// The answer to a [`Replay`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replayed {
    /// Number of events that an earlier call put.
    pub earlier: u64,
    /// Number of events that this call put.
    pub put: u64,
    /// The limit that refuses the other events.
    pub refused: Option<Refused>,
}

/// The limit that refuses events of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// `max_queue` of the pipeline.
    MaxQueue,
    /// `quotas.queued_bytes` of the bot.
    QueuedBytes,
}

impl Call for Replay<'_> {
    type Reply = Replayed;
    const NAME: &'static str = "replay";

    fn command(&self) -> Cmd {
        let (keys, limits) = (self.keys, self.limits);
        let mut cmd = evalsha(Index::replay, 10);
        cmd.arg(&keys.base).arg(keys.queue(self.bot)).arg(keys.replay(self.id));
        cmd.arg(limits.slice_us).arg(limits.linger_ms).arg(limits.max_queue).arg(self.keep_ms);
        cmd.arg(format!("{}:{}", self.stream, self.bot)).arg(self.events.len());
        for (offset, _) in self.events {
            cmd.arg(offset.to_string());
        }
        cmd.arg(self.bot.as_str()).arg(limits.quota.of_queue()).arg(self.events.len());
        for (_, event) in self.events {
            cmd.arg(event);
        }
        cmd
    }

    fn reply(value: Value) -> Result<Replayed, ReplyError> {
        let mut reply = Reply::new(value)?;
        let (earlier, put) = (reply.number()?, reply.number()?);
        let refused = match reply.text()?.as_str() {
            "" => None,
            "max_queue" => Some(Refused::MaxQueue),
            "queued_bytes" => Some(Refused::QueuedBytes),
            other => return Err(ReplyError::unexpected("a limit", other)),
        };
        Ok(Replayed { earlier, put, refused })
    }
}
