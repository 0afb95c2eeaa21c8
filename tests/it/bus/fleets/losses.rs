//! What is lost, made anew or deleted: in Redis, and on the bus.

use rdkafka::producer::Producer as _;
use rdkafka::topic_partition_list::{Offset as KafkaOffset, TopicPartitionList};
use redis::AsyncCommands as _;

use super::*;
use crate::support::http::{get, metric};
use crate::support::interceptor::Interception;
use crate::support::proxy::{Proxy, holds};
use crate::support::recorder::Seen;
use crate::support::redis::Persistence;

/// Redis rolls back to an earlier moment while the processes run. What it lost is copied from the bus
/// again.
async fn lost_tail(bus: Bus) {
    let sources = bus.sources();
    let settings =
        [("bus.streams", "[]"), ("bus.sources", &*sources), ("pipelines.test.workers.max", "8")];
    // A server that syncs every write loses nothing beside what the test cuts off.
    let durable = Options { persistence: Persistence::Always, ..Options::default() };
    let mut fleet = Fleet::new(durable, BOTS, &settings);
    fleet.start(1).await;
    bus.publish(&mut fleet.publisher, 100).await;
    fleet.drains(LONG).await;
    fleet.workers[0].sigterm();
    assert!(fleet.workers[0].wait_exit(LONG).unwrap().success());
    fleet.workers.clear();

    bus.publish(&mut fleet.publisher, 100).await;
    fleet.behaviour.delay = Duration::from_millis(4);
    fleet.start(2).await;
    fleet.settles(5_000, LONG).await;
    let kept = fleet.server.aof_bytes();
    fleet.settles(6_500, LONG).await;
    fleet.server.kill9();
    let written = fleet.server.aof_bytes();
    assert!(kept < written, "{kept} {written}");
    fleet.server.truncate_aof(written - kept);
    fleet.server.restart();
    fleet.drains(LONG).await;

    let report = fleet.report();
    assert_eq!((report.lost, report.reordered, report.unhandled), (0, 0, 0), "{report}");
    assert_eq!(
        (report.stale_commits, report.sent, report.given_up),
        (0, BOTS * 200, 0),
        "{report}"
    );
    assert!(report.duplicates_unexplained > 0, "no commit was rolled back\n{report}");
}

#[tokio::test]
async fn a_redis_that_lost_its_tail_is_filled_again_from_nats() {
    lost_tail(Bus::nats().await).await;
}

#[tokio::test]
async fn a_redis_that_lost_its_tail_is_filled_again_from_kafka() {
    lost_tail(Bus::kafka(4).await).await;
}

/// Two processes take themselves for the reader of all logs at the same time.
async fn two_readers(bus: Bus, key: &str) {
    let mut fleet = bus.fleet(Options::default());
    fleet.start(3).await;
    let mut connection = fleet.server.connection().await;
    let readers = |fleet: &Fleet| {
        let reads = |line: &String| line.contains("reading the bus");
        fleet.workers.iter().filter(|worker| worker.lines().iter().any(reads)).count()
    };
    let mut rounds = 0;
    while rounds < 20 || readers(&fleet) < 2 {
        rounds += 1;
        assert!(rounds < 500, "only one process ever read");
        let () = redis::cmd("DEL").arg(key).query_async(&mut connection).await.unwrap();
        bus.publish(&mut fleet.publisher, 5).await;
        fleet.settles(fleet.publisher.total() * 9 / 10, LONG).await;
    }
    fleet.drains(LONG).await;
    let sent = rounds * 5 * BOTS;
    let report = fleet.report_of(sent).await;
    assert!(report.is_clean(), "{report}");
    assert_eq!((report.sent, report.committed), (sent, sent), "{report}");
    assert_eq!((report.overlaps, report.duplicates_explained), (0, 0), "{report}");
}

#[tokio::test]
async fn two_readers_of_one_nats_stream_copy_nothing_twice() {
    two_readers(Bus::nats().await, "fl:{nats:n}:readers").await;
}

#[tokio::test]
async fn two_readers_of_one_kafka_topic_copy_nothing_twice() {
    two_readers(Bus::kafka(4).await, "fl:{kafka:k}:readers").await;
}

/// Where a process is killed, by the command that it sends to Redis, and whether the command or its
/// reply is held.
const STEPS: [(&str, &str, Interception); 6] = [
    ("before a shard has the batch", "}:hwm\r\n", Interception::HoldCommand),
    ("when a shard has the batch", "}:hwm\r\n", Interception::HoldReply),
    ("before the position is noted", "}:read\r\n", Interception::HoldCommand),
    ("when the position is noted", "}:read\r\n", Interception::HoldReply),
    ("before its share is renewed", "}:readers\r\n", Interception::HoldCommand),
    ("when its share is renewed", "}:readers\r\n", Interception::HoldReply),
];

/// Kills the only reader at each step of a copy. The step is met while events arrive.
async fn kills_at_each_step(bus: Bus) {
    let tcp = Options { tcp: true, ..Options::default() };
    let mut fleet = bus.fleet(tcp);
    let proxy: Proxy = Proxy::start(fleet.server.tcp_addr()).await;
    let direct = fleet.server.url();
    fleet.config = fleet.config.replace(&direct, &proxy.url());
    fleet.start(1).await;
    for round in 0..2 {
        for (at, (name, needle, interception)) in STEPS.into_iter().enumerate() {
            // One of the first commands of its kind, and in the second round a later one: some of the
            // shards have the batch then.
            let nth = if needle.contains("hwm") { 1 + round * 5 } else { 1 };
            let interceptor = proxy.intercept(holds([needle]), nth, interception);
            bus.publish(&mut fleet.publisher, 5).await;
            assert!(interceptor.catches(LONG).await, "{name} was not met");
            fleet.workers[0].kill9();
            // The last command arrives after the death of the process, or never.
            if at % 2 == 0 || round == 0 {
                interceptor.release();
            }
            fleet.restart(0).await;
        }
    }
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert!(report.is_clean() && report.sent == BOTS * 5 * 2 * STEPS.len(), "{report}");
}

#[tokio::test]
async fn a_reader_of_nats_is_killed_at_each_step_of_a_copy() {
    kills_at_each_step(Bus::nats().await).await;
}

#[tokio::test]
async fn a_reader_of_kafka_is_killed_at_each_step_of_a_copy() {
    kills_at_each_step(Bus::kafka(2).await).await;
}

/// A Redis, an instance that reads this bus, and what its handler gets.
struct Reading {
    _server: RedisServer,
    instance: Instance,
    log: Log,
}

impl Reading {
    async fn start(bus: &Bus) -> Self {
        let server = RedisServer::start(Options::default());
        let (log, sources) = (Log::default(), bus.sources());
        let settings =
            [("bus.streams", "[]"), ("bus.sources", &*sources), ("pipelines.all.start", "\"new\"")];
        let config = config(&server, "all", &settings);
        let instance = Instance::start(&config, log.content()).await;
        let address = instance.address.to_string();
        eventually(LONG, "it is ready", async || get(&address, "/readyz").await.0 == 200).await;
        Self { _server: server, instance, log }
    }

    /// Publishes events of one bot, and waits until these are handled.
    async fn handles(&self, bus: &Bus, ids: std::ops::Range<u32>) {
        add(bus, ids.clone()).await;
        let last = ids.last().unwrap().to_string();
        let is_last = |seen: &Seen| seen.id == last;
        eventually(LONG, "they are handled", async || self.log.all().iter().any(is_last)).await;
    }

    fn ids(&self) -> Vec<u32> {
        self.log.ids("all").iter().map(|id| id.parse().unwrap()).collect()
    }
}

async fn add(bus: &Bus, ids: std::ops::Range<u32>) {
    let events: Vec<_> = ids.map(|id| event("b", "t", id)).collect();
    bus.add(&vec!["b".to_owned(); events.len()], &events).await;
}

/// Deletes everything that the bus has.
async fn purge(bus: &Bus, next: i64) {
    match bus {
        Bus::Nats(server) => {
            let jetstream = server.jetstream().await;
            jetstream.get_stream("EVENTS").await.unwrap().purge().await.unwrap();
        }
        Bus::Kafka(broker, _) => {
            let mut offsets = TopicPartitionList::new();
            offsets.add_partition_offset("events", 0, KafkaOffset::Offset(next)).unwrap();
            broker.admin().delete_records(&offsets, &patient()).await.unwrap();
        }
    }
}

#[tokio::test]
async fn entries_that_were_purged_before_they_were_read_are_a_gap_and_reading_goes_on() {
    for (bus, name) in
        [(Bus::nats().await, "nats:n/EVENTS"), (Bus::kafka(1).await, "kafka:k/events/0")]
    {
        let sources = bus.sources();
        let settings = [("bus.streams", "[]"), ("bus.sources", &*sources)];
        let mut fleet = Fleet::new(Options::default(), 1, &settings);
        fleet.start(1).await;
        bus.publish(&mut fleet.publisher, 5).await;
        fleet.drains(LONG).await;
        let mut connection = fleet.server.connection().await;
        let noted = format!("fl:{{{name}}}:read");
        eventually(LONG, "the position is noted", async || {
            let at: Option<String> = connection.hget(&noted, "offset").await.unwrap();
            at.is_some_and(|at| at.ends_with("-5"))
        })
        .await;
        fleet.workers[0].sigterm();
        assert!(fleet.workers[0].wait_exit(LONG).unwrap().success());
        add(&bus, 0..7).await;
        purge(&bus, 12).await;
        bus.publish(&mut fleet.publisher, 3).await;
        fleet.restart(0).await;
        fleet.drains(LONG).await;
        fleet.misses_seven(name).await;
    }
}

/// A failover to the replica would lose the copies.
#[tokio::test]
async fn nats_keeps_the_messages_whose_copies_no_replica_has() {
    let bus = Bus::nats().await;
    let Bus::Nats(nats) = &bus else { unreachable!() };
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let replica = server.replica().await;
    let sources = bus.sources().replace(" }]", ", trim = true }]");
    let settings = [
        ("bus.streams", "[]"),
        ("bus.sources", &*sources),
        ("bus.retention", "\"0s\""),
        ("redis.wait_replicas", "1"),
        ("redis.wait_timeout", "\"300ms\""),
    ];
    let log = Log::default();
    let instance = Instance::start(&config(&server, "all", &settings), log.content()).await;
    let stream = nats.jetstream().await.get_stream("EVENTS").await.unwrap();
    let kept = async || stream.get_info().await.unwrap().state.messages;
    add(&bus, 0..5).await;
    eventually(LONG, "all but the last one are deleted", async || kept().await == 1).await;
    replica.sigstop();
    add(&bus, 5..10).await;
    // Twice the time after which messages are deleted otherwise.
    tokio::time::sleep(Duration::from_secs(12)).await;
    assert_eq!(kept().await, 1 + 5);
    replica.sigcont();
    eventually(LONG, "the others are deleted", async || kept().await == 1).await;
    let handled = async || (0..10).all(|id: u32| log.ids("all").contains(&id.to_string()));
    eventually(LONG, "all are handled", handled).await;
    instance.stop().await;
}

#[tokio::test]
async fn a_stream_or_topic_that_is_made_after_the_start_is_read_from_its_first_entry() {
    for mut bus in [Bus::nats().await, Bus::kafka(1).await] {
        match &mut bus {
            Bus::Nats(server) => {
                server.jetstream().await.delete_stream("EVENTS").await.unwrap();
            }
            Bus::Kafka(broker, _) => broker.delete_topic("events").await,
        }
        let reading = Reading::start(&bus).await;
        match &mut bus {
            Bus::Nats(server) => {
                server.jetstream().await.create_stream(Bus::stream()).await.unwrap();
            }
            Bus::Kafka(broker, producer) => {
                broker.create_topic("events", 2).await;
                *producer = broker.config().create().unwrap();
            }
        }
        reading.handles(&bus, 0..50).await;
        assert_eq!(reading.ids(), (0..50).collect::<Vec<_>>());
        reading.instance.stop().await;
        bus.stop();
    }
}

#[tokio::test]
async fn a_stream_or_topic_that_is_made_anew_is_read_from_its_first_entry() {
    for mut bus in [Bus::nats().await, Bus::kafka(1).await] {
        let reading = Reading::start(&bus).await;
        reading.handles(&bus, 0..20).await;
        match &mut bus {
            Bus::Nats(server) => {
                let jetstream = server.jetstream().await;
                jetstream.delete_stream("EVENTS").await.unwrap();
                jetstream.create_stream(Bus::stream()).await.unwrap();
            }
            Bus::Kafka(broker, producer) => {
                broker.delete_topic("events").await;
                broker.create_topic("events", 1).await;
                // The numbers of an idempotent producer belong to the old topic.
                *producer = broker.config().create().unwrap();
            }
        }
        reading.handles(&bus, 20..25).await;
        reading.handles(&bus, 25..60).await;
        assert_eq!(reading.ids(), (0..60).collect::<Vec<_>>());
        reading.instance.stop().await;
        bus.stop();
    }
}

/// Where the shards of the pipeline `all` stand in the only partition.
async fn stands(server: &RedisServer) -> Vec<String> {
    let mut connection = server.connection().await;
    let keys: Vec<String> = connection.keys("fl:{all:*}:hwm").await.unwrap();
    let mut stands = Vec::new();
    for key in keys {
        stands.push(connection.hget(&key, "kafka:k/events/0").await.unwrap());
    }
    stands
}

/// A topic that has grown beyond the old positions does not show any more that it was made anew.
#[tokio::test]
async fn a_topic_that_was_made_anew_is_noted_before_it_has_a_record() {
    let mut bus = Bus::kafka(1).await;
    let (server, log, sources) =
        (RedisServer::start(Options::default()), Log::default(), bus.sources());
    let settings = [("bus.streams", "[]"), ("bus.sources", &*sources)];
    let config = config(&server, "all", &settings);
    let instance = Instance::start(&config, log.content()).await;
    add(&bus, 0..20).await;
    eventually(LONG, "they are handled", async || log.len() == 20).await;
    instance.stop().await;
    let Bus::Kafka(broker, producer) = &mut bus else { unreachable!() };
    broker.delete_topic("events").await;
    broker.create_topic("events", 1).await;
    *producer = broker.config().create().unwrap();
    let instance = Instance::start(&config, log.content()).await;
    eventually(LONG, "the shards stand in the new topic", async || {
        let stands = stands(&server).await;
        !stands.is_empty() && stands.iter().all(|at| at == "2-0")
    })
    .await;
    instance.stop().await;
    add(&bus, 20..50).await;
    let instance = Instance::start(&config, log.content()).await;
    eventually(LONG, "they are handled", async || log.len() >= 50).await;
    let ids: Vec<u32> = log.ids("all").iter().map(|id| id.parse().unwrap()).collect();
    assert_eq!(ids, (0..50).collect::<Vec<_>>());
    instance.stop().await;
    bus.stop();
}

/// Markers of transactions occupy offsets, so the difference of offsets would never be 0.
#[tokio::test]
async fn the_lag_is_0_after_transactions() {
    let bus = Bus::kafka(1).await;
    let Bus::Kafka(broker, _) = &bus else { unreachable!() };
    let mut fleet = bus.fleet(Options::default());
    fleet.start(1).await;
    // This broker names an aborted transaction also in answers that begin behind it. Clients then leave
    // out what the same producer wrote later, so another producer aborts.
    let [keeping, aborting] = ["keeping", "aborting"].map(|id| {
        let mut config: ClientConfig = broker.config();
        config.set("transactional.id", id);
        let producer: FutureProducer = config.create().unwrap();
        producer.init_transactions(LONG).unwrap();
        producer
    });
    for is_kept in [true, false, true] {
        let producer = if is_kept { &keeping } else { &aborting };
        producer.begin_transaction().unwrap();
        if is_kept {
            publish_to_kafka(producer, &mut fleet.publisher, 2).await;
            producer.commit_transaction(LONG).unwrap();
        } else {
            let events = [event("b", "t", 0), event("b", "t", 1)];
            add_to_kafka(producer, &["b".to_owned(), "b".to_owned()], &events).await;
            producer.abort_transaction(LONG).unwrap();
        }
    }
    fleet.drains(LONG).await;
    eventually(LONG, "the lag is 0", async || {
        let metrics = fleet.metrics(0).await;
        metric(&metrics, "fairlane_bus_lag_events", &[("stream", "kafka:k/events/0")]) == Some(0.0)
    })
    .await;
    let report = fleet.report();
    assert!(report.is_clean() && report.sent == 4 * BOTS, "{report}");
}
