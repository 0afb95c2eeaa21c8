//! Reads of rules and profiles while MongoDB hangs: a read gets 503 soon, and a change of a rule
//! waits.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::automation_rig::{LONG, Rig, put, tag};
use crate::support::http::{Client, Response};
use crate::support::wait::{Stopwatch, eventually};

/// Time for a read whose timeout is a quarter of a second, on a busy machine. Without that timeout,
/// readers waited for 5 s.
const SOON: Duration = Duration::from_millis(1_500);
const RULE: &str = "/v1/bots/shop/automations/r";
const TRY: &str = "/v1/bots/shop/automations/test";
const READS: [&str; 4] = ["/v1/bots/shop/automations", RULE, "/v1/bots/shop/subscribers/u", TRY];
const JSON: (&str, &str) = ("content-type", "application/json");

async fn read(client: &Client, path: &str) -> Response {
    if path != TRY {
        return client.get(path).await;
    }
    let trial =
        json!({ "event": { "type": "tag.applied", "subject": "u", "data": { "tag": "b" } } });
    client.send("POST", path, &[JSON], trial.to_string().as_bytes()).await
}

/// Waits until every read is answered with 200.
async fn reads_are_answered(client: &Client) {
    for path in READS {
        eventually(LONG, path, async || read(client, path).await.code == 200).await;
    }
}

#[tokio::test]
async fn while_mongodb_hangs_readers_of_rules_and_profiles_are_503_soon_and_writers_wait() {
    let rig = Rig::start(&[("counters.read_timeout", "\"250ms\"")]).await;
    let client = &rig.client;
    let rule = json!({ "on": ["tag.applied"], "actions": [{ "set_field": { "field": "f", "value": 1 } }] });
    rig.put("shop", "r", &rule).await;
    rig.publish(&[tag("shop", "u", "1", "a")]).await;
    reads_are_answered(client).await;

    rig.stores.mongo.sigstop();
    for _ in 0..5 {
        for path in READS {
            let watch = Stopwatch::start();
            let answer = read(client, path).await;
            watch.within(SOON, &format!("{path}, {answer:?}"));
            assert_eq!((answer.code, answer.problem().as_str()), (503, "mongodb-away"), "{path}");
            assert_eq!(answer.header("retry-after"), Some("1"), "{path}");
        }
    }
    // The page of the bot reports it too.
    let watch = Stopwatch::start();
    let page = client.get("/bots/shop").await;
    watch.within(SOON, "the page of the bot");
    let page = String::from_utf8(page.body).unwrap();
    assert!(page.contains("MongoDB does not answer in time"), "{page}");
    // A change waits longer for MongoDB than a read does.
    let started = Instant::now();
    let written = client.send("PUT", RULE, &[JSON], rule.to_string().as_bytes()).await;
    let took = started.elapsed();
    assert_eq!((written.code, written.problem().as_str()), (503, "mongodb-away"));
    assert!(took > SOON, "{took:?}");

    rig.stores.mongo.sigcont();
    reads_are_answered(client).await;
    assert!(matches!(put(client, "shop", "r", &rule).await.code, 200 | 201));
    rig.instance.stop().await;
}

#[tokio::test]
async fn while_mongodb_hangs_the_page_of_a_bot_is_shown_and_a_typed_rule_stays_in_its_form() {
    let rig = Rig::start(&[("counters.read_timeout", "\"250ms\"")]).await;
    let client = &rig.client;
    rig.stores.mongo.sigstop();
    let page = client.get("/bots/shop?subscriber=u").await;
    let text = String::from_utf8_lossy(&page.body);
    assert!(page.code == 200 && text.contains("MongoDB does not answer in time"), "{page:?}");

    let form = [("content-type", "application/x-www-form-urlencoded")];
    let rule = r#"{"on":["typed.by.hand"],"actions":[{"set_tag":{"tag":"t"}}]}"#;
    let event = r#"{"type":"typed.too","subject":"u"}"#;
    for deed in ["save", "test"] {
        let body = format!("deed={deed}&id=r&rule={rule}&event={event}");
        let answer = client.send("POST", "/bots/shop/rule", &form, body.as_bytes()).await;
        let text = String::from_utf8_lossy(&answer.body);
        assert_eq!((answer.code, answer.header("retry-after")), (503, Some("1")), "{deed}: {text}");
        for kept in ["typed.by.hand", "typed.too", "value=\"r\"", "MongoDB"] {
            assert!(text.contains(kept), "{deed}: {kept} is missing in {text}");
        }
    }
    rig.stores.mongo.sigcont();
    rig.instance.stop().await;
}
