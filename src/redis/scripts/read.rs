//! Reads of queues and dead letters, in portions of a bounded size: one command never brings more
//! into memory than one portion.

use redis::{Cmd, Value};

use super::{Call, Index, evalsha};
use crate::id::{BotId, Lane, Offset};
use crate::redis::keys::ShardKeys;
use crate::redis::reply::{Reply, ReplyError};

/// The part of each record in a portion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Nothing, or this number of its first bytes.
    Start(usize),
    /// All of it.
    Whole,
}

impl Part {
    fn argument(self) -> i64 {
        match self {
            Self::Start(bytes) => i64::try_from(bytes).unwrap_or(i64::MAX),
            Self::Whole => -1,
        }
    }
}

/// `lua/peek.lua`.
#[derive(Debug)]
pub struct Peek<'a> {
    /// The shard of the bot.
    pub keys: &'a ShardKeys,
    /// The bot.
    pub bot: &'a BotId,
    /// A lane that is set aside; `None`: the queue.
    pub lane: Option<Lane>,
    /// The place of the first event, from 0.
    pub place: u64,
    /// The sequence of the event before it; 0 for none.
    pub before: u64,
    /// Maximum number of events.
    pub limit: usize,
    /// Maximum number of bytes of whole records; at least one record is read.
    pub bytes: usize,
    /// The part of each record in the reply.
    pub part: Part,
}

/// Events at the head of a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peeked {
    /// The place behind the last one; `None` at the end of the queue.
    pub next: Option<u64>,
    /// The records, or their starts.
    pub records: Vec<Vec<u8>>,
}

impl Call for Peek<'_> {
    type Reply = Peeked;
    const NAME: &'static str = "peek";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::peek, 1);
        let list = self.lane.map(|lane| self.keys.lane(lane, self.bot));
        cmd.arg(list.unwrap_or_else(|| self.keys.queue(self.bot))).arg(self.place).arg(self.before);
        cmd.arg(self.limit).arg(self.bytes).arg(self.part.argument());
        cmd
    }

    fn reply(value: Value) -> Result<Peeked, ReplyError> {
        let mut reply = Reply::new(value)?;
        let next = Some(reply.number()?).filter(|next| *next > 0);
        let mut records = Vec::with_capacity(reply.len());
        while reply.len() > 0 {
            records.push(reply.bytes()?.unwrap_or_default());
        }
        Ok(Peeked { next, records })
    }
}

/// `lua/arrived.lua`: the number of events up to each bound.
#[derive(Debug)]
pub struct Arrived<'a> {
    /// The shard of the bot.
    pub keys: &'a ShardKeys,
    /// The bot.
    pub bot: &'a BotId,
    /// The bounds: sequences.
    pub until: &'a [u64],
    /// Maximum number of bytes of records that are read, which the last one may exceed. What is not found
    /// until then is estimated.
    pub bytes: usize,
}

impl Call for Arrived<'_> {
    type Reply = Vec<u64>;
    const NAME: &'static str = "arrived";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::arrived, 1);
        cmd.arg(self.keys.queue(self.bot)).arg(self.until.len()).arg(self.bytes).arg(self.until);
        cmd
    }

    fn reply(value: Value) -> Result<Vec<u64>, ReplyError> {
        let mut reply = Reply::new(value)?;
        let mut counts = Vec::with_capacity(reply.len());
        while reply.len() > 0 {
            counts.push(reply.number()?);
        }
        Ok(counts)
    }
}

/// `lua/slice.lua`.
#[derive(Debug)]
pub struct ReadSlice<'a> {
    /// The shard of the bot.
    pub keys: &'a ShardKeys,
    /// The bot.
    pub bot: &'a BotId,
    /// Maximum number of events.
    pub limit: usize,
    /// Maximum number of bytes of records; at least one record is read.
    pub bytes: usize,
}

impl Call for ReadSlice<'_> {
    type Reply = Vec<Vec<u8>>;
    const NAME: &'static str = "slice";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::slice, 1);
        cmd.arg(self.keys.queue(self.bot)).arg(self.limit).arg(self.bytes);
        cmd
    }

    fn reply(value: Value) -> Result<Vec<Vec<u8>>, ReplyError> {
        let mut reply = Reply::new(value)?;
        let mut records = Vec::with_capacity(reply.len());
        while reply.len() > 0 {
            records.push(reply.bytes()?.unwrap_or_default());
        }
        Ok(records)
    }
}

/// `lua/slice.lua`, for a lane of a bot that is set aside.
#[derive(Debug)]
pub struct ReadLane<'a> {
    /// The lane.
    pub lane: Lane,
    /// What to read of it.
    pub slice: ReadSlice<'a>,
}

impl Call for ReadLane<'_> {
    type Reply = Vec<Vec<u8>>;
    const NAME: &'static str = "slice";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let ReadSlice { keys, bot, limit, bytes } = self.slice;
        let mut cmd = evalsha(Index::slice, 1);
        cmd.arg(keys.lane(self.lane, bot)).arg(limit).arg(bytes);
        cmd
    }

    fn reply(value: Value) -> Result<Vec<Vec<u8>>, ReplyError> {
        ReadSlice::reply(value)
    }
}

/// `lua/letters.lua`.
#[derive(Debug)]
pub struct Letters<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// Whether the newest ones come first.
    pub newest_first: bool,
    /// The start, as Redis writes ranges of a stream.
    pub from: &'a str,
    /// The end.
    pub until: &'a str,
    /// Maximum number of letters.
    pub limit: usize,
    /// No further letter is read once this number of bytes was.
    pub bytes: usize,
    /// The part of each record in the reply.
    pub part: Part,
}

/// A portion of the dead letters of a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LetterPortion {
    /// Whether there may be more.
    pub more: bool,
    /// The letters.
    pub letters: Vec<RawLetter>,
}

/// The stored form of a dead letter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawLetter {
    /// Its entry.
    pub entry: Offset,
    /// Length of its record, in bytes.
    pub bytes: usize,
    /// The bot.
    pub bot: String,
    /// The reason.
    pub reason: String,
    /// The number of attempts.
    pub attempts: u32,
    /// The time, ms since 1970.
    pub time_ms: u64,
    /// The record, or its start.
    pub record: Vec<u8>,
}

impl Call for Letters<'_> {
    type Reply = LetterPortion;
    const NAME: &'static str = "letters";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::letters, 1);
        cmd.arg(&self.keys.dlq).arg(if self.newest_first { "newest" } else { "oldest" });
        cmd.arg(self.from).arg(self.until).arg(self.limit).arg(self.bytes);
        cmd.arg(self.part.argument());
        cmd
    }

    fn reply(value: Value) -> Result<LetterPortion, ReplyError> {
        let mut reply = Reply::new(value)?;
        let more = reply.number::<u64>()? == 1;
        let mut letters = Vec::with_capacity(reply.len() / 7);
        while reply.len() > 0 {
            letters.push(RawLetter {
                entry: reply.parsed()?,
                bytes: reply.number()?,
                bot: reply.text()?,
                reason: reply.text()?,
                attempts: reply.number()?,
                time_ms: reply.number()?,
                record: reply.bytes()?.unwrap_or_default(),
            });
        }
        Ok(LetterPortion { more, letters })
    }
}
