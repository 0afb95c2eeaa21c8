//! No bot can fill the stores with profiles, or with statistics of its rules.

use serde_json::{Value, json};

use crate::support::automation_rig::{
    LONG, RULES, Rig, event, profile, publish, put, settles, tag,
};
use crate::support::counter_fleet::{Node, Stores};
use crate::support::interceptor::Interception;
use crate::support::mongo_proxy::on;
use crate::support::redis::Persistence;
use crate::support::wait::eventually;

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
