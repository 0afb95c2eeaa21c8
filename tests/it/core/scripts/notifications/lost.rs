//! What Redis lost of notifications.

use std::time::Duration;

use fairlane::id::Sequence;
use fairlane::notifications::record::{Ending, NewNotification};
use fairlane::notifications::scripts::Begin;
use fairlane::quotas::Quota;
use fairlane::redis::scripts::Redrive;
use redis::Commands;

use super::super::bot;
use super::{HOLD, Notes, SLICE_US, id, new};

#[test]
fn a_redis_that_lost_the_start_of_a_send_accepts_its_end() {
    let pause = Duration::from_secs(5);
    let failed = || "500".to_owned();
    for ending in [Ending::Sent, Ending::Retry(pause, failed()), Ending::Postpone(pause, failed())]
    {
        let mut notes = Notes::new();
        let note = notes.schedule(&new("b", "u", 0));
        let key = notes.shard.keys.notification(note);
        let dump = |notes: &mut Notes| -> Vec<u8> {
            redis::cmd("DUMP").arg(&key).query(notes.shard.harness.plain()).unwrap()
        };
        let before = dump(&mut notes);
        notes.promote();
        let begun = notes.handle("b").remove(0);
        let mut restore = redis::cmd("RESTORE");
        restore.arg(&key).arg(0).arg(before).arg("REPLACE");
        restore.exec(notes.shard.harness.plain()).unwrap();
        let () = notes
            .shard
            .harness
            .plain()
            .zrem(notes.shard.keys.due.clone(), note.to_string())
            .unwrap();
        assert_eq!(notes.state(note), "scheduled");
        assert_eq!(notes.finish(&begun, ending.clone()), Some(ending.word().to_owned()));
        assert_eq!(notes.step("b"), [], "{ending:?}: the event that is still queued means nothing");
        notes.pass(6);
        let again = notes.step("b");
        assert_eq!(again.len(), usize::from(ending != Ending::Sent), "{ending:?}");
        assert!(again.iter().all(|again| again.attempts == 1), "{ending:?}: {again:?}");
        assert_eq!(notes.finish(&begun, Ending::Sent), None, "and it is believed once");
    }
}

#[test]
fn a_notification_in_no_structure_falls_due_again_unless_it_changed_since() {
    let mut notes = Notes::new();
    let lost = notes.schedule(&new("b", "u", 60_000));
    let waits = notes.schedule(&NewNotification { waits: true, ..new("b", "w", 0) });
    let sent = notes.schedule(&new("b", "x", 0));
    let begun = notes.step("b").remove(0);
    notes.finish(&begun, Ending::Sent);
    for (id, uid) in [(lost, "u"), (waits, "w"), (sent, "x"), (id(), "u")] {
        assert!(!notes.restore(id, uid, 0), "it is armed, has ended, or is not there");
    }
    let keys = notes.shard.keys.clone();
    for key in [&keys.due, &keys.later, &keys.online(&bot("b"), "w")] {
        let () = notes.shard.harness.plain().del(key).unwrap();
    }
    let record = keys.notification(lost);
    let () = notes.shard.harness.plain().hset(record, "state", "sending").unwrap();
    let held = keys.held().to_owned();
    let () = notes.shard.harness.plain().hdel(held, &["lb", "Lb"]).unwrap();
    assert!(!notes.restore(lost, "u", 1), "an event was acted on since");
    assert!(notes.restore(lost, "u", 0) && notes.restore(waits, "w", 0));
    assert!(!notes.restore(lost, "u", 0) && !notes.restore(sent, "x", begun.token));
    assert_eq!((notes.armed(), notes.state(lost)), (2, "scheduled".to_owned()));
    assert_eq!(notes.step("b"), [], "neither is due");
    notes.pass(61);
    assert_eq!(notes.step("b").iter().map(|begun| begun.id).collect::<Vec<_>>(), [lost]);
    assert!(notes.online("w"), "it still waits");
    assert_eq!(notes.step("b").iter().map(|begun| begun.id).collect::<Vec<_>>(), [waits]);
}

#[test]
fn a_notification_with_one_of_its_two_entries_falls_due_again_too() {
    for has_due in [false, true] {
        let mut notes = Notes::new();
        let note = notes.schedule(&new("b", "u", 60_000));
        let keys = notes.shard.keys.clone();
        let redis = notes.shard.harness.plain();
        if has_due {
            let () = redis.hdel(&keys.later, note.to_string()).unwrap();
            let () = redis.hdel(keys.held(), &["lb", "Lb"]).unwrap();
        } else {
            let () = redis.zrem(&keys.due, note.to_string()).unwrap();
        }
        assert!(notes.restore(note, "u", 0));
        assert_eq!(notes.armed(), 1);
    }
}

#[test]
fn without_its_record_a_dead_notification_is_not_redriven_and_its_event_is_told() {
    let mut notes = Notes::new();
    let note = notes.schedule(&new("b", "", 0));
    let begun = notes.step("b").remove(0);
    notes.finish(&begun, Ending::Dead("410".into()));
    let keys = &notes.shard.keys.clone();
    let () = notes.shard.harness.plain().del(keys.notification(note)).unwrap();
    let (letters, bot) = (notes.shard.letters(), &bot("b"));
    let redrive = Redrive { keys, id: letters[0], bot, slice_us: SLICE_US, renews: false };
    assert!(!notes.call(&redrive), "nothing would be sent");
    assert_eq!(notes.shard.letters(), letters);
    let (now, throttle) = (notes.time(), &notes.throttle.clone());
    let (quota, events) = (Quota::NONE, &[(note, "", Sequence::new(1))]);
    let again = Begin { keys, now, bot, hold: HOLD, throttle, dead_max: 100, quota, events };
    let judged = notes.call(&again);
    assert_eq!((judged.gone, judged.begun), (1, Vec::new()));
}
