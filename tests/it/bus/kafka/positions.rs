//! Every record is read once and in order; what is gone is counted; the lag ends.

use std::collections::HashMap;
use std::time::Duration;

use fairlane::bus::BusError;
use fairlane::bus::kafka::{KafkaSettings, KafkaSource};
use fairlane::bus::source::Source as _;
use fairlane::event::Event;
use fairlane::fanout::NewStart;
use fairlane::id::Offset;
use rdkafka::admin::NewPartitions;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};
use rdkafka::{Offset as KafkaOffset, TopicPartitionList};

use super::rig::{Cluster, LONG, Rig, event, settings};
use crate::support::kafka::{ENGINES, Engine, KafkaBroker, PATIENCE, patient};
use crate::support::wait::eventually;

/// For what Tansu cannot do, see the table in `support::kafka`.
const ONLY_NOIDA: [Engine; 1] = [Engine::Noida];

fn at(ms: u64, seq: u64) -> Offset {
    Offset { ms, seq }
}

/// The committed offset of partition 0 of the topic `events`, and its text.
fn committed(broker: &KafkaBroker, group: &str) -> Option<(i64, String)> {
    let consumer: BaseConsumer = broker.config().set("group.id", group).create().unwrap();
    let mut list = TopicPartitionList::new();
    list.add_partition("events", 0);
    let list = consumer.committed_offsets(list, PATIENCE).unwrap();
    let element = list.find_partition("events", 0).unwrap();
    match element.offset() {
        KafkaOffset::Offset(offset) => Some((offset, element.metadata().to_owned())),
        _ => None,
    }
}

fn commit(broker: &KafkaBroker, group: &str, offset: i64, metadata: &str) {
    let consumer: BaseConsumer = broker.config().set("group.id", group).create().unwrap();
    let mut list = TopicPartitionList::new();
    {
        let mut element = list.add_partition("events", 0);
        element.set_offset(KafkaOffset::Offset(offset)).unwrap();
        element.set_metadata(metadata);
    }
    consumer.commit(&list, rdkafka::consumer::CommitMode::Sync).unwrap();
}

async fn delete_before(broker: &KafkaBroker, offset: i64) {
    let mut list = TopicPartitionList::new();
    list.add_partition_offset("events", 0, KafkaOffset::Offset(offset)).unwrap();
    let deleted = broker.admin().delete_records(&list, &patient()).await.unwrap();
    deleted.elements()[0].error().unwrap();
}

/// A broker with one partition of `events` and `count` events.
async fn filled(engine: Engine, count: usize) -> (KafkaBroker, Rig) {
    let broker = KafkaBroker::start(engine);
    broker.create_topic("events", 1).await;
    let rig = Rig::new(settings(&broker.brokers(), "events"));
    publish(&rig, count).await;
    (broker, rig)
}

async fn publish(rig: &Rig, count: usize) {
    let ids: Vec<_> = (0..count).map(|id| id.to_string()).collect();
    let events: Vec<_> = ids.iter().map(|id| ("bot", id.as_str())).collect();
    // The library numbers events, and a topic that was made anew does not know the numbers.
    eventually(LONG, "published", async || rig.publish(&events).await.is_ok()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_event_is_read_once_and_each_bot_in_order_over_all_partitions() {
    for (name, cluster) in Cluster::all("events", 4).await {
        let mut rig = cluster.source("events");
        rig.open_all(4).await;
        let bots: Vec<_> = (0..50).map(|bot| format!("bot-{bot}")).collect();
        let ids: Vec<_> = (0..40).map(|id| format!("{id:03}")).collect();
        for ids in ids.chunks(10) {
            let mut events = Vec::new();
            for id in ids {
                events.extend(bots.iter().map(|bot| (bot.as_str(), format!("{bot} {id}"))));
            }
            let events: Vec<_> = events.iter().map(|(bot, id)| (*bot, id.as_str())).collect();
            rig.publish(&events).await.unwrap();
        }
        let found = rig.read(50 * 40).await;
        assert_eq!(found.len(), 4, "{name}: every partition has events");
        let mut of_bots = HashMap::<_, Vec<_>>::new();
        for id in found.values().flatten() {
            let (bot, id) = id.split_once(' ').unwrap();
            of_bots.entry(bot.to_owned()).or_default().push(id.to_owned());
        }
        for bot in &bots {
            assert_eq!(of_bots[bot], ids, "{name}: {bot}");
        }
        eventually(LONG, &format!("{name}: the lag ends"), async || {
            rig.fetch().await.unwrap();
            rig.lag().await == 0
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reading_goes_on_where_it_was_also_in_another_process() {
    for (name, cluster) in Cluster::all("events", 1).await {
        let mut rig = cluster.source("events");
        let offsets = rig.publish(&[("b", "0"), ("b", "1"), ("b", "2")]).await.unwrap();
        assert_eq!(offsets, [at(1, 1), at(1, 2), at(1, 3)], "{name}");
        let mut other = cluster.source("events");
        other.positions.insert("kafka:test/events/0".into(), offsets[0]);
        let opened = other.open_all(1).await;
        assert_eq!((opened[0].at, opened[0].lost, opened[0].entries), (at(1, 1), 0, 1), "{name}");
        assert_eq!(other.read(2).await[&0], ["1", "2"], "{name}");
        let log = &rig.logs(1).await[0];
        assert_eq!(log.first, Some(at(1, 1)), "{name}");
        assert!(log.last == at(1, 3) || name == "Tansu", "{name}: {}", log.last);
        // Both read at once, and neither disturbs the other.
        rig.open_all(1).await;
        assert_eq!(rig.read(3).await[&0], ["0", "1", "2"], "{name}");
        rig.publish(&[("b", "3")]).await.unwrap();
        assert_eq!(rig.read(1).await[&0], ["3"], "{name}");
        assert_eq!(other.read(1).await[&0], ["3"], "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_that_were_deleted_before_they_were_read_are_counted_exactly() {
    for engine in ONLY_NOIDA {
        let (broker, mut rig) = filled(engine, 20).await;
        delete_before(&broker, 15).await;
        rig.positions.insert("kafka:test/events/0".into(), at(1, 4));
        let opened = rig.open_all(1).await;
        assert_eq!((opened[0].at, opened[0].lost), (at(1, 15), 11), "{engine:?}");
        assert_eq!(rig.read(5).await[&0], ["15", "16", "17", "18", "19"]);
        let log = &rig.logs(1).await[0];
        assert_eq!((log.first, log.last), (Some(at(1, 16)), at(1, 20)));
        // All are deleted: the position is at the end.
        delete_before(&broker, 20).await;
        let log = &rig.logs(1).await[0];
        assert_eq!((log.first, log.last), (None, at(1, 20)));
        assert_eq!(rig.lag().await, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_deleted_during_a_read_end_it_and_are_counted_by_the_next() {
    const COUNT: usize = 300;
    // This broker keeps 5 MB of a partition. Others return all of a partition at once.
    let mock = MockCluster::new(1).unwrap();
    mock.create_topic("events", 1, 1).unwrap();
    let mut rig = Rig::new(settings(&mock.bootstrap_servers(), "events"));
    rig.open_all(1).await;
    let mut config = rdkafka::ClientConfig::new();
    let producer: FutureProducer =
        config.set("bootstrap.servers", mock.bootstrap_servers()).create().unwrap();
    // More than is fetched ahead.
    let json = event("bot", "0", &"x".repeat(250_000));
    for _ in 0..COUNT {
        let record = FutureRecord::to("events").partition(0).key("bot").payload(&json);
        producer.send(record, PATIENCE).await.unwrap();
    }
    let (mut read, mut moved) = (0, false);
    eventually(LONG, "the end is reached", async || {
        match rig.fetch().await {
            Ok(found) => read += found.len(),
            Err(error) => {
                moved |= matches!(error, BusError::Moved { .. });
                assert!(error.is_passing(), "{error:?}");
                rig.reopen().await;
            }
        }
        rig.positions["kafka:test/events/0"] == at(1, 300)
    })
    .await;
    assert!(moved && rig.lost > 0, "{read} read, {} lost", rig.lost);
    assert_eq!(read + usize::try_from(rig.lost).unwrap(), COUNT);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_made_anew_is_read_from_its_first_record() {
    for engine in ONLY_NOIDA {
        let (broker, mut rig) = filled(engine, 20).await;
        rig.open_all(1).await;
        rig.read(20).await;
        rig.release().await.unwrap();
        broker.delete_topic("events").await;
        eventually(LONG, "the topic is gone", async || {
            rig.source.logs().await.is_ok_and(|logs| logs.is_empty())
        })
        .await;
        broker.create_topic("events", 1).await;
        publish(&rig, 3).await;
        rig.logs(1).await;
        let opened = rig.open_all(1).await;
        assert_eq!((opened[0].at, opened[0].lost), (at(2, 0), 0), "{engine:?}");
        assert_eq!(rig.read(3).await[&0], ["0", "1", "2"], "{engine:?}");
        // Pipelines that are new start behind the events that exist.
        assert_eq!(rig.logs(1).await[0].last, at(2, 3), "{engine:?}");
        assert_eq!(rig.publish(&[("bot", "3")]).await.unwrap(), [at(2, 4)], "{engine:?}");
        // Another process learns it from what is committed.
        rig.read(1).await;
        rig.release().await.unwrap();
        eventually(LONG, "another process knows", async || {
            let other = Rig::new(settings(&broker.brokers(), "events"));
            other.logs(1).await[0].last == at(2, 4)
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_lost_its_tail_is_not_read_again() {
    for engine in ONLY_NOIDA {
        let (broker, mut rig) = filled(engine, 10).await;
        // As if 25 records had been read, of which an election lost the last 15.
        commit(&broker, "fairlane/test", 25, "incarnation=1 newest=9000000000000");
        rig.positions.insert("kafka:test/events/0".into(), at(1, 25));
        let opened = rig.open_all(1).await;
        assert_eq!((opened[0].at, opened[0].lost), (at(2, 10), 0), "{engine:?}");
        rig.publish(&[("bot", "new")]).await.unwrap();
        assert_eq!(rig.read(1).await[&0], ["new"], "{engine:?}");
        // Records that are newer than what was read belong to another topic.
        commit(&broker, "fairlane/test", 25, "incarnation=1 newest=1000");
        rig.positions.insert("kafka:test/events/0".into(), at(1, 25));
        let opened = rig.open_all(1).await;
        assert_eq!(opened[0].at, at(2, 0), "{engine:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn new_partitions_appear_among_the_logs() {
    for engine in ONLY_NOIDA {
        let (broker, rig) = filled(engine, 1).await;
        rig.logs(1).await;
        let grown = NewPartitions::new("events", 3);
        let grown = broker.admin().create_partitions([&grown], &patient()).await.unwrap();
        grown[0].as_ref().unwrap();
        let names: Vec<_> = rig.logs(3).await.into_iter().map(|log| log.name).collect();
        let wanted = ["kafka:test/events/0", "kafka:test/events/1", "kafka:test/events/2"];
        assert_eq!(names.iter().map(|name| &**name).collect::<Vec<_>>(), wanted, "{engine:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lag_ends_behind_transactions_also_if_they_were_aborted() {
    for engine in ONLY_NOIDA {
        let (broker, mut rig) = filled(engine, 2).await;
        rig.open_all(1).await;
        assert_eq!(rig.read(2).await[&0], ["0", "1"]);
        let producer: FutureProducer =
            broker.config().set("transactional.id", "t").create().unwrap();
        producer.init_transactions(PATIENCE).unwrap();
        for commits in [true, false] {
            producer.begin_transaction().unwrap();
            let id = format!("commits: {commits}");
            let json = event("bot", &id, "");
            let record = FutureRecord::to("events").key("bot").payload(&json);
            producer.send(record, PATIENCE).await.unwrap();
            assert!(rig.lag().await >= 1, "an open transaction waits");
            if commits {
                producer.commit_transaction(PATIENCE).unwrap();
            } else {
                producer.abort_transaction(PATIENCE).unwrap();
            }
        }
        assert_eq!(rig.read(1).await[&0], ["commits: true"], "{engine:?}");
        eventually(LONG, "the lag ends", async || {
            assert!(rig.fetch().await.unwrap().is_empty());
            rig.lag().await == 0
        })
        .await;
        assert_eq!(rig.positions["kafka:test/events/0"], rig.logs(1).await[0].last);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn copied_offsets_are_committed_for_other_tools() {
    for engine in ENGINES {
        let (broker, mut rig) = filled(engine, 5).await;
        rig.open_all(1).await;
        rig.read(5).await;
        assert_eq!(committed(&broker, "fairlane/test"), None, "{engine:?}: nothing yet");
        rig.release().await.unwrap();
        eventually(LONG, &format!("{engine:?}: committed"), async || {
            let with_text = engine == Engine::Noida;
            committed(&broker, "fairlane/test").is_some_and(|(offset, text)| {
                let is_known = text.starts_with("incarnation=1 newest=1");
                offset == 5 && (is_known || !with_text)
            })
        })
        .await;
        // The next session has read nothing, and does not know how new the last record is.
        let mut next = Rig::new(settings(&broker.brokers(), "events"));
        next.positions = rig.positions.clone();
        next.open_all(1).await;
        next.release().await.unwrap();
        // Commits have no answer that could be awaited.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let (_, text) = committed(&broker, "fairlane/test").unwrap();
        assert!(!text.contains("newest=0"), "{engine:?}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pipeline_can_start_behind_what_a_consumer_group_handled() {
    for engine in ENGINES {
        let (broker, rig) = filled(engine, 5).await;
        assert_eq!(rig.logs(1).await[0].start, NewStart::Own);
        commit(&broker, "billing", 3, "");
        let start_group = Some("billing".to_owned());
        let settings = settings(&broker.brokers(), "events");
        let rig = Rig::new(KafkaSettings { start_group, ..settings });
        assert_eq!(rig.logs(1).await[0].start, NewStart::At(at(1, 3)), "{engine:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_that_a_consumer_group_has_not_read_start_at_their_first_record() {
    for engine in ENGINES {
        let broker = KafkaBroker::start(engine);
        broker.create_topic("events", 2).await;
        let of = |group: &str| {
            let start_group = Some(group.to_owned());
            Rig::new(KafkaSettings { start_group, ..settings(&broker.brokers(), "events") })
        };
        let producer: FutureProducer = broker.config().create().unwrap();
        for at in 0..4 {
            let json = event("bot", &at.to_string(), "");
            let record = FutureRecord::to("events").partition(at % 2).key("bot").payload(&json);
            producer.send(record, PATIENCE).await.unwrap();
        }
        commit(&broker, "billing", 1, "");
        let starts: Vec<_> = of("billing").logs(2).await.into_iter().map(|log| log.start).collect();
        assert_eq!(starts, [NewStart::At(at(1, 1)), NewStart::At(at(1, 0))], "{engine:?}");
        // A mistyped name must not skip everything.
        let rig = of("biling");
        for log in rig.logs(2).await {
            let NewStart::Unknown(cause) = log.start else { panic!("{:?}", log.start) };
            assert!(cause.contains("\"biling\" has no offset in the topic \"events\""), "{cause}");
        }
        let survey = rig.source.survey().await.unwrap();
        assert!(survey.topics[0].start_error.is_some(), "{engine:?}: {survey:?}");
        assert_eq!(of("billing").source.survey().await.unwrap().topics[0].start_error, None);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tombstones_are_skipped_and_records_that_are_no_events_are_returned() {
    for (name, cluster) in Cluster::all("events", 1).await {
        let mut rig = cluster.source("events");
        let mut config = rdkafka::ClientConfig::new();
        config.set("bootstrap.servers", cluster.brokers());
        let producer: FutureProducer = config.create().unwrap();
        let good = event("bot", "good", "");
        let odd = |count: usize| {
            let names = (0..count).map(|at| format!("ce_{at}"));
            names.fold(OwnedHeaders::new(), |headers, key| {
                headers.insert(Header { key: &key, value: Some(&[0xff_u8, 0][..]) })
            })
        };
        let record = || FutureRecord::<str, [u8]>::to("events").key("bot");
        for record in [
            record(),
            record().payload(b"no event"),
            record().payload(&good).headers(odd(3)),
            record().payload(&good).headers(odd(5_000)),
            record()
                .payload(&good)
                .headers(OwnedHeaders::new().insert(Header::<&[u8]> { key: "", value: None })),
            FutureRecord::to("events").payload(&good),
        ] {
            producer.send(record, PATIENCE).await.unwrap();
        }
        rig.open_all(1).await;
        let mut entries = Vec::new();
        eventually(LONG, "all are read", async || {
            let found = rig.fetch().await.unwrap();
            entries.extend(found.into_iter().map(|(_, entry)| entry));
            rig.positions["kafka:test/events/0"] == at(1, 6)
        })
        .await;
        let found: Vec<_> = entries
            .iter()
            .map(|entry| (entry.offset.seq, entry.event.as_ref().ok().map(Event::id)))
            .collect();
        let (ok, wrong) = (Some("good"), None);
        let wanted = [(2, wrong), (3, wrong), (4, wrong), (5, ok), (6, ok)];
        assert_eq!(found, wanted, "{name}: {entries:?}");
        let error = entries[2].event.as_ref().unwrap_err().error.to_string();
        assert!(error.contains("5000 headers; at most 1000"), "{name}: {error}");
        let survey = rig.source.survey().await.unwrap();
        let sample = survey.topics[0].sample;
        let of_sample = (sample.records, sample.without_key, sample.tombstones, sample.invalid);
        assert_eq!(of_sample, (6, 1, 1, 3), "{name}: {survey:?}");
        assert_eq!(survey.topics[0].partitions, 1, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_does_not_exist_has_no_logs_and_is_not_made() {
    for (name, cluster) in Cluster::all("events", 1).await {
        let source = KafkaSource::new(settings(&cluster.brokers(), "missing")).unwrap();
        if name == "mock" {
            // It makes every topic that a client asks for.
            continue;
        }
        for _ in 0..2 {
            let logs = source.logs().await.unwrap();
            assert_eq!(logs, [], "{name}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}
