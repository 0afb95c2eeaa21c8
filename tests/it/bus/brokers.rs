//! What the test brokers get right and wrong: each line of the table of `support::kafka`. A test
//! that fails after an update tells which tests of the readers may rely on more, or on less.

use std::time::Duration;

use rdkafka::admin::{NewPartitions, ResourceSpecifier};
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, Headers as _, Message as _, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, FutureProducer, FutureRecord, Producer as _};
use rdkafka::{Offset, TopicPartitionList};

use super::engines::{consumer, produce, read};
use crate::support::kafka::{ENGINES, Engine, KafkaBroker, PATIENCE, patient};

/// Long enough for an answer, and short enough to wait for one that never comes.
const NEVER: Duration = Duration::from_secs(2);

/// A broker with the topic `events` of one partition.
async fn broker(engine: Engine) -> KafkaBroker {
    let broker = KafkaBroker::start(engine);
    broker.create_topic("events", 1).await;
    broker
}

fn watermarks(broker: &KafkaBroker, isolation: &str) -> (i64, i64) {
    let mut config = broker.config();
    config.set("group.id", "test").set("isolation.level", isolation);
    let consumer: BaseConsumer = config.create().unwrap();
    consumer.fetch_watermarks("events", 0, PATIENCE).unwrap()
}

fn at(offset: Offset) -> TopicPartitionList {
    let mut list = TopicPartitionList::new();
    list.add_partition_offset("events", 0, offset).unwrap();
    list
}

/// Sends the values in one batch.
fn produce_batch(broker: &KafkaBroker, values: &[&str]) {
    let producer: BaseProducer =
        broker.config().set("linger.ms", "200").set("acks", "all").create().unwrap();
    for value in values {
        let record = BaseRecord::<str, str>::to("events").partition(0).payload(value);
        producer.send(record).map_err(|(error, _)| error).unwrap();
    }
    producer.flush(PATIENCE).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn only_noida_tells_the_end_behind_a_batch_of_several_records() {
    for engine in ENGINES {
        let broker = broker(engine).await;
        assert_eq!(watermarks(&broker, "read_committed"), (0, 0));
        produce_batch(&broker, &["a", "b", "c"]);
        let end = if engine == Engine::Noida { 3 } else { 1 };
        assert_eq!(watermarks(&broker, "read_committed"), (0, end), "{engine:?}");
        let middle = read(&consumer(&broker, "events", Offset::Offset(1)), 2);
        assert_eq!(middle, [(1, "b".to_owned()), (2, "c".to_owned())], "{engine:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_noida_reports_an_offset_out_of_range() {
    for engine in ENGINES {
        let broker = broker(engine).await;
        produce(&broker, "events", &["a"]).await;
        let consumer = consumer(&broker, "events", Offset::Offset(9));
        let answer = consumer.poll(if engine == Engine::Noida { PATIENCE } else { NEVER });
        let error = answer.map(|answer| answer.map(|_| ()).unwrap_err());
        let expected = KafkaError::MessageConsumption(RDKafkaErrorCode::AutoOffsetReset);
        assert_eq!(error, (engine == Engine::Noida).then_some(expected), "{engine:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_noida_finds_offsets_for_times() {
    for engine in ENGINES {
        let broker = broker(engine).await;
        let producer: FutureProducer = broker.config().create().unwrap();
        for seconds in 1..=3 {
            let record = FutureRecord::<str, str>::to("events").partition(0).payload("a");
            producer.send(record.timestamp(seconds * 1_000), PATIENCE).await.unwrap();
        }
        let consumer = consumer(&broker, "events", Offset::Beginning);
        for (ms, expected) in [(0, 0), (1_500, 1), (3_000, 2)] {
            let found = consumer.offsets_for_times(at(Offset::Offset(ms)), PATIENCE).unwrap();
            let found = found.elements()[0].offset();
            let expected = if engine == Engine::Noida { expected } else { 0 };
            assert_eq!(found, Offset::Offset(expected), "{engine:?}: {ms} ms");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn offsets_of_a_group_are_kept_without_members() {
    for engine in ENGINES {
        let mut broker = broker(engine).await;
        let reader = consumer(&broker, "events", Offset::Beginning);
        let none = reader.committed_offsets(at(Offset::Invalid), PATIENCE).unwrap();
        assert_eq!(none.elements()[0].offset(), Offset::Invalid);
        reader.commit(&at(Offset::Offset(5)), CommitMode::Sync).unwrap();
        let other = consumer(&broker, "events", Offset::Beginning);
        let kept = other.committed_offsets(at(Offset::Invalid), PATIENCE).unwrap();
        assert_eq!(kept.elements()[0].offset(), Offset::Offset(5), "{engine:?}");
        if engine == Engine::Noida {
            broker.restart();
            let other = consumer(&broker, "events", Offset::Beginning);
            let kept = other.committed_offsets(at(Offset::Invalid), PATIENCE).unwrap();
            assert_eq!(kept.elements()[0].offset(), Offset::Offset(5), "after a restart");
        }
    }
}

/// Commits a record, aborts one, and leaves one of an open transaction.
fn transactions(broker: &KafkaBroker) -> BaseProducer {
    let producer: BaseProducer = broker
        .config()
        .set("transactional.id", "test")
        .set("transaction.timeout.ms", "60000")
        .create()
        .unwrap();
    let send = |value| {
        producer.begin_transaction().unwrap();
        let record = BaseRecord::<str, str>::to("events").partition(0).payload(value);
        producer.send(record).map_err(|(error, _)| error).unwrap();
        producer.flush(PATIENCE).unwrap();
    };
    producer.init_transactions(PATIENCE).unwrap();
    send("committed");
    producer.commit_transaction(PATIENCE).unwrap();
    send("aborted");
    producer.abort_transaction(PATIENCE).unwrap();
    send("open");
    producer
}

#[tokio::test(flavor = "multi_thread")]
async fn markers_of_transactions_occupy_offsets_and_only_noida_hides_aborted_records() {
    for engine in ENGINES {
        let broker = broker(engine).await;
        let producer = transactions(&broker);
        // 0: committed, 1: its marker, 2: aborted, 3: its marker, 4: open
        let stable = if engine == Engine::Noida { (0, 4) } else { (0, 0) };
        assert_eq!(watermarks(&broker, "read_committed"), stable, "{engine:?}");
        assert_eq!(watermarks(&broker, "read_uncommitted"), (0, 5), "{engine:?}");
        producer.commit_transaction(PATIENCE).unwrap();
        assert_eq!(watermarks(&broker, "read_committed"), (0, 6), "{engine:?}");
        let reader = consumer(&broker, "events", Offset::Beginning);
        let expected: &[(i64, &str)] = match engine {
            Engine::Noida => &[(0, "committed"), (4, "open")],
            Engine::Tansu => &[(0, "committed"), (2, "aborted"), (4, "open")],
        };
        let expected: Vec<_> = expected.iter().map(|&(at, text)| (at, text.to_owned())).collect();
        assert_eq!(read(&reader, expected.len()), expected, "{engine:?}");
        // A reader that begins at a marker gets the next record.
        let next = read(&consumer(&broker, "events", Offset::Offset(3)), 1);
        assert_eq!(next[0].0, 4, "{engine:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_noida_deletes_records() {
    let broker = broker(Engine::Noida).await;
    produce(&broker, "events", &["a", "b", "c"]).await;
    let deleted = broker.admin().delete_records(&at(Offset::Offset(2)), &patient()).await;
    assert_eq!(deleted.unwrap().elements()[0].offset(), Offset::Offset(2));
    assert_eq!(watermarks(&broker, "read_committed"), (2, 3));
    let reader = consumer(&broker, "events", Offset::Offset(0));
    let lost = reader.poll(PATIENCE).expect("an answer").map(|_| ());
    let expected = KafkaError::MessageConsumption(RDKafkaErrorCode::AutoOffsetReset);
    assert_eq!(lost.unwrap_err(), expected);
    let first = read(&consumer(&broker, "events", Offset::Beginning), 1);
    assert_eq!(first, [(2, "c".to_owned())]);

    let broker = self::broker(Engine::Tansu).await;
    produce(&broker, "events", &["a"]).await;
    let refused = broker.admin().delete_records(&at(Offset::Offset(1)), &patient()).await;
    let refused = refused.map(|list| list.elements()[0].error().is_err());
    assert!(refused.is_err() || refused == Ok(true), "Tansu deletes records: {refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_is_made_anew_begins_at_zero() {
    for engine in ENGINES {
        let broker = broker(engine).await;
        produce(&broker, "events", &["a", "b"]).await;
        broker.delete_topic("events").await;
        broker.create_topic("events", 1).await;
        produce(&broker, "events", &["new"]).await;
        let first = read(&consumer(&broker, "events", Offset::Beginning), 1);
        assert_eq!(first, [(0, "new".to_owned())], "{engine:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_noida_adds_partitions() {
    for engine in ENGINES {
        let broker = broker(engine).await;
        let more = NewPartitions::new("events", 3);
        let added = broker.admin().create_partitions([&more], &patient()).await;
        let added = added.is_ok_and(|results| results[0].is_ok());
        assert_eq!(added, engine == Engine::Noida, "{engine:?}");
        let reader = consumer(&broker, "events", Offset::Beginning);
        let metadata = reader.fetch_metadata(Some("events"), PATIENCE).unwrap();
        let count = metadata.topics()[0].partitions().len();
        assert_eq!(count, if added { 3 } else { 1 }, "{engine:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_and_null_values_come_back_as_they_were_sent() {
    for engine in ENGINES {
        let broker = broker(engine).await;
        let producer: FutureProducer = broker.config().create().unwrap();
        let headers = OwnedHeaders::new()
            .insert(Header { key: "a", value: Some("1") })
            .insert(Header { key: "a", value: Some("") })
            .insert(Header::<&str> { key: "b", value: None });
        let record = FutureRecord::<str, str>::to("events").partition(0).headers(headers);
        producer.send(record, PATIENCE).await.unwrap();
        let record = FutureRecord::to("events").partition(0).key("k").payload("");
        producer.send(record, PATIENCE).await.unwrap();

        let consumer = consumer(&broker, "events", Offset::Beginning);
        let message = consumer.poll(PATIENCE).unwrap().unwrap();
        assert_eq!((message.key(), message.payload()), (None, None), "{engine:?}");
        let headers = message.headers().unwrap();
        let headers: Vec<_> = headers.iter().map(|header| (header.key, header.value)).collect();
        let expected: [(&str, Option<&[u8]>); 3] =
            [("a", Some(b"1")), ("a", Some(b"")), ("b", None)];
        assert_eq!(headers, expected, "{engine:?}");
        let message = consumer.poll(PATIENCE).unwrap().unwrap();
        let (key, value): (&[u8], &[u8]) = (b"k", b"");
        assert_eq!((message.key(), message.payload()), (Some(key), Some(value)), "{engine:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_compression_can_be_read() {
    for engine in ENGINES {
        let broker = broker(engine).await;
        for (offset, codec) in (0..).zip(["gzip", "snappy", "lz4", "zstd"]) {
            let producer: FutureProducer =
                broker.config().set("compression.type", codec).create().unwrap();
            let value = codec.repeat(100);
            let record = FutureRecord::<str, str>::to("events").partition(0).payload(&value);
            producer.send(record, PATIENCE).await.unwrap();
            let found = read(&consumer(&broker, "events", Offset::Offset(offset)), 1);
            assert_eq!(found, [(offset, value)], "{engine:?}: {codec}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_noida_describes_topics_and_refuses_large_records() {
    for engine in ENGINES {
        let broker = broker(engine).await;
        let topic = ResourceSpecifier::Topic("events");
        let described = broker.admin().describe_configs([&topic], &patient()).await.unwrap();
        let settings = described[0].as_ref().unwrap().entry_map();
        let known =
            settings.contains_key("cleanup.policy") && settings.contains_key("retention.ms");
        assert_eq!(known, engine == Engine::Noida, "{engine:?}: {settings:?}");

        let producer: FutureProducer =
            broker.config().set("message.max.bytes", "4000000").create().unwrap();
        let value = "x".repeat(2_000_000);
        let record = FutureRecord::<str, str>::to("events").partition(0).payload(&value);
        let sent = producer.send(record, PATIENCE).await.map(|_| ()).map_err(|(error, _)| error);
        let large = KafkaError::MessageProduction(RDKafkaErrorCode::MessageSizeTooLarge);
        let expected = if engine == Engine::Noida { Err(large) } else { Ok(()) };
        assert_eq!(sent, expected, "{engine:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_broker_tells_the_id_of_its_cluster_and_noida_takes_any_password() {
    for engine in ENGINES {
        let broker = broker(engine).await;
        let reader = consumer(&broker, "events", Offset::Beginning);
        let id = reader.client().fetch_cluster_id(PATIENCE);
        assert!(id.is_some_and(|id| !id.is_empty()), "{engine:?}");
    }
    let broker = broker(Engine::Noida).await;
    for (mechanism, accepted) in [("PLAIN", true), ("SCRAM-SHA-256", false)] {
        let mut config = broker.config();
        config.set("security.protocol", "sasl_plaintext").set("sasl.mechanism", mechanism);
        config.set("sasl.username", "anybody").set("sasl.password", "anything");
        let client: BaseConsumer = config.create().unwrap();
        let patience = if accepted { PATIENCE } else { NEVER };
        let answers = client.fetch_metadata(Some("events"), patience).is_ok();
        assert_eq!(answers, accepted, "{mechanism}");
    }
}
