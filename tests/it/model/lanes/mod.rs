//! Every interleaving of the lanes of one bot: two consumers, two lanes, three events, and the accidents
//! that the protocol must survive. It models `lua/complete.lua` and the worker with an ordering key: a
//! lane that fails is set aside, and its events move to a list of its own.

mod system;

use stateright::{Checker, HasDiscoveries, Model, Property};
use system::{ALL, Bot, Budget, Place, Rule, State, Step, bit};

impl Model for Bot {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            queue: Vec::new(),
            lists: [Vec::new(), Vec::new()],
            aside: [false; 2],
            place: Place::Rest,
            paused: false,
            fence: 0,
            published: 0,
            consumers: [None, None],
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
                |_, state: &State| {
                    state.handled == ALL && !state.holds_events() && state.place == Place::Rest
                },
            ),
            Property::sometimes(
                "a lane is set aside while the other goes on",
                |_, state: &State| state.aside == [true, false] && state.removed == bit(1),
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
                let lists = [0, 1].map(|lane| !state.lists[lane].is_empty());
                let rests = !state.holds_events() || state.paused;
                lists == state.aside && (state.place != Place::Rest || rests)
            }),
            Property::always("work comes to rest only when all is done", |bot: &Self, state| {
                let mut steps = Vec::new();
                bot.progress(state, &mut steps);
                !steps.is_empty() || state.handled | state.purged == ALL
            }),
        ]
    }
}

const NOTHING_WRONG: Budget = Budget {
    crashes: 0,
    freezes: 0,
    lost_replies: 0,
    failures: 0,
    purges: 0,
    pauses: 0,
    revokes: 0,
};

fn every_promise_holds(budget: Budget) {
    let done = Bot { budget, without: None }.checker().threads(2).spawn_bfs().join();
    println!("{budget:?}: {} states, {} steps deep", done.unique_state_count(), done.max_depth());
    for promise in done.discoveries().keys() {
        let is_wanted = promise.starts_with("all events") || promise.starts_with("a lane is");
        let way = || done.discovery(promise).unwrap().into_actions();
        assert!(is_wanted, "not {promise:?} after {:?}", way());
    }
    assert!(done.discovery("all events are handled and nothing is left").is_some());
    if budget.failures > 0 {
        assert!(done.discovery("a lane is set aside while the other goes on").is_some());
    }
}

fn is_broken(promise: &'static str, budget: Budget, without: Rule) {
    let found = HasDiscoveries::AllOf([promise].into());
    let bot = Bot { budget, without: Some(without) };
    let done = bot.checker().threads(2).finish_when(found).spawn_bfs().join();
    let way = done.discovery(promise).unwrap_or_else(|| panic!("{promise:?} still holds"));
    println!("not {promise:?} after {:?}", way.into_actions());
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
        every_promise_holds(budget);
    }
}

#[test]
fn without_a_rule_a_promise_breaks() {
    let failing = Budget { failures: 1, ..NOTHING_WRONG };
    is_broken("first handlings are in order", failing, Rule::Follow);
    is_broken("a bot with events is in one place", failing, Rule::Forget);
    let frozen = Budget { freezes: 1, ..failing };
    is_broken("a stale fence commits nothing", frozen, Rule::Fence);
}
