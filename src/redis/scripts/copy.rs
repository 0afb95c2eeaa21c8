//! The scripts that fill queues: `enqueue` from the bus, `push` from other sources, `promote` when
//! events are due; and `emit`, which publishes to the bus.

use std::sync::Arc;

use redis::{Cmd, Value};

use super::lease::own_limits;
use super::{Attempts, Call, Index, Limits, Postings, Queued, evalsha};
use crate::id::{BotId, Fence, Offset, Prefix, Sequence};
use crate::quotas::Quotas;
use crate::rate::BotLimits;
use crate::redis::aside::Aside;
use crate::redis::keys::{self, ShardKeys};
use crate::redis::reply::{Reply, ReplyError};

/// The part of a log of the bus that a call covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span<'a> {
    /// The name of the log.
    pub log: &'a str,
    /// The last offset sent to this shard before.
    pub prev: Offset,
    /// The last offset this call covers.
    pub last: Offset,
}

impl Span<'_> {
    fn add_to(spans: &[Self], cmd: &mut Cmd) {
        cmd.arg(spans.len());
        for Self { log, prev, last } in spans {
            cmd.arg(*log).arg(prev.to_string()).arg(last.to_string());
        }
    }
}

/// The bytes that name an event among all of its bot.
pub type EventName = [u8; 16];

/// Which events are repetitions.
#[derive(Debug, Clone)]
pub struct Repeats {
    /// How long the names are remembered, ms; at least 1. Some are remembered for up to twice this
    /// time.
    pub window_ms: u64,
    /// The names of all events of the call, in their order.
    pub names: Vec<EventName>,
    /// The names of repetitions that were left out of the call. If one is not remembered any more,
    /// nothing is copied, and the reply is [`Enqueued::Gap`].
    pub left_out: Vec<EventName>,
}

/// `lua/enqueue.lua`.
#[derive(Debug)]
pub struct Enqueue<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// The covered parts of logs, at least one, each of another log.
    pub spans: Vec<Span<'a>>,
    /// Drops repetitions, if given.
    pub repeats: Option<Repeats>,
    /// The limits of the queues.
    pub limits: Limits,
    /// The quotas of bots that have their own.
    pub quotas: &'a Quotas,
    /// Serialised events per bot, in order.
    pub bots: Vec<(BotId, Vec<&'a [u8]>)>,
    /// The ledger entries of the events, if the queues have a ledger.
    pub postings: Option<Postings<'a>>,
    /// The leases that the caller wants.
    pub take: Take,
}

/// The leases that a copier wants: of bots that become ready by the copy, and whose turn it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Take {
    /// Maximum number; 0: none.
    pub max: usize,
    /// How long a lease lasts before it must be confirmed, ms.
    pub ttl_ms: u64,
    /// The highest virtual clock seen on any shard, µs.
    pub seen: u64,
}

/// The leases that a copier got.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Taken {
    /// The start of the server's run id, which names the leases together with their fences.
    pub run: Arc<str>,
    /// The leases.
    pub leases: Vec<TakenLease>,
}

/// One of them. The bot's queue holds just the events of the call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakenLease {
    /// The place of the bot in the call.
    pub place: usize,
    /// The sequence before that of the first event.
    pub before: u64,
    /// Number of the bot's events that were queued: the first ones of the call.
    pub events: usize,
    /// The fence.
    pub fence: Fence,
    /// Virtual start, µs.
    pub start: u64,
    /// Failures and lost leases since the bot's last progress.
    pub attempts: Attempts,
    /// Its lanes that are set aside.
    pub aside: Aside,
    /// What is set for the bot: its share, its rate.
    pub own: BotLimits,
}

impl Taken {
    fn read(reply: &mut Reply) -> Result<Self, ReplyError> {
        if reply.len() == 0 {
            return Ok(Self::default());
        }
        let run = reply.text()?.into();
        let mut leases = Vec::with_capacity(reply.len() / 7);
        while reply.len() > 0 {
            let (place, before, events) = (reply.number()?, reply.number()?, reply.number()?);
            let (fence, start) = (Fence::new(reply.number()?), reply.number()?);
            let (attempts, aside) = Attempts::read(reply)?;
            leases.push(TakenLease {
                place,
                before,
                events,
                fence,
                start,
                attempts,
                aside,
                own: own_limits(reply)?,
            });
        }
        Ok(Self { run, leases })
    }
}

/// The result of an [`Enqueue`]. Offsets are the positions of the shard, in the order of the spans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Enqueued {
    /// Copied now.
    Ok(Queued, Taken),
    /// Copied before.
    Duplicate(Vec<Offset>),
    /// The shard is elsewhere: the caller must read the bus again from there.
    Gap(Vec<Offset>),
    /// Nothing was copied, because the events at these places of the call, from 0, are repetitions.
    Repeated(Vec<usize>),
}

impl Call for Enqueue<'_> {
    type Reply = Enqueued;
    const NAME: &'static str = "enqueue";

    fn command(&self) -> Cmd {
        let each = if self.postings.is_some() { 5 } else { 1 };
        let fixed = if self.repeats.is_some() { 13 } else { 11 };
        let mut cmd = evalsha(Index::enqueue, fixed + each * self.bots.len());
        cmd.arg(&self.keys.base).arg(&self.keys.offsets).arg(&self.keys.dlq).arg(&self.keys.weight);
        if self.repeats.is_some() {
            cmd.arg(&self.keys.names_now).arg(&self.keys.names_before);
        }
        for (bot, _) in &self.bots {
            cmd.arg(self.keys.queue(bot));
        }
        if self.postings.is_some() {
            for (bot, _) in &self.bots {
                cmd.arg(&self.keys.ledger(bot));
            }
        }
        let limits = self.limits;
        Span::add_to(&self.spans, &mut cmd);
        cmd.arg(self.repeats.as_ref().map_or(0, |repeats| repeats.window_ms));
        cmd.arg(limits.slice_us).arg(limits.linger_ms).arg(limits.max_queue);
        cmd.arg(limits.overflow()).arg(limits.dead_max).arg(limits.quota.of_queue());
        cmd.arg(self.take.max).arg(self.take.ttl_ms).arg(self.take.seen);
        match &self.postings {
            Some(postings) => {
                postings.add_to(&mut cmd);
            }
            None => {
                cmd.arg(0);
            }
        }
        for (bot, events) in &self.bots {
            cmd.arg(bot.as_str()).arg(self.quotas.argument(bot)).arg(events.len());
            for event in events {
                cmd.arg(*event);
            }
        }
        if let Some(repeats) = &self.repeats {
            cmd.arg(repeats.names.as_flattened()).arg(repeats.left_out.as_flattened());
        }
        cmd
    }

    fn reply(value: Value) -> Result<Enqueued, ReplyError> {
        let mut reply = Reply::new(value)?;
        let status = reply.text()?;
        match &*status {
            "OK" => {
                let queued = Queued::read(&mut reply)?;
                let posted = reply.number()?;
                Ok(Enqueued::Ok(Queued { posted, ..queued }, Taken::read(&mut reply)?))
            }
            "DUP" => Ok(Enqueued::Duplicate(offsets(reply)?)),
            "GAP" => Ok(Enqueued::Gap(offsets(reply)?)),
            "SEEN" => {
                let mut places = Vec::with_capacity(reply.len());
                while reply.len() > 0 {
                    places.push(reply.number()?);
                }
                Ok(Enqueued::Repeated(places))
            }
            _ => Err(ReplyError::unexpected("a status", &status)),
        }
    }
}

fn offsets(mut reply: Reply) -> Result<Vec<Offset>, ReplyError> {
    let mut offsets = Vec::with_capacity(reply.len());
    while reply.len() > 0 {
        offsets.push(reply.parsed()?);
    }
    Ok(offsets)
}

/// `lua/advance.lua`.
#[derive(Debug)]
pub struct Advance<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// The parts of logs to pass over, at least one, each of another log.
    pub spans: Vec<Span<'a>>,
}

/// The positions of the shard after an [`Advance`], in the order of the spans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Advanced {
    /// At the new positions, or already after them.
    To(Vec<Offset>),
    /// Elsewhere: the caller must read the bus again from there.
    Gap(Vec<Offset>),
}

impl Call for Advance<'_> {
    type Reply = Advanced;
    const NAME: &'static str = "advance";

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::advance, 1);
        cmd.arg(&self.keys.offsets);
        Span::add_to(&self.spans, &mut cmd);
        cmd
    }

    fn reply(value: Value) -> Result<Advanced, ReplyError> {
        let mut reply = Reply::new(value)?;
        let status = reply.text()?;
        match &*status {
            "OK" => Ok(Advanced::To(offsets(reply)?)),
            "GAP" => Ok(Advanced::Gap(offsets(reply)?)),
            _ => Err(ReplyError::unexpected("a status", &status)),
        }
    }
}

/// `lua/push.lua`.
#[derive(Debug)]
pub struct Push<'a> {
    /// The shard of `bot`.
    pub keys: &'a ShardKeys,
    /// The limits of the queue, with the quotas of the bot.
    pub limits: Limits,
    /// The bot.
    pub bot: &'a BotId,
    /// Serialised events, in order; exactly one if delayed.
    pub events: &'a [Vec<u8>],
    /// When the event becomes due, ms since 1970; 0: now; negative: so many ms after the script runs.
    pub due_ms: i64,
    /// A second call with the same key within this time (ms) changes nothing.
    pub idempotency: Option<(&'a str, u64)>,
}

/// The answer to a [`Push`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pushed {
    /// The result for the events; all zero for a duplicate.
    pub queued: Queued,
    /// The last assigned sequence, which is also the id of a delayed event.
    pub sequence: Sequence,
    /// Whether the idempotency key was seen before.
    pub duplicate: bool,
}

impl Call for Push<'_> {
    type Reply = Pushed;
    const NAME: &'static str = "push";

    fn command(&self) -> Cmd {
        let keys = self.keys;
        let mut cmd = evalsha(Index::push, if self.idempotency.is_some() { 14 } else { 12 });
        cmd.arg(&keys.base).arg(&keys.dlq).arg(&keys.due).arg(&keys.later);
        cmd.arg(keys.queue(self.bot));
        if let Some((key, _)) = self.idempotency {
            cmd.arg(keys.idempotency(key)).arg(keys.keys_meter(self.bot));
        }
        let limits = self.limits;
        cmd.arg(limits.slice_us).arg(limits.linger_ms).arg(limits.max_queue);
        cmd.arg(limits.overflow()).arg(limits.dead_max).arg(self.due_ms);
        cmd.arg(self.idempotency.map_or(0, |(_, window_ms)| window_ms));
        let quota = limits.quota;
        cmd.arg(quota.key_bytes).arg(quota.delayed_events).arg(quota.delayed_bytes);
        cmd.arg(self.bot.as_str()).arg(quota.of_queue());
        cmd.arg(self.events.len()).arg(self.events);
        cmd
    }

    fn reply(value: Value) -> Result<Pushed, ReplyError> {
        let mut reply = Reply::new(value)?;
        let duplicate = &*reply.text()? == "DUP";
        let queued = if duplicate { Queued::default() } else { Queued::read(&mut reply)? };
        Ok(Pushed { queued, sequence: Sequence::new(reply.number()?), duplicate })
    }
}

/// `lua/due.lua`.
#[derive(Debug)]
pub struct FindDue<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// Maximum number of events.
    pub most: usize,
    /// Maximum number of bytes of these events, but at least one event.
    pub bytes: usize,
}

/// The delayed events that are due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Due {
    /// The server's clock, ms since 1970.
    pub now_ms: u64,
    /// When the next event is due that is not due yet, ms since 1970. `None` also if there are more due events.
    pub next_ms: Option<u64>,
    /// Ids and bots, oldest first.
    pub events: Vec<(String, BotId)>,
}

impl Call for FindDue<'_> {
    type Reply = Due;
    const NAME: &'static str = "due";
    const LASTING: bool = false;

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::due, 2);
        cmd.arg(&self.keys.due).arg(&self.keys.later);
        cmd.arg(self.most).arg(self.bytes);
        cmd
    }

    fn reply(value: Value) -> Result<Due, ReplyError> {
        let mut reply = Reply::new(value)?;
        let (now_ms, next_ms) = (reply.number()?, reply.optional()?);
        let mut events = Vec::with_capacity(reply.len() / 2);
        while reply.len() > 0 {
            let (id, bot) = (reply.text()?, reply.bytes()?.unwrap_or_default());
            // Damaged data must not hold up the other events.
            let bot = std::str::from_utf8(&bot).ok().and_then(|bot| BotId::parse(bot).ok());
            events.extend(bot.map(|bot| (id, bot)));
        }
        Ok(Due { now_ms, next_ms, events })
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
    /// Number of moved events.
    pub moved: u64,
    /// The next due time, ms since 1970.
    pub next_ms: Option<u64>,
}

impl Call for Promote<'_> {
    type Reply = Promoted;
    const NAME: &'static str = "promote";
    const LASTING: bool = false;

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

/// `lua/emit.lua`. Returns the number of events published now.
#[derive(Debug)]
pub struct Emit<'a> {
    /// The prefix of our keys.
    pub prefix: &'a Prefix,
    /// The bus stream.
    pub stream: &'a str,
    /// How long the ids are remembered, ms.
    pub window_ms: u64,
    /// Ids and events in JSON, in order.
    pub events: &'a [(String, Vec<u8>)],
}

impl Call for Emit<'_> {
    /// The last event that was published now. `None`: all were published before.
    type Reply = Option<Offset>;
    const NAME: &'static str = "emit";

    fn command(&self) -> Cmd {
        let mut cmd = evalsha(Index::emit, 1 + self.events.len());
        cmd.arg(self.stream);
        for (id, _) in self.events {
            cmd.arg(keys::seen(self.prefix, self.stream, id));
        }
        cmd.arg(self.window_ms);
        for (_, event) in self.events {
            cmd.arg(event);
        }
        cmd
    }

    fn reply(value: Value) -> Result<Option<Offset>, ReplyError> {
        let mut reply = Reply::new(value)?;
        let _added: u64 = reply.number()?;
        Ok(reply.text()?.parse().ok())
    }
}
