//! No bot can fill MongoDB with profiles.

use serde_json::json;

use crate::support::automation_rig::{LONG, Rig, profile, tag};
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
    eventually(LONG, "another bot has its own quota", async || {
        profile(&rig.client, "quiet", "u3").await["tags"] == json!(["a"])
    })
    .await;
    assert_eq!(profile(&rig.client, "full", "u2").await["tags"], json!(["a"]));
    let refused = rig.client.get("/v1/bots/full/subscribers/u3").await;
    assert_eq!(refused.code, 404, "{refused:?}");
    let letters = rig.client.get("/v1/pipelines/automations/dead?bot=full").await.json();
    let [letter] = &letters["dead_letters"].as_array().unwrap()[..] else { panic!("{letters}") };
    let reason = letter["reason"].as_str().unwrap();
    assert!(reason.contains("holds 2") && reason.contains("quotas.profiles is now 2"), "{letter}");
    rig.instance.stop().await;
}
