//! Several processes that read a bus beside Redis: order, exactness and shares under faults.

use std::collections::BTreeMap;
use std::time::Duration;

use async_nats::jetstream::stream;
use rdkafka::config::ClientConfig;
use rdkafka::producer::{FutureProducer, FutureRecord};

use crate::support::bus::Publisher;
use crate::support::fleet::Fleet;
use crate::support::kafka::{Engine, KafkaBroker};
use crate::support::nats::{NatsServer, Options as NatsOptions};
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);
/// Number of bots, and of partitions.
const BOTS: usize = 40;
const PARTITIONS: i32 = 16;

/// A bus with one server.
enum Bus {
    Nats(NatsServer),
    Kafka(KafkaBroker, FutureProducer),
}

impl Bus {
    async fn nats() -> Self {
        let server = NatsServer::start(NatsOptions { sync_always: true, ..NatsOptions::default() });
        let subjects = vec!["events.>".to_owned()];
        let config =
            stream::Config { name: "EVENTS".into(), subjects, ..stream::Config::default() };
        server.jetstream().await.create_stream(config).await.unwrap();
        Self::Nats(server)
    }

    async fn kafka(partitions: i32) -> Self {
        let broker = KafkaBroker::start(Engine::Noida);
        broker.create_topic("events", partitions).await;
        let mut config: ClientConfig = broker.config();
        config.set("partitioner", "murmur2_random").set("enable.idempotence", "true");
        let producer = config.create().unwrap();
        Self::Kafka(broker, producer)
    }

    /// The setting `bus.sources`.
    fn sources(&self) -> String {
        match self {
            Self::Nats(server) => format!(
                "[{{ name = \"n\", kind = \"nats\", servers = [\"{}\"], stream = \"EVENTS\", \
                 publish_subject = \"events.{{bot}}\" }}]",
                server.url()
            ),
            Self::Kafka(broker, _) => format!(
                "[{{ name = \"k\", kind = \"kafka\", brokers = [\"{}\"], topics = [\"events\"], \
                 partition_wait = \"1s\" }}]",
                broker.brokers()
            ),
        }
    }

    /// Processes that read only this bus.
    fn fleet(&self, options: Options) -> Fleet<RedisServer> {
        let sources = self.sources();
        Fleet::new(options, BOTS, &[("bus.streams", "[]"), ("bus.sources", &sources)])
    }

    async fn publish(&self, publisher: &mut Publisher, each: u32) {
        match self {
            Self::Nats(server) => {
                let jetstream = server.jetstream().await;
                let add = async |bots: &[String], texts: &[String]| {
                    let mut acks = Vec::with_capacity(texts.len());
                    for (bot, text) in bots.iter().zip(texts) {
                        let subject = format!("events.{bot}");
                        acks.push(jetstream.publish(subject, text.clone().into()).await.unwrap());
                    }
                    for ack in acks {
                        ack.await.unwrap();
                    }
                };
                publisher.publish_by(each, add).await;
            }
            Self::Kafka(_, producer) => {
                let add = async |bots: &[String], texts: &[String]| {
                    let mut sent = Vec::with_capacity(texts.len());
                    for (bot, text) in bots.iter().zip(texts) {
                        let record = FutureRecord::to("events").key(bot).payload(text);
                        sent.push(producer.send_result(record).unwrap());
                    }
                    for one in sent {
                        one.await.unwrap().unwrap();
                    }
                };
                publisher.publish_by(each, add).await;
            }
        }
    }

    fn sigstop(&self) {
        match self {
            Self::Nats(server) => server.sigstop(),
            Self::Kafka(broker, _) => broker.sigstop(),
        }
    }

    fn sigcont(&self) {
        match self {
            Self::Nats(server) => server.sigcont(),
            Self::Kafka(broker, _) => broker.sigcont(),
        }
    }

    fn restart(&mut self) {
        match self {
            Self::Nats(server) => {
                server.kill9();
                server.restart();
            }
            // This broker saves once a second, so a kill would lose what it acknowledged.
            Self::Kafka(broker, _) => broker.restart(),
        }
    }
}

/// Three processes, of which one after the other is killed while events arrive.
async fn kills(bus: Bus) {
    let mut fleet = bus.fleet(Options::default());
    fleet.start(3).await;
    for round in 0..6 {
        bus.publish(&mut fleet.publisher, 25).await;
        let part = fleet.publisher.total() * 9 / 10;
        fleet.settles(part.min(fleet.publisher.total() - 200), LONG).await;
        fleet.workers[round % 3].kill9();
        fleet.restart(round % 3).await;
    }
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert!(report.is_clean() && report.sent == BOTS * 150, "{report}");
}

#[tokio::test]
async fn events_of_nats_are_in_order_and_complete_while_processes_are_killed() {
    kills(Bus::nats().await).await;
}

#[tokio::test]
async fn events_of_kafka_are_in_order_and_complete_while_processes_are_killed() {
    kills(Bus::kafka(4).await).await;
}

/// The server of the bus is frozen, and started again, while processes read.
async fn outages(mut bus: Bus) {
    let mut fleet = bus.fleet(Options::default());
    fleet.start(2).await;
    for _ in 0..2 {
        bus.publish(&mut fleet.publisher, 20).await;
        bus.sigstop();
        // Longer than the processes wait for an answer.
        tokio::time::sleep(Duration::from_secs(8)).await;
        bus.sigcont();
        bus.publish(&mut fleet.publisher, 20).await;
        fleet.settles(fleet.publisher.total(), LONG).await;
        bus.publish(&mut fleet.publisher, 20).await;
        bus.restart();
        fleet.settles(fleet.publisher.total(), LONG).await;
    }
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert!(report.is_clean() && report.sent == BOTS * 120, "{report}");
}

#[tokio::test]
async fn reading_of_nats_goes_on_after_its_server_was_frozen_and_killed() {
    outages(Bus::nats().await).await;
}

#[tokio::test]
async fn reading_of_kafka_goes_on_after_its_broker_was_frozen_and_stopped() {
    outages(Bus::kafka(4).await).await;
}

/// The number of partitions of each reader.
async fn shares(fleet: &Fleet<RedisServer>) -> Vec<usize> {
    let mut connection = fleet.server.connection().await;
    let fields: BTreeMap<String, String> = redis::cmd("HGETALL")
        .arg("fl:{kafka:k}:readers")
        .query_async(&mut connection)
        .await
        .unwrap();
    let mut shares = BTreeMap::<&str, usize>::new();
    for (field, reader) in &fields {
        if field.starts_with('l') {
            *shares.entry(reader).or_default() += 1;
        }
    }
    let mut shares: Vec<usize> = shares.into_values().collect();
    shares.sort_unstable();
    shares
}

#[tokio::test]
async fn partitions_are_shared_equally_and_move_when_a_process_dies() {
    let bus = Bus::kafka(PARTITIONS).await;
    let mut fleet = bus.fleet(Options::default());
    fleet.start(3).await;
    eventually(LONG, "the shares are equal", async || shares(&fleet).await == [5, 5, 6]).await;
    bus.publish(&mut fleet.publisher, 10).await;
    fleet.drains(LONG).await;
    fleet.workers[1].kill9();
    // The share lasts 1.5 s, and the others ask twice a second.
    let moved = Duration::from_secs(6);
    eventually(moved, "the partitions have moved", async || shares(&fleet).await == [8, 8]).await;
    bus.publish(&mut fleet.publisher, 10).await;
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert!(report.is_clean() && report.sent == BOTS * 20, "{report}");
}
