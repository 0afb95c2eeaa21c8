//! Troubles of processes: nobody reads the bus, or two processes have different pipelines.

use std::time::Instant;

use super::{SAFE, Scene, Trouble};
use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config, configs};
use crate::support::redis::RedisServer;

const REST: &str = "work,http,schedule";

const UNREAD: Trouble = Trouble {
    name: "",
    code: "no-reader",
    pipeline: "",
    words: "no process reads fairlane:events",
    remedy: "start `fairlane serve` with the role ingest",
    alert: "FairlaneNobodyReadsTheBus",
    exit: 0,
    besides: &[],
    alert_ends: true,
};

async fn publish(server: &RedisServer) {
    let events: Vec<_> = (0..3).map(|id| event("shop-1", "t", id)).collect();
    add(server, STREAM, &events).await;
}

/// A process that reads the bus, and one that does the rest.
async fn split(server: &RedisServer, pipeline: &str) -> (String, Scene) {
    let handler = format!("pipelines.{pipeline}.handler");
    let config = config(server, pipeline, &[(&handler, "\"log\"")]);
    let scene = Scene::start(&[(&config, "ingest"), (&config, REST)]).await;
    (config, scene)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bus_that_nobody_reads_shows_within_seconds() {
    let server = RedisServer::start(SAFE);
    let (config, mut scene) = split(&server, "unread").await;
    add(&server, STREAM, &[event("shop-1", "t", "before")]).await;
    scene.settles("unread").await;
    let words = "no process reads fairlane:events, and 3 entries are behind";
    // It may also be the one that reports the metric, and another one takes that over.
    let trouble = Trouble { name: "the process that reads the bus is killed", words, ..UNREAD };
    scene.is_quiet(&trouble).await;
    scene.served[0].kill9();
    let began = Instant::now();
    publish(&server).await;
    scene.shows(&trouble, began).await;
    let _other = crate::support::served::Served::start_as(&config, "ingest").await;
    // The alert needs a scrape of the new process, which this Prometheus does not know.
    scene.ends(&Trouble { alert_ends: false, ..trouble }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bus_whose_reader_is_stuck_shows_within_seconds() {
    let server = RedisServer::start(SAFE);
    let (_, scene) = split(&server, "stuck").await;
    // Nothing was ever copied.
    let trouble = Trouble { name: "the process that reads the bus is frozen", ..UNREAD };
    scene.is_quiet(&trouble).await;
    scene.served[0].sigstop();
    let began = Instant::now();
    publish(&server).await;
    scene.shows(&trouble, began).await;
    scene.served[0].sigcont();
    scene.ends(&trouble).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_with_different_pipelines_on_one_bus_show_within_seconds() {
    let server = RedisServer::start(SAFE);
    let log = [("pipelines.first.handler", "\"log\""), ("pipelines.second.handler", "\"log\"")];
    let both = configs(&server, &["first", "second"], &log);
    let scene = Scene::start(&[(&both, "ingest,work,http,schedule")]).await;
    let trouble = Trouble {
        name: "two processes on one bus have different pipelines",
        code: "pipelines-differ",
        words: "processes that read fairlane:events have different pipelines",
        remedy: "give all processes that read one bus the same pipelines",
        alert: "FairlanePipelinesDiffer",
        alert_ends: false,
        ..Trouble::default()
    };
    scene.is_quiet(&trouble).await;
    let began = Instant::now();
    let other = crate::support::served::Served::start_as(
        &configs(&server, &["first"], &log[..1]),
        "ingest,work,http,schedule",
    )
    .await;
    scene.shows(&trouble, began).await;
    other.sigterm();
    scene.ends(&trouble).await;
    drop(other);
}
