//! Days, exports and pages while MongoDB is behind: they say so.

use std::time::Duration;

use serde_json::json;

use crate::support::counter_fleet::{Ad, Node, Stores, Sums, View, acknowledged, path};
use crate::support::http::Client;
use crate::support::interceptor::Interception;
use crate::support::mongo_proxy::finds_at_most_behind;
use crate::support::redis::Persistence;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);
const EXPORT: &str = "/v1/bots/bot/counters/export?day=2026-11-01";

fn ad() -> Ad {
    ("bot".to_owned(), "x".to_owned())
}

/// Whether the days of an ad, those of several ads, an export, and the pages say that they are stale.
async fn stale(client: &Client) -> [bool; 5] {
    let days = acknowledged(async || client.get(&path(&ad(), "/daily")).await).await.json();
    let many = acknowledged(async || {
        let headers = [("content-type", "application/json")];
        let body = json!({ "ids": ["x"], "from": "2026-01-01", "to": "2026-01-31" }).to_string();
        let path = "/v1/bots/bot/counters/query";
        client.send("POST", path, &headers, body.as_bytes()).await
    });
    let many = many.await.json();
    let export = acknowledged(async || client.get(EXPORT).await).await;
    let is_stale = |body: &serde_json::Value| body.get("stale").is_some();
    let page = async |path: &str| {
        let page = acknowledged(async || client.get(path).await).await;
        String::from_utf8_lossy(&page.body).contains("Views may be missing: ")
    };
    let (top, one) = (page("/counters?bot=bot").await, page("/counters?bot=bot&ads=x").await);
    [is_stale(&days), is_stale(&many), export.header("x-stale") == Some("true"), top, one]
}

#[tokio::test]
async fn days_exports_and_pages_say_that_they_lack_views_that_wait_for_long() {
    let stores = Stores::start(Persistence::Always);
    let node = Node::start(&stores, &[]).await;
    let client = node.client();
    View::new("bot", "x", 2).count(|| client.clone()).await;
    let mut expected = Sums::from([(ad(), 2)]);
    stores.settles(&client, &expected, LONG).await;
    assert_eq!(stale(&client).await, [false; 5]);

    assert_eq!(client.post("/v1/pipelines/counters/pause").await.code, 204);
    View::new("bot", "x", 3).count(|| client.clone()).await;
    expected.insert(ad(), 5);
    eventually(LONG, "they are stale", async || stale(&client).await == [true; 5]).await;
    let totals = client.get("/v1/bots/bot/counters?ids=x").await;
    assert_eq!(totals.json(), json!({ "totals": { "x": 5 } }), "totals are exact");

    assert_eq!(client.post("/v1/pipelines/counters/resume").await.code, 204);
    stores.settles(&client, &expected, LONG).await;
    assert_eq!(stale(&client).await, [false; 5]);
}

#[tokio::test]
async fn an_export_is_read_from_no_server_that_is_far_behind() {
    let stores = Stores::start(Persistence::Always);
    let node = Node::start(&stores, &[]).await;
    let most = Duration::from_secs(90);
    let bound = finds_at_most_behind("counters_daily", most);
    let asked = node.mongo.intercept(bound, 1, Interception::Watch);
    acknowledged(async || node.client().get(EXPORT).await).await;
    assert!(asked.has_caught());
}
