//! Bounds, and numbers at the ends of their ranges.

use fairlane::id::Offset;
use fairlane::quotas::NO_QUOTAS;
use fairlane::redis::scripts::{
    Claim, Completion, Enqueue, Enqueued, Limits, Mode, Purge, Queued, Recover, Redrive, Revoke,
    Span, Take, Verdict,
};
use redis::Commands;

use super::{LIMITS, NOW, SLICE_US, Shard, TTL_MS, bot, claim_all, completion, dead};

const LAST: u64 = u64::MAX;

#[test]
fn stream_offsets_compare_as_pairs_of_64_bit_numbers() {
    let mut shard = Shard::new();
    let at = |ms, seq| Offset { ms, seq };
    // Each offset is the next one above its predecessor, and none fits exactly into a Lua number.
    let chain = [
        at(0, 0),
        at(9, LAST),
        at(10, 0),
        at(LAST - 1, LAST - 1),
        at(LAST - 1, LAST),
        at(LAST, 0),
        at(LAST, 9),
        at(LAST, 10),
        at(LAST, LAST),
    ];
    for (index, pair) in chain.windows(2).enumerate() {
        let (prev, last) = (pair[0], pair[1]);
        if prev != chain[0] {
            assert_eq!(shard.enqueue(chain[0], last, &[], ""), Enqueued::Gap(vec![prev]));
        }
        let taken = shard.enqueue(prev, last, &[bot("a")], "{}");
        assert!(matches!(taken, Enqueued::Ok(Queued { appended: 1, .. }, _)), "{last}: {taken:?}");
        for &earlier in &chain[1..=index + 1] {
            let again = shard.enqueue(prev, earlier, &[bot("a")], "{}");
            assert_eq!(again, Enqueued::Duplicate(vec![last]), "{earlier}");
        }
    }
    assert_eq!(shard.events("a").len(), chain.len() - 1);
}

#[test]
fn numbers_keep_all_their_digits() {
    let mut shard = Shard::new();
    let now = NOW.unsigned_abs();
    let pushed = shard.push(NOW, "a", &["1", "2"], LIMITS);
    assert_eq!(pushed.sequence.get(), now + 1);
    let sequences: Vec<u64> = shard.queue("a").into_iter().map(|(sequence, _)| sequence).collect();
    assert_eq!(sequences, [now, now + 1]);
    // The highest clock that stays exact with everything that is added to it.
    let seen = (1 << 52) + 1;
    let keys = shard.keys.clone();
    let claimed = shard.call(NOW, &Claim { seen, ..claim_all(&keys) });
    let grant = &claimed.leases[0];
    assert_eq!((claimed.clock, grant.start, grant.fence.get()), (seen, seen, now));
    assert_eq!(claimed.now_us, now);
    assert_eq!(claimed.deadline_ms, Some(now / 1_000 + TTL_MS));
    let own: String = shard.harness.plain().hget(keys.owners(), "a").unwrap();
    assert_eq!(own, format!("{now}|0|{seen}|0"));
    let keep = Completion { cost: 1, ..completion(&claimed, 0, 1, Mode::Keep { ttl_ms: 1 }) };
    assert_eq!(shard.complete(NOW, 1, &[keep]).verdicts, [Verdict::Ok]);
    let own: String = shard.harness.plain().hget(keys.owners(), "a").unwrap();
    assert_eq!(own, format!("{now}|1|{}|1", seen + 1));
    let rest =
        Completion { before: 1, cost: 60_000_000, ..completion(&claimed, 0, 0, Mode::Release) };
    assert_eq!(shard.complete(NOW, 1, &[rest]).low, Some((1 << 52) + 60_000_002));
}

#[test]
fn dead_letters_are_bounded_and_the_removed_are_counted() {
    let mut shard = Shard::new();
    shard.push(NOW, "a", &["1", "2", "3", "4", "5"], LIMITS);
    assert_eq!(shard.kill(NOW, 3, 2).letters_removed, 1);
    assert_eq!(shard.kill(NOW, 2, 2).letters_removed, 2);
    let keys = &shard.keys.clone();
    for id in shard.letters() {
        assert!(
            shard.call(
                NOW,
                &Redrive { keys, id, bot: &bot("a"), slice_us: SLICE_US, renews: false }
            )
        );
    }
    assert_eq!(shard.events("a"), ["4", "5"], "the oldest went");
}

/// It may be large.
#[test]
fn the_oldest_letter_of_a_full_shard_is_read_once_per_call_until_it_is_deleted() {
    let mut shard = Shard::new();
    let reads = |shard: &mut Shard| {
        let mut info = redis::cmd("INFO");
        let text: String = info.arg("commandstats").query(shard.harness.plain()).unwrap();
        let calls = text.lines().find_map(|line| line.strip_prefix("cmdstat_xrange:calls="));
        calls.map_or(0, |calls| calls.split(',').next().unwrap().parse::<u64>().unwrap())
    };
    let mut bury = |of: &str, n: usize| {
        shard.push(NOW, of, &vec!["1"; n], LIMITS);
        let before = reads(&mut shard);
        let killed = shard.kill(NOW, n, 4);
        (killed.letters_removed, killed.letters_over_quota, reads(&mut shard) - before)
    };
    assert_eq!(bury("few", 2), (0, 0, 0));
    assert_eq!(bury("many", 2), (0, 0, 0));
    assert_eq!(bury("many", 10), (10, 10, 1), "the other bot has as few");
    assert_eq!(bury("few", 3), (3, 1, 3), "it deletes its own two, and reads the next");
}

#[test]
fn a_shard_whose_maximum_was_lowered_deletes_4_mib_of_letters_more_than_one_for_each_new_one() {
    let mut shard = Shard::new();
    // A record has 11 bytes besides its event.
    let large = "x".repeat((1 << 20) - 11);
    shard.push(NOW, "a", &[&*large; 10], LIMITS);
    shard.kill(NOW, 10, 100);
    let mut removed = |n: usize| {
        shard.push(NOW, "a", &vec!["1"; n], LIMITS);
        shard.kill(NOW, n, 2).letters_removed
    };
    assert_eq!(removed(2), 1 + 4 + 1);
    assert_eq!(removed(1), 5, "the four large ones that were left, and a small one");
    assert_eq!(removed(1), 1);
    assert_eq!(shard.letters().len(), 2);
}

#[test]
fn letters_put_back_in_any_order_are_in_their_old_order() {
    let mut shard = Shard::new();
    let keys = &shard.keys.clone();
    let all = ["0", "1", "2", "3"];
    let orders = (0..256_usize).map(|n| [n & 3, n >> 2 & 3, n >> 4 & 3, n >> 6]);
    let permutations = orders.filter(|order| (0..4).all(|n| order.contains(&n)));
    let mut met = 0;
    for order in permutations {
        shard.push(NOW, "a", &all, LIMITS);
        shard.kill(NOW, 4, 100);
        // Events that arrive meanwhile stay behind.
        shard.push(NOW, "a", &["new"], LIMITS);
        let ids = shard.letters();
        for n in order {
            let redrive =
                Redrive { keys, id: ids[n], bot: &bot("a"), slice_us: SLICE_US, renews: false };
            assert!(shard.call(NOW, &redrive));
            assert!(!shard.call(NOW, &redrive), "once");
        }
        assert_eq!(shard.events("a"), ["0", "1", "2", "3", "new"], "{order:?}");
        let claimed = shard.claim(NOW);
        shard.complete(NOW, 1, &[completion(&claimed, 0, 5, Mode::Release)]);
        met += 1;
    }
    assert_eq!(met, 24);
}

/// Its handler skips events up to the last sequence that it knows.
#[test]
fn a_renewed_letter_has_a_sequence_above_all_events_before_it_and_below_all_behind_it() {
    let mut shard = Shard::new();
    shard.push(NOW, "a", &["1", "2"], LIMITS);
    shard.kill(NOW, 1, 100);
    let (keys, id) = (&shard.keys.clone(), shard.letters()[0]);
    // The clock of the server was set back meanwhile.
    let now = NOW - 1_000;
    let redrive = Redrive { keys, id, bot: &bot("a"), slice_us: SLICE_US, renews: true };
    assert!(shard.call(now, &redrive));
    shard.push(now, "a", &["3"], LIMITS);
    assert_eq!(shard.events("a"), ["2", "1", "3"]);
    assert!(shard.queue("a").is_sorted_by(|(one, _), (next, _)| one < next));
}

#[test]
fn a_letter_is_put_back_behind_more_events_than_one_look_takes() {
    let mut shard = Shard::new();
    // More than one look takes stay behind the letters, too.
    let numbers: Vec<String> = (0..300).map(|n| n.to_string()).collect();
    let numbers: Vec<&str> = numbers.iter().map(String::as_str).collect();
    shard.push(NOW, "a", &numbers, LIMITS);
    let claimed = shard.claim(NOW);
    let release = completion(&claimed, 0, 151, Mode::Release);
    shard.complete(NOW, 200, &[Completion { exceptions: (0..151).map(dead).collect(), ..release }]);
    let keys = &shard.keys.clone();
    for id in shard.letters() {
        shard.call(NOW, &Redrive { keys, id, bot: &bot("a"), slice_us: SLICE_US, renews: false });
    }
    assert_eq!(shard.events("a"), numbers);
}

/// Redis looks for the place of an insertion from the head: a queue of millions would stop it for long.
#[test]
fn a_letter_behind_more_than_100000_events_is_put_back_at_the_end() {
    let mut shard = Shard::new();
    let keys = &shard.keys.clone();
    for _ in 0..200 {
        shard.push(NOW, "a", &["1"; 500], LIMITS);
    }
    let limited = |max_queue| Limits { max_queue, ..LIMITS };
    let mut put_back = |max_queue, late, after| {
        let queued = shard.push(NOW, "a", &[late], limited(max_queue)).queued;
        assert_eq!((queued.appended, queued.dead), (0, 1));
        shard.push(NOW, "a", &[after], LIMITS);
        let id = shard.letters()[0];
        let bot = &bot("a");
        assert!(shard.call(NOW, &Redrive { keys, id, bot, slice_us: SLICE_US, renews: false }));
        shard.events("a").split_off(100_000)
    };
    assert_eq!(put_back(100_000, "in order", "2"), ["in order", "2"]);
    assert_eq!(put_back(100_002, "at the end", "3"), ["in order", "2", "3", "at the end"]);
    assert!(shard.queue("a").is_sorted_by(|(one, _), (next, _)| one < next));
}

#[test]
fn a_full_queue_takes_the_events_that_fit_and_the_rest_is_dead_or_dropped() {
    for overflow_dead in [true, false] {
        let mut shard = Shard::new();
        let limits = Limits { max_queue: 3, overflow_dead, dead_max: 1, ..LIMITS };
        shard.push(NOW, "a", &["1", "2"], limits);
        let queued = shard.push(NOW, "a", &["3", "4", "5"], limits).queued;
        let expected = if overflow_dead {
            Queued { appended: 1, dead: 2, letters_removed: 1, ..Queued::default() }
        } else {
            Queued { appended: 1, dropped: 2, ..Queued::default() }
        };
        assert_eq!(queued, expected);
        assert_eq!(shard.events("a"), ["1", "2", "3"]);
        assert_eq!(shard.push(NOW, "b", &["1"], limits).queued.appended, 1, "each bot its own");
        assert_eq!(shard.letters().len(), usize::from(overflow_dead));
    }
}

#[test]
fn an_exception_that_is_not_among_the_events_changes_nothing() {
    let mut shard = Shard::new();
    shard.push(NOW, "a", &["1", "2"], LIMITS);
    let claimed = shard.claim(NOW);
    let release = completion(&claimed, 0, 1, Mode::Release);
    for index in [1, 2] {
        let exceptions = vec![dead(0), dead(index)];
        let item = Completion { exceptions, ..release.clone() };
        assert_eq!(shard.complete(NOW, 9, &[item]).verdicts, [Verdict::Bad], "{index}");
    }
    assert_eq!((shard.events("a").len(), shard.letters().len()), (2, 0));
    assert_eq!(shard.complete(NOW, 9, &[release]).verdicts, [Verdict::Ok]);
}

#[test]
fn a_copy_that_takes_leases_forgets_the_finishes_behind_its_clock_and_no_other() {
    let mut shard = Shard::new();
    let keys = &shard.keys.clone();
    for (finished, finish) in [("old", 100), ("at the clock", 200), ("ahead", 201)] {
        let () = shard.harness.plain().zadd(keys.finishes(), finished, finish).unwrap();
    }
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
        bots: vec![(bot("a"), vec![b"{}".as_slice()])],
        postings: None,
        take: Take { max: 1, ttl_ms: TTL_MS, seen: 200 },
    };
    let Enqueued::Ok(_, taken) = shard.call(NOW, &call) else { panic!("it is copied") };
    assert_eq!((taken.leases.len(), taken.leases[0].start), (1, 200));
    let left: Vec<String> = shard.harness.plain().zrange(keys.finishes(), 0, -1).unwrap();
    assert_eq!(left, ["ahead"]);
}

/// Redis lists a hash with long names in no order.
#[test]
fn recovery_makes_bots_ready_in_the_order_in_which_they_were_leased() {
    let mut shard = Shard::new();
    let bots: Vec<_> = (0..150).map(|n| bot(&format!("{n:080}"))).collect();
    shard.enqueue(Offset::default(), Offset { ms: 1, seq: 1 }, &bots, "{}");
    let claim = |shard: &mut Shard| -> Vec<String> {
        // A claim grants 64, and recovery also joins 64 at a time.
        let claims = [(); 3].map(|()| shard.claim(NOW).leases);
        claims.into_iter().flatten().map(|grant| grant.bot.as_str().to_owned()).collect()
    };
    let leased = claim(&mut shard);
    assert_eq!(leased.len(), 150);
    let keys = &shard.keys.clone();
    let recover = Recover { keys, run: "another run", slice_us: SLICE_US };
    assert_eq!(shard.call(NOW, &recover), Some(150));
    assert_eq!(claim(&mut shard), leased);
}

#[test]
fn a_claim_reaps_up_to_64_leases_and_forgets_up_to_1000_finishes() {
    let mut shard = Shard::new();
    let bots: Vec<_> = (0..100).map(|n| bot(&format!("bot {n:03}"))).collect();
    shard.enqueue(Offset::default(), Offset { ms: 1, seq: 1 }, &bots, "{}");
    assert_eq!((shard.claim(NOW).leases.len(), shard.claim(NOW).leases.len()), (64, 36));
    let keys = &shard.keys.clone();
    for finish in 1..=1_500 {
        let member = format!("gone {finish}");
        let () = shard.harness.plain().zadd(keys.finishes(), member, finish).unwrap();
    }
    let expired = NOW + i64::try_from(TTL_MS).unwrap() * 1_000;
    let look = Claim { max: 0, seen: 1_500, ..claim_all(keys) };
    for (vanished, finishes) in [(64, 500), (36, 0), (0, 0)] {
        assert_eq!(shard.call(expired, &look).vanished, vanished);
        assert_eq!(shard.harness.plain().zcard::<_, u64>(keys.finishes()).unwrap(), finishes);
    }
    assert_eq!(shard.claim(expired).ready, 36);
}

/// Returns `(open leases, the last field of a bot's lease)`.
fn open(shard: &mut Shard, of: &str) -> (u64, String) {
    let (meta, own) = (shard.keys.meta().to_owned(), shard.keys.owners().to_owned());
    let open: Option<u64> = shard.harness.plain().hget(meta, "open").unwrap();
    let own: Option<String> = shard.harness.plain().hget(own, of).unwrap();
    let own = own.unwrap_or_default();
    (open.unwrap_or(0), own.rsplit('|').next().unwrap_or_default().to_owned())
}

#[test]
fn so_many_leases_are_handed_over_and_every_end_of_one_is_counted() {
    let mut shard = Shard::new();
    let keys = &shard.keys.clone();
    for bot in ["a", "b", "c", "d", "e"] {
        shard.push(NOW, bot, &["1", "2"], LIMITS);
    }
    let claimed = shard.claim(NOW);
    let hand = Mode::Hand { ttl_ms: TTL_MS, max: 4 };
    let all: Vec<Completion> = (0..5).map(|at| completion(&claimed, at, 0, hand)).collect();
    let verdicts = shard.complete(NOW, 9, &all).verdicts;
    assert_eq!(verdicts, [Verdict::Ok, Verdict::Ok, Verdict::Ok, Verdict::Ok, Verdict::Full]);
    assert_eq!(open(&mut shard, "a"), (4, "2".into()));
    assert_eq!(open(&mut shard, "e"), (4, "1".into()));
    // A lease that the receiver renews stays handed over.
    let keep = completion(&claimed, 0, 1, Mode::Keep { ttl_ms: TTL_MS });
    shard.complete(NOW, 9, std::slice::from_ref(&keep));
    assert_eq!(open(&mut shard, "a"), (4, "2".into()));
    let release = Completion { before: 1, mode: Mode::Release, ..keep };
    shard.complete(NOW, 9, &[release]);
    assert_eq!(open(&mut shard, "a").0, 3);
    let slice_us = SLICE_US;
    assert!(shard.call(NOW, &Revoke { keys, bot: &bot("b"), slice_us }));
    assert_eq!(open(&mut shard, "b"), (2, String::new()));
    assert_eq!(shard.call(NOW, &Purge { keys, bot: &bot("c") }), 2);
    assert_eq!(open(&mut shard, "c").0, 1);
    // There is a free place again.
    let again = shard.complete(NOW, 9, &[completion(&claimed, 4, 0, hand)]);
    assert_eq!((again.verdicts, open(&mut shard, "e").0), (vec![Verdict::Ok], 2));
    shard.call(NOW, &Recover { keys, run: "another run", slice_us });
    assert_eq!(open(&mut shard, "e"), (0, String::new()));
    let claimed = shard.claim(NOW);
    let at = claimed.leases.iter().position(|grant| grant.bot == bot("d")).unwrap();
    let taken = completion(&claimed, at, 0, hand);
    assert_eq!(shard.complete(NOW, 9, &[taken]).verdicts, [Verdict::Ok]);
    let late = shard.claim(NOW + i64::try_from(TTL_MS).unwrap() * 1_000);
    let grant = late.leases.iter().find(|grant| grant.bot == bot("d")).unwrap();
    assert_eq!((grant.attempts.lost, open(&mut shard, "d")), (1, (0, "0".into())));
}
