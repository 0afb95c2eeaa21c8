//! The commands of operators, schedulers and connections for a shard.

use super::{Bot, Event, Key, Queued, Server, size, unsigned};

/// The answer to a push of one bot's events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pushed {
    pub(crate) queued: Queued,
    /// Also the id of a delayed event.
    pub(crate) sequence: u64,
    pub(crate) duplicate: bool,
}

/// A push that exceeds a quota: its name, what the bot holds, and the quota. Nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refused(pub(crate) &'static str, pub(crate) u64, pub(crate) u64);

impl Server {
    /// Pushes events of one bot now, or one event later, once per idempotency key.
    pub(crate) fn push_once(
        &mut self,
        now_us: i64,
        key: Option<Key>,
        due_ms: Option<i64>,
        (bot, events): (Bot, &[Event]),
    ) -> Result<Pushed, Refused> {
        if let Some(&sequence) = key.and_then(|key| self.keys.get(&key)) {
            return Ok(Pushed { queued: Queued::default(), sequence, duplicate: true });
        }
        if let Some(refused) = self.refuses(due_ms.is_some(), bot, events) {
            return Err(refused);
        }
        let queued = if let Some(due_ms) = due_ms {
            self.seq = (self.seq + 1).max(unsigned(now_us));
            self.later.insert(self.seq, (due_ms, bot, events[0]));
            Queued { appended: 1, ..Queued::default() }
        } else {
            let events: Vec<(Bot, Event)> = events.iter().map(|&event| (bot, event)).collect();
            self.push(now_us, &events)
        };
        if let Some(key) = key {
            self.keys.insert(key, self.seq);
        }
        Ok(Pushed { queued, sequence: self.seq, duplicate: false })
    }

    fn refuses(&self, delayed: bool, bot: Bot, events: &[Event]) -> Option<Refused> {
        if !self.may_queue(bot, events) {
            return Some(Refused("queued_bytes", self.held('q', bot), self.limits.queued_bytes));
        }
        if !delayed {
            return None;
        }
        let ((count, bytes), more) = (self.limits.delayed, size(events[0]));
        let (held, held_bytes) = (self.held('l', bot), self.held('L', bot));
        if count > 0 && held >= count {
            return Some(Refused("delayed_events", held, count));
        }
        let refused = Refused("delayed_bytes", held_bytes, bytes);
        (bytes > 0 && held_bytes + more > bytes).then_some(refused)
    }

    /// Moves the due ones of these delayed events into the queues, as if they arrived now. Returns
    /// their number, and the next due time.
    pub(crate) fn promote(&mut self, now_us: i64, events: &[(u64, Bot)]) -> (u64, Option<i64>) {
        let (mut moved, mut fresh) = (0, Vec::new());
        for &(id, bot) in events {
            let Some(&(due_ms, owner, event)) = self.later.get(&id) else { continue };
            if due_ms > now_us / 1_000 || owner != bot {
                continue;
            }
            self.later.remove(&id);
            self.seq = (self.seq + 1).max(unsigned(now_us));
            if !self.queues.contains_key(&bot) {
                fresh.push(bot);
            }
            self.queues.entry(bot).or_default().push_back((self.seq, event));
            self.depth += 1;
            moved += 1;
        }
        self.unpark(&fresh);
        self.join(now_us, &fresh);
        (moved, self.later.values().map(|&(due_ms, ..)| due_ms).min())
    }

    /// Puts a dead letter of the bot back in order of sequence. Revokes the lease, because its
    /// holder counts from the old head.
    pub(crate) fn redrive(&mut self, now_us: i64, place: Option<usize>, bot: Bot) -> bool {
        let letter = place.and_then(|place| self.dead.get(place).copied());
        let (Some(place), Some(letter)) = (place, letter) else { return false };
        if letter.bot != bot {
            return false;
        }
        self.dead.remove(place);
        let queue = self.queues.entry(bot).or_default();
        let at = queue.iter().position(|&(sequence, _)| sequence > letter.sequence);
        queue.insert(at.unwrap_or(queue.len()), (letter.sequence, letter.event));
        let first = queue.len() == 1;
        self.depth += 1;
        self.att.remove(&bot);
        if self.aside.contains_key(&bot) {
            self.redriven.insert(bot);
        }
        if first {
            self.unpark(&[bot]);
        }
        if self.own.contains_key(&bot) {
            self.unlease(&[bot]);
        }
        self.join(now_us, &[bot]);
        true
    }

    /// Breaks a lease or park, and makes the lanes that are set aside due. Returns whether there was one.
    pub(crate) fn revoke(&mut self, now_us: i64, bot: Bot) -> bool {
        let waits = self.make_due(bot);
        if !self.busy.contains_key(&bot) {
            return waits;
        }
        self.unlease(&[bot]);
        if self.has_events(bot) {
            self.join(now_us, &[bot]);
        }
        true
    }

    /// Pauses or resumes the whole shard. Returns whether that changed something.
    pub(crate) fn pause_shard(&mut self, paused: bool) -> bool {
        std::mem::replace(&mut self.shard_paused, paused) != paused
    }

    /// Pauses a bot. A running lease or park ends normally before the bot rests. Returns whether
    /// that changed something.
    pub(crate) fn pause(&mut self, bot: Bot) -> bool {
        if let Some(score) = self.ctl.remove(&bot) {
            self.finish(bot, score);
        }
        self.paused.insert(bot)
    }

    pub(crate) fn resume(&mut self, now_us: i64, bot: Bot) -> bool {
        let changed = self.paused.remove(&bot);
        if changed && self.has_events(bot) {
            self.join(now_us, &[bot]);
        }
        changed
    }

    /// Drops a bot's events and revokes its lease, because the holder counts from the old head.
    pub(crate) fn purge(&mut self, bot: Bot) -> Vec<Event> {
        let mut removed = self.remove_head(bot, None, u32::MAX);
        removed.extend(self.drop_lanes(bot));
        self.unlease(&[bot]);
        if let Some(score) = self.ctl.remove(&bot) {
            self.finish(bot, score);
        }
        self.att.remove(&bot);
        removed
    }

    /// The first command on a new connection. After a restart it revokes every lease of an older
    /// run: queues may have lost their tails, so no holder's count is reliable. The bots become
    /// ready in the order in which their leases were granted. Returns the number of revoked leases,
    /// or `None` if the run is known.
    pub(crate) fn recover(&mut self, now_us: i64, run: u32) -> Option<u64> {
        if self.run == Some(run) {
            return None;
        }
        self.run = Some(run);
        let mut leased: Vec<(u64, Bot)> =
            self.own.iter().map(|(&bot, lease)| (lease.fence, bot)).collect();
        leased.sort_unstable();
        let leased: Vec<Bot> = leased.into_iter().map(|(_, bot)| bot).collect();
        self.unlease(&leased);
        self.join(now_us, &leased);
        Some(leased.len() as u64)
    }
}
