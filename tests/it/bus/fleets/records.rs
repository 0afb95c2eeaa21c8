//! Records of other producers: the official SDK, and hostile ones.

use std::process::Command;

use rdkafka::message::{Header, OwnedHeaders};
use redis::AsyncCommands as _;

use super::*;
use fairlane_testkit::process::installed;

const PRODUCER: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/fixtures/cloudevents_producer.py");

#[tokio::test]
async fn events_that_the_official_sdk_sends_are_handled_in_order() {
    const COUNT: usize = 100;
    for (mut bus, name) in [(Bus::nats().await, "nats"), (Bus::kafka(3).await, "kafka")] {
        let server = RedisServer::start(Options::default());
        let (log, sources) = (Log::default(), bus.sources());
        let settings = [("bus.streams", "[]"), ("bus.sources", &*sources)];
        let instance = Instance::start(&config(&server, "sdk", &settings), log.content()).await;
        let (address, to) = match &bus {
            Bus::Nats(server) => (server.url(), "events.{bot}"),
            Bus::Kafka(broker, _) => (broker.brokers(), "events"),
        };
        let sent = tokio::task::spawn_blocking(move || {
            Command::new(installed("buses/bin/python3"))
                .args([PRODUCER, name, &address, to, &COUNT.to_string()])
                .output()
                .unwrap()
        });
        let sent = sent.await.unwrap();
        assert!(sent.status.success(), "{name}: {}", String::from_utf8_lossy(&sent.stderr));
        eventually(LONG, "all are handled", async || log.len() == COUNT).await;
        for bot in 0..5 {
            let seen = log.all();
            let of_bot = seen.iter().filter(|seen| seen.bot == format!("bot-{bot}"));
            let ids: Vec<usize> = of_bot.map(|seen| seen.id.parse().unwrap()).collect();
            let expected: Vec<usize> = (0..COUNT).filter(|number| number % 5 == bot).collect();
            assert_eq!(ids, expected, "{name}");
        }
        instance.stop().await;
        bus.stop();
    }
}

/// Headers, a value, and a part of the reason for which the record is refused.
type Hostile = (Vec<(&'static str, &'static [u8])>, Vec<u8>, &'static str);

fn hostile() -> Vec<Hostile> {
    let kind = |text: &'static [u8]| ("content-type", text);
    let deep = [vec![b'['; 100_000], vec![b']'; 100_000]].concat();
    vec![
        (vec![], b"no json".to_vec(), ""),
        (vec![], vec![0xff; 1_000], ""),
        (vec![], deep, ""),
        (vec![kind(b"application/cloudevents+avro")], b"{}".to_vec(), "avro"),
        (vec![kind(b"application/cloudevents+json")], b"[]".to_vec(), ""),
        (vec![("ce_specversion", b"1.0"), ("ce_id", b"x")], b"{}".to_vec(), ""),
        (vec![("ce_specversion", b"9.0"), ("ce_id", &[b'x'; 2_000])], b"{}".to_vec(), ""),
    ]
}

#[tokio::test]
async fn hostile_records_are_put_aside_with_their_place_and_the_rest_is_handled() {
    for (mut bus, log_name) in
        [(Bus::nats().await, "nats:n/EVENTS"), (Bus::kafka(1).await, "kafka:k/events/0")]
    {
        let server = RedisServer::start(Options::default());
        let (log, sources) = (Log::default(), bus.sources());
        let settings = [("bus.streams", "[]"), ("bus.sources", &*sources)];
        let instance = Instance::start(&config(&server, "all", &settings), log.content()).await;
        let cases = hostile();
        for (id, (headers, value, _)) in cases.iter().enumerate() {
            match &bus {
                Bus::Nats(server) => {
                    let mut map = async_nats::HeaderMap::new();
                    for (name, value) in headers {
                        let name = name.replace('_', "-");
                        map.insert(name, String::from_utf8_lossy(value).as_ref());
                    }
                    let jetstream = server.jetstream().await;
                    let value = value.clone().into();
                    let sent = jetstream.publish_with_headers("events.b", map, value).await;
                    sent.unwrap().await.unwrap();
                }
                Bus::Kafka(_, producer) => {
                    let mut all = OwnedHeaders::new();
                    for (key, value) in headers {
                        all = all.insert(Header { key, value: Some(*value) });
                    }
                    let record = FutureRecord::to("events").key("b").payload(value).headers(all);
                    producer.send_result(record).unwrap().await.unwrap().unwrap();
                }
            }
            bus.add(&["b".to_owned()], &[event("b", "t", id)]).await;
        }
        eventually(LONG, "the others are handled", async || log.len() == cases.len()).await;
        let expected: Vec<_> = (0..cases.len()).map(|id| id.to_string()).collect();
        assert_eq!(log.ids("all"), expected, "{log_name}");
        let mut connection = server.connection().await;
        let aside: redis::streams::StreamRangeReply =
            connection.xrange_all("fairlane:invalid").await.unwrap();
        assert_eq!(aside.ids.len(), cases.len(), "{log_name}: {aside:?}");
        for ((_, _, part), found) in cases.iter().zip(&aside.ids) {
            assert_eq!(found.get::<String>("stream").unwrap(), log_name);
            let reason: String = found.get("reason").unwrap();
            assert!(reason.contains(part) && !reason.is_empty(), "{log_name}: {reason}");
            assert!(found.get::<Vec<u8>>("entry").unwrap().len() <= 4 * 1_024);
        }
        instance.stop().await;
        bus.stop();
    }
}
