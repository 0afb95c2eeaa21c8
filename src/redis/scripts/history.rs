//! Calls that keep what was noted of attempts.

use redis::{Cmd, Value};

use super::{Call, Index, evalsha};
use crate::id::BotId;
use crate::redis::keys::ShardKeys;
use crate::redis::reply::{Reply, ReplyError};

/// Bounds of what is kept of attempts in one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// How long, ms.
    pub keep_ms: u64,
    /// Maximum number of bytes of completed slices.
    pub done_bytes: u64,
    /// Maximum number of bytes of failures.
    pub failed_bytes: u64,
    /// Maximum number of bytes of the failures of one bot.
    pub bot_bytes: u64,
}

/// `lua/record.lua`. There must be at least one portion or bot.
#[derive(Debug)]
pub struct Record<'a> {
    /// The keys of the shard.
    pub keys: &'a ShardKeys,
    /// The time, ms since 1970.
    pub now_ms: u64,
    /// The bounds.
    pub kept: Kept,
    /// Portions of completed slices.
    pub done: &'a [Vec<u8>],
    /// The failures of bots, each after its length in two bytes.
    pub failed: &'a [(BotId, Vec<u8>)],
}

impl Call for Record<'_> {
    type Reply = ();
    const NAME: &'static str = "record";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let Kept { keep_ms, done_bytes, failed_bytes, bot_bytes } = self.kept;
        let mut cmd = evalsha(Index::record, 4);
        for key in &self.keys.history {
            cmd.arg(key);
        }
        cmd.arg(self.now_ms).arg(keep_ms).arg(done_bytes).arg(failed_bytes).arg(bot_bytes);
        cmd.arg(self.done.len());
        for portion in self.done {
            cmd.arg(portion);
        }
        for (bot, failures) in self.failed {
            cmd.arg(bot.as_str()).arg(failures);
        }
        cmd
    }

    fn reply(value: Value) -> Result<(), ReplyError> {
        Reply::yes(value).map(drop)
    }
}
