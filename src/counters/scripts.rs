//! Counting views: `increment_if_exists`, `upsert`, `replace`, `import`.

use redis::{Cmd, Value};

use super::view::AdId;
use crate::id::{BotId, Sequence};
use crate::keyspace::keys::ShardKeys;
use crate::keyspace::scripts::{Call, LEDGERS, Limits, scripts};
use crate::keyspace::{Reply, ReplyError};

scripts! {
    SCRIPTS:
    increment_if_exists "increment_if_exists" LEDGERS, upsert "upsert" LEDGERS,
    replace "replace" LEDGERS, import "import" LEDGERS,
}

/// Where something is counted, and within which bounds.
#[derive(Debug, Clone, Copy)]
pub struct Counting<'a> {
    /// The shard of `bot`.
    pub keys: &'a ShardKeys,
    /// Bounds of the queue.
    pub limits: Limits,
    /// Most ads of a bot whose totals one generation caches.
    pub cached_ads: u64,
    /// Whose ad.
    pub bot: &'a BotId,
    /// Which ad.
    pub ad: &'a AdId,
}

impl Counting<'_> {
    /// The command up to the keys: the queue and the book of the bot, then `more`.
    fn begin(&self, script: Index, more: Option<String>) -> Cmd {
        let mut cmd = evalsha(script, 13 + usize::from(more.is_some()));
        cmd.arg(&self.keys.base).arg(self.keys.queue(self.bot)).arg(&self.keys.ledger(self.bot));
        cmd.arg(more);
        cmd
    }

    /// The event to queue, as the last arguments of `append`.
    fn event(&self, cmd: &mut Cmd, event: &[u8]) {
        cmd.arg(self.bot.as_str()).arg(1).arg(event);
    }
}

/// Some views of one ad.
#[derive(Debug, Clone, Copy)]
pub struct Views<'a> {
    /// Where.
    pub counting: Counting<'a>,
    /// How many.
    pub n: u64,
    /// Their event, encoded.
    pub event: &'a [u8],
    /// Makes a second call with the same key a no-op, for this many ms.
    pub idempotency: Option<(&'a str, u64)>,
}

impl Views<'_> {
    fn command(&self, script: Index) -> Cmd {
        let Counting { keys, limits, cached_ads, ad, .. } = self.counting;
        let mut cmd =
            self.counting.begin(script, self.idempotency.map(|(key, _)| keys.idempotency(key)));
        cmd.arg(ad.as_str()).arg(self.n).arg(cached_ads);
        cmd.arg(limits.slice_us).arg(limits.linger_ms);
        cmd.arg(self.idempotency.map_or(0, |(_, window_ms)| window_ms));
        self.counting.event(&mut cmd, self.event);
        cmd
    }
}

/// What became of views.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Viewed {
    /// Counted, or counted before under the same key: the new total then, if anybody could tell it.
    Counted(Option<u64>),
    /// Not counted: MongoDB is to be asked (again). What is told of completions comes back with the
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
    /// What to count.
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
    /// What to count.
    pub views: Views<'a>,
    /// What was told of completions when the total was not cached.
    pub acked: &'a str,
    /// Total and last sequence as MongoDB has them; `None`: it does not tell.
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

/// `lua/replace.lua`. Answers the sequence.
#[derive(Debug, Clone, Copy)]
pub struct Replace<'a> {
    /// Where.
    pub counting: Counting<'a>,
    /// The new total.
    pub total: u64,
    /// The event of it, encoded.
    pub event: &'a [u8],
}

impl Call for Replace<'_> {
    type Reply = Sequence;
    const NAME: &'static str = "replace";

    fn command(&self) -> Cmd {
        let Counting { limits, ad, .. } = self.counting;
        let mut cmd = self.counting.begin(Index::replace, None);
        cmd.arg(ad.as_str()).arg(self.total).arg(limits.slice_us).arg(limits.linger_ms);
        self.counting.event(&mut cmd, self.event);
        cmd
    }

    fn reply(value: Value) -> Result<Sequence, ReplyError> {
        Ok(Sequence::new(Reply::single(value)?.number()?))
    }
}

/// `lua/import.lua`. Answers whether the line was taken, and the last one that was.
#[derive(Debug, Clone, Copy)]
pub struct Import<'a> {
    /// Where.
    pub counting: Counting<'a>,
    /// The new total.
    pub total: u64,
    /// The event of it, encoded.
    pub event: &'a [u8],
    /// Names the import.
    pub key: &'a str,
    /// Must have been taken.
    pub before: u64,
    /// The line.
    pub line: u64,
    /// The last line that counts as taken with it: empty ones follow it.
    pub upto: u64,
    /// So long the import is remembered, in ms.
    pub keep_ms: u64,
}

/// What became of a line of an import.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// It was taken.
    Now,
    /// It was taken before.
    Before,
    /// Not taken: this is the last one that was, and lines are missing between.
    Gap(u64),
}

impl Call for Import<'_> {
    type Reply = Taken;
    const NAME: &'static str = "import";

    fn command(&self) -> Cmd {
        let Counting { keys, limits, ad, .. } = self.counting;
        let mut cmd = self.counting.begin(Index::import, Some(keys.idempotency(self.key)));
        cmd.arg(ad.as_str()).arg(self.total).arg(limits.slice_us).arg(limits.linger_ms);
        cmd.arg(self.before).arg(self.line).arg(self.upto).arg(self.keep_ms);
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
