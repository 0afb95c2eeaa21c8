//! The scripts that limit how fast bots are handled: `permit`, `budget`, and `set` for operators.

use redis::{Cmd, Value};

use super::{Call, Index, evalsha};
use crate::id::BotId;
use crate::rate::{BotRate, Bucket, Change, Weight};
use crate::redis::keys::ShardKeys;
use crate::redis::reply::{Reply, ReplyError};

/// `lua/permit.lua`.
#[derive(Debug)]
pub struct Permit<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// The bot.
    pub bot: &'a BotId,
    /// Number of events that could be handled.
    pub want: usize,
    /// Number of tokens of earlier calls that are not used yet. They count as taken now.
    pub held: usize,
    /// The bucket of the bot.
    pub bucket: Bucket,
}

/// The answer to a [`Permit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permitted {
    /// Number of events that may be handled.
    pub granted: usize,
    /// When the next token comes, ms from now; 0: there is one.
    pub wait_ms: u64,
}

impl Call for Permit<'_> {
    type Reply = Permitted;
    const NAME: &'static str = "permit";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::permit, 3);
        cmd.arg(&self.keys.rate).arg(&self.keys.slow).arg(self.keys.queue(self.bot));
        cmd.arg(self.bot.as_str()).arg(self.want);
        cmd.arg(self.bucket.interval_us.to_string()).arg(self.bucket.burst).arg(self.held);
        cmd
    }

    fn reply(value: Value) -> Result<Permitted, ReplyError> {
        let mut reply = Reply::new(value)?;
        Ok(Permitted { granted: reply.number()?, wait_ms: reply.number()? })
    }
}

/// `lua/set.lua`. Returns whether it was set; otherwise the shard has its maximum of such bots.
#[derive(Debug)]
pub struct Set<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// The bot.
    pub bot: &'a BotId,
    /// One slice, µs.
    pub slice_us: u64,
    /// Maximum number of bots of the shard for which something is set.
    pub max: usize,
    /// `None`: as it is.
    pub weight: Option<Weight>,
    /// Its rate.
    pub rate: Change<BotRate>,
    /// Maximum number of its events at once.
    pub burst: Change<u32>,
}

impl Call for Set<'_> {
    type Reply = bool;
    const NAME: &'static str = "set";

    fn command(&self) -> Cmd {
        fn text<T: ToString>(change: Change<T>) -> String {
            match change {
                Change::Keep => "=".to_owned(),
                Change::Reset => String::new(),
                Change::To(to) => to.to_string(),
            }
        }
        let mut cmd = evalsha(Index::set, 10);
        cmd.arg(&self.keys.base).arg(&self.keys.weight).arg(self.keys.queue(self.bot));
        cmd.arg(self.bot.as_str()).arg(self.slice_us).arg(self.max);
        cmd.arg(text(self.weight.map_or(Change::Keep, Change::To)))
            .arg(text(self.rate))
            .arg(text(self.burst));
        cmd
    }

    fn reply(value: Value) -> Result<bool, ReplyError> {
        Reply::yes(value)
    }
}

/// `lua/budget.lua`.
#[derive(Debug)]
pub struct Budget<'a> {
    /// The shard that keeps the budget of the pipeline.
    pub keys: &'a ShardKeys,
    /// The process.
    pub process: &'a str,
    /// Number of slices that it wants to have under way, of at most this number over all processes.
    pub slices: Option<(usize, usize)>,
    /// How long it holds them, ms.
    pub ttl_ms: u64,
    /// Number of tokens that it wants of the bucket.
    pub tokens: Option<(usize, Bucket)>,
    /// Unused tokens of the grant with this stamp.
    pub unused: (usize, u64),
}

/// The answer to a [`Budget`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budgeted {
    /// Number of slices that the process holds now.
    pub slices: usize,
    /// Number of granted tokens.
    pub tokens: usize,
    /// When the next token comes, ms from now; 0: there is one.
    pub wait_ms: u64,
    /// Names this grant.
    pub stamp: u64,
}

impl Call for Budget<'_> {
    type Reply = Budgeted;
    const NAME: &'static str = "budget";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::budget, 2);
        cmd.arg(&self.keys.slots).arg(&self.keys.tokens);
        let (slices, max) = self.slices.unwrap_or_default();
        let (tokens, bucket) = self.tokens.map_or((0, None), |(n, bucket)| (n, Some(bucket)));
        cmd.arg(self.process).arg(slices).arg(max).arg(self.ttl_ms).arg(tokens);
        cmd.arg(bucket.map_or(0.0, |bucket| bucket.interval_us).to_string());
        cmd.arg(bucket.map_or(0, |bucket| bucket.burst)).arg(self.unused.0).arg(self.unused.1);
        cmd
    }

    fn reply(value: Value) -> Result<Budgeted, ReplyError> {
        let mut reply = Reply::new(value)?;
        Ok(Budgeted {
            slices: reply.number()?,
            tokens: reply.number()?,
            wait_ms: reply.number()?,
            stamp: reply.number()?,
        })
    }
}
