//! An outage does not flood the log. Each part reports it once, then once a minute, and when it is
//! over.

use std::time::{Duration, Instant};

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::event::Event;
use fairlane::id::BotId;
use fairlane::queue::PushOptions;
use redis::aio::MultiplexedConnection;

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, configs};
use crate::support::instance::queue;
use crate::support::redis::{Options, Persistence, RedisServer};
use crate::support::served::Served;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(20);
/// The duration of the outages.
const OUTAGE: Duration = Duration::from_secs(10);
/// Maximum number of lines of a process about one outage.
const LINES: usize = 20;

fn settings(server: &RedisServer) -> String {
    let settings = [
        ("pipelines.lines.handler", "\"log\""),
        ("pipelines.more.handler", "\"log\""),
        ("pipelines.more.events", "[\"more\"]"),
        ("pipelines.notifications.enabled", "true"),
    ];
    configs(server, &["lines", "more"], &settings)
}

/// The lines of the log after the first `before` ones, once the outage has lasted `OUTAGE`.
async fn lines_of_outage(process: &Served, before: usize) -> Vec<String> {
    let began = Instant::now();
    eventually(OUTAGE * 2, "the outage lasts", async || began.elapsed() > OUTAGE).await;
    process.log().lines().skip(before).map(str::to_owned).collect()
}

async fn says(process: &Served, what: &str) {
    eventually(LONG * 3, what, async || process.log().contains(what)).await;
}

#[tokio::test]
async fn an_idle_process_logs_nothing() {
    let server = RedisServer::start(Options::default());
    let process = Served::start(&settings(&server)).await;
    says(&process, "reading the bus").await;
    let before = process.log().lines().count();
    let lines = lines_of_outage(&process, before).await;
    assert_eq!(lines, [""; 0]);
}

#[tokio::test]
async fn while_redis_refuses_connections_a_process_logs_a_few_lines() {
    let mut server =
        RedisServer::start(Options { persistence: Persistence::Always, ..Options::default() });
    let process = Served::start(&settings(&server)).await;
    says(&process, "reading the bus").await;
    let before = process.log().lines().count();
    server.kill9();
    let lines = lines_of_outage(&process, before).await;
    println!("{} lines in {OUTAGE:?} without Redis", lines.len());
    assert!(lines.iter().any(|line| line.contains("WARN")), "an outage is told: {lines:#?}");
    assert!(lines.len() <= LINES, "{} lines: {lines:#?}", lines.len());
    server.restart();
    for end in ["subscribed to the wake channels again", "the bus is read again"] {
        says(&process, end).await;
    }
}

/// Fills all memory but for a few bytes.
async fn fill(connection: &mut MultiplexedConnection) {
    for bytes in [64 << 10, 1 << 10, 16] {
        for number in 0.. {
            let key = format!("junk:{bytes}:{number}");
            let mut set = redis::cmd("SET");
            set.arg(key).arg(vec![0_u8; bytes]);
            if set.query_async::<()>(connection).await.is_err() {
                break;
            }
        }
    }
}

#[tokio::test]
async fn while_redis_is_full_a_process_logs_a_few_lines() {
    let server = RedisServer::start(Options { max_memory: 16 << 20, ..Options::default() });
    let config = settings(&server);
    let process = Served::start(&config).await;
    says(&process, "reading the bus").await;
    let (lines_queue, mut connection) = (queue(&config, "lines").await, server.connection().await);
    // When the process wakes, it finds events to copy, delayed events in many shards, and no
    // memory.
    process.sigstop();
    let due = SystemClock.now() + Duration::from_secs(1);
    for bot in 0..64 {
        let bot = BotId::parse(&format!("due-{bot}")).unwrap();
        let delayed = Event::builder("later", &bot).build().unwrap();
        let options = PushOptions { due: Some(due), ..PushOptions::default() };
        lines_queue.push(&bot, &[delayed], options).await.unwrap();
    }
    let events: Vec<String> = (0..64).map(|id| event(&format!("b-{id}"), "test", id)).collect();
    add(&server, STREAM, &events).await;
    fill(&mut connection).await;
    let before = process.log().lines().count();
    process.sigcont();
    let lines = lines_of_outage(&process, before).await;
    // Lines of the pipelines' own handler.
    let handled = |line: &String| line.contains("\"message\":\"event\"");
    let told: Vec<&String> = lines.iter().filter(|line| !handled(line)).collect();
    println!("{} lines in {OUTAGE:?} of a full Redis", told.len());
    assert!(told.iter().any(|line| line.contains("OOM")), "it is told: {lines:#?}");
    assert!(told.len() <= LINES, "{} lines: {told:#?}", told.len());
    let () = redis::cmd("CONFIG")
        .arg(&["SET", "maxmemory", "0"])
        .query_async(&mut connection)
        .await
        .unwrap();
    says(&process, "the bus is read again").await;
}
