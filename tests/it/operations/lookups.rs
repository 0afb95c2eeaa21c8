//! A name of MongoDB that no name server knows.

use std::time::Duration;

use crate::support::bus::event;
use crate::support::config::config;
use crate::support::http::{Client, get, metric};
use crate::support::mongo::{self, MongoServer};
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);
/// There are no names below `invalid`, so nothing is asked for this one.
const UNKNOWN: &str = "mongodb+srv://db.fairlane.invalid";

fn settings(server: &RedisServer, mongo: &str) -> String {
    let url = format!("{mongo:?}");
    config(server, "test", &[("mongodb.url", &url), ("pipelines.test.handler", "\"log\"")])
}

/// Whether the process is ready, with MongoDB in this state.
async fn is_ready(process: &Served, mongodb: &str) -> bool {
    let (code, body) = get(&process.metrics(), "/readyz").await;
    code == 200 && body.contains(&format!("\"mongodb\":\"{mongodb}\""))
}

#[tokio::test]
async fn a_process_starts_while_the_servers_of_mongodb_cannot_be_looked_up_and_says_so() {
    let server = RedisServer::start(Options::default());
    let process = Served::start(&settings(&server, UNKNOWN)).await;
    eventually(LONG, "degraded", async || is_ready(&process, "down").await).await;
    eventually(LONG, "the log says why", async || {
        let log = process.log();
        let mut lines = log.lines().filter(|line| line.contains("MongoDB is unavailable"));
        lines.any(|line| line.contains("cannot be looked up"))
    })
    .await;
    // What needs no MongoDB works.
    let body = event("bot", "test", 1);
    let answer = Client::new(&process.http()).publish("application/cloudevents+json", &body).await;
    assert_eq!(answer.code, 202, "{answer:?}");
    eventually(LONG, "it is handled", async || {
        let (_, text) = get(&process.metrics(), "/metrics").await;
        let labels = [("pipeline", "test"), ("outcome", "done")];
        metric(&text, "fairlane_events_total", &labels) == Some(1.0)
    })
    .await;
}

#[tokio::test]
async fn a_reload_whose_mongodb_cannot_be_looked_up_changes_nothing() {
    let server = RedisServer::start(Options::default());
    let mongo = MongoServer::start(mongo::Options::default());
    let process = Served::start(&settings(&server, &mongo.url())).await;
    eventually(LONG, "ready", async || is_ready(&process, "up").await).await;
    process.write("fairlane.toml", &settings(&server, UNKNOWN));
    let answer = Client::new(&process.http()).post("/v1/reload").await;
    let told = answer.json()["detail"].as_str().unwrap_or_default().to_owned();
    assert!(answer.code == 400 && told.contains("cannot be looked up"), "{answer:?}");
    assert!(is_ready(&process, "up").await, "the servers that it knows are used");
}
