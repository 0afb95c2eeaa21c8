//! Every interleaving of a small system: some consumers, some bots, and up to four events. Every accident
//! that the protocol must survive happens a limited number of times. The invariants of the protocol hold
//! in every state. Otherwise the checker prints a path to the state that breaks one.
//!
//! The tests explore small systems. `make model` explores large ones.

mod parts;
mod rates;
mod reduction;
mod steps;
mod system;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use stateright::{Checker, HasDiscoveries, Model, Property};

use self::parts::{BOTS, STREAMS, Step, SystemState, charge};
pub(crate) use self::parts::{Budget, NOTHING_WRONG, Rule, System, Turns};
use crate::state_machine::Server;

impl Model for System {
    type State = SystemState;
    type Action = Step;

    fn init_states(&self) -> Vec<SystemState> {
        let mut server = Server::new(1);
        server.recover(0, 0);
        vec![SystemState {
            server,
            saved: None,
            run: 0,
            copied: [0; STREAMS as usize],
            consumers: vec![None; self.consumers],
            budget: self.budget,
            handled: 0,
            purged: 0,
            buckets: [self.full(); BOTS],
            broken: None,
            broken_invariant: None,
        }]
    }

    fn actions(&self, state: &SystemState, steps: &mut Vec<Step>) {
        self.progress(state, steps);
        self.accidents(state, steps);
    }

    fn next_state(&self, last: &SystemState, step: Step) -> Option<SystemState> {
        let mut state = last.clone();
        charge(&mut state, &step);
        self.apply(&mut state, &step);
        for held in state.consumers.iter_mut().flatten() {
            let lease = state.server.own.get(&held.bot);
            held.superseded |=
                held.run != state.run || lease.is_none_or(|lease| lease.fence != held.fence);
        }
        state.broken_invariant = state.server.broken_invariant();
        Some(self.representative(state))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            // Without this, the promises below could hold because nothing happens.
            Property::sometimes(
                "every event is handled and the shard is empty",
                |system: &System, state: &SystemState| {
                    let all = (1 << system.events.len()) - 1;
                    state.handled == all && state.server.depth == 0 && state.server.busy.is_empty()
                },
            ),
            Property::always("the invariants of the keys hold", |_, state: &SystemState| {
                state.broken_invariant.is_none()
            }),
            Property::always("no event is lost", |system: &System, state| {
                system.nothing_is_lost(state)
            }),
            Property::always(
                "work comes to rest only when all is done",
                |system: &System, state| system.rests_only_when_done(state),
            ),
            Property::always("first handlings are in order", |_, state: &SystemState| {
                state.broken != Some("a first handling was out of order")
            }),
            Property::always("a bot has at most one live fence", |_, state: &SystemState| {
                let mut live = state.consumers.iter().flatten().filter(|held| !held.superseded);
                match (live.next(), live.next()) {
                    (Some(one), Some(other)) => one.bot != other.bot,
                    _ => true,
                }
            }),
            Property::always("no bot exceeds its rate", |_, state: &SystemState| {
                state.broken != Some("a bot exceeded its rate")
            }),
            Property::always("fences rise", |_, state: &SystemState| {
                state.broken != Some("a fence did not rise")
            }),
            Property::always("a stale fence commits nothing", |_, state: &SystemState| {
                state.broken != Some("a stale fence committed")
            }),
            Property::always(
                "an event leaves its queue only after its effect",
                |_, state: &SystemState| {
                    state.broken != Some("an event left its queue without its effect")
                },
            ),
        ]
    }
}

/// The size of an exploration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Explored {
    pub(crate) states: usize,
    pub(crate) depth: usize,
    pub(crate) time: Duration,
}

/// Explores all states. Every promise must hold in each of them.
pub(crate) fn every_promise_holds(system: System, threads: usize) -> Explored {
    let begin = Instant::now();
    let done = system.checker().threads(threads).spawn_bfs().join();
    done.assert_properties();
    let (states, depth) = (done.unique_state_count(), done.max_depth());
    Explored { states, depth, time: begin.elapsed() }
}

/// Checks that these promises break without one rule of the protocol. This shows that the checker
/// would find a fault.
pub(crate) fn is_broken(
    promises: &[&'static str],
    system: System,
    without: Rule,
    threads: usize,
) -> Explored {
    let begin = Instant::now();
    let system = System { without: Some(without), ..system };
    let found = HasDiscoveries::AllOf(promises.iter().copied().collect());
    let done = system.checker().threads(threads).finish_when(found).spawn_bfs().join();
    for promise in promises {
        let found = done.discovery(promise).is_some();
        assert!(found, "{promise:?} still holds without {without:?}");
    }
    let (states, depth) = (done.unique_state_count(), done.max_depth());
    Explored { states, depth, time: begin.elapsed() }
}
