//! This version handles what is left of every released version, in order.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};
use serde_json::{Value, json};

use super::story::{config, depth, received_by, send, sum};
use super::{samples, text};
use crate::support::automation_rig::LONG;
use crate::support::cli::run_in;
use crate::support::counter_fleet::Stores;
use crate::support::http::Client;
use crate::support::receiver::Receiver;
use crate::support::redis::Persistence;
use crate::support::served::Served;
use crate::support::wait::eventually;

/// How long ago the sample seems to be taken: every delay and pause is over.
const AGO: Duration = Duration::from_secs(2 * 3_600);
const PIPELINES: [&str; 6] =
    ["orders", "letters", "lanes", "counters", "notifications", "automations"];

/// The stores with the data of a sample.
pub(super) async fn load(sample: &Path, receiver: &Receiver) -> Stores {
    let stores = Stores::start(Persistence::Always);
    let then = u64::try_from(SystemClock.now().saturating_sub(AGO).as_millis()).unwrap();
    let read = |file: &str| {
        let text = fs::read_to_string(sample.join(file)).unwrap();
        text::moved(&received_by(receiver, &text), then)
    };
    let mut redis = stores.redis.connection().await;
    text::into_redis(&mut redis, &read("redis.txt")).await;
    text::into_mongo(&stores.mongo.url(), &read("mongodb.txt")).await;
    stores
}

/// The ids that a path of the receiver got, for each bot in order. A repeated one counts once.
fn got(receiver: &Receiver, path: &str) -> BTreeMap<String, Vec<String>> {
    let mut got: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let wanted = format!("POST {path} ");
    for call in receiver.calls().iter().filter(|call| call.line.starts_with(&wanted)) {
        let of_bot = got.entry(call.text("bot")).or_default();
        for id in call.ids() {
            if !of_bot.contains(&id) {
                of_bot.push(id);
            }
        }
    }
    got
}

fn hooks(receiver: &Receiver) -> Vec<String> {
    let calls = receiver.calls();
    let names = calls.iter().filter_map(|call| call.line.split(' ').nth(1)?.strip_prefix("/hook/"));
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.sort();
    names
}

/// The events of the story that are still to be handled, in order.
fn expected_orders() -> Vec<(&'static str, Vec<&'static str>)> {
    vec![
        ("delayed", vec!["1"]),
        ("failing", vec!["1", "2", "3", "4"]),
        ("held", vec!["1", "2", "3"]),
        ("paused", vec!["1", "2", "3"]),
        ("queued", vec!["1", "2", "3", "4"]),
        ("resting", vec!["2", "3"]),
        ("taken", vec!["1", "2", "3"]),
    ]
}

#[tokio::test]
async fn the_data_of_every_released_version_is_handled_in_order() {
    for sample in samples() {
        println!("{}", sample.display());
        Box::pin(handle(&sample)).await;
    }
}

async fn handle(sample: &Path) {
    let receiver = Receiver::content().await;
    let stores = load(sample, &receiver).await;
    let config = config(&stores, &receiver, "20ms");
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("fairlane.toml"), &config).unwrap();
    let run = |arguments: &[&str]| {
        let ran = run_in(directory.path(), arguments, "");
        assert_eq!(ran.code, 0, "{arguments:?}: {ran:?}");
        ran.out
    };

    // Operators see it before anything runs.
    assert!(run(&["check"]).contains("\nok     format "), "{}", run(&["check"]));
    let letters: Value = serde_json::from_str(&run(&["dead", "list", "--json"])).unwrap();
    assert_eq!(letters.as_array().map(Vec::len), Some(3), "{letters}");
    let audit = run(&["audit"]);
    assert!(audit.contains("a sample"), "{audit}");

    let mut served = Served::start(&config).await;
    let client = Client::new(&served.http());
    let mut redis = stores.redis.connection().await;
    send(&client, "POST", "/v1/pipelines/orders/bots/paused/resume", &json!({})).await;
    run(&["dead", "redrive", "--all", "--pipeline", "letters", "--yes"]);
    eventually(LONG, "the notification that waits for its user is due", async || {
        send(&client, "POST", "/user_online?uid=waiting&bot=hooks", &json!({})).await;
        hooks(&receiver).contains(&"waiting".to_owned())
    })
    .await;
    eventually(LONG, "everything is handled", async || {
        let mut left = 0;
        for pipeline in PIPELINES {
            left += depth(&mut redis, pipeline).await;
            left += sum(&mut redis, pipeline, "ZCARD", ("due", None)).await;
            left += sum(&mut redis, pipeline, "HLEN", ("own", None)).await;
            left += sum(&mut redis, pipeline, "HLEN", ("att", None)).await;
        }
        left == 0 && got(&receiver, "/orders").contains_key("rules")
    })
    .await;

    let mut orders = got(&receiver, "/orders");
    assert_eq!(orders.remove("rules").map(|ids| ids.len()), Some(1), "the rule emits an event");
    let expected = expected_orders()
        .into_iter()
        .map(|(bot, ids)| (bot.to_owned(), ids.into_iter().map(str::to_owned).collect::<Vec<_>>()));
    assert_eq!(orders, expected.collect::<BTreeMap<_, _>>());
    assert_eq!(got(&receiver, "/letters")["dead"], ["1", "2", "3"]);
    let lanes = &got(&receiver, "/lanes")["lanes"];
    let of = |key: &str| lanes.iter().filter(|id| id.starts_with(key)).collect::<Vec<_>>();
    assert_eq!(of("bad"), ["bad-1", "bad-2", "bad-3"]);
    assert_eq!(of("good"), ["good-3"]);
    assert_eq!(hooks(&receiver), ["due", "pending", "waiting"]);

    // Two views were stored, three came over HTTP, and one over the bus.
    let counters = client.get("/v1/bots/views/counters?ids=ad-1,ad-3,ad-4,ad-gone").await.json();
    assert_eq!(counters["totals"], json!({ "ad-1": 6, "ad-3": 7, "ad-4": 9, "ad-gone": 1 }));
    let counters = client.get("/v1/bots/rules/counters?ids=ad-rule").await.json();
    assert_eq!(counters["totals"], json!({ "ad-rule": 4 }));
    let (totals, _) = stores.stored().await;
    assert_eq!(totals.values().sum::<u64>(), 6 + 7 + 9 + 1 + 4, "{totals:?}");
    let profile = client.get("/v1/bots/rules/subscribers/ann").await.json();
    assert_eq!(profile["tags"], json!(["buyer", "old"]), "{profile}");
    assert_eq!(profile["fields"], json!({ "age": 31, "price": 12 }), "{profile}");
    let profile = client.get("/v1/bots/rules/subscribers/bob").await.json();
    assert_eq!(profile["tags"], json!(["new"]), "{profile}");
    let rule = client.get("/v1/bots/rules/automations/sale").await.json();
    assert_eq!(rule["stats"]["matched"], 2, "{rule}");

    served.sigterm();
    assert_eq!(served.wait_exit(LONG).expect("it ends").code(), Some(0), "{}", served.log());
}
