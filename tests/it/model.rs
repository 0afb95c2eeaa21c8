//! The queue protocol of one shard as a pure state machine: what the Lua scripts must do, without
//! Redis. Time is a number passed in. `exhaustive.rs` explores it; the random test runs it beside
//! the real scripts and compares replies and state.
//!
//! Bots are numbers; equal scores are ordered by them, as Redis orders members by name.

mod rules;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub(crate) type Bot = u8;
/// An event's identity. The model does not look inside.
pub(crate) type Event = u8;
pub(crate) type Stream = u8;

/// Scores of the quiet class lie this far below the time: all of them before any busy bot.
pub(crate) const QUIET: i64 = 1 << 52;
/// A busy score further behind the clock than this is moved up to it, in µs.
pub(crate) const BEHIND_MAX_US: i64 = 50_000;
/// Most expired entries one claim reaps.
pub(crate) const REAP_MAX: usize = 64;
/// Most `fin` entries one claim drops.
pub(crate) const FORGET_MAX: usize = 1_000;

/// `own`: the current lease of a bot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Lease {
    pub(crate) fence: u64,
    /// Events taken off the queue under this lease.
    pub(crate) acked: u32,
    /// Virtual start in µs.
    pub(crate) start: i64,
    /// Whether the holder has shown that it had the claim's reply, by renewing.
    pub(crate) confirmed: bool,
}

/// `att`: what went wrong with a bot since its last progress.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Attempts {
    /// Leases that expired unconfirmed: perhaps only the claim's reply was lost.
    pub(crate) suspect: u32,
    /// Confirmed leases that expired.
    pub(crate) lost: u32,
    /// Failures the handler reported.
    pub(crate) failed: u32,
    /// How many further events are to be taken one at a time.
    pub(crate) isolate: u32,
}

/// One shard of one pipeline. Field by field the keys of the protocol.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Server {
    pub(crate) ctl: BTreeMap<Bot, i64>,
    /// Deadlines in ms.
    pub(crate) busy: BTreeMap<Bot, i64>,
    pub(crate) own: BTreeMap<Bot, Lease>,
    pub(crate) att: BTreeMap<Bot, Attempts>,
    pub(crate) fin: BTreeMap<Bot, i64>,
    pub(crate) paused: BTreeSet<Bot>,
    /// Sequence and event, oldest first. An empty queue has no entry.
    pub(crate) queues: BTreeMap<Bot, VecDeque<(u64, Event)>>,
    pub(crate) hwm: BTreeMap<Stream, u64>,
    pub(crate) depth: u64,
    pub(crate) v: i64,
    pub(crate) f: u64,
    pub(crate) seq: u64,
    pub(crate) run: Option<u32>,
    /// The whole shard hands out nothing.
    pub(crate) shard_paused: bool,
    /// The virtual length of one slice, a setting.
    pub(crate) slice_us: i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Enqueued {
    Stored,
    /// Already copied.
    Dup,
    /// Something before it is missing: go on from this offset.
    Gap(u64),
}

/// The arguments of a claim.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Claim {
    pub(crate) max: usize,
    pub(crate) bound: i64,
    pub(crate) ttl_ms: i64,
    /// The highest virtual clock the claimer saw on any shard.
    pub(crate) seen: i64,
    /// Events of a full slice: what a lost lease may have stumbled over.
    pub(crate) batch: u32,
    /// Nothing is ready or leased on any other shard.
    pub(crate) idle_elsewhere: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Granted {
    pub(crate) bot: Bot,
    pub(crate) fence: u64,
    pub(crate) start: i64,
    pub(crate) attempts: Attempts,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Claimed {
    pub(crate) granted: Vec<Granted>,
    pub(crate) v: i64,
    pub(crate) lowest: Option<i64>,
    pub(crate) deadline_ms: Option<i64>,
}

/// What becomes of a lease when its slice is completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Mode {
    /// Goes on until this deadline; with n = 0 a renewal.
    Keep {
        until_ms: i64,
    },
    Release,
    /// Rests until this time.
    Park {
        until_ms: i64,
    },
    /// As park, and counts as a failed attempt.
    Fail {
        until_ms: i64,
        isolate: u32,
    },
}

/// The arguments of a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Completion {
    pub(crate) bot: Bot,
    pub(crate) fence: u64,
    pub(crate) before: u32,
    pub(crate) n: u32,
    pub(crate) cost: i64,
    pub(crate) mode: Mode,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Completed {
    /// These were taken off the queue.
    Removed(Vec<Event>),
    /// The same call came before; nothing changed.
    Replay,
    /// The lease is another's, or nobody's.
    Stale,
    /// The caller counts differently.
    Bad,
}

impl Server {
    pub(crate) fn new(slice_us: i64) -> Self {
        Self { slice_us, ..Self::default() }
    }

    pub(crate) fn enqueue(
        &mut self,
        now_us: i64,
        stream: Stream,
        (prev, last): (u64, u64),
        events: &[(Bot, Event)],
    ) -> Enqueued {
        let hwm = self.hwm.get(&stream).copied().unwrap_or(0);
        if hwm >= last {
            return Enqueued::Dup;
        }
        if hwm != prev {
            return Enqueued::Gap(hwm);
        }
        self.push(now_us, events);
        self.hwm.insert(stream, last);
        Enqueued::Stored
    }

    /// Events without an offset. Bots whose queue was empty join, in the order in which they
    /// first appear; the others are somewhere already.
    pub(crate) fn push(&mut self, now_us: i64, events: &[(Bot, Event)]) {
        let mut woken = Vec::new();
        for &(bot, event) in events {
            self.seq = (self.seq + 1).max(unsigned(now_us));
            if !self.queues.contains_key(&bot) {
                woken.push(bot);
            }
            self.queues.entry(bot).or_default().push_back((self.seq, event));
            self.depth += 1;
        }
        for (index, bot) in (0..).zip(woken) {
            // A bot that a reaper put back with an empty queue keeps the place it has.
            if !self.busy.contains_key(&bot) && !self.ctl.contains_key(&bot) {
                self.join(now_us, index, bot, 0);
            }
        }
    }

    pub(crate) fn claim(&mut self, now_us: i64, claim: Claim) -> Claimed {
        self.v = self.v.max(claim.seen);
        self.reap(now_us, claim.batch);
        let mut granted = Vec::new();
        if !self.shard_paused {
            let mut ready: Vec<(i64, Bot)> =
                self.ctl.iter().map(|(&bot, &score)| (score, bot)).collect();
            ready.sort_unstable();
            ready.retain(|&(score, _)| score <= claim.bound);
            ready.truncate(claim.max);
            let v = self.v;
            for &(score, bot) in &ready {
                let start = if score < 0 {
                    v.max(self.fin.get(&bot).copied().unwrap_or(0))
                } else if score < v - BEHIND_MAX_US {
                    v
                } else {
                    score
                };
                if score >= 0 && granted.iter().all(|&(_, score)| score < 0) {
                    self.v = self.v.max(start);
                }
                granted.push((self.grant(now_us, claim.ttl_ms, bot, start), score));
            }
        }
        if self.ctl.is_empty() && self.busy.is_empty() && claim.idle_elsewhere {
            self.fin.clear();
        }
        self.forget_finished();
        Claimed {
            granted: granted.into_iter().map(|(granted, _)| granted).collect(),
            v: self.v,
            lowest: self.ctl.values().copied().min(),
            deadline_ms: self.busy.values().copied().min(),
        }
    }

    fn grant(&mut self, now_us: i64, ttl_ms: i64, bot: Bot, start: i64) -> Granted {
        // For the second of one call, `f + 1` is already at or above the time.
        self.f = (self.f + 1).max(unsigned(now_us));
        self.ctl.remove(&bot);
        self.busy.insert(bot, now_us / 1_000 + ttl_ms);
        self.own.insert(bot, Lease { fence: self.f, acked: 0, start, confirmed: false });
        let attempts = self.att.get(&bot).copied().unwrap_or_default();
        Granted { bot, fence: self.f, start, attempts }
    }

    /// Expired leases and parks join again. The only place where a lease is lost to time.
    fn reap(&mut self, now_us: i64, batch: u32) {
        let mut expired: Vec<(i64, Bot)> = self
            .busy
            .iter()
            .filter(|&(_, &deadline)| deadline <= now_us / 1_000)
            .map(|(&bot, &deadline)| (deadline, bot))
            .collect();
        expired.sort_unstable();
        expired.truncate(REAP_MAX);
        for (index, (_, bot)) in (0..).zip(expired) {
            if let Some(lease) = self.own.get(&bot) {
                let attempts = self.att.entry(bot).or_default();
                if lease.confirmed {
                    attempts.lost += 1;
                } else {
                    attempts.suspect += 1;
                }
                attempts.isolate = batch;
            }
            self.rejoin(now_us, index, bot);
        }
    }

    /// Ends a lease or a park from outside: nothing a holder may still say counts any more.
    fn rejoin(&mut self, now_us: i64, index: i64, bot: Bot) {
        self.busy.remove(&bot);
        let start = self.own.remove(&bot).map_or(0, |lease| lease.start);
        self.join(now_us, index, bot, start);
    }

    /// The rule of fairness: who was away for at most one slice is quiet, everybody else comes
    /// back where it left.
    fn join(&mut self, now_us: i64, index: i64, bot: Bot, start: i64) {
        let candidate = self.fin.get(&bot).copied().unwrap_or(0).max(start);
        if self.paused.contains(&bot) {
            self.finish(bot, candidate);
        } else if candidate <= self.v + self.slice_us {
            self.ctl.insert(bot, now_us - QUIET + index);
        } else {
            self.ctl.insert(bot, candidate);
        }
    }

    fn finish(&mut self, bot: Bot, at: i64) {
        if at > self.v {
            self.fin.insert(bot, at);
        }
    }

    fn forget_finished(&mut self) {
        let mut behind: Vec<(i64, Bot)> =
            self.fin.iter().filter(|&(_, &at)| at <= self.v).map(|(&bot, &at)| (at, bot)).collect();
        behind.sort_unstable();
        for (_, bot) in behind.into_iter().take(FORGET_MAX) {
            self.fin.remove(&bot);
        }
    }

    /// The head of a queue.
    pub(crate) fn peek(&self, bot: Bot, n: usize) -> Vec<Event> {
        self.queues.get(&bot).into_iter().flatten().take(n).map(|&(_, event)| event).collect()
    }

    pub(crate) fn complete(&mut self, call: Completion) -> Completed {
        match self.own.get(&call.bot) {
            Some(lease) if lease.fence == call.fence => self.complete_held(*lease, call),
            _ => Completed::Stale,
        }
    }

    /// A completion whose fence was found to be the current one.
    pub(crate) fn complete_held(&mut self, mut lease: Lease, call: Completion) -> Completed {
        let Completion { bot, before, n, .. } = call;
        if lease.acked != before {
            return if lease.acked == before + n { Completed::Replay } else { Completed::Bad };
        }
        let removed = self.remove_head(bot, n);
        if n > 0 {
            self.progress(bot, n);
        }
        lease.acked += n;
        lease.start += call.cost;
        match call.mode {
            Mode::Keep { until_ms } => {
                lease.confirmed = true;
                self.own.insert(bot, lease);
                self.busy.insert(bot, until_ms);
            }
            Mode::Release => {
                self.own.remove(&bot);
                self.busy.remove(&bot);
                if self.queues.contains_key(&bot) && !self.paused.contains(&bot) {
                    self.ctl.insert(bot, lease.start);
                } else {
                    self.finish(bot, lease.start);
                }
            }
            Mode::Park { until_ms } => self.park(bot, lease, until_ms),
            Mode::Fail { until_ms, isolate } => {
                let attempts = self.att.entry(bot).or_default();
                attempts.failed += 1;
                attempts.isolate = isolate;
                self.park(bot, lease, until_ms);
            }
        }
        Completed::Removed(removed)
    }

    fn park(&mut self, bot: Bot, lease: Lease, until_ms: i64) {
        self.own.remove(&bot);
        self.busy.insert(bot, until_ms);
        self.finish(bot, lease.start);
    }

    fn remove_head(&mut self, bot: Bot, n: u32) -> Vec<Event> {
        let Some(queue) = self.queues.get_mut(&bot) else { return Vec::new() };
        let n = queue.len().min(n as usize);
        let removed: Vec<Event> = queue.drain(..n).map(|(_, event)| event).collect();
        if queue.is_empty() {
            self.queues.remove(&bot);
        }
        self.depth -= removed.len() as u64;
        removed
    }

    fn progress(&mut self, bot: Bot, n: u32) {
        if let Some(attempts) = self.att.get_mut(&bot) {
            let isolate = attempts.isolate.saturating_sub(n);
            *attempts = Attempts { isolate, ..Attempts::default() };
            if isolate == 0 {
                self.att.remove(&bot);
            }
        }
    }

    /// Sets the flag. A running lease or park ends normally, then the bot rests.
    pub(crate) fn pause(&mut self, bot: Bot) {
        self.paused.insert(bot);
        if let Some(score) = self.ctl.remove(&bot) {
            self.finish(bot, score);
        }
    }

    pub(crate) fn resume(&mut self, now_us: i64, bot: Bot) {
        if self.paused.remove(&bot)
            && self.queues.contains_key(&bot)
            && !self.busy.contains_key(&bot)
        {
            self.join(now_us, 0, bot, 0);
        }
    }

    /// Drops a bot's events and revokes its lease, whose holder counts from the old head.
    pub(crate) fn purge(&mut self, bot: Bot) -> Vec<Event> {
        let length = self.queues.get(&bot).map_or(0, VecDeque::len);
        let removed = self.remove_head(bot, u32::try_from(length).unwrap());
        if let Some(score) = self.ctl.remove(&bot) {
            self.finish(bot, score);
        }
        if let Some(lease) = self.own.remove(&bot) {
            self.finish(bot, lease.start);
        }
        self.busy.remove(&bot);
        self.att.remove(&bot);
        removed
    }

    /// The first command on a new connection. After a restart, revokes every lease that an older
    /// run granted: lists may have lost their tails, so nobody's count is right any more.
    pub(crate) fn recover(&mut self, now_us: i64, run: u32) {
        if self.run == Some(run) {
            return;
        }
        self.run = Some(run);
        let leased: Vec<Bot> = self.own.keys().copied().collect();
        for (index, bot) in (0..).zip(leased) {
            self.rejoin(now_us, index, bot);
        }
    }

    /// Which of the protocol's invariants does not hold.
    pub(crate) fn broken_invariant(&self) -> Option<&'static str> {
        let nobody_forgotten = self.queues.keys().all(|bot| {
            let (ready, busy) = (self.ctl.contains_key(bot), self.busy.contains_key(bot));
            let rests = self.paused.contains(bot) && !busy;
            u8::from(ready) + u8::from(busy) + u8::from(rests) == 1
        });
        let in_two_places = self.ctl.keys().any(|bot| self.busy.contains_key(bot));
        let fences: BTreeSet<u64> = self.own.values().map(|lease| lease.fence).collect();
        let length: usize = self.queues.values().map(VecDeque::len).sum();
        let in_order = |queue: &VecDeque<(u64, Event)>| {
            queue.iter().zip(queue.iter().skip(1)).all(|(a, b)| a.0 < b.0)
        };
        [
            ("a bot with events is in exactly one place", nobody_forgotten),
            ("no bot is both ready and busy", !in_two_places),
            ("no paused bot is ready", self.ctl.keys().all(|bot| !self.paused.contains(bot))),
            ("every lease has a deadline", self.own.keys().all(|b| self.busy.contains_key(b))),
            ("every live fence is granted once", fences.len() == self.own.len()),
            ("no live fence is above the last", fences.iter().all(|&fence| fence <= self.f)),
            ("depth is the sum of the lengths", length as u64 == self.depth),
            ("an empty queue has no key", self.queues.values().all(|queue| !queue.is_empty())),
            ("sequences rise along a queue", self.queues.values().all(in_order)),
            ("no attempts without a count", self.att.values().all(|a| *a != Attempts::default())),
        ]
        .into_iter()
        .find_map(|(name, holds)| (!holds).then_some(name))
    }
}

fn unsigned(now_us: i64) -> u64 {
    u64::try_from(now_us).unwrap_or(0)
}
