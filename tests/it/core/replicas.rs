//! Replicas of Redis: writes that wait for them (`redis.wait_replicas`), and a server that refuses
//! writes without them (`min-replicas-to-write`).

use std::num::NonZeroU8;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fairlane::event::Event;
use fairlane::handler::{Outcomes, Slice};
use fairlane::id::{BotId, PipelineName, ShardCount};
use fairlane::queue::{PushError, PushOptions, Queue};
use fairlane::redis::scripts::Limits;
use fairlane::redis::{Link, RedisError, ReplicaWait, Target};

use super::faults::FEW;
use crate::support::bus::{add, event};
use crate::support::cluster::Cluster;
use crate::support::config::{STREAM, config};
use crate::support::fleet::Fleet;
use crate::support::http;
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::{LEASE_STALL, Stalls, Stopwatch, eventually, tried};

const LONG: Duration = Duration::from_secs(30);
const WAITS: &[(&str, &str)] = &[("redis.wait_replicas", "1"), ("redis.wait_timeout", "\"300ms\"")];
const JSON: &str = "application/cloudevents+json";

fn primary() -> RedisServer {
    RedisServer::start(Options { tcp: true, ..Options::default() })
}

async fn ready(instance: &Instance) {
    let address = instance.address.to_string();
    eventually(LONG, "it is ready", async || http::get(&address, "/readyz").await.0 == 200).await;
}

/// A frozen replica gets what was sent to it once it thaws. So it is killed before that, which a
/// loss of its machine does too.
#[tokio::test]
async fn a_publish_is_acknowledged_only_once_a_replica_has_it() {
    let server = primary();
    let replica = server.replica().await;
    let log = Log::default();
    let instance = Instance::start(&config(&server, "waits", WAITS), log.content()).await;
    let client = instance.client();
    ready(&instance).await;
    let publish = async |id: &str| client.publish(JSON, event("bot", "test", id)).await;
    // On a busy machine, a replica may need longer than the timeout.
    eventually(LONG, "it is acknowledged", async || publish("1").await.code / 100 == 2).await;
    eventually(LONG, "it is handled", async || log.len() > 0).await;

    replica.sigstop();
    let refused = publish("2").await;
    assert_eq!((refused.code, refused.problem().as_str()), (503, "unavailable"), "{refused:?}");
    assert!(refused.header("retry-after").is_some(), "{refused:?}");
    let detail = refused.json()["detail"].as_str().unwrap().to_owned();
    assert!(detail.contains("redis.wait_replicas"), "{detail}");
    let metrics = http::get(&instance.address.to_string(), "/metrics").await.1;
    let unconfirmed = http::metric(&metrics, "fairlane_redis_unconfirmed_total", &[]);
    assert!(unconfirmed > Some(0.0), "{unconfirmed:?}");

    replica.sigcont();
    replica.in_step().await;
    eventually(LONG, "it is acknowledged again", async || publish("3").await.code / 100 == 2).await;
    eventually(LONG, "all are handled in order", async || {
        let ids = log.ids("waits");
        ids.first().is_some_and(|id| id == "1") && ids.contains(&"3".to_owned())
    })
    .await;
    instance.stop().await;
}

/// Without `redis.wait_replicas`, the same failover loses the acknowledged event.
#[tokio::test]
async fn a_failover_loses_no_acknowledged_publish_if_replicas_are_waited_for() {
    for (waits, survives) in [(WAITS, true), (&[][..], false)] {
        let mut server = primary();
        let replica = server.replica().await;
        let log = Log::default();
        let paused = config(&server, "kept", waits);
        let instance = Instance::start(&paused, log.content()).await;
        let client = instance.client();
        ready(&instance).await;
        replica.ask(&["REPLICAOF", "NO", "ONE"]).await;
        let code = client.publish(JSON, event("bot", "test", "1")).await.code;
        server.kill9();
        drop(instance);
        let kept = replica.ask(&["XLEN", "fairlane:events"]).await;
        // The replica lacks it in both cases. Only one of them said that it is safe.
        assert_eq!(kept, "0");
        assert_eq!(code == 503, survives, "{code}");
    }
}

fn queue(server: &RedisServer, wait: Option<ReplicaWait>) -> Queue {
    let target = Target::new(&server.url()).unwrap().with_wait(wait);
    let (name, shards) = (PipelineName::parse("p").unwrap(), ShardCount::new(1).unwrap());
    let keys = shards
        .shards()
        .map(|shard| fairlane::redis::keys::ShardKeys::new(target.prefix(), &name, shard))
        .collect();
    let link = Arc::new(Link::new(target, keys, 1_000, LONG));
    let limits = Limits {
        slice_us: 1_000,
        linger_ms: 0,
        max_queue: 0,
        overflow_dead: true,
        dead_max: 10,
        quota: fairlane::quotas::Quota::NONE,
    };
    Queue::new(name, shards, limits, link)
}

fn one() -> ReplicaWait {
    ReplicaWait { replicas: NonZeroU8::MIN, timeout: Duration::from_millis(300) }
}

/// The second call comes on another connection and finds the event of the first one, so it writes
/// nothing. `WAIT` behind it alone would confirm nothing.
#[tokio::test]
async fn a_repeated_call_that_changes_nothing_is_confirmed_only_once_a_replica_has_the_first_one() {
    let server = primary();
    let replica = server.replica().await;
    let bot = BotId::parse("bot").unwrap();
    let event = Event::builder("test", &bot).id("1").build().unwrap();
    let options = || PushOptions { idempotency: Some(("key", LONG)), ..PushOptions::default() };
    let push =
        async |queue: &Queue| queue.push(&bot, std::slice::from_ref(&event), options()).await;
    let queues = [queue(&server, Some(one())), queue(&server, Some(one()))];
    push(&queue(&server, None)).await.unwrap();
    replica.sigstop();
    for queue in &queues {
        let PushError::Redis(error) = push(queue).await.unwrap_err() else { panic!("refused") };
        assert!(matches!(error, RedisError::Unreplicated { wanted: 1, .. }), "{error}");
        assert!(error.is_passing() && error.may_have_run());
        assert!(error.to_string().contains("0 did within 300ms"), "{error}");
    }
    replica.sigcont();
    eventually(LONG, "it is confirmed", async || push(&queues[0]).await.is_ok()).await;
    let depth = queues[1].view(Duration::ZERO).await.unwrap().depth;
    assert_eq!(depth, 1, "the event is queued once");
}

/// Calls that wait for a confirmation hold up no other call on the same connection.
#[tokio::test]
async fn a_missing_replica_holds_up_no_read() {
    let server = primary();
    let wait = ReplicaWait { timeout: Duration::from_secs(5), ..one() };
    let queue = queue(&server, Some(wait));
    let bot = BotId::parse("bot").unwrap();
    let event = Event::builder("test", &bot).id("1").build().unwrap();
    let push = queue.push(&bot, std::slice::from_ref(&event), PushOptions::default());
    let (watch, started) = (Stopwatch::start(), Instant::now());
    let (pushed, ()) = tokio::join!(push, async {
        eventually(LONG, "it is there", async || {
            queue.view(Duration::ZERO).await.unwrap().depth == 1
        })
        .await;
        watch.within(Duration::from_secs(4), "the read");
    });
    let is_late = matches!(&pushed, Err(PushError::Redis(RedisError::Unreplicated { .. })));
    assert!(is_late, "{pushed:?}");
    assert!(started.elapsed() >= Duration::from_secs(5), "{:?}", started.elapsed());
}

/// Completions of the other bot wait for the replica all the time.
#[tokio::test]
async fn without_a_replica_leases_are_renewed_and_no_handler_is_cancelled() {
    // Longer than a lease.
    const SLOW: Duration = Duration::from_secs(5);
    let server = primary();
    let replica = server.replica().await;
    let own = [
        ("pipelines.renewing.batch", "1"),
        ("pipelines.renewing.max_attempts", "2"),
        ("pipelines.renewing.handler_timeout", "\"10s\""),
    ];
    let (log, ended) = (Log::default(), Arc::new(AtomicUsize::new(0)));
    let ends = Arc::clone(&ended);
    let handler = log.handler(move |slice: Slice| {
        let (slow, ended) = (slice.bot.as_str() != "busy", Arc::clone(&ends));
        async move {
            tokio::time::sleep(if slow { SLOW } else { SLOW / 100 }).await;
            ended.fetch_add(usize::from(slow), Ordering::Relaxed);
            Ok(Outcomes::done())
        }
    });
    let config = config(&server, "renewing", &[WAITS, &own].concat());
    let instance = Instance::start(&config, handler).await;
    let queue = instance.queue("renewing");
    let counted = async |name: &str| {
        let metrics = http::get(&instance.address.to_string(), "/metrics").await.1;
        http::metric(&metrics, name, &[("pipeline", "renewing")]).unwrap_or_default()
    };
    let lost = async || counted("fairlane_leases_lost_total").await;
    let copied = async || counted("fairlane_fanout_copies_total").await;
    // A replica that has just started confirms nothing for a moment.
    ready(&instance).await;
    let client = instance.client();
    let publish = async || client.publish(JSON, event("busy", "test", "first")).await;
    eventually(LONG, "it is acknowledged", async || publish().await.code / 100 == 2).await;
    eventually(LONG, "it is handled", async || log.len() > 0).await;
    let mut n = 0;
    // A slow machine may need several: a lease that was renewed before shows nothing.
    tried(10, async |is_last| {
        n += 1;
        let bot = BotId::parse(&format!("slow-{n}")).unwrap();
        let (ended_before, lost_before) = (ended.load(Ordering::Relaxed), lost().await);
        let copied_before = copied().await;
        let stalls = Stalls::watch();
        let is_slow = || !is_last && stalls.longest() > LEASE_STALL;
        let ids = 100 * n..100 * n + 40;
        let mut events: Vec<String> = ids.map(|id| event("busy", "test", id)).collect();
        events.push(event(bot.as_str(), "test", 0));
        add(&server, STREAM, &events).await;
        let slow = || log.all().into_iter().filter(|seen| seen.bot == bot.as_str()).count();
        eventually(LONG, "it is handled", async || slow() >= 1).await;
        let owners = queue.keys(queue.shard_of(&bot)).owners();
        let is_renewed =
            async || !server.ask(&["HGET", owners, bot.as_str()]).await.ends_with("|0");
        // The lease of a copy that no replica confirmed in time is lost, and the copy is not counted.
        let all_copied = async || copied().await - copied_before > 40.5;
        let over = async || all_copied().await || is_renewed().await;
        eventually(LONG, "all are copied, or it is too late", over).await;
        replica.sigstop();
        let mut shown = all_copied().await && !is_renewed().await;
        if shown {
            let over = async || ended.load(Ordering::Relaxed) > ended_before || is_slow();
            eventually(LONG, "its handler ends", over).await;
        }
        replica.sigcont();
        replica.in_step().await;
        let done = async || queue.view(Duration::ZERO).await.unwrap().depth == 0;
        eventually(LONG, "all are done", done).await;
        shown &= !is_slow();
        if shown {
            assert_eq!(slow(), 1, "once");
            assert!(queue.dead_letters(Some(&bot), 9).await.unwrap().is_empty());
            let lost = lost().await;
            assert!(lost <= lost_before, "{lost}");
        }
        shown
    })
    .await;
    instance.stop().await;
}

#[tokio::test]
async fn replicas_are_waited_for_once_per_round_and_not_per_event_and_only_if_asked() {
    let server = primary();
    let _replica = server.replica().await;
    let mut fleet = Fleet::on(server, 40, &[FEW, WAITS].concat());
    fleet.publish(50).await;
    fleet.start(2).await;
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert_eq!((report.sent, report.lost, report.reordered), (2_000, 0, 0), "{report}");
    let (waits, completions) =
        (fleet.server.calls("wait").await, fleet.server.calls("evalsha").await);
    assert!(waits > 0 && waits < completions, "{waits} waits for {completions} calls");

    let mut without = Fleet::on(primary(), 40, FEW);
    without.publish(10).await;
    without.start(1).await;
    without.drains(LONG).await;
    let info = without.server.ask(&["INFO", "commandstats"]).await;
    assert!(!info.contains("cmdstat_wait:"), "{info}");
}

#[tokio::test]
async fn on_a_cluster_each_primary_waits_for_its_own_replicas() {
    let cluster = Cluster::start(Options::default(), 3, true).await;
    let mut fleet = Fleet::on(cluster, 40, &[FEW, WAITS].concat());
    fleet.publish(50).await;
    fleet.start(2).await;
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert_eq!((report.sent, report.lost, report.reordered), (2_000, 0, 0), "{report}");
    for node in &fleet.server.nodes[..3] {
        assert!(node.calls("wait").await > 0);
    }
}

/// The server refuses all writes for some seconds: claims, copies, completions and trims.
#[tokio::test]
async fn while_redis_has_too_few_replicas_to_write_nothing_is_lost_or_dead_lettered() {
    let mut fleet = Fleet::new(Options::default(), 40, FEW);
    fleet.behaviour.delay = Duration::from_millis(2);
    fleet.publish(200).await;
    fleet.start(2).await;
    fleet.settles(2_000, LONG).await;
    let min = async |server: &RedisServer, number: &str| {
        server.ask(&["CONFIG", "SET", "min-replicas-to-write", number]).await;
    };
    let log = Log::default();
    let other = config(&fleet.server, "other", &[("pipelines.other.start", "\"new\"")]);
    let instance = Instance::start(&other, log.content()).await;
    ready(&instance).await;
    min(&fleet.server, "1").await;
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(4) {
        let refused = instance.client().publish(JSON, event("bot", "test", "1")).await;
        assert_eq!((refused.code, refused.problem().as_str()), (503, "unavailable"), "{refused:?}");
        assert!(refused.header("retry-after").is_some());
    }
    instance.stop().await;
    min(&fleet.server, "0").await;
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert_eq!((report.lost, report.reordered, report.unhandled), (0, 0, 0), "{report}");
    assert_eq!((report.sent, report.given_up), (8_000, 0), "{report}");
}

#[tokio::test]
async fn an_entry_that_is_no_event_is_put_aside_once_although_no_replica_confirms_it() {
    let server = primary();
    let replica = server.replica().await;
    let instance =
        Instance::start(&config(&server, "waits", WAITS), Log::default().content()).await;
    ready(&instance).await;
    replica.sigstop();
    add(&server, STREAM, &["no event".to_owned()]).await;
    let kept = async || {
        let mut connection = server.connection().await;
        let mut command = redis::cmd("XLEN");
        let kept: u64 = command.arg("fairlane:invalid").query_async(&mut connection).await.unwrap();
        kept
    };
    eventually(LONG, "it is put aside", async || kept().await > 0).await;
    let started = Instant::now();
    let is_later = async || started.elapsed() > Duration::from_secs(3);
    eventually(LONG, "it could be read and put aside again", is_later).await;
    assert_eq!(kept().await, 1);
    replica.sigcont();
    instance.stop().await;
}

#[tokio::test]
async fn missing_replicas_are_a_finding_with_a_remedy() {
    let server = primary();
    let settings = [("redis.wait_replicas", "2"), ("redis.wait_timeout", "\"50ms\"")];
    let _replica = server.replica().await;
    let config = config(&server, "few", &settings);
    let instance = Instance::start_unready(&config, Log::default().content()).await;
    let client = instance.client();
    eventually(LONG, "it is found", async || {
        let found = client.get("/v1/problems").await.json();
        found["problems"].as_array().is_some_and(|all| {
            all.iter().any(|one| {
                one["code"] == "replicas-missing"
                    && one["problem"]
                        .as_str()
                        .unwrap()
                        .contains("Redis has 1 replica, and redis.wait_replicas is 2")
            })
        })
    })
    .await;
    let second = server.replica().await;
    eventually(LONG, "it is over", async || {
        !String::from_utf8_lossy(&client.get("/v1/problems").await.body)
            .contains("replicas-missing")
    })
    .await;
    drop(second);
    instance.stop().await;
}
