//! While the bus is far behind, it is copied before bots are claimed, so that slices are long.

use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};

use crate::support::bus::event;
use crate::support::config::{STREAM, config};
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);
const BOTS: u32 = 100;
const EVENTS: u32 = 5_000;

#[tokio::test]
async fn a_backlog_that_is_late_is_handled_in_long_slices() {
    let server = RedisServer::start(Options::default());
    let late = SystemClock.now().saturating_sub(Duration::from_secs(60));
    let mut pipe = redis::pipe();
    for n in 0..EVENTS {
        let event = event(&format!("bot-{}", n % BOTS), "tag.applied", n);
        let id = format!("{}-{n}", late.as_millis());
        pipe.cmd("XADD").arg(STREAM).arg(id).arg("event").arg(event).ignore();
    }
    let () = pipe.query_async(&mut server.connection().await).await.unwrap();
    let log = Log::default();
    let instance = Instance::start(&config(&server, "backlog", &[]), log.content()).await;
    eventually(LONG, "all are handled", async || log.len() >= EVENTS as usize).await;
    let slices = server.calls("lrange").await;
    assert!(slices < u64::from(EVENTS / 10), "{EVENTS} events in {slices} slices");
    instance.stop().await;
}
