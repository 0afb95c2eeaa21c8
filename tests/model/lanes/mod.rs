//! Every interleaving of the lanes of one bot: two or three consumers and lanes, up to five events, and
//! the accidents that the protocol must survive. It models `lua/complete.lua` and the worker with an ordering key: a
//! lane that fails is set aside, and its events move to a list of its own.
//!
//! The tests explore small systems. `make model` explores large ones.

mod system;
#[cfg(test)]
mod tests;

use std::time::Instant;

use stateright::{Checker, HasDiscoveries, Model, Property};

pub(crate) use self::system::{Bot, Budget, Rule};
use self::system::{COUNT, Place, State, Step, bit};
use super::exhaustive::Explored;

impl Model for Bot {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            queue: Vec::new(),
            lists: Default::default(),
            aside: [false; COUNT],
            place: Place::Rest,
            paused: false,
            fence: 0,
            published: 0,
            consumers: vec![None; self.consumers],
            budget: self.budget,
            handled: 0,
            removed: 0,
            purged: 0,
            broken: None,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        self.progress(state, steps);
        self.accidents(state, steps);
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        self.apply(&mut state, &step);
        for held in state.consumers.iter_mut().flatten() {
            held.superseded |= !matches!(state.place,
                Place::Leased { fence, .. } if fence == held.fence);
        }
        state.consumers.sort_unstable();
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        fn unbroken(state: &State, promise: &str) -> bool {
            state.broken != Some(promise)
        }
        vec![
            Property::sometimes(
                "all events are handled and nothing is left",
                |bot: &Self, state: &State| {
                    state.handled == bot.all()
                        && !state.holds_events()
                        && state.place == Place::Rest
                },
            ),
            Property::sometimes(
                "a lane is set aside while the other goes on",
                |_, state: &State| state.aside == [true, false, false] && state.removed == bit(1),
            ),
            Property::always("first handlings are in order", |_, state| {
                unbroken(state, "a first handling was out of order")
            }),
            Property::always("nothing is handled after its completion", |_, state| {
                unbroken(state, "an event was handled after its completion")
            }),
            Property::always("an event leaves only after its effect", |_, state| {
                unbroken(state, "an event left without its effect")
            }),
            Property::always("a stale fence commits nothing", |_, state| {
                unbroken(state, "a stale fence committed")
            }),
            Property::always("no event is lost", |_, state: &State| {
                (0..state.published).all(|event| {
                    let queued = state.queue.iter().chain(state.lists.iter().flatten());
                    (state.removed | state.purged) & bit(event) != 0
                        || queued.into_iter().any(|other| *other == event)
                })
            }),
            Property::always("a bot with events is in one place", |_, state: &State| {
                let lists = [0, 1, 2].map(|lane| !state.lists[lane].is_empty());
                let rests = !state.holds_events() || state.paused;
                lists == state.aside && (state.place != Place::Rest || rests)
            }),
            Property::always("work comes to rest only when all is done", |bot: &Self, state| {
                let mut steps = Vec::new();
                bot.progress(state, &mut steps);
                !steps.is_empty() || state.handled | state.purged == bot.all()
            }),
        ]
    }
}

pub(crate) const NOTHING_WRONG: Budget = Budget {
    crashes: 0,
    freezes: 0,
    lost_replies: 0,
    failures: 0,
    purges: 0,
    pauses: 0,
    revokes: 0,
};

pub(crate) fn every_promise_holds(bot: Bot, threads: usize) -> Explored {
    let begin = Instant::now();
    let done = bot.checker().threads(threads).spawn_bfs().join();
    for promise in done.discoveries().keys() {
        let is_wanted = promise.starts_with("all events") || promise.starts_with("a lane is");
        let way = || done.discovery(promise).unwrap().into_actions();
        assert!(is_wanted, "not {promise:?} after {:?}", way());
    }
    assert!(done.discovery("all events are handled and nothing is left").is_some());
    if bot.budget.failures > 0 {
        assert!(done.discovery("a lane is set aside while the other goes on").is_some());
    }
    let (states, depth) = (done.unique_state_count(), done.max_depth());
    Explored { states, depth, time: begin.elapsed() }
}

/// Checks that a promise breaks without one rule of the protocol.
pub(crate) fn is_broken(
    promise: &'static str,
    bot: Bot,
    without: Rule,
    threads: usize,
) -> Explored {
    let begin = Instant::now();
    let found = HasDiscoveries::AllOf([promise].into());
    let bot = Bot { without: Some(without), ..bot };
    let done = bot.checker().threads(threads).finish_when(found).spawn_bfs().join();
    assert!(done.discovery(promise).is_some(), "{promise:?} still holds without {without:?}");
    let (states, depth) = (done.unique_state_count(), done.max_depth());
    Explored { states, depth, time: begin.elapsed() }
}
