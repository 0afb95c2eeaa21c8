//! Large answers: requests that wait for their turn, and answers that are not read.

use std::net::SocketAddr;
use std::time::Duration;

use fairlane::event::Event;
use fairlane::id::BotId;
use fairlane::queue::PushOptions;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;

use crate::support::admission::admitted;
use crate::support::bus::event;
use crate::support::config::config;
use crate::support::http::{Client, Response};
use crate::support::instance::queue;
use crate::support::proxy::distance::Distance;
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::tokens::{Tokens, text};
use crate::support::wait::{eventually, judged, tried};

const LONG: Duration = Duration::from_secs(20);
const ALL: &str = r#"scopes = ["publish", "read", "operate"]"#;
const STRUCTURED: &str = "application/cloudevents+json";
const HTML: &str = "text/html; charset=utf-8";
const PROBLEM: &str = "application/problem+json";
/// The confirmed form that drops all dead letters of a bot.
const DROP_ALL: &[u8] = b"bot=shop-1&until=9999999999999";
/// Events of each bot, in one answer of about 3 MB.
const EVENTS: usize = 12;
const EVENT_BYTES: usize = 250_000;
/// Connections that do not read their answers.
const UNREAD: usize = 40;

fn tenants() -> Tokens {
    Tokens::new(&[
        ("shop", &format!("{ALL}, bots = [\"shop-*\"]")),
        ("other", &format!("{ALL}, bots = [\"other-*\"]")),
    ])
}

/// The settings of a process with these tokens.
fn settings(server: &RedisServer, tokens: &Tokens) -> String {
    let settings = [("auth.tokens", &*tokens.setting), ("pipelines.test.handler", "\"log\"")];
    config(server, "test", &settings)
}

#[tokio::test(flavor = "multi_thread")]
async fn few_lists_of_one_token_wait_for_their_turn_and_further_ones_are_refused() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let tokens = tenants();
    let far = Distance::start(server.tcp_addr()).await;
    let settings = settings(&server, &tokens).replace(&server.url(), &far.url());
    let process = Served::start(&settings).await;
    let client = Client::new(&process.http());
    let (hostile, quiet) = (client.with_token(&text("shop")), client.with_token(&text("other")));
    assert_eq!(quiet.publish(STRUCTURED, event("other-1", "t", 0)).await.code, 202);
    let page = "/pipelines/test/dead?bot=shop-1&reason=zzz";
    let form = [("content-type", "application/x-www-form-urlencoded")];
    for (method, path, kind) in [
        ("GET", page, HTML),
        ("GET", "/pipelines/test", HTML),
        ("GET", "/bots?sort=depth", HTML),
        ("GET", "/bots?sort=rate", HTML),
        ("GET", "/bots?sort=failing", HTML),
        ("GET", "/v1/pipelines/test/bots", PROBLEM),
        ("GET", "/v1/pipelines/test/dead", PROBLEM),
        ("GET", "/v1/events/nothing?bot=shop-1", PROBLEM),
        ("GET", "/pipelines/test/dead/drop?bot=shop-1", HTML),
        ("POST", "/pipelines/test/dead/drop", HTML),
        ("POST", "/v1/pipelines/test/dead/redrive?bot=shop-1", PROBLEM),
    ] {
        // On a slow machine, some end before all have come.
        tried(3, async |is_last| {
            far.set(Duration::from_millis(150));
            let mut asking = JoinSet::new();
            for _ in 0..12 {
                let hostile = hostile.clone();
                asking.spawn(async move {
                    match (method, kind) {
                        ("POST", HTML) => hostile.send(method, path, &form, DROP_ALL).await,
                        _ => hostile.send(method, path, &[], b"").await,
                    }
                });
            }
            let mut answers: Vec<Response> = Vec::new();
            while let Some(answer) = asking.join_next().await {
                answers.push(answer.unwrap());
                if answers.len() == 6 {
                    // Refusals come first. The others have waited for Redis long enough.
                    far.set(Duration::ZERO);
                }
            }
            let refused: Vec<&Response> = answers.iter().filter(|one| one.code == 429).collect();
            for one in &refused {
                let said = String::from_utf8_lossy(&one.body);
                assert!(said.contains("one after the other"), "{path}: {said}");
                assert_eq!(one.header("retry-after"), Some("1"), "{path}");
                assert_eq!(one.header("content-type"), Some(kind), "{path}");
            }
            judged(!is_last, || {
                assert!((6..=10).contains(&refused.len()), "{path}: {} of 12", refused.len());
            })
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_that_wait_for_their_turn_take_no_slot_in_flight() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let tokens = tenants();
    let far = Distance::start(server.tcp_addr()).await;
    let settings = settings(&server, &tokens).replace(&server.url(), &far.url());
    let process = Served::start(&format!("{settings}\n[admission]\nlimit_max = 4\n")).await;
    let client = Client::new(&process.http());
    let (hostile, quiet) = (client.with_token(&text("shop")), client.with_token(&text("other")));
    assert_eq!(quiet.publish(STRUCTURED, event("other-1", "t", 0)).await.code, 202);
    far.set(Duration::from_millis(300));
    // A page that was let in a moment ago has not left its slot yet.
    let publish = async |id: usize| loop {
        let answer = quiet.publish(STRUCTURED, event("other-1", "t", id)).await;
        if answer.code != 503 {
            break answer;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    tried(3, async |is_last| {
        let before = admitted(&process, "p1").await;
        let mut asking = JoinSet::new();
        for _ in 0..4 {
            let hostile = hostile.clone();
            asking.spawn(async move { hostile.get("/pipelines/test/dead?reason=zzz").await });
        }
        let are_let_in = async || admitted(&process, "p1").await > before + 3.5;
        eventually(LONG, "pages are let in", are_let_in).await;
        // One page is being read, and three wait for their turn. Publishes may use three of the four slots.
        let (first, second) = tokio::join!(publish(1), publish(2));
        for answer in [first, second] {
            assert_eq!(answer.code, 202, "{answer:?}");
        }
        // If those that wait kept their slots, two would have to end before a publish is let in.
        let ended = std::iter::from_fn(|| asking.try_join_next()).count();
        asking.shutdown().await;
        judged(!is_last, || assert!(ended <= 1, "{ended} pages have ended"))
    })
    .await;
}

#[tokio::test]
async fn a_redrive_by_a_token_for_certain_bots_ends_soon_and_says_that_there_is_more() {
    const LETTERS: usize = 300;
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let tokens = tenants();
    let far = Distance::start(server.tcp_addr()).await;
    let full = [
        ("pipelines.test.max_queue", "1"),
        ("pipelines.test.on_overflow", "\"dead\""),
        ("pipelines.test.handler", "\"recorder\""),
    ];
    let letters = queue(&config(&server, "test", &full), "test").await;
    let bot = BotId::parse("shop-1").unwrap();
    letters.pause(Some(&bot)).await.unwrap();
    let event = |number: usize| Event::builder("t", &bot).id(number.to_string()).build().unwrap();
    let events: Vec<Event> = (0..=LETTERS).map(event).collect();
    letters.push(&bot, &events, PushOptions::default()).await.unwrap();
    let settings = settings(&server, &tokens).replace(&server.url(), &far.url());
    let process = Served::start(&settings).await;
    let client = Client::new(&process.http()).with_token(&text("shop"));
    far.set(Duration::from_millis(300));
    let path = "/v1/pipelines/test/dead/redrive?bot=shop-1";
    let first = client.post(path).await.json();
    let mut redriven = usize::try_from(first["redriven"].as_u64().unwrap()).unwrap();
    assert!((1..LETTERS).contains(&redriven) && first["more"] == true, "{first}");
    far.set(Duration::ZERO);
    eventually(LONG, "the rest", async || {
        let next = client.post(path).await.json();
        redriven += usize::try_from(next["redriven"].as_u64().unwrap()).unwrap();
        next.get("more").is_none()
    })
    .await;
    assert_eq!(redriven, LETTERS);
}

/// Events in the queue of a paused bot.
async fn fill(config: &str, bot: &str) {
    let queue = queue(&config.replace("\"log\"", "\"recorder\""), "test").await;
    let bot = BotId::parse(bot).unwrap();
    queue.pause(Some(&bot)).await.unwrap();
    let text = "x".repeat(EVENT_BYTES);
    for number in 0..EVENTS {
        let event = Event::builder("test.large", &bot).id(number.to_string());
        let event = event.data(&text).unwrap().build().unwrap();
        queue.push(&bot, &[event], PushOptions::default()).await.unwrap();
    }
}

/// Asks for a path, and reads nothing but the code of the answer.
async fn ask(client: &Client, path: &str) -> (TcpStream, u16) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4_096).unwrap();
    let address: SocketAddr = client.address.parse().unwrap();
    let mut stream = socket.connect(address).await.unwrap();
    stream.write_all(client.head("GET", path, &[]).as_bytes()).await.unwrap();
    let mut begun = vec![0; "HTTP/1.1 200".len()];
    stream.read_exact(&mut begun).await.unwrap();
    (stream, String::from_utf8(begun).unwrap()[9..].parse().unwrap())
}

/// In KiB.
fn memory(process: &Served) -> i64 {
    let resident = process.status_of_kernel("VmRSS").expect("the kernel tells it");
    resident.split_whitespace().next().unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_one_token_does_not_read_leave_memory_for_those_of_others() {
    let (server, tokens) = (RedisServer::start(Options::default()), tenants());
    let settings = settings(&server, &tokens);
    for bot in ["shop-1", "other-1"] {
        fill(&settings, bot).await;
    }
    let process = Served::start(&settings).await;
    let client = Client::new(&process.http());
    let (hostile, quiet) = (client.with_token(&text("shop")), client.with_token(&text("other")));
    let path = |bot: &str| format!("/v1/pipelines/test/bots/{bot}?limit=1000");
    let (theirs, own) = (path("shop-1"), path("other-1"));
    let large = hostile.get(&theirs).await;
    assert!(large.code == 200 && large.body.len() > EVENTS * EVENT_BYTES, "{}", large.code);
    let before = memory(&process);
    let (mut unread, mut refused) = (Vec::new(), 0);
    for _ in 0..UNREAD {
        match ask(&hostile, &theirs).await {
            (stream, 200) => unread.push(stream),
            (_, code) => {
                assert_eq!(code, 429);
                refused += 1;
            }
        }
    }
    let grown = memory(&process) - before;
    println!("{} unread answers, {refused} refused, {grown} KiB more", unread.len());
    // 64 MiB are 22 of them, and a read needs room for an answer of the maximum size.
    assert!((18..=22).contains(&unread.len()), "{} answers", unread.len());
    assert!(grown < 96 << 10, "{grown} KiB more");
    let told = hostile.get(&theirs).await;
    assert_eq!((told.code, told.header("x-shed-reason")), (429, Some("unread")));
    assert!(told.header("retry-after").is_some() && told.problem() == "quota", "{told:?}");
    // What is not a read goes on, and so do other tenants.
    assert_eq!(hostile.publish(STRUCTURED, event("shop-1", "t", 1)).await.code, 202);
    for _ in 0..3 {
        assert_eq!(quiet.get(&own).await.code, 200);
    }
    drop(unread);
    eventually(LONG, "there is room again", async || hostile.get(&theirs).await.code == 200).await;
}
