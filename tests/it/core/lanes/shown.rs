//! What operators see of lanes that are set aside.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fairlane::id::{BotId, Lane};
use serde_json::Value;

use super::{LONG, event};
use crate::support::cli::run_in;
use crate::support::http::{Client, get, metric};
use crate::support::instance::queue;
use crate::support::push::Push;
use crate::support::receiver::{Call, Reply};
use crate::support::wait::eventually;

const SUBJECTS: [&str; 4] = ["ann", "bad", "bob", "worse"];
const BOT: &str = "/v1/pipelines/test/bots/shop";

#[tokio::test]
async fn lanes_that_are_set_aside_are_listed_with_their_events_and_counted_in_a_metric() {
    let settings = [
        ("pipelines.test.order_by", "\"subject\""),
        ("pipelines.test.backoff", "{ initial = \"10m\", max = \"10m\", jitter = 0.0 }"),
    ];
    let broken = Arc::new(AtomicBool::new(true));
    let fails = Arc::clone(&broken);
    let push = Push::new(&settings, move |call: Call| {
        let subject = call.json()["events"][0]["subject"].clone();
        let fails = fails.load(Ordering::Relaxed) && (subject == "bad" || subject == "worse");
        std::future::ready(Reply::new(if fails { 500 } else { 200 }, ""))
    })
    .await;
    let served = push.serve().await;
    let client = Client::new(&served.http());
    let events: Vec<String> = (0..20).map(|id| event("shop", SUBJECTS[id % 4], id)).collect();
    push.publish_events(&events).await;
    eventually(LONG, "two lanes are set aside", async || {
        let shown = client.get(BOT).await.json();
        shown["set_aside"] == 10 && shown["depth"] == 10
    })
    .await;

    let shown = client.get(&format!("{BOT}?limit=4")).await.json();
    assert!(
        shown["oldest_age_ms"].as_u64().unwrap() > 0,
        "the queue is empty, but lanes wait: {shown}"
    );
    let pipeline = client.get("/v1/pipelines/test").await.json();
    assert!(pipeline["oldest_age_ms"].as_u64().unwrap() > 0, "{pipeline}");
    let lanes = shown["lanes_aside"].as_array().unwrap();
    assert_eq!(lanes.len(), 2, "{shown}");
    // It is written after the slice has ended.
    let failure = async || {
        let failure = client.get(BOT).await.json()["last_failure"].clone();
        (failure["reason"].clone(), failure["since_ms"].clone())
    };
    eventually(LONG, "the reason is told", async || {
        failure().await.0 == "the receiver answered 500"
    })
    .await;
    let told = failure().await;
    push.publish_events(&[event("shop", "ann", 20)]).await;
    eventually(LONG, "another lane goes on", async || {
        push.receiver.calls().iter().any(|call| call.ids().contains(&"20".to_owned()))
            && client.get(BOT).await.json()["depth"] == 10
    })
    .await;
    assert_eq!(failure().await, told, "it stays although other lanes go on");
    let now_ms =
        fairlane::clock::millis(fairlane::clock::Clock::now(&fairlane::clock::SystemClock));
    for (subject, ids) in [("bad", ["1", "5"]), ("worse", ["3", "7"])] {
        let number = Lane::of(subject).to_string().parse::<u8>().unwrap();
        let lane = lanes.iter().find(|lane| lane["lane"] == number).unwrap();
        assert_eq!((&lane["depth"], &lane["attempts"]), (&5.into(), &1.into()), "{lane}");
        let due_ms = lane["due_ms"].as_u64().unwrap();
        assert!((now_ms..now_ms + 600_000).contains(&due_ms), "{due_ms} at {now_ms}");
        let next: Vec<&Value> = lane["next"].as_array().unwrap().iter().collect();
        let found: Vec<&Value> = next.iter().map(|next| &next["event"]["id"]).collect();
        assert_eq!(found, ids, "its share of the limit");
        assert!(next.iter().all(|next| next["event"]["subject"] == subject));
    }
    let none = client.get(&format!("{BOT}?limit=0")).await.json();
    assert_eq!(none["lanes_aside"][0]["next"], serde_json::json!([]));
    let one = queue(&push.config, "test").await;
    let one = one.lanes_aside(&BotId::parse("shop").unwrap(), 99, 1).await.unwrap();
    assert_eq!((one[0].next.len(), one[1].next.len()), (1, 0), "bounded in bytes");

    let page = client.get("/bots/shop").await;
    let page = String::from_utf8(page.body).unwrap();
    for text in ["Lanes set aside after a failure", "in 9 min", "bad", "worse"] {
        assert!(page.contains(text), "{text}: {page}");
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("fairlane.toml"), &push.config).unwrap();
    let ran = run_in(dir.path(), &["bots", "show", "shop"], "");
    assert_eq!(ran.code, 0, "{}", ran.err);
    for text in ["LANE SET ASIDE", "in 9m", "EVENT SET ASIDE", "worse"] {
        assert!(ran.out.contains(text), "{text}: {}", ran.out);
    }
    let ran = run_in(dir.path(), &["bots", "show", "shop", "--json"], "");
    let json: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(json["lanes_aside"].as_array().unwrap().len(), 2);

    let bots = async || {
        let (_, text) = get(&served.metrics(), "/metrics").await;
        metric(&text, "fairlane_bots_with_lanes_set_aside", &[("pipeline", "test")])
    };
    eventually(LONG, "the metric counts the bot", async || bots().await == Some(1.0)).await;
    broken.store(false, Ordering::Relaxed);
    let ran = run_in(dir.path(), &["bots", "release", "shop"], "");
    assert_eq!(ran.code, 0, "{}", ran.err);
    push.drains(&served).await;
    eventually(LONG, "the metric is 0", async || bots().await == Some(0.0)).await;
    let shown = client.get(BOT).await.json();
    assert_eq!((&shown["set_aside"], &shown["lanes_aside"]), (&Value::Null, &Value::Null));
    assert_eq!(shown["last_failure"], Value::Null);
}
