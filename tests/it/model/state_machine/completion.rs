//! The continuation and the end of a lease.

use super::{Attempts, BRIEF_US, Bot, Change, Event, Lane, Lease, Letter, REST_MS, Reason, Server};

/// The fate of a lease when its slice is completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Mode {
    /// The lease continues until this deadline. With `n = 0` it is a renewal.
    Keep {
        until_ms: i64,
    },
    /// Like `Keep`, but never with an earlier deadline. The lease is handed over if fewer than
    /// `max` are.
    Hand {
        until_ms: i64,
        max: u64,
    },
    Release,
    /// The bot rests until this time.
    Park {
        until_ms: i64,
    },
    /// Like `Park`, and counts as a failed attempt.
    Fail {
        until_ms: i64,
        isolate: u32,
    },
}

impl Mode {
    /// The same mode, given `ms` later.
    pub(crate) fn put_off(self, ms: i64) -> Self {
        match self {
            Self::Keep { until_ms } => Self::Keep { until_ms: until_ms + ms },
            Self::Hand { until_ms, max } => Self::Hand { until_ms: until_ms + ms, max },
            Self::Release => Self::Release,
            Self::Park { until_ms } => Self::Park { until_ms: until_ms + ms },
            Self::Fail { until_ms, isolate } => Self::Fail { until_ms: until_ms + ms, isolate },
        }
    }
}

/// The destination of an event that leaves the queue without being done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Dead {
        attempts: u32,
    },
    Later {
        at_ms: i64,
    },
    /// It stays queued, in a lane that is set aside.
    Lane(Lane),
}

/// The arguments of a completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Completion {
    pub(crate) bot: Bot,
    /// The run that granted the lease.
    pub(crate) run: Option<u32>,
    pub(crate) fence: u64,
    pub(crate) before: u32,
    pub(crate) n: u32,
    pub(crate) cost: i64,
    pub(crate) mode: Mode,
    /// Indexes of the events among the `n` that are not done.
    pub(crate) exceptions: Vec<(u32, Fate)>,
    /// The change of the lanes that are set aside.
    pub(crate) aside: Option<Change>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Completed {
    /// These events were removed from the queue.
    Removed(Vec<Event>),
    /// The same call came before, so no further event was removed. Its effect on the lease is
    /// repeated, so that a repeated renewal lasts from the repetition.
    Replay,
    /// The lease belongs to another holder or has ended.
    Stale,
    /// The caller has another count.
    Bad,
    /// As `Removed` or `Replay`, but too many leases are handed over already.
    Full { replay: bool },
}

impl Server {
    pub(crate) fn complete(&mut self, now_us: i64, call: &Completion) -> Completed {
        match self.own.get(&call.bot) {
            Some(lease) if lease.fence == call.fence && self.run == call.run => {
                self.complete_held(now_us, *lease, call)
            }
            _ => Completed::Stale,
        }
    }

    /// A completion whose fence is the current one.
    pub(crate) fn complete_held(
        &mut self,
        now_us: i64,
        mut lease: Lease,
        call: &Completion,
    ) -> Completed {
        let &Completion { bot, before, n, .. } = call;
        let list = call.aside.as_ref().and_then(|change| change.list);
        let length = self.list(bot, list).map_or(0, std::collections::VecDeque::len);
        let replay = lease.acked != before && lease.acked == before + n;
        let possible = replay || (lease.acked == before && n as usize <= length);
        if !possible || call.exceptions.iter().any(|&(index, _)| index >= n) {
            return Completed::Bad;
        }
        let mut removed = Vec::new();
        if !replay {
            for &(index, fate) in &call.exceptions {
                self.except(now_us, (bot, list), index, fate);
            }
            removed = self.remove_head(bot, list, n);
            lease.acked += n;
            lease.start += call.cost;
        }
        if let Some(change) = &call.aside {
            self.aside.remove(&bot);
            self.redriven.remove(&bot);
            if !change.lanes.is_empty() {
                self.aside.insert(bot, change.lanes.clone());
            }
        }
        let done = if replay { 0 } else { n };
        let is_dead =
            |&&(_, fate): &&(u32, Fate)| matches!(fate, Fate::Dead { attempts } if attempts > 0);
        let dead = call.exceptions.iter().filter(is_dead).count();
        let failed_for_good = if replay { 0 } else { u32::try_from(dead).unwrap() };
        let tried = list.is_some() && !matches!(call.mode, Mode::Keep { .. });
        if done > 0 || tried {
            self.progress(bot, done - failed_for_good);
        }
        let mut full = false;
        match call.mode {
            Mode::Keep { until_ms } => {
                lease.confirmed = true;
                self.own.insert(bot, lease);
                self.busy.insert(bot, until_ms);
            }
            Mode::Hand { until_ms, max } => {
                lease.confirmed = true;
                full = !lease.handed && self.open >= max;
                if !full && !lease.handed {
                    lease.handed = true;
                    self.open += 1;
                }
                self.own.insert(bot, lease);
                let until_ms = until_ms.max(self.busy[&bot]);
                self.busy.insert(bot, until_ms);
            }
            Mode::Release => {
                self.end(bot, lease);
                self.busy.remove(&bot);
                let next_ms = call.aside.as_ref().map_or(0, |change| change.next_ms);
                let waits = !self.queues.contains_key(&bot) && next_ms > 0;
                if waits && self.aside.contains_key(&bot) {
                    self.busy.insert(bot, now_us / 1_000 + next_ms);
                    self.note_finish(bot, lease);
                } else if self.has_events(bot) && !self.paused.contains(&bot) {
                    self.ctl.insert(bot, lease.start);
                } else {
                    self.note_finish(bot, lease);
                }
            }
            Mode::Park { until_ms } => self.park(now_us, bot, lease, until_ms),
            Mode::Fail { until_ms, isolate } => {
                let attempts = self.att.entry(bot).or_default();
                attempts.failed += 1;
                attempts.isolate = attempts.isolate.max(isolate);
                self.park(now_us, bot, lease, until_ms);
            }
        }
        match (full, replay) {
            (true, replay) => Completed::Full { replay },
            (false, true) => Completed::Replay,
            (false, false) => Completed::Removed(removed),
        }
    }

    /// A finish shortly ahead of the clock is noted as [`BRIEF_US`] ahead, by a chance that keeps the
    /// mean. The fence decides.
    fn note_finish(&mut self, bot: Bot, lease: Lease) {
        let ahead = lease.start - self.v;
        if ahead >= BRIEF_US {
            self.finish(bot, lease.start);
        } else if i64::try_from(lease.fence).unwrap() % BRIEF_US < ahead {
            self.finish(bot, self.v + BRIEF_US);
        }
    }

    fn end(&mut self, bot: Bot, lease: Lease) {
        self.own.remove(&bot);
        self.open -= u64::from(lease.handed);
    }

    fn except(&mut self, now_us: i64, (bot, list): (Bot, Option<Lane>), index: u32, fate: Fate) {
        let (sequence, event) = self.list(bot, list).unwrap()[index as usize];
        match fate {
            Fate::Dead { attempts } => {
                let (reason, time_ms) = (Reason::Refused, now_us / 1_000);
                self.bury(Letter { bot, sequence, event, reason, attempts, time_ms });
            }
            Fate::Later { at_ms } => {
                self.later.insert(sequence, (at_ms, bot, event));
            }
            Fate::Lane(lane) => {
                let list = self.lists.entry((bot, lane)).or_default();
                let place = list.partition_point(|&(other, _)| other < sequence);
                list.insert(place, (sequence, event));
                self.depth += 1;
            }
        }
    }

    /// A bot without events does not rest for long.
    fn park(&mut self, now_us: i64, bot: Bot, lease: Lease, mut until_ms: i64) {
        self.end(bot, lease);
        if !self.has_events(bot) {
            until_ms = until_ms.min(now_us / 1_000 + REST_MS);
        }
        self.busy.insert(bot, until_ms);
        self.note_finish(bot, lease);
    }

    fn progress(&mut self, bot: Bot, n: u32) {
        if let Some(attempts) = self.att.get_mut(&bot) {
            // Without any event, every event that failed before is done.
            let left = self.queues.contains_key(&bot) || self.aside.contains_key(&bot);
            let isolate = if left { attempts.isolate.saturating_sub(n) } else { 0 };
            *attempts = Attempts { isolate, ..Attempts::default() };
            if isolate == 0 {
                self.att.remove(&bot);
            }
        }
    }
}
