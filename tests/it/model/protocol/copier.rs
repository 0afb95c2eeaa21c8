//! The copier: what it read of the bus and must send again, and what of it was copied.
//!
//! A part of the bus has always the same events. A call that a lost tail took is sent again with all of
//! them, and so is a call in which repetitions were found, without these.

use std::collections::{BTreeMap, VecDeque};

use proptest::sample::Index;

use super::operation::{Again, Chain};
use crate::model::state_machine::{
    Bot, Enqueued, Event, Name, Queued, Repeats, Server, Span, Stream, Take,
};

/// A call of the script.
#[derive(Debug, Clone)]
pub(super) struct Copy {
    pub(super) spans: Vec<Span>,
    pub(super) bots: Vec<(Bot, Vec<Event>)>,
    pub(super) take: Take,
    /// Zero: repetitions are copied.
    pub(super) window_ms: i64,
    /// The names of all events, in their order.
    pub(super) names: Vec<Name>,
    /// The names of repetitions that were left out.
    pub(super) left_out: Vec<Name>,
    /// The call with repetitions of which it is the rest.
    pub(super) rest_of: Option<Box<Copy>>,
    /// Whether a lost tail took it before.
    pub(super) was_lost: bool,
}

impl Copy {
    /// Sends it. Returns the names of the events that are queued now, too.
    pub(super) fn send(&self, now_us: i64, server: &mut Server) -> (Enqueued, Vec<Name>) {
        let of_bot = |(bot, events): &(Bot, Vec<Event>)| {
            events.iter().map(|event| (*bot, *event)).collect::<Vec<_>>()
        };
        let events: Vec<(Bot, Event)> = self.bots.iter().flat_map(of_bot).collect();
        let Self { window_ms, ref names, ref left_out, .. } = *self;
        let repeats = (window_ms > 0).then_some(Repeats { window_ms, names, left_out });
        let length = |server: &Server, bot| server.list(bot, None).map_or(0, VecDeque::len);
        let before: BTreeMap<Bot, usize> =
            self.bots.iter().map(|&(bot, _)| (bot, length(server, bot))).collect();
        let reply = server.enqueue(now_us, &self.spans, &events, repeats, self.take);
        // The first ones of each bot are taken.
        let mut taken: BTreeMap<Bot, usize> =
            before.iter().map(|(&bot, before)| (bot, length(server, bot) - before)).collect();
        let mut is_taken = |bot: &Bot| {
            let left = taken.get_mut(bot).unwrap();
            let is_taken = *left > 0;
            *left -= usize::from(is_taken);
            is_taken
        };
        let queued = events.iter().zip(names).filter(|((bot, _), _)| is_taken(bot));
        (reply, queued.map(|(_, name)| *name).collect())
    }

    /// The same part of the bus, without the events at these places.
    fn without(&self, repeated: &[usize]) -> Self {
        let mut at = 0..;
        let mut stays = || !repeated.contains(&at.next().unwrap());
        let of_bot = |(bot, events): &(Bot, Vec<Event>)| {
            (*bot, events.iter().copied().filter(|_| stays()).collect())
        };
        let mut bots: Vec<(Bot, Vec<Event>)> = self.bots.iter().map(of_bot).collect();
        bots.retain(|(_, events)| !events.is_empty());
        let mut left_out = self.left_out.clone();
        left_out.extend(repeated.iter().map(|place| self.names[*place]));
        let names = (0..).zip(&self.names).filter(|(place, _)| !repeated.contains(place));
        let names = names.map(|(_, name)| *name).collect();
        let whole = self.rest_of.clone().unwrap_or_else(|| Box::new(self.clone()));
        Self { bots, names, left_out, rest_of: Some(whole), ..self.clone() }
    }
}

/// Which events were copied, found without the names that the server remembers.
#[derive(Debug, Clone, Default)]
pub(super) struct Copied(BTreeMap<Name, At>);

#[derive(Debug, Clone, Copy)]
struct At {
    ms: i64,
    epoch: u32,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Copier {
    /// Zero: repetitions are copied.
    pub(super) window_ms: i64,
    pub(super) copied: Copied,
    /// The number of times that the window changed or the clock was set back. Only within one epoch the
    /// model knows exactly how long an event is remembered.
    epoch: u32,
    /// The first promise that the copy broke, if any.
    pub(super) broken: Option<&'static str>,
    /// The names of events that were read, the latest last.
    names: Vec<Name>,
    last: Option<Copy>,
    rest: Option<Copy>,
    /// The calls that moved the shard since it was saved.
    since_save: VecDeque<Copy>,
    lost: VecDeque<Copy>,
}

impl Copier {
    pub(super) fn new(window_ms: i64) -> Self {
        Self { window_ms, ..Self::default() }
    }

    /// Parts of the streams, with offsets.
    pub(super) fn spans(server: &Server, spans: &[(Stream, Chain)]) -> Vec<Span> {
        let span = |&(stream, chain): &(Stream, Chain)| {
            let at = server.offsets.get(&stream).copied().unwrap_or(0);
            let chain = match chain {
                Chain::Next(offsets) => (at, at + offsets),
                Chain::Again(offsets) => (at.saturating_sub(2), at.max(1) - 1 + offsets),
                Chain::Ahead => (at + 1, at + 2),
            };
            (stream, chain)
        };
        spans.iter().map(span).collect()
    }

    /// Reads fresh events of the bus. Some are repetitions: they have the name of an earlier one.
    pub(super) fn read(
        &mut self,
        spans: Vec<Span>,
        bots: Vec<(Bot, Vec<Event>)>,
        take: Take,
        repeats: &[(Index, usize)],
    ) -> Copy {
        let mut names: Vec<Name> = bots.iter().flat_map(|(_, events)| events).copied().collect();
        for (place, back) in repeats {
            let name = self.names.len().checked_sub(back + 1).map(|at| self.names[at]);
            // The copier itself drops a repetition within one call.
            let name = name.filter(|name| !names.is_empty() && !names.contains(name));
            if let Some(name) = name {
                let place = place.index(names.len());
                names[place] = name;
            }
        }
        self.names.extend(&names);
        let window_ms = self.window_ms;
        let left_out = Vec::new();
        Copy { spans, bots, take, window_ms, names, left_out, rest_of: None, was_lost: false }
    }

    /// What the copier has to do before it goes on.
    pub(super) fn again(&self) -> Option<Again> {
        if self.rest.is_some() {
            return Some(Again::Rest);
        }
        (!self.lost.is_empty()).then_some(Again::Lost)
    }

    pub(super) fn send_again(&mut self, again: Again) -> Option<Copy> {
        match again {
            Again::Unchanged => self.last.clone(),
            Again::Rest => self.rest.take(),
            Again::Lost => {
                let copy = self.lost.pop_front()?;
                Some(Copy { window_ms: self.window_ms, was_lost: true, ..copy })
            }
        }
    }

    pub(super) fn set_window(&mut self, ms: i64) {
        self.window_ms = ms;
        self.epoch += 1;
    }

    pub(super) fn set_back_clock(&mut self) {
        self.epoch += 1;
    }

    pub(super) fn saved(&mut self) {
        self.since_save.clear();
    }

    pub(super) fn lost(&mut self, copied: Copied) {
        self.copied = copied;
        self.lost = std::mem::take(&mut self.since_save);
    }

    /// Notes the reply, and whether it may be so. An event is copied once within the window. An event that
    /// was not copied, or more than two windows ago, is not dropped.
    /// `queued`: the names of the events that are queued now. Those that were dropped may be copied again.
    pub(super) fn receive(
        &mut self,
        now_ms: i64,
        copy: &Copy,
        (reply, queued): (&Enqueued, &[Name]),
    ) {
        if copy.rest_of.is_none() {
            self.last = Some(copy.clone());
        }
        let names = if copy.window_ms > 0 { &copy.names[..] } else { &[] };
        match reply {
            Enqueued::Stored(Queued { dropped, .. }, _) => {
                let names = if *dropped > 0 && copy.window_ms > 0 { queued } else { names };
                if copy.left_out.iter().any(|name| !self.copied.0.contains_key(name)) {
                    self.broken = Some("an event was left out, and its copy is lost");
                }
                for &name in names {
                    if self.passed(now_ms, name).is_some_and(|passed| passed <= copy.window_ms) {
                        self.broken = Some("an event was copied twice within the window");
                    }
                    // A call that was made before the window changed is noted for the old one.
                    let is_of_before = copy.window_ms != self.window_ms;
                    let epoch = self.epoch - u32::from(is_of_before);
                    self.copied.0.insert(name, At { ms: now_ms, epoch });
                }
                self.since_save.push_back(copy.rest_of.as_deref().unwrap_or(copy).clone());
            }
            Enqueued::Repeated(places) => {
                for &place in places {
                    if !self.copied.0.contains_key(&names[place]) {
                        self.broken = Some("an event was dropped that was not copied before");
                    }
                    let passed = self.passed(now_ms, names[place]);
                    if passed.is_some_and(|passed| passed > 2 * copy.window_ms) {
                        self.broken = Some("an event was dropped after two windows");
                    }
                }
                self.rest = Some(copy.without(places));
            }
            Enqueued::Dup | Enqueued::Gap(_) => {}
        }
    }

    /// Whether an event was copied, and no lost tail took that.
    pub(super) fn was_copied(&self, name: Name) -> bool {
        self.copied.0.contains_key(&name)
    }

    /// The time since an event was copied, if it is exact.
    fn passed(&self, now_ms: i64, name: Name) -> Option<i64> {
        let at = self.copied.0.get(&name).filter(|at| at.epoch == self.epoch);
        at.map(|at| now_ms - at.ms)
    }
}
