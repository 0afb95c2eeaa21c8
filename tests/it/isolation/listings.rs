//! A list costs little, whatever the listed events contain.

use std::collections::BTreeSet;
use std::fs;

use fairlane::event::Event;
use fairlane::id::BotId;
use fairlane::queue::{PushOptions, Queue};
use redis::AsyncCommands as _;
use serde_json::Value;
use tokio::task::JoinSet;

use crate::support::config::config;
use crate::support::http::{Client, Response};
use crate::support::instance::queue;
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;

/// Events of the maximum size that each list has to cope with.
const EVENTS: usize = 120;
const EVENT_BYTES: usize = 1_000_000;
/// The maximum size of an answer.
const ANSWER_MAX: usize = 4 << 20;
/// How much the memory of the process may grow, in KiB.
const ONE: u64 = 24 << 10;
const FOUR: u64 = 64 << 10;

fn bot(name: &str) -> BotId {
    BotId::parse(name).unwrap()
}

/// A bot may hold more than by default.
const MANY_EVENTS: [(&str, &str); 2] = [("quotas.queued_bytes", "0"), ("quotas.dead_bytes", "0")];

/// [`EVENTS`] queued events of a paused bot, and as many dead letters of others in several shards.
async fn filled(server: &RedisServer) -> (Queue, String) {
    let settings = [
        ("pipelines.test.max_queue", "1"),
        ("pipelines.test.on_overflow", "\"dead\""),
        ("pipelines.test.handler", "\"recorder\""),
        MANY_EVENTS[0],
        MANY_EVENTS[1],
    ];
    let letters = queue(&config(server, "test", &settings), "test").await;
    let text = "x".repeat(EVENT_BYTES);
    let event = |of: &BotId, id: String| {
        Event::builder("test.large", of).id(id).data(&text).unwrap().build().unwrap()
    };
    for number in 0..EVENTS + 4 {
        let of = bot(&format!("dead-{}", number % 4));
        letters.pause(Some(&of)).await.unwrap();
        let pushed = [event(&of, number.to_string())];
        letters.push(&of, &pushed, PushOptions::default()).await.unwrap();
    }
    let config = config(
        server,
        "test",
        &[("pipelines.test.handler", "\"log\""), MANY_EVENTS[0], MANY_EVENTS[1]],
    );
    let events = queue(&config.replace("\"log\"", "\"recorder\""), "test").await;
    let large = bot("large");
    events.pause(Some(&large)).await.unwrap();
    for number in 0..EVENTS {
        let pushed = [event(&large, number.to_string())];
        events.push(&large, &pushed, PushOptions::default()).await.unwrap();
    }
    (events, config)
}

/// The largest memory of a process since [`forget`], and what it has now, in KiB.
fn memory(process: &Served) -> (u64, u64) {
    let status = fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
    let read = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    (read("VmHWM:"), read("VmRSS:"))
}

fn forget(process: &Served) {
    fs::write(format!("/proc/{}/clear_refs", process.id()), "5").unwrap();
}

/// Asks for a path `times` times at once; answers how much the memory grew meanwhile, in KiB.
async fn growth(process: &Served, client: &Client, path: &str, times: usize) -> u64 {
    forget(process);
    let before = memory(process).1;
    let mut asking = JoinSet::new();
    for _ in 0..times {
        let (client, path) = (client.clone(), path.to_owned());
        asking.spawn(async move { client.get(&path).await });
    }
    for answer in asking.join_all().await {
        assert_eq!(answer.code, 200, "{path}: {}", answer.problem());
        assert!(answer.body.len() <= ANSWER_MAX, "{path}: {} bytes", answer.body.len());
    }
    let growth = memory(process).0.saturating_sub(before);
    println!("{path}, {times} times: {growth} KiB");
    growth
}

/// The elements of all pages of a list.
async fn walk(client: &Client, path: &str, field: &str) -> Vec<Value> {
    let (mut all, mut cursor) = (Vec::new(), String::new());
    loop {
        let page: Response = client.get(&format!("{path}{cursor}")).await;
        assert_eq!(page.code, 200, "{}", page.problem());
        assert!(page.body.len() <= ANSWER_MAX);
        let page = page.json();
        let elements = page[field].as_array().unwrap();
        assert!(!elements.is_empty(), "a page has at least one");
        all.extend(elements.iter().cloned());
        match page["cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return all,
        }
    }
}

#[tokio::test]
async fn lists_of_large_events_keep_their_answers_and_the_memory_small() {
    let server = RedisServer::start(Options::default());
    let (_queue, config) = filled(&server).await;
    let process = Served::start(&config).await;
    let client = Client::new(&process.http());
    // What every first request brings along does not count.
    for path in ["/", "/v1/pipelines/test/bots?limit=1", "/bots/nothing"] {
        assert_eq!(client.get(path).await.code, 200);
    }

    let events = "/v1/pipelines/test/bots/large?limit=1000";
    let letters = "/v1/pipelines/test/dead?limit=1000";
    for path in [
        events,
        letters,
        "/v1/pipelines/test/bots?limit=1000",
        "/v1/pipelines/test",
        "/pipelines/test/dead",
        "/bots/large",
        "/bots/dead-1",
    ] {
        let one = growth(&process, &client, path, 1).await;
        assert!(one < ONE, "{path}: {one} KiB");
        let four = growth(&process, &client, path, 4).await;
        assert!(four < FOUR, "{path}: {four} KiB, four at once");
    }

    let ids = |all: Vec<Value>, of: &str| -> Vec<String> {
        all.iter().map(|one| one[of]["id"].as_str().unwrap().to_owned()).collect()
    };
    let expected: Vec<String> = (0..EVENTS).map(|number| number.to_string()).collect();
    assert_eq!(ids(walk(&client, events, "next").await, "event"), expected);
    let expected: Vec<String> = (4..EVENTS + 4).rev().map(|number| number.to_string()).collect();
    assert_eq!(ids(walk(&client, letters, "dead_letters").await, "event"), expected);

    // A page shows what it is without its payload.
    for (path, shown) in [("/bots/large", "test.large"), ("/pipelines/test/dead", "test.large")] {
        let page = String::from_utf8(client.get(path).await.body).unwrap();
        assert!(page.contains(shown) && page.len() < 200_000, "{path}: {} bytes", page.len());
    }
}

#[tokio::test]
async fn a_list_that_moves_goes_on_behind_its_last_event() {
    let server = RedisServer::start(Options::default());
    let queue = queue(&config(&server, "test", &[]), "test").await;
    let of = bot("moving");
    queue.pause(Some(&of)).await.unwrap();
    let push = async |number: u64| {
        let event = Event::builder("test", &of).id(number.to_string()).build().unwrap();
        queue.push(&of, &[event], PushOptions::default()).await.unwrap();
    };
    for number in 0..100 {
        push(number).await;
    }
    let first = queue.page_of_events(&of, None, 40).await.unwrap();
    assert_eq!(first.events.len(), 40);
    // The head is handled, and more arrive.
    let key = queue.keys(queue.shard_of(&of)).queue(&of);
    let mut connection = server.connection().await;
    let () = connection.ltrim(&key, 25, -1).await.unwrap();
    push(100).await;
    let (mut after, mut seen) = (first.next, BTreeSet::new());
    while let Some(cursor) = after {
        let page = queue.page_of_events(&of, Some(cursor), 7).await.unwrap();
        for event in page.events {
            let id: u64 = event.event.unwrap().id().parse().unwrap();
            assert!(seen.insert(id), "{id} twice");
        }
        after = page.next;
    }
    assert_eq!(seen, (40..=100).collect());
    // All that was listed is gone.
    let page = queue.page_of_events(&of, None, 10).await.unwrap();
    let () = connection.ltrim(&key, 50, -1).await.unwrap();
    let next = queue.page_of_events(&of, page.next, 1).await.unwrap();
    assert_eq!(next.events[0].event.as_ref().unwrap().id(), "75");
}
