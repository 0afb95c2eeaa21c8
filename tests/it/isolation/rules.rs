//! No bot can fill the stores with profiles or with statistics of its rules, nor the memory with profiles or
//! copies of its events, nor delay others with the size of its filters.

use std::time::{Duration, Instant};

use fairlane::automations::store::{Expected, RuleStore};
use fairlane::config::MongoUrl;
use fairlane::id::{BotId, RuleId};
use fairlane::mongo::client::Mongo;
use futures_util::future::join_all;
use mongodb::bson::{Document, doc};
use serde_json::{Value, json};

use crate::support::automation_rig::{
    LONG, RULES, Rig, depth, event, profile, publish, put, settles, tag,
};
use crate::support::counter_fleet::{Node, Stores};
use crate::support::http::{Client, Response};
use crate::support::interceptor::Interception;
use crate::support::mongo_proxy::on;
use crate::support::redis::Persistence;
use crate::support::served::Served;
use crate::support::wait::eventually;

/// A quiet bot's rule acts within this, whatever a hostile bot does.
const SOON: Duration = Duration::from_secs(10);

#[tokio::test]
async fn an_event_that_would_create_a_profile_above_the_quota_becomes_a_dead_letter() {
    let rig = Rig::start(&[("quotas.profiles", "2")]).await;
    for bot in ["full", "quiet"] {
        let rule = json!({ "on": ["no.such"], "actions": [{ "set_tag": { "tag": "x" } }] });
        rig.put(bot, "rule", &rule).await;
    }
    rig.publish(&[
        tag("full", "u1", "1", "a"),
        tag("full", "u2", "2", "a"),
        tag("full", "u3", "3", "a"),
        tag("quiet", "u3", "4", "a"),
        tag("full", "u1", "5", "b"),
    ])
    .await;
    eventually(LONG, "the last event is applied", async || {
        profile(&rig.client, "full", "u1").await["tags"] == json!(["a", "b"])
    })
    .await;
    // One command may write several profiles, and each is visible as soon as it is written.
    for (bot, subscriber) in [("full", "u2"), ("quiet", "u3")] {
        eventually(LONG, &format!("{subscriber} of {bot} is within the quota"), async || {
            profile(&rig.client, bot, subscriber).await["tags"] == json!(["a"])
        })
        .await;
    }
    let mut letters = Value::Null;
    eventually(LONG, "one event is a dead letter", async || {
        letters = rig.client.get("/v1/pipelines/automations/dead?bot=full").await.json();
        letters["dead_letters"].as_array().is_some_and(|letters| !letters.is_empty())
    })
    .await;
    let refused = rig.client.get("/v1/bots/full/subscribers/u3").await;
    assert_eq!(refused.code, 404, "{refused:?}");
    let [letter] = &letters["dead_letters"].as_array().unwrap()[..] else { panic!("{letters}") };
    let reason = letter["reason"].as_str().unwrap();
    assert!(reason.contains("holds 2") && reason.contains("quotas.profiles is now 2"), "{letter}");
    rig.instance.stop().await;
}

#[tokio::test]
async fn mongodb_counts_the_profiles_of_a_bot_only_if_all_profiles_reach_the_quota() {
    let stores = Stores::start(Persistence::Always);
    let node = Node::start(&stores, &[RULES, &[("quotas.profiles", "5")]].concat()).await;
    let rule = json!({ "on": ["no.such"], "actions": [{ "set_tag": { "tag": "x" } }] });
    for bot in ["a", "b"] {
        assert_eq!(put(&node.client(), bot, "rule", &rule).await.code, 201);
    }
    let counts = node.mongo.intercept(on("aggregate", "subscribers"), 1, Interception::Watch);
    let sizes = node.mongo.intercept(on("count", "subscribers"), 2, Interception::Watch);
    publish(&stores, &[tag("a", "u1", "1", "x"), tag("a", "u2", "2", "x")]).await;
    settles(&stores, 2).await;
    publish(&stores, &[tag("b", "u1", "3", "x"), tag("b", "u2", "4", "x")]).await;
    settles(&stores, 4).await;
    assert!(!counts.has_caught(), "four profiles are below any quota");
    assert!(!sizes.has_caught(), "one answer is for all bots");
    publish(&stores, &[tag("b", "u3", "5", "x"), tag("b", "u4", "6", "x")]).await;
    settles(&stores, 6).await;
    assert!(counts.has_caught(), "all profiles together reach the quota of a bot");
    for subscriber in ["u3", "u4"] {
        assert_eq!(profile(&node.client(), "b", subscriber).await["tags"], json!(["x"]));
    }
}

#[tokio::test]
async fn statistics_of_deleted_rules_do_not_pile_up() {
    let rig = Rig::start(&[]).await;
    let rule = json!({ "on": ["hit"], "actions": [{ "set_tag": { "tag": "x" } }] });
    for name in ["kept", "deleted"] {
        rig.put("shop", name, &rule).await;
    }
    rig.publish(&[event("shop", "u", "1", "hit", json!({}))]).await;
    eventually(LONG, "they match", async || rig.stats("shop", "kept").await["matched"] == 1).await;
    let mut connection = rig.stores.redis.connection().await;
    let keys: Vec<String> = redis::cmd("KEYS")
        .arg("fl:{automations:*}:rules:shop")
        .query_async(&mut connection)
        .await
        .unwrap();
    let [key] = &keys[..] else { panic!("{keys:?}") };
    // As processes leave them that evaluate a rule while it is deleted.
    let mut left = redis::cmd("HSET");
    left.arg(key);
    for number in 0..4_000 {
        left.arg(format!("mold-{number}")).arg(1);
    }
    let () = left.query_async(&mut connection).await.unwrap();
    let deleted = rig.client.send("DELETE", "/v1/bots/shop/automations/deleted", &[], b"").await;
    assert_eq!(deleted.code, 204, "{deleted:?}");
    let mut length = redis::cmd("HLEN");
    length.arg(key);
    let fields: u64 = length.query_async(&mut connection).await.unwrap();
    assert!(fields <= 8, "{fields} fields");
    assert_eq!(rig.stats("shop", "kept").await["matched"], 1);
    rig.instance.stop().await;
}

/// What the rules of `hostile` decide, in a dry run.
async fn tried(client: &Client, trial: &Value) -> Value {
    let headers = [("content-type", "application/json")];
    let (path, body) = ("/v1/bots/hostile/automations/test", trial.to_string());
    let answer = client.send("POST", path, &headers, body.as_bytes()).await;
    assert_eq!(answer.code, 200, "{answer:?}");
    answer.json()
}

#[tokio::test]
async fn a_filter_that_copies_a_large_event_often_is_refused_and_takes_no_memory() {
    let stores = Stores::start(Persistence::Always);
    let served = Served::start(&stores.direct(RULES)).await;
    let client = Client::new(&served.http());
    let sample = json!({ "type": "a", "data": vec![json!({}); 85_000] });
    let test = async |filter: &str| {
        let actions = json!([{ "set_tag": { "tag": "t" } }]);
        let rule = json!({ "on": ["a"], "filter": filter, "actions": actions });
        tried(&client, &json!({ "event": sample, "rule": rule })).await
    };
    assert_eq!(test("event.type == 'a'").await["matched"][0]["rule"], "rule");
    let before = peak(&served);
    let copies = vec!["event"; 100].join(",");
    for filter in [
        format!("[{copies}].size() > 0"),
        "[[event, event, event]].exists(x, [x, x, x, x, x].size() > 0)".to_owned(),
        format!("({}).size() > 0", ["event.data"; 10].join(" + ")),
    ] {
        let answer = test(&filter).await;
        let reason = answer["errors"][0]["reason"].as_str().expect("it is refused");
        assert!(reason.contains("the filter would take"), "{answer}");
    }
    let growth = peak(&served) - before;
    assert!(growth < 100_000, "the memory grew by {growth} KiB");
}

#[tokio::test]
async fn an_error_of_a_filter_shows_little_of_a_large_event() {
    let stores = Stores::start(Persistence::Always);
    let served = Served::start(&stores.direct(RULES)).await;
    let client = Client::new(&served.http());
    let actions = json!([{ "set_tag": { "tag": "t" } }]);
    let rule = json!({ "on": ["a"], "filter": "event - event == 1", "actions": actions });
    assert_eq!(put(&client, "hostile", "rule", &rule).await.code, 201);
    publish(&stores, &[event("hostile", "u", "1", "a", json!("x".repeat(900_000)))]).await;
    let mut shown = Value::Null;
    eventually(LONG, "the rule fails on it", async || {
        shown = client.get("/v1/bots/hostile/automations/rule").await.json();
        shown["stats"]["errors"] == 1
    })
    .await;
    assert!(shown.to_string().len() < 2_000, "{} bytes", shown.to_string().len());
    let log = served.log();
    let line = log.lines().find(|line| line.contains("an automation failed on an event"));
    let length = line.map(str::len);
    assert!(length.is_some_and(|length| length < 2_000), "{length:?} bytes");
    let sample = json!({ "type": "a", "data": "x".repeat(200_000) });
    let answer = tried(&client, &json!({ "event": sample })).await;
    let reason = answer["errors"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("cannot be evaluated") && reason.len() <= 600, "{reason:.3000}");
}

/// The largest memory of a process, in KiB.
fn peak(served: &Served) -> u64 {
    let peak = served.status_of_kernel("VmHWM").expect("the kernel tells it");
    peak.trim_end_matches(" kB").parse().unwrap()
}

#[tokio::test]
async fn large_profiles_of_one_bot_are_read_in_parts_and_delay_no_rule_of_another() {
    // Together they have 96 MB.
    const LARGE: usize = 120;
    let stores = Stores::start(Persistence::Always);
    let patient = [("counters.read_timeout", "\"10s\"")];
    let served = Served::start(&stores.direct(&[RULES, &patient].concat())).await;
    let client = Client::new(&served.http());
    let rule = json!({ "on": ["ask"], "filter": "event.data.n == 1",
        "actions": [{ "set_tag": { "tag": "asked" } }] });
    for bot in ["hostile", "quiet"] {
        assert_eq!(put(&client, bot, "rule", &rule).await.code, 201);
    }
    let text = "x".repeat(4_000);
    let fields: Document = (0..200).map(|n| (format!("f{n}"), text.as_str().into())).collect();
    let profiles: Vec<Document> = (0..LARGE)
        .map(|n| {
            let (id, subscriber) = (format!("hostile\u{1f}u{n}"), format!("u{n}"));
            doc! { "_id": id, "bot": "hostile", "id": subscriber, "tags": [],
            "fields": fields.clone(), "s": 1_i64, "decided": [] }
        })
        .collect();
    let database = mongodb::Client::with_uri_str(stores.mongo.url()).await.unwrap();
    let subscribers = database.database("fairlane").collection::<Document>("subscribers");
    for some in profiles.chunks(20) {
        subscribers.insert_many(some).await.unwrap();
    }
    // One slice could hold all events.
    assert_eq!(client.post("/v1/pipelines/automations/bots/hostile/pause").await.code, 204);
    let ask = |bot: &str, subscriber: &str, n: usize| {
        event(bot, subscriber, &format!("{bot}-{subscriber}"), "ask", json!({ "n": n }))
    };
    let events: Vec<Value> = (0..LARGE).map(|n| ask("hostile", &format!("u{n}"), 0)).collect();
    publish(&stores, &events).await;
    eventually(LONG, "they are queued", async || depth(&stores).await == LARGE as u64).await;
    let before = peak(&served);
    assert_eq!(client.post("/v1/pipelines/automations/bots/hostile/resume").await.code, 204);
    for n in 0..3 {
        let (subscriber, published) = (format!("q{n}"), Instant::now());
        publish(&stores, &[ask("quiet", &subscriber, 1)]).await;
        eventually(LONG, "the quiet bot's rule acts", async || {
            profile(&client, "quiet", &subscriber).await["tags"] == json!(["asked"])
        })
        .await;
        assert!(published.elapsed() < SOON, "it took {:?}", published.elapsed());
    }
    eventually(LONG, "all are decided", async || depth(&stores).await == 0).await;
    let growth = peak(&served) - before;
    assert!(growth < 120_000, "the memory grew by {growth} KiB");
    let rule = client.get("/v1/bots/hostile/automations/rule").await.json();
    assert_eq!(rule["stats"]["errors"], 0, "{rule}");
}

#[tokio::test]
async fn tests_of_many_long_filters_take_a_second_and_delay_no_checks_of_another_bot() {
    let rig = Rig::start(&[("counters.read_timeout", "\"10s\"")]).await;
    let url = MongoUrl::parse(&rig.stores.mongo.url()).unwrap();
    let store = RuleStore::new(Mongo::open(&url, "fairlane").await.unwrap());
    let rule = |n: usize| {
        let filter = format!("event.data.n in [{n}{}]", ",1".repeat(900));
        json!({ "on": ["a"], "filter": filter, "actions": [{ "set_tag": { "tag": "t" } }] })
    };
    // Together they take seconds to compile.
    let hostile = BotId::parse("hostile").unwrap();
    for n in 0..100 {
        let id = RuleId::parse(&format!("rule-{n}")).unwrap();
        let rule = serde_json::from_value(rule(n)).unwrap();
        store.put(&hostile, &id, &rule, &Expected::Anything).await.unwrap();
    }
    let test = async || {
        let (path, headers) =
            ("/v1/bots/hostile/automations/test", [("content-type", "application/json")]);
        rig.client.send("POST", path, &headers, b"{\"event\":{\"type\":\"a\"}}").await
    };
    let quiet = async {
        // Behind the tests. On a slow machine it is before them, and this shows nothing.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let begun = Instant::now();
        rig.put("quiet", "rule", &rule(0)).await;
        begun.elapsed()
    };
    let (tests, took) = tokio::join!(join_all((0..4).map(|_| test())), quiet);
    assert!(took < SOON, "a long rule took {took:?}");
    let is_stopped = |answer: &Response| {
        let detail = String::from_utf8_lossy(&answer.body);
        answer.code == 503 && detail.contains("the next request continues")
    };
    assert!(tests.iter().any(is_stopped), "{tests:?}");
}
