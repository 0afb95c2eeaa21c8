//! Two consumers, two lanes, three events.

use super::*;

fn with(budget: Budget) -> Bot {
    Bot { consumers: 2, events: 3, budget, without: None }
}

#[test]
fn every_interleaving_of_failing_lanes_and_accidents_keeps_the_promises() {
    let failing = Budget { failures: 2, ..NOTHING_WRONG };
    for budget in [
        NOTHING_WRONG,
        Budget { failures: 3, ..failing },
        Budget { crashes: 1, freezes: 1, ..failing },
        Budget { lost_replies: 2, freezes: 1, ..failing },
        Budget { purges: 1, freezes: 1, pauses: 1, ..failing },
        Budget { revokes: 2, lost_replies: 1, ..failing },
    ] {
        let Explored { states, depth, time } = every_promise_holds(with(budget), 2);
        println!("{budget:?}: {states} states, {depth} steps deep, {time:.1?}");
    }
}

#[test]
fn without_a_rule_a_promise_breaks() {
    let failing = Budget { failures: 1, ..NOTHING_WRONG };
    is_broken("first handlings are in order", with(failing), Rule::Follow, 2);
    is_broken("a bot with events is in one place", with(failing), Rule::Forget, 2);
    let frozen = Budget { freezes: 1, ..failing };
    is_broken("a stale fence commits nothing", with(frozen), Rule::Fence, 2);
}
