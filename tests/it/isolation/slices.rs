//! A bot with large events does not use up the memory of the process.

use std::collections::BTreeMap;
use std::time::Duration;

use fairlane::event::Event;
use fairlane::id::BotId;
use fairlane::queue::PushOptions;
use serde_json::json;

use crate::support::config::configs;
use crate::support::instance::{Instance, queue};
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const BYTES: usize = 900 << 10;
const EVENTS: usize = 24;

#[tokio::test]
async fn a_slice_of_large_events_has_at_most_4_mib() {
    let server = RedisServer::start(Options::default());
    let config = configs(&server, &["p"], &[("pipelines.p.batch", "64")]);
    let queue = queue(&config, "p").await;
    let large = BotId::parse("large").unwrap();
    let data = json!("x".repeat(BYTES));
    for n in 0..EVENTS {
        let id = format!("{n:02}");
        let event = Event::builder("test", &large).id(&id).data(&data).unwrap().build().unwrap();
        queue.push(&large, &[event], PushOptions::default()).await.unwrap();
    }
    let log = Log::default();
    let instance = Instance::start(&config, log.content()).await;
    eventually(Duration::from_secs(60), "every event is handled", async || log.len() == EVENTS)
        .await;
    let mut slices: BTreeMap<u64, usize> = BTreeMap::new();
    for seen in log.all() {
        *slices.entry(seen.fence).or_default() += 1;
    }
    let most = (4 << 20) / BYTES;
    assert!(slices.values().all(|events| *events <= most), "{slices:?}");
    assert!(slices.values().any(|events| *events == most), "a slice takes what fits: {slices:?}");
    let ids = log.ids("p");
    assert!(ids.is_sorted(), "{ids:?}");
    instance.stop().await;
}
