//! Lanes that are set aside.

mod random;

use fairlane::id::{Lane, Offset};
use fairlane::quotas::{NO_QUOTAS, Quota};
use fairlane::redis::aside::{Aside, Tried, Waiting};
use fairlane::redis::scripts::{
    AsideChange, Audit, Audited, Claimed, Completed, Completion, Enqueue, Enqueued, Exception,
    Fate, Limits, Mode, Pause, Purge, ReadLane, ReadSlice, Reconcile, Reconciled, Redrive, Resume,
    Revoke, Span, Take, Verdict,
};
use redis::Commands;

use super::{LIMITS, NOW, SLICE_US, Shard, TTL_MS, bot, completion, dead};

/// The pause of a lane, ms.
const PAUSE: u64 = 500;
const LATER: i64 = NOW + 500_000;
const HEAD: u64 = 11;

fn lane() -> Lane {
    Lane::of("ann")
}

fn now_ms() -> u64 {
    NOW.unsigned_abs() / 1_000
}

fn waiting(lane: Lane) -> Aside {
    let mut aside = Aside::of(7);
    aside.set(Waiting { lane, due_ms: now_ms() + PAUSE, attempts: 1, alone: 0 });
    aside
}

fn moved(index: usize) -> Exception {
    Exception { index, fate: Fate::Lane(lane()) }
}

/// The end of a lease whose slice has `n` events of two bytes each, of which some move to the lane.
fn set_aside(claimed: &Claimed, n: usize, places: &[usize]) -> Completion {
    let exceptions = places.iter().map(|place| moved(*place)).collect();
    let aside = Some(AsideChange { aside: waiting(lane()), next_ms: PAUSE, list: None });
    let bytes = n as u64 * (HEAD + 2);
    Completion { bytes, exceptions, aside, ..completion(claimed, 0, n, Mode::Release) }
}

/// The end of a lease for the list of the lane.
fn of_list(claimed: &Claimed, n: usize, aside: Aside, next_ms: u64) -> Completion {
    let aside = Some(AsideChange { aside, next_ms, list: Some(lane()) });
    let bytes = n as u64 * (HEAD + 2);
    Completion { bytes, aside, ..completion(claimed, 0, n, Mode::Release) }
}

impl Shard {
    fn complete_one(&mut self, now_us: i64, item: &Completion) -> Verdict {
        let done: Completed = self.complete(now_us, 100, std::slice::from_ref(item));
        done.verdicts[0]
    }

    /// The events of the lane.
    fn lane(&mut self) -> Vec<String> {
        let keys = &self.keys.clone();
        let slice = ReadSlice { keys, bot: &bot("b"), limit: 99, bytes: 9_999 };
        let records = self.call(NOW, &ReadLane { lane: lane(), slice });
        records.iter().map(|record| String::from_utf8(record[11..].to_vec()).unwrap()).collect()
    }

    fn meta(&mut self, field: &str) -> i64 {
        let key = self.keys.meta().to_owned();
        self.harness.plain().hget::<_, _, Option<i64>>(key, field).unwrap().unwrap_or(0)
    }

    fn held(&mut self, kind: &str) -> u64 {
        let key = self.keys.held().to_owned();
        self.harness
            .plain()
            .hget::<_, _, Option<u64>>(key, format!("{kind}b"))
            .unwrap()
            .unwrap_or(0)
    }

    /// All keys of the shard that an idle bot must not hold.
    fn keys_left(&mut self) -> Vec<String> {
        let mut keys: Vec<String> = self.harness.plain().keys("*").unwrap();
        keys.retain(|key| !key.ends_with(":meta") && !key.starts_with("test:"));
        keys.retain(|key| !key.ends_with(":fin"));
        keys
    }

    /// A bot with four events, two of which were set aside: the queue is empty.
    fn with_lane() -> Self {
        let mut shard = Self::new();
        shard.push(NOW, "b", &["a1", "b1", "a2", "b2"], LIMITS);
        let claimed = shard.claim(NOW);
        assert_eq!(claimed.leases[0].aside, Aside::default());
        assert_eq!(shard.complete_one(NOW, &set_aside(&claimed, 4, &[0, 2])), Verdict::Ok);
        shard
    }
}

#[test]
fn a_lane_that_fails_leaves_the_queue_counts_as_queued_and_comes_back_when_it_is_due() {
    let mut shard = Shard::with_lane();
    assert_eq!((shard.events("b"), shard.lane()), (Vec::new(), vec!["a1".into(), "a2".into()]));
    assert_eq!((shard.meta("depth"), shard.meta("lanes"), shard.held("a")), (2, 1, 2));
    assert_eq!(shard.held("q"), 2 * (HEAD + 2), "its bytes count");
    assert!(shard.claim(LATER - 1_000).leases.is_empty(), "not before the lane is due");
    let claimed = shard.claim(LATER);
    assert_eq!(claimed.leases[0].aside, waiting(lane()));
    // The first of two is done, and the lane is due again at once.
    let part = of_list(&claimed, 1, waiting(lane()), 0);
    assert_eq!(shard.complete_one(LATER, &part), Verdict::Ok);
    assert_eq!((shard.lane(), shard.meta("depth")), (vec!["a2".to_owned()], 1));
    let claimed = shard.claim(LATER);
    let rest = of_list(&claimed, 1, Aside::default(), 0);
    assert_eq!(shard.complete_one(LATER, &rest), Verdict::Ok);
    assert_eq!((shard.meta("depth"), shard.meta("lanes")), (0, 0));
    assert_eq!(shard.keys_left(), Vec::<String>::new());
    assert!(shard.claim(LATER + 60_000_000).leases.is_empty());
}

/// A version that did not count may have left a wrong number.
#[test]
fn a_wrong_count_ends_with_the_last_lane() {
    let mut shard = Shard::with_lane();
    let key = shard.keys.held().to_owned();
    let () = shard.harness.plain().hset_multiple(key, &[("qb", 999), ("ab", 99)]).unwrap();
    let claimed = shard.claim(LATER);
    let all = of_list(&claimed, 2, Aside::default(), 0);
    assert_eq!(shard.complete_one(LATER, &all), Verdict::Ok);
    assert_eq!(shard.keys_left(), Vec::<String>::new());
}

#[test]
fn events_of_a_lane_that_is_set_aside_follow_it_while_others_go_on() {
    let mut shard = Shard::with_lane();
    shard.push(NOW, "b", &["b3", "a3"], LIMITS);
    let claimed = shard.claim(NOW);
    assert_eq!(claimed.leases[0].aside, waiting(lane()), "the arrival ended the park");
    assert_eq!(shard.complete_one(NOW, &set_aside(&claimed, 2, &[1])), Verdict::Ok);
    assert_eq!(shard.lane(), ["a1", "a2", "a3"]);
    assert_eq!((shard.meta("depth"), shard.meta("lanes"), shard.held("a")), (3, 1, 3));
    assert!(shard.claim(NOW).leases.is_empty());
}

#[test]
fn a_copy_to_a_bot_that_waits_for_a_lane_leases_it_at_once() {
    let mut shard = Shard::with_lane();
    let keys = &shard.keys.clone();
    let call = Enqueue {
        keys,
        spans: vec![Span {
            log: "events",
            prev: Offset::default(),
            last: Offset { ms: 1, seq: 1 },
        }],
        repeats: None,
        limits: LIMITS,
        quotas: &NO_QUOTAS,
        bots: vec![(bot("b"), vec![&b"b3"[..]])],
        postings: None,
        take: Take { max: 1, ttl_ms: TTL_MS, seen: 0 },
    };
    let Enqueued::Ok(_, taken) = shard.call(NOW, &call) else { panic!("it is copied") };
    assert_eq!(taken.leases[0].aside, waiting(lane()));
}

#[test]
fn a_repeated_completion_moves_nothing_twice_and_a_stale_one_moves_nothing() {
    let mut shard = Shard::new();
    shard.push(NOW, "b", &["a1", "b1", "b2"], LIMITS);
    let claimed = shard.claim(NOW);
    let keep = Completion { mode: Mode::Keep { ttl_ms: TTL_MS }, ..set_aside(&claimed, 2, &[0]) };
    for _ in 0..2 {
        assert_eq!(shard.complete_one(NOW, &keep), Verdict::Ok);
        assert_eq!((shard.lane(), shard.meta("depth")), (vec!["a1".to_owned()], 2));
        assert_eq!((shard.meta("lanes"), shard.held("a")), (1, 1));
    }
    shard.call(NOW, &Revoke { keys: &shard.keys.clone(), bot: &bot("b"), slice_us: SLICE_US });
    assert_eq!(shard.complete_one(NOW, &set_aside(&claimed, 1, &[0])), Verdict::Stale);
    assert_eq!((shard.lane().len(), shard.events("b").len()), (1, 1));
}

#[test]
fn a_holder_that_vanishes_leaves_the_lanes_and_attempts_of_a_lane_are_not_those_of_the_queue() {
    let mut shard = Shard::with_lane();
    let claimed = shard.claim(LATER);
    let renewal = Completion {
        mode: Mode::Keep { ttl_ms: 1 },
        aside: Some(AsideChange { aside: waiting(lane()), next_ms: 0, list: None }),
        ..completion(&claimed, 0, 0, Mode::Release)
    };
    assert_eq!(shard.complete_one(LATER, &renewal), Verdict::Ok);
    let claimed = shard.claim(LATER + 2_000);
    let grant = &claimed.leases[0];
    assert_eq!((grant.attempts.lost, grant.attempts.isolate), (1, 8));
    assert_eq!(grant.aside, waiting(lane()));
    let again = of_list(&claimed, 0, waiting(lane()), 0);
    assert_eq!(shard.complete_one(LATER + 2_000, &again), Verdict::Ok);
    let grant = &shard.claim(LATER + 2_000).leases[0];
    assert_eq!((grant.attempts.lost, grant.attempts.isolate), (0, 8), "they are in the text now");
}

#[test]
fn purge_deletes_the_lanes_too() {
    let mut shard = Shard::with_lane();
    shard.push(NOW, "b", &["b3"], LIMITS);
    let keys = &shard.keys.clone();
    assert_eq!(shard.call(NOW, &Purge { keys, bot: &bot("b") }), 3);
    assert_eq!((shard.meta("depth"), shard.meta("lanes")), (0, 0));
    assert_eq!(shard.keys_left(), Vec::<String>::new());
}

#[test]
fn a_bot_with_lanes_alone_is_paused_resumed_and_released_as_one_with_events() {
    let mut shard = Shard::with_lane();
    let (keys, bot) = (&shard.keys.clone(), &bot("b"));
    assert!(shard.call(NOW, &Pause { keys, bot: Some(bot), note: "", replaces: false }));
    assert!(shard.claim(LATER).leases.is_empty());
    assert!(shard.call(LATER, &Resume { keys, bot: Some(bot), slice_us: SLICE_US }));
    let claimed = shard.claim(LATER);
    assert_eq!(claimed.leases.len(), 1);
    let again = of_list(&claimed, 0, waiting(lane()), PAUSE);
    assert_eq!(shard.complete_one(LATER, &again), Verdict::Ok);
    assert!(shard.claim(LATER).leases.is_empty());
    assert!(shard.call(LATER, &Revoke { keys, bot, slice_us: SLICE_US }));
    let claimed = shard.claim(LATER);
    let due = claimed.leases[0].aside.first().unwrap();
    assert_eq!((due.due_ms, due.attempts), (0, 1), "release ends the wait");
}

#[test]
fn the_audit_finds_nothing_wrong_with_lanes() {
    let mut shard = Shard::with_lane();
    let (keys, bots) = (&shard.keys.clone(), &[bot("b")][..]);
    let reconcile = Reconcile { keys, bots, bots_max: 9 };
    let right = Reconciled::Set { before: "2".into(), depth: 2 };
    assert_eq!(shard.call(NOW, &reconcile), right);
    for bots in [bots, &[]] {
        let audit = Audit { keys, bots, entries_max: 99, bytes_max: 99 };
        assert_eq!(shard.call(NOW, &audit), Audited::Set(0));
    }
    assert_eq!((shard.held("q"), shard.held("a")), (2 * (HEAD + 2), 2));
}

#[test]
fn lanes_count_for_the_length_and_the_quota_of_a_queue() {
    let mut shard = Shard::with_lane();
    let limits = Limits { max_queue: 3, overflow_dead: false, ..LIMITS };
    assert_eq!(shard.push(NOW, "b", &["b3", "b4"], limits).queued.dropped, 1);
    let quota = Quota { queued_bytes: 3 * (HEAD + 2), ..Quota::NONE };
    let limits = Limits { quota, ..LIMITS };
    let keys = &shard.keys.clone();
    let events = [b"b5".to_vec()];
    let push = fairlane::redis::scripts::Push {
        keys,
        limits,
        bot: &bot("b"),
        events: &events,
        due_ms: 0,
        idempotency: None,
    };
    let command = shard.harness.command(&push);
    let (reply, ..) = shard.harness.run(NOW, command, &redis::pipe()).unwrap();
    let refused = fairlane::redis::scripts::exceeded(&reply).expect("the quota is full");
    assert_eq!(refused.held, 3 * (HEAD + 2));
}

#[test]
fn a_redriven_event_ends_the_wait_for_a_lane_and_keeps_the_lanes() {
    let mut shard = Shard::new();
    shard.push(NOW, "b", &["a1", "b1"], LIMITS);
    let claimed = shard.claim(NOW);
    let mut end = set_aside(&claimed, 2, &[0]);
    end.exceptions.push(dead(1));
    assert_eq!(shard.complete_one(NOW, &end), Verdict::Ok);
    assert!(shard.claim(NOW).leases.is_empty());
    let (keys, id, bot, slice_us) = (&shard.keys.clone(), shard.letters()[0], &bot("b"), SLICE_US);
    assert!(shard.call(NOW, &Redrive { keys, id, bot, slice_us, renews: false }));
    let claimed = shard.claim(NOW);
    assert_eq!(claimed.leases[0].aside, waiting(lane()).trying(Some(Tried::Queue)));
    assert_eq!((shard.events("b"), shard.meta("depth")), (vec!["b1".to_owned()], 2));
}

#[test]
fn a_redriven_event_comes_before_later_ones_of_its_lane_that_is_set_aside() {
    let mut shard = Shard::new();
    shard.push(NOW, "b", &["a1", "a2", "b1", "a3"], LIMITS);
    let claimed = shard.claim(NOW);
    let first =
        Completion { exceptions: vec![dead(0), moved(1), moved(3)], ..set_aside(&claimed, 4, &[]) };
    assert_eq!(shard.complete_one(NOW, &first), Verdict::Ok);
    assert_eq!(shard.lane(), ["a2", "a3"]);
    shard.push(NOW, "b", &["a4"], LIMITS);
    let (keys, id, bot, slice_us) = (&shard.keys.clone(), shard.letters()[0], &bot("b"), SLICE_US);
    assert!(shard.call(NOW, &Redrive { keys, id, bot, slice_us, renews: false }));
    assert_eq!(shard.events("b"), ["a1", "a4"]);
    let claimed = shard.claim(NOW);
    assert_eq!(claimed.leases[0].aside.tried, Some(Tried::Queue), "it goes first");
    assert_eq!(shard.complete_one(NOW, &set_aside(&claimed, 2, &[0, 1])), Verdict::Ok);
    assert_eq!(shard.lane(), ["a1", "a2", "a3", "a4"]);
    assert_eq!((shard.meta("depth"), shard.held("a")), (4, 4));
}

#[test]
fn a_redriven_event_does_not_end_the_pause_of_a_bot_that_has_events() {
    let mut shard = Shard::new();
    shard.push(NOW, "b", &["a1", "b1", "b2"], LIMITS);
    let claimed = shard.claim(NOW);
    let mut end = Completion { mode: Mode::Park { ms: 700 }, ..set_aside(&claimed, 2, &[0]) };
    end.exceptions.push(dead(1));
    assert_eq!(shard.complete_one(NOW, &end), Verdict::Ok);
    let (keys, id, bot, slice_us) = (&shard.keys.clone(), shard.letters()[0], &bot("b"), SLICE_US);
    assert!(shard.call(NOW, &Redrive { keys, id, bot, slice_us, renews: false }));
    assert!(shard.claim(NOW).leases.is_empty(), "its handler is unavailable");
    assert_eq!(shard.events("b"), ["b1", "b2"]);
    assert_eq!(shard.claim(NOW + 701_000).leases.len(), 1);
}
