//! Requests to the counters that are refused, with the reason.

use jiff::civil::Date;
use serde_json::{Value, json};

use super::{Counting, JSON, LONG, path, send, totals, view};
use crate::support::config::config;
use crate::support::http::Operation;
use crate::support::instance::Instance;
use crate::support::mongo;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

/// Requests that no counter can use: method, the path after `counters`, body, and the field in
/// error.
fn unusable() -> Vec<(&'static str, String, Option<Value>, &'static str)> {
    let long = "x".repeat(10_000);
    let ids = |count: usize| vec!["a"; count];
    let mut all = vec![
        ("GET", String::new(), None, "ids"),
        ("GET", "?ids=".to_owned(), None, "ids[0]"),
        ("GET", "?ids=a,,b".to_owned(), None, "ids[1]"),
        ("GET", "?ids=a,b%0a".to_owned(), None, "ids[1]"),
        ("GET", format!("?ids={}", ids(1_001).join(",")), None, "ids"),
        ("GET", format!("?ids=a,{long}"), None, "ids[1]"),
        ("GET", "?ids=a&ids=b".to_owned(), None, "ids"),
        ("GET", "?ids=a&id=b".to_owned(), None, "id"),
    ];
    for (body, field) in [
        (json!({}), "ids"),
        (json!({ "ids": "a" }), "ids"),
        (json!({ "ids": ["a", 1] }), "ids[1]"),
        (json!({ "ids": ["a", ""] }), "ids[1]"),
        (json!({ "ids": ["a\u{7f}"] }), "ids[0]"),
        (json!({ "ids": [long] }), "ids[0]"),
        (json!({ "ids": ids(1_001) }), "ids"),
        (json!({ "ids": ["a"], "n": 1 }), "n"),
    ] {
        all.push(("POST", "/query".to_owned(), Some(body), field));
    }
    for n in [json!(0), json!(-1), json!(1_001), json!("3"), json!(1.5), json!(true), json!(1e30)] {
        all.push(("POST", "/x/views".to_owned(), Some(json!({ "n": n })), "n"));
    }
    all.push(("POST", "/x/views".to_owned(), Some(json!({ "views": 1 })), "views"));
    for (query, field) in [
        ("from=2026-11-02&to=2026-11-01", "from"),
        ("from=2024-11-20&to=2026-11-20", "to"),
        ("from=0001-01-01", "to"),
        ("from=9999-12-31", "from"),
        ("from=2026-11-31", "from"),
        ("to=yesterday", "to"),
        ("to=", "to"),
        ("to=2026-11-1", "to"),
        ("day=2026-11-01", "day"),
    ] {
        all.push(("GET", format!("/x/daily?{query}"), None, field));
    }
    for (query, field) in [("", "day"), ("?day=", "day"), ("?day=2026-02-29", "day")] {
        all.push(("GET", format!("/export{query}"), None, field));
    }
    let days: serde_json::Map<_, _> = (0..745)
        .map(|at| (Date::constant(2020, 1, 1).saturating_add(jiff::Span::new().days(at)), json!(1)))
        .map(|(day, views)| (day.to_string(), views))
        .collect();
    for (body, field) in [
        (json!({}), "total"),
        (json!({ "total": -1 }), "total"),
        (json!({ "total": 1_000_000_000_000_001_u64 }), "total"),
        (json!({ "total": "3" }), "total"),
        (json!({ "total": 3, "dais": {} }), "dais"),
        (json!({ "total": 3, "days": [1] }), "days"),
        (json!({ "total": 3, "days": { "2026-11-31": 1 } }), "days.2026-11-31"),
        (json!({ "total": 3, "days": { "2026-11-01": -1 } }), "days.2026-11-01"),
        (json!({ "total": 3, "days": { "2026-11-01": "1" } }), "days.2026-11-01"),
        (json!({ "total": 3, "days": { "2026-11-01": 2, "2026-11-02": 2 } }), "days"),
        (json!({ "total": 1_000, "days": days }), "days"),
        (json!({ "total": 1, "days": { "1999-12-31": 1 } }), "days"),
        (json!({ "total": 1, "days": { "9999-12-31": 1 } }), "days"),
    ] {
        all.push(("PUT", "/x".to_owned(), Some(body), field));
    }
    for ad in [&*long, "x%00", "%c2%85", "%ff", &"x".repeat(129)] {
        all.push(("POST", format!("/{ad}/views"), None, "ad"));
        all.push(("POST", format!("/{ad}/reset"), None, "ad"));
        all.push(("PUT", format!("/{ad}"), Some(json!({ "total": 1 })), "ad"));
        all.push(("DELETE", format!("/{ad}"), None, "ad"));
        all.push(("GET", format!("/{ad}/daily"), None, "ad"));
    }
    all
}

#[tokio::test]
async fn an_unusable_value_is_refused_by_its_field_and_counts_nothing() {
    let counting = Counting::start().await;
    let client = &counting.client;
    for (method, rest, body, field) in unusable() {
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        let answer = client.send(method, &path(&rest), &JSON, body.as_bytes()).await;
        let shown: String = format!("{method} {rest} {body}").chars().take(120).collect();
        assert_eq!((answer.code, answer.problem().as_str()), (400, "invalid-request"), "{shown}");
        assert_eq!(answer.json()["errors"][0]["field"], field, "{shown}: {answer:?}");
        assert!(answer.json()["detail"].as_str().unwrap().len() < 500, "{shown}");
    }
    let long = "k".repeat(256);
    for key in ["", " ", "a b", "\u{e4}", "a\tb", &long] {
        let headers = [("idempotency-key", key)];
        let answer = client.send("POST", &path("/x/views"), &headers, b"").await;
        assert_eq!((answer.code, answer.problem().as_str()), (400, "invalid-request"), "{key:?}");
        assert_eq!(answer.json()["errors"][0]["field"], "Idempotency-Key", "{key:?}");
    }
    let twice = [("idempotency-key", "a"), ("idempotency-key", "b")];
    assert_eq!(client.send("POST", &path("/x/views"), &twice, b"").await.code, 400);
    for (method, rest) in [("POST", "/x/reset"), ("DELETE", "/x")] {
        let answer = send(client, method, rest, &json!({ "total": 1 })).await;
        assert_eq!((answer.code, answer.problem().as_str()), (400, "invalid-request"), "{method}");
    }
    let text = [("content-type", "text/plain")];
    for (method, rest) in [("POST", "/x/views"), ("POST", "/query"), ("PUT", "/x")] {
        let answer = client.send(method, &path(rest), &text, b"{}").await;
        assert_eq!((answer.code, answer.problem().as_str()), (415, "media-type"), "{rest}");
    }
    assert_eq!(totals(client, &["x", "a"]).await, json!({ "totals": { "x": 0, "a": 0 } }));
    counting.stop().await;
}

#[tokio::test]
async fn without_mongodb_days_are_refused_for_now_and_views_still_counted() {
    let mut counting = Counting::start().await;
    assert_eq!(view(&counting.client, "x").await, 1);
    counting.mongo.is_prepared().await;
    counting.mongo.kill9();
    for rest in ["/x/daily", "/export?day=2026-11-01"] {
        let answer = counting.client.get(&path(rest)).await;
        assert_eq!((answer.code, answer.problem().as_str()), (503, "mongodb-away"), "{rest}");
        assert!(answer.header("retry-after").is_some(), "{rest}");
        let address = counting.mongo.address().to_string();
        assert!(!String::from_utf8_lossy(&answer.body).contains(&address), "{answer:?}");
    }
    assert_eq!(view(&counting.client, "x").await, 2);
    assert_eq!(view(&counting.client, "unknown").await, Value::Null);
    let told = totals(&counting.client, &["x", "unknown"]).await;
    assert_eq!(told, json!({ "totals": { "x": 2, "unknown": null } }));
    counting.mongo.restart(mongo::Options::default());
    let client = &counting.client;
    eventually(LONG, "both are there", async || {
        totals(client, &["x", "unknown"]).await == json!({ "totals": { "x": 2, "unknown": 1 } })
            && client.get(&path("/x/daily")).await.code == 200
    })
    .await;
    counting.stop().await;
}

#[tokio::test]
async fn where_the_counters_do_not_run_every_route_says_so_and_why() {
    let server = RedisServer::start(Options::default());
    let instance = Instance::start(&config(&server, "test", &[]), Log::default().content()).await;
    let client = instance.client();
    let operations = Operation::all(&client).await;
    let of_counters =
        operations.iter().filter(|operation| operation.template.contains("/counters"));
    let mut asked = 0;
    for operation in of_counters {
        let body = match (operation.method.as_str(), operation.needs_body) {
            ("PUT", true) => json!({ "total": 1 }).to_string(),
            (_, true) => json!({ "ids": ["x"] }).to_string(),
            _ => String::new(),
        };
        let path = operation.path(&[]);
        let imports = path.ends_with("/import");
        let body = if imports { json!({ "ad": "x", "total": 1 }).to_string() } else { body };
        let kind = if imports { "application/x-ndjson" } else { "application/json" };
        let headers = [("content-type", kind), ("idempotency-key", "k")];
        let answer = client.send(&operation.method, &path, &headers, body.as_bytes()).await;
        assert_eq!((answer.code, answer.problem().as_str()), (404, "no-counters"), "{path}");
        let detail = answer.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains("mongodb.url"), "{detail}");
        asked += 1;
    }
    assert_eq!(asked, 9);
    instance.stop().await;
}
