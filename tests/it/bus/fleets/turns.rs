//! A pipeline that starts with old events is read in turns with the others.

use std::time::Duration;

use redis::AsyncCommands as _;

use super::{Bus, LONG, NatsOptions};
use crate::support::bus::event;
use crate::support::config::configs;
use crate::support::instance::Instance;
use crate::support::nats::NatsServer;
use crate::support::proxy::distance::Distance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const OLD: u32 = 100_000;

/// How many events the pipeline has in its queues.
async fn queued(server: &RedisServer) -> u64 {
    let mut connection = server.connection().await;
    let keys: Vec<String> = connection.keys("*{turns-old:*}:meta").await.unwrap();
    let mut sum = 0;
    for key in keys {
        sum += connection.hget::<_, _, Option<u64>>(key, "depth").await.unwrap().unwrap_or(0);
    }
    sum
}

/// Puts events on the bus, in order, of one bot in fifty each.
async fn add(bus: &Bus, ids: std::ops::Range<u32>) {
    let bots: Vec<_> = ids.clone().map(|id| format!("b-{}", id % 50)).collect();
    let texts: Vec<_> = ids.zip(&bots).map(|(id, bot)| event(bot, "test", id)).collect();
    bus.add(&bots, &texts).await;
}

async fn takes_turns(bus: Bus) {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    // The copies to a server far away take seconds.
    let distance = Distance::start(server.tcp_addr()).await;
    let log = Log::default();
    for part in (0..OLD).step_by(2_500) {
        add(&bus, part..part + 2_500).await;
    }
    distance.set(Duration::from_millis(150));
    let (url, sources) = (format!("{:?}", distance.url()), bus.sources());
    let settings = [
        ("redis.url", &*url),
        ("bus.streams", "[]"),
        ("bus.sources", &sources),
        ("pipelines.turns-new.start", "\"new\""),
    ];
    let config = configs(&server, &["turns-old", "turns-new"], &settings);
    let instance = Instance::start(&config, log.content()).await;
    for id in OLD..OLD + 3 {
        add(&bus, id..id + 1).await;
        eventually(LONG, "the new event is handled", async || {
            log.count("turns-new") == (id - OLD + 1) as usize
        })
        .await;
        if id > OLD {
            continue; // All old ones may be copied by then.
        }
        // Otherwise it could have been behind the old ones. Some are handled meanwhile.
        let handled = log.count("turns-old") as u64;
        let copied = handled + queued(&server).await;
        assert!(copied < u64::from(OLD) * 3 / 4, "{copied} old events are copied before {id}");
    }
    distance.set(Duration::ZERO);
    let all = (OLD + 3) as usize;
    eventually(2 * LONG, "all are handled", async || log.count("turns-old") >= all).await;
    let mut of_bot = log.ids("turns-old");
    of_bot.retain(|id| id.parse::<u32>().is_ok_and(|id| id < OLD && id % 50 == 7));
    let in_order = (7..OLD).step_by(50).map(|id| id.to_string());
    assert!(of_bot.into_iter().eq(in_order), "in order, and each once");
    assert_eq!(log.count("turns-old"), all);
    assert_eq!(log.count("turns-new"), 3);
    instance.stop().await;
}

#[tokio::test]
async fn a_pipeline_that_starts_with_old_events_of_nats_does_not_keep_the_others_waiting() {
    // A file that is written for each of so many messages would take minutes.
    let server = NatsServer::start(NatsOptions::default());
    server.jetstream().await.create_stream(Bus::stream()).await.unwrap();
    takes_turns(Bus::Nats(server)).await;
}

#[tokio::test]
async fn a_pipeline_that_starts_with_old_events_of_kafka_does_not_keep_the_others_waiting() {
    takes_turns(Bus::kafka(4).await).await;
}
