//! The dispatcher's knowledge about the shards of its pipeline, and its choice of the next claims.
//!
//! All shards share one virtual clock. A claim goes to the shard with the lowest known score and is
//! bounded by the next lowest score, so a bot that is alone in its shard gets no more than one that
//! shares a shard. The scores come from wake messages and replies, with scans as a backup. A
//! published score can only lower the known one. The reply to a claim replaces the known score,
//! *but never a score that was published while the claim was in flight*: otherwise a shard could
//! sleep with queued events.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::Rng;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::id::{Shard, ShardCount};
use crate::redis::scripts::{Claimed, Completed};

/// Maximum number of bots claimed from one shard per call.
pub(super) const CLAIM_MAX: usize = 32;
/// Maximum number of shards claimed from concurrently.
const ROUND_MAX: usize = 8;
/// Interval of scans of a shard with ready, leased or parked bots.
const SCAN_ACTIVE: Duration = Duration::from_secs(1);
/// The same, if its bots wait for their rate. The end of a park is known to the process that made it, and
/// to those that looked since. If that process dies, another one finds the bot by these scans.
const SCAN_PATIENT: Duration = Duration::from_secs(10);
/// Interval of scans of an empty shard.
const SCAN_IDLE: Duration = Duration::from_secs(60);
/// Pause after a failed claim.
const SCAN_FAILED: Duration = Duration::from_millis(250);

/// A claim to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) shard: Shard,
    pub(super) max: usize,
    pub(super) bound: Option<i64>,
    pub(super) seen: u64,
    pub(super) alone: bool,
}

#[derive(Debug)]
struct Entry {
    low: Option<i64>,
    /// Number of further ready bots, as far as known.
    ready: u64,
    /// When the next lease or park ends.
    deadline: Option<Instant>,
    /// The lowest score published since the claim in flight was sent.
    heard: Option<i64>,
    /// The earliest deadline published since then.
    heard_deadline: Option<Instant>,
    /// Whether messages may have been missed since then.
    missed: bool,
    claiming: bool,
    scan_at: Instant,
}

#[derive(Debug)]
struct State {
    shards: Vec<Entry>,
    /// The highest virtual clock so far, µs.
    clock: u64,
    /// The same moment by the server's clock (µs since 1970) and by ours.
    server: Option<(u64, Instant)>,
}

#[derive(Debug)]
pub(super) struct Board {
    state: Mutex<State>,
    count: ShardCount,
    changed: Notify,
    /// Whether active shards in which nobody is ready are scanned more rarely.
    patient: bool,
}

impl Board {
    /// A board without knowledge: every shard will be scanned.
    pub(super) fn new(count: ShardCount) -> Self {
        let now = Instant::now();
        let entry = |_| Entry {
            low: None,
            ready: 0,
            deadline: None,
            heard: None,
            heard_deadline: None,
            missed: false,
            claiming: false,
            scan_at: now,
        };
        let shards = count.shards().map(entry).collect();
        let state = Mutex::new(State { shards, clock: 0, server: None });
        Self { state, count, changed: Notify::new(), patient: false }
    }

    /// A board for bots that often wait for their rate: nobody looks at them before. Messages and
    /// deadlines wake the dispatcher.
    pub(super) fn patient(self, patient: bool) -> Self {
        Self { patient, ..self }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic in one of the short sections below leaves at worst outdated knowledge.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the dispatcher after a message, or when capacity becomes free.
    pub(super) fn changed(&self) -> &Notify {
        &self.changed
    }

    /// Notes a lower score of the shard, published by another process or script.
    pub(super) fn heard(&self, shard: Shard, score: i64) {
        self.state().shards[shard.index()].lower(Some(score));
        self.changed.notify_one();
    }

    /// Notes an earlier end of a park or linger.
    pub(super) fn heard_deadline(&self, shard: Shard, deadline_ms: u64) {
        let mut state = self.state();
        let deadline = state.local(deadline_ms);
        state.shards[shard.index()].earlier(deadline);
        drop(state);
        self.changed.notify_one();
    }

    /// Messages may have been missed: scan every shard.
    pub(super) fn look_everywhere(&self) {
        let now = Instant::now();
        for entry in &mut self.state().shards {
            entry.scan_at = now;
            entry.missed = true;
        }
        self.changed.notify_one();
    }

    /// Number of known ready bots over all shards.
    pub(super) fn ready(&self) -> u64 {
        let state = self.state();
        state.shards.iter().map(|entry| entry.ready.max(u64::from(entry.low.is_some()))).sum()
    }

    /// The highest virtual clock so far, µs.
    pub(super) fn clock(&self) -> u64 {
        self.state().clock
    }

    /// Notes a lease of a copy. The dispatcher need not look earlier: the holder releases it, or
    /// the published deadline wakes all.
    pub(super) fn leased(&self, shard: Shard, ttl: Duration) {
        self.state().shards[shard.index()].earlier(Instant::now() + ttl);
    }

    /// Whether a claim could be sent now.
    pub(super) fn has_work(&self) -> bool {
        let now = Instant::now();
        self.state()
            .shards
            .iter()
            .any(|entry| !entry.claiming && (entry.is_due(now) || entry.low.is_some()))
    }

    /// The claims to send now, for at most `room` bots. `slack`: how far a claim may pass the next
    /// lowest known score, µs.
    pub(super) fn next_round(&self, room: usize, slack: i64) -> Vec<Ask> {
        if room == 0 {
            return Vec::new();
        }
        let now = Instant::now();
        let mut state = self.state();
        let mut order: Vec<(bool, i64, Shard)> = Vec::new();
        let shards = self.count.shards();
        for (entry, shard) in state.shards.iter().zip(shards) {
            let due = entry.is_due(now);
            if !entry.claiming && (due || entry.low.is_some()) {
                order.push((!due, entry.low.unwrap_or(i64::MAX), shard));
            }
        }
        // Due scans first, then the lowest scores.
        order.sort_unstable();
        let looks = order.iter().take_while(|(known, ..)| !known).count();
        let picks = room.div_ceil(CLAIM_MAX).clamp(1, ROUND_MAX);
        order.truncate(looks.max(picks));
        let next = state.lowest_beside(&order);
        let active = state.shards.iter().filter(|entry| entry.is_active()).count();
        let mut left = room;
        let mut asks = Vec::with_capacity(order.len());
        // The lowest scores get the room first.
        order.sort_unstable_by_key(|&(_, low, shard)| (low, shard));
        for (at, &(_, _, shard)) in order.iter().enumerate() {
            let bound = if order.len() == 1 || looks == 0 {
                next
            } else {
                // A scan without a known score must not pass a known one.
                let others = order.iter().enumerate().filter(|&(other, _)| other != at);
                let known = others.map(|(_, &(_, low, _))| low).filter(|&low| low != i64::MAX);
                known.chain(next).min()
            };
            let max = left.min(CLAIM_MAX);
            left -= max;
            let entry = &mut state.shards[shard.index()];
            let alone = active == usize::from(entry.is_active());
            entry.claiming = true;
            (entry.heard, entry.heard_deadline, entry.missed) = (None, None, false);
            let seen = state.clock;
            let bound = bound.map(|bound| bound.saturating_add(slack));
            asks.push(Ask { shard, max, bound, seen, alone });
        }
        asks
    }

    /// Applies the reply to a claim.
    pub(super) fn claimed(&self, shard: Shard, claimed: &Claimed) {
        let now = Instant::now();
        let mut state = self.state();
        state.server = Some((claimed.now_us, now));
        state.clock = state.clock.max(claimed.clock);
        let deadline = claimed.deadline_ms.map(|ms| state.local(ms));
        let entry = &mut state.shards[shard.index()];
        entry.claiming = false;
        entry.low = claimed.low;
        entry.ready = claimed.ready;
        let heard = entry.heard.take();
        entry.lower(heard);
        entry.deadline = deadline;
        if let Some(heard) = entry.heard_deadline.take() {
            entry.earlier(heard);
        }
        let interval = match (entry.missed, entry.is_active()) {
            (true, _) => Duration::ZERO,
            (false, true) if self.patient && entry.low.is_none() => SCAN_PATIENT,
            (false, true) => SCAN_ACTIVE,
            (false, false) => SCAN_IDLE,
        };
        entry.scan_at = now + interval.mul_f64(rand::rng().random_range(0.8..1.2));
    }

    /// Notes a claim without a reply.
    pub(super) fn failed(&self, shard: Shard) {
        let entry = &mut self.state().shards[shard.index()];
        entry.claiming = false;
        // The claim may or may not have taken bots, so the rest is unknown.
        entry.low = entry.heard.take();
        entry.deadline = None;
        entry.scan_at = Instant::now() + SCAN_FAILED;
    }

    /// Applies the reply to a completion.
    pub(super) fn completed(&self, shard: Shard, completed: &Completed) {
        let mut state = self.state();
        state.clock = state.clock.max(completed.clock);
        let deadline = completed.deadline_ms.map(|ms| state.local(ms));
        let entry = &mut state.shards[shard.index()];
        let is_sooner = deadline.is_some_and(|at| entry.deadline.is_none_or(|known| at < known));
        entry.lower(completed.low);
        if let Some(deadline) = deadline {
            entry.earlier(deadline);
        }
        drop(state);
        if completed.low.is_some() || is_sooner {
            self.changed.notify_one();
        }
    }

    /// When the first known lease or park ends.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.state().shards.iter().filter_map(|entry| entry.deadline).min()
    }

    /// When to scan again without a message.
    pub(super) fn next_look(&self) -> Instant {
        let state = self.state();
        let entries = state.shards.iter().filter(|entry| !entry.claiming);
        let first = entries.map(|entry| entry.deadline.unwrap_or(entry.scan_at).min(entry.scan_at));
        first.min().unwrap_or_else(|| Instant::now() + SCAN_ACTIVE)
    }
}

impl State {
    /// The moment by our monotonic clock at which the server's clock shows `ms`, plus a margin.
    fn local(&self, ms: u64) -> Instant {
        match self.server {
            Some((server_us, at)) => {
                let us = ms.saturating_mul(1_000).saturating_sub(server_us);
                // The script compares whole milliseconds.
                at + Duration::from_micros(us.min(86_400_000_000)) + Duration::from_millis(1)
            }
            None => Instant::now(),
        }
    }

    /// The lowest known score of the shards outside `chosen`. Shards with a claim in flight do not
    /// count: their server may be frozen, and the bots of the others would have to wait for it.
    fn lowest_beside(&self, chosen: &[(bool, i64, Shard)]) -> Option<i64> {
        let others = self
            .shards
            .iter()
            .enumerate()
            .filter(|(index, _)| !chosen.iter().any(|(_, _, shard)| shard.index() == *index));
        others.filter(|(_, entry)| !entry.claiming).filter_map(|(_, entry)| entry.low).min()
    }
}

impl Entry {
    fn is_due(&self, now: Instant) -> bool {
        self.scan_at <= now || self.deadline.is_some_and(|at| at <= now)
    }

    fn is_active(&self) -> bool {
        self.low.is_some() || self.deadline.is_some() || self.ready > 0
    }

    fn lower(&mut self, score: Option<i64>) {
        let Some(score) = score else { return };
        self.low = Some(self.low.map_or(score, |low| low.min(score)));
        if self.claiming {
            self.heard = Some(self.heard.map_or(score, |heard| heard.min(score)));
        }
    }

    fn earlier(&mut self, deadline: Instant) {
        let earliest = |known: Option<Instant>| known.map_or(deadline, |at| at.min(deadline));
        self.deadline = Some(earliest(self.deadline));
        if self.claiming {
            self.heard_deadline = Some(earliest(self.heard_deadline));
        }
    }
}

#[cfg(test)]
mod tests;
