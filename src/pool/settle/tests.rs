use super::*;
use crate::telemetry::captured::Lines;
use Fitness::{Expired, Fit, Spent};

fn policy(failed: u32) -> Policy {
    Policy {
        max_attempts: 3,
        backoff: Backoff {
            initial: Duration::from_secs(1),
            max: Duration::from_secs(60),
            jitter: 0.0,
        },
        batch: 3,
        attempts: Attempts { failed, ..Attempts::default() },
        unavailable: Duration::ZERO,
        random: 0.5,
        now: Duration::from_secs(1_000),
    }
}

fn dead(index: usize, reason: &str, attempts: u32) -> Exception {
    Exception { index, fate: Fate::Dead { reason: reason.into(), attempts } }
}

#[test]
fn all_done_removes_all() {
    let end = settle(&[Fit, Fit, Fit], Ok(Outcomes::done()), policy(0));
    assert_eq!((end.n, end.mode, end.tally.done), (3, Mode::Release, 3));
    assert!(end.exceptions.is_empty());
}

#[test]
fn events_that_are_not_fit_leave_with_those_before_the_first_that_stays() {
    let slice = [Expired("old".into()), Fit, Spent("bad".into()), Fit, Spent("bad".into())];
    let end = settle(&slice, Ok(Outcomes::first(1)), policy(0));
    assert_eq!((end.n, end.settled), (3, 1));
    assert_eq!(end.exceptions, [dead(0, "old", 0), dead(2, "bad", 0)]);
    assert_eq!((end.tally.done, end.tally.expired, end.tally.dead), (1, 1, 1));
    let end = settle(&slice, Ok(Outcomes::done()), policy(0));
    assert_eq!((end.n, end.settled, end.exceptions.len()), (5, 2, 3));
}

#[test]
fn a_transient_failure_keeps_the_event_and_parks_the_bot() {
    let end = settle(&[Fit, Fit, Fit], Err(Failure::transient(1, "no")), policy(0));
    assert_eq!((end.n, end.settled), (1, 1));
    assert_eq!(end.mode, Mode::Fail { ms: 1_000, isolate: 1 });
    let again = settle(&[Fit], Err(Failure::transient(0, "no")), policy(1));
    assert_eq!(again.mode, Mode::Fail { ms: 2_000, isolate: 1 });
}

#[test]
fn the_last_attempt_makes_a_dead_letter_and_the_bot_goes_on() {
    let end = settle(&[Fit], Err(Failure::transient(0, "no")), policy(2));
    assert_eq!((end.n, end.mode), (1, Mode::Release));
    assert_eq!(end.exceptions, [dead(0, "no", 3)]);
}

#[test]
fn earlier_attempts_count_for_the_first_event_only() {
    let end = settle(&[Fit, Fit], Err(Failure::transient(1, "no")), policy(2));
    assert_eq!(end.mode, Mode::Fail { ms: 1_000, isolate: 1 });
}

#[test]
fn an_unknown_culprit_is_never_given_up_among_others_but_isolated() {
    let end = settle(&[Fit, Fit, Fit], Err(Failure::unknown("panic".into())), policy(9));
    assert_eq!(end.n, 0);
    assert!(matches!(end.mode, Mode::Fail { isolate: 3, .. }));
    let only = settle(&[Fit], Err(Failure::unknown("panic".into())), policy(0));
    assert_eq!(only.mode, Mode::Fail { ms: 1_000, isolate: 1 }, "it is known");
    let alone = settle(&[Fit], Err(Failure::unknown("panic".into())), policy(9));
    assert_eq!(alone.exceptions, [dead(0, "panic", 10)]);
}

#[test]
fn unavailable_counts_no_attempt_however_often() {
    let mut policy = policy(2);
    policy.unavailable = Duration::from_secs(7);
    let failure = Failure::unavailable(0, "down");
    let end = settle(&[Fit], Err(failure.clone()), policy);
    assert_eq!((end.n, end.mode), (0, Mode::Park { ms: 8_000 }));
    let asked = failure.clone().retry_after(Duration::from_secs(30));
    let end = settle(&[Fit], Err(asked), policy);
    assert_eq!(end.mode, Mode::Park { ms: 30_000 });
    // Not the 8 s that others have waited: the target was reached.
    for (asked_ms, ms) in [(0, 1_000), (2_500, 2_500)] {
        let failure = failure.clone().retry_after(Duration::from_millis(asked_ms));
        assert_eq!(settle(&[Fit], Err(failure), policy).mode, Mode::Park { ms });
    }
}

#[test]
fn a_handler_that_settles_nothing_is_not_asked_again_immediately() {
    let end = settle(&[Fit, Fit], Ok(Outcomes::first(0)), policy(0));
    assert_eq!((end.n, end.mode), (0, Mode::Park { ms: 1_000 }));
}

#[test]
fn a_handler_may_put_the_rest_off_and_nothing_is_counted() {
    let rest = Duration::from_millis(500);
    for settled in [0, 1] {
        let end = settle(&[Fit, Fit], Ok(Outcomes::first(settled).rest_after(rest)), policy(0));
        assert_eq!((end.n, end.mode), (settled, Mode::Park { ms: 500 }));
        assert_eq!((end.tally.done, end.tally.retried), (settled as u64, 0));
    }
    let end = settle(&[Fit], Ok(Outcomes::done().rest_after(rest)), policy(0));
    assert_eq!((end.n, end.mode), (1, Mode::Release));
}

#[test]
fn no_pause_is_longer_than_a_year() {
    let failure = Failure::unavailable(0, "down").retry_after(Duration::MAX);
    let year = 365 * 86_400_000;
    assert_eq!(settle(&[Fit], Err(failure), policy(0)).mode, Mode::Park { ms: year });
    let end = settle(&[Fit], Ok(Outcomes::done().later(0, Duration::MAX)), policy(0));
    assert_eq!(end.exceptions[0].fate, Fate::Later { at_ms: 1_000_000 + year });
}

#[test]
fn outcomes_of_single_events_become_exceptions_once() {
    let outcomes = Outcomes::done()
        .dead(0, "never")
        .later(1, Duration::from_secs(5))
        .later(1, Duration::from_secs(6))
        .dead(7, "not there");
    let end = settle(&[Fit, Fit, Fit], Ok(outcomes), policy(0));
    let later = Exception { index: 1, fate: Fate::Later { at_ms: 1_005_000 } };
    assert_eq!(end.exceptions, [dead(0, "never", 1), later]);
    assert_eq!((end.tally.done, end.tally.dead, end.tally.later), (1, 1, 1));
}

#[test]
fn outcomes_of_the_events_before_a_failed_one_count() {
    let later = Outcome::Later(Duration::from_secs(5));
    let before = vec![(0, Outcome::Dead("never".into())), (1, later.clone()), (3, later)];
    let failure = Failure { before, ..Failure::transient(3, "full") };
    let end = settle(&[Fit, Fit, Fit, Fit], Err(failure), policy(0));
    let later = Exception { index: 1, fate: Fate::Later { at_ms: 1_005_000 } };
    assert_eq!((end.n, end.settled), (3, 3));
    assert_eq!(end.exceptions, [dead(0, "never", 1), later]);
    assert_eq!((end.tally.done, end.tally.later, end.tally.retried), (1, 1, 1));
}

#[test]
fn an_outcome_of_the_first_event_that_is_not_settled_changes_nothing() {
    let end = settle(&[Fit, Fit, Fit], Ok(Outcomes::first(1).dead(1, "no")), policy(0));
    assert_eq!((end.n, end.exceptions, end.tally.done, end.tally.dead), (1, vec![], 1, 0));
    let end = settle(&[Fit, Fit, Fit], Ok(Outcomes::first(2).dead(1, "no")), policy(0));
    assert_eq!((end.n, end.exceptions, end.tally.done), (2, vec![dead(1, "no", 1)], 1));
}

#[test]
fn the_exceptions_name_places_in_the_queue_and_not_among_the_fit_events() {
    let slice = [Expired("old".into()), Fit, Spent("bad".into()), Fit];
    let end = settle(&slice, Ok(Outcomes::done().dead(1, "no")), policy(1));
    assert_eq!(end.exceptions, [dead(3, "no", 2), dead(0, "old", 1), dead(2, "bad", 1)]);
    let end = settle(&slice, Err(Failure::permanent(1, "no")), policy(0));
    assert_eq!((end.n, end.settled), (4, 2));
    assert_eq!(end.exceptions, [dead(3, "no", 1), dead(0, "old", 0), dead(2, "bad", 0)]);
}

#[test]
fn tallies_add_up_each_count() {
    let mut sum = Tally { done: 1, dead: 2, expired: 3, later: 4, retried: 5 };
    sum.add(Tally { done: 10, dead: 20, expired: 30, later: 40, retried: 50 });
    assert_eq!(sum, Tally { done: 11, dead: 22, expired: 33, later: 44, retried: 55 });
}

#[test]
fn retried_and_postponed_events_are_counted_once() {
    let counts = |answer, failed| {
        let tally = settle(&[Fit, Fit], answer, policy(failed)).tally;
        (tally.done, tally.dead, tally.later, tally.retried)
    };
    assert_eq!(counts(Err(Failure::transient(1, "no")), 0), (1, 0, 0, 1));
    assert_eq!(counts(Err(Failure::transient(0, "no")), 2), (0, 1, 0, 0));
    assert_eq!(counts(Err(Failure::permanent(1, "no")), 0), (1, 1, 0, 0));
    assert_eq!(counts(Err(Failure::unavailable(1, "down")), 0), (1, 0, 0, 1));
    assert_eq!(counts(Ok(Outcomes::first(0)), 0), (0, 0, 0, 1));
    assert_eq!(counts(Ok(Outcomes::done().later(0, Duration::ZERO)), 0), (1, 0, 1, 0));
}

#[test]
fn a_failure_beyond_the_slice_is_that_of_its_last_event() {
    let end = settle(&[Fit, Fit], Err(Failure::permanent(9, "no")), policy(0));
    assert_eq!((end.n, end.settled, end.exceptions), (2, 2, vec![dead(1, "no", 1)]));
    let end = settle(&[], Err(Failure::unavailable(0, "down")), policy(0));
    assert_eq!((end.n, end.settled), (0, 0));
}

#[test]
fn an_event_of_a_lane_that_is_set_aside_leaves_the_queue_and_is_no_dead_letter() {
    let lane = Lane::of("ann");
    let slice = [Fit, Fitness::Aside(lane), Fit];
    let end = settle(&slice, Ok(Outcomes::done()), policy(0));
    assert_eq!(end.exceptions, [Exception { index: 1, fate: Fate::Lane(lane) }]);
    assert_eq!((end.n, end.tally.done, end.tally.dead), (3, 2, 0));
    assert_eq!(given_up(&slice, &end.exceptions), None);
}

#[test]
fn a_long_reason_is_cut_at_a_character() {
    let end = settle(&[Fit], Err(Failure::permanent(0, "é".repeat(900))), policy(0));
    let Fate::Dead { reason, .. } = &end.exceptions[0].fate else { panic!("dead") };
    assert!(reason.len() <= REASON_MAX + 3 && reason.ends_with("é…"));
    for length in [REASON_MAX, REASON_MAX + 1] {
        let end = settle(&[Fit], Err(Failure::permanent(0, "x".repeat(length))), policy(0));
        let whole = dead(0, &"x".repeat(REASON_MAX), 1);
        assert_eq!(end.exceptions == [whole], length == REASON_MAX, "{length}");
    }
}

#[test]
fn given_up_events_are_told_once_a_slice_and_expired_ones_are_not() {
    let slice = [Expired("old".into()), Fit, Spent("bad".into()), Fit];
    let later = Exception { index: 1, fate: Fate::Later { at_ms: 1 } };
    let dead = [dead(0, "old", 0), later, dead(2, "bad", 3), dead(3, "no", 1)];
    let told = given_up(&slice, &dead).unwrap();
    assert_eq!((told.index, &*told.reason, told.attempts, told.others), (2, "bad", 3, 1));
    assert_eq!(given_up(&slice, &dead[..2]), None);
}

#[test]
fn the_log_says_which_event_gave_up_after_how_many_attempts_and_why() {
    let (bot, pipeline) = (BotId::parse("shop").unwrap(), PipelineName::parse("p").unwrap());
    let event = Event::builder("order.paid", &bot).id("e-7").build().unwrap();
    let told = given_up(&[Fit], &[dead(0, "HTTP 410", 10)]).unwrap();
    let lines = Lines::default();
    tracing::subscriber::with_default(lines.subscriber(), || {
        told.warn(&pipeline, &bot, Some(&event));
    });
    let text = lines.text();
    for said in [
        "WARN",
        "pipeline=p",
        "bot=shop",
        "event=\"e-7\"",
        "type=\"order.paid\"",
        "attempts=10",
        "reason=\"HTTP 410\"",
        "others=0",
    ] {
        assert!(text.contains(said), "{said} is missing in {text}");
    }
}
