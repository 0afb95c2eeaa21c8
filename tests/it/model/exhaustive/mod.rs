//! Every interleaving of a small system: two consumers, two bots, and up to four events. Every
//! accident that the protocol must survive happens a limited number of times. The invariants of the
//! protocol hold in every state. Otherwise the checker prints the shortest path to the state that
//! breaks one.

mod system;

use stateright::{Checker, HasDiscoveries, Model, Property};
use system::{Budget, Rule, Step, System, SystemState, charge};

use crate::model::state_machine::{Bot, Server, Stream};

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
            copied: [0; 2],
            consumers: [None, None],
            budget: self.budget,
            handled: 0,
            purged: 0,
            broken: None,
        }]
    }

    fn actions(&self, state: &SystemState, steps: &mut Vec<Step>) {
        self.progress(state, steps);
        System::accidents(state, steps);
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
        // The consumers are alike, so half the states suffice.
        state.consumers.sort_unstable();
        Some(state)
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
                state.server.broken_invariant().is_none()
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

/// One event of each of two bots, for budgets that would take too long with more events.
const ONE_EACH: &[(Stream, Bot)] = &[(0, 0), (0, 1)];
/// Two events of one bot and one of another, on one stream.
const ONE_STREAM: &[(Stream, Bot)] = &[(0, 0), (0, 0), (0, 1)];
/// One bot gets events from two streams. After a lost tail, its queue may be refilled in another
/// order.
const TWO_STREAMS: &[(Stream, Bot)] = &[(0, 0), (0, 0), (1, 0), (0, 1)];

const NOTHING_WRONG: Budget = Budget {
    crashes: 0,
    freezes: 0,
    lost_replies: 0,
    lost_tails: 0,
    failures: 0,
    purges: 0,
    pauses: 0,
};

/// Explores all states. Every promise must hold in each of them.
fn every_promise_holds(events: &'static [(Stream, Bot)], budget: Budget) {
    let system = System { events, budget, without: None };
    let done = system.checker().threads(2).spawn_bfs().join();
    println!("{budget:?}: {} states, {} steps deep", done.unique_state_count(), done.max_depth());
    done.assert_properties();
}

/// Checks that these promises break without one rule of the protocol. This shows that the checker
/// would find a fault.
fn is_broken(
    promises: &[&'static str],
    events: &'static [(Stream, Bot)],
    budget: Budget,
    without: Rule,
) {
    let system = System { events, budget, without: Some(without) };
    let found = HasDiscoveries::AllOf(promises.iter().copied().collect());
    let done = system.checker().threads(2).finish_when(found).spawn_bfs().join();
    for promise in promises {
        let way = done.discovery(promise).unwrap_or_else(|| panic!("{promise:?} still holds"));
        println!("not {promise:?} after {:?}", way.into_actions());
    }
}

#[test]
fn every_interleaving_of_crashes_freezes_and_lost_replies_keeps_the_promises() {
    let budget = Budget { crashes: 1, freezes: 2, lost_replies: 1, ..NOTHING_WRONG };
    every_promise_holds(ONE_STREAM, budget);
}

#[test]
fn every_interleaving_of_a_lost_tail_with_another_accident_keeps_the_promises() {
    let tail = Budget { lost_tails: 1, ..NOTHING_WRONG };
    for budget in [
        Budget { freezes: 1, ..tail },
        Budget { crashes: 1, ..tail },
        Budget { lost_replies: 1, ..tail },
        Budget { purges: 1, ..tail },
    ] {
        every_promise_holds(ONE_STREAM, budget);
    }
    every_promise_holds(TWO_STREAMS, tail);
    every_promise_holds(ONE_EACH, Budget { lost_tails: 2, lost_replies: 1, ..tail });
}

#[test]
fn every_interleaving_of_failures_pauses_and_purges_keeps_the_promises() {
    let budget = Budget { failures: 2, freezes: 1, pauses: 1, purges: 1, ..NOTHING_WRONG };
    every_promise_holds(ONE_STREAM, budget);
}

#[test]
fn without_recover_a_lost_tail_makes_a_holder_remove_events_it_never_handled() {
    let budget = Budget { lost_tails: 1, ..NOTHING_WRONG };
    let promises = ["an event leaves its queue only after its effect", "no event is lost"];
    is_broken(&promises, TWO_STREAMS, budget, Rule::Recover);
}

#[test]
fn without_the_fence_check_a_frozen_holder_commits() {
    let budget = Budget { freezes: 1, ..NOTHING_WRONG };
    is_broken(&["a stale fence commits nothing"], ONE_STREAM, budget, Rule::FenceCheck);
}

/// A fence is a time, so that it rises even if a lost tail took the last one. A clock that was set
/// back breaks this, so the name of a lease includes the run.
#[test]
fn without_the_run_in_its_name_a_lease_of_before_a_lost_tail_commits() {
    let budget = Budget { lost_tails: 1, crashes: 1, ..NOTHING_WRONG };
    let promises = ["a stale fence commits nothing", "no event is lost"];
    is_broken(&promises, ONE_STREAM, budget, Rule::RunCheck);
}
