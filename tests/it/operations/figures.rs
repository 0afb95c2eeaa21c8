//! Metrics count what their descriptions say.

use fairlane::id::{BotId, ShardCount};

use crate::support::config::SHARDS;
use crate::support::http::{Client, get, metric};
use crate::support::notification_rig::Rig;
use crate::support::push::{LONG, Push};
use crate::support::receiver::{Receiver, Reply};
use crate::support::redis::free_port;
use crate::support::served::Served;
use crate::support::wait::eventually;

#[tokio::test]
async fn repetitions_on_the_bus_tokens_of_bots_and_trimmed_entries_are_counted() {
    let settings = [
        ("bus.dedup", "\"10m\""),
        ("bus.retention", "\"1s\""),
        ("pipelines.test.rate", "\"1000/s\""),
    ];
    let push = Push::new(&settings, async |_| Reply::new(200, "")).await;
    let served = push.serve().await;
    for bot in ["a", "b"] {
        push.publish(bot, 0..5).await;
        push.publish(bot, 3..6).await;
    }
    let is_counted = async || {
        let (_, text) = get(&served.metrics(), "/metrics").await;
        let counted = |name, labels| metric(&text, name, labels);
        let pipeline: &[(&str, &str)] = &[("pipeline", "test")];
        counted("fairlane_fanout_repeated_total", pipeline) == Some(4.0)
            && counted("fairlane_rate_tokens_total", pipeline) == Some(12.0)
            // Those at the positions of idle shards stay for a while.
            && counted("fairlane_bus_trimmed_total", &[]) >= Some(8.0)
    };
    eventually(LONG, "all of them are counted", is_counted).await;
}

#[tokio::test]
async fn notifications_and_open_breakers_are_counted_by_type_outcome_and_host() {
    let rig = Rig::new(&[]);
    let served = Served::start(&rig.config).await;
    let client = Client::new(&served.http());
    let receiver = Receiver::content().await;
    // No server listens there.
    let dead = format!("127.0.0.1:{}", free_port());
    for (count, kind, url) in [(2, "good", receiver.url()), (6, "bad", format!("http://{dead}/"))] {
        for _ in 0..count {
            let path = format!("/send_delayed?bot=shop&delay=0&type={kind}&url={url}");
            assert_eq!(client.get(&path).await.code, 200);
        }
    }
    let are_counted = async || {
        let (_, text) = get(&served.metrics(), "/metrics").await;
        let counted = |kind, outcome| {
            let labels = [("type", kind), ("outcome", outcome)];
            metric(&text, "fairlane_notifications_total", &labels)
        };
        // The breaker opens after five failures, and holds the others back.
        metric(&text, "fairlane_breaker_open", &[("host", &dead)]) == Some(1.0)
            && [counted("good", "received"), counted("good", "sent")] == [Some(2.0); 2]
            && counted("bad", "received") == Some(6.0)
            && counted("bad", "retried") >= Some(5.0)
            && [counted("good", "retried"), counted("bad", "sent")] == [None; 2]
    };
    eventually(LONG, "all of them are counted", are_counted).await;
}

#[tokio::test]
async fn attempts_that_redis_does_not_take_are_counted_and_those_of_other_shards_are_kept() {
    let push = Push::new(&[], async |_| Reply::new(200, "")).await;
    let shards = ShardCount::new(SHARDS).unwrap();
    let (lost, kept) = (BotId::parse("a").unwrap(), BotId::parse("c").unwrap());
    assert_ne!(lost.shard(shards), kept.shard(shards));
    let key = format!("fl:{{test:{}}}:history", lost.shard(shards));
    let mut connection = push.server.connection().await;
    let () =
        redis::cmd("SET").arg(key).arg("no stream").query_async(&mut connection).await.unwrap();
    let served = push.serve().await;
    for bot in [&lost, &kept] {
        push.publish(bot.as_str(), 0..1).await;
    }
    let are_counted = async || {
        let (_, text) = get(&served.metrics(), "/metrics").await;
        metric(&text, "fairlane_history_dropped_total", &[("pipeline", "test")]) == Some(1.0)
    };
    eventually(LONG, "the attempt is counted", are_counted).await;
    let path = format!("/v1/pipelines/test/bots/{kept}/attempts");
    let client = Client::new(&served.http());
    let is_kept =
        async || client.get(&path).await.json()["attempts"].as_array().unwrap().len() == 1;
    eventually(LONG, "the other one is kept", is_kept).await;
}
