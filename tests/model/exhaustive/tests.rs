//! Small systems, in which bots take turns.

use std::collections::HashSet;

use super::*;
use crate::state_machine::{Bot, Stream};

/// One event of each of two bots, for budgets that would take too long with more events.
const ONE_EACH: &[(Stream, Bot)] = &[(0, 0), (0, 1)];
/// Bots that are all alike.
const ONE_OF_THREE: &[(Stream, Bot)] = &[(0, 0), (0, 1), (0, 2)];
/// Two events of one bot and one of another, on one stream.
const ONE_STREAM: &[(Stream, Bot)] = &[(0, 0), (0, 0), (0, 1)];
/// One bot gets events from two streams. After a lost tail, its queue may be refilled in another
/// order.
const TWO_STREAMS: &[(Stream, Bot)] = &[(0, 0), (0, 0), (1, 0), (0, 1)];

fn with(events: &'static [(Stream, Bot)], budget: Budget) -> System {
    System::new(2, events, budget, Turns::Kept)
}

fn holds(system: System) {
    let Explored { states, depth, time } = every_promise_holds(system, 2);
    println!("{system:?}: {states} states, {depth} steps deep, {time:.1?}");
}

#[test]
fn every_interleaving_of_crashes_freezes_and_lost_replies_keeps_the_promises() {
    let budget = Budget { crashes: 1, freezes: 2, lost_replies: 1, ..NOTHING_WRONG };
    holds(with(ONE_STREAM, budget));
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
        holds(with(ONE_STREAM, budget));
    }
    holds(with(TWO_STREAMS, tail));
    holds(with(ONE_EACH, Budget { lost_tails: 2, lost_replies: 1, ..tail }));
}

#[test]
fn every_interleaving_of_failures_pauses_and_purges_keeps_the_promises() {
    let budget = Budget { failures: 2, freezes: 1, pauses: 1, purges: 1, ..NOTHING_WRONG };
    holds(with(ONE_STREAM, budget));
}

#[test]
fn without_recover_a_lost_tail_makes_a_holder_remove_events_it_never_handled() {
    let budget = Budget { lost_tails: 1, ..NOTHING_WRONG };
    let promises = ["an event leaves its queue only after its effect", "no event is lost"];
    is_broken(&promises, with(TWO_STREAMS, budget), Rule::Recover, 2);
}

#[test]
fn without_the_fence_check_a_frozen_holder_commits() {
    let budget = Budget { freezes: 1, ..NOTHING_WRONG };
    let promises = ["a stale fence commits nothing"];
    is_broken(&promises, with(ONE_STREAM, budget), Rule::FenceCheck, 2);
}

/// A fence is a time, so that it rises even if a lost tail took the last one. A clock that was set
/// back breaks this, so the name of a lease includes the run.
#[test]
fn without_the_run_in_its_name_a_lease_of_before_a_lost_tail_commits() {
    let budget = Budget { lost_tails: 1, crashes: 1, ..NOTHING_WRONG };
    let promises = ["a stale fence commits nothing", "no event is lost"];
    is_broken(&promises, with(ONE_STREAM, budget), Rule::RunCheck, 2);
}

#[test]
fn every_interleaving_of_the_rates_of_bots_with_accidents_keeps_the_promises() {
    let turns = Turns::AnyReduced;
    for budget in [
        Budget { freezes: 1, ..NOTHING_WRONG },
        Budget { crashes: 1, ..NOTHING_WRONG },
        Budget { lost_replies: 1, ..NOTHING_WRONG },
    ] {
        holds(System { burst: Some(1), turns, ..with(ONE_STREAM, budget) });
    }
}

#[test]
fn without_one_bucket_or_with_two_calls_for_its_tokens_a_bot_exceeds_its_rate() {
    let budget = Budget { freezes: 1, ..NOTHING_WRONG };
    let system = System { burst: Some(1), ..with(ONE_STREAM, budget) };
    for rule in [Rule::OneBucket, Rule::TakeAtOnce] {
        is_broken(&["no bot exceeds its rate"], system, rule, 2);
    }
}

/// Without turns, fewer states are explored. They must not be too few.
#[test]
fn without_turns_a_rule_that_is_left_out_still_breaks_its_promise() {
    let tail = Budget { lost_tails: 1, ..NOTHING_WRONG };
    let frozen = Budget { freezes: 1, ..NOTHING_WRONG };
    let any = |events, budget| System { turns: Turns::AnyReduced, ..with(events, budget) };
    let promises = ["an event leaves its queue only after its effect", "no event is lost"];
    is_broken(&promises, any(TWO_STREAMS, tail), Rule::Recover, 2);
    let promises = ["a stale fence commits nothing"];
    is_broken(&promises, any(ONE_STREAM, frozen), Rule::FenceCheck, 2);
    let crashed = Budget { crashes: 1, ..tail };
    is_broken(&promises, any(ONE_STREAM, crashed), Rule::RunCheck, 2);
}

/// All states of a system.
fn all_states(system: &System) -> HashSet<SystemState> {
    let mut states: HashSet<SystemState> = system.init_states().into_iter().collect();
    let mut pending: Vec<SystemState> = states.iter().cloned().collect();
    while let Some(state) = pending.pop() {
        let mut steps = Vec::new();
        system.actions(&state, &mut steps);
        for next in steps.into_iter().filter_map(|step| system.next_state(&state, step)) {
            if states.insert(next.clone()) {
                pending.push(next);
            }
        }
    }
    states
}

/// If the reduction joined states that are not alike, or left some out, the sets would differ. Bots with a
/// rate are not among them: they rest and are leased again, so fences grow without end.
#[test]
fn the_reduction_has_a_state_for_each_of_the_whole_system_and_no_other() {
    for (consumers, events, budget) in [
        (3, ONE_OF_THREE, NOTHING_WRONG),
        (2, ONE_OF_THREE, Budget { lost_replies: 1, ..NOTHING_WRONG }),
        (2, ONE_EACH, Budget { freezes: 1, purges: 1, ..NOTHING_WRONG }),
        (2, ONE_EACH, Budget { lost_tails: 1, ..NOTHING_WRONG }),
        (2, ONE_STREAM, Budget { failures: 1, crashes: 1, ..NOTHING_WRONG }),
    ] {
        let whole = System::new(consumers, events, budget, Turns::Any);
        let reduced = System { turns: Turns::AnyReduced, ..whole };
        let all = all_states(&whole);
        let count = all.len();
        let alike: HashSet<SystemState> =
            all.into_iter().map(|state| reduced.representative_of_whole(state)).collect();
        let explored = all_states(&reduced);
        println!("{whole:?}: {count} states, reduced {}", explored.len());
        assert!(alike == explored, "{whole:?}: {} and {}", alike.len(), explored.len());
    }
}
