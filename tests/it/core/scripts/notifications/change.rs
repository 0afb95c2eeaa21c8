//! Notifications that are cancelled, moved or replaced by their key.

use std::time::Duration;

use fairlane::notifications::record::{Duplicates, Ending, NewNotification, State, When};
use fairlane::notifications::scripts::{Amended, Amendment, Scheduled};
use redis::Commands;

use super::super::bot;
use super::{DAY, Notes, SECOND, id, new};

#[test]
fn one_is_cancelled_or_moved_until_it_is_being_sent_also_when_its_event_is_queued() {
    let mut notes = Notes::new();
    let (cancelled, moved) = (notes.schedule(&new("b", "u", 0)), notes.schedule(&new("b", "v", 0)));
    notes.promote();
    assert_eq!(notes.amend(cancelled, "u", Amendment::Cancel), Amended::Done);
    let hour = When::After(Duration::from_secs(3_600));
    // The state of one that had to wait for its user's threshold.
    let record = notes.shard.keys.notification(moved);
    let () = notes.shard.harness.plain().hset(record, "ready", 5).unwrap();
    assert_eq!(notes.amend(moved, "v", Amendment::Move(hour)), Amended::Done);
    assert_eq!(notes.handle("b"), []);
    notes.forget_queue("b");
    assert_eq!(notes.amend(cancelled, "u", Amendment::Cancel), Amended::Not(State::Cancelled));
    notes.pass(3_601);
    let begun = notes.step("b").remove(0);
    assert_eq!(begun.id, moved);
    assert_eq!(begun.expires_ms - begun.due_ms, 86_400_000, "it expires later too");
    assert_eq!(begun.ready_ms, begun.due_ms, "and counts from its new time");
    assert_eq!(notes.amend(moved, "v", Amendment::Cancel), Amended::Not(State::Sending));
    assert_eq!(notes.amend(id(), "v", Amendment::Cancel), Amended::Gone);

    let waits = notes.schedule(&NewNotification { waits: true, ..new("b", "w", 0) });
    let armed = |notes: &mut Notes| {
        let due = notes.shard.keys.due.clone();
        notes.shard.harness.plain().zscore::<_, _, u64>(due, waits.to_string()).unwrap()
    };
    let before = armed(&mut notes);
    assert_eq!(notes.amend(waits, "w", Amendment::Move(hour)), Amended::Done);
    assert_eq!(armed(&mut notes), before + 3_600_001, "it expires later");
    assert!(!notes.online("w"), "it is not due any more");
    assert_eq!(notes.amend(waits, "w", Amendment::Cancel), Amended::Done);
    notes.pass(3_601);
    assert!(!notes.online("w"));
}

#[test]
fn after_the_clock_was_set_back_a_key_is_free_as_soon_as_its_notification_has_ended() {
    let mut notes = Notes::new();
    let keyed =
        NewNotification { key: Some(("k".to_owned(), Duplicates::Ignore)), ..new("b", "u", 0) };
    let first = notes.schedule(&keyed);
    let begun = notes.step("b").remove(0);
    notes.finish(&begun, Ending::Sent);
    notes.now -= 3_600 * SECOND;
    let again = notes.schedule_over(&keyed, Some((first, "u"))).1;
    assert!(matches!(again, Scheduled::Ok { .. }), "{again:?}");
}

#[test]
fn a_key_is_taken_once_and_kept_or_replaced() {
    let mut notes = Notes::new();
    let keyed = |duplicates| NewNotification {
        key: Some(("k".to_owned(), duplicates)),
        ..new("b", "u", 60_000)
    };
    let first = notes.schedule(&keyed(Duplicates::Ignore));
    let due = notes.schedule_over(&keyed(Duplicates::Ignore), Some((first, "u"))).1;
    assert!(matches!(due, Scheduled::Duplicate(_)), "{due:?}");
    let unknown = notes.schedule_over(&keyed(Duplicates::Ignore), None).1;
    assert_eq!(unknown, Scheduled::Again, "somebody took it in between");
    let (second, scheduled) = notes.schedule_over(&keyed(Duplicates::Replace), Some((first, "u")));
    assert!(matches!(scheduled, Scheduled::Ok { .. }), "{scheduled:?}");
    assert_eq!((notes.state(first), notes.armed()), ("cancelled".to_owned(), 1));
    notes.pass(61);
    let begun = notes.step("b").remove(0);
    assert_eq!(begun.id, second);
    notes.finish(&begun, Ending::Sent);
    let repeated = notes.schedule_over(&keyed(Duplicates::Ignore), Some((second, "u"))).1;
    assert!(matches!(repeated, Scheduled::Duplicate(_)), "its answer may be lost: {repeated:?}");
    notes.pass(240);
    let (third, scheduled) = notes.schedule_over(&keyed(Duplicates::Ignore), Some((second, "u")));
    assert!(
        matches!(scheduled, Scheduled::Ok { .. }),
        "what has ended keeps no key: {scheduled:?}"
    );
    assert_eq!(notes.state(third), "scheduled");
}

#[test]
fn one_that_waits_and_is_replaced_by_one_for_another_user_waits_no_more() {
    let mut notes = Notes::new();
    let waits = |uid: &str| NewNotification {
        waits: true,
        key: Some(("k".to_owned(), Duplicates::Replace)),
        ..new("b", uid, 0)
    };
    let first = notes.schedule(&waits("old"));
    let (_, scheduled) = notes.schedule_over(&waits("new"), Some((first, "old")));
    assert!(matches!(scheduled, Scheduled::Ok { .. }), "{scheduled:?}");
    assert_eq!(notes.state(first), "cancelled");
    assert_eq!((notes.online("old"), notes.online("new")), (false, true));
}

#[test]
fn one_that_is_moved_while_its_event_is_queued_is_sent_once() {
    let mut notes = Notes::new();
    let moved = notes.schedule(&new("b", "u", 0));
    notes.promote();
    for _ in 0..3 {
        let now = Amendment::Move(When::After(Duration::ZERO));
        assert_eq!(notes.amend(moved, "u", now), Amended::Done);
        assert_eq!(notes.promote(), 0, "a paused bot must not fill Redis");
    }
    let begun = notes.step("b");
    assert_eq!(begun.iter().map(|begun| begun.id).collect::<Vec<_>>(), [moved]);
    notes.finish(&begun[0], Ending::Dead("410".into()));
    assert_eq!(notes.step("b"), []);
    assert_eq!(notes.state(moved), "dead");
}

#[test]
fn a_key_is_kept_as_long_as_its_notification_however_far_it_is_moved() {
    let mut notes = Notes::new();
    let keyed = NewNotification {
        key: Some(("k".to_owned(), Duplicates::Ignore)),
        ..new("b", "u", 60_000)
    };
    let moved = notes.schedule(&keyed);
    let far = Amendment::Move(When::After(100 * DAY));
    assert_eq!(notes.amend(moved, "u", far), Amended::Done);
    let key = notes.shard.keys.notification_key(&bot("b"), "k");
    let left: i64 = notes.shard.harness.plain().ttl(key).unwrap();
    assert!((107 * 86_400 + 1..=108 * 86_400).contains(&left), "{left}");
}

#[test]
fn the_key_of_a_cancelled_notification_ends_with_its_record_unless_another_one_has_it() {
    let mut notes = Notes::new();
    let keyed =
        NewNotification { key: Some(("k".to_owned(), Duplicates::Replace)), ..new("b", "u", 0) };
    let key = notes.shard.keys.notification_key(&bot("b"), "k");
    let days = |notes: &mut Notes| {
        let left: i64 = notes.shard.harness.plain().ttl(&key).unwrap();
        (left + 3_600) / 86_400
    };
    let first = notes.schedule(&keyed);
    let begun = notes.step("b").remove(0);
    let (second, _) = notes.schedule_over(&keyed, Some((first, "u")));
    let failed = Ending::Retry(Duration::from_secs(5), "500".into());
    assert_eq!(notes.finish(&begun, failed), Some("retry".into()));
    for change in [Amendment::Move(When::After(100 * DAY)), Amendment::Cancel] {
        assert_eq!(notes.amend(first, "u", change), Amended::Done);
        assert_eq!(days(&mut notes), 8, "the one that has the key expires in a day");
    }
    assert_eq!(notes.amend(second, "u", Amendment::Cancel), Amended::Done);
    assert_eq!(days(&mut notes), 7);
}

#[test]
fn one_that_is_being_sent_is_not_replaced_and_ends_by_its_answer() {
    let mut notes = Notes::new();
    let keyed =
        NewNotification { key: Some(("k".to_owned(), Duplicates::Replace)), ..new("b", "u", 0) };
    let first = notes.schedule(&keyed);
    let begun = notes.step("b").remove(0);
    let (second, scheduled) = notes.schedule_over(&keyed, Some((first, "u")));
    assert!(matches!(scheduled, Scheduled::Ok { cancelled: None, .. }), "{scheduled:?}");
    assert_eq!(notes.state(first), "sending");
    assert_eq!(notes.finish(&begun, Ending::Sent), Some("sent".into()));
    notes.pass(1);
    assert_eq!(notes.step("b"), [], "the user got one");
    assert_eq!(notes.state(second), "throttled");
}
