//! What the bus keeps for pipelines whose processes are not heard of: for some seconds they may only not have
//! made their next update yet.

use std::time::{Duration, Instant};

use fairlane::app::Roles;
use fairlane::presence::processes;
use redis::AsyncCommands as _;

use crate::support::bus::{add, event, wire};
use crate::support::config::{STREAM, config};
use crate::support::instance::Instance;
use crate::support::proxy::{Proxy, ProxyMode};
use crate::support::recorder::Log;
use crate::support::redis::{Options, Persistence, RedisServer};
use crate::support::wait::{eventually, judged, tried};

const LONG: Duration = Duration::from_secs(30);
/// The minimum retention. Trimming happens when a reader starts and every five seconds.
const SHORT: (&str, &str) = ("bus.retention", "\"1s\"");
/// The time in which each process makes an update.
const HEARD: Duration = Duration::from_secs(10);

fn events(ids: std::ops::Range<u32>) -> Vec<String> {
    ids.map(|id| event("b", "test", id)).collect()
}

async fn length(server: &RedisServer) -> u32 {
    server.connection().await.xlen(STREAM).await.unwrap()
}

#[tokio::test]
async fn a_process_that_starts_keeps_what_a_pipeline_needs_until_its_processes_could_be_heard_of() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let gone = Instance::start(&config(&server, "gone", &[SHORT]), log.content()).await;
    gone.stop().await;
    add(&server, STREAM, &events(0..20)).await;
    let began = Instant::now();
    let reader = Instance::start(&config(&server, "there", &[SHORT]), log.content()).await;
    eventually(LONG, "they are handled", async || log.count("there") == 20).await;
    eventually(LONG, "no process runs the other one", async || length(&server).await <= 1).await;
    assert!(began.elapsed() >= HEARD, "after {:?}", began.elapsed());
    assert_eq!(log.count("gone"), 0);
    reader.stop().await;
}

#[tokio::test]
async fn after_an_outage_of_redis_the_bus_keeps_what_a_process_needs_that_is_not_heard_of_yet() {
    tried(5, async |is_last| {
        let (left, heard) = left_after_an_outage().await;
        // A machine that is too slow keeps the other process from its update.
        let is_late = heard + Duration::from_secs(1) > HEARD;
        judged(!is_last && is_late, || assert_eq!(left, 21, "{heard:?}"))
    })
    .await;
}

/// How much of 21 entries is left when a process that needs all of them is heard of again, and how long that
/// took.
async fn left_after_an_outage() -> (u32, Duration) {
    let persistence = Persistence::Always;
    let mut server = RedisServer::start(Options { tcp: true, persistence, ..Options::default() });
    let proxy = Proxy::start(server.tcp_addr()).await;
    let (log, url) = (Log::default(), format!("{:?}", proxy.url()));
    let late = config(&server, "late", &[SHORT, ("redis.url", &url)]);
    let work = Roles { ingest: false, work: true, http: false, schedule: false };
    let late = Instance::start_as(work, &late, log.content()).await;
    let reader = Instance::start(&config(&server, "early", &[SHORT]), log.content()).await;
    add(&server, STREAM, &events(0..20)).await;
    eventually(LONG, "they are read", async || log.count("early") >= 20).await;
    proxy.set(ProxyMode::Refuse);
    server.kill9();
    // The outage itself. A process counts as gone after 16 s without an update.
    tokio::time::sleep(Duration::from_secs(17)).await;
    server.restart();
    let back = Instant::now();
    add(&server, STREAM, &events(20..21)).await;
    // A session trims before it reads.
    eventually(LONG, "the bus is read again", async || log.count("early") > 20).await;
    proxy.set(ProxyMode::Pass);
    let link = wire(&server);
    eventually(LONG, "the other process is heard of", async || {
        let heard = processes(&link).await.unwrap_or_default();
        let mut running = heard.iter().flat_map(|process| process.pipelines.keys());
        running.any(|name| name.is("late"))
    })
    .await;
    let (heard, left) = (back.elapsed(), length(&server).await);
    reader.stop().await;
    late.stop().await;
    (left, heard)
}
