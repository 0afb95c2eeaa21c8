//! Several processes that read a bus beside Redis: order, exactness and shares under faults.

mod alone;
mod losses;
mod paused;
mod records;
mod rules;
mod silent;
mod slow;
mod turns;

use std::collections::BTreeMap;
use std::time::Duration;

use async_nats::jetstream::stream;
use rdkafka::admin::NewPartitions;
use rdkafka::config::ClientConfig;
use rdkafka::producer::{FutureProducer, FutureRecord};

use crate::support::bus::{Publisher, event};
use crate::support::cli::run_in;
use crate::support::config::config;
use crate::support::fleet::Fleet;
use crate::support::instance::Instance;
use crate::support::kafka::{Engine, KafkaBroker, patient};
use crate::support::nats::{NatsServer, Options as NatsOptions};
use crate::support::recorder::Log;
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
        server.jetstream().await.create_stream(Self::stream()).await.unwrap();
        Self::Nats(server)
    }

    fn stream() -> stream::Config {
        let subjects = vec!["events.>".to_owned()];
        stream::Config { name: "EVENTS".into(), subjects, ..stream::Config::default() }
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

    /// Puts events of these bots on the bus, in order.
    async fn add(&self, bots: &[String], texts: &[String]) {
        match self {
            Self::Nats(server) => {
                let jetstream = server.jetstream().await;
                let mut acks = Vec::with_capacity(texts.len());
                for (bot, text) in bots.iter().zip(texts) {
                    let subject = format!("events.{bot}");
                    acks.push(jetstream.publish(subject, text.clone().into()).await.unwrap());
                }
                for ack in acks {
                    ack.await.unwrap();
                }
            }
            Self::Kafka(_, producer) => add_to_kafka(producer, bots, texts).await,
        }
    }

    async fn publish(&self, publisher: &mut Publisher, each: u32) {
        let add = async |bots: &[String], texts: &[String]| self.add(bots, texts).await;
        publisher.publish_by(each, add).await;
    }

    /// Stops the server for good.
    fn stop(&mut self) {
        match self {
            Self::Nats(server) => server.kill9(),
            Self::Kafka(broker, _) => broker.stop(),
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

async fn add_to_kafka(producer: &FutureProducer, bots: &[String], texts: &[String]) {
    let mut sent = Vec::with_capacity(texts.len());
    for (bot, text) in bots.iter().zip(texts) {
        let record = FutureRecord::to("events").key(bot).payload(text);
        sent.push(producer.send_result(record).unwrap());
    }
    for one in sent {
        one.await.unwrap().unwrap();
    }
}

async fn publish_to_kafka(producer: &FutureProducer, publisher: &mut Publisher, each: u32) {
    let add = async |bots: &[String], texts: &[String]| add_to_kafka(producer, bots, texts).await;
    publisher.publish_by(each, add).await;
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

/// Producers learn of the new partitions within a second; the setting says three. More are added while the
/// first one waits.
#[tokio::test]
async fn partitions_that_are_added_under_load_keep_the_order_of_each_bot() {
    let bus = Bus::kafka(2).await;
    let Bus::Kafka(broker, _) = &bus else { unreachable!() };
    let mut config: ClientConfig = broker.config();
    config.set("partitioner", "murmur2_random").set("enable.idempotence", "true");
    config.set("topic.metadata.refresh.interval.ms", "1000");
    let quick = config.create().unwrap();
    let sources = bus.sources().replace("\"1s\"", "\"3s\"");
    let settings = [("bus.streams", "[]"), ("bus.sources", &*sources)];
    let mut fleet = Fleet::new(Options::default(), BOTS, &settings);
    fleet.start(2).await;
    publish_to_kafka(&quick, &mut fleet.publisher, 10).await;
    fleet.drains(LONG).await;
    for round in 0..20 {
        if let 0 | 8 = round {
            let more = NewPartitions::new("events", if round == 0 { 3 } else { 6 });
            let made = broker.admin().create_partitions([&more], &patient()).await.unwrap();
            made[0].clone().unwrap();
        }
        publish_to_kafka(&quick, &mut fleet.publisher, 5).await;
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert!(report.is_clean() && report.sent == BOTS * 110, "{report}");
    let mut connection = fleet.server.connection().await;
    let states: BTreeMap<String, String> =
        redis::cmd("HGETALL").arg("fl:{kafka:k}:logs").query_async(&mut connection).await.unwrap();
    assert_eq!(states.len(), 6, "{states:?}");
    assert!(states.values().all(|state| state == "\"open\""), "{states:?}");
    // Without new partitions, the test would show nothing.
    let mut asking = redis::cmd("HLEN");
    asking.arg("fl:{kafka:k/events/5}:read");
    let noted: u32 = asking.query_async(&mut connection).await.unwrap();
    assert!(noted > 0, "nothing was read of the last partition");
}

#[tokio::test]
async fn a_repetition_within_the_time_of_deduplication_is_copied_once_on_each_bus() {
    let nats = Bus::nats().await;
    let kafka = Bus::kafka(1).await;
    for bus in [&nats, &kafka] {
        let server = RedisServer::start(Options::default());
        let log = Log::default();
        let sources = bus.sources();
        let settings = [("bus.streams", "[]"), ("bus.sources", &*sources), ("bus.dedup", "\"1h\"")];
        let config = config(&server, "once", &settings);
        let instance = Instance::start(&config, log.content()).await;
        let ids = [0, 1, 1, 2, 0, 3, 2, 4, 4, 4];
        let events: Vec<_> = ids.iter().map(|id| event("b", "t", id)).collect();
        for _ in 0..2 {
            bus.add(&vec!["b".to_owned(); ids.len()], &events).await;
        }
        // Other bots have ids of their own.
        bus.add(&["c".to_owned()], &[event("c", "t", 4)]).await;
        bus.add(&["b".to_owned()], &[event("b", "t", "last")]).await;
        eventually(LONG, "all are handled", async || log.len() == 7).await;
        let of_b: Vec<_> = log.all().into_iter().filter(|seen| seen.bot == "b").collect();
        let of_b: Vec<_> = of_b.iter().map(|seen| seen.id.as_str()).collect();
        assert_eq!(of_b, ["0", "1", "2", "3", "4", "last"]);
        instance.stop().await;
    }
}

#[tokio::test]
async fn events_accepted_over_http_reach_the_bus_and_are_handled() {
    for bus in [Bus::nats().await, Bus::kafka(4).await] {
        let server = RedisServer::start(Options::default());
        let log = Log::default();
        let sources = bus.sources();
        let settings = [("bus.streams", "[]"), ("bus.sources", &*sources)];
        let config = config(&server, "web", &settings);
        let instance = Instance::start(&config, log.content()).await;
        let events: Vec<_> = (0..100).map(|id| event("b", "t", id)).collect();
        let body = format!("[{}]", events.join(","));
        let client = instance.client();
        let answer = client.publish("application/cloudevents-batch+json", &body).await;
        assert_eq!(answer.code, 202, "{answer:?}");
        eventually(LONG, "all are handled", async || log.len() == 100).await;
        assert_eq!(log.ids("web"), (0..100).map(|id| id.to_string()).collect::<Vec<_>>());
        instance.stop().await;
    }
}

#[tokio::test]
async fn operators_list_the_logs_check_the_buses_and_pass_over_entries() {
    for (mut bus, log_name) in
        [(Bus::nats().await, "nats:n/EVENTS"), (Bus::kafka(1).await, "kafka:k/events/0")]
    {
        let server = RedisServer::start(Options::default());
        let (log, sources) = (Log::default(), bus.sources());
        let settings = [("bus.streams", "[]"), ("bus.sources", &*sources)];
        let config = config(&server, "work", &settings);
        let instance = Instance::start(&config, log.content()).await;
        bus.add(&["b".to_owned()], &[event("b", "t", 0)]).await;
        eventually(LONG, "it is handled", async || log.len() == 1).await;
        instance.stop().await;
        bus.add(&vec!["b".to_owned(); 3], &[1, 2, 3].map(|id| event("b", "t", id))).await;
        let directory = tempfile::tempdir().unwrap();
        let written = config.replace("handler = \"recorder\"", "handler = \"log\"");
        std::fs::write(directory.path().join("fairlane.toml"), &written).unwrap();
        let run = |arguments: &[&str]| run_in(directory.path(), arguments, "");
        let listed = run(&["bus", "list", "--json"]);
        let logs: serde_json::Value = serde_json::from_str(&listed.out).unwrap();
        assert_eq!(logs[0]["log"], log_name, "{listed:?}");
        let (copied, last) =
            (logs[0]["copied"].as_str().unwrap(), logs[0]["last"].as_str().unwrap());
        assert_ne!(copied, last);
        let check = run(&["check", "--json"]);
        let found: serde_json::Value = serde_json::from_str(&check.out).unwrap();
        let of_bus = found.as_array().unwrap().iter().find(|finding| {
            finding["check"].as_str().is_some_and(|check| check.starts_with("bus "))
        });
        assert_eq!(of_bus.unwrap()["state"], "ok", "{check:?}");
        let refused = run(&["bus", "skip", log_name, "--to", last]);
        assert!(refused.code == 64 && refused.err.contains("--yes"), "{refused:?}");
        let next = last.split_once('-').map(|(epoch, at)| {
            let at: u64 = at.parse().unwrap();
            format!("{epoch}-{}", at + 1)
        });
        let beyond = run(&["bus", "skip", log_name, "--to", &next.unwrap(), "--yes"]);
        assert!(beyond.code == 64 && beyond.err.contains("ends at"), "{beyond:?}");
        let unknown = run(&["bus", "skip", "none", "--to", last, "--yes"]);
        assert!(unknown.code == 64 && unknown.err.contains("bus list"), "{unknown:?}");
        let skipped = run(&["bus", "skip", log_name, "--to", last, "--yes"]);
        assert!(skipped.code == 0 && skipped.out.contains("passed over"), "{skipped:?}");
        let audit = run(&["audit"]);
        assert!(audit.out.contains("bus.skip") && audit.out.contains(log_name), "{audit:?}");
        let instance = Instance::start(&config, log.content()).await;
        bus.add(&["b".to_owned()], &[event("b", "t", 4)]).await;
        eventually(LONG, "the next is handled", async || log.len() == 2).await;
        assert_eq!(log.ids("work"), ["0", "4"]);
        instance.stop().await;
        bus.stop();
        let away = run(&["check", "--json"]);
        assert!(away.code == 69 && away.out.contains("its events are not copied"), "{away:?}");
    }
}
