//! What is confirmed is stored; the errors of publishing say what is stored.

use std::time::Instant;

use fairlane::bus::BusError;
use fairlane::bus::kafka::KafkaSettings;
use fairlane::bus::source::{Outgoing, Source as _};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::Headers as _;
use rdkafka::{Message as _, Offset as KafkaOffset, TopicPartitionList};

use super::rig::{Cluster, LONG, Rig, event, settings};
use crate::support::kafka::{Engine, KafkaBroker, PATIENCE};

#[tokio::test(flavor = "multi_thread")]
async fn an_event_is_a_structured_cloudevent_with_its_bot_as_key() {
    for (name, cluster) in Cluster::all("events", 1).await {
        let rig = cluster.source("events");
        rig.publish(&[("a bot", "0")]).await.unwrap();
        let mut config = rdkafka::ClientConfig::new();
        config.set("bootstrap.servers", cluster.brokers()).set("group.id", "x");
        let consumer: BaseConsumer = config.create().unwrap();
        let mut list = TopicPartitionList::new();
        list.add_partition_offset("events", 0, KafkaOffset::Beginning).unwrap();
        consumer.assign(&list).unwrap();
        let record = consumer.poll(PATIENCE).unwrap().unwrap();
        assert_eq!(record.key(), Some(&b"a bot"[..]), "{name}");
        let headers = record.headers().unwrap();
        assert_eq!(headers.get(0).key, "content-type", "{name}");
        let media = headers.get(0).value.unwrap();
        assert!(media.starts_with(b"application/cloudevents+json"), "{name}");
        assert_eq!(record.payload(), Some(&event("a bot", "0", "")[..]), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_is_too_large_is_refused_and_nothing_is_stored() {
    for (name, cluster) in Cluster::all("events", 1).await {
        let rig = Rig::new(KafkaSettings {
            message_max_bytes: 10_000,
            ..settings(&cluster.brokers(), "events")
        });
        let json = event("bot", "0", &"x".repeat(20_000));
        let large = Outgoing { json: &json, bot: "bot" };
        let error = rig.source.publish(&[large]).await.unwrap_err();
        assert!(matches!(error, BusError::Refused { .. }), "{name}: {error:?}");
        assert!(error.to_string().contains("max.message.bytes"), "{name}: {error}");
        // Those before it are stored.
        let json = event("bot", "1", "");
        let small = Outgoing { json: &json, bot: "bot" };
        let error = rig.source.publish(&[small, large]).await.unwrap_err();
        assert!(matches!(error, BusError::Partly { .. }), "{name}: {error:?}");
        assert_eq!(rig.logs(1).await[0].last.seq, 1, "{name}");
    }
}

/// `cargo test … -- --ignored how_fast` prints it.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn how_fast_events_are_published_and_read() {
    const BATCHES: usize = 200;
    const BATCH: usize = 1_000;
    for engine in [Engine::Noida, Engine::Tansu] {
        let broker = KafkaBroker::start(engine);
        broker.create_topic("events", 4).await;
        let mut rig = Rig::new(settings(&broker.brokers(), "events"));
        let started = Instant::now();
        for batch in 0..BATCHES {
            let bots: Vec<_> = (0..BATCH).map(|at| format!("bot-{}", at % 100)).collect();
            let ids: Vec<_> = (0..BATCH).map(|at| format!("{batch}-{at}")).collect();
            let events: Vec<_> =
                bots.iter().zip(&ids).map(|(bot, id)| (bot.as_str(), id.as_str())).collect();
            rig.publish(&events).await.unwrap();
        }
        let rate = |events: usize, started: Instant| {
            let seconds = started.elapsed().as_secs_f64();
            #[expect(clippy::cast_precision_loss, reason = "a printed rate")]
            let rate = events as f64 / seconds;
            rate.round()
        };
        println!("{engine:?}: {} published/s", rate(BATCHES * BATCH, started));
        rig.open_all(4).await;
        let started = Instant::now();
        let mut read = 0;
        while read < BATCHES * BATCH {
            let fetched = rig.source.fetch(4_096, LONG).await.unwrap();
            read += fetched.len();
        }
        println!("{engine:?}: {} fetched/s", rate(read, started));
        rig.open_all(4).await;
        let started = Instant::now();
        let mut read = 0;
        while read < BATCHES * BATCH {
            let fetched = rig.source.fetch(4_096, LONG).await.unwrap();
            read +=
                fetched.decode().unwrap().iter().map(|batch| batch.entries.len()).sum::<usize>();
        }
        println!("{engine:?}: {} fetched and decoded/s", rate(read, started));
    }
}
