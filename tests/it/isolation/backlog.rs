//! A tenant that publishes faster than its events are copied has few of them on the bus, so the
//! events of others do not wait behind them. While nothing is copied, the bus keeps all events.

use std::time::{Duration, Instant};

use futures_util::future::join_all;

use crate::support::bus::{event, wire};
use crate::support::config::STREAM;
use crate::support::http::{Client, Response};
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::tokens::{Tokens, text};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);
const BATCH: &str = "application/cloudevents-batch+json";
const STRUCTURED: &str = "application/cloudevents+json";
/// A slow machine may need several tries: a stop that lasts too long shows nothing.
const TRIES: usize = 10;

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
    let tokens = Tokens::new(&[
        ("root", r#"scopes = ["publish", "read"], bots = ["*"]"#),
        ("hostile", r#"scopes = ["publish"], bots = ["hostile-*"]"#),
        ("quiet", r#"scopes = ["publish"], bots = ["quiet"]"#),
    ]);
    let server = RedisServer::start(Options::default());
    let config = format!("auth.tokens = {}\n{}", tokens.setting, config(&server));
    let reader = Served::start_as(&config, "ingest,work").await;
    // One bot, and then a token that spreads its events over many.
    for (token, bots, sender) in [("root", 1, "bot \"hostile-0\""), ("hostile", 30, "this token")] {
        let bodies: Vec<_> =
            (0..30).map(|n| batch(&format!("hostile-{}", n % bots), 100)).collect();
        let mut shown = false;
        for _ in 0..TRIES {
            let publisher = Served::start_as(&config, "http").await;
            let by = |name: &str| Client::new(&publisher.http()).with_token(&text(name));
            let first = by(token).publish(BATCH, &bodies[0]).await;
            assert_eq!(first.code, 202, "{first:?}");
            eventually(LONG, "it is handled", async || depth(&by("root")).await == 0).await;

            // Copying stops for less time than after which requests would stop to wait.
            let before = on_the_bus(&server).await;
            let (client, stopped) = (by(token), Instant::now());
            reader.sigstop();
            let hostile = join_all(bodies.iter().map(|body| client.publish(BATCH, body)));
            let others = async {
                tokio::time::sleep(Duration::from_millis(100)).await;
                let quiet = by("quiet").publish(STRUCTURED, event("quiet", "test", 1)).await;
                let on_the_bus = on_the_bus(&server).await.saturating_sub(before);
                let stopped = stopped.elapsed();
                reader.sigcont();
                (quiet, on_the_bus, stopped)
            };
            let (hostile, (quiet, on_the_bus, stopped)) = futures_util::join!(hostile, others);
            // After a longer stop, requests are refused because they have waited.
            if stopped >= Duration::from_millis(250) {
                continue;
            }
            assert_eq!(quiet.code, 202, "{quiet:?}");
            shown = refused_for_the_bus(&hostile, sender);
            if shown {
                assert!(on_the_bus <= 700 + 1, "{sender}: {on_the_bus} events after {stopped:?}");
                break;
            }
        }
        assert!(shown, "{sender}: the machine was too slow in every one of {TRIES} tries");
    }
    drop(reader);
}

/// Some answers are refusals, and all of these name the sender of the uncopied events. False: the machine
/// was so busy that requests were refused because they had waited.
fn refused_for_the_bus(answers: &[Response], sender: &str) -> bool {
    let refused: Vec<_> = answers.iter().filter(|answer| answer.code != 202).collect();
    assert!(!refused.is_empty(), "{sender}: fewer than 30 requests wait");
    if refused.iter().any(|refusal| refusal.header("x-shed-reason") == Some("wait")) {
        return false;
    }
    for refusal in refused {
        assert_eq!(refusal.code, 429, "{refusal:?}");
        assert_eq!(refusal.header("x-shed-reason"), Some("bus"), "{refusal:?}");
        assert!(refusal.header("retry-after").is_some(), "{refusal:?}");
        let detail = refusal.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains(&format!("events of {sender} are on the bus")), "{detail}");
    }
    true
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
