//! A replay into the pipeline of the rules.

use serde_json::json;

use crate::support::automation_rig::{LONG, Rig, event};
use crate::support::receiver::Receiver;
use crate::support::wait::eventually;

#[tokio::test]
async fn a_replay_over_http_puts_only_events_that_a_rule_of_the_bot_names() {
    let rig = Rig::start(&[]).await;
    let rule = json!({ "on": ["order.paid"], "actions": [{ "emit": { "type": "rule.fired" } }] });
    rig.put("shop", "greet", &rule).await;
    let of = |bot: &str, id: &str, kind: &str| event(bot, "ann", id, kind, json!({}));
    rig.publish(&[
        of("shop", "1", "order.paid"),
        of("shop", "2", "order.sent"),
        of("other", "3", "order.paid"),
    ])
    .await;
    // And the event that the rule emitted.
    rig.settles(4).await;
    let path = "/v1/pipelines/automations/replay";
    let headers = [("content-type", "application/json")];
    let body = json!({ "from": "1h ago", "types": ["order.*"], "dry_run": true }).to_string();
    // Until the index of the rules is known to be complete, the fan-out copies in doubt too.
    eventually(LONG, "one event would be put", async || {
        let answer = rig.client.send("POST", path, &headers, body.as_bytes()).await;
        assert_eq!(answer.code, 200, "{answer:?}");
        let found = answer.json()["found"].clone();
        assert!(found["events"].as_u64().unwrap() >= 1, "{found}");
        found["events"] == 1 && found["top"] == json!([{ "bot": "shop", "events": 1 }])
    })
    .await;
    rig.instance.stop().await;
}

#[tokio::test]
async fn a_corrected_rule_acts_on_replayed_events_once_each() {
    let rig = Rig::start(&[]).await;
    let receiver = Receiver::content().await;
    let rule = |path: &str| {
        let url = format!("{}/{path}", receiver.url());
        json!({ "on": ["order.paid"], "actions": [{ "push": { "url": url } }] })
    };
    let called = |path: &str| {
        let path = format!("/{path}");
        receiver.calls().iter().filter(|call| call.line.contains(&path)).count()
    };
    rig.put("shop", "tell", &rule("wrong")).await;
    let events: Vec<_> = ["1", "2", "3"]
        .iter()
        .map(|id| event("shop", "ann", id, "order.paid", json!({})))
        .collect();
    rig.publish(&events).await;
    rig.settles(3).await;
    eventually(LONG, "the wrong URL is called", async || called("wrong") == 3).await;

    rig.put("shop", "tell", &rule("right")).await;
    let path = "/v1/pipelines/automations/replay";
    let headers = [("content-type", "application/json")];
    let first = json!({ "from": "1h ago", "types": ["order.*"], "id": "corrected" });
    // The second call continues the same replay.
    for (body, put) in [(first, 3), (json!({ "id": "corrected" }), 0)] {
        let body = body.to_string();
        let answer = rig.client.send("POST", path, &headers, body.as_bytes()).await;
        assert_eq!((answer.code, &answer.json()["put"]), (200, &json!(put)), "{answer:?}");
    }
    eventually(LONG, "the right URL is called", async || called("right") == 3).await;
    rig.settles(3).await;
    assert_eq!((called("wrong"), called("right")), (3, 3));
    eventually(LONG, "the statistics", async || rig.stats("shop", "tell").await["matched"] == 6)
        .await;
    rig.instance.stop().await;
}
