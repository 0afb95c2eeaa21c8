//! Notifications that wait until their user is online.

use std::collections::BTreeMap;
use std::time::Duration;

use fairlane::notifications::record::{Ending, NewNotification, NotificationId};
use fairlane::notifications::scripts::Release;
use redis::Commands;

use super::super::bot;
use super::{Notes, SECOND, new};

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

/// Otherwise a tenant with many notifications to one user could keep Redis busy.
#[test]
fn those_that_wait_for_the_one_in_flight_to_their_user_take_turns() {
    let mut notes = Notes::new();
    for _ in 0..201 {
        notes.schedule(&new("b", "u", 0));
    }
    let flying = notes.step("b").remove(0);
    let dues = |notes: &mut Notes| -> BTreeMap<String, i64> {
        let key = notes.shard.keys.due.clone();
        let all: Vec<(String, i64)> =
            notes.shard.harness.plain().zrange_withscores(key, 0, -1).unwrap();
        all.into_iter().filter(|(id, _)| *id != flying.id.to_string()).collect()
    };
    let looked_at = |notes: &mut Notes, ms: i64| {
        let before = dues(notes);
        notes.now += ms * 1_000;
        assert_eq!(notes.step("b"), []);
        let after = dues(notes);
        before.iter().filter(|(id, due)| after[*id] != **due).count()
    };
    assert_eq!([999, 1].map(|ms| looked_at(&mut notes, ms)), [0, 1], "the first after a second");
    let looks: Vec<usize> = (0..10).map(|_| looked_at(&mut notes, 1_000)).collect();
    assert!(looks.iter().all(|looks| *looks <= 50) && looks[..4] == [50; 4], "{looks:?}");
    // The later they are, the longer they wait: 2.5 s after 10 s.
    let expected = notes.now / 1_000 + 2_500 + 200 * 20;
    let last = *dues(&mut notes).values().max().unwrap();
    assert!(last <= expected, "{last} {expected}");
    notes.finish(&flying, Ending::Refused("no".into()));
    notes.pass(7);
    let second = notes.step("b").remove(0);
    // It ends in time, and one that was released does not wait for those before it.
    let expires_in = Duration::from_millis(500);
    let brief = notes.schedule(&NewNotification { expires_in, ..new("b", "u", 0) });
    let waits = notes.schedule(&NewNotification { waits: true, ..new("b", "u", 0) });
    assert!(notes.online("u"));
    notes.step("b");
    let due = |notes: &mut Notes, id: NotificationId| dues(notes)[&id.to_string()];
    let now = notes.now / 1_000;
    assert_eq!((due(&mut notes, brief), due(&mut notes, waits)), (now + 500, now + 1_000));
    // A clock that is set back keeps nobody waiting for long.
    notes.finish(&second, Ending::Refused("no".into()));
    notes.now -= 7_200 * SECOND;
    notes.schedule(&new("b", "u", 0));
    notes.step("b");
    let late = notes.schedule(&new("b", "u", 0));
    notes.step("b");
    let now = notes.now / 1_000;
    assert_eq!(due(&mut notes, late), now + 1_000);
}

#[test]
fn after_the_clock_was_set_back_a_user_who_is_online_gets_the_next_one() {
    let mut notes = Notes::new();
    let waits = NewNotification { waits: true, ..new("b", "u", 0) };
    notes.schedule(&waits);
    assert!(notes.online("u"));
    let begun = notes.step("b").remove(0);
    notes.finish(&begun, Ending::Sent);
    notes.now -= 3_600 * SECOND;
    notes.schedule(&waits);
    assert!(notes.online("u"));
    notes.schedule(&waits);
    assert!(!notes.online("u"), "too soon after the last one");
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
