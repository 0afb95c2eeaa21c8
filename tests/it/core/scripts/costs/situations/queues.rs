//! The scripts of the core.

use fairlane::id::{BotId, Offset, Prefix};
use fairlane::redis::scripts::{
    Advance, Claim, Completion, Emit, Enqueue, Exception, Fate, FindDue, Heads, Hold, Limits, Mode,
    Note, Promote, Push, ReadSlice, Recover, Redrive, Replay, Span, Take, Trim,
};
use redis::Commands as _;
use redis::streams::StreamRangeReply;

use super::super::super::{LIMITS, SLICE_US, TTL_MS, bot, claim_all, dead};
use super::super::stage::{EVENT, Meter, Stage, ended, some};

/// The scripts that publish on the bus and read it.
pub(super) async fn bus<M: Meter>(stage: &mut Stage<M>) {
    stage.clear("p").await;
    let keys = &stage.keys.clone();
    let prefix = &Prefix::default();
    let events: Vec<(String, Vec<u8>)> = (0..10).map(|n| (n.to_string(), EVENT.to_vec())).collect();
    let emit = |events| Emit { prefix, stream: "events", window_ms: 60_000, events };
    stage.measure("10 events", &emit(&events)).await;
    stage.measure("10 events that were published before", &emit(&events)).await;

    let hold = Hold { key: "fl:{events}:reader", token: "t", ttl_ms: 2_000 };
    stage.measure("a new reader", &hold).await;
    stage.measure("the same reader", &hold).await;
    let note = Note {
        key: "fl:{events}:read",
        offset: Offset { ms: 1, seq: 1 },
        entries: 1,
        lag: Some(0),
    };
    stage.measure("one position", &note).await;
    let (prev, last) = (Offset { ms: 1, seq: 0 }, Offset { ms: 1, seq: 9 });
    stage
        .measure(
            "an idle shard",
            &Advance { keys, spans: vec![Span { log: "events", prev, last }] },
        )
        .await;
    stage
        .measure("10 entries", &Trim { stream: "events", keep: Offset { ms: u64::MAX, seq: 0 } })
        .await;
    let recover = Recover { keys, run: "a run id of a server", slice_us: SLICE_US };
    stage.measure("a known run", &recover).await;
}

/// The copy from the bus into the queues.
pub(super) async fn copies<M: Meter>(stage: &mut Stage<M>) {
    let (one, ten) = (&some(1), &some(10));
    stage.clear("p").await;
    let keys = &stage.keys.clone();
    let copy = stage.copy(keys, one, 1, LIMITS);
    stage.measure("one bot, one event", &copy).await;
    stage.measure("copied before", &copy).await;
    let copy = stage.copy(keys, one, 1, LIMITS);
    stage.measure("one ready bot, one event", &copy).await;
    stage.clear("p").await;
    let copy = stage.copy(keys, one, 32, LIMITS);
    stage.measure("one bot, 32 events, whose bytes are counted", &copy).await;
    for (situation, limits) in [
        ("10 bots, 10 events each", LIMITS),
        ("10 bots, 10 events each, with max_queue", Limits { max_queue: 100, ..LIMITS }),
        ("10 bots, 10 events each, with linger", Limits { linger_ms: 1_000, ..LIMITS }),
        ("10 bots, 10 events each, 5 of them dead letters", Limits { max_queue: 5, ..LIMITS }),
    ] {
        stage.clear("p").await;
        let copy = stage.copy(keys, ten, 10, limits);
        stage.measure(situation, &copy).await;
    }
    let take = Take { max: 16, ttl_ms: 60_000, seen: 0 };
    for (situation, bots) in [("one bot, one event, leased", one), ("10 bots, leased", ten)] {
        stage.clear("p").await;
        let copy = Enqueue { take, ..stage.copy(keys, bots, 1, LIMITS) };
        stage.measure(situation, &copy).await;
    }
    // The bots are leased: nobody is added to the control set.
    stage.leases(10, 1).await;
    let copy = stage.copy(keys, ten, 10, LIMITS);
    stage.measure("10 leased bots, 10 events each", &copy).await;
}

/// Events that do not come from the bus.
pub(super) async fn pushes<M: Meter>(stage: &mut Stage<M>) {
    stage.clear("p").await;
    let keys = &stage.keys.clone();
    let bot = &bot("bot-0");
    let (one, ten) = (&[EVENT.to_vec()][..], &vec![EVENT.to_vec(); 10][..]);
    let push = Push { keys, limits: LIMITS, bot, events: one, due_ms: 0, idempotency: None };
    stage.measure("one event", &push).await;
    stage.clear("p").await;
    stage.measure("10 events", &Push { events: ten, ..push }).await;
    stage.clear("p").await;
    let push = Push { idempotency: Some(("key", 60_000)), ..push };
    stage.measure("one event with a key", &push).await;
    stage.measure("one event with a known key", &push).await;
    stage.clear("p").await;
    let push = Push { due_ms: i64::MAX >> 11, idempotency: None, ..push };
    stage.measure("one delayed event", &push).await;
}

/// The claims of workers, and their reads.
pub(super) async fn claims<M: Meter>(stage: &mut Stage<M>) {
    stage.clear("p").await;
    let keys = &stage.keys.clone();
    let claim = claim_all(keys);
    stage.measure("nobody is ready", &claim).await;
    for (situation, bots) in [("one bot", 1), ("10 bots", 10), ("64 of 100 bots", 100)] {
        stage.clear("p").await;
        stage.fill(&some(bots), 1).await;
        stage.measure(situation, &claim).await;
    }
    stage.clear("p").await;
    stage.fill(&some(10), 1).await;
    let () = stage.plain.hset(&keys.weight, "bot-3", 3).unwrap();
    stage.measure("10 bots, one with a weight", &claim).await;

    stage.clear("p").await;
    stage.fill(&some(10), 1).await;
    stage.claim_expiring(0).await;
    stage.measure("10 bots, after 10 expired leases", &claim).await;

    let claimed = stage.leases(10, 1).await;
    stage.end("park, 10 bots", &claimed, 0, Mode::Park { ms: 0 }).await;
    stage.measure("10 bots, after 10 ended parks", &claim).await;

    stage.clear("p").await;
    stage.fill(&some(10), 10).await;
    let slice = ReadSlice { keys, bot: &bot("bot-0"), limit: 10, bytes: 1 << 20 };
    stage.measure("10 events", &slice).await;
    let bots = some(10);
    let lists: Vec<_> = bots.iter().map(|bot| (bot, None)).collect();
    stage.measure("10 queues", &Heads { keys, lists: &lists, bytes: 1 << 20 }).await;
}

/// Completions of slices whose events are done.
pub(super) async fn completions<M: Meter>(stage: &mut Stage<M>) {
    let keep = Mode::Keep { ttl_ms: TTL_MS };
    let hand = Mode::Hand { ttl_ms: TTL_MS, max: 100 };
    for (situation, bots, events, n, mode) in [
        ("release, one bot, its last event", 1, 1, 1, Mode::Release),
        ("release, one bot, events left", 1, 10, 1, Mode::Release),
        ("release, 10 bots, their last 10 events", 10, 10, 10, Mode::Release),
        ("release, 10 bots, events left", 10, 10, 1, Mode::Release),
        ("release, one bot, 10 of 32 events, whose bytes are counted", 1, 32, 10, Mode::Release),
        ("keep, one bot, renewed", 1, 10, 0, keep),
        ("keep, one bot, events left", 1, 10, 1, keep),
        ("keep, 10 bots, renewed", 10, 10, 0, keep),
        ("hand, one bot", 1, 10, 0, hand),
        ("hand, 10 bots", 10, 10, 0, hand),
    ] {
        let claimed = stage.leases(bots, events).await;
        stage.end(situation, &claimed, n, mode).await;
        if situation == "hand, one bot" {
            stage.end("release, one bot, that was handed over", &claimed, 10, Mode::Release).await;
            // A claim that finds nothing anywhere may forget all finishes.
            let keys = &stage.keys.clone();
            let claim = Claim { alone: true, ..claim_all(keys) };
            stage.measure("nobody is ready anywhere", &claim).await;
        }
    }
}

/// Completions of slices with failures.
pub(super) async fn failures<M: Meter>(stage: &mut Stage<M>) {
    let fail = Mode::Fail { ms: 0, isolate: 4 };
    for (situation, bots, n, mode) in [
        ("park, one bot", 1, 0, Mode::Park { ms: 1_000 }),
        ("fail, one bot", 1, 0, fail),
        ("fail, one bot, after one event", 1, 1, fail),
        ("fail, 10 bots", 10, 0, fail),
    ] {
        let claimed = stage.leases(bots, 10).await;
        stage.end(situation, &claimed, n, mode).await;
    }
    let keys = &stage.keys.clone();
    let claimed = stage.measure("10 bots, that failed", &claim_all(keys)).await;
    stage.end("release, 10 bots, that failed before", &claimed, 1, Mode::Release).await;

    for (situation, bots) in
        [("release, one bot, one dead letter", 1), ("release, 10 bots, a dead letter each", 10)]
    {
        let claimed = stage.leases(bots, 10).await;
        let item =
            |at| Completion { exceptions: vec![dead(0)], ..ended(&claimed, at, 1, Mode::Release) };
        let items: Vec<Completion> = (0..bots).map(item).collect();
        stage.complete(situation, &items).await;
    }
    let letters: StreamRangeReply = stage.plain.xrange_count(&keys.dlq, "-", "+", 1).unwrap();
    let id: Offset = letters.ids[0].id.parse().unwrap();
    let redrive = Redrive { keys, id, bot: &bot("bot-0"), slice_us: SLICE_US, renews: false };
    assert!(stage.measure("one dead letter", &redrive).await);
}

/// Events of the bus that are put into a queue again.
pub(super) async fn replays<M: Meter>(stage: &mut Stage<M>) {
    stage.clear("p").await;
    let keys = &stage.keys.clone();
    let events: Vec<(Offset, Vec<u8>)> =
        (1..=10).map(|seq| (Offset { ms: 1, seq }, EVENT.to_vec())).collect();
    let (limits, bot) = (Limits { max_queue: 15, ..LIMITS }, &bot("bot-0"));
    let of = |id, events| Replay { keys, limits, id, keep_ms: 60_000, stream: 0, bot, events };
    stage.measure("one event", &of("one", &events[..1])).await;
    stage.measure("10 events", &of("ten", &events)).await;
    stage.measure("10 events that were put before", &of("ten", &events)).await;
    let refused = stage.measure("10 events, 4 of which fit", &of("full", &events)).await;
    assert_eq!((refused.put, refused.earlier), (4, 0));
}

/// Delayed events.
pub(super) async fn delays<M: Meter>(stage: &mut Stage<M>) {
    let keys = &stage.keys.clone();
    let claimed = stage.leases(1, 10).await;
    let later = Exception { index: 0, fate: Fate::Later { at_ms: 1 } };
    let item = Completion { exceptions: vec![later], ..ended(&claimed, 0, 1, Mode::Release) };
    stage.complete("release, one bot, one event delayed", &[item]).await;

    for (situation, count) in [("one event", 1), ("10 events of 10 bots", 10)] {
        stage.clear("p").await;
        let bots = some(count);
        let mut events: Vec<(String, BotId)> = Vec::new();
        for bot in &bots {
            let event = &[EVENT.to_vec()];
            let push =
                Push { keys, limits: LIMITS, bot, events: event, due_ms: 1, idempotency: None };
            let pushed = stage.call(&push).await;
            events.push((pushed.sequence.to_string(), bot.clone()));
        }
        let find = FindDue { keys, most: 100, bytes: 1 << 20 };
        assert_eq!(stage.measure(situation, &find).await.events, events);
        let promote = Promote { keys, slice_us: SLICE_US, events: &events };
        let promoted = stage.measure(situation, &promote).await;
        assert_eq!(promoted.moved, count as u64, "{situation}");
    }
}
