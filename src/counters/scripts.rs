//! The scripts that count views: `increment_if_exists`, `upsert`, `replace`, `import`.

use redis::{Cmd, Value};

use super::view::AdId;
use crate::id::{BotId, Sequence};
use crate::redis::keys::ShardKeys;
use crate::redis::scripts::{Call, LEDGERS, Limits, scripts};
use crate::redis::{Reply, ReplyError};

scripts! {
    SCRIPTS:
    increment_if_exists "increment_if_exists" LEDGERS, upsert "upsert" LEDGERS,
    replace "replace" LEDGERS, import "import" LEDGERS,
}

/// The ad to count for, and the bounds of its queue.
#[derive(Debug, Clone, Copy)]
pub struct Counting<'a> {
    /// The shard of `bot`.
    pub keys: &'a ShardKeys,
    /// The limits of the queue, with the quotas of the bot.
    pub limits: Limits,
    /// Maximum number of ads per bot whose totals one generation caches.
    pub cached_ads: u64,
    /// The bot.
    pub bot: &'a BotId,
    /// The ad.
    pub ad: &'a AdId,
}

impl Counting<'_> {
    /// The command with its keys: the queue and the ledger of the bot, then `more`.
    fn begin(&self, script: Index, more: &[String]) -> Cmd {
        let mut cmd = evalsha(script, 13 + more.len());
        cmd.arg(&self.keys.base).arg(self.keys.queue(self.bot)).arg(&self.keys.ledger(self.bot));
        cmd.arg(more);
        cmd
    }

    /// Adds the event to queue, as the arguments that `append` in `lua/shared.lua` reads.
    fn event(&self, cmd: &mut Cmd, event: &[u8]) {
        cmd.arg(self.bot.as_str()).arg(self.limits.quota.of_queue()).arg(1).arg(event);
    }
}

/// Some views of one ad.
#[derive(Debug, Clone, Copy)]
pub struct Views<'a> {
    /// The ad.
    pub counting: Counting<'a>,
    /// The number of views.
    pub n: u64,
    /// Their event, serialised.
    pub event: &'a [u8],
    /// A second call with the same key within this time (ms) changes nothing.
    pub idempotency: Option<(&'a str, u64)>,
}

impl Views<'_> {
    fn command(&self, script: Index) -> Cmd {
        let Counting { keys, limits, cached_ads, ad, .. } = self.counting;
        let more = match self.idempotency {
            Some((key, _)) => vec![keys.idempotency(key), keys.keys_meter(self.counting.bot)],
            None => Vec::new(),
        };
        let mut cmd = self.counting.begin(script, &more);
        cmd.arg(ad.as_str()).arg(self.n).arg(cached_ads);
        cmd.arg(limits.slice_us).arg(limits.linger_ms);
        cmd.arg(self.idempotency.map_or(0, |(_, window_ms)| window_ms)).arg(limits.quota.key_bytes);
        self.counting.event(&mut cmd, self.event);
        cmd
    }
}

/// The result of counting views.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Viewed {
    /// Counted, now or before under the same key, with the new total if it is known.
    Counted(Option<u64>),
    /// Not counted: the caller must ask MongoDB (again). It passes this state of completions to the
    /// next call.
    Ask(String),
}

impl Viewed {
    fn read(value: Value) -> Result<Self, ReplyError> {
        let mut reply = Reply::new(value)?;
        match &*reply.text()? {
            "OK" | "DUP" => Ok(Self::Counted(reply.optional()?)),
            "MISS" | "AGAIN" => Ok(Self::Ask(reply.text()?)),
            other => Err(ReplyError::unexpected("a status", other)),
        }
    }
}

/// `lua/increment_if_exists.lua`.
#[derive(Debug, Clone, Copy)]
pub struct IncrementIfExists<'a>(
    /// The views to count.
    pub Views<'a>,
);

impl Call for IncrementIfExists<'_> {
    type Reply = Viewed;
    const NAME: &'static str = "increment_if_exists";

    fn command(&self) -> Cmd {
        self.0.command(Index::increment_if_exists)
    }

    fn reply(value: Value) -> Result<Viewed, ReplyError> {
        Viewed::read(value)
    }
}

/// `lua/upsert.lua`.
#[derive(Debug, Clone, Copy)]
pub struct Upsert<'a> {
    /// The views to count.
    pub views: Views<'a>,
    /// The state of completions from the earlier reply.
    pub acked: &'a str,
    /// Total and last sequence in MongoDB; `None`: it does not answer.
    pub stored: Option<(u64, Sequence)>,
}

impl Call for Upsert<'_> {
    type Reply = Viewed;
    const NAME: &'static str = "upsert";

    fn command(&self) -> Cmd {
        let mut cmd = self.views.command(Index::upsert);
        cmd.arg(self.acked);
        match self.stored {
            Some((total, sequence)) => cmd.arg(total).arg(sequence.get()),
            None => cmd.arg("").arg(0),
        };
        cmd
    }

    fn reply(value: Value) -> Result<Viewed, ReplyError> {
        Viewed::read(value)
    }
}

/// `lua/replace.lua`. Returns the sequence.
#[derive(Debug, Clone, Copy)]
pub struct Replace<'a> {
    /// The ad.
    pub counting: Counting<'a>,
    /// The new total.
    pub total: u64,
    /// The event of the replacement, serialised.
    pub event: &'a [u8],
}

impl Call for Replace<'_> {
    type Reply = Sequence;
    const NAME: &'static str = "replace";

    fn command(&self) -> Cmd {
        let Counting { limits, cached_ads, ad, .. } = self.counting;
        let mut cmd = self.counting.begin(Index::replace, &[]);
        cmd.arg(ad.as_str()).arg(self.total).arg(limits.slice_us).arg(limits.linger_ms);
        cmd.arg(cached_ads);
        self.counting.event(&mut cmd, self.event);
        cmd
    }

    fn reply(value: Value) -> Result<Sequence, ReplyError> {
        let mut reply = Reply::new(value)?;
        match &*reply.text()? {
            "OK" => Ok(Sequence::new(reply.number()?)),
            other => Err(ReplyError::unexpected("a status", other)),
        }
    }
}

/// `lua/import.lua`. Returns whether the line was accepted, and the last accepted line.
#[derive(Debug, Clone, Copy)]
pub struct Import<'a> {
    /// The ad.
    pub counting: Counting<'a>,
    /// The new total.
    pub total: u64,
    /// The event of the replacement, serialised.
    pub event: &'a [u8],
    /// The key of the import.
    pub key: &'a str,
    /// The line that must have been accepted before.
    pub before: u64,
    /// The line.
    pub line: u64,
    /// The last line that is accepted with it: empty lines follow it.
    pub upto: u64,
    /// How long the import is remembered, in ms.
    pub keep_ms: u64,
}

/// The result for a line of an import.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// Accepted now.
    Now,
    /// Accepted before.
    Before,
    /// Refused: this is the last accepted line, and lines in between are missing.
    Gap(u64),
}

impl Call for Import<'_> {
    type Reply = Taken;
    const NAME: &'static str = "import";

    fn command(&self) -> Cmd {
        let Counting { keys, limits, cached_ads, bot, ad } = self.counting;
        let remembered = [keys.idempotency(self.key), keys.imports_meter(bot)];
        let mut cmd = self.counting.begin(Index::import, &remembered);
        cmd.arg(ad.as_str()).arg(self.total).arg(limits.slice_us).arg(limits.linger_ms);
        cmd.arg(self.before).arg(self.line).arg(self.upto).arg(self.keep_ms);
        cmd.arg(limits.quota.key_bytes).arg(cached_ads);
        self.counting.event(&mut cmd, self.event);
        cmd
    }

    fn reply(value: Value) -> Result<Taken, ReplyError> {
        let mut reply = Reply::new(value)?;
        match &*reply.text()? {
            "OK" => Ok(Taken::Now),
            "DUP" => Ok(Taken::Before),
            "GAP" => Ok(Taken::Gap(reply.number()?)),
            other => Err(ReplyError::unexpected("a status", other)),
        }
    }
}
