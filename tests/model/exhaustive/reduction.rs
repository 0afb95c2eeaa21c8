//! States that differ only in what has no meaning are explored once.
//!
//! Consumers are alike in every system, so they are sorted. The rest applies to systems in which bots take
//! no turns. There, a claim may get any ready bot. That allows all that the turns allow, and more: a
//! promise that holds there holds with turns too, because no promise speaks of turns. A state then needs
//! neither scores nor virtual time, and bots are alike:
//!
//! * **Bots.** A permutation of bots whose events have all been copied, for good, maps each step of the
//!   one state to a step of the other one: no rule but the turns compares bots, and what is left of the
//!   order of the bus, the positions, is the same in both. The promises speak of all bots and all events.
//!   Before the copy, the order of the bus distinguishes the bots. Bots that a purge or a pause may hit,
//!   or with another number of events, are never exchanged.
//! * **Fences.** A new fence is above all others of its run, and a lease of an older run never ends
//!   anything. So only one fact counts: which holder has the current lease of its bot. Leases are
//!   numbered by bot. An old holder gets fence 0, and its count, which only a current lease compares,
//!   is dropped. Where the comparison itself is left out, fences stay as they are.
//! * **Sequences** are compared along a queue only, so they are numbered by place.
//! * **Attempts** count without consequence: only `isolate`, and whether there are any, decides the next slice.
//!
//! The invariants and the promises that compare such values are checked before, on the state as it is. A test
//! explores small systems with and without the reduction: both have the same representatives.

use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::sync::Arc;

use super::parts::{BOTS, Ending, Held, Rule, STREAMS, System, SystemState, Turns};
use super::system::FAR_MS;
use crate::state_machine::{Attempts, Bot, Event, Server};

/// To which bot and to which event each is mapped.
struct Exchange {
    bots: [Bot; BOTS],
    events: Vec<Event>,
}

impl System {
    /// Whether leases may be numbered anew: old ones have no effect.
    fn checks_leases(&self) -> bool {
        let left_out =
            matches!(self.without, Some(Rule::Recover | Rule::FenceCheck | Rule::RunCheck));
        self.turns == Turns::AnyReduced && !left_out
    }

    /// The state that a restart will find. It is only changed here, because it is copied less often than
    /// the state of the server.
    pub(super) fn reduce_saved(&self, server: &mut Server, run: u32) {
        if self.checks_leases() {
            // Each connection starts with `recover`, so no call sees the leases.
            server.recover(Self::NOW_US, run + 1);
            server.number_leases();
        }
        if self.turns == Turns::AnyReduced {
            server.reduce();
        }
    }

    /// The state that is explored instead of this one and of all that are like it.
    pub(super) fn representative(&self, mut state: SystemState) -> SystemState {
        self.reduce(&mut state);
        let hash = |state: &SystemState| {
            let mut hasher = DefaultHasher::new();
            state.hash(&mut hasher);
            hasher.finish()
        };
        let exchanges = self.exchanges(&state);
        if exchanges.is_empty() {
            return state;
        }
        // The order of hashes is as good as any other one. If two were equal, a state would only be
        // explored twice.
        let others = exchanges.iter().map(|exchange| {
            let mut other = exchange.apply(&state);
            self.reduce(&mut other);
            other
        });
        let all = others.map(|other| (hash(&other), other));
        let least = all.min_by_key(|(hash, _)| *hash).unwrap();
        if least.0 < hash(&state) { least.1 } else { state }
    }

    /// The same for a state that was reached without reduction.
    #[cfg(test)]
    pub(super) fn representative_of_whole(&self, mut state: SystemState) -> SystemState {
        state.server.recover(Self::NOW_US, state.run);
        if let Some(saved) = &mut state.saved {
            self.reduce_saved(Arc::make_mut(saved), state.run);
        }
        self.representative(state)
    }

    fn reduce(&self, state: &mut SystemState) {
        match self.turns {
            Turns::Kept => {}
            Turns::Any => state.server.forget_turns(),
            Turns::AnyReduced => state.server.reduce(),
        }
        if self.checks_leases() {
            number_leases(state);
        }
        state.consumers.sort_unstable();
    }

    /// The exchanges of bots that may be made in this state, but for the one that changes nothing.
    fn exchanges(&self, state: &SystemState) -> Vec<Exchange> {
        if self.turns != Turns::AnyReduced {
            return Vec::new();
        }
        let bots = self.bots();
        let alike = |one: Bot, other: Bot| {
            let special = self.budget.purges + self.budget.pauses > 0;
            let free = !special || (one > 0 && other > 0);
            free && self.streams_of(one).eq(self.streams_of(other))
                && self.is_copied(state, one)
                && self.is_copied(state, other)
        };
        let mut found = Vec::new();
        for bots in permutations(bots) {
            let changed = (0..).zip(bots).filter(|&(one, other)| one != other);
            let mut changed = changed.peekable();
            if changed.peek().is_some() && changed.all(|(one, other)| alike(one, other)) {
                found.push(self.exchange(bots));
            }
        }
        found
    }

    fn streams_of(&self, bot: Bot) -> impl Iterator<Item = u8> {
        self.events.iter().filter(move |(_, of)| *of == bot).map(|&(stream, _)| stream)
    }

    /// Whether no event of the bot will be copied, also after a lost tail.
    fn is_copied(&self, state: &SystemState, bot: Bot) -> bool {
        [Some(&state.server), state.saved.as_deref()].into_iter().flatten().all(|server| {
            (0..STREAMS).all(|stream| {
                let last = self.of_stream(stream).zip(1..).filter(|((of, _), _)| *of == bot).last();
                let copied = server.offsets.get(&stream).copied().unwrap_or(0);
                last.is_none_or(|(_, offset)| offset <= copied)
            })
        })
    }

    fn exchange(&self, bots: [Bot; BOTS]) -> Exchange {
        let of = |bot: Bot| {
            (0..).zip(self.events).filter(move |(_, event)| event.1 == bot).map(|(event, _)| event)
        };
        let mut events = vec![0; self.events.len()];
        for (one, other) in (0..self.bots()).zip(bots) {
            for (event, mapped) in of(one).zip(of(other)) {
                events[usize::from(event)] = mapped;
            }
        }
        Exchange { bots, events }
    }
}

/// All orders of the first bots. The others stay in their places.
fn permutations(bots: Bot) -> impl Iterator<Item = [Bot; BOTS]> {
    let all = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    all.into_iter().filter(move |order| (bots..3).all(|bot| order[usize::from(bot)] == bot))
}

impl Exchange {
    fn bot(&self, bot: Bot) -> Bot {
        self.bots[usize::from(bot)]
    }

    fn event(&self, event: Event) -> Event {
        self.events[usize::from(event)]
    }

    fn bits(&self, bits: u8) -> u8 {
        let set = (0..).zip(&self.events).filter(|(event, _)| bits & (1 << event) != 0);
        set.fold(0, |mapped, (_, event)| mapped | (1 << event))
    }

    fn server(&self, server: &Server) -> Server {
        let mut mapped = Server {
            ctl: server.ctl.iter().map(|(&bot, &score)| (self.bot(bot), score)).collect(),
            busy: server.busy.iter().map(|(&bot, &at)| (self.bot(bot), at)).collect(),
            own: server.own.iter().map(|(&bot, &lease)| (self.bot(bot), lease)).collect(),
            att: server.att.iter().map(|(&bot, &attempts)| (self.bot(bot), attempts)).collect(),
            paused: server.paused.iter().map(|&bot| self.bot(bot)).collect(),
            queues: server.queues.iter().map(|(&bot, q)| (self.bot(bot), q.clone())).collect(),
            ..server.clone()
        };
        for (_, event) in mapped.queues.values_mut().flatten() {
            *event = self.event(*event);
        }
        mapped.reduce();
        mapped
    }

    fn apply(&self, state: &SystemState) -> SystemState {
        let mut mapped = SystemState {
            server: self.server(&state.server),
            saved: state.saved.as_ref().map(|saved| Arc::new(self.server(saved))),
            handled: self.bits(state.handled),
            purged: self.bits(state.purged),
            ..state.clone()
        };
        for held in mapped.consumers.iter_mut().flatten() {
            held.bot = self.bot(held.bot);
            for event in held.slice.iter_mut().flatten() {
                *event = self.event(*event);
            }
        }
        for (bot, bucket) in (0..).zip(state.buckets) {
            mapped.buckets[usize::from(self.bot(bot))] = bucket;
        }
        mapped
    }
}

impl Server {
    fn forget_turns(&mut self) {
        for score in self.ctl.values_mut() {
            *score = 0;
        }
    }

    fn reduce(&mut self) {
        self.forget_turns();
        for at in self.busy.values_mut() {
            *at = if *at > 0 { FAR_MS } else { 0 };
        }
        for lease in self.own.values_mut() {
            lease.confirmed = false;
        }
        for attempts in self.att.values_mut() {
            let failed = u32::from(attempts.suspect + attempts.lost + attempts.failed > 0);
            *attempts = Attempts { failed, isolate: attempts.isolate, ..Attempts::default() };
        }
        self.seq = 0;
        for (sequence, _) in self.queues.values_mut().flatten() {
            self.seq += 1;
            *sequence = self.seq;
        }
        self.told = 0;
    }

    /// Numbers the leases by bot.
    fn number_leases(&mut self) {
        self.f = 0;
        for lease in self.own.values_mut() {
            self.f += 1;
            lease.fence = self.f;
        }
    }
}

fn number_leases(state: &mut SystemState) {
    state.server.number_leases();
    for (bot, lease) in &mut state.server.own {
        let is_holder = |held: &&mut Held| held.bot == *bot && !held.superseded;
        match state.consumers.iter_mut().flatten().find(is_holder) {
            Some(held) => {
                held.fence = lease.fence;
                lease.acked -= held.acked;
                held.acked = 0;
            }
            // Nobody will complete it.
            None => lease.acked = 0,
        }
    }
    for held in state.consumers.iter_mut().flatten() {
        if held.slice.is_some() && held.superseded {
            held.limit = 0;
        }
        if held.superseded {
            (held.fence, held.run, held.acked) = (0, 0, 0);
            held.unanswered = held.unanswered.map(|_| (Ending::Release, 0));
        }
    }
}
