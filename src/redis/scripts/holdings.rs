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

/// `lua/drop_letters.lua`. Returns the number of deleted letters.
#[derive(Debug)]
pub struct DropLetters<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// The letters.
    pub letters: Dropping<'a>,
}

impl DropLetters<'_> {
    /// Maximum number of letters that one call deletes.
    pub const MAX: u64 = 100;
}

impl Call for DropLetters<'_> {
    type Reply = u64;
    const NAME: &'static str = "drop_letters";

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::drop_letters, 9);
        cmd.arg(&self.keys.base).arg(&self.keys.dlq);
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

    fn reply(value: Value) -> Result<u64, ReplyError> {
        Reply::single(value)?.number()
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
}

/// The result of an [`Audit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Audited {
    /// Everything is correct now; this number of values was not.
    Set(u64),
    /// Not compared: there are too many entries.
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
        cmd.arg(self.entries_max);
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
