//! A tenant that publishes faster than its events are copied has few of them on the bus, so the
//! events of others do not wait behind them. While nothing is copied, the bus keeps all events.

use std::time::{Duration, Instant};

use futures_util::future::join_all;

use crate::support::bus::{event, wire};
use crate::support::config::STREAM;
use crate::support::http::{Client, Response};
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);
const BATCH: &str = "application/cloudevents-batch+json";
const STRUCTURED: &str = "application/cloudevents+json";

fn config(server: &RedisServer) -> String {
    format!(
        "http.listen = \"127.0.0.1:0\"\nmetrics.listen = \"127.0.0.1:0\"\nredis.url = {:?}\n\
         [pipelines.p]\nhandler = \"log\"\nevents = [\"test\"]\n",
        server.url(),
    )
}

/// A batch of events of a bot.
fn batch(bot: &str, events: usize) -> String {
    let events: Vec<_> = (0..events).map(|id| event(bot, "test", id)).collect();
    format!("[{}]", events.join(","))
}

async fn publish(client: &Client, body: &str, times: usize) -> Vec<Response> {
    let mut answers = Vec::new();
    for _ in 0..times {
        answers.push(client.publish(BATCH, body).await);
    }
    answers
}

async fn on_the_bus(server: &RedisServer) -> u64 {
    let mut pipe = redis::Pipeline::new();
    pipe.cmd("XLEN").arg(STREAM);
    let answers = wire(server).run(&pipe).await.unwrap();
    redis::from_redis_value_ref(&answers[0]).unwrap()
}

/// Number of queued events.
async fn depth(client: &Client) -> u64 {
    let answer = client.get("/v1/pipelines/p").await;
    answer.json()["depth"].as_u64().unwrap()
}

#[tokio::test]
async fn a_tenant_that_publishes_without_pause_has_few_uncopied_events_and_others_are_accepted() {
    let server = RedisServer::start(Options::default());
    let reader = Served::start_as(&config(&server), "ingest,work").await;
    let publisher = Served::start_as(&config(&server), "http").await;
    let client = Client::new(&publisher.http());
    let first = publish(&client, &batch("hostile", 100), 1).await;
    assert_eq!(first[0].code, 202, "{first:?}");
    eventually(LONG, "it is handled", async || depth(&client).await == 0).await;

    // Copying stops for less time than after which requests would stop to wait.
    let before = on_the_bus(&server).await;
    let stopped = Instant::now();
    reader.sigstop();
    let body = batch("hostile", 100);
    let hostile = join_all((0..30).map(|_| publish(&client, &body, 1)));
    let others = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let quiet = client.publish(STRUCTURED, event("quiet", "test", 1)).await;
        let on_the_bus = on_the_bus(&server).await - before;
        let stopped = stopped.elapsed();
        reader.sigcont();
        (quiet, on_the_bus, stopped)
    };
    let (hostile, (quiet, on_the_bus, stopped)) = futures_util::join!(hostile, others);
    assert_eq!(quiet.code, 202, "{quiet:?}");
    if stopped < Duration::from_millis(250) {
        assert!(on_the_bus <= 1_001, "{on_the_bus} events after {stopped:?}");
    }
    let refused: Vec<_> = hostile.iter().flatten().filter(|answer| answer.code != 202).collect();
    assert!(!refused.is_empty(), "30 requests do not wait at once");
    for refusal in refused {
        assert_eq!(refusal.code, 429, "{refusal:?}");
        assert_eq!(refusal.header("x-shed-reason"), Some("bus"), "{refusal:?}");
        assert!(refusal.header("retry-after").is_some(), "{refusal:?}");
        let detail = refusal.json()["detail"].to_string();
        assert!(detail.contains("events of bot \\\"hostile\\\" are on the bus"), "{detail}");
    }
    drop((reader, publisher));
}

#[tokio::test]
async fn a_client_that_loads_many_events_of_one_bot_is_not_refused() {
    let server = RedisServer::start(Options::default());
    let process = Served::start(&config(&server)).await;
    let client = Client::new(&process.http());
    let body = batch("loaded", 100);
    let loaded = join_all((0..8).map(|_| publish(&client, &body, 25))).await;
    let loaded: Vec<_> = loaded.into_iter().flatten().collect();
    assert!(loaded.iter().all(|answer| answer.code == 202), "{loaded:?}");
    eventually(LONG, "all are handled", async || depth(&client).await == 0).await;
    assert_eq!(on_the_bus(&server).await, 20_000);
    drop(process);
}

#[tokio::test]
async fn the_bus_keeps_all_events_while_no_process_reads_it() {
    let server = RedisServer::start(Options::default());
    let publisher = Served::start_as(&config(&server), "http").await;
    let client = Client::new(&publisher.http());
    let began = Instant::now();
    let answers = publish(&client, &batch("b", 1_000), 20).await;
    assert!(answers.iter().all(|answer| answer.code == 202), "{answers:?}");
    assert!(began.elapsed() < LONG / 4, "the requests hardly wait");
    assert_eq!(on_the_bus(&server).await, 20_000);
    // The backlog of an outage is copied, and bounds nobody afterwards.
    let reader = Served::start_as(&config(&server), "ingest,work").await;
    let copied = async || {
        let answers = publish(&client, &batch("b", 10), 1).await;
        assert_eq!(answers[0].code, 202, "{answers:?}");
        depth(&client).await == 0
    };
    eventually(LONG, "the backlog is handled", copied).await;
    drop((reader, publisher));
}
