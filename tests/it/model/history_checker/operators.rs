//! What operators do to leases and dead letters, and what it excuses.

use super::{committed, handled, sent};
use crate::support::history::{Checker, Outcome};

/// The holder learns of a release later than the next one gets the bot.
#[test]
fn only_the_holder_of_a_released_lease_may_begin_under_an_older_fence() {
    let regressions = |released: (u64, u64)| {
        let mut checker = Checker::new();
        checker.released("b", released.0, released.1);
        for record in [
            sent("b", 0),
            handled("b", 0, 2, (20, 21), Outcome::Done),
            handled("b", 0, 1, (22, 23), Outcome::Done),
            committed("b", &[0], 2, (24, 25)),
        ] {
            checker.add(&record);
        }
        checker.report().fence_regressions
    };
    assert_eq!((regressions((18, 30)), regressions((0, 21)), regressions((23, 30))), (0, 1, 1));
}

/// The first event becomes a dead letter, and an operator puts it back behind the second one.
#[test]
fn only_a_dead_letter_that_was_put_back_may_be_handled_after_later_events() {
    let reordered = |put_back: Option<u64>, has_failed: bool| {
        let mut checker = Checker::new();
        if let Some(at) = put_back {
            checker.put_back("b", 0, at);
        }
        let failed = has_failed.then(|| handled("b", 0, 1, (10, 11), Outcome::Failed));
        let others = [
            sent("b", 0),
            sent("b", 1),
            handled("b", 1, 2, (20, 21), Outcome::Done),
            handled("b", 0, 3, (30, 31), Outcome::Done),
        ];
        for record in failed.into_iter().chain(others) {
            checker.add(&record);
        }
        let report = checker.report();
        (report.reordered, report.lost)
    };
    for has_failed in [false, true] {
        assert_eq!(reordered(Some(25), has_failed), (0, 0));
        assert_eq!(reordered(None, has_failed), (1, 0));
        assert_eq!(reordered(Some(32), has_failed), (1, 0), "it was put back later");
    }
}

#[test]
fn a_dead_letter_that_was_put_back_and_is_never_handled_is_lost() {
    let mut checker = Checker::new();
    checker.put_back("b", 0, 5);
    checker.add(&sent("b", 0));
    assert_eq!(checker.report().lost, 1);
}
