//! Troubles of buses beside Redis.

use std::time::Instant;

use async_nats::jetstream::stream;

use super::{SAFE, Scene, Trouble};
use crate::support::config::config;
use crate::support::kafka::{Engine, KafkaBroker};
use crate::support::nats::{NatsServer, Options};
use crate::support::redis::RedisServer;

const ALL: &str = "ingest,work,http,schedule";

/// A process that reads this bus beside a Redis stream.
async fn scene(server: &RedisServer, sources: &str) -> Scene {
    let settings = [("bus.sources", sources), ("pipelines.away.handler", "\"log\"")];
    Scene::start(&[(&config(server, "away", &settings), ALL)]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_nats_server_that_is_gone_shows_within_seconds() {
    let server = RedisServer::start(SAFE);
    let mut nats = NatsServer::start(Options::default());
    let subjects = vec!["events.>".to_owned()];
    let stream = stream::Config { name: "EVENTS".into(), subjects, ..stream::Config::default() };
    nats.jetstream().await.create_stream(stream).await.unwrap();
    let sources = format!(
        "[{{ name = \"orders\", kind = \"nats\", servers = [\"{}\"], stream = \"EVENTS\" }}]",
        nats.url()
    );
    let scene = scene(&server, &sources).await;
    let trouble = Trouble {
        name: "NATS is unavailable",
        code: "bus-unavailable",
        words: "nats:orders cannot be read",
        remedy: "fairlane check",
        alert: "FairlaneBusUnavailable",
        ..Trouble::default()
    };
    scene.is_quiet(&trouble).await;
    let began = Instant::now();
    nats.kill9();
    scene.shows(&trouble, began).await;
    nats.restart();
    scene.ends(&trouble).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kafka_broker_that_is_gone_shows_within_seconds() {
    let server = RedisServer::start(SAFE);
    let mut broker = KafkaBroker::start(Engine::Noida);
    broker.create_topic("events", 2).await;
    let sources = format!(
        "[{{ name = \"orders\", kind = \"kafka\", brokers = [\"{}\"], topics = [\"events\"] }}]",
        broker.brokers()
    );
    let scene = scene(&server, &sources).await;
    let trouble = Trouble {
        name: "Kafka is unavailable",
        code: "bus-unavailable",
        words: "kafka:orders cannot be read",
        remedy: "fairlane check",
        alert: "FairlaneBusUnavailable",
        ..Trouble::default()
    };
    scene.is_quiet(&trouble).await;
    // It answers until it has stopped.
    broker.stop();
    let began = Instant::now();
    scene.shows(&trouble, began).await;
    broker.restart();
    scene.ends(&trouble).await;
}
