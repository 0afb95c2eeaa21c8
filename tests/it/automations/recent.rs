//! Profiles that a process keeps between slices, while others change them.

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use crate::support::automation_rig::{
    LONG, RULES, emitted, event, field, profile, publish, put, settles, tag,
};
use crate::support::counter_fleet::{Node, Stores};
use crate::support::http::Client;
use crate::support::interceptor::Interception;
use crate::support::mongo_proxy::{on, writes_to};
use crate::support::redis::Persistence;
use crate::support::wait::{eventually, judged, tried};

const SUBSCRIBERS: &str = "subscribers";

/// Rules that give and take a tag, and one that tells of it.
async fn rules(client: &Client) {
    for (id, rule) in [
        ("go", json!({ "on": ["go"], "actions": [{ "set_tag": { "tag": "a" } }] })),
        ("back", json!({ "on": ["back"], "actions": [{ "remove_tag": { "tag": "a" } }] })),
        (
            "ask",
            json!({ "on": ["ask"], "filter": "'a' in subscriber.tags",
                "actions": [{ "emit": { "type": "yes" } }] }),
        ),
    ] {
        assert_eq!(put(client, "b", id, &rule).await.code, 201);
    }
}

fn of_u(id: &str, kind: &str) -> Value {
    event("b", "u", id, kind, json!({}))
}

#[tokio::test]
async fn two_processes_in_turn_each_decide_by_what_the_other_wrote() {
    let stores = Stores::start(Persistence::Always);
    let first = Node::start(&stores, RULES).await;
    rules(&first.client()).await;
    publish(&stores, &[of_u("1", "go")]).await;
    settles(&stores, 2).await;
    first.served.sigstop();
    let second = Node::start(&stores, RULES).await;
    publish(&stores, &[of_u("2", "back")]).await;
    settles(&stores, 4).await;
    // The first process still knows the tag. By that it would emit an event, and its write fails.
    second.served.sigstop();
    first.served.sigcont();
    publish(&stores, &[of_u("3", "ask")]).await;
    settles(&stores, 5).await;
    assert_eq!(emitted(&stores, "yes").await.len(), 0);
    publish(&stores, &[of_u("4", "go")]).await;
    settles(&stores, 7).await;
    // The second process knows no tag. By that it would write nothing, and emit nothing.
    first.served.sigstop();
    second.served.sigcont();
    publish(&stores, &[of_u("5", "ask")]).await;
    settles(&stores, 9).await;
    assert_eq!(emitted(&stores, "yes").await.len(), 1);
    assert_eq!(profile(&second.client(), "b", "u").await["tags"], json!(["a"]));
    first.served.sigcont();
}

#[tokio::test]
async fn a_profile_that_is_replaced_over_http_between_two_events_counts_for_the_second() {
    let stores = Stores::start(Persistence::Always);
    let node = Node::start(&stores, RULES).await;
    let client = node.client();
    rules(&client).await;
    publish(&stores, &[of_u("1", "go"), of_u("2", "ask")]).await;
    settles(&stores, 4).await;
    let body = json!({ "tags": [], "fields": { "n": u64::MAX } }).to_string();
    let headers = [("content-type", "application/json")];
    let path = "/v1/bots/b/subscribers/u";
    assert_eq!(client.send("PUT", path, &headers, body.as_bytes()).await.code, 202);
    publish(&stores, &[of_u("3", "ask")]).await;
    settles(&stores, 5).await;
    assert_eq!(emitted(&stores, "yes").await.len(), 1);
    assert_eq!(profile(&client, "b", "u").await["tags"], json!([]));
}

#[tokio::test]
async fn a_profile_is_read_once_for_many_slices() {
    let stores = Stores::start(Persistence::Always);
    // A slice whose lease is lost on a busy machine reads the profile again.
    let lease_ttl = ("pipelines.automations.lease_ttl", "\"10s\"");
    let node = Node::start(&stores, &[RULES, &[lease_ttl]].concat()).await;
    rules(&node.client()).await;
    let second_read = node.mongo.intercept(on("find", SUBSCRIBERS), 2, Interception::Watch);
    let last_write = node.mongo.intercept(writes_to(SUBSCRIBERS), 6, Interception::Watch);
    for n in 1..=6 {
        publish(&stores, &[field("b", "u", &n.to_string(), "n", json!(n))]).await;
        settles(&stores, n).await;
    }
    assert!(last_write.has_caught(), "there were six slices");
    assert!(!second_read.has_caught(), "the profile was read again");
    let kept = profile(&node.client(), "b", "u").await;
    assert_eq!(kept["fields"], json!({ "n": 6 }));
}

#[tokio::test]
async fn a_profile_whose_write_has_no_answer_is_read_again() {
    let stores = Stores::start(Persistence::Always);
    let node = Node::start(&stores, RULES).await;
    rules(&node.client()).await;
    publish(&stores, &[tag("b", "u", "1", "x")]).await;
    settles(&stores, 1).await;
    let lost = node.mongo.intercept(writes_to(SUBSCRIBERS), 1, Interception::LoseReply);
    let read = node.mongo.intercept(on("find", SUBSCRIBERS), 1, Interception::Watch);
    let again = node.mongo.intercept(writes_to(SUBSCRIBERS), 1, Interception::Watch);
    publish(&stores, &[of_u("2", "go")]).await;
    eventually(LONG, "the profile is read", async || read.has_caught()).await;
    assert!(lost.has_caught());
    // A read does not tell whether a majority has the decision.
    eventually(LONG, "it is written again", async || again.has_caught()).await;
    publish(&stores, &[of_u("3", "ask")]).await;
    settles(&stores, 5).await;
    assert_eq!(emitted(&stores, "yes").await.len(), 1);
    assert_eq!(emitted(&stores, "tag.applied").await.len(), 1);
}

#[tokio::test]
async fn large_profiles_of_one_bot_push_none_of_another_out_of_memory() {
    tried(3, quiet_profile_beside_large_ones).await;
}

/// Asserts that the profile of a quiet bot is not read again after the large profiles of another one. False:
/// they took a minute, after which it is read again in any case.
async fn quiet_profile_beside_large_ones(is_last: bool) -> bool {
    // Together 40 MB. A process keeps 32 MiB of recent profiles.
    const LOUD: usize = 220;
    let stores = Stores::start(Persistence::Always);
    let node = Node::start(&stores, RULES).await;
    rules(&node.client()).await;
    let rule = json!({ "on": ["never"], "actions": [{ "emit": { "type": "no" } }] });
    assert_eq!(put(&node.client(), "loud", "r", &rule).await.code, 201);
    let started = Instant::now();
    publish(&stores, &[tag("b", "u", "1", "x")]).await;
    settles(&stores, 1).await;
    let text = "x".repeat(1_000);
    let fields: Map<String, Value> = (0..180).map(|n| (format!("f{n}"), json!(text))).collect();
    let large: Vec<Value> = (0..LOUD)
        .map(|n| {
            let data = json!({ "fields": fields });
            event("loud", &format!("u{n}"), &format!("loud-{n}"), "subscriber.updated", data)
        })
        .collect();
    for some in large.chunks(20) {
        publish(&stores, some).await;
    }
    settles(&stores, 1 + LOUD).await;
    let read = node.mongo.intercept(on("find", SUBSCRIBERS), 1, Interception::Watch);
    publish(&stores, &[tag("b", "u", "2", "y")]).await;
    settles(&stores, 2 + LOUD).await;
    let (was_read_again, took) = (read.has_caught(), started.elapsed());
    assert_eq!(profile(&node.client(), "b", "u").await["tags"], json!(["x", "y"]));
    judged(!is_last && took >= Duration::from_secs(60), || {
        assert!(!was_read_again, "the profile of the quiet bot was read again, after {took:?}");
    })
}
