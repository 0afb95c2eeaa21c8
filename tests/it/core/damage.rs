//! Damage in one place of Redis, or a full Redis that refuses writes, hides no other information.

use std::sync::Arc;
use std::time::Duration;

use fairlane::event::Event;
use fairlane::id::{BotId, ShardCount};
use fairlane::queue::{Depth, PushOptions, Queue};
use redis::AsyncCommands as _;
use tokio::sync::Semaphore;

use crate::support::bus::{add, event};
use crate::support::cli::run_in;
use crate::support::config::{SHARDS, STREAM, configs};
use crate::support::http::{Client, get, metric};
use crate::support::instance::{Instance, queue};
use crate::support::push::Push;
use crate::support::receiver::Reply;
use crate::support::recorder::Log;
use crate::support::redis::{Options, Persistence, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);

async fn gauge(instance: &Instance, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    let text = get(&instance.address.to_string(), "/metrics").await.1;
    metric(&text, &format!("fairlane_{name}"), labels)
}

async fn push(queue: &Queue, bot: &str) {
    let bot = BotId::parse(bot).unwrap();
    let event = Event::builder("test", &bot).build().unwrap();
    queue.push(&bot, &[event], PushOptions::default()).await.unwrap();
}

#[tokio::test]
async fn a_wrong_depth_hides_no_pipeline_and_the_audit_sets_it_right() {
    let server = RedisServer::start(Options::default());
    let text = configs(&server, &["bad-depth", "good-depth"], &[("redis.shards", "4")]);
    let text = text.replace("\"recorder\"", "\"log\"");
    let instance = Instance::start(&text, Log::default().content()).await;
    let mut connection = server.connection().await;
    for name in ["bad-depth", "good-depth"] {
        instance.queue(name).pause(None).await.unwrap();
        for bot in 0..20 {
            push(instance.queue(name), &format!("b-{bot}")).await;
        }
    }
    // Three bad depths: -1, one too high, and not a number. The dead letters have the wrong key
    // type.
    let meta = |shard: u16| format!("fl:{{bad-depth:{shard}}}:meta");
    let () = connection.hset(meta(0), "depth", -1).await.unwrap();
    let () = connection.hincr(meta(1), "depth", 1).await.unwrap();
    let () = connection.hset(meta(2), "depth", "many").await.unwrap();
    let () = connection.set("fl:{bad-depth:3}:dlq", "no stream").await.unwrap();

    let client = instance.client();
    let listed = client.get("/v1/pipelines").await;
    assert_eq!(listed.code, 200, "{listed:?}");
    let good = client.get("/v1/pipelines/good-depth").await.json();
    assert_eq!(good["depth"], 20);
    assert!(client.get("/v1/pipelines/bad-depth").await.json()["depth"].as_u64().is_some());
    eventually(LONG, "the others are sampled", async || {
        gauge(&instance, "queue_depth", &[("pipeline", "good-depth")]).await == Some(20.0)
    })
    .await;
    assert_eq!(gauge(&instance, "redis_up", &[]).await, Some(1.0));

    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("fairlane.toml"), &text).unwrap();
    let status = run_in(place.path(), &["status", "--json"], "");
    assert_eq!(status.code, 0, "{status:?}");
    let () = connection.del("fl:{bad-depth:3}:dlq").await.unwrap();
    let audit = |expected: &str| {
        let ran = run_in(place.path(), &["check", "--audit"], "");
        let all = format!("{}{}", ran.out, ran.err);
        let words = all.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(expected), "{expected}: {all}");
    };
    audit("set right: bad-depth:0 was -1, is ");
    audit("all are right");
    let bad = client.get("/v1/pipelines/bad-depth").await.json();
    assert_eq!(bad["depth"], 20);
    for name in ["bad-depth", "good-depth"] {
        instance.queue(name).resume(None).await.unwrap();
        eventually(LONG, "all is handled", async || {
            instance.queue(name).view(Duration::ZERO).await.unwrap().depth == 0
        })
        .await;
    }
    instance.stop().await;
}

#[tokio::test]
async fn a_depth_is_set_right_beside_traffic() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let text = configs(&server, &["busy-depth"], &[("redis.shards", "2")]);
    let instance = Instance::start(&text, log.content()).await;
    let queue = instance.queue("busy-depth");
    let mut connection = server.connection().await;
    let mut set_right = 0;
    for round in 0..20 {
        let events: Vec<String> = (0..500)
            .map(|id| event(&format!("b-{}", id % 100), "test", format!("{round}-{id}")))
            .collect();
        add(&server, STREAM, &events).await;
        for shard in queue.shard_count().shards() {
            let () = connection.hincr(queue.keys(shard).meta(), "depth", 7).await.unwrap();
            // New bots may join at any time. Then the comparison must be repeated.
            eventually(LONG, "it is compared", async || {
                match queue.reconcile_depth(shard).await.unwrap() {
                    Depth::SetRight { before, depth } => {
                        assert_eq!(before, (depth + 7).to_string());
                        set_right += 1;
                        true
                    }
                    Depth::Right => panic!("it was wrong by 7"),
                    Depth::NotCompared => false,
                }
            })
            .await;
        }
    }
    assert_eq!(set_right, 40);
    eventually(LONG, "all is handled", async || log.len() == 10_000).await;
    eventually(LONG, "and counted so", async || {
        queue.view(Duration::ZERO).await.unwrap().depth == 0
    })
    .await;
    for shard in queue.shard_count().shards() {
        assert_eq!(queue.reconcile_depth(shard).await.unwrap(), Depth::Right);
    }
    instance.stop().await;
}

type Redis = redis::aio::MultiplexedConnection;

/// The depth of a one-shard pipeline as Redis stores it, and the number of events in its queues.
async fn counted(redis: &mut Redis, name: &str) -> (i64, i64) {
    let depth: Option<i64> = redis.hget(format!("fl:{{{name}:0}}:meta"), "depth").await.unwrap();
    let queues: Vec<String> = redis.keys(format!("fl:{{{name}:0}}:q:*")).await.unwrap();
    let mut events = 0;
    for queue in queues {
        events += redis.llen::<_, i64>(queue).await.unwrap();
    }
    (depth.unwrap_or_default(), events)
}

/// Queues the events of four bots, while Redis loses power within a transaction and is restarted
/// twice. `rewritten` says whether the append-only file is rewritten between the two restarts.
/// Returns what [`counted`] returns at the end.
async fn lose_power(
    server: &mut RedisServer,
    config: &str,
    name: &str,
    cut_after: &str,
    rewritten: bool,
) -> (i64, i64) {
    let damaged = queue(config, name).await;
    damaged.pause(None).await.unwrap();
    for bot in ["a", "b", "c"] {
        push(&damaged, bot).await;
    }
    if cut_after == "RPUSH" {
        push(&damaged, "late").await;
    } else {
        assert_eq!(damaged.purge(&BotId::parse("a").unwrap()).await.unwrap(), 1);
    }
    server.kill9();
    server.cut_transaction_after(cut_after);
    server.restart();
    let mut redis = server.connection().await;
    assert_eq!(counted(&mut redis, name).await, (3, 3), "nothing of the transaction is there");
    if rewritten {
        let () = redis::cmd("BGREWRITEAOF").query_async(&mut redis).await.unwrap();
        eventually(LONG, "the file is rewritten", async || {
            let mut info = redis::cmd("INFO");
            let info: String = info.arg("persistence").query_async(&mut redis).await.unwrap();
            ["aof_rewrites:1\r", "aof_rewrite_in_progress:0\r", "aof_last_bgrewrite_status:ok\r"]
                .iter()
                .all(|line| info.contains(line))
        })
        .await;
    }
    // A client that got no answer tries again.
    push(&queue(config, name).await, "late").await;
    assert_eq!(counted(&mut redis, name).await, (4, 4));
    server.restart();
    counted(&mut server.connection().await, name).await
}

#[tokio::test]
async fn a_depth_that_a_cut_transaction_left_wrong_hides_no_pipeline_and_the_audit_sets_it_right() {
    for (name, beside, cut_after, error) in
        [("cut-low", "beside-low", "RPUSH", -1), ("cut-high", "beside-high", "UNLINK", 1)]
    {
        let persistence = Persistence::Always;
        let mut server = RedisServer::start(Options { persistence, ..Options::default() });
        let text = configs(&server, &[name, beside], &[("redis.shards", "1")]);
        let other = queue(&text, beside).await;
        other.pause(None).await.unwrap();
        push(&other, "x").await;
        push(&other, "y").await;
        let (depth, events) = lose_power(&mut server, &text, name, cut_after, false).await;
        assert_eq!(depth - events, error, "{depth}, {events}");

        let log = Log::default();
        let instance = Instance::start(&text, log.content()).await;
        instance.queue(name).resume(None).await.unwrap();
        let mut redis = server.connection().await;
        eventually(LONG, "all is handled", async || counted(&mut redis, name).await == (error, 0))
            .await;
        let client = instance.client();
        let listed = client.get("/v1/pipelines").await;
        assert_eq!(listed.code, 200, "{listed:?}");
        let depth = async |name: &str| {
            client.get(&format!("/v1/pipelines/{name}")).await.json()["depth"].as_i64()
        };
        assert_eq!((depth(name).await, depth(beside).await), (Some(error.max(0)), Some(2)));
        eventually(LONG, "both are sampled", async || {
            let sampled =
                async |name: &str| gauge(&instance, "queue_depth", &[("pipeline", name)]).await;
            let expected = if error > 0 { 1.0 } else { 0.0 };
            (sampled(name).await, sampled(beside).await) == (Some(expected), Some(2.0))
                && gauge(&instance, "redis_up", &[]).await == Some(1.0)
        })
        .await;

        let place = tempfile::tempdir().unwrap();
        let operator = text.replace("\"recorder\"", "\"log\"");
        std::fs::write(place.path().join("fairlane.toml"), &operator).unwrap();
        let status = run_in(place.path(), &["status", "--json"], "");
        assert_eq!(status.code, 0, "{status:?}");
        for expected in [&*format!("set right: {name}:0 was {error}, is 0"), "all are right"] {
            let ran = run_in(place.path(), &["check", "--audit"], "");
            let all = format!("{}{}", ran.out, ran.err);
            let words = all.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(words.contains(expected), "{expected}: {all}");
        }
        assert_eq!(depth(name).await, Some(0));
        let handled = log.len();
        push(instance.queue(name), "late").await;
        eventually(LONG, "what comes is handled", async || log.len() == handled + 1).await;
        eventually(LONG, "and counted so", async || counted(&mut redis, name).await == (0, 0))
            .await;
        instance.stop().await;
    }
}

#[tokio::test]
async fn a_file_that_is_rewritten_after_the_cut_leaves_the_depth_right() {
    for (name, cut_after) in [("new-low", "RPUSH"), ("new-high", "UNLINK")] {
        let persistence = Persistence::Always;
        let mut server = RedisServer::start(Options { persistence, ..Options::default() });
        let text = configs(&server, &[name], &[("redis.shards", "1")]);
        assert_eq!(lose_power(&mut server, &text, name, cut_after, true).await, (4, 4));
    }
}

/// Writes until Redis refuses a write.
async fn fill(connection: &mut redis::aio::MultiplexedConnection, round: u32) {
    for bytes in [64 << 10, 1 << 10, 16] {
        for number in 0.. {
            let key = format!("junk:{round}:{bytes}:{number}");
            let set = connection.set::<_, _, ()>(key, vec![0_u8; bytes]).await;
            if let Err(refused) = set {
                assert!(refused.to_string().contains("OOM"), "{refused}");
                break;
            }
        }
    }
}

#[tokio::test]
async fn a_full_redis_is_up_and_its_memory_is_told() {
    const MAX: u64 = 16 << 20;
    let server = RedisServer::start(Options { max_memory: MAX, ..Options::default() });
    let text = configs(&server, &["full-memory"], &[]);
    let instance = Instance::start(&text, Log::default().content()).await;
    // An event waits, so the instance looks at Redis every two seconds.
    instance.queue("full-memory").pause(None).await.unwrap();
    push(instance.queue("full-memory"), "b").await;
    let share = async || {
        let used = gauge(&instance, "redis_memory_bytes", &[("kind", "used")]).await;
        used.map(|used| used / f64::from(u32::try_from(MAX).unwrap()))
    };
    eventually(LONG, "it is sampled", async || {
        share().await.is_some_and(|share| share > 0.0)
            && gauge(&instance, "redis_up", &[]).await == Some(1.0)
    })
    .await;
    let mut connection = server.connection().await;
    // The alerts see that Redis is up and full.
    let mut round = 0;
    eventually(LONG, "it is seen to be full", async || {
        // Redis frees some of its own memory later, such as large read buffers of clients.
        fill(&mut connection, round).await;
        round += 1;
        share().await.is_some_and(|share| share > 0.99)
            && gauge(&instance, "redis_up", &[]).await == Some(1.0)
    })
    .await;
    // The gauge also shows when there is space again.
    let () = redis::cmd("CONFIG")
        .arg(&["SET", "maxmemory", &(4 * MAX).to_string()])
        .query_async(&mut connection)
        .await
        .unwrap();
    eventually(LONG, "there is room", async || {
        gauge(&instance, "redis_memory_bytes", &[("kind", "max")]).await
            == Some(f64::from(u32::try_from(4 * MAX).unwrap()))
    })
    .await;
    instance.stop().await;
}

#[tokio::test]
async fn a_completion_that_redis_refuses_is_sent_again_and_its_event_is_handled_once() {
    let gate = Arc::new(Semaphore::new(0));
    let shut = Arc::clone(&gate);
    // Far longer than the test waits.
    let settings = [("pipelines.test.lease_ttl", "\"5m\"")];
    let push = Push::new(&settings, move |_| {
        let shut = Arc::clone(&shut);
        async move {
            drop(shut.acquire().await);
            Reply::new(200, "")
        }
    })
    .await;
    push.publish("a", 0..1).await;
    let served = push.serve().await;
    eventually(LONG, "the event is handled", async || push.receiver.called() == 1).await;
    let shard = BotId::parse("a").unwrap().shard(ShardCount::new(SHARDS).unwrap());
    let (own, aside) = (format!("fl:{{test:{shard}}}:own"), format!("fl:{{test:{shard}}}:aside"));
    let mut connection = push.server.connection().await;
    let () = connection.rename(&own, &aside).await.unwrap();
    let () = connection.set(&own, "no hash").await.unwrap();
    gate.add_permits(1);
    eventually(LONG, "Redis refuses", async || served.log().contains("completions failed")).await;
    let () = connection.rename(&aside, &own).await.unwrap();
    let client = Client::new(&served.http());
    let depth = async || client.get("/v1/pipelines/test").await.json()["depth"].clone();
    eventually(LONG, "the event is completed", async || depth().await == 0).await;
    assert_eq!(push.receiver.called(), 1);
}

#[tokio::test]
async fn an_event_that_cannot_be_read_becomes_a_dead_letter_and_the_others_of_its_bot_are_handled()
{
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let text = configs(&server, &["damaged"], &[("redis.shards", "4")]);
    let instance = Instance::start(&text, log.content()).await;
    let queue = instance.queue("damaged");
    queue.pause(None).await.unwrap();
    for _ in 0..3 {
        push(queue, "b").await;
    }
    let mut connection = server.connection().await;
    for shard in 0..4 {
        let key = format!("fl:{{damaged:{shard}}}:q:b");
        let records: Vec<Vec<u8>> = connection.lrange(&key, 0, -1).await.unwrap();
        if let Some(second) = records.get(1) {
            // The version and the sequence stay; what follows is no event.
            let () = connection.lset(&key, 1, [&second[..11], b"\xc1"].concat()).await.unwrap();
        }
    }
    queue.resume(None).await.unwrap();
    eventually(LONG, "all have left the queue", async || {
        queue.view(Duration::ZERO).await.unwrap().depth == 0
    })
    .await;
    assert_eq!(log.len(), 2);
    let dead = queue.dead_of(&BotId::parse("b").unwrap()).await.unwrap();
    assert_eq!((dead.count, dead.newest.len()), (1, 1));
    instance.stop().await;
}
