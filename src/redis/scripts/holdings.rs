//! What bots hold: `audit`, and the deletion of dead letters.

use std::time::Duration;

use redis::{Cmd, Value};

use super::{Call, Index, evalsha};
use crate::clock::millis;
use crate::id::{BotId, Offset};
use crate::redis::keys::ShardKeys;
use crate::redis::reply::{Reply, ReplyError};

/// The dead letters that [`DropLetters`] deletes.
#[derive(Debug, Clone, Copy)]
pub enum Dropping<'a> {
    /// Those with these ids, at least one.
    Ids(&'a [Offset]),
    /// Those older than this by the server's clock, at most 100.
    Older(Duration),
}

/// `lua/drop_letters.lua`.
#[derive(Debug)]
pub struct DropLetters<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// The letters.
    pub letters: Dropping<'a>,
    /// No further letter is deleted once the records had this number of bytes, at least 1.
    pub bytes: usize,
}

/// The result of a [`DropLetters`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dropped {
    /// Number of deleted letters.
    pub count: u64,
    /// Whether there may be more. The same call goes on with them.
    pub more: bool,
}

impl Call for DropLetters<'_> {
    type Reply = Dropped;
    const NAME: &'static str = "drop_letters";

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::drop_letters, 9);
        cmd.arg(&self.keys.base).arg(&self.keys.dlq).arg(self.bytes);
        match self.letters {
            Dropping::Ids(ids) => {
                cmd.arg("ids");
                for id in ids {
                    cmd.arg(id.to_string());
                }
            }
            Dropping::Older(keep) => {
                cmd.arg("older").arg(millis(keep));
            }
        }
        cmd
    }

    fn reply(value: Value) -> Result<Dropped, ReplyError> {
        let mut reply = Reply::new(value)?;
        Ok(Dropped { count: reply.number()?, more: reply.number::<u64>()? == 1 })
    }
}

/// `lua/audit.lua`.
#[derive(Debug)]
pub struct Audit<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// The bots whose queues are compared; none: the delayed events and dead letters of the shard.
    pub bots: &'a [BotId],
    /// Maximum number of entries to read.
    pub entries_max: u64,
    /// Maximum number of their bytes. Up to 16 entries above it are read.
    pub bytes_max: u64,
}

/// The result of an [`Audit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Audited {
    /// Everything is correct now; this number of values was not.
    Set(u64),
    /// Not compared: there are too many entries or bytes.
    Many,
}

impl Call for Audit<'_> {
    type Reply = Audited;
    const NAME: &'static str = "audit";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::audit, 10 + self.bots.len());
        cmd.arg(&self.keys.base).arg(&self.keys.dlq).arg(&self.keys.later);
        for bot in self.bots {
            cmd.arg(self.keys.queue(bot));
        }
        cmd.arg(self.entries_max).arg(self.bytes_max);
        for bot in self.bots {
            cmd.arg(bot.as_str());
        }
        cmd
    }

    fn reply(value: Value) -> Result<Audited, ReplyError> {
        let mut reply = Reply::new(value)?;
        match reply.text()?.as_str() {
            "SET" => Ok(Audited::Set(reply.number()?)),
            "MANY" => Ok(Audited::Many),
            other => Err(ReplyError::unexpected("SET or MANY", other)),
        }
    }
}
