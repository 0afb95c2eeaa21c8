//! A bus that does not answer, and a cluster of Kafka of which only one broker does not.

use std::time::Duration;

use async_nats::jetstream::consumer::pull;
use futures_util::TryStreamExt as _;
use rdkafka::mocking::{MockCluster, MockCoordinator};

use super::*;
use crate::support::config::configs;
use crate::support::http::get;

/// Longer than any client waits.
const FOREVER: Duration = Duration::from_secs(3_600);

#[tokio::test(flavor = "multi_thread")]
async fn a_process_starts_and_reads_the_partitions_whose_brokers_answer() {
    let mock = MockCluster::new(3).unwrap();
    mock.create_topic("events", 3, 3).unwrap();
    for (partition, leader) in [(0, 1), (1, 2), (2, 3)] {
        mock.partition_leader("events", partition, Some(leader)).unwrap();
    }
    mock.coordinator(MockCoordinator::Group("g".to_owned()), 1).unwrap();
    let mut client = ClientConfig::new();
    let producer: FutureProducer =
        client.set("bootstrap.servers", mock.bootstrap_servers()).create().unwrap();
    let put = async |partition: i32, id: &str| {
        let text = event(&format!("b{partition}"), "t", id);
        let record = FutureRecord::to("events").partition(partition).key("b").payload(&text);
        producer.send(record, LONG).await.unwrap();
    };
    let brokers: Vec<_> = mock.bootstrap_servers().split(',').map(str::to_owned).collect();
    let sources = format!(
        "[{{ name = \"k\", kind = \"kafka\", brokers = {brokers:?}, topics = [\"events\"], group = \"g\" }}]"
    );
    let server = RedisServer::start(Options::default());
    let settings = [("bus.streams", "[]"), ("bus.sources", &*sources)];
    let (log, config) = (Log::default(), config(&server, "all", &settings));
    let handled = async |count| {
        eventually(LONG, "they are handled", async || log.len() == count).await;
    };
    let instance = Instance::start(&config, log.content()).await;
    for partition in 0..3 {
        put(partition, "0").await;
    }
    handled(3).await;
    instance.stop().await;
    for partition in 0..3 {
        put(partition, "1").await;
    }
    mock.broker_round_trip_time(2, FOREVER).unwrap();
    let instance = Instance::start_unready(&config, log.content()).await;
    handled(5).await;
    put(0, "2").await;
    handled(6).await;
    let mut connection = server.connection().await;
    eventually(LONG, "operators see it", async || {
        let mut asking = redis::cmd("HVALS");
        let noted: Vec<Vec<u8>> =
            asking.arg("fl:processes").query_async(&mut connection).await.unwrap();
        let noted: Vec<_> = noted.iter().map(|text| String::from_utf8_lossy(text)).collect();
        noted.iter().any(|text| text.contains("kafka:k/events/1 cannot be read now"))
    })
    .await;
    mock.broker_round_trip_time(2, Duration::ZERO).unwrap();
    handled(7).await;
    put(1, "3").await;
    handled(8).await;
    instance.stop().await;
}

#[tokio::test]
async fn a_new_pipeline_whose_bus_does_not_answer_is_named_until_it_has_a_start() {
    let bus = Bus::kafka(1).await;
    let server = RedisServer::start(Options::default());
    let (log, sources) = (Log::default(), bus.sources());
    let settings = [("bus.streams", "[]"), ("bus.sources", &*sources)];
    let config = config(&server, "fresh", &settings);
    bus.sigstop();
    let instance = Instance::start_unready(&config, log.content()).await;
    let address = instance.address.to_string();
    let ready = async |address: &str| {
        let mut body = String::new();
        eventually(LONG, "it is ready", async || {
            let (code, found) = get(address, "/readyz").await;
            body = found;
            code == 200
        })
        .await;
        body
    };
    let body = ready(&address).await;
    assert!(body.contains("\"degraded\"") && body.contains("pipeline fresh on bus"), "{body}");
    bus.sigcont();
    eventually(LONG, "it has a start", async || {
        let (_, body) = get(&address, "/readyz").await;
        body.contains("\"ready\"") && !body.contains("without_start")
    })
    .await;
    bus.add(&["b".to_owned()], &[event("b", "t", 0)]).await;
    eventually(LONG, "it is handled", async || log.len() == 1).await;
    instance.stop().await;
    // A pipeline that has one needs no bus to be ready.
    bus.sigstop();
    let instance = Instance::start_unready(&config, log.content()).await;
    let body = ready(&instance.address.to_string()).await;
    bus.sigcont();
    assert!(body.contains("\"ready\""), "{body}");
    instance.stop().await;
}

#[tokio::test]
async fn a_pipeline_that_waits_for_its_group_does_not_end_the_reading_for_the_others() {
    let nats = NatsServer::start(NatsOptions::default());
    let stream = nats.jetstream().await.create_stream(Bus::stream()).await.unwrap();
    let (server, log, bus) =
        (RedisServer::start(Options::default()), Log::default(), Bus::Nats(nats));
    let sources = bus.sources();
    let config = |pipelines: &[&str], sources: &str| {
        configs(&server, pipelines, &[("bus.streams", "[]"), ("bus.sources", sources)])
    };
    let put = async |id: u32| bus.add(&["b".to_owned()], &[event("b", "t", id)]).await;
    let instance = Instance::start(&config(&["group-has"], &sources), log.content()).await;
    put(0).await;
    eventually(LONG, "the first is handled", async || log.ids("group-has").len() == 1).await;
    instance.stop().await;

    let sources = sources.replacen("kind", "start = \"group:old\", kind", 1);
    let both = config(&["group-has", "group-waits"], &sources);
    let instance = Instance::start_unready(&both, log.content()).await;
    put(1).await;
    eventually(LONG, "the second is handled", async || log.ids("group-has").len() == 2).await;
    let consumers = async || stream.consumer_names().try_collect::<Vec<String>>().await.unwrap();
    let before = consumers().await;
    // A session that looks for missing shards ends after four seconds.
    tokio::time::sleep(Duration::from_secs(10)).await;
    let after = consumers().await;
    assert!(
        after.iter().all(|name| before.contains(name)),
        "each session has a consumer: {after:?}"
    );
    assert_eq!(log.ids("group-waits").len(), 0);

    let config = pull::Config { durable_name: Some("old".to_owned()), ..pull::Config::default() };
    stream.create_consumer(config).await.unwrap();
    eventually(LONG, "the other one begins", async || log.ids("group-waits").len() == 2).await;
    put(2).await;
    eventually(LONG, "both have all", async || {
        ["group-has", "group-waits"].iter().all(|pipeline| log.ids(pipeline).len() == 3)
    })
    .await;
    instance.stop().await;
}
