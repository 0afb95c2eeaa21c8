//! One typed call per `lua/*.lua`, by the same name. Nothing else runs a script.
//!
//! A [`Call`] knows its script, its command and how to read the reply; [`super::Link`] sends one
//! or many of them.

use std::sync::{Arc, LazyLock};

use redis::{Cmd, Value};

use super::keys::ShardKeys;
use super::reply::{Reply, ReplyError};
use crate::id::{BotId, Fence, Offset, Sequence};

/// A script as it is loaded: its first line, `lua/shared.lua` where it needs that, its body.
pub(super) struct Script {
    pub(super) code: String,
    sha: String,
}

macro_rules! scripts {
    ($($const:ident $name:literal $shared:literal),+ $(,)?) => {
        #[derive(Debug, Clone, Copy)]
        #[expect(non_camel_case_types, reason = "named as the files are")]
        enum Index { $($const),+ }

        /// Every script, in one table.
        pub(super) static SCRIPTS: LazyLock<Vec<Script>> = LazyLock::new(|| {
            vec![$(Script::new(include_str!(concat!("../../lua/", $name, ".lua")), $shared)),+]
        });
    };
}
scripts! {
    enqueue "enqueue" true, push "push" true, claim "claim" true, complete "complete" true,
    promote "promote" true, pause "pause" true, resume "resume" true, purge "purge" true,
    redrive "redrive" true, revoke "revoke" true, recover "recover" true,
    hold "hold" false, trim "trim" false,
}

impl Script {
    #[expect(clippy::disallowed_methods, reason = "the one place that knows scripts")]
    fn new(file: &str, shared: bool) -> Self {
        const SHARED: &str = include_str!("../../lua/shared.lua");
        let (first, body) = file.split_once('\n').unwrap_or((file, ""));
        let code = format!("{first}\n{}\n{body}", if shared { SHARED } else { "" });
        let sha = redis::Script::new(&code).get_hash().to_owned();
        Self { code, sha }
    }
}

/// A call of one script.
pub trait Call {
    /// What it answers.
    type Reply;
    /// The script's name: file, metric label.
    const NAME: &'static str;
    /// The command that runs it.
    fn command(&self) -> Cmd;
    /// Reads the reply.
    ///
    /// # Errors
    /// When the reply has another shape than the script's contract says.
    fn reply(value: Value) -> Result<Self::Reply, ReplyError>;
}

fn evalsha(script: Index, keys: usize) -> Cmd {
    let mut cmd = redis::cmd("EVALSHA");
    cmd.arg(&SCRIPTS[script as usize].sha).arg(keys);
    cmd
}

/// What bounds a queue and its dead letters.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// How far ahead of the clock a bot's last finish may be and the bot still counts as quiet, µs.
    pub slice_us: u64,
    /// How long a bot that becomes ready waits for more events, ms.
    pub linger_ms: u64,
    /// Most events per bot; 0: no bound.
    pub max_queue: u64,
    /// Whether events beyond `max_queue` become dead letters; else they are dropped.
    pub overflow_dead: bool,
    /// Most dead letters per shard.
    pub dead_max: u64,
}

impl Limits {
    fn overflow(self) -> &'static str {
        if self.overflow_dead { "dead" } else { "drop_new" }
    }
}

/// What became of events that were to be queued.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Queued {
    /// Appended to queues.
    pub appended: u64,
    /// Made dead letters because a queue was full.
    pub dead: u64,
    /// Dropped because a queue was full.
    pub dropped: u64,
    /// Old dead letters that had to go.
    pub letters_removed: u64,
}

impl Queued {
    fn read(reply: &mut Reply) -> Result<Self, ReplyError> {
        Ok(Self {
            appended: reply.number()?,
            dead: reply.number()?,
            dropped: reply.number()?,
            letters_removed: reply.number()?,
        })
    }
}

/// `lua/enqueue.lua`.
#[derive(Debug)]
pub struct Enqueue<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// The bus stream.
    pub stream: &'a str,
    /// The last offset sent to this shard before.
    pub prev: Offset,
    /// The last offset this call covers.
    pub last: Offset,
    /// Bounds.
    pub limits: Limits,
    /// Encoded events per bot, in order.
    pub bots: Vec<(BotId, Vec<&'a [u8]>)>,
}

/// Where the shard stands after an [`Enqueue`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Enqueued {
    /// Copied now.
    Ok(Queued),
    /// Copied before.
    Duplicate(Offset),
    /// The shard stands elsewhere: the bus is to be read again from there.
    Gap(Offset),
}

impl Call for Enqueue<'_> {
    type Reply = Enqueued;
    const NAME: &'static str = "enqueue";

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::enqueue, 10 + self.bots.len());
        cmd.arg(&self.keys.base).arg(&self.keys.hwm).arg(&self.keys.dlq);
        for (bot, _) in &self.bots {
            cmd.arg(self.keys.queue(bot));
        }
        let limits = self.limits;
        cmd.arg(self.stream).arg(self.prev.to_string()).arg(self.last.to_string());
        cmd.arg(limits.slice_us).arg(limits.linger_ms).arg(limits.max_queue);
        cmd.arg(limits.overflow()).arg(limits.dead_max);
        for (bot, events) in &self.bots {
            cmd.arg(bot.as_str()).arg(events.len());
            for event in events {
                cmd.arg(*event);
            }
        }
        cmd
    }

    fn reply(value: Value) -> Result<Enqueued, ReplyError> {
        let mut reply = Reply::new(value)?;
        let (status, offset) = (reply.text()?, reply.parsed()?);
        match &*status {
            "OK" => Ok(Enqueued::Ok(Queued::read(&mut reply)?)),
            "DUP" => Ok(Enqueued::Duplicate(offset)),
            "GAP" => Ok(Enqueued::Gap(offset)),
            _ => Err(ReplyError::unexpected("a status", &status)),
        }
    }
}

/// `lua/push.lua`.
#[derive(Debug)]
pub struct Push<'a> {
    /// The shard of `bot`.
    pub keys: &'a ShardKeys,
    /// Bounds.
    pub limits: Limits,
    /// Whose queue.
    pub bot: &'a BotId,
    /// Encoded events, in order; exactly one when delayed.
    pub events: &'a [Vec<u8>],
    /// When the event becomes due, ms since 1970; 0: now.
    pub due_ms: u64,
    /// Makes a second call with the same key a no-op, for this many ms.
    pub idempotency: Option<(&'a str, u64)>,
}

/// The answer to a [`Push`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pushed {
    /// What became of the events; all zero for a duplicate.
    pub queued: Queued,
    /// The last sequence given, which is also the id of a delayed event.
    pub sequence: Sequence,
    /// Whether the idempotency key was seen before.
    pub duplicate: bool,
}

impl Call for Push<'_> {
    type Reply = Pushed;
    const NAME: &'static str = "push";

    fn command(&self) -> Cmd {
        let keys = self.keys;
        let mut cmd = evalsha(Index::push, 12 + usize::from(self.idempotency.is_some()));
        cmd.arg(&keys.base).arg(&keys.dlq).arg(&keys.due).arg(&keys.later);
        cmd.arg(keys.queue(self.bot));
        if let Some((key, _)) = self.idempotency {
            cmd.arg(keys.idempotency(key));
        }
        let limits = self.limits;
        cmd.arg(limits.slice_us).arg(limits.linger_ms).arg(limits.max_queue);
        cmd.arg(limits.overflow()).arg(limits.dead_max).arg(self.due_ms);
        cmd.arg(self.idempotency.map_or(0, |(_, window_ms)| window_ms));
        cmd.arg(self.bot.as_str()).arg(self.events.len()).arg(self.events);
        cmd
    }

    fn reply(value: Value) -> Result<Pushed, ReplyError> {
        let mut reply = Reply::new(value)?;
        let duplicate = &*reply.text()? == "DUP";
        let queued = if duplicate { Queued::default() } else { Queued::read(&mut reply)? };
        Ok(Pushed { queued, sequence: Sequence::new(reply.number()?), duplicate })
    }
}

/// `lua/claim.lua`.
#[derive(Debug)]
pub struct Claim<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// Most bots to lease, at most 64; 0 only reaps and looks.
    pub max: usize,
    /// Highest score to take; `None`: any.
    pub bound: Option<i64>,
    /// How long the lease lasts before it must be confirmed, ms.
    pub ttl_ms: u64,
    /// The highest virtual clock seen on any shard, µs.
    pub seen: u64,
    /// One slice, µs.
    pub slice_us: u64,
    /// Nothing is known to be ready or busy on any other shard.
    pub alone: bool,
    /// How many events a bot takes one by one after its holder vanished.
    pub isolate: usize,
}

/// The answer to a [`Claim`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claimed {
    /// The shard's virtual clock, µs.
    pub clock: u64,
    /// The lowest score left.
    pub low: Option<i64>,
    /// When the next lease or park ends, ms since 1970.
    pub deadline_ms: Option<u64>,
    /// The server's time, µs since 1970.
    pub now_us: u64,
    /// Bots left ready in this shard.
    pub ready: u64,
    /// Leases that ran out and were reaped by this call.
    pub vanished: u64,
    /// The beginning of the server's run id, which names the leases together with their fences.
    pub run: Arc<str>,
    /// What was leased.
    pub leases: Vec<Grant>,
}

/// One leased bot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// Whose queue.
    pub bot: BotId,
    /// The lease's number.
    pub fence: Fence,
    /// Virtual start, µs.
    pub start: u64,
    /// What happened since the bot last made progress.
    pub attempts: Attempts,
    /// The bot's share relative to 1, at least 1.
    pub weight: u32,
}

/// What happened to a bot since it last made progress.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Attempts {
    /// Leases that ran out before anybody confirmed them. They count for nothing.
    pub suspect: u32,
    /// Confirmed leases that ran out.
    pub lost: u32,
    /// Failures a handler reported.
    pub failed: u32,
    /// How many events are still to be taken one by one.
    pub isolate: u32,
}

impl Attempts {
    /// Attempts that count towards `max_attempts`.
    #[must_use]
    pub fn counted(self) -> u32 {
        self.lost.saturating_add(self.failed)
    }

    /// Whether a holder vanished, or may have.
    #[must_use]
    pub fn vanished(self) -> bool {
        self.suspect > 0 || self.lost > 0
    }

    /// Whether the events are to be taken one by one.
    #[must_use]
    pub fn isolated(self) -> bool {
        self != Self::default()
    }

    fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self::default());
        }
        let mut parts = text.split('|').map(str::parse);
        let mut next = || parts.next()?.ok();
        Some(Self { suspect: next()?, lost: next()?, failed: next()?, isolate: next()? })
    }
}

impl Call for Claim<'_> {
    type Reply = Claimed;
    const NAME: &'static str = "claim";

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::claim, 9);
        cmd.arg(&self.keys.base).arg(&self.keys.weight).arg(self.max);
        match self.bound {
            Some(bound) => cmd.arg(bound),
            None => cmd.arg("+inf"),
        };
        cmd.arg(self.ttl_ms).arg(self.seen).arg(self.slice_us);
        cmd.arg(u8::from(self.alone)).arg(self.isolate);
        cmd
    }

    fn reply(value: Value) -> Result<Claimed, ReplyError> {
        let mut reply = Reply::new(value)?;
        let mut claimed = Claimed {
            clock: reply.number()?,
            low: reply.score()?,
            deadline_ms: reply.optional()?,
            now_us: reply.number()?,
            ready: reply.number()?,
            vanished: reply.number()?,
            run: reply.text()?.into(),
            leases: Vec::with_capacity(reply.len() / 5),
        };
        while reply.len() > 0 {
            let bot = reply.text()?;
            claimed.leases.push(Grant {
                bot: BotId::parse(&bot).map_err(|_| ReplyError::unexpected("a bot id", &bot))?,
                fence: Fence::new(reply.number()?),
                start: reply.number()?,
                attempts: {
                    let text = reply.text()?;
                    Attempts::parse(&text).ok_or_else(|| ReplyError::unexpected("att", &text))?
                },
                weight: reply.number()?,
            });
        }
        Ok(claimed)
    }
}

/// What becomes of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// It goes on for `ttl_ms` from now.
    Keep {
        /// New time to live.
        ttl_ms: u64,
    },
    /// It ends; with events left the bot is ready again.
    Release,
    /// It ends; the bot rests.
    Park {
        /// For how long.
        ms: u64,
    },
    /// It ends with one failure counted; the bot rests.
    Fail {
        /// For how long.
        ms: u64,
        /// How many events are to be taken one by one from now on.
        isolate: u32,
    },
}

/// An event that is not done but leaves the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exception {
    /// Its place among the events to remove, from 0.
    pub index: usize,
    /// Where it goes.
    pub fate: Fate,
}

/// Where an exception goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fate {
    /// To the dead letters.
    Dead {
        /// Why.
        reason: String,
        /// After how many attempts.
        attempts: u32,
    },
    /// Delayed until a time, ms since 1970.
    Later {
        /// When it becomes due.
        at_ms: u64,
    },
}

/// One lease to end or to go on with.
#[derive(Debug, Clone)]
pub struct Completion {
    /// Whose queue.
    pub bot: BotId,
    /// The run of the server that gave the lease.
    pub run: Arc<str>,
    /// The lease.
    pub fence: Fence,
    /// Events already removed under this lease.
    pub before: usize,
    /// Events to remove now.
    pub n: usize,
    /// What becomes of the lease.
    pub mode: Mode,
    /// Virtual cost of what was done, µs.
    pub cost: u64,
    /// Those of the `n` that are not done.
    pub exceptions: Vec<Exception>,
}

/// `lua/complete.lua`.
#[derive(Debug)]
pub struct Complete<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// Most dead letters of the shard.
    pub dead_max: u64,
    /// At most 64, each bot at most once.
    pub items: &'a [Completion],
}

/// The answer to a [`Complete`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completed {
    /// The shard's virtual clock, µs.
    pub clock: u64,
    /// The shard's lowest score.
    pub low: Option<i64>,
    /// When the next lease or park ends, ms since 1970.
    pub deadline_ms: Option<u64>,
    /// Old dead letters that had to go.
    pub letters_removed: u64,
    /// One per item.
    pub verdicts: Vec<Verdict>,
}

/// What the script did with one completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Done, or had been done before.
    Ok,
    /// The lease is not the bot's current one: nothing was changed.
    Stale,
    /// The count does not fit the lease: nothing was changed.
    Bad,
}

impl Call for Complete<'_> {
    type Reply = Completed;
    const NAME: &'static str = "complete";

    fn command(&self) -> Cmd {
        let keys = self.keys;
        let mut cmd = evalsha(Index::complete, 11 + self.items.len());
        cmd.arg(&keys.base).arg(&keys.dlq).arg(&keys.due).arg(&keys.later);
        for item in self.items {
            cmd.arg(keys.queue(&item.bot));
        }
        cmd.arg(self.dead_max);
        for item in self.items {
            let (mode, ms, isolate) = match item.mode {
                Mode::Keep { ttl_ms } => ("keep", ttl_ms, 0),
                Mode::Release => ("release", 0, 0),
                Mode::Park { ms } => ("park", ms, 0),
                Mode::Fail { ms, isolate } => ("fail", ms, isolate),
            };
            cmd.arg(item.bot.as_str()).arg(&*item.run).arg(item.fence.get());
            cmd.arg(item.before).arg(item.n);
            cmd.arg(mode).arg(ms).arg(item.cost).arg(isolate).arg(item.exceptions.len());
            for exception in &item.exceptions {
                cmd.arg(exception.index);
                match &exception.fate {
                    Fate::Dead { reason, attempts } => {
                        cmd.arg("dead").arg(reason).arg(*attempts);
                    }
                    Fate::Later { at_ms } => {
                        cmd.arg("later").arg(*at_ms).arg("");
                    }
                }
            }
        }
        cmd
    }

    fn reply(value: Value) -> Result<Completed, ReplyError> {
        let mut reply = Reply::new(value)?;
        let mut completed = Completed {
            clock: reply.number()?,
            low: reply.score()?,
            deadline_ms: reply.optional()?,
            letters_removed: reply.number()?,
            verdicts: Vec::with_capacity(reply.len()),
        };
        while reply.len() > 0 {
            let verdict = reply.text()?;
            completed.verdicts.push(match &*verdict {
                "OK" => Verdict::Ok,
                "STALE" => Verdict::Stale,
                "BAD" => Verdict::Bad,
                _ => return Err(ReplyError::unexpected("a verdict", &verdict)),
            });
        }
        Ok(completed)
    }
}

/// `lua/promote.lua`.
#[derive(Debug)]
pub struct Promote<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// One slice, µs.
    pub slice_us: u64,
    /// Ids and bots of delayed events, oldest first, at most 100.
    pub events: &'a [(String, BotId)],
}

/// The answer to a [`Promote`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promoted {
    /// Events moved.
    pub moved: u64,
    /// The next due time, ms since 1970.
    pub next_ms: Option<u64>,
}

impl Call for Promote<'_> {
    type Reply = Promoted;
    const NAME: &'static str = "promote";

    fn command(&self) -> Cmd {
        let keys = self.keys;
        let mut cmd = evalsha(Index::promote, 10 + self.events.len());
        cmd.arg(&keys.base).arg(&keys.due).arg(&keys.later);
        for (_, bot) in self.events {
            cmd.arg(keys.queue(bot));
        }
        cmd.arg(self.slice_us);
        for (id, bot) in self.events {
            cmd.arg(id).arg(bot.as_str());
        }
        cmd
    }

    fn reply(value: Value) -> Result<Promoted, ReplyError> {
        let mut reply = Reply::new(value)?;
        Ok(Promoted { moved: reply.number()?, next_ms: reply.optional()? })
    }
}

macro_rules! bot_call {
    ($(#[$doc:meta])* $type:ident $name:ident, $keys:literal, $reply:ty,
     |$self:ident, $cmd:ident| $args:block, |$value:ident| $read:block,
     { $($(#[$field_doc:meta])* $field:ident: $field_type:ty),* }) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $type<'a> {
            /// The shard.
            pub keys: &'a ShardKeys,
            $($(#[$field_doc])* pub $field: $field_type),*
        }
        impl Call for $type<'_> {
            type Reply = $reply;
            const NAME: &'static str = stringify!($name);
            fn command(&$self) -> Cmd {
                let mut $cmd = evalsha(Index::$name, $keys);
                $cmd.arg(&$self.keys.base);
                $args
                $cmd
            }
            fn reply(value: Value) -> Result<$reply, ReplyError> {
                let $value = Reply::single(value)?.number::<i64>()?;
                Ok($read)
            }
        }
    };
}

bot_call! {
    /// `lua/pause.lua`. Answers whether that changed something.
    Pause pause, 8, bool,
    |self, cmd| { cmd.arg(self.bot.map_or("", BotId::as_str)); }, |n| { n == 1 },
    { /// `None`: the whole shard.
      bot: Option<&'a BotId> }
}

bot_call! {
    /// `lua/purge.lua`. Answers how many events were deleted.
    Purge purge, 9, u64,
    |self, cmd| { cmd.arg(self.keys.queue(self.bot)).arg(self.bot.as_str()); },
    |n| { n.unsigned_abs() },
    { /// Whose queue.
      bot: &'a BotId }
}

bot_call! {
    /// `lua/redrive.lua`. Answers whether there was such a dead letter.
    Redrive redrive, 10, bool,
    |self, cmd| {
        cmd.arg(&self.keys.dlq).arg(self.keys.queue(self.bot));
        cmd.arg(self.id.to_string()).arg(self.bot.as_str()).arg(self.slice_us);
    }, |n| { n == 1 },
    { /// The dead letter.
      id: Offset,
      /// Whose event it is.
      bot: &'a BotId,
      /// One slice, µs.
      slice_us: u64 }
}

bot_call! {
    /// `lua/revoke.lua`. Answers whether there was a lease or park.
    Revoke revoke, 9, bool,
    |self, cmd| {
        cmd.arg(self.keys.queue(self.bot)).arg(self.bot.as_str()).arg(self.slice_us);
    }, |n| { n == 1 },
    { /// Whose lease.
      bot: &'a BotId,
      /// One slice, µs.
      slice_us: u64 }
}

bot_call! {
    /// `lua/recover.lua`. Answers how many leases were revoked; `None`: the run is known.
    Recover recover, 8, Option<u64>,
    |self, cmd| { cmd.arg(self.run).arg(self.slice_us); }, |n| { u64::try_from(n).ok() },
    { /// The server's run id.
      run: &'a str,
      /// One slice, µs.
      slice_us: u64 }
}

/// `lua/resume.lua`. Answers whether that changed something.
#[derive(Debug)]
pub struct Resume<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// `None`: the whole shard.
    pub bot: Option<&'a BotId>,
    /// One slice, µs.
    pub slice_us: u64,
}

impl Call for Resume<'_> {
    type Reply = bool;
    const NAME: &'static str = "resume";

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::resume, 8 + usize::from(self.bot.is_some()));
        cmd.arg(&self.keys.base);
        if let Some(bot) = self.bot {
            cmd.arg(self.keys.queue(bot));
        }
        cmd.arg(self.bot.map_or("", BotId::as_str)).arg(self.slice_us);
        cmd
    }

    fn reply(value: Value) -> Result<bool, ReplyError> {
        Ok(Reply::single(value)?.number::<i64>()? == 1)
    }
}

/// `lua/hold.lua`. Answers whether the caller holds the lock.
#[derive(Debug)]
pub struct Hold<'a> {
    /// The lock's key.
    pub key: &'a str,
    /// Who wants it.
    pub token: &'a str,
    /// For how long; 0 gives it back.
    pub ttl_ms: u64,
}

impl Call for Hold<'_> {
    type Reply = bool;
    const NAME: &'static str = "hold";

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::hold, 1);
        cmd.arg(self.key).arg(self.token).arg(self.ttl_ms);
        cmd
    }

    fn reply(value: Value) -> Result<bool, ReplyError> {
        Ok(Reply::single(value)?.number::<i64>()? == 1)
    }
}

/// `lua/trim.lua`. Answers how many entries were removed.
#[derive(Debug)]
pub struct Trim<'a> {
    /// The stream's key.
    pub stream: &'a str,
    /// The lowest offset to keep.
    pub keep: Offset,
}

impl Call for Trim<'_> {
    type Reply = u64;
    const NAME: &'static str = "trim";

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::trim, 1);
        cmd.arg(self.stream).arg(self.keep.to_string());
        cmd
    }

    fn reply(value: Value) -> Result<u64, ReplyError> {
        Reply::single(value)?.number()
    }
}
