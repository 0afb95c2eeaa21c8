//! Random operations on the model and on the real scripts, side by side. After every step, the
//! replies, the publications and all data of the shard agree, and the invariants of the protocol
//! hold. The scripts are the product's, on a clock that the test sets. In half of the cases, lanes fail
//! and are set aside.
//!
//! A higher `PROPTEST_CASES` than 256 makes it run longer.

mod copier;
mod coverage;
mod decode;
mod operation;
mod published;
mod real;
mod reference;

use std::sync::atomic::Ordering;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use proptest_state_machine::ReferenceStateMachine;

use self::coverage::Coverage;
use self::real::{Outcome, Real};
use self::reference::Reference;
use crate::support::redis::{Options, RedisServer};
use crate::support::script_harness::ScriptHarness;

/// Maximum number of operations of one case.
const STEPS: usize = 100;

#[test]
fn the_scripts_behave_like_the_model() {
    let server = RedisServer::start(Options::default());
    let real = std::cell::RefCell::new(Real::new(ScriptHarness::new(&server)));
    let coverage = std::cell::RefCell::new(Coverage::default());
    let mut config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    config.cases *= 4; // Runs for ten seconds.
    let mut runner = TestRunner::new(config);
    let strategy = Reference::sequential_strategy(1..=STEPS);
    let result = runner.run(&strategy, |(mut state, operations, seen)| {
        let mut real = real.borrow_mut();
        real.reset();
        for operation in operations {
            // Operations that were not reached are left out when a failure is shrunk.
            if let Some(seen) = &seen {
                seen.fetch_add(1, Ordering::SeqCst);
            }
            let before = state.clone();
            state = Reference::apply(state, &operation);
            let step = state.step.as_ref().expect("a step was made");
            coverage.borrow_mut().note(&before, &state, step);
            let Outcome { answer, published, server } = real.step(step);
            let context = || format!("{operation:?} as {:?}", step.action);
            prop_assert_eq!(&answer, &step.answer, "the reply to {}", context());
            prop_assert_eq!(&server, &state.server, "the state after {}", context());
            prop_assert_eq!(&published, &step.published, "published by {}", context());
            prop_assert_eq!(server.broken_invariant(), None, "after {}", context());
            prop_assert_eq!(state.copier.broken, None, "by {}", context());
        }
        Ok(())
    });
    if let Err(failure) = result {
        panic!("{failure}");
    }
    coverage.borrow().check();
}
