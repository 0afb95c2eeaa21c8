//! A cluster of which one broker does not answer, or one partition has no leader: the others are read.

use std::time::{Duration, Instant};

use fairlane::bus::BusError;
use fairlane::bus::source::{Log, Source as _};
use rdkafka::ClientConfig;
use rdkafka::mocking::{MockCluster, MockCoordinator};
use rdkafka::producer::{DefaultProducerContext, FutureProducer, FutureRecord};

use super::rig::{LONG, Rig, WAIT, event, settings};
use crate::support::kafka::PATIENCE;
use crate::support::wait::{Stalls, Stopwatch, eventually};

/// Longer than any client waits.
const FOREVER: Duration = Duration::from_secs(3_600);
/// The longest wait for a broker that does not answer.
const ANSWER: Duration = Duration::from_secs(5);

/// Three brokers with one partition each.
struct Three {
    mock: MockCluster<'static, DefaultProducerContext>,
    producer: FutureProducer,
}

impl Three {
    fn new() -> Self {
        let mock = MockCluster::new(3).unwrap();
        mock.create_topic("events", 3, 3).unwrap();
        for (partition, leader) in [(0, 1), (1, 2), (2, 3)] {
            mock.partition_leader("events", partition, Some(leader)).unwrap();
        }
        mock.coordinator(MockCoordinator::Group("fairlane/test".to_owned()), 1).unwrap();
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", mock.bootstrap_servers());
        Self { producer: config.create().unwrap(), mock }
    }

    fn rig(&self) -> Rig {
        Rig::new(settings(&self.mock.bootstrap_servers(), "events"))
    }

    async fn put(&self, partition: i32, id: &str) {
        let json = event("bot", id, "");
        let record = FutureRecord::to("events").partition(partition).key("bot").payload(&json);
        self.producer.send(record, PATIENCE).await.unwrap();
    }

    /// The broker with partition 1 accepts connections, and does not answer.
    fn freeze(&self) {
        self.mock.broker_round_trip_time(2, FOREVER).unwrap();
    }

    fn thaw(&self) {
        self.mock.broker_round_trip_time(2, Duration::ZERO).unwrap();
    }
}

/// Reads until there are `count` events, without an error.
async fn read(rig: &mut Rig, count: usize) -> Vec<String> {
    let (started, mut ids) = (Instant::now(), Vec::new());
    while ids.len() < count {
        assert!(started.elapsed() < LONG, "{ids:?}");
        let found = rig.fetch().await.unwrap();
        ids.extend(found.into_iter().map(|(_, entry)| entry.event.unwrap().id().to_owned()));
    }
    ids.sort();
    ids
}

/// The logs, of which the second one is not known. Returns the others and why.
async fn without_the_second(rig: &Rig) -> (Vec<Log>, String) {
    let mut logs = Vec::new();
    eventually(LONG, "one log is not known", async || {
        logs = rig.source.logs().await.unwrap_or_default();
        logs.iter().filter(|log| log.unknown.is_some()).count() == 1
    })
    .await;
    logs.sort_by(|a, b| a.name.cmp(&b.name));
    assert_eq!(logs.len(), 3, "{logs:?}");
    let unknown = logs.remove(1);
    assert_eq!(&*unknown.name, "kafka:test/events/1");
    (logs, unknown.unknown.unwrap().to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_without_a_leader_hides_neither_the_logs_nor_the_lags_of_others() {
    let three = Three::new();
    let mut rig = three.rig();
    rig.open_all(3).await;
    for partition in 0..3 {
        three.put(partition, &partition.to_string()).await;
    }
    assert_eq!(read(&mut rig, 3).await, ["0", "1", "2"]);
    three.put(0, "unread").await;
    three.mock.partition_leader("events", 1, None).unwrap();
    let (others, cause) = without_the_second(&rig).await;
    assert!(cause.contains("no leader"), "{cause}");
    eventually(LONG, "the other lags are known", async || {
        let released = rig.release().await.unwrap();
        let lags: Vec<_> = released.iter().map(|released| released.lag).collect();
        let problems: Vec<_> = released.iter().map(|released| &released.problem).collect();
        lags == [Some(1), None, Some(0)]
            && matches!(problems[..], [None, Some(BusError::Waits { .. }), None])
    })
    .await;
    // A session that begins now reads the others.
    rig.open(&others).await.unwrap();
    assert_eq!(read(&mut rig, 1).await, ["unread"]);
    three.mock.partition_leader("events", 1, Some(3)).unwrap();
    rig.open_all(3).await;
    three.put(1, "last").await;
    assert_eq!(read(&mut rig, 1).await, ["last"]);
    assert_eq!(rig.lost, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_does_not_answer_keeps_no_other_partition_from_being_read() {
    let three = Three::new();
    let mut rig = three.rig();
    rig.open_all(3).await;
    for partition in 0..3 {
        three.put(partition, &partition.to_string()).await;
    }
    assert_eq!(read(&mut rig, 3).await, ["0", "1", "2"]);
    assert_eq!(rig.lag().await, 0);
    three.freeze();
    // As the reader: it asks for the lag every second.
    let (stalls, mut slow) = (Stalls::watch(), 0);
    for round in 0..8 {
        let id = format!("during {round}");
        three.put(round % 2 * 2, &id).await;
        let started = Instant::now();
        assert_eq!(read(&mut rig, 1).await, [id]);
        rig.release().await.unwrap();
        slow += u32::from(started.elapsed() > WAIT + 2 * stalls.longest());
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(slow <= 1, "reading waits for the broker again and again: {slow}");
    let released = rig.release().await.unwrap();
    let lags: Vec<_> = released.iter().map(|released| released.lag).collect();
    assert_eq!(lags, [Some(0), None, Some(0)]);
    // A process that starts now.
    let mut other = three.rig();
    other.positions = rig.positions.clone();
    let (others, cause) = without_the_second(&other).await;
    assert!(cause.contains("does not answer"), "{cause}");
    let watch = Stopwatch::start();
    without_the_second(&other).await;
    watch.within_steps(ANSWER / 2, 2, "the next look");
    other.open(&others).await.unwrap();
    three.put(2, "after").await;
    assert_eq!(read(&mut other, 1).await, ["after"]);
    three.thaw();
    other.open_all(3).await;
    three.put(1, "last").await;
    assert_eq!(other.read(1).await[&1], ["last"]);
    assert_eq!(other.lost, 0);
}
