//! While the bus is far behind, it is copied before bots are claimed, so that slices are long.

use std::time::Duration;

use fairlane::app::Roles;
use fairlane::clock::{Clock as _, SystemClock};

use crate::support::bus::event;
use crate::support::config::{STREAM, config};
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::{Stalls, eventually, judged, tried};

const LONG: Duration = Duration::from_secs(30);
const BOTS: u32 = 100;
const EVENTS: u32 = 5_000;
const MANY: u32 = 2_000;

/// Adds a backlog to the bus that is a minute old.
async fn add_late(server: &RedisServer, bots: u32, events: u32) {
    let late = SystemClock.now().saturating_sub(Duration::from_secs(60));
    let mut pipe = redis::pipe();
    for n in 0..events {
        let event = event(&format!("bot-{}", n % bots), "tag.applied", n);
        let id = format!("{}-{n}", late.as_millis());
        pipe.cmd("XADD").arg(STREAM).arg(id).arg("event").arg(event).ignore();
    }
    let () = pipe.query_async(&mut server.connection().await).await.unwrap();
}

#[tokio::test]
async fn a_backlog_that_is_late_is_handled_in_long_slices() {
    let server = RedisServer::start(Options::default());
    add_late(&server, BOTS, EVENTS).await;
    let log = Log::default();
    let instance = Instance::start(&config(&server, "backlog", &[]), log.content()).await;
    eventually(LONG, "all are handled", async || log.len() >= EVENTS as usize).await;
    let slices = server.calls("lrange").await;
    assert!(slices < u64::from(EVENTS / 10), "{EVENTS} events in {slices} slices");
    instance.stop().await;
}

#[tokio::test]
async fn processes_that_do_not_read_the_bus_know_that_it_is_behind() {
    // A machine that stands still keeps the reader from telling it. Then another try shows it.
    const STALL: Duration = Duration::from_millis(200);
    tried(5, async |is_last| {
        let (slices, stall) = slices_of_a_reader_and_three_workers().await;
        judged(!is_last && stall > STALL, || {
            assert!(slices < u64::from(MANY * 3 / 2), "{MANY} bots in {slices} slices, {stall:?}");
        })
    })
    .await;
}

/// The number of slices in which late events of many bots are handled, and how long the machine stood
/// still.
async fn slices_of_a_reader_and_three_workers() -> (u64, Duration) {
    let server = RedisServer::start(Options::default());
    let config = config(&server, "told", &[]);
    let log = Log::default();
    let work = Roles { ingest: false, work: true, http: false, schedule: false };
    let mut workers = Vec::new();
    for _ in 0..3 {
        workers.push(Instance::start_as(work, &config, log.content()).await);
    }
    add_late(&server, MANY, 4 * EVENTS).await;
    let stalls = Stalls::watch();
    let reader = Instance::start(&config, log.content()).await;
    eventually(LONG, "all are handled", async || log.len() >= 4 * EVENTS as usize).await;
    // About one for each bot, although three processes look for bots meanwhile.
    let (slices, stall) = (server.calls("lrange").await, stalls.longest());
    reader.stop().await;
    for worker in workers {
        worker.stop().await;
    }
    (slices, stall)
}
