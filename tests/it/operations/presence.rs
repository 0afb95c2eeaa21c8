//! Operators see which processes run, and their rates.

use std::time::Duration;

use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane::presence::{pace, processes};
use fairlane::redis::{Link, Target};

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::instance::Instance;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

struct Instant;

impl Handler for Instant {
    async fn handle(&self, _: &Environment, _: &Slice) -> Result<Outcomes, Failure> {
        Ok(Outcomes::done())
    }
}

#[tokio::test]
async fn running_processes_tell_their_pace_until_they_stop() {
    let server = RedisServer::start(Options::default());
    let target = Target::new(&server.url()).unwrap();
    let link = Link::new(target, Vec::new(), 10_000, Duration::from_secs(5));
    assert_eq!(processes(&link).await.unwrap(), []);

    let toml = config(&server, "presence", &[]);
    let first = Instance::start(&toml, Instant).await;
    let second = Instance::start(&toml, Instant).await;
    let name = first.queue("presence").name().clone();
    let all = async || processes(&link).await.unwrap();
    let wait = Duration::from_secs(20);
    eventually(wait, "both are heard", async || all().await.len() == 2).await;
    assert_eq!(all().await[0].roles, ["ingest", "work", "http", "schedule"]);
    assert_eq!(pace(&all().await, &name).workers_max, 32);

    let events: Vec<_> = (0..1_000).map(|id| event("bot", "test.event", id)).collect();
    add(&server, STREAM, &events).await;
    eventually(wait, "the rates are told", async || {
        let pace = pace(&all().await, &name);
        pace.queued_per_second > 0.0 && pace.settled_per_second > 0.0
    })
    .await;

    first.stop().await;
    assert_eq!(all().await.len(), 1, "one that stops says so");
    second.stop().await;
    assert_eq!(all().await.len(), 0);
}
