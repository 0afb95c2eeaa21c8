//! Quotas of one bot at their bounds, counts that are wrong, and notes of pauses.

use fairlane::quotas::QuotaExceeded;
use fairlane::redis::scripts::{Pause, Promote, Redrive, Resume, exceeded};

use super::*;

/// The length of the time for which an idempotency key stays.
const WINDOW_MS: u64 = 3_600_000;
/// What Redis needs for an idempotency key besides its name.
const KEY_BYTES: usize = 128;

/// Pushes an event of five bytes, which is due at a time (0: now).
fn push(
    shard: &mut Shard,
    now_us: i64,
    due_ms: u64,
    key: Option<&str>,
    quota: Quota,
) -> Result<Pushed, QuotaExceeded> {
    let keys = &shard.keys.clone();
    let limits = Limits { quota, ..LIMITS };
    let (bot, events) = (&bot("a"), &[b"12345".to_vec()]);
    let idempotency = key.map(|key| (key, WINDOW_MS));
    let due_ms = due_ms.cast_signed();
    let call = Push { keys, limits, bot, events, due_ms, idempotency };
    let command = shard.harness.command(&call);
    let (reply, ..) = shard.harness.run(now_us, command, &redis::pipe()).unwrap();
    exceeded(&reply).map_or_else(|| Ok(Push::reply(reply).unwrap()), Err)
}

fn held(shard: &mut Shard, field: &str) -> Option<u64> {
    let key = shard.keys.held().to_owned();
    shard.harness.plain().hget(key, field).unwrap()
}

#[test]
fn delayed_events_are_accepted_up_to_the_quota_and_again_when_one_was_due() {
    let due_ms = NOW.unsigned_abs() / 1_000 + 500;
    let number = Quota { delayed_events: 2, ..Quota::NONE };
    let bytes = Quota { delayed_bytes: 10, ..Quota::NONE };
    for (quota, name, at) in [(number, "delayed_events", 2), (bytes, "delayed_bytes", 10)] {
        let mut shard = Shard::new();
        let first = push(&mut shard, NOW, due_ms, None, quota).unwrap();
        push(&mut shard, NOW, due_ms + 1, None, quota).unwrap();
        let refused = push(&mut shard, NOW, due_ms, None, quota).unwrap_err();
        assert_eq!(refused, QuotaExceeded { name, held: at, limit: at });
        assert_eq!((held(&mut shard, "la"), held(&mut shard, "La")), (Some(2), Some(10)));
        let (keys, events) = (&shard.keys.clone(), &[(first.sequence.to_string(), bot("a"))]);
        let due = NOW + 500_000;
        assert_eq!(shard.call(due, &Promote { keys, slice_us: SLICE_US, events }).moved, 1);
        push(&mut shard, due, due_ms + 2, None, quota).unwrap();
        push(&mut shard, due, due_ms + 2, None, quota).unwrap_err();
        push(&mut shard, due, 0, None, quota).unwrap();
    }
}

/// Otherwise a tenant could fill Redis with events that its rules delay for a moment.
#[test]
fn an_event_is_delayed_only_while_the_queue_has_room_for_it() {
    let mut shard = Shard::new();
    let due_ms = NOW.unsigned_abs() / 1_000 + 1;
    let one = 11 + 5;
    let quota = Quota { queued_bytes: 2 * one, ..Quota::NONE };
    push(&mut shard, NOW, 0, None, quota).unwrap();
    let delayed = push(&mut shard, NOW, due_ms, Some("k1"), quota).unwrap();
    push(&mut shard, NOW, 0, None, quota).unwrap();
    let full = QuotaExceeded { name: "queued_bytes", held: 2 * one, limit: 2 * one };
    assert_eq!(push(&mut shard, NOW, due_ms, Some("k2"), quota), Err(full));
    assert!(push(&mut shard, NOW, due_ms, Some("k1"), quota).unwrap().duplicate);
    assert_eq!((held(&mut shard, "la"), held(&mut shard, "La")), (Some(1), Some(5)));
    // An accepted event is never refused later, but none is delayed until there is room again.
    let (keys, events) = (&shard.keys.clone(), &[(delayed.sequence.to_string(), bot("a"))]);
    let due = NOW + 1_000;
    assert_eq!(shard.call(due, &Promote { keys, slice_us: SLICE_US, events }).moved, 1);
    let full = QuotaExceeded { held: 3 * one, ..full };
    assert_eq!(push(&mut shard, due, due_ms + 9, None, quota), Err(full));
    let claimed = shard.claim(due);
    let done = Completion { bytes: 2 * one, ..completion(&claimed, 0, 2, Mode::Release) };
    shard.complete(due, 1, &[done]);
    push(&mut shard, due, due_ms + 9, None, quota).unwrap();
}

#[test]
fn a_bot_adds_idempotency_keys_up_to_its_quota_and_then_as_one_becomes_free() {
    let mut shard = Shard::new();
    let one = (KEY_BYTES + shard.keys.idempotency("k1").len()) as u64;
    let quota = Quota { key_bytes: 4 * one, ..Quota::NONE };
    for key in ["k1", "k2", "k3", "k4"] {
        push(&mut shard, NOW, 0, Some(key), quota).unwrap();
    }
    let full = QuotaExceeded { name: "key_bytes", held: 4 * one, limit: 4 * one };
    assert_eq!(push(&mut shard, NOW, 0, Some("k5"), quota), Err(full));
    assert!(push(&mut shard, NOW, 0, Some("k4"), quota).unwrap().duplicate, "a known key is free");
    push(&mut shard, NOW, 0, None, quota).unwrap();
    assert_eq!(shard.events("a").len(), 5, "what was refused is not queued");
    // A quarter of the quota is free again after a quarter of the time.
    let quarter = i64::try_from(WINDOW_MS).unwrap() * 250;
    push(&mut shard, NOW + quarter - 1, 0, Some("k5"), quota).unwrap_err();
    push(&mut shard, NOW + quarter, 0, Some("k5"), quota).unwrap();
    push(&mut shard, NOW + quarter, 0, Some("k6"), quota).unwrap_err();
    let meter = shard.keys.keys_meter(&bot("a"));
    let ttl_ms: u64 = shard.harness.plain().pttl(meter).unwrap();
    assert!((1..=WINDOW_MS).contains(&ttl_ms), "{ttl_ms}: the meter ends by itself");
}

#[test]
fn a_wrong_count_of_an_empty_queue_ends_with_the_next_event() {
    let mut shard = Shard::new();
    let key = shard.keys.held().to_owned();
    let () = shard.harness.plain().hset(key, "qa", 1_000).unwrap();
    push(&mut shard, NOW, 0, None, Quota::NONE).unwrap();
    assert_eq!(held(&mut shard, "qa"), Some(11 + 5));
    let quota = Quota { queued_bytes: 2 * 16, ..Quota::NONE };
    push(&mut shard, NOW, 0, None, quota).unwrap();
    let full = QuotaExceeded { name: "queued_bytes", held: 32, limit: 32 };
    assert_eq!(push(&mut shard, NOW, 0, None, quota), Err(full));
}

#[test]
fn a_pause_keeps_its_note_unless_the_new_one_has_a_reason_and_ends_with_it() {
    let mut shard = Shard::new();
    let (keys, a) = (&shard.keys.clone(), bot("a"));
    for bot in [Some(&a), None] {
        let note = |shard: &mut Shard| -> Option<String> {
            let (key, field) =
                if bot.is_some() { (&*keys.pauses, "a") } else { (keys.meta(), "paused") };
            let note: Option<String> = shard.harness.plain().hget(key, field).unwrap();
            note.map(|note| note.split(' ').nth(1).unwrap_or("none").to_owned())
        };
        let pause = |note, replaces| Pause { keys, bot, note, replaces };
        assert!(shard.call(NOW, &pause("first", false)));
        assert!(!shard.call(NOW, &pause("second", false)));
        assert_eq!(note(&mut shard).as_deref(), Some("first"));
        assert!(!shard.call(NOW, &pause("third", true)));
        assert_eq!(note(&mut shard).as_deref(), Some("third"));
        assert!(shard.call(NOW, &Resume { keys, bot, slice_us: SLICE_US }));
        assert_eq!(note(&mut shard), None);
        assert!(!shard.call(NOW, &Resume { keys, bot, slice_us: SLICE_US }));
        assert!(shard.call(NOW, &pause("", false)));
        assert_ne!(note(&mut shard).as_deref(), Some("third"));
        assert!(shard.call(NOW, &Resume { keys, bot, slice_us: SLICE_US }));
    }
}

/// Otherwise a tenant could fill its queue and its dead letters again and again.
#[test]
fn redriven_events_above_the_quota_count_as_the_letters_that_they_were() {
    for max_queue in [0, 100] {
        redrives_again_and_again(max_queue);
    }
}

fn redrives_again_and_again(max_queue: u64) {
    let mut shard = Shard::new();
    let (keys, bot) = (&shard.keys.clone(), &bot("a"));
    let text = "x".repeat(9);
    let one = 11 + text.len() as u64;
    let quota = Quota { queued_bytes: 100 * one, dead_bytes: 30 * one, ..Quota::NONE };
    let mut last = Offset::default();
    for round in 1..=4 {
        let prev = last;
        last.ms += 1;
        let call = Enqueue {
            keys,
            spans: vec![Span { log: "events", prev, last }],
            repeats: None,
            limits: Limits { quota, max_queue, ..LIMITS },
            quotas: &NO_QUOTAS,
            bots: vec![(bot.clone(), vec![text.as_bytes(); 120])],
            postings: None,
            take: Take::default(),
        };
        shard.call(NOW, &call);
        let letters = shard.letters();
        let expected = [20, 10, 0, 0][round - 1];
        assert_eq!(letters.len(), expected, "round {round} {max_queue}");
        for id in letters {
            let redrive = Redrive { keys, id, bot, slice_us: SLICE_US, renews: false };
            assert!(shard.call(NOW, &redrive));
        }
    }
    assert_eq!(held(&mut shard, "qa"), Some(130 * one));
}
