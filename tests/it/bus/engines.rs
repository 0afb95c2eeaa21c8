//! The servers of the tests themselves: what is published can be read, also after a restart.

use std::time::Duration;

use async_nats::jetstream::consumer::{DeliverPolicy, pull};
use async_nats::jetstream::stream;
use futures_util::StreamExt as _;
use rdkafka::Offset;
use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::Message as _;
use rdkafka::producer::{FutureProducer, FutureRecord};

use crate::support::kafka::{ENGINES, Engine, KafkaBroker, PATIENCE};
use crate::support::nats::{Access, NatsServer, Options, Tls};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);

/// A stream `events` of the subjects `events.>`.
async fn stream(server: &NatsServer) -> stream::Stream {
    let config = stream::Config {
        name: "events".to_owned(),
        subjects: vec!["events.>".to_owned()],
        ..stream::Config::default()
    };
    server.jetstream().await.create_stream(config).await.unwrap()
}

async fn publish(server: &NatsServer, texts: &[&'static str]) {
    let context = server.jetstream().await;
    for text in texts {
        context.publish("events.bot", (*text).into()).await.unwrap().await.unwrap();
    }
}

/// The sequence and the payload of every message.
async fn all(server: &NatsServer) -> Vec<(u64, String)> {
    let stream = server.jetstream().await.get_stream("events").await.unwrap();
    let config = pull::OrderedConfig {
        deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: 1 },
        ..pull::OrderedConfig::default()
    };
    let count = usize::try_from(stream.cached_info().state.messages).unwrap();
    let consumer = stream.create_consumer(config).await.unwrap();
    let messages = consumer.messages().await.unwrap().take(count);
    let messages = messages.map(|message| {
        let message = message.unwrap();
        let text = String::from_utf8(message.payload.to_vec()).unwrap();
        (message.info().unwrap().stream_sequence, text)
    });
    messages.collect().await
}

#[tokio::test]
async fn nats_gives_back_in_order_what_was_published() {
    for access in [Access::Open, Access::User, Access::Token, Access::Nkey, Access::Creds] {
        let server = NatsServer::start(Options { access, ..Options::default() });
        stream(&server).await;
        publish(&server, &["a", "b", "c"]).await;
        let expected = [(1, "a"), (2, "b"), (3, "c")].map(|(at, text)| (at, text.to_owned()));
        assert_eq!(all(&server).await, expected, "{access:?}");
    }
}

#[tokio::test]
async fn nats_keeps_acknowledged_messages_when_it_is_killed() {
    for sync_always in [false, true] {
        let mut server = NatsServer::start(Options { sync_always, ..Options::default() });
        let created = stream(&server).await.cached_info().created;
        publish(&server, &["a", "b"]).await;
        server.restart();
        assert_eq!(all(&server).await.len(), 2);
        let stream = server.jetstream().await.get_stream("events").await.unwrap();
        assert_eq!(stream.cached_info().created, created);
    }
}

#[tokio::test]
async fn nats_has_no_streams_when_its_disk_is_lost() {
    let mut server = NatsServer::start(Options::default());
    let created = stream(&server).await.cached_info().created;
    server.kill9();
    server.lose_everything();
    server.restart();
    assert!(server.jetstream().await.get_stream("events").await.is_err());
    assert!(stream(&server).await.cached_info().created > created);
}

#[tokio::test]
async fn nats_speaks_tls_and_asks_for_certificates() {
    for tls in [Tls::On, Tls::Mutual] {
        let server = NatsServer::start(Options { tls, ..Options::default() });
        stream(&server).await;
        publish(&server, &["a"]).await;
        assert_eq!(all(&server).await.len(), 1);
        let untrusted = async_nats::connect(server.url()).await;
        assert!(untrusted.is_err(), "{tls:?}: a client without the authority connects");
        let ca = server.papers().path("ca");
        let unknown = async_nats::ConnectOptions::new().add_root_certificates(ca);
        let connects = unknown.connect(server.url()).await.is_ok();
        assert_eq!(connects, tls == Tls::On, "{tls:?}: a client without a certificate");
    }
}

#[tokio::test]
async fn nats_refuses_clients_without_credentials() {
    for access in [Access::User, Access::Token, Access::Nkey, Access::Creds] {
        let server = NatsServer::start(Options { access, ..Options::default() });
        let refused = async_nats::connect(server.url()).await;
        assert!(refused.is_err(), "{access:?}");
    }
}

#[tokio::test]
async fn nats_refuses_what_exceeds_its_store() {
    let server = NatsServer::start(Options { max_file_store: 1 << 20, ..Options::default() });
    stream(&server).await;
    let context = server.jetstream().await;
    let publish = async || {
        let publish = context.publish("events.bot", vec![0; 512 << 10].into()).await.unwrap();
        publish.await
    };
    publish().await.unwrap();
    let mut refused = publish().await;
    if refused.is_ok() {
        refused = publish().await;
    }
    assert!(refused.is_err(), "{refused:?}");
}

#[tokio::test]
async fn a_frozen_nats_server_answers_when_it_thaws() {
    let server = NatsServer::start(Options::default());
    stream(&server).await;
    let context = async_nats::jetstream::new(server.client().await);
    server.sigstop();
    let publish = async || context.publish("events.bot", "a".into()).await.unwrap().await;
    let frozen = tokio::time::timeout(Duration::from_millis(300), publish()).await;
    assert!(frozen.is_err(), "it is frozen");
    server.sigcont();
    eventually(LONG, "it answers", async || publish().await.is_ok()).await;
}

/// Sends the values to partition 0, in one batch for each.
pub(super) async fn produce(broker: &KafkaBroker, topic: &str, values: &[&str]) {
    let producer: FutureProducer = broker.config().set("acks", "all").create().unwrap();
    for value in values {
        let record = FutureRecord::to(topic).partition(0).key("bot").payload(*value);
        producer.send(record, PATIENCE).await.unwrap();
    }
}

/// A consumer that reads partition 0 from here.
pub(super) fn consumer(broker: &KafkaBroker, topic: &str, from: Offset) -> BaseConsumer {
    let mut config = broker.config();
    config.set("group.id", "test").set("enable.auto.commit", "false");
    config.set("auto.offset.reset", "error");
    let consumer: BaseConsumer = config.create().unwrap();
    let mut list = TopicPartitionList::new();
    list.add_partition_offset(topic, 0, from).unwrap();
    consumer.assign(&list).unwrap();
    consumer
}

/// The next records, as offset and value.
pub(super) fn read(consumer: &BaseConsumer, count: usize) -> Vec<(i64, String)> {
    let next = || {
        let message = consumer.poll(PATIENCE).expect("a record in time").unwrap();
        let value = message.payload().unwrap_or_default();
        (message.offset(), String::from_utf8(value.to_vec()).unwrap())
    };
    std::iter::repeat_with(next).take(count).collect()
}

fn numbered(texts: &[&str]) -> Vec<(i64, String)> {
    (0..).zip(texts.iter().map(|&text| text.to_owned())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn kafka_gives_back_in_order_what_was_produced() {
    for engine in ENGINES {
        let broker = KafkaBroker::start(engine);
        broker.create_topic("events", 2).await;
        produce(&broker, "events", &["a", "b", "c"]).await;
        let consumer = consumer(&broker, "events", Offset::Beginning);
        assert_eq!(read(&consumer, 3), numbered(&["a", "b", "c"]), "{engine:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_broker_answers_when_it_thaws() {
    for engine in ENGINES {
        let broker = KafkaBroker::start(engine);
        broker.create_topic("events", 1).await;
        let consumer = consumer(&broker, "events", Offset::Offset(0));
        broker.sigstop();
        assert!(consumer.fetch_watermarks("events", 0, Duration::from_millis(300)).is_err());
        broker.sigcont();
        produce(&broker, "events", &["a"]).await;
        assert_eq!(read(&consumer, 1), numbered(&["a"]), "{engine:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_broker_is_found_at_the_same_address() {
    for engine in ENGINES {
        let mut broker = KafkaBroker::start(engine);
        broker.create_topic("events", 1).await;
        produce(&broker, "events", &["a"]).await;
        if engine == Engine::Noida {
            broker.stop();
        } else {
            broker.kill9();
        }
        broker.restart();
        if engine == Engine::Tansu {
            broker.create_topic("events", 1).await;
            produce(&broker, "events", &["a"]).await;
        }
        let consumer = consumer(&broker, "events", Offset::Offset(0));
        assert_eq!(read(&consumer, 1), numbered(&["a"]), "{engine:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_behind_tls_asks_for_certificates() {
    for mutual in [false, true] {
        let broker = KafkaBroker::encrypted(mutual);
        broker.create_topic("events", 1).await;
        produce(&broker, "events", &["a"]).await;
        let reader = consumer(&broker, "events", Offset::Offset(0));
        assert_eq!(read(&reader, 1), numbered(&["a"]));
        let mut unknown = rdkafka::ClientConfig::new();
        unknown.set("bootstrap.servers", broker.brokers()).set("security.protocol", "ssl");
        unknown.set("ssl.ca.location", broker.papers().path("ca").display().to_string());
        let unknown: BaseConsumer = unknown.create().unwrap();
        let patience = if mutual { Duration::from_secs(2) } else { PATIENCE };
        let connects = unknown.fetch_metadata(Some("events"), patience).is_ok();
        assert_eq!(connects, !mutual, "a client without a certificate");
    }
}
