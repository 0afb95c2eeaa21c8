//! Notifications that wait until their user is online.

use std::time::Duration;

use fairlane::notifications::record::{Ending, NewNotification};
use fairlane::notifications::scripts::Release;
use redis::Commands;

use super::super::bot;
use super::{Notes, new};

#[test]
fn a_release_wakes_the_schedulers_and_its_user_is_known_for_the_threshold_at_least() {
    let mut notes = Notes::new();
    let waiting = NewNotification { waits: true, ..new("b", "u", 0) };
    notes.schedule(&waiting);
    let (keys, now, bot) = (&notes.shard.keys.clone(), notes.time(), &bot("b"));
    let threshold = Duration::from_secs(10);
    let release = Release { keys, now, bot, uid: "u", threshold };
    let (released, heard) = notes.shard.harness.call(notes.now, &release);
    assert_eq!((released, heard), (true, vec![format!("due {}", now.as_millis())]));
    let lives = |notes: &mut Notes| -> i64 {
        notes.shard.harness.plain().pttl(keys.user(bot, "u")).unwrap()
    };
    assert!((1..=10_000).contains(&lives(&mut notes)));
    // After a send it is known for longer.
    let begun = notes.step("b").remove(0);
    notes.finish(&begun, Ending::Sent);
    notes.pass(11);
    notes.schedule(&waiting);
    assert!(notes.online("u"));
    assert!(lives(&mut notes) > 10_000);
}

#[test]
fn one_that_waits_for_its_user_is_released_when_due_one_a_call_oldest_first() {
    let mut notes = Notes::new();
    let waits = |delay_ms| NewNotification { waits: true, ..new("b", "u", delay_ms) };
    let (late, early) = (notes.schedule(&waits(5_000)), notes.schedule(&waits(1_000)));
    assert!(!notes.online("u"), "neither is due");
    notes.pass(60);
    assert_eq!(notes.step("b"), []);
    assert!(!notes.online("v"));
    assert!(notes.online("u"));
    assert!(!notes.online("u"), "too soon after the last one");
    let begun = notes.step("b");
    assert_eq!(begun.iter().map(|begun| begun.id).collect::<Vec<_>>(), [early]);
    notes.finish(&begun[0], Ending::Sent);
    notes.pass(11);
    assert!(notes.online("u"), "the half hour is not asked");
    assert_eq!(notes.step("b").remove(0).id, late);
    assert!(!notes.online("u"));
}

#[test]
fn one_that_waits_in_vain_expires() {
    let mut notes = Notes::new();
    let expires_in = Duration::from_secs(60);
    let note = notes.schedule(&NewNotification { waits: true, expires_in, ..new("b", "u", 0) });
    notes.pass(61);
    assert_eq!(notes.step("b"), []);
    assert_eq!((notes.state(note), notes.armed()), ("expired".to_owned(), 0));
    assert!(!notes.online("u"));
}

#[test]
fn a_wait_for_a_user_or_a_threshold_or_a_delay_told_before_is_not_late() {
    let mut notes = Notes::new();
    notes.throttle.defers = true;
    let waits = notes.schedule(&NewNotification { waits: true, ..new("b", "w", 0) });
    notes.pass(60);
    assert!(notes.online("w"));
    let begun = notes.step("b").remove(0);
    assert_eq!((begun.id, begun.counts_late), (waits, false));
    notes.finish(&begun, Ending::Sent);
    for uid in ["u", "u"] {
        notes.schedule(&new("b", uid, 0));
    }
    let first = notes.step("b").remove(0);
    assert_eq!((first.ready_ms, first.counts_late), (first.due_ms, true));
    notes.late = Some(Duration::from_millis(3));
    notes.finish(&first, Ending::Sent);
    notes.pass(1);
    assert_eq!(notes.step("b"), []);
    notes.pass(1_800);
    let deferred = notes.step("b").remove(0);
    assert_eq!(deferred.ready_ms, deferred.due_ms + 1_800_000);
    // The repeated send of a killed process counts as late, because it never reported its own
    // delay.
    notes.pass(21);
    assert_eq!(notes.step("b").len(), 0);
    notes.pass(6);
    let again = notes.step("b");
    let again = again.iter().find(|begun| begun.id == deferred.id).unwrap();
    assert_eq!((again.attempts, again.counts_late), (2, true));
    notes.finish(again, Ending::Retry(Duration::from_secs(5), "500".into()));
    notes.pass(6);
    let third = notes.step("b");
    let third = third.iter().find(|begun| begun.id == deferred.id).unwrap();
    assert!(!third.counts_late);
    assert_eq!(notes.stats()["none|late3"], 2);
}
