//! Delayed events, and the wake-ups that processes get for them.

use fairlane::id::BotId;
use fairlane::redis::scripts::{
    Completion, Due, Exception, Fate, FindDue, Limits, Mode, Pause, Promote, Promoted, Push, Resume,
};
use redis::Commands as _;

use super::{LIMITS, NOW, SLICE_US, Shard, TTL_MS, bot, claim_all, completion};

const NOW_MS: u64 = NOW.unsigned_abs() / 1_000;
const QUIET: i64 = 1 << 52;

/// The first microsecond of a millisecond.
fn at(ms: u64) -> i64 {
    i64::try_from(ms).unwrap() * 1_000
}

#[test]
fn a_delayed_event_comes_back_whole_on_time_and_with_a_new_sequence() {
    let mut shard = Shard::new();
    let (keys, a) = (&shard.keys.clone(), &bot("a"));
    let due_ms = NOW_MS + 1_000;
    // One event is delayed from the start, the other by its handler. Both are stored in the same
    // way.
    let events = [b"pushed".to_vec()];
    let signed = due_ms.cast_signed();
    let push =
        Push { keys, limits: LIMITS, bot: a, events: &events, due_ms: signed, idempotency: None };
    let (pushed, heard) = shard.harness.call(NOW, &push);
    assert_eq!(heard, [format!("due {due_ms}")]);
    let first = shard.push(NOW, "a", &["handled"], LIMITS).sequence;
    let claimed = shard.claim(NOW);
    let exceptions = vec![Exception { index: 0, fate: Fate::Later { at_ms: due_ms + 1 } }];
    let later = Completion { exceptions, ..completion(&claimed, 0, 1, Mode::Release) };
    shard.complete(NOW, 1, &[later]);
    assert_eq!(shard.queue("a"), []);

    let ids = [pushed.sequence, first].map(|id| (id.to_string(), a.clone()));
    let promote = Promote { keys, slice_us: SLICE_US, events: &ids };
    let early = shard.call(at(due_ms) - 1, &promote);
    assert_eq!(early, Promoted { moved: 0, next_ms: Some(due_ms) }, "never early");
    let one = shard.call(at(due_ms), &promote);
    assert_eq!(one, Promoted { moved: 1, next_ms: Some(due_ms + 1) });
    let other = shard.call(at(due_ms + 1), &promote);
    assert_eq!(other, Promoted { moved: 1, next_ms: None });
    assert_eq!(shard.call(at(due_ms + 1), &promote).moved, 0, "once");
    let sequence = due_ms * 1_000;
    let expected = [(sequence, "pushed".into()), (sequence + 1_000, "handled".into())];
    assert_eq!(shard.queue("a"), expected);
    assert_eq!(shard.claim(at(due_ms + 1)).leases.len(), 1);
}

#[test]
fn a_delay_counts_from_the_time_of_the_server_and_only_once_per_key() {
    let mut shard = Shard::new();
    let (keys, a) = (&shard.keys.clone(), &bot("a"));
    let idempotency = Some(("key", 60_000));
    let events = [b"later".to_vec()];
    let push = Push { keys, limits: LIMITS, bot: a, events: &events, due_ms: -1_000, idempotency };
    let (first, heard) = shard.harness.call(NOW, &push);
    assert_eq!(heard, [format!("due {}", NOW_MS + 1_000)]);
    let (again, heard) = shard.harness.call(NOW + 500_000, &push);
    assert_eq!((again.duplicate, again.sequence), (true, first.sequence));
    assert_eq!(heard, [""; 0], "its time stays");
    let events = [(first.sequence.to_string(), a.clone())];
    let promote = Promote { keys, slice_us: SLICE_US, events: &events };
    let early = shard.call(at(NOW_MS + 1_000) - 1, &promote);
    assert_eq!(early, Promoted { moved: 0, next_ms: Some(NOW_MS + 1_000) });
    assert_eq!(shard.call(at(NOW_MS + 1_000), &promote).moved, 1);
}

#[test]
fn due_events_are_found_oldest_first_up_to_a_number_and_a_size() {
    let mut shard = Shard::new();
    let keys = &shard.keys.clone();
    let mut ids = Vec::new();
    for (name, due_ms, bytes) in [("a", 3, 10), ("12:34", 1, 100), ("b", 2, 20), ("a", 9, 1)] {
        let (bot, events) = (&bot(name), [vec![b'x'; bytes]]);
        let due_ms = NOW_MS.cast_signed() + due_ms;
        let push = Push { keys, limits: LIMITS, bot, events: &events, due_ms, idempotency: None };
        ids.push((shard.call(NOW, &push).sequence.to_string(), bot.clone()));
    }
    let [a, long, b, _] = ids.try_into().expect("four events");
    let find = |shard: &mut Shard, ms: u64, most, bytes| {
        shard.call(at(NOW_MS + ms), &FindDue { keys, most, bytes })
    };
    let due = |ms: u64, next_ms: Option<u64>, events: &[&(String, BotId)]| Due {
        now_ms: NOW_MS + ms,
        next_ms: next_ms.map(|ms| NOW_MS + ms),
        events: events.iter().map(|&event| event.clone()).collect(),
    };
    assert_eq!(find(&mut shard, 0, 100, 1_000), due(0, Some(1), &[]));
    assert_eq!(find(&mut shard, 1, 100, 1_000), due(1, Some(2), &[&long]));
    assert_eq!(find(&mut shard, 8, 100, 1_000), due(8, Some(9), &[&long, &b, &a]));
    assert_eq!(find(&mut shard, 8, 2, 1_000), due(8, None, &[&long, &b]), "at most two");
    // An event is stored with its bot, so the first two have 107 and 23 bytes, and the third 13.
    assert_eq!(find(&mut shard, 8, 100, 143), due(8, Some(9), &[&long, &b, &a]));
    assert_eq!(find(&mut shard, 8, 100, 142), due(8, None, &[&long, &b]));
    assert_eq!(find(&mut shard, 8, 100, 1), due(8, None, &[&long]), "at least one");
    let left = due(8, Some(9), &[&b, &a]);
    let _: () = shard.harness.plain().hdel(&keys.later, &long.0).unwrap();
    assert_eq!(find(&mut shard, 8, 100, 1_000), left, "an id without an event");
    for damaged in ["", ":", "x:y", "-1:a", "0:", "3:\u{1}ab"] {
        let _: () = shard.harness.plain().hset(&keys.later, &long.0, damaged).unwrap();
        assert_eq!(find(&mut shard, 8, 100, 1_000), left, "{damaged:?}");
    }
}

#[test]
fn of_the_events_of_a_call_only_those_move_that_are_due_and_each_to_its_bot() {
    let mut shard = Shard::new();
    let keys = &shard.keys.clone();
    let mut ids = Vec::new();
    for (name, due_ms) in [("late", 2), ("b", 1), ("c", 1)] {
        let (bot, events) = (&bot(name), [name.as_bytes().to_vec()]);
        let due_ms = NOW_MS.cast_signed() + due_ms;
        let push = Push { keys, limits: LIMITS, bot, events: &events, due_ms, idempotency: None };
        ids.push((shard.call(NOW, &push).sequence.to_string(), bot.clone()));
    }
    let promote = Promote { keys, slice_us: SLICE_US, events: &ids };
    let next_ms = Some(NOW_MS + 2);
    assert_eq!(shard.call(at(NOW_MS + 1), &promote), Promoted { moved: 2, next_ms });
    assert_eq!(shard.call(at(NOW_MS + 1), &promote), Promoted { moved: 0, next_ms });
    assert_eq!(["late", "b", "c"].map(|bot| shard.events(bot).join(" ")), ["", "b", "c"]);
}

#[test]
fn a_delayed_event_is_not_moved_to_another_bot() {
    let mut shard = Shard::new();
    let keys = &shard.keys.clone();
    let (events, owner) = ([b"e".to_vec()], bot("12:34"));
    let due_ms = NOW_MS.cast_signed();
    let push =
        Push { keys, limits: LIMITS, bot: &owner, events: &events, due_ms, idempotency: None };
    let id = shard.call(NOW, &push).sequence.to_string();
    for other in ["1", "12", "12:3", "12:34:", "2:12"] {
        let events = [(id.clone(), bot(other))];
        let promote = Promote { keys, slice_us: SLICE_US, events: &events };
        assert_eq!(shard.call(NOW, &promote).moved, 0, "{other}");
    }
    let events = [(id, owner)];
    assert_eq!(shard.call(NOW, &Promote { keys, slice_us: SLICE_US, events: &events }).moved, 1);
}

#[test]
fn a_bot_that_lingers_is_claimable_after_it_and_the_deadline_is_announced() {
    let mut shard = Shard::new();
    let limits = Limits { linger_ms: 20, ..LIMITS };
    let (_, heard) = shard.push_heard(NOW, "a", &["1"], limits);
    let deadline_ms = NOW_MS + 20;
    assert_eq!(heard, [format!("deadline {deadline_ms}")]);
    let (_, heard) = shard.push_heard(NOW + 1_000, "a", &["2"], limits);
    assert_eq!(heard, [""; 0], "the first event sets the time");
    let early = shard.claim(at(deadline_ms) - 1);
    assert_eq!((early.leases.len(), early.deadline_ms), (0, Some(deadline_ms)));
    let granted = shard.claim(at(deadline_ms));
    assert_eq!((granted.leases.len(), granted.vanished), (1, 0), "not counted as a lost lease");
    assert_eq!(shard.events("a"), ["1", "2"]);
}

#[test]
fn the_lowest_score_is_announced_only_when_it_falls() {
    let mut shard = Shard::new();
    let ready = |us: i64| format!("ready {}", us - QUIET);
    let none = [""; 0];
    assert_eq!(shard.push_heard(NOW, "b", &["1"], LIMITS).1, [ready(NOW + 1)]);
    assert_eq!(shard.push_heard(NOW + 9, "c", &["1"], LIMITS).1, none, "behind the first");
    assert_eq!(shard.push_heard(NOW + 9, "b", &["2"], LIMITS).1, none, "was ready");
    assert_eq!(shard.push_heard(NOW - 9, "a", &["1"], LIMITS).1, [ready(NOW - 8)], "below");
    let claimed = shard.claim(NOW);
    assert_eq!(claimed.leases.len(), 3);
    assert_eq!(shard.push_heard(NOW, "a", &["2"], LIMITS).1, none, "leased");
    assert_eq!(shard.push_heard(NOW, "d", &["1"], LIMITS).1, [ready(NOW + 1)], "nothing was left");
}

/// Otherwise a refused claimer would ask again immediately, and again.
#[test]
fn a_paused_shard_offers_no_score_until_it_is_resumed() {
    let mut shard = Shard::new();
    let keys = &shard.keys.clone();
    shard.push(NOW, "a", &["1"], LIMITS);
    assert!(shard.call(NOW, &Pause { keys, bot: None, note: "", replaces: false }));
    let refused = shard.claim(NOW);
    assert_eq!((refused.leases.len(), refused.low, refused.ready), (0, None, 1));
    let resume = Resume { keys, bot: None, slice_us: SLICE_US };
    let (changed, heard) = shard.harness.call(NOW, &resume);
    assert!(changed);
    assert_eq!(heard, [format!("ready {}", NOW + 1 - QUIET)]);
    assert_eq!(shard.claim(NOW).leases.len(), 1);
}

/// A bot whose lease ran out after all its events were removed is ready with an empty queue. Its
/// next event finds it there: the script announces no new score and adds the bot no second time,
/// also when events linger.
#[test]
fn a_bot_put_back_with_an_empty_queue_keeps_its_place() {
    for linger_ms in [0, 20] {
        let mut shard = Shard::new();
        let keys = &shard.keys.clone();
        shard.push(NOW, "a", &["1"], LIMITS);
        let claimed = shard.claim(NOW);
        let keep = completion(&claimed, 0, 1, Mode::Keep { ttl_ms: TTL_MS });
        shard.complete(NOW, 1, &[keep]);
        let expired = NOW + at(TTL_MS);
        let reaped = shard.call(expired, &super::Claim { max: 0, ..claim_all(keys) });
        assert_eq!((reaped.vanished, reaped.ready), (1, 1));
        let limits = Limits { linger_ms, ..LIMITS };
        // The clock was set back: a new score would be below the current one.
        let (_, heard) = shard.push_heard(NOW, "a", &["2"], limits);
        assert_eq!(heard, [""; 0]);
        let claimed = shard.claim(expired);
        assert_eq!((claimed.leases.len(), claimed.low, claimed.ready), (1, None, 0));
        assert_eq!(claimed.deadline_ms, Some(NOW_MS + TTL_MS + TTL_MS));
    }
}

/// The bot was served for longer than a slice. However its lease ends and whatever stops it, it
/// returns with the score that it had.
#[test]
fn neither_a_lost_lease_nor_a_pause_nor_a_purge_gains_a_turn() {
    type Interruption = fn(&mut Shard);
    const LONG: u64 = 5 * SLICE_US;
    let interruptions: [(&str, Interruption); 4] = [
        ("paused under a lease that ran out", |shard| {
            let (keys, a) = (&shard.keys.clone(), &bot("a"));
            shard.call(NOW, &Pause { keys, bot: Some(a), note: "", replaces: false });
            shard.call(NOW + at(TTL_MS), &super::Claim { max: 0, ..claim_all(keys) });
            shard.call(NOW, &Resume { keys, bot: Some(a), slice_us: SLICE_US });
        }),
        ("revoked", |shard| {
            let (keys, bot) = (&shard.keys.clone(), &bot("a"));
            let revoke = fairlane::redis::scripts::Revoke { keys, bot, slice_us: SLICE_US };
            assert!(shard.call(NOW, &revoke));
        }),
        ("purged", |shard| {
            let (keys, bot) = (&shard.keys.clone(), &bot("a"));
            let purge = fairlane::redis::scripts::Purge { keys, bot };
            assert_eq!(shard.call(NOW, &purge), 1);
            shard.push(NOW, "a", &["3"], LIMITS);
        }),
        ("recovered from another run", |shard| {
            let keys = &shard.keys.clone();
            let recover = fairlane::redis::scripts::Recover { keys, run: "x", slice_us: SLICE_US };
            assert_eq!(shard.call(NOW, &recover), Some(1));
        }),
    ];
    for (name, interrupt) in interruptions {
        let mut shard = Shard::new();
        shard.push(NOW, "a", &["1", "2"], LIMITS);
        let claimed = shard.claim(NOW);
        let keep = completion(&claimed, 0, 1, Mode::Keep { ttl_ms: TTL_MS });
        shard.complete(NOW, 1, &[Completion { cost: LONG, ..keep }]);
        interrupt(&mut shard);
        let keys = &shard.keys.clone();
        let low = shard.call(NOW, &super::Claim { max: 0, ..claim_all(keys) }).low;
        assert_eq!(low, Some(LONG.cast_signed()), "{name}");
    }
}
