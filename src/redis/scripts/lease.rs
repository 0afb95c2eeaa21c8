//! Taking and releasing leases: `claim` and `complete`.

use std::sync::Arc;

use redis::{Cmd, Value};

use super::ledger::add_leaving;
use super::{Call, Index, evalsha};

use crate::id::{BotId, Fence, Lane};
use crate::ledger::Leaving;
use crate::quotas::Quotas;
use crate::rate::BotLimits;
use crate::redis::aside::Aside;
use crate::redis::keys::ShardKeys;
use crate::redis::reply::{Reply, ReplyError};

/// `lua/claim.lua`.
#[derive(Debug)]
pub struct Claim<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// Maximum number of bots to lease, at most 64; 0 only reaps and reads.
    pub max: usize,
    /// Highest score to take; `None`: any.
    pub bound: Option<i64>,
    /// How long the lease lasts before it must be confirmed, ms.
    pub ttl_ms: u64,
    /// The highest virtual clock seen on any shard, µs.
    pub seen: u64,
    /// One slice, µs.
    pub slice_us: u64,
    /// Whether no bot is known to be ready or busy on any other shard.
    pub alone: bool,
    /// [`Attempts::isolate`] after a receiver did not end its lease. It is twice as much after a process vanished.
    pub isolate: u32,
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
    /// Number of expired leases that this call reaped.
    pub vanished: u64,
    /// The start of the server's run id, which names the leases together with their fences.
    pub run: Arc<str>,
    /// The leased bots.
    pub leases: Vec<Grant>,
}

/// One leased bot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// The bot.
    pub bot: BotId,
    /// The fence.
    pub fence: Fence,
    /// Virtual start, µs.
    pub start: u64,
    /// Failures and lost leases since the bot's last progress.
    pub attempts: Attempts,
    /// What is set for the bot: its share, its rate.
    pub own: BotLimits,
    /// Its lanes that are set aside.
    pub aside: Aside,
    /// Bytes of its queued events; 0 if they are few and small.
    pub queued_bytes: u64,
}

/// Failures and lost leases of a bot since its last progress.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Attempts {
    /// Number of leases that expired before they were confirmed. They do not count as attempts.
    pub suspect: u32,
    /// Number of confirmed leases that expired.
    pub lost: u32,
    /// Number of failures reported by a handler.
    pub failed: u32,
    /// Number of events still to be handled until slices are as large as usual. It counts down.
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

    /// Whether anything is noted since the last progress.
    #[must_use]
    pub fn are_noted(self) -> bool {
        self != Self::default()
    }

    /// Reads a field of the hash `att`, with the lanes that are set aside; empty: none.
    pub(crate) fn read(reply: &mut Reply) -> Result<(Self, Aside), ReplyError> {
        let text = reply.text()?;
        if text.is_empty() {
            return Ok(Default::default());
        }
        let aside = text.splitn(5, '|').nth(4).map_or_else(|| Some(Aside::default()), Aside::parse);
        let read = Self::parse(&text).zip(aside);
        read.ok_or_else(|| ReplyError::unexpected("att", &text))
    }

    /// Parses a field of the hash `att`, without its lanes; empty: none.
    pub(crate) fn parse(text: &str) -> Option<Self> {
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
    const LASTING: bool = false;

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
            leases: Vec::with_capacity(reply.len() / 6),
        };
        while reply.len() > 0 {
            let bot = reply.text()?;
            let (fence, start) = (Fence::new(reply.number()?), reply.number()?);
            let (attempts, aside) = Attempts::read(&mut reply)?;
            claimed.leases.push(Grant {
                bot: BotId::parse(&bot).map_err(|_| ReplyError::unexpected("a bot id", &bot))?,
                fence,
                start,
                attempts,
                aside,
                own: own_limits(&mut reply)?,
                queued_bytes: reply.number()?,
            });
        }
        Ok(claimed)
    }
}

/// Reads a field of the hash `weight`, or the number 1.
pub(super) fn own_limits(reply: &mut Reply) -> Result<BotLimits, ReplyError> {
    match reply.next() {
        Some(Value::Int(1)) => Ok(BotLimits::default()),
        Some(Value::BulkString(text)) => {
            let text = String::from_utf8_lossy(&text);
            BotLimits::parse(&text)
                .ok_or_else(|| ReplyError::unexpected("the limits of a bot", &text))
        }
        other => Err(ReplyError::unexpected("the limits of a bot", &format!("{other:?}"))),
    }
}

/// What happens to a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// It continues for `ttl_ms` from now.
    Keep {
        /// New time to live.
        ttl_ms: u64,
    },
    /// As keep, never with an earlier end, and it is handed over to a receiver, which completes it.
    Hand {
        /// New time to live.
        ttl_ms: u64,
        /// Maximum number of handed over leases in the shard.
        max: u64,
    },
    /// It ends; with remaining events the bot is ready again.
    Release,
    /// It ends; the bot is parked.
    Park {
        /// For how long.
        ms: u64,
    },
    /// It ends and counts one failure; the bot is parked.
    Fail {
        /// For how long.
        ms: u64,
        /// [`Attempts::isolate`] from now on, at least.
        isolate: u32,
    },
}

/// An event that is not done but leaves the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exception {
    /// Its index among the events to remove, from 0.
    pub index: usize,
    /// Its destination.
    pub fate: Fate,
}

/// The destination of an exception.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fate {
    /// To the dead letters.
    Dead {
        /// The reason.
        reason: String,
        /// The number of attempts.
        attempts: u32,
    },
    /// Delayed until a time, ms since 1970.
    Later {
        /// The due time.
        at_ms: u64,
    },
    /// To the end of the list of its lane, which is set aside. It stays queued.
    Lane(Lane),
}

/// A change of the lanes of a bot that are set aside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AsideChange {
    /// Those that are set aside from now on.
    pub aside: Aside,
    /// How long a bot without other events waits until the next one is due, ms; 0: it does not wait.
    pub next_ms: u64,
    /// The lane whose list has the events to remove; `None`: they are in the queue.
    pub list: Option<Lane>,
}

/// One lease to end or to continue.
#[derive(Debug, Clone)]
pub struct Completion {
    /// The bot.
    pub bot: BotId,
    /// The run id of the server that granted the lease.
    pub run: Arc<str>,
    /// The fence.
    pub fence: Fence,
    /// Number of events already removed under this lease.
    pub before: usize,
    /// Number of events to remove now.
    pub n: usize,
    /// The bytes of their records.
    pub bytes: u64,
    /// What happens to the lease.
    pub mode: Mode,
    /// Virtual cost of the handled events, µs.
    pub cost: u64,
    /// The events among the `n` that are not done.
    pub exceptions: Vec<Exception>,
    /// The ledger entries of the `n` events, if there is a ledger.
    pub leaving: Option<Leaving>,
    /// What changes for the lanes that are set aside; `None`: nothing.
    pub aside: Option<AsideChange>,
}

impl Completion {
    /// Whether it changes more than how long the lease lasts, and who completes it, or notes which lane is
    /// tried; a failover revokes the lease anyway.
    pub(crate) fn is_lasting(&self) -> bool {
        self.n > 0 || !matches!(self.mode, Mode::Keep { .. } | Mode::Hand { .. })
    }

    /// The lanes whose lists it needs, each once.
    fn lists(&self) -> Vec<Lane> {
        let moved = self.exceptions.iter().filter_map(|exception| match exception.fate {
            Fate::Lane(lane) => Some(lane),
            _ => None,
        });
        let own = self.aside.iter().filter_map(|change| change.list);
        let mut lists: Vec<Lane> = moved.chain(own).collect();
        lists.sort_unstable();
        lists.dedup();
        lists
    }
}

/// `lua/complete.lua`.
#[derive(Debug)]
pub struct Complete<'a> {
    /// The shard.
    pub keys: &'a ShardKeys,
    /// Maximum number of dead letters of the shard.
    pub dead_max: u64,
    /// The maximum that bots may hold.
    pub quotas: &'a Quotas,
    /// Whether the queues have a ledger.
    pub ledger: bool,
    /// The completions: at most 64, each bot at most once.
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
    /// Number of dead letters that were deleted.
    pub letters_removed: u64,
    /// Number of deleted dead letters that exceeded the quota of their bot.
    pub letters_over_quota: u64,
    /// One per item.
    pub verdicts: Vec<Verdict>,
}

/// The result of one completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Done, now or before.
    Ok,
    /// The lease is not the bot's current one: nothing was changed.
    Stale,
    /// The count does not fit the lease: nothing was changed.
    Bad,
    /// Continued, but not handed over: the shard has its maximum of handed over leases.
    Full,
}

impl Call for Complete<'_> {
    type Reply = Completed;
    const NAME: &'static str = "complete";

    fn is_lasting(&self) -> bool {
        self.items.iter().any(Completion::is_lasting)
    }

    fn command(&self) -> Cmd {
        let keys = self.keys;
        let each = if self.ledger { 5 } else { 1 };
        let lists: Vec<Vec<Lane>> = self.items.iter().map(Completion::lists).collect();
        let extra = lists.iter().map(Vec::len).sum::<usize>();
        let mut first = 11 + each * self.items.len() + 1;
        let mut cmd = evalsha(Index::complete, first - 1 + extra);
        cmd.arg(&keys.base).arg(&keys.dlq).arg(&keys.due).arg(&keys.later);
        for item in self.items {
            cmd.arg(keys.queue(&item.bot));
            if self.ledger {
                cmd.arg(&keys.ledger(&item.bot));
            }
        }
        for (item, lists) in self.items.iter().zip(&lists) {
            for lane in lists {
                cmd.arg(keys.lane(*lane, &item.bot));
            }
        }
        cmd.arg(self.dead_max).arg(each).arg(self.quotas.general().of_queue());
        for (item, lists) in self.items.iter().zip(&lists) {
            // The place of a list in KEYS.
            let place = |lane: &Lane| first + lists.binary_search(lane).unwrap_or_default();
            let (mode, ms, bound) = match item.mode {
                Mode::Keep { ttl_ms } => ("keep", ttl_ms, 0),
                Mode::Hand { ttl_ms, max } => ("hand", ttl_ms, max),
                Mode::Release => ("release", 0, 0),
                Mode::Park { ms } => ("park", ms, 0),
                Mode::Fail { ms, isolate } => ("fail", ms, u64::from(isolate)),
            };
            cmd.arg(item.bot.as_str()).arg(&*item.run).arg(item.fence.get());
            cmd.arg(item.before).arg(item.n).arg(item.bytes);
            cmd.arg(mode).arg(ms).arg(item.cost).arg(bound).arg(self.quotas.argument(&item.bot));
            cmd.arg(item.exceptions.len() + usize::from(item.aside.is_some()));
            if let Some(AsideChange { aside, next_ms, list }) = &item.aside {
                let list = list.as_ref().map_or(0, place);
                cmd.arg(-1).arg("lanes").arg(format!("{next_ms}|{list}")).arg(aside.to_string());
            }
            for exception in &item.exceptions {
                cmd.arg(exception.index);
                match &exception.fate {
                    Fate::Dead { reason, attempts } => {
                        cmd.arg("dead").arg(reason).arg(*attempts);
                    }
                    Fate::Later { at_ms } => {
                        cmd.arg("later").arg(*at_ms).arg("");
                    }
                    Fate::Lane(lane) => {
                        cmd.arg("lane").arg(place(lane)).arg("");
                    }
                }
            }
            if self.ledger {
                add_leaving(&mut cmd, item.leaving.as_ref());
            }
            first += lists.len();
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
            letters_over_quota: reply.number()?,
            verdicts: Vec::with_capacity(reply.len()),
        };
        while reply.len() > 0 {
            let verdict = reply.text()?;
            completed.verdicts.push(match &*verdict {
                "OK" => Verdict::Ok,
                "STALE" => Verdict::Stale,
                "BAD" => Verdict::Bad,
                "FULL" => Verdict::Full,
                _ => return Err(ReplyError::unexpected("a verdict", &verdict)),
            });
        }
        Ok(completed)
    }
}
