//! What the reads of one tenant cost Redis and other tenants: few bytes of large events, turns for what is
//! large, and no numbers that the tenant does not see.

use std::time::Duration;

use fairlane::event::Event;
use fairlane::id::BotId;
use fairlane::queue::{BotOrder, PushOptions, Queue};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::support::config::{SHARDS, config};
use crate::support::http::{Client, Response};
use crate::support::instance::queue;
use crate::support::proxy::distance::Distance;
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::tokens::{Tokens, text};
use crate::support::wait::{judged, tried};

const MB: usize = 1_000_000;
/// Requests of one token at the same time. One reads, and three may wait.
const TOGETHER: usize = 12;

/// A paused bot with so many events, one after the other.
async fn fill(queue: &Queue, bot: &str, events: usize, bytes: usize) {
    let bot = BotId::parse(bot).unwrap();
    queue.pause(Some(&bot)).await.unwrap();
    let text = "x".repeat(bytes);
    for number in 0..events {
        let event = Event::builder("test.large", &bot).id(number.to_string());
        let event = event.data(&text).unwrap().build().unwrap();
        queue.push(&bot, &[event], PushOptions::default()).await.unwrap();
    }
}

/// The settings of a process of a tenant and an operator.
fn settings(server: &RedisServer, tokens: &Tokens) -> String {
    let settings = [("auth.tokens", &*tokens.setting), ("pipelines.test.handler", "\"log\"")];
    config(server, "test", &settings)
}

fn tokens() -> Tokens {
    let of = |bots: &str| format!("scopes = [\"read\"], bots = [\"{bots}\"]");
    Tokens::new(&[("shop", &of("shop-*")), ("ops", &of("*"))])
}

#[tokio::test]
async fn the_page_of_a_bot_with_large_events_reads_few_of_them() {
    let server = RedisServer::start(Options::default());
    let config = config(&server, "test", &[("pipelines.test.handler", "\"log\"")]);
    let events = queue(&config.replace("\"log\"", "\"recorder\""), "test").await;
    fill(&events, "large", 60, MB).await;
    let process = Served::start(&config).await;
    let client = Client::new(&process.http());
    let before = server.calls("lindex").await;
    let page = client.get("/bots/large").await;
    assert_eq!(page.code, 200);
    let page = String::from_utf8(page.body).unwrap();
    assert!(page.contains("Events a minute") && page.contains("test.large"), "{page}");
    let read = server.calls("lindex").await - before;
    println!("{read} events were read");
    // Five are shown, the first one is looked at some times, and five more for the chart.
    assert!((5..=20).contains(&read), "{read} events were read");
}

#[tokio::test]
async fn a_list_of_bots_with_large_events_reads_some_at_a_time_and_none_for_their_number() {
    const BOTS: usize = 20;
    let server = RedisServer::start(Options::default());
    let config = config(&server, "test", &[("redis.shards", "1")]);
    let queue = queue(&config, "test").await;
    let names: Vec<String> = (0..BOTS).map(|number| format!("bot-{number:02}")).collect();
    for (number, name) in names.iter().enumerate() {
        fill(&queue, name, 1 + number % 2, MB).await;
    }
    let list = async |order| {
        let (events, scripts) = (server.calls("lindex").await, server.calls("evalsha").await);
        let now = Duration::from_secs(4_000_000_000);
        let page = queue.list_bots(order, None, 100, &|_| true, now).await.unwrap();
        assert!(page.next.is_none() && page.bots.iter().all(|bot| bot.oldest_age_ms > 0));
        let found: Vec<String> = page.bots.iter().map(|bot| bot.bot.as_str().to_owned()).collect();
        let read = server.calls("lindex").await - events;
        (found, read, server.calls("evalsha").await - scripts)
    };
    // Each event is read for its place, and again for its age. A call reads 4 MiB.
    let (by_age, read, scripts) = list(BotOrder::Age).await;
    assert_eq!((by_age, read), (names.clone(), 2 * BOTS as u64));
    assert!(scripts >= 8, "{scripts} calls");
    let (by_depth, read, scripts) = list(BotOrder::Depth).await;
    let every_other = |first: usize| names.iter().skip(first).step_by(2).cloned();
    assert_eq!(by_depth, every_other(1).chain(every_other(0)).collect::<Vec<_>>());
    assert_eq!(read, BOTS as u64);
    assert!(scripts >= 5, "{scripts} calls");
}

/// Asks for a path several times together, while Redis is far away at first.
async fn together(far: &Distance, client: &Client, path: &str) -> Vec<Response> {
    // A page sends many commands, over few connections.
    far.set(Duration::from_millis(30));
    let mut asking = JoinSet::new();
    for _ in 0..TOGETHER {
        let (client, path) = (client.clone(), path.to_owned());
        asking.spawn(async move { client.get(&path).await });
    }
    let mut answers = Vec::new();
    while let Some(answer) = asking.join_next().await {
        answers.push(answer.unwrap());
        if answers.len() == TOGETHER / 2 {
            far.set(Duration::ZERO);
        }
    }
    answers
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_of_a_bot_that_holds_much_wait_for_their_turn_and_those_of_others_do_not() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let tokens = tokens();
    let far = Distance::start(server.tcp_addr()).await;
    // The requests of this test alone keep Redis busy: none is refused for that.
    let settings = format!("admission.p1 = \"off\"\n{}", settings(&server, &tokens));
    let events = queue(&settings.replace("\"log\"", "\"recorder\""), "test").await;
    fill(&events, "shop-large", 12, MB / 4).await;
    fill(&events, "shop-small", 5, 10).await;
    let full = [
        ("pipelines.test.max_queue", "1"),
        ("pipelines.test.on_overflow", "\"dead\""),
        ("pipelines.test.handler", "\"recorder\""),
    ];
    fill(&queue(&config(&server, "test", &full), "test").await, "shop-dead", 3, 10).await;
    let process = Served::start(&settings.replace(&server.url(), &far.url())).await;
    let client = Client::new(&process.http());
    for (name, path, waits) in [
        ("shop", "/v1/pipelines/test/bots/shop-large", true),
        ("shop", "/bots/shop-large", true),
        ("shop", "/v1/pipelines/test/bots/shop-dead", true),
        ("shop", "/bots/shop-dead", true),
        ("shop", "/v1/pipelines/test/bots/shop-small", false),
        ("shop", "/bots/shop-small", false),
        ("shop", "/v1/pipelines/test/bots/shop-unknown", false),
        ("shop", "/v1/pipelines/test/bots/shop-small/attempts", false),
        ("ops", "/v1/pipelines/test/bots/shop-large", false),
    ] {
        let client = client.with_token(&text(name));
        // On a slow machine, some end before all have come.
        tried(3, async |is_last| {
            let answers = together(&far, &client, path).await;
            let (refused, read): (Vec<&Response>, Vec<&Response>) =
                answers.iter().partition(|answer| answer.code == 429);
            for answer in read {
                assert_eq!(answer.code, 200, "{path}: {answer:?}");
            }
            for answer in &refused {
                let said = String::from_utf8_lossy(&answer.body);
                assert!(waits && said.contains("one after the other"), "{path}: {said}");
            }
            judged(!is_last, || assert_eq!(!refused.is_empty(), waits, "{path}"))
        })
        .await;
    }
}

#[tokio::test]
async fn a_token_for_certain_bots_lists_pipelines_without_a_read_of_their_numbers() {
    const TIMES: u64 = 100;
    let server = RedisServer::start(Options::default());
    let tokens = tokens();
    let settings = settings(&server, &tokens);
    let pipeline = queue(&settings.replace("\"log\"", "\"recorder\""), "test").await;
    fill(&pipeline, "shop-1", 1, 10).await;
    let process = Served::start(&settings).await;
    let client = Client::new(&process.http());
    let (shop, ops) = (client.with_token(&text("shop")), client.with_token(&text("ops")));
    let numbered = ops.get("/v1/pipelines/test").await.json();
    assert_eq!((&numbered["depth"], &numbered["paused"]), (&json!(1), &json!(1)), "{numbered}");
    let before = server.calls("zcard").await;
    for stopped in [false, true] {
        if stopped {
            pipeline.pause(None).await.unwrap();
        }
        for _ in 0..TIMES / 2 {
            let mut listed = shop.get("/v1/pipelines").await.json();
            let listed = listed["pipelines"].as_array_mut().unwrap();
            let found = listed.iter().position(|one| one["name"] == "test").unwrap();
            let shown = shop.get("/v1/pipelines/test").await.json();
            for one in [listed.remove(found), shown] {
                let seen = (&one["enabled"], &one["stopped"], &one["depth"], &one["workers_max"]);
                let expected = (&json!(true), &json!(stopped), &Value::Null, &Value::Null);
                assert_eq!(seen, expected, "{one}");
            }
        }
    }
    // The process itself looks now and then.
    let counted = server.calls("zcard").await - before;
    let of_one = 4 * u64::from(SHARDS);
    assert!(counted < TIMES * of_one, "{counted} counts, {of_one} for the numbers of a pipeline");
}
