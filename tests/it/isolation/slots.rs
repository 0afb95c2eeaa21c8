//! Requests of one tenant that wait for something other than capacity: they hold no slots in flight, and few
//! of them wait.

use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use serde_json::json;
use tokio::task::JoinSet;

use crate::support::admission::admitted;
use crate::support::automation_rig::{LONG, RULES};
use crate::support::bus::event;
use crate::support::config::config;
use crate::support::counter_fleet::{Node, Stores};
use crate::support::http::{Client, Response};
use crate::support::interceptor::{Interception, Matcher};
use crate::support::mongo_proxy::on;
use crate::support::redis::{Options, Persistence, RedisServer};
use crate::support::served::Served;
use crate::support::tokens::{Tokens, text};
use crate::support::wait::{eventually, judged, tried};

/// A slow machine may need several tries: after some time, nothing waits any more.
const TRIES: usize = 10;
/// Requests wait for at least 5 s.
const STILL: Duration = Duration::from_secs(3);
/// As many requests of one caller as may wait.
const WAITING: usize = 32;
const ALL: &str = r#"scopes = ["publish", "read", "operate"]"#;
const STRUCTURED: &str = "application/cloudevents+json";
const BATCH: &str = "application/cloudevents-batch+json";

fn tenants() -> Tokens {
    Tokens::new(&[
        ("shop", &format!("{ALL}, bots = [\"shop-*\"]")),
        ("other", &format!("{ALL}, bots = [\"other-*\"]")),
        ("root", &format!("{ALL}, bots = [\"*\"]")),
    ])
}

fn clients(client: &Client) -> [Client; 2] {
    ["shop", "other"].map(|name| client.with_token(&text(name)))
}

/// Writes a rule.
async fn put(client: Client, bot: &'static str, number: usize) -> Response {
    let rule = json!({ "on": ["no.such"], "actions": [{ "set_tag": { "tag": "x" } }] }).to_string();
    let path = format!("/v1/bots/{bot}/automations/r{number}");
    client.send("PUT", &path, &[("content-type", "application/json")], rule.as_bytes()).await
}

/// Reads more totals than a bot may read twice at a time.
async fn totals(client: Client, bot: &'static str) -> Response {
    let ids: Vec<_> = (0..101).map(|number| format!("ad-{number}")).collect();
    let path = format!("/v1/bots/{bot}/counters/query");
    let body = json!({ "ids": ids }).to_string();
    client.send("POST", &path, &[("content-type", "application/json")], body.as_bytes()).await
}

/// Publishes twice at the same time.
async fn both_are_published(quiet: &Client) -> bool {
    let publish = async |id: u32| quiet.publish(STRUCTURED, event("other-1", "t", id)).await;
    let (first, second) = tokio::join!(publish(1), publish(2));
    (first.code, second.code) == (202, 202)
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_writes_that_wait_for_their_turn_take_no_slot_in_flight() {
    let (stores, tokens) = (Stores::start(Persistence::Always), tenants());
    let settings = [("auth.tokens", &*tokens.setting), ("admission.limit_max", "4")];
    let node = Node::start(&stores, &[RULES, &settings].concat()).await;
    let [hostile, quiet] = clients(&node.client());
    tried(TRIES, async |is_last| {
        let held = node.mongo.intercept(on("update", "automations"), 1, Interception::HoldReply);
        let (before, begun) = (admitted(&node.served, "p1").await, Instant::now());
        let mut writing = JoinSet::new();
        writing.spawn(put(hostile.clone(), "shop-1", 0));
        assert!(held.catches(LONG).await);
        for number in 1..4 {
            writing.spawn(put(hostile.clone(), "shop-1", number));
        }
        let are_let_in = async || admitted(&node.served, "p1").await > before + 3.5;
        eventually(LONG, "they are let in", are_let_in).await;
        // One rule is being written, and three wait. Publishes may use three of the four slots.
        eventually(LONG, "other tenants publish", async || both_are_published(&quiet).await).await;
        judged(!is_last && begun.elapsed() > STILL, || {
            assert!(writing.try_join_next().is_none(), "the writes have not ended meanwhile");
        })
    })
    .await;
}

/// The message to every process that rules of this bot change.
fn tells(bot: &str) -> Matcher {
    let text = format!("rules {bot}").into_bytes();
    Box::new(move |command| command.windows(text.len()).any(|part| part == text))
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_writes_that_wait_or_are_refused_tell_no_process_of_a_change() {
    let (stores, tokens) = (Stores::start(Persistence::Always), tenants());
    let settings = [("auth.tokens", &*tokens.setting)];
    let node = Node::start(&stores, &[RULES, &settings].concat()).await;
    let [hostile, _] = clients(&node.client());
    tried(TRIES, async |is_last| {
        let held = node.mongo.intercept(on("update", "automations"), 1, Interception::HoldReply);
        let second = node.redis.intercept(tells("shop-1"), 2, Interception::Watch);
        let (begun, mut writing) = (Instant::now(), JoinSet::new());
        writing.spawn(put(hostile.clone(), "shop-1", 0));
        assert!(held.catches(LONG).await);
        for number in 1..=WAITING + 1 {
            writing.spawn(put(hostile.clone(), "shop-1", number));
        }
        let refused = writing.join_next().await.unwrap().unwrap();
        let (is_told, is_late) = (second.has_caught(), begun.elapsed() > STILL);
        held.release();
        writing.join_all().await;
        judged(!is_last && is_late, || {
            assert_eq!(refused.code, 429, "{refused:?}");
            assert!(!is_told, "only the first write has begun");
        })
    })
    .await;
}

/// Sends a request of a token for a bot.
type Ask = fn(Client, &'static str, usize) -> BoxFuture<'static, Response>;

#[tokio::test(flavor = "multi_thread")]
async fn few_requests_of_one_token_wait_for_mongodb_and_further_ones_are_refused_immediately() {
    const MORE: usize = 8;
    let (stores, tokens) = (Stores::start(Persistence::Always), tenants());
    let settings = [("auth.tokens", &*tokens.setting), ("counters.read_timeout", "\"10s\"")];
    let node = Node::start(&stores, &[RULES, &settings].concat()).await;
    let [hostile, quiet] = clients(&node.client());
    let kinds: [(&str, &str, Ask); 2] = [
        ("update", "automations", |client, bot, number| put(client, bot, number).boxed()),
        ("find", "counters_totals", |client, bot, _| totals(client, bot).boxed()),
    ];
    for (command, collection, ask) in kinds {
        tried(TRIES, async |is_last| {
            let of_first = on(command, collection);
            let held = node.mongo.intercept(of_first, 1, Interception::HoldReply);
            let (begun, mut asking) = (Instant::now(), JoinSet::new());
            asking.spawn(ask(hostile.clone(), "shop-1", 0));
            assert!(held.catches(LONG).await);
            for number in 1..=WAITING + MORE {
                asking.spawn(ask(hostile.clone(), "shop-1", number));
            }
            let mut refused = Vec::new();
            while refused.len() < MORE {
                refused.push(asking.join_next().await.unwrap().unwrap());
            }
            let theirs = ask(quiet.clone(), "other-1", 0).await;
            let is_late = begun.elapsed() > STILL;
            held.release();
            let waited = asking.join_all().await;
            judged(!is_last && is_late, || {
                for one in &refused {
                    assert_eq!((one.code, one.header("retry-after")), (429, Some("1")), "{one:?}");
                    assert_eq!(one.problem(), "quota");
                    let detail = one.json()["detail"].as_str().unwrap().to_owned();
                    assert!(detail.contains("32 requests of this caller already wait"), "{detail}");
                }
                assert!(matches!(theirs.code, 200 | 201), "{theirs:?}");
                assert!(waited.iter().all(|one| one.code != 429), "{waited:?}");
            })
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn publishes_that_wait_for_the_backlog_take_no_slot_in_flight() {
    let (server, tokens) = (RedisServer::start(Options::default()), tenants());
    let settings = config(
        &server,
        "p",
        &[
            ("auth.tokens", &*tokens.setting),
            ("admission.limit_max", "4"),
            ("pipelines.p.handler", "\"log\""),
        ],
    );
    let reader = Served::start_as(&settings, "ingest,work").await;
    let events: Vec<_> = (0..100).map(|id| event("shop-1", "t", id)).collect();
    let batch = format!("[{}]", events.join(","));
    tried(TRIES, async |_| {
        let publisher = Served::start_as(&settings, "http").await;
        let client = Client::new(&publisher.http());
        let [hostile, quiet] = clients(&client);
        assert_eq!(hostile.publish(BATCH, &batch).await.code, 202);
        let root = client.with_token(&text("root"));
        eventually(LONG, "it is handled", async || {
            root.get("/v1/pipelines/p").await.json()["depth"] == 0
        })
        .await;
        // Copying stops for less time than after which requests would stop to wait.
        let stopped = Instant::now();
        reader.sigstop();
        let mut publishing = JoinSet::new();
        for _ in 0..30 {
            let (hostile, batch) = (hostile.clone(), batch.clone());
            publishing.spawn(async move { hostile.publish(BATCH, batch).await });
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        while publishing.try_join_next().is_some() {}
        // Publishes may use three of the four slots.
        let wait = publishing.len() >= 3;
        let are_published = both_are_published(&quiet).await;
        let is_soon = stopped.elapsed() < Duration::from_millis(250);
        reader.sigcont();
        publishing.shutdown().await;
        wait && is_soon && are_published
    })
    .await;
}
