//! Requests that a process has let in.

use std::time::Duration;

use tokio::task::JoinSet;

use super::http::{Client, Response, get, metric};
use super::served::Served;
use super::wait::eventually;

/// How many requests of a class were let in until now.
pub(crate) async fn admitted(process: &Served, class: &str) -> f64 {
    let (_, text) = get(&process.metrics(), "/metrics").await;
    let of = |decision| {
        let labels = [("class", class), ("decision", decision)];
        metric(&text, "fairlane_admission_total", &labels).unwrap_or_default()
    };
    of("admitted") + of("shadow")
}

/// Sends requests that hang until Redis continues, and waits until they are let in.
pub(crate) async fn hang(process: &Served, client: &Client, count: u32) -> JoinSet<Response> {
    let before = admitted(process, "p1").await;
    let mut hanging = JoinSet::new();
    for _ in 0..count {
        let client = client.clone();
        hanging.spawn(async move { client.get("/v1/pipelines/test").await });
    }
    let all = before + f64::from(count) - 0.5;
    eventually(Duration::from_secs(20), "the requests are let in", async || {
        admitted(process, "p1").await > all
    })
    .await;
    hanging
}
