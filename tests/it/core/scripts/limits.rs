//! `permit`, `budget` and `set`: limits of bots and of pipelines.

use fairlane::id::Lane;
use fairlane::rate::Change::{Keep, Reset, To};
use fairlane::rate::{BotRate, Bucket, Change, Rate, Weight};
use fairlane::redis::aside::{Aside, Waiting};
use fairlane::redis::scripts::{AsideChange, Budget, Budgeted, Permit, Permitted, Set, Verdict};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::*;

const SECOND: i64 = 1_000_000;

fn bucket(rate: &str, burst: u32) -> Bucket {
    Bucket::new(rate.parse::<Rate>().unwrap(), Some(burst))
}

fn permit(shard: &mut Shard, now_us: i64, of: &str, want: usize, bucket: Bucket) -> Permitted {
    let (keys, bot) = (shard.keys.clone(), bot(of));
    shard.call(now_us, &Permit { keys: &keys, bot: &bot, want, held: 0, bucket })
}

fn slow(shard: &mut Shard) -> Vec<String> {
    let key = shard.keys.slow.clone();
    shard.harness.plain().zrange(key, 0, -1).unwrap()
}

#[test]
fn a_permit_grants_what_the_bucket_has_whatever_the_rate() {
    let (mut shard, mut random) = (Shard::new(), StdRng::seed_from_u64(7));
    for (name, rate, burst) in [("a", "3/s", 1), ("b", "7/m", 4), ("c", "999.999/s", 50)] {
        let bucket = bucket(rate, burst);
        let (mut now, mut full) = (NOW, 0);
        for _ in 0..300 {
            let step = bucket.interval_us * random.random_range(0.0..3.0);
            #[expect(clippy::cast_possible_truncation, reason = "small")]
            let step = step as i64;
            now += step;
            let want = random.random_range(0..6_u32);
            let (granted, after, wait_us) = bucket.take(want, now.unsigned_abs(), full);
            full = after;
            let permitted = permit(&mut shard, now, name, want as usize, bucket);
            assert_eq!(permitted.granted, granted as usize, "{rate} at {now}");
            assert_eq!(permitted.wait_ms, wait_us.div_ceil(1_000), "{rate} at {now}");
        }
    }
}

#[test]
fn a_bot_is_slow_while_its_events_wait_for_tokens_and_the_keys_end_by_themselves() {
    let mut shard = Shard::new();
    let bucket = bucket("1/s", 1);
    shard.push(NOW, "a", &["1", "2"], LIMITS);
    shard.push(NOW, "b", &["1"], LIMITS);
    assert_eq!(permit(&mut shard, NOW, "a", 1, bucket), Permitted { granted: 1, wait_ms: 1_000 });
    assert_eq!(permit(&mut shard, NOW, "b", 1, bucket).granted, 1);
    assert_eq!(slow(&mut shard), ["a"], "nothing of b waits");
    assert_eq!(permit(&mut shard, NOW + 1, "a", 1, bucket).granted, 0);
    let (rate, slow_key) = (shard.keys.rate.clone(), shard.keys.slow.clone());
    for key in [&rate, &slow_key] {
        let ttl: i64 = shard.harness.plain().pttl(key).unwrap();
        assert!((1..=11_001).contains(&ttl), "{key}: {ttl}");
    }
    shard.push(NOW, "e", &["1", "2", "3"], LIMITS);
    let full = self::bucket("1/s", 5);
    assert_eq!(permit(&mut shard, NOW, "e", 1, full), Permitted { granted: 1, wait_ms: 0 });
    assert_eq!(slow(&mut shard), ["a"], "the events of e wait for a worker");
    let queue = shard.keys.queue(&bot("a"));
    let () = shard.harness.plain().del(queue).unwrap();
    permit(&mut shard, NOW + 2, "a", 1, bucket);
    assert_eq!(slow(&mut shard), [""; 0], "its events are gone");
    // The key stays until the last bucket is full.
    permit(&mut shard, NOW + 3, "d", 1, self::bucket("1/h", 1));
    let ttl: i64 = shard.harness.plain().pttl(&rate).unwrap();
    assert!(ttl > 3_600_000, "{ttl}");
    let () = shard.harness.plain().zrem(&rate, "d").unwrap();
    // A full bucket is forgotten after a while.
    assert_eq!(permit(&mut shard, NOW + 20 * SECOND, "c", 1, bucket).granted, 1);
    let kept: Vec<String> = shard.harness.plain().zrange(&rate, 0, -1).unwrap();
    assert_eq!((kept, slow(&mut shard)), (vec!["c".to_owned()], vec![]));
}

#[test]
fn tokens_that_are_used_later_count_as_taken_then_and_show_nothing() {
    let (mut shard, bucket) = (Shard::new(), bucket("10/s", 10));
    shard.push(NOW, "a", &["1", "2"], LIMITS);
    assert_eq!(permit(&mut shard, NOW, "a", 10, bucket), Permitted { granted: 10, wait_ms: 100 });
    assert_eq!(slow(&mut shard), [""; 0]);
    let (keys, bot) = (shard.keys.clone(), bot("a"));
    // The bucket is full again, and 10 tokens are still held; then 9 of them, and then 4.
    for (after, held, wait_ms) in [(1, 10, 100), (1, 9, 100), (2, 9, 0), (2, 4, 0)] {
        let held = Permit { keys: &keys, bot: &bot, want: 0, held, bucket };
        let permitted = shard.call(NOW + after * SECOND, &held);
        assert_eq!(permitted, Permitted { granted: 0, wait_ms }, "{held:?}");
        assert_eq!(slow(&mut shard), [""; 0], "{held:?}");
    }
    assert_eq!(permit(&mut shard, NOW + 2 * SECOND, "a", 10, bucket).granted, 1);
}

fn set(
    shard: &mut Shard,
    of: &str,
    max: usize,
    (weight, rate, burst): (Option<&str>, Change<&str>, Change<u32>),
) -> bool {
    let (keys, bot) = (shard.keys.clone(), bot(of));
    let call = Set {
        keys: &keys,
        bot: &bot,
        slice_us: SLICE_US,
        max,
        weight: weight.map(|weight| weight.parse::<Weight>().unwrap()),
        rate: rate.map(|rate| rate.parse::<BotRate>().unwrap()),
        burst,
    };
    shard.call(NOW, &call)
}

#[test]
fn settings_of_a_bot_change_one_by_one_and_the_number_of_such_bots_is_bounded() {
    let mut shard = Shard::new();
    let stored = |shard: &mut Shard| -> Option<String> {
        let key = shard.keys.weight.clone();
        shard.harness.plain().hget(key, "a").unwrap()
    };
    for (change, expected) in [
        ((Some("3"), Keep, Keep), Some("3")),
        ((None, To("10/s"), Keep), Some("3|10/s|")),
        ((None, Keep, To(5)), Some("3|10/s|5")),
        ((Some("0.5"), To("unlimited"), Keep), Some("0.5|unlimited|5")),
        ((Some("1"), Keep, Reset), Some("|unlimited|")),
        ((None, Reset, Keep), None),
    ] {
        assert!(set(&mut shard, "a", 1, change));
        assert_eq!(stored(&mut shard).as_deref(), expected);
    }
    assert!(set(&mut shard, "b", 1, (Some("2"), Keep, Keep)));
    assert!(!set(&mut shard, "a", 1, (Some("2"), Keep, Keep)), "there is room for one");
    assert_eq!(stored(&mut shard), None);
    assert!(set(&mut shard, "b", 1, (Some("4"), Keep, Keep)), "the one may change");
    assert!(set(&mut shard, "b", 1, (Some("1"), Keep, Keep)));
    assert!(set(&mut shard, "a", 1, (Some("2"), Keep, Keep)));
}

#[test]
fn a_raised_rate_ends_the_wait_of_a_parked_bot_and_a_claim_tells_it() {
    let mut shard = Shard::new();
    shard.push(NOW, "a", &["1"], LIMITS);
    let claimed = shard.claim(NOW);
    let parked = completion(&claimed, 0, 0, Mode::Park { ms: 3_600_000 });
    shard.complete(NOW, 100, &[parked]);
    assert!(shard.claim(NOW).leases.is_empty());
    assert!(set(&mut shard, "a", 9, (Some("0.25"), To("100/s"), To(7))));
    let own = shard.claim(NOW).leases[0].own;
    assert_eq!(own.bucket(), Some(bucket("100/s", 7)));
    assert_eq!(own.weight.unwrap().to_string(), "0.25");
}

#[test]
fn a_bot_without_events_is_parked_for_a_second_at_most_so_that_the_next_one_shows_its_wait() {
    for (n, ms, parked_ms) in [(0, 5_000, 5_000), (1, 900, 900), (1, 1_001, 1_000)] {
        let mut shard = Shard::new();
        shard.push(NOW, "a", &["1"], LIMITS);
        let claimed = shard.claim(NOW);
        shard.complete(NOW, 100, &[completion(&claimed, 0, n, Mode::Park { ms })]);
        shard.push(NOW, "a", &["2"], LIMITS);
        let ends = NOW + parked_ms * 1_000;
        assert!(shard.claim(ends - 1_000).leases.is_empty(), "{n} {ms}");
        assert_eq!(shard.claim(ends).leases.len(), 1, "{n} {ms}");
    }
}

#[test]
fn a_new_rate_forgets_no_bot_that_waits_for_a_lane() {
    let mut shard = Shard::new();
    shard.push(NOW, "a", &["1"], LIMITS);
    let claimed = shard.claim(NOW);
    let lane = Lane::of("key");
    let mut aside = Aside::of(7);
    aside.set(Waiting { lane, due_ms: u64::MAX >> 20, attempts: 1, alone: 0 });
    let moved = Completion {
        exceptions: vec![Exception { index: 0, fate: Fate::Lane(lane) }],
        aside: Some(AsideChange { aside, next_ms: 3_600_000, list: None }),
        ..completion(&claimed, 0, 1, Mode::Release)
    };
    assert_eq!(shard.complete(NOW, 100, &[moved]).verdicts, [Verdict::Ok]);
    assert!(shard.claim(NOW).leases.is_empty());
    assert!(set(&mut shard, "a", 9, (None, To("100/s"), Keep)));
    assert_eq!(shard.claim(NOW).leases.len(), 1, "it looks when its lane is due");
}

#[test]
fn a_new_rate_touches_no_lease_and_a_new_weight_ends_no_wait() {
    let mut shard = Shard::new();
    shard.push(NOW, "a", &["1", "2"], LIMITS);
    let claimed = shard.claim(NOW);
    assert!(set(&mut shard, "a", 9, (None, To("100/s"), Keep)));
    let done = completion(&claimed, 0, 1, Mode::Park { ms: 3_600_000 });
    assert_eq!(shard.complete(NOW, 100, &[done]).verdicts, [Verdict::Ok]);
    assert!(set(&mut shard, "a", 9, (Some("2"), Keep, Keep)));
    assert!(shard.claim(NOW).leases.is_empty());
}

fn budget(
    shard: &mut Shard,
    now_us: i64,
    process: &str,
    slices: Option<(usize, usize)>,
    tokens: Option<(usize, Bucket)>,
    unused: (usize, u64),
) -> Budgeted {
    let keys = shard.keys.clone();
    shard.call(now_us, &Budget { keys: &keys, process, slices, ttl_ms: 3_000, tokens, unused })
}

#[test]
fn all_processes_together_hold_at_most_the_slices_of_the_pipeline() {
    let mut shard = Shard::new();
    let mut holds = |now: i64, process: &str, wanted| {
        budget(&mut shard, now, process, Some((wanted, 5)), None, (0, 0)).slices
    };
    assert_eq!(holds(NOW, "a", 3), 3);
    assert_eq!(holds(NOW, "b", 4), 2, "what is left");
    assert_eq!(holds(NOW, "a", 3), 3, "a repeated call changes nothing");
    assert_eq!(holds(NOW, "a", 1), 1);
    assert_eq!(holds(NOW + 2 * SECOND, "b", 9), 4);
    assert_eq!(holds(NOW + 3 * SECOND + 1_000, "c", 9), 1, "a vanished; b renewed");
    assert_eq!(holds(NOW + 4 * SECOND, "b", 0), 0);
    assert_eq!(holds(NOW + 4 * SECOND, "c", 9), 5);
}

#[test]
fn unused_tokens_of_a_pipeline_return_unless_another_process_took_some_since() {
    let mut shard = Shard::new();
    let bucket = bucket("10/s", 10);
    let mut take = |now: i64, process: &str, want, unused| {
        budget(&mut shard, now, process, None, Some((want, bucket)), unused)
    };
    let first = take(NOW, "a", 10, (0, 0));
    assert_eq!((first.tokens, first.wait_ms), (10, 100));
    assert_eq!(take(NOW, "b", 1, (0, 0)).tokens, 0);
    let second = take(NOW, "a", 4, (4, first.stamp));
    assert_eq!(second.tokens, 4, "the four it did not use");
    let other = take(NOW + SECOND, "b", 2, (0, 0));
    assert_eq!(other.tokens, 2);
    // Otherwise the bucket would have more than it can hold.
    assert_eq!(take(NOW + SECOND, "a", 20, (4, second.stamp)).tokens, 8);
}

#[test]
fn slices_of_a_pipeline_are_kept_for_processes_that_hold_some_and_end_by_themselves() {
    let mut shard = Shard::new();
    let key = shard.keys.slots.clone();
    let holders = |shard: &mut Shard| -> Vec<String> {
        let mut holders: Vec<String> = shard.harness.plain().hkeys(&key).unwrap();
        holders.sort();
        holders
    };
    let hold = |shard: &mut Shard, now: i64, process: &str, wanted, most| {
        budget(shard, now, process, Some((wanted, most)), None, (0, 0)).slices
    };
    assert_eq!(hold(&mut shard, NOW, "a", 9, 1), 1);
    assert_eq!(hold(&mut shard, NOW, "b", 9, 1), 0);
    assert_eq!(holders(&mut shard), ["a"], "b holds nothing");
    let ttl: i64 = shard.harness.plain().pttl(&key).unwrap();
    assert!((1..=6_000).contains(&ttl), "{ttl}");
    assert_eq!(hold(&mut shard, NOW + 4 * SECOND, "b", 9, 1), 1);
    assert_eq!(holders(&mut shard), ["b"], "a vanished");
    // A process of an older configuration has the limit still.
    let nothing = Budgeted { slices: 0, tokens: 0, wait_ms: 0, stamp: 0 };
    assert_eq!(budget(&mut shard, NOW + 4 * SECOND, "b", None, None, (0, 0)), nothing);
    assert_eq!(holders(&mut shard), ["b"]);
    assert_eq!(hold(&mut shard, NOW + 5 * SECOND, "b", 0, 1), 0);
    assert_eq!(holders(&mut shard), [""; 0]);
}

#[test]
fn tokens_of_a_pipeline_are_kept_while_its_bucket_is_not_full() {
    let mut shard = Shard::new();
    let key = shard.keys.tokens.clone();
    let take = |shard: &mut Shard, bucket, want, unused| {
        budget(shard, NOW, "a", None, Some((want, bucket)), unused)
    };
    let slow = bucket("1/m", 3);
    let first = take(&mut shard, slow, 3, (0, 0));
    assert_eq!(first.tokens, 3);
    let ttl: i64 = shard.harness.plain().pttl(&key).unwrap();
    assert!((180_000..=181_001).contains(&ttl), "{ttl}");
    assert_eq!(take(&mut shard, slow, 2, (1, first.stamp)).tokens, 1, "the one that returns");
    let () = shard.harness.plain().del(&key).unwrap();
    let fast = bucket("1000000/s", 2);
    assert_eq!(take(&mut shard, fast, 3, (0, 0)).tokens, 2);
}
