//! The keys that scripts touch and leave behind, and the states that they tolerate.

use std::collections::BTreeSet;
use std::time::Duration;

use fairlane::counters::scripts::{Counting, Import, IncrementIfExists, Replace, Upsert, Views};
use fairlane::counters::view::AdId;
use fairlane::id::{BotId, Lane, Offset, Prefix, Sequence};
use fairlane::notifications::record::{Caps, Ended, Ending};
use fairlane::notifications::scripts::{
    Amend, Amendment, Begin, Finish, Forget, Release, Restore, Schedule, Throttle,
};
use fairlane::quotas::{NO_QUOTAS, Quota};
use fairlane::rate;
use fairlane::redis::keys::ShardKeys;
use fairlane::redis::scripts::{
    Act, Advance, Arrived, Audit, Beat, Budget, Call, Claim, Complete, Completion, DropLetters,
    Dropping, Emit, Enqueue, Enqueued, Exception, Fate, Heads, Hold, Kept, Letters, Mode, Note,
    Part, Pause, Peek, Permit, Present, Promote, Purge, Push, ReadSlice, Readers, Reconcile,
    Record, Recount, Recover, Redrive, Replay, Replayed, Resume, Revoke, Set, Span, Take, Trim,
    Verdict,
};
use fairlane::redis::{Link, Target};
use redis::{Arg, Cmd, Commands, Value};

use super::{
    LIMITS, NOW, SLICE_US, Shard, TTL_MS, bot, claim_all, completion, dead, keys, notifications,
};
use crate::support::redis::{Options, RedisServer};

/// Number of bytes before the event in a record.
const RECORD_HEAD: u64 = 11;

/// Ids that would be patterns, hash tags, numbers, separators, keys or code elsewhere.
fn hostile() -> Vec<BotId> {
    let long = "x".repeat(256);
    let wide = "日".repeat(85);
    let texts = [
        "*",
        "?",
        "[a]",
        "{}",
        "{",
        "}",
        "{p:0}",
        " ",
        "a b",
        "|||",
        "1|2|3|4",
        "12:34",
        ":",
        "-1",
        "+inf",
        "nan",
        "1e308",
        "\\",
        "\"",
        "'; redis.call('FLUSHALL') --",
        "%s%n",
        "$1",
        "fl:{p:0}:ctl",
        "../..",
        "é",
        "e\u{301}",
        "🦊",
        "\u{200f}",
        &long,
        &wide,
    ];
    texts.into_iter().map(bot).collect()
}

/// Runs every script on bots that do not disturb each other. The first event of each queue is
/// dead-lettered and redriven, and the second is delayed and promoted. Then each bot is revoked,
/// paused, purged, resumed, replayed and drained.
fn live(shard: &mut Shard, bots: &[BotId]) {
    let keys = &shard.keys.clone();
    let slice_us = SLICE_US;
    let count = bots.len();
    let (prev, last) = (Offset::default(), Offset { ms: 1, seq: 1 });
    let events = || vec![&b"1"[..], b"2", b"3"];
    let bots_events = bots.iter().map(|bot| (bot.clone(), events())).collect();
    let stream = "events {*}";
    let enqueue = Enqueue {
        keys,
        spans: vec![Span { log: stream, prev, last }],
        repeats: None,
        limits: LIMITS,
        quotas: &NO_QUOTAS,
        bots: bots_events,
        postings: None,
        take: Take::default(),
    };
    assert!(
        matches!(shard.call(NOW, &enqueue), Enqueued::Ok(done, _) if done.appended == 3 * count as u64)
    );
    assert_eq!(shard.call(NOW, &Recover { keys, run: "a run id of a server", slice_us }), Some(0));

    let lists: Vec<(&BotId, Option<Lane>)> = bots.iter().map(|bot| (bot, None)).collect();
    let heads = |shard: &mut Shard| shard.call(NOW, &Heads { keys, lists: &lists, bytes: 9_999 });
    let sequences: Vec<u64> = heads(shard).iter().map(|head| head.sequence).collect();
    assert!(sequences.is_sorted() && sequences[0] >= NOW.unsigned_abs(), "{sequences:?}");
    assert!(heads(shard).iter().all(|head| head.depth == 3));
    for bot in bots {
        let arrived = Arrived { keys, bot, until: &[0, u64::MAX >> 12], bytes: 9_999 };
        assert_eq!(shard.call(NOW, &arrived), [0, 3], "{bot}");
    }

    let claimed = shard.claim(NOW);
    let granted: Vec<&BotId> = claimed.leases.iter().map(|grant| &grant.bot).collect();
    assert_eq!(granted, bots.iter().collect::<Vec<_>>(), "each as it was given");
    let bytes = 3 * (RECORD_HEAD + 1);
    assert!(claimed.leases.iter().all(|grant| grant.queued_bytes == bytes), "{claimed:?}");
    for grant in &claimed.leases {
        let read = |limit, bytes| ReadSlice { keys, bot: &grant.bot, limit, bytes };
        for (limit, bytes, expected) in [(9, 99, 3), (2, 99, 2), (9, 25, 2), (9, 1, 1), (0, 1, 0)] {
            assert_eq!(shard.call(NOW, &read(limit, bytes)).len(), expected, "{limit} {bytes}");
        }
    }
    let due_ms = NOW.unsigned_abs() / 1_000;
    let later = || Exception { index: 1, fate: Fate::Later { at_ms: due_ms } };
    let mode = Mode::Fail { ms: TTL_MS, isolate: 1 };
    let items: Vec<Completion> = (0..count)
        .map(|at| Completion {
            exceptions: vec![dead(0), later()],
            ..completion(&claimed, at, 2, mode)
        })
        .collect();
    let done = shard.complete(NOW, 1_000, &items);
    assert_eq!(done.verdicts, vec![Verdict::Ok; count]);

    for (bot, id) in bots.iter().zip(shard.letters()) {
        assert!(shard.call(NOW, &Redrive { keys, id, bot, slice_us, renews: false }), "{bot}");
    }
    let due: Vec<(String, BotId)> = {
        let ids: Vec<String> = shard.harness.plain().zrange(&keys.due, 0, -1).unwrap();
        ids.into_iter().zip(bots.iter().cloned()).collect()
    };
    assert_eq!(shard.call(NOW, &Promote { keys, slice_us, events: &due }).moved, count as u64);
    for bot in bots {
        assert_eq!(shard.events(bot.as_str()), ["1", "3", "2"], "{bot}");
        assert!(shard.call(NOW, &Revoke { keys, bot, slice_us }), "{bot}");
        assert!(
            shard.call(NOW, &Pause { keys, bot: Some(bot), note: "{}", replaces: true }),
            "{bot}"
        );
        let delayed = [b"late".to_vec()];
        let (due_ms, idempotency) = (due_ms.cast_signed(), Some((bot.as_str(), 60_000)));
        let push = Push { keys, limits: LIMITS, bot, events: &delayed, due_ms, idempotency };
        let pushed = shard.call(NOW, &push);
        assert!(!pushed.duplicate && shard.call(NOW, &push).duplicate, "{bot}");
        let due = [(pushed.sequence.to_string(), bot.clone())];
        assert_eq!(shard.call(NOW, &Promote { keys, slice_us, events: &due }).moved, 1, "{bot}");
        assert_eq!(shard.call(NOW, &Purge { keys, bot }), 4, "{bot}");
        shard.push(NOW, bot.as_str(), &["4"], LIMITS);
        assert_eq!(shard.claim(NOW).leases, [], "{bot} is paused");
        assert!(shard.call(NOW, &Resume { keys, bot: Some(bot), slice_us }), "{bot}");
        let events = [(Offset { ms: 1, seq: 1 }, b"5".to_vec())];
        let (limits, id, keep_ms, stream) = (LIMITS, "r", 60_000, 0);
        let replay = Replay { keys, limits, id, keep_ms, stream, bot, events: &events };
        let told = |earlier, put| Replayed { earlier, put, refused: None };
        assert_eq!(shard.call(NOW, &replay), told(0, 1), "{bot}");
        assert_eq!(shard.call(NOW, &replay), told(1, 0), "{bot}");
        assert_eq!(shard.events(bot.as_str()), ["4", "5"], "{bot}");
        let claimed = shard.claim(NOW);
        assert_eq!(claimed.leases.len(), 1, "{bot} alone");
        let keep = completion(&claimed, 0, 2, Mode::Keep { ttl_ms: TTL_MS });
        let release = Completion { before: 2, n: 0, mode: Mode::Release, ..keep.clone() };
        for item in [keep, release] {
            let item = Completion { cost: 3 * SLICE_US, ..item };
            assert_eq!(shard.complete(NOW, 9, &[item]).verdicts, [Verdict::Ok], "{bot}");
        }
    }
}

#[test]
fn hostile_bot_ids_go_through_every_script_unharmed() {
    live(&mut Shard::new(), &hostile());
}

#[test]
fn every_key_a_script_writes_carries_the_tag_of_the_shard() {
    let mut shard = Shard::new();
    live(&mut shard, &hostile());
    // These keys are absent in a drained shard.
    shard.push(NOW, "a", &["1", "2", "3"], LIMITS);
    shard.push(NOW, "{b}", &["1"], LIMITS);
    let claimed = shard.claim(NOW);
    shard.complete(NOW, 9, &[completion(&claimed, 0, 1, Mode::Fail { ms: 1, isolate: 1 })]);
    shard.call(NOW, &Pause { keys: &shard.keys.clone(), bot: None, note: "", replaces: false });
    let keys: Vec<String> = shard.harness.plain().keys("*").unwrap();
    let names: BTreeSet<&str> = keys
        .iter()
        .filter(|key| !crate::support::script_harness::OWN_KEYS.contains(&key.as_str()))
        .map(|key| key.strip_prefix("fl:{p:0}:").unwrap_or_else(|| panic!("a key {key:?}")))
        .map(|name| if name.starts_with("idem:") { "idem" } else { name })
        .collect();
    let expected = [
        "att", "busy", "dlq", "fin", "held", "hwm", "idem", "meta", "own", "q:a", "q:{b}",
        "replay:r",
    ];
    assert_eq!(names, expected.into());
}

#[test]
fn an_idle_bot_leaves_nothing_behind() {
    let mut shard = Shard::new();
    let keys = &shard.keys.clone();
    live(&mut shard, &hostile());
    let finishes: usize = shard.harness.plain().zcard(keys.finishes()).unwrap();
    assert_eq!(finishes, hostile().len(), "the clock stands still and is behind them all");
    let () = shard.harness.plain().hset(&keys.weight, "*", 2).unwrap();
    assert!(shard.call(NOW, &Pause { keys, bot: Some(&bot("{}")), note: "{}", replaces: true }));
    shard.call(NOW, &Claim { alone: true, ..claim_all(keys) });
    let left: BTreeSet<String> = shard.harness.plain().keys("fl:*").unwrap();
    let expected: BTreeSet<String> =
        [keys.meta(), &keys.offsets, &keys.dlq, &keys.weight, keys.paused(), &keys.pauses]
            .into_iter()
            .map(str::to_owned)
            .chain(hostile().iter().map(|bot| keys.idempotency(bot.as_str())))
            .chain([keys.replay("r")])
            .collect();
    assert_eq!(left, expected);
    let depth: String = shard.harness.plain().hget(keys.meta(), "depth").unwrap();
    assert_eq!(depth, "0");
}

fn named<C: Call>(call: &C) -> (&'static str, Cmd) {
    (C::NAME, call.command())
}

/// The name of every script, and its shortest valid call.
fn calls() -> Vec<(&'static str, Cmd)> {
    let mut shard = Shard::new();
    shard.push(NOW, "a", &["1"], LIMITS);
    let claimed = shard.claim(NOW);
    let (keys, a, slice_us) = (&keys("p"), &bot("a"), SLICE_US);
    let at = Offset { ms: 1, seq: 1 };
    let item = completion(&claimed, 0, 1, Mode::Release);
    let items = [Completion { exceptions: vec![dead(0)], ..item.clone() }, item];
    let (events, ids) = ([b"1".to_vec(), b"2".to_vec()], [("1".to_owned(), a.clone())]);
    let bots = vec![(a.clone(), vec![&b"1"[..]]), (bot("b"), vec![b"2", b"3"])];
    let idempotency = Some(("key", 1));
    let ad = &AdId::parse("x").unwrap();
    let counting = Counting { keys, limits: LIMITS, cached_ads: 1, bot: a, ad };
    let views = Views { counting, n: 1, event: b"1", idempotency: None };
    let emitted = [("1".to_owned(), b"1".to_vec())];
    let (place, before, lane, part) = (0, 0, None, Part::Whole);
    let mut calls = vec![
        named(&Enqueue {
            keys,
            spans: vec![Span { log: "s", prev: at, last: at }],
            repeats: None,
            limits: LIMITS,
            quotas: &NO_QUOTAS,
            bots,
            postings: None,
            take: Take::default(),
        }),
        named(&Push { keys, limits: LIMITS, bot: a, events: &events, due_ms: 0, idempotency }),
        named(&claim_all(keys)),
        named(&Complete { keys, dead_max: 1, quotas: &NO_QUOTAS, ledger: false, items: &items }),
        named(&Promote { keys, slice_us, events: &ids }),
        named(&Pause { keys, bot: Some(a), note: "", replaces: false }),
        named(&Resume { keys, bot: Some(a), slice_us }),
        named(&Purge { keys, bot: a }),
        named(&Redrive { keys, id: at, bot: a, slice_us, renews: false }),
        named(&Revoke { keys, bot: a, slice_us }),
        named(&DropLetters { keys, letters: Dropping::Older(Duration::ZERO), bytes: 1 }),
        named(&Audit { keys, bots: &[a.clone(), bot("b")], entries_max: 9, bytes_max: 9 }),
        named(&Recover { keys, run: "run", slice_us }),
        named(&Reconcile { keys, bots: &[a.clone(), bot("b")], bots_max: 9 }),
        named(&Readers { key: "fl:{s}:readers", token: "t", ttl_ms: 1, logs: &["s".into()] }),
        named(&Hold { key: "fl:{s}:reader", token: "t", ttl_ms: 1 }),
        named(&Emit { prefix: &Prefix::default(), stream: "s", window_ms: 1, events: &emitted }),
        named(&Trim { stream: "s", keep: at }),
        named(&Advance { keys, spans: vec![Span { log: "s", prev: Offset::default(), last: at }] }),
        named(&Note { key: "fl:{s}:read", offset: at, entries: 1, lag: Some(0) }),
        named(&Act { key: "fl:audit", action: b"{}", kept: 1_000 }),
        named(&Beat { key: "fl:processes", id: "i", says: "s", ttl_ms: 1 }),
        named(&Present { key: "fl:processes", ttl_ms: 1 }),
        named(&Heads { keys, lists: &[(a, None), (&bot("b"), None)], bytes: 1 }),
        named(&Arrived { keys, bot: a, until: &[1], bytes: 1 }),
        named(&Peek { keys, bot: a, lane, place, before, limit: 1, bytes: 1, part }),
        named(&ReadSlice { keys, bot: a, limit: 1, bytes: 1 }),
        named(&Letters {
            keys,
            newest_first: true,
            from: "+",
            until: "-",
            limit: 1,
            bytes: 1,
            part,
        }),
        named(&IncrementIfExists(views)),
        named(&Upsert { views, acked: "", stored: Some((1, Sequence::new(1))) }),
        named(&Replace { counting, total: 1, event: b"1" }),
        named(&Import {
            counting,
            total: 1,
            event: b"1",
            key: "key",
            before: 0,
            line: 1,
            upto: 1,
            keep_ms: 1,
        }),
        named(&Recount {
            keys,
            limits: LIMITS,
            cached_accounts: 1,
            id: at,
            bot: a,
            posting: None,
            event: b"1",
        }),
    ];
    let kept = Kept { keep_ms: 1, done_bytes: 1, failed_bytes: 1, bot_bytes: 1 };
    let failed = &[(a.clone(), b"\0\x011".to_vec())];
    calls.push(named(&Record { keys, now_ms: 1, kept, done: &[], failed }));
    let events = &[(at, b"1".to_vec())];
    let (limits, id, keep_ms, stream) = (LIMITS, "r", 1, 0);
    calls.push(named(&Replay { keys, limits, id, keep_ms, stream, bot: a, events }));
    calls.extend(limit_calls(keys, a));
    calls.extend(notification_calls(keys, a));
    calls
}

fn limit_calls(keys: &ShardKeys, a: &BotId) -> Vec<(&'static str, Cmd)> {
    let bucket = rate::Bucket::new("1/s".parse().unwrap(), None);
    vec![
        named(&Permit { keys, bot: a, want: 1, held: 0, bucket }),
        named(&Set {
            keys,
            bot: a,
            slice_us: SLICE_US,
            max: 1,
            weight: None,
            rate: rate::Change::Reset,
            burst: rate::Change::Keep,
        }),
        named(&Budget {
            keys,
            process: "p",
            slices: Some((1, 1)),
            ttl_ms: 1,
            tokens: Some((1, bucket)),
            unused: (0, 0),
        }),
    ]
}

fn notification_calls(keys: &ShardKeys, a: &BotId) -> [(&'static str, Cmd); 7] {
    let (now, hold, id) = (Duration::ZERO, Duration::from_secs(1), notifications::id());
    let new = &notifications::new("a", "u", 0);
    let throttle =
        &Throttle { threshold: hold, by_kind: Vec::new(), caps: Caps::default(), defers: false };
    let begun = [(id, "u", Sequence::new(1))];
    let endings = &[Ended { begun: notifications::begun(id), ending: Ending::Sent, late: None }];
    [
        named(&Schedule { keys, now, id, new, label: "none", quota: Quota::NONE, known: None }),
        named(&Begin {
            keys,
            now,
            bot: a,
            hold: notifications::HOLD,
            throttle,
            dead_max: 1,
            quota: Quota::NONE,
            events: &begun,
        }),
        named(&Finish { keys, now, dead_max: 1, quotas: &NO_QUOTAS, throttle, endings }),
        named(&Forget { keys, bot: a, id, key: "k" }),
        named(&Amend {
            keys,
            now,
            id,
            bot: a,
            uid: "u",
            key: "",
            ended_bytes: 0,
            amendment: Amendment::Cancel,
        }),
        named(&Release { keys, now, bot: a, uid: "u", threshold: hold }),
        named(&Restore { keys, now, id, bot: a, uid: "u", sequence: 0 }),
    ]
}

#[derive(Debug, Clone, Copy)]
enum Change {
    NoKeys,
    OneLess,
    OneMore,
}

fn changed(command: &Cmd, change: Change) -> Cmd {
    let arguments: Vec<Vec<u8>> = command
        .args_iter()
        .map(|argument| match argument {
            Arg::Simple(bytes) => bytes.to_vec(),
            _ => unreachable!("no script has a cursor"),
        })
        .collect();
    let mut other = Cmd::new();
    match change {
        Change::NoKeys => other.arg(&arguments[..2]).arg(0),
        Change::OneLess => other.arg(&arguments[..arguments.len() - 1]),
        Change::OneMore => other.arg(&arguments).arg("1"),
    };
    other
}

#[tokio::test]
async fn a_wrong_number_of_arguments_is_an_error_that_names_the_script() {
    let server = RedisServer::start(Options::default());
    let target = Target::new(&server.url()).unwrap();
    let link = Link::new(target, Vec::new(), SLICE_US, Duration::from_secs(10));
    let calls = calls();
    assert_eq!(calls.len(), 45);
    for (name, command) in &calls {
        for change in [Change::NoKeys, Change::OneLess, Change::OneMore] {
            // Any number of logs is right, if there is one.
            if *name == "readers" && matches!(change, Change::OneMore) {
                continue;
            }
            let mut pipe = redis::pipe();
            pipe.add_command(changed(command, change)).cmd("DBSIZE");
            let [Value::ServerError(error), Value::Int(0)] = &link.run(&pipe).await.unwrap()[..]
            else {
                panic!("{name} did something: {change:?}");
            };
            let text = error.details().unwrap_or_default();
            let expected = format!("{name}: wrong number of arguments");
            assert!(text.contains(&expected), "{name}, {change:?}: {text}");
        }
    }
}

/// The scripts that a full Redis runs: they free memory, or write almost nothing. The header or the
/// contract of each says why it cannot fill Redis. A full Redis refuses all other scripts as a
/// whole.
const RUN_WHEN_FULL: [&str; 25] = [
    "act",
    "advance",
    "amend",
    "audit",
    "beat",
    "begin",
    "budget",
    "claim",
    "complete",
    "drop_letters",
    "finish",
    "forget",
    "hold",
    "note",
    "pause",
    "permit",
    "promote",
    "purge",
    "readers",
    "reconcile",
    "recover",
    "release",
    "resume",
    "revoke",
    "trim",
];

#[test]
fn a_full_redis_runs_the_scripts_that_drain_and_no_others() {
    let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("lua");
    let mut run = BTreeSet::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        match text.lines().next().unwrap() {
            "#!lua flags=allow-oom" => drop(run.insert(name)),
            "#!lua" | "#!lua flags=no-writes" => {}
            first => assert!(first.starts_with("--"), "{name}: {first}"),
        }
    }
    assert_eq!(run.iter().map(String::as_str).collect::<Vec<_>>(), RUN_WHEN_FULL);
}
