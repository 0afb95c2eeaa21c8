//! Operators see which processes run, and their rates, and cannot delete what they need.

use std::time::Duration;

use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane::presence::{pace, processes};
use fairlane::redis::{Link, Target};

use crate::support::bus::{add, event};
use crate::support::cli::run_in;
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

/// The configuration of the command has another pipeline than that of the process.
#[tokio::test]
async fn a_pipeline_that_a_process_runs_is_not_dropped() {
    let server = RedisServer::start(Options::default());
    let instance = Instance::start(&config(&server, "dropped", &[]), Instant).await;
    let queue = instance.queue("dropped").clone();
    queue.pause(None).await.unwrap();
    add(&server, STREAM, &[event("bot", "test.event", 1)]).await;
    let depth = async || queue.view(Duration::ZERO).await.unwrap().depth;
    let wait = Duration::from_secs(20);
    eventually(wait, "it is queued", async || depth().await == 1).await;

    let directory = tempfile::tempdir().unwrap();
    let elsewhere = config(&server, "elsewhere", &[]).replace("recorder", "log");
    std::fs::write(directory.path().join("fairlane.toml"), elsewhere).unwrap();
    let run = |arguments: &[&str]| run_in(directory.path(), arguments, "");
    let drop_it = || run(&["pipelines", "drop", "dropped", "--yes"]);
    let ran = drop_it();
    let process = format!(":{} runs pipeline dropped", std::process::id());
    assert!(ran.code == 1 && ran.err.contains(&process), "{ran:?}");
    assert_eq!(depth().await, 1, "nothing was deleted");
    let status = run(&["status"]).out;
    assert!(status.contains("it runs on ") && !status.contains("pipelines drop"), "{status}");

    instance.stop().await;
    let ran = drop_it();
    assert_eq!((ran.code, depth().await), (0, 0), "{ran:?}");
}
