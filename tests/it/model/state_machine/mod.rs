//! The queue protocol of one shard as a pure state machine: the contracts of the Lua scripts,
//! without Redis. The caller passes the time as a number. The package `fairlane-model` explores it. The
//! random test runs it beside the real scripts and compares replies and state.
//!
//! Bots are numbers. They order equal scores, as Redis orders members by name.

mod commands;
mod completion;
mod copy;
mod holdings;
mod invariants;
mod lanes;
mod names;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub(crate) use self::commands::{Pushed, Refused};
pub(crate) use self::completion::{Completed, Completion, Fate, Mode};
pub(crate) use self::copy::{Enqueued, Span, Take, Taken};
pub(crate) use self::holdings::{record_size, size};
pub(crate) use self::lanes::{Change, LANES, Lane, lane_of};
pub(crate) use self::names::{Name, Names, Noted, Repeats};

pub(crate) type Bot = u8;
/// The identity of an event. The model does not look inside.
pub(crate) type Event = u16;
pub(crate) type Stream = u8;
/// An idempotency key.
pub(crate) type Key = u8;

/// Scores of the quiet class lie this far below the time, so they all sort before any busy bot.
pub(crate) const QUIET: i64 = 1 << 52;
/// The maximum by which a busy score may stay behind the clock, in µs. The score is then moved up.
pub(crate) const BEHIND_MAX_US: i64 = 50_000;
/// A finish that is less than this ahead of the clock is noted by chance.
pub(crate) const BRIEF_US: i64 = 1_000;
/// A bot without events rests for at most this long.
pub(crate) const REST_MS: i64 = 1_000;
/// Maximum number of expired entries that one claim reaps.
pub(crate) const REAP_MAX: usize = 64;
/// Maximum number of `fin` entries that one claim drops.
pub(crate) const FORGET_MAX: usize = 1_000;

/// `own`: the current lease of a bot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Lease {
    pub(crate) fence: u64,
    /// Events removed from the queue under this lease.
    pub(crate) acked: u32,
    /// Virtual start in µs.
    pub(crate) start: i64,
    /// Whether the holder has renewed, which shows that it received the reply to its claim.
    pub(crate) confirmed: bool,
    /// Whether an external receiver completes it.
    pub(crate) handed: bool,
}

/// `att`: the failures of a bot since its last progress.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Attempts {
    /// Leases that expired unconfirmed: perhaps only the reply to the claim was lost.
    pub(crate) suspect: u32,
    /// Confirmed leases that expired.
    pub(crate) lost: u32,
    /// Failures that the handler reported.
    pub(crate) failed: u32,
    /// How many further events are handled until slices are as large as usual.
    pub(crate) isolate: u32,
}

/// The reason why an event became a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Reason {
    /// The queue already held this many events.
    Full(usize),
    /// The bot would have held more than this number of bytes.
    Quota(u64),
    /// A handler refused the event.
    Refused,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Letter {
    pub(crate) bot: Bot,
    pub(crate) sequence: u64,
    pub(crate) event: Event,
    pub(crate) reason: Reason,
    pub(crate) attempts: u32,
    pub(crate) time_ms: i64,
}

/// The bounds of a queue and its dead letters. The default bounds no queue and keeps no dead
/// letter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Limits {
    /// Maximum number of events of a bot. Zero means no maximum.
    pub(crate) max_queue: usize,
    /// Whether events above the maximum become dead letters. Otherwise they are dropped.
    pub(crate) overflow_dead: bool,
    pub(crate) dead_max: usize,
    pub(crate) linger_ms: i64,
    /// Maximum queued bytes of a bot; 0: no quota, as in those below.
    pub(crate) queued_bytes: u64,
    /// Maximum number of delayed events of a bot, and their bytes.
    pub(crate) delayed: (u64, u64),
    /// Maximum number of dead letters of a bot, and their bytes.
    pub(crate) letters: (u64, u64),
}

/// One shard of one pipeline. Its fields are the keys of the protocol.
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
    /// The lanes of a bot that are set aside, and the time in ms at which each is due.
    pub(crate) aside: BTreeMap<Bot, Vec<(Lane, i64)>>,
    /// Those whose queue goes before their lanes, after a redrive.
    pub(crate) redriven: BTreeSet<Bot>,
    /// The events of these lanes, as in `queues`.
    pub(crate) lists: BTreeMap<(Bot, Lane), VecDeque<(u64, Event)>>,
    pub(crate) offsets: BTreeMap<Stream, u64>,
    /// The names of copied events, by which a repetition is found.
    pub(crate) names: Names,
    /// Dead letters, oldest first.
    pub(crate) dead: VecDeque<Letter>,
    /// Delayed events: from the id, which is a sequence, to due time in ms, bot and event.
    pub(crate) later: BTreeMap<u64, (i64, Bot, Event)>,
    /// Idempotency keys to the sequence of the first push.
    pub(crate) keys: BTreeMap<Key, u64>,
    /// Bots whose weight is not 1.
    pub(crate) weight: BTreeMap<Bot, u32>,
    pub(crate) depth: u64,
    pub(crate) v: i64,
    pub(crate) f: u64,
    pub(crate) seq: u64,
    /// The number of leases that are handed over.
    pub(crate) open: u64,
    pub(crate) run: Option<u32>,
    /// The last published deadline of a lease that a copier took, in ms.
    pub(crate) told: i64,
    /// While this is set, the whole shard grants no lease.
    pub(crate) shard_paused: bool,
    /// The virtual length of one slice, a setting.
    pub(crate) slice_us: i64,
    pub(crate) limits: Limits,
}

/// The result of queueing events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Queued {
    pub(crate) appended: u64,
    pub(crate) dead: u64,
    pub(crate) dropped: u64,
    pub(crate) letters_removed: u64,
    pub(crate) over_quota: u64,
    pub(crate) letters_over_quota: u64,
}

/// The arguments of a claim.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Claim {
    pub(crate) max: usize,
    pub(crate) bound: i64,
    pub(crate) ttl_ms: i64,
    /// The highest virtual clock that the claimer saw on any shard.
    pub(crate) seen: i64,
    /// The number of events until slices are as large as usual, after a receiver did not end its lease.
    /// After a process vanished, twice as many.
    pub(crate) isolate: u32,
    /// No bot is ready or leased on any other shard.
    pub(crate) idle_elsewhere: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Granted {
    pub(crate) bot: Bot,
    pub(crate) fence: u64,
    pub(crate) start: i64,
    pub(crate) attempts: Attempts,
    pub(crate) weight: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Claimed {
    pub(crate) granted: Vec<Granted>,
    pub(crate) v: i64,
    /// The lowest remaining score. `None` while the shard is paused, or claimers would ask without
    /// end.
    pub(crate) lowest: Option<i64>,
    pub(crate) deadline_ms: Option<i64>,
    /// The number of bots that remain ready.
    pub(crate) ready: usize,
    /// The number of leases that ran out and were reaped.
    pub(crate) vanished: u64,
}

impl Server {
    pub(crate) fn new(slice_us: i64) -> Self {
        Self { slice_us, ..Self::default() }
    }

    /// Queues events without an offset. Bots whose queue was empty join or linger, in the order in
    /// which they first appear. The others are already ready, busy or paused.
    pub(crate) fn push(&mut self, now_us: i64, events: &[(Bot, Event)]) -> Queued {
        let (queued, fresh) = self.append(now_us, events);
        self.unpark(&fresh);
        self.rise(now_us, &fresh);
        queued
    }

    /// Queues events. Returns the bots whose queues were empty, too.
    fn append(&mut self, now_us: i64, events: &[(Bot, Event)]) -> (Queued, Vec<Bot>) {
        let (limits, mut queued, mut fresh) = (self.limits, Queued::default(), Vec::new());
        let mut over = BTreeSet::new();
        for &(bot, event) in events {
            self.seq = (self.seq + 1).max(unsigned(now_us));
            let length = self.length(bot);
            let all = length + self.set_aside(bot);
            let fits = limits.max_queue == 0 || all < limits.max_queue;
            // After the first that exceeds the quota, none of the call is taken.
            if fits && !self.may_queue(bot, &[event]) {
                over.insert(bot);
            }
            let over = over.contains(&bot);
            queued.over_quota += u64::from(over);
            if fits && !over {
                self.queues.entry(bot).or_default().push_back((self.seq, event));
                self.depth += 1;
                queued.appended += 1;
                if length == 0 {
                    fresh.push(bot);
                }
            } else if limits.overflow_dead {
                let (sequence, time_ms) = (self.seq, now_us / 1_000);
                let reason = if over {
                    Reason::Quota(limits.queued_bytes)
                } else {
                    Reason::Full(limits.max_queue)
                };
                let letter = Letter { bot, sequence, event, reason, attempts: 0, time_ms };
                let (removed, lost) = self.bury(letter);
                queued.letters_removed += removed;
                queued.letters_over_quota += lost;
                queued.dead += 1;
            } else {
                queued.dropped += 1;
            }
        }
        (queued, fresh)
    }

    /// Bots that got their first events join or linger.
    fn rise(&mut self, now_us: i64, fresh: &[Bot]) {
        let linger_ms = self.limits.linger_ms;
        if linger_ms == 0 {
            return self.join(now_us, fresh);
        }
        for bot in self.at_rest(fresh) {
            // A bot that a reaper put back with an empty queue keeps its place.
            if !self.ctl.contains_key(&bot) {
                self.busy.insert(bot, now_us / 1_000 + linger_ms);
            }
        }
    }

    /// Returns how many dead letters were removed for this one, and 1 if it is itself the removed one.
    fn bury(&mut self, letter: Letter) -> (u64, u64) {
        if !self.may_bury(letter) {
            return (1, 1);
        }
        self.dead.push_back(letter);
        let excess = self.dead.len().saturating_sub(self.limits.dead_max);
        self.dead.drain(..excess);
        (excess as u64, 0)
    }

    pub(crate) fn claim(&mut self, now_us: i64, claim: Claim) -> Claimed {
        self.v = self.v.max(claim.seen);
        let vanished = self.reap(now_us, claim.isolate);
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
            lowest: self.ctl.values().copied().min().filter(|_| !self.shard_paused),
            deadline_ms: self.busy.values().copied().min(),
            ready: self.ctl.len(),
            vanished,
        }
    }

    fn grant(&mut self, now_us: i64, ttl_ms: i64, bot: Bot, start: i64) -> Granted {
        // For the second grant of one call, `f + 1` is already at or above the time.
        self.f = (self.f + 1).max(unsigned(now_us));
        self.ctl.remove(&bot);
        self.busy.insert(bot, now_us / 1_000 + ttl_ms);
        self.own
            .insert(bot, Lease { fence: self.f, acked: 0, start, confirmed: false, handed: false });
        let attempts = self.att.get(&bot).copied().unwrap_or_default();
        let weight = self.weight.get(&bot).copied().unwrap_or(1);
        Granted { bot, fence: self.f, start, attempts, weight }
    }

    /// Expired leases and parks join again. Only here does a lease end by time. Returns the number
    /// of such leases.
    pub(crate) fn reap(&mut self, now_us: i64, isolate: u32) -> u64 {
        let mut expired: Vec<(i64, Bot)> = self
            .busy
            .iter()
            .filter(|&(_, &deadline)| deadline <= now_us / 1_000)
            .map(|(&bot, &deadline)| (deadline, bot))
            .collect();
        expired.sort_unstable();
        expired.truncate(REAP_MAX);
        let expired: Vec<Bot> = expired.into_iter().map(|(_, bot)| bot).collect();
        let mut vanished = 0;
        for bot in &expired {
            if let Some(lease) = self.own.get(bot) {
                let attempts = self.att.entry(*bot).or_default();
                if lease.confirmed {
                    attempts.lost += 1;
                } else {
                    attempts.suspect += 1;
                }
                attempts.isolate = if lease.handed { isolate } else { 2 * isolate };
                vanished += 1;
            }
        }
        self.unlease(&expired);
        self.join(now_us, &expired);
        vanished
    }

    /// Ends leases and parks from outside: later calls of their holders have no effect. The bots
    /// keep their virtual time, so a revoked bot gains nothing.
    fn unlease(&mut self, bots: &[Bot]) {
        for &bot in bots {
            self.busy.remove(&bot);
            if let Some(lease) = self.own.remove(&bot) {
                self.finish(bot, lease.start);
                self.open -= u64::from(lease.handed);
            }
        }
    }

    /// The bots among these that are neither busy nor paused.
    fn at_rest(&self, bots: &[Bot]) -> Vec<Bot> {
        let rests = |bot: &&Bot| !self.busy.contains_key(bot) && !self.paused.contains(bot);
        bots.iter().filter(rests).copied().collect()
    }

    /// The rule of fairness. A bot whose last finish is at most one slice ahead of the virtual
    /// clock is quiet. Any other bot returns with the score that it had. A ready bot keeps its
    /// place.
    fn join(&mut self, now_us: i64, bots: &[Bot]) {
        for (index, bot) in (1..).zip(self.at_rest(bots)) {
            let finish = self.fin.get(&bot).copied().unwrap_or(0);
            let quiet = finish <= self.v + self.slice_us;
            let score = if quiet { now_us - QUIET + index } else { finish };
            self.ctl.entry(bot).or_insert(score);
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
}

fn unsigned(now_us: i64) -> u64 {
    u64::try_from(now_us).unwrap_or(0)
}
