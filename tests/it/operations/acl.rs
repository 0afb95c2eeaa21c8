//! A user with exactly the rights that docs/redis.md lists can use every part of Fairlane.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::event::Event;
use fairlane::handler::{Failure, Outcomes, Slice};
use fairlane::id::BotId;
use fairlane::notifications::queue::Span;
use fairlane::notifications::record::{NewNotification, State, When};
use fairlane::queue::{PushOptions, Queue};

use crate::support::bus::{add, event};
use crate::support::cli::run_in;
use crate::support::config::{STREAM, config};
use crate::support::http;
use crate::support::instance::Instance;
use crate::support::mongo::{self, MongoServer};
use crate::support::receiver::Receiver;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const PAGE: &str = include_str!("../../../docs/redis.md");
const LONG: Duration = Duration::from_secs(30);
const PASSWORD: &str = "s3cret";

/// The words of `ACL SETUSER` in docs/redis.md.
fn rule() -> Vec<String> {
    let (_, rest) = PAGE.split_once("ACL SETUSER fairlane").expect("the page has the rule");
    let (rule, _) = rest.split_once("```").expect("it stands in a block");
    let words = rule.split_whitespace().filter(|word| *word != "\\");
    words.map(|word| word.replace("PASSWORD", PASSWORD)).collect()
}

fn commands() -> BTreeSet<String> {
    rule().iter().filter_map(|word| word.strip_prefix('+')).map(str::to_owned).collect()
}

/// A server that accepts only the user `fairlane` over TCP, with the rule of docs/redis.md.
async fn guarded() -> (RedisServer, String) {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let mut connection = server.connection().await;
    let mut command = redis::cmd("ACL");
    command.arg("SETUSER").arg("fairlane").arg(rule());
    let () = command.query_async(&mut connection).await.unwrap();
    let url = format!("redis://fairlane:{PASSWORD}@{}", server.tcp_addr());
    (server, url)
}

/// By the type of the event: retries once, fails for good, delays once, or succeeds.
fn answer(slice: &Slice, delayed: &AtomicBool) -> Result<Outcomes, Failure> {
    match slice.events[0].event.kind() {
        "test.retry" if slice.attempt == 1 => Err(Failure::transient(0, "not yet")),
        "test.dead" => Err(Failure::permanent(0, "never")),
        "test.later" if !delayed.swap(true, Ordering::Relaxed) => {
            Ok(Outcomes::first(1).later(0, Duration::from_millis(50)))
        }
        _ => Ok(Outcomes::first(1)),
    }
}

fn bot(name: &str) -> BotId {
    BotId::parse(name).unwrap()
}

/// Uses the bus, retries, dead letters, delays, and every command of an operator.
#[tokio::test]
async fn the_rights_that_readme_lists_suffice_and_none_is_too_much() {
    let (server, url) = guarded().await;
    let _replica = server.replica().await;
    let url = format!("{url:?}");
    let mongo_server = MongoServer::start(mongo::Options::default());
    let mongo = format!("{:?}", mongo_server.url());
    let settings = [
        ("redis.url", &*url),
        ("redis.wait_replicas", "1"),
        ("mongodb.url", &mongo),
        ("pipelines.notifications.enabled", "true"),
        ("callbacks.allow_nets", "[\"127.0.0.1\"]"),
    ];
    let text = config(&server, "test", &settings);
    let log = Log::default();
    let once = AtomicBool::new(false);
    let handler = log.handler(move |slice| std::future::ready(answer(&slice, &once)));
    let instance = Instance::start(&text, handler).await;
    let queue = instance.queue("test").clone();
    let mut events = vec!["no event".to_owned()];
    for kind in ["test.retry", "test.dead", "test.later", "test.done"] {
        let of = kind.replace("test.", "bot-");
        events.extend((1..=10).map(|id| event(&of, kind, id)));
    }
    add(&server, STREAM, &events).await;
    let delayed = Event::builder("test.done", &bot("delayed")).id("1").build().unwrap();
    let due = Some(SystemClock.now() + Duration::from_millis(100));
    let options = PushOptions { due, idempotency: Some(("key", LONG)) };
    queue.push(&bot("delayed"), &[delayed], options).await.unwrap();
    eventually(LONG, "all are settled", async || {
        let view = queue.view(Duration::ZERO).await.unwrap();
        let seen = log.all().iter().any(|seen| seen.bot == "delayed");
        seen && view.depth + view.delayed == 0 && view.dead == 10
    })
    .await;
    assert!(log.len() > 51, "retried, delayed and come back: {}", log.len());

    operate(&text, &queue).await;
    count_views(&instance).await;
    notify(&instance).await;
    let address = instance.address.to_string();
    assert_eq!(http::get(&address, "/readyz").await.0, 200);
    eventually(LONG, "it was sampled", async || {
        let (_, metrics) = http::get(&address, "/metrics").await;
        http::metric(&metrics, "fairlane_redis_up", &[]) == Some(1.0)
    })
    .await;
    instance.stop().await;
    let disabled = [("redis.url", &*url), ("pipelines.test.enabled", "false")];
    run(&config(&server, "test", &disabled), &["pipelines", "drop", "test", "--yes"], "");
    nothing_was_denied_or_idle(&server).await;
}

/// Runs one command of `fairlane` as the user of `config`. The command must succeed.
fn run(config: &str, arguments: &[&str], input: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("fairlane.toml"), config).unwrap();
    let ran = run_in(directory.path(), arguments, input);
    assert_eq!(ran.code, 0, "{arguments:?}: {ran:?}");
    assert!(!ran.out.contains(PASSWORD) && !ran.err.contains(PASSWORD), "{ran:?}");
    ran.out
}

/// Counts views of an ad that is not cached at first, resets it, and waits for MongoDB.
async fn count_views(instance: &Instance) {
    let client = instance.client();
    let counters = "/v1/bots/shop/counters";
    for total in 1..=2 {
        let answer = client.post(&format!("{counters}/x/views")).await;
        assert_eq!(answer.json()["total"], total);
    }
    assert_eq!(client.post(&format!("{counters}/x/reset")).await.code, 204);
    assert_eq!(client.get(&format!("{counters}?ids=x")).await.json()["totals"]["x"], 0);
    eventually(LONG, "all is written", async || {
        let pipeline = client.get("/v1/pipelines/counters").await.json();
        pipeline["depth"] == 0
    })
    .await;
}

/// Sends a notification, looks it up and counts it.
async fn notify(instance: &Instance) {
    let receiver = Receiver::content().await;
    let notifications = instance.notifications();
    let new = NewNotification {
        bot: bot("shop"),
        uid: "user".to_owned(),
        kind: "none".to_owned(),
        when: When::After(Duration::ZERO),
        expires_in: LONG,
        waits: false,
        url: receiver.url(),
        method: "GET".to_owned(),
        body: String::new(),
        recheck: String::new(),
        headers: String::new(),
        trace: None,
        key: None,
    };
    let id = notifications.accept(&new).await.unwrap().id;
    eventually(LONG, "it is sent", async || {
        notifications.find(id).await.unwrap().is_some_and(|kept| kept.state == State::Sent)
    })
    .await;
    assert_eq!(notifications.online(&bot("shop"), "user").await.unwrap(), 0);
    // A notification that is dead-lettered immediately, and redriven.
    let refused =
        NewNotification { url: "http://127.0.0.9/".to_owned(), uid: String::new(), ..new };
    let id = notifications.accept(&refused).await.unwrap().id;
    let queue = instance.queue("notifications");
    for _ in 0..2 {
        eventually(LONG, "it is dead", async || {
            queue.redrive_all(None, SystemClock.now()).await.unwrap() == 1
        })
        .await;
    }
    eventually(LONG, "it is dead again", async || {
        notifications.find(id).await.unwrap().is_some_and(|kept| kept.state == State::Dead)
    })
    .await;
    let day = Span::Day(SystemClock.now().as_secs() / 86_400);
    notifications.stats(&[day]).await.unwrap();
    assert_eq!(notifications.audit().await.unwrap().records, 2);
}

async fn operate(config: &str, queue: &Queue) {
    let run = |arguments: &[&str]| run(config, arguments, "");
    for arguments in ["check", "status", "pipelines list", "bots list", "dead list"] {
        run(&arguments.split(' ').collect::<Vec<_>>());
    }
    run(&["pipelines", "pause", "test"]);
    run(&["pipelines", "resume", "test"]);
    run(&["bots", "pause", "bot-dead"]);
    let more = Event::builder("test.done", &bot("bot-dead")).id("11").build().unwrap();
    queue.push(&bot("bot-dead"), &[more], PushOptions::default()).await.unwrap();
    run(&["bots", "set", "bot-dead", "--weight", "3"]);
    run(&["bots", "set", "bot-dead", "--weight", "1"]);
    run(&["bots", "show", "bot-dead"]);
    run(&["events", "find", "1", "--bot", "bot-done"]);
    run(&["bots", "release", "bot-done"]);
    let letter =
        queue.dead_letters(Some(&bot("bot-dead")), 1).await.unwrap().remove(0).id.to_string();
    run(&["dead", "show", &letter]);
    run(&["dead", "redrive", &letter]);
    run(&["dead", "redrive", "--all", "--yes"]);
    let letter = || async { queue.dead_letters(Some(&bot("bot-dead")), 1).await.unwrap() };
    assert_eq!(letter().await.len(), 0, "all are put back");
    run(&["bots", "purge", "bot-dead", "--yes"]);
    run(&["bots", "resume", "bot-dead"]);
    let line = event("bot-done", "test.done", 11);
    self::run(config, &["publish"], &line);
    run(&["dead", "drop", "--all", "--yes"]);
}

/// Commands that this test does not use. They serve another database, a cluster, consumer groups of
/// others, a stream that lost its tail, large numbers of bots, and deduplication after its window.
const ELSEWHERE: [&str; 6] =
    ["select", "cluster|slots", "xpending", "xsetid", "zremrangebyrank", "rename"];

/// Checks that Redis refused no command for lack of rights, and that every command of the rule was
/// used.
async fn nothing_was_denied_or_idle(server: &RedisServer) {
    let mut connection = server.connection().await;
    let mut log = redis::cmd("ACL");
    let denied: Vec<redis::Value> = log.arg("LOG").query_async(&mut connection).await.unwrap();
    assert_eq!(denied, []);
    let mut info = redis::cmd("INFO");
    let used: String = info.arg("commandstats").query_async(&mut connection).await.unwrap();
    let is_used = |command: &String| {
        used.lines().any(|line| {
            line.strip_prefix("cmdstat_")
                .and_then(|line| line.split_once(":calls="))
                .is_some_and(|(name, rest)| name == command && !rest.starts_with("0,"))
        })
    };
    let idle: Vec<String> = commands()
        .into_iter()
        .filter(|command| !is_used(command) && !ELSEWHERE.contains(&command.as_str()))
        .collect();
    assert_eq!(idle, [""; 0], "docs/redis.md lists commands that are never needed");
}

#[test]
fn every_command_of_the_scripts_is_among_the_rights_that_readme_lists() {
    let listed = commands();
    let scripts = concat!(env!("CARGO_MANIFEST_DIR"), "/lua");
    for file in std::fs::read_dir(scripts).unwrap() {
        let path = file.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        for call in text.split("call('").skip(1) {
            let mut words = call.split('\'');
            let name = words.next().unwrap_or_default().to_lowercase();
            let (gap, next) = (words.next(), words.next().unwrap_or_default().to_lowercase());
            let pair = format!("{name}|{next}");
            let known = listed.contains(&name) || (gap == Some(", ") && listed.contains(&pair));
            assert!(known, "{} calls {name}, which docs/redis.md does not list", path.display());
        }
    }
}
