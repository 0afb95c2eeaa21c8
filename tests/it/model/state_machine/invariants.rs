//! The invariants that hold in every state.

use std::collections::{BTreeSet, VecDeque};

use super::{Attempts, Event, Server};

impl Server {
    /// The first invariant of the protocol that does not hold, if any.
    pub(crate) fn broken_invariant(&self) -> Option<&'static str> {
        let nobody_forgotten = self.queues.keys().chain(self.aside.keys()).all(|bot| {
            let (ready, busy) = (self.ctl.contains_key(bot), self.busy.contains_key(bot));
            let rests = self.paused.contains(bot) && !busy;
            u8::from(ready) + u8::from(busy) + u8::from(rests) == 1
        });
        let in_two_places = self.ctl.keys().any(|bot| self.busy.contains_key(bot));
        let fences: BTreeSet<u64> = self.own.values().map(|lease| lease.fence).collect();
        let lists = || self.queues.values().chain(self.lists.values());
        let length: usize = lists().map(VecDeque::len).sum();
        let in_order = |queue: &VecDeque<(u64, Event)>| {
            queue.iter().zip(queue.iter().skip(1)).all(|(a, b)| a.0 < b.0)
        };
        let named: BTreeSet<(u8, u8)> = self
            .aside
            .iter()
            .flat_map(|(&bot, lanes)| lanes.iter().map(move |&(lane, _)| (bot, lane)))
            .collect();
        let waiting = lists().flatten().map(|&(sequence, _)| sequence);
        let dead = self.dead.iter().map(|letter| letter.sequence);
        let everywhere: Vec<u64> = waiting.chain(dead).chain(self.later.keys().copied()).collect();
        let once: BTreeSet<&u64> = everywhere.iter().collect();
        let handed = self.own.values().filter(|lease| lease.handed).count() as u64;
        [
            ("a bot with events is in exactly one place", nobody_forgotten),
            ("no bot is both ready and busy", !in_two_places),
            ("no paused bot is ready", self.ctl.keys().all(|bot| !self.paused.contains(bot))),
            ("every lease has a deadline", self.own.keys().all(|b| self.busy.contains_key(b))),
            ("every live fence is granted once", fences.len() == self.own.len()),
            ("no live fence is above the last", fences.iter().all(|&fence| fence <= self.f)),
            ("open counts the leases that are handed over", handed == self.open),
            ("depth is the sum of the lengths", length as u64 == self.depth),
            ("an empty queue has no key", lists().all(|queue| !queue.is_empty())),
            ("each lane that is set aside has events", named.iter().eq(self.lists.keys())),
            ("sequences rise along a queue", self.queues.values().all(in_order)),
            ("an event is in one place", once.len() == everywhere.len()),
            ("no sequence is above the last", everywhere.iter().all(|&s| s <= self.seq)),
            ("a finish is ahead of the clock", self.fin.values().all(|&at| at > self.v)),
            ("no attempts without a count", self.att.values().all(|a| *a != Attempts::default())),
        ]
        .into_iter()
        .find_map(|(name, holds)| (!holds).then_some(name))
    }
}
