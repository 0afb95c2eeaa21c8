//! Brokers that die, freeze, move or are not there: nothing is lost, and no call hangs.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fairlane::bus::BusError;
use fairlane::bus::kafka::{KafkaLogin, KafkaSettings, KafkaSource, KafkaTls, Password};
use fairlane::bus::source::Source as _;
use fairlane::config::TlsFiles;
use fairlane::id::Offset;
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::types::RDKafkaRespErr;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::rig::{LONG, Rig, WAIT, event, settings};
use crate::support::kafka::{Engine, KafkaBroker, PATIENCE};
use crate::support::redis::free_port;
use crate::support::wait::{Stopwatch, eventually, promised};

/// The longest time of a call to a broker that does not answer, on top of its wait.
const ANSWER: Duration = Duration::from_secs(5);

#[tokio::test(flavor = "multi_thread")]
async fn a_source_starts_without_its_brokers_and_finds_them_later() {
    let watch = Stopwatch::start();
    let address = format!("127.0.0.1:{}", free_port());
    let source = KafkaSource::new(settings(&address, "events")).unwrap();
    watch.within(Duration::from_secs(1), "it starts");
    let error = source.logs().await.unwrap_err();
    assert!(matches!(error, BusError::Connect { .. }), "{error:?}");
    assert!(error.to_string().contains(&address), "{error}");
    let error = Rig::new(settings(&address, "events")).publish(&[("b", "0")]).await.unwrap_err();
    assert!(matches!(error, BusError::Connect { .. }), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_broker_costs_no_event_of_those_that_were_confirmed() {
    // Tansu keeps nothing. This broker loses what is younger than a second, also a topic.
    const KEPT: Duration = Duration::from_secs(2);
    let mut broker = KafkaBroker::start(Engine::Noida);
    broker.create_topic("events", 2).await;
    promised(KEPT).await;
    let mut rig = Rig::new(settings(&broker.brokers(), "events"));
    rig.open_all(2).await;
    let mut confirmed = Vec::new();
    let mut found = Vec::new();
    for round in 0..3 {
        for at in 0..20 {
            let id = format!("{round}-{at:02}");
            let bot = format!("bot-{}", at % 5);
            // Repeated with the id until it is confirmed, as publishers do.
            let started = Instant::now();
            loop {
                let Err(error) = rig.publish(&[(&bot, &id)]).await else { break };
                assert!(error.is_passing(), "{error}");
                assert!(started.elapsed() < 4 * LONG, "{id} is not confirmed: {error}");
            }
            confirmed.push(id);
            if at == 10 {
                promised(KEPT).await;
                broker.kill9();
                broker.restart();
            }
        }
        let started = Instant::now();
        while !confirmed.iter().all(|id| found.contains(id)) {
            assert!(started.elapsed() < 4 * LONG, "{found:?}");
            match rig.fetch().await {
                Ok(entries) => found.extend(
                    entries.into_iter().map(|(_, entry)| entry.event.unwrap().id().to_owned()),
                ),
                Err(error) => {
                    assert!(error.is_passing(), "{error}");
                    rig.reopen().await;
                }
            }
        }
    }
    found.sort();
    found.dedup();
    assert_eq!(found, confirmed);
    assert_eq!(rig.lost, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_broker_hangs_no_call_and_loses_nothing() {
    for engine in [Engine::Noida, Engine::Tansu] {
        let broker = KafkaBroker::start(engine);
        broker.create_topic("events", 1).await;
        let mut rig = Rig::new(settings(&broker.brokers(), "events"));
        rig.open_all(1).await;
        rig.publish(&[("b", "0")]).await.unwrap();
        rig.read(1).await;
        broker.sigstop();
        let watch = Stopwatch::start();
        let _ = rig.fetch().await;
        watch.within_steps(WAIT + ANSWER, 2, "fetch");
        let watch = Stopwatch::start();
        rig.source.logs().await.unwrap_err();
        watch.within_steps(ANSWER, 2, "logs");
        let watch = Stopwatch::start();
        assert_eq!(rig.release().await.unwrap()[0].lag, None, "reading does not end");
        watch.within_steps(ANSWER, 2, "release");
        let watch = Stopwatch::start();
        let error = rig.publish(&[("b", "1")]).await.unwrap_err();
        assert!(matches!(error, BusError::Unknown { .. }), "{error:?}");
        watch.within_steps(2 * ANSWER, 2, "publish");
        eventually(LONG, "reading reports that the broker is away", async || {
            rig.fetch().await.is_err()
        })
        .await;
        broker.sigcont();
        rig.reopen().await;
        eventually(LONG, "publishing works", async || rig.publish(&[("b", "2")]).await.is_ok())
            .await;
        let mut ids = Vec::new();
        eventually(LONG, "reading works", async || {
            let found = rig.fetch().await.unwrap_or_default();
            ids.extend(found.into_iter().map(|(_, entry)| entry.event.unwrap().id().to_owned()));
            ids.last().is_some_and(|id| id == "2")
        })
        .await;
        assert_eq!(rig.lost, 0, "{engine:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_moves_to_another_broker_is_read_on() {
    let mock = MockCluster::new(3).unwrap();
    mock.create_topic("events", 1, 3).unwrap();
    mock.partition_leader("events", 0, Some(1)).unwrap();
    let mut rig = Rig::new(settings(&mock.bootstrap_servers(), "events"));
    rig.open_all(1).await;
    for (at, leader) in [(0, 2), (1, 3), (2, 1)] {
        let id = at.to_string();
        let mut published = rig.publish(&[("b", &id)]).await;
        while let Err(error) = published {
            assert!(error.is_passing(), "{error}");
            published = rig.publish(&[("b", &id)]).await;
        }
        assert_eq!(rig.read(1).await[&0], [id]);
        mock.partition_leader("events", 0, Some(leader)).unwrap();
    }
    assert_eq!(rig.lost, 0);
}

/// Damages one word of a record.
fn word(bytes: &mut [u8], at: usize) {
    bytes[at..at + 7].copy_from_slice(b"damaged");
}

/// Gives the batch of a record a format that the client does not know.
fn format(bytes: &mut [u8], at: usize) {
    let value = bytes[..at].windows(2).rposition(|text| text == b"{\"").unwrap();
    // The header of a batch has 61 bytes, with the format after the first 16. The record has 11 before its
    // value: two lengths of two bytes, two of one, four of one, and the key.
    let format = value - 11 - 61 + 16;
    assert_eq!(bytes[format], 2);
    bytes[format] = 9;
}

/// Forwards connections, and damages an answer at one word, as a faulty network card would.
async fn damage(listener: TcpListener, broker: SocketAddr, how: fn(&mut [u8], usize)) {
    let mut lines = JoinSet::new();
    loop {
        let (client, _) = listener.accept().await.unwrap();
        let server = TcpStream::connect(broker).await.unwrap();
        let (mut from_client, mut to_client) = client.into_split();
        let (mut from_server, mut to_server) = server.into_split();
        lines.spawn(async move { drop(tokio::io::copy(&mut from_client, &mut to_server).await) });
        lines.spawn(async move {
            let mut bytes = vec![0; 64 * 1_024];
            while let Ok(length @ 1..) = from_server.read(&mut bytes).await {
                let found = bytes[..length].windows(7).position(|word| word == b"DAMAGED");
                if let Some(at) = found {
                    how(&mut bytes, at);
                }
                if to_client.write_all(&bytes[..length]).await.is_err() {
                    break;
                }
            }
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_cannot_be_read_names_its_place_and_is_never_skipped() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let broker = KafkaBroker::start_behind(listener.local_addr().unwrap().port());
    let mut front = JoinSet::new();
    front.spawn(damage(listener, broker.own_address(), word));
    broker.create_topic("events", 1).await;
    let producer: FutureProducer = broker.config().create().unwrap();
    for data in ["first", "DAMAGED", "last"] {
        let json = event("bot", &data.to_lowercase(), data);
        let record = FutureRecord::to("events").partition(0).key("bot").payload(&json);
        producer.send(record, PATIENCE).await.unwrap();
    }
    let checking = KafkaSettings { check_crcs: true, ..settings(&broker.brokers(), "events") };
    let mut rig = Rig::new(checking);
    for _ in 0..2 {
        rig.open_all(1).await;
        let mut error = None;
        let mut found = Vec::new();
        eventually(LONG, "the error is reported", async || {
            match rig.fetch().await {
                Ok(entries) => found.extend(entries),
                Err(failed) => error = Some(failed),
            }
            error.is_some()
        })
        .await;
        let error = error.unwrap();
        let text = error.to_string();
        assert!(matches!(error, BusError::Unreadable { .. }), "{error:?} {found:?}");
        assert!(text.contains("kafka:test/events/0") && text.contains("1-1"), "{text}");
        rig.fetch().await.unwrap_err();
    }
}

/// The client would read the rest of the answer from the wrong place if it compared the checksum, and abort
/// the process.
#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_checksum_among_several_partitions_ends_nothing() {
    const PARTITIONS: i32 = 4;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let broker = KafkaBroker::start_behind(listener.local_addr().unwrap().port());
    let mut front = JoinSet::new();
    front.spawn(damage(listener, broker.own_address(), word));
    broker.create_topic("events", PARTITIONS).await;
    let producer: FutureProducer = broker.config().create().unwrap();
    let mut ids = Vec::new();
    for partition in 0..PARTITIONS {
        for data in ["first", "DAMAGED", "last"] {
            let id = format!("{partition} {}", data.to_lowercase());
            let json = event("bot", &id, data);
            let record = FutureRecord::to("events").partition(partition).key("bot").payload(&json);
            producer.send(record, PATIENCE).await.unwrap();
            ids.push(id);
        }
    }
    let mut rig = Rig::new(settings(&broker.brokers(), "events"));
    rig.open_all(4).await;
    let mut found: Vec<_> = rig.read(ids.len()).await.into_values().flatten().collect();
    found.sort();
    ids.sort();
    assert_eq!(found, ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_cannot_be_read_stops_no_other_partition() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let broker = KafkaBroker::start_behind(listener.local_addr().unwrap().port());
    let mut front = JoinSet::new();
    front.spawn(damage(listener, broker.own_address(), format));
    broker.create_topic("events", 2).await;
    let producer: FutureProducer = broker.config().create().unwrap();
    let put = async |partition: i32, data: &str| {
        let json = event("bot", &data.to_lowercase(), data);
        let record = FutureRecord::to("events").partition(partition).key("bot").payload(&json);
        producer.send(record, PATIENCE).await.unwrap();
    };
    for data in ["first", "DAMAGED", "last"] {
        put(0, data).await;
    }
    let mut rig = Rig::new(settings(&broker.brokers(), "events"));
    let mut opened = Instant::now();
    rig.open_all(2).await;
    let mut found = Vec::new();
    let (mut retries, mut at) = (0, 0);
    while retries < 1 {
        at += 1;
        let id = format!("other-{at}");
        put(1, &id).await;
        let started = Instant::now();
        while found.last() != Some(&id) {
            assert!(started.elapsed() < LONG, "{id} is not read: {found:?}");
            match rig.fetch().await {
                Ok(entries) => found.extend(entries.into_iter().map(|(_, entry)| {
                    entry.event.map_or_else(|bad| format!("{bad:?}"), |event| event.id().to_owned())
                })),
                // It is tried again after a while.
                Err(error) => {
                    assert!(matches!(error, BusError::Unreadable { .. }), "{error:?}");
                    assert!(opened.elapsed() > Duration::from_secs(10), "{:?}", opened.elapsed());
                    (opened, retries) = (Instant::now(), retries + 1);
                    rig.reopen().await;
                }
            }
        }
    }
    found.retain(|id| !id.starts_with("other"));
    assert_eq!(found, ["first"], "nothing behind the damage is read");
    eventually(LONG, "the partition is reported", async || {
        let _ = rig.fetch().await;
        let problem = rig.release().await.unwrap()[0].problem.clone();
        matches!(problem, Some(BusError::Unreadable { .. }))
    })
    .await;
    // As `fairlane bus skip` does.
    rig.positions.insert("kafka:test/events/0".into(), Offset { ms: 1, seq: 2 });
    rig.reopen().await;
    assert_eq!(rig.read(1).await[&0], ["last"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_without_the_right_to_read_it_stops_no_other_topic() {
    let mock = MockCluster::new(1).unwrap();
    for topic in ["events", "secret"] {
        mock.create_topic(topic, 1, 1).unwrap();
    }
    let topics = vec!["events".to_owned(), "secret".to_owned()];
    let both = KafkaSettings { topics, ..settings(&mock.bootstrap_servers(), "events") };
    let mut rig = Rig::new(both);
    rig.logs(2).await;
    assert_eq!(rig.source.topics().len(), 2);
    let forbidden = RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED;
    mock.topic_error("secret", forbidden).unwrap();
    rig.open_all(1).await;
    // Otherwise it would count as a topic that does not exist yet.
    assert_eq!(rig.source.topics(), [std::sync::Arc::<str>::from("kafka:test/events/")]);
    rig.publish(&[("b", "0")]).await.unwrap();
    assert_eq!(rig.read(1).await[&0], ["0"]);
    let problem = rig.release().await.unwrap()[0].problem.as_ref().unwrap().to_string();
    assert!(problem.contains("no right") && problem.contains("secret"), "{problem}");
    mock.topic_error("secret", RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR).unwrap();
    rig.logs(2).await;
    mock.topic_error("secret", forbidden).unwrap();
    let survey = rig.source.survey().await.unwrap();
    let errors: Vec<_> = survey.topics.iter().map(|topic| topic.read_error.is_some()).collect();
    assert_eq!(errors, [false, true], "{survey:?}");
    mock.topic_error("events", forbidden).unwrap();
    eventually(LONG, "nothing may be read", async || rig.source.logs().await.is_err()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_a_source_does_not_wait_for_its_brokers() {
    let broker = KafkaBroker::start(Engine::Tansu);
    broker.create_topic("events", 1).await;
    let mut rig = Rig::new(settings(&broker.brokers(), "events"));
    rig.publish(&[("b", "0")]).await.unwrap();
    rig.open_all(1).await;
    rig.read(1).await;
    broker.sigstop();
    let watch = Stopwatch::start();
    drop(rig);
    watch.within(Duration::from_millis(500), "the drop");
    broker.sigcont();
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_is_checked_and_a_password_is_in_no_error() {
    let broker = KafkaBroker::encrypted(false);
    broker.create_topic("events", 1).await;
    // As the configuration: those of the system, and those of the file.
    let files = |ca_file| TlsFiles { ca_file, cert_file: None, key_file: None };
    let trusting = |ca_file: Option<PathBuf>| {
        let pem = files(ca_file).trusted().unwrap();
        let trusted = Some(String::from_utf8(pem).unwrap()).filter(|pem| !pem.is_empty());
        let tls = Some(KafkaTls { trusted, client: None });
        KafkaSettings { tls, ..settings(&broker.brokers(), "events") }
    };
    let rig = Rig::new(trusting(Some(broker.papers().path("ca"))));
    rig.publish(&[("b", "0")]).await.unwrap();
    assert_eq!(rig.logs(1).await.len(), 1);
    let distrusting = KafkaSource::new(trusting(None)).unwrap();
    let error = distrusting.logs().await.unwrap_err().to_string();
    assert!(error.contains("certificate"), "{error}");

    let login = KafkaLogin::ScramSha256 { user: "u".into(), password: Password::new("hunter2") };
    let plain = KafkaBroker::start(Engine::Noida);
    let login = KafkaSettings { login: Some(login), ..settings(&plain.brokers(), "events") };
    let error = KafkaSource::new(login).unwrap().logs().await.unwrap_err();
    assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
}
