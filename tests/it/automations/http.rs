//! The routes of rules and profiles: refusals, answers, versions.

use fairlane::id::BotId;
use mongodb::bson::{DateTime, doc};
use serde_json::{Value, json};

use crate::support::automation_rig::{LONG, Rig, depth, event, profile, put, tag};
use crate::support::config::config;
use crate::support::http::Client;
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const RULE: &str = "/v1/bots/shop/automations/r";

fn rule() -> Value {
    json!({ "name": "", "on": ["x"], "actions": [{ "set_tag": { "tag": "t" } }], "enabled": true })
}

async fn send(
    client: &Client,
    method: &str,
    headers: &[(&str, &str)],
    body: &Value,
) -> (u16, String, String) {
    let text = if body.is_null() { String::new() } else { body.to_string() };
    let mut all = vec![("content-type", "application/json")];
    all.extend(headers);
    let answer = client.send(method, RULE, &all, text.as_bytes()).await;
    let etag = answer.header("etag").unwrap_or_default().to_owned();
    (answer.code, etag, String::from_utf8_lossy(&answer.body).into_owned())
}

#[tokio::test]
async fn a_rule_is_made_read_changed_and_deleted_by_its_version() {
    let rig = Rig::start(&[]).await;
    let client = &rig.client;
    let (code, first, body) = send(client, "PUT", &[("if-none-match", "*")], &rule()).await;
    assert_eq!((code, serde_json::from_str::<Value>(&body).unwrap()), (201, rule()));
    assert_eq!(send(client, "PUT", &[("if-none-match", "*")], &rule()).await.0, 412);
    let (code, second, _) = send(client, "PUT", &[("if-match", &first)], &rule()).await;
    assert_eq!(code, 200);
    assert_ne!(first, second);
    let (code, now, body) = send(client, "PUT", &[("if-match", &first)], &rule()).await;
    assert_eq!((code, &now), (412, &second), "{body}");
    assert!(body.contains("urn:fairlane:problem:rule-changed"), "{body}");
    // The rule is accepted in the form in which it was read.
    let (code, etag, body) = send(client, "GET", &[], &Value::Null).await;
    assert_eq!((code, &etag), (200, &second));
    let read: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((&read["id"], &read["stats"]["matched"]), (&json!("r"), &json!(0)));
    assert_eq!(send(client, "PUT", &[("if-match", &second)], &read).await.0, 200);
    assert_eq!(send(client, "DELETE", &[("if-match", &second)], &Value::Null).await.0, 412);
    assert_eq!(send(client, "DELETE", &[("if-match", "*")], &Value::Null).await.0, 204);
    for (method, headers) in [("GET", vec![]), ("DELETE", vec![])] {
        let (code, _, body) = send(client, method, &headers, &Value::Null).await;
        assert_eq!(code, 404, "{body}");
        assert!(body.contains("bot \\\"shop\\\" has no rule \\\"r\\\""), "{body}");
    }
    assert_eq!(send(client, "PUT", &[("if-match", "*")], &rule()).await.0, 412, "there is none");
    assert_eq!(send(client, "PUT", &[("if-none-match", "*")], &rule()).await.0, 201);
    let (code, _, body) = send(client, "PUT", &[("if-match", "unquoted")], &rule()).await;
    assert_eq!(code, 400, "{body}");
    // The OpenAPI document uses these schemas, and not others with similar names.
    let document = client.get("/openapi.json").await.json();
    for (path, method, code, name) in [
        ("/v1/bots/{bot}/automations/{rule}", "get", "200", "Automation"),
        ("/v1/bots/{bot}/automations", "get", "200", "Automations"),
        ("/v1/bots/{bot}/automations/test", "post", "200", "AutomationOutcome"),
        ("/v1/bots/{bot}/subscribers/{subscriber}", "get", "200", "Subscriber"),
        ("/v1/bots/{bot}/subscribers/{subscriber}", "put", "202", "QueuedProfile"),
    ] {
        let answer = &document["paths"][path][method]["responses"][code];
        let schema = &answer["content"]["application/json"]["schema"]["$ref"];
        assert_eq!(schema, &format!("#/components/schemas/{name}"), "{method} {path}");
        assert!(document["components"]["schemas"].get(name).is_some(), "{name}");
    }
    rig.instance.stop().await;
}

#[tokio::test]
async fn a_rule_that_cannot_be_kept_is_refused_by_its_field_line_and_column() {
    let rig = Rig::start(&[]).await;
    let with = |filter: String| json!({ "on": ["x"], "filter": filter, "actions": [{ "count": { "ad": "a" } }] });
    let deep = "(".repeat(500) + "true" + &")".repeat(500);
    for (body, field, part) in [
        (with("subscriber.age >\n> 3".to_owned()), "filter", "line 2, column 1"),
        (with("person.age > 3".to_owned()), "filter", "names \"person\" at line 1, column 1"),
        (with(format!("true{}", " ".repeat(10_240))), "filter", "10244 bytes; at most 4096"),
        (with(deep), "filter", "deeper than 32"),
        (with("!".repeat(500) + "true"), "filter", "deeper than 32"),
        (json!({ "on": [], "actions": [{ "count": { "ad": "a" } }] }), "on", "is empty"),
        (
            json!({ "on": ["x"], "actions": [{ "notify": { "url": "http://169.254.169.254/" } }] }),
            "actions[0].notify.url",
            "169.254.169.254",
        ),
    ] {
        let (code, _, answer) = send(&rig.client, "PUT", &[], &body).await;
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!((code, &answer["errors"][0]["field"]), (400, &json!(field)), "{answer}");
        let detail = answer["errors"][0]["detail"].as_str().unwrap();
        assert!(detail.contains(part), "{detail}");
    }
    for (body, part) in [
        (json!({ "on": ["x"], "actions": [{ "shout": {} }] }), "unknown variant `shout`"),
        (json!({ "on": ["x"], "actions": [], "when": 1 }), "unknown field `when`"),
        (
            json!({ "id": "other", "on": ["x"], "actions": [{ "count": { "ad": "a" } }] }),
            "the path says",
        ),
    ] {
        let (code, _, answer) = send(&rig.client, "PUT", &[], &body).await;
        assert_eq!(code, 400);
        assert!(answer.contains(part), "{answer}");
    }
    let bad = rig.client.get("/v1/bots/shop/automations/a%20b").await;
    assert_eq!(bad.code, 400, "{}", bad.problem());
    assert_eq!(
        rig.client.get("/v1/bots/shop/automations").await.json(),
        json!({ "automations": [] })
    );
    rig.instance.stop().await;
}

#[tokio::test]
async fn rules_are_tried_on_an_event_without_doing_anything() {
    let rig = Rig::start(&[]).await;
    let rule = json!({ "on": ["tag.applied"], "filter": "event.data.tag == 'vip' && subscriber.age > 30",
        "actions": [{ "set_tag": { "tag": "old" } }, { "emit": { "type": "y", "delay": "10m" } }] });
    rig.put("shop", "r", &rule).await;
    let test = async |body: Value| {
        let headers = [("content-type", "application/json")];
        let path = "/v1/bots/shop/automations/test";
        rig.client.send("POST", path, &headers, body.to_string().as_bytes()).await
    };
    let sample = json!({ "type": "tag.applied", "subject": "u", "data": { "tag": "vip" } });
    let answer =
        test(json!({ "event": sample, "subscriber": { "fields": { "age": 31 } } })).await.json();
    assert_eq!(answer["matched"], json!([{ "rule": "r", "actions": ["set_tag", "emit"] }]));
    assert_eq!(
        answer["effects"][1],
        json!({ "rule": "r", "action": 1, "emit": { "type": "y", "data": null, "delay": 600 } })
    );
    assert_eq!(answer["subscriber"], json!({ "tags": ["old", "vip"], "fields": { "age": 31 } }));
    let unknown = test(json!({ "event": sample })).await.json();
    assert!(
        unknown["errors"][0]["reason"].as_str().unwrap().contains("cannot be evaluated"),
        "{unknown}"
    );
    let other = json!({ "on": ["*"], "actions": [{ "count": { "ad": "a" } }] });
    let one = test(json!({ "event": { "type": "z" }, "rule": other })).await.json();
    assert_eq!(one["matched"][0]["rule"], "rule");
    for (body, part) in [
        (json!({ "event": {} }), "type"),
        (json!({ "event": { "type": "x", "botid": "other" } }), "botid"),
        (
            json!({ "event": sample, "rule": { "on": ["x"], "filter": "1 +", "actions": [{ "count": { "ad": "a" } }] } }),
            "rule.filter",
        ),
        (json!({ "event": sample, "subscriber": { "tags": ["a b"] } }), "subscriber.tags"),
    ] {
        let answer = test(body).await;
        assert_eq!(answer.code, 400);
        assert!(answer.json()["detail"].as_str().unwrap().contains(part), "{}", answer.json());
    }
    assert_eq!(profile(&rig.client, "shop", "u").await, Value::Null);
    assert_eq!(depth(&rig.stores).await, 0);
    rig.instance.stop().await;
}

#[tokio::test]
async fn a_profile_out_of_bounds_is_refused_by_its_field() {
    let rig = Rig::start(&[]).await;
    for (body, part) in [
        (json!({ "tags": ["a b"] }), "tags"),
        (json!({ "fields": { "tags": 1 } }), "fields.tags"),
        (json!({ "fields": { "a": "x".repeat(5_000) } }), "fields.a"),
        (json!({ "name": 1 }), "unknown field `name`"),
    ] {
        let headers = [("content-type", "application/json")];
        let path = "/v1/bots/shop/subscribers/u";
        let answer = rig.client.send("PUT", path, &headers, body.to_string().as_bytes()).await;
        assert_eq!(answer.code, 400);
        assert!(answer.json()["detail"].as_str().unwrap().contains(part), "{}", answer.json());
    }
    rig.instance.stop().await;
}

#[tokio::test]
async fn a_profile_for_which_the_queue_has_no_room_is_refused_and_becomes_no_dead_letter() {
    let max = ("pipelines.automations.max_queue", "1");
    let rig = Rig::start(&[max, ("pipelines.automations.on_overflow", "\"dead\"")]).await;
    let queue = rig.instance.queue("automations");
    queue.pause(Some(&BotId::parse("shop").unwrap())).await.unwrap();
    let headers = [("content-type", "application/json")];
    let put = async |tag: &str| {
        let body = json!({ "tags": [tag] }).to_string();
        rig.client.send("PUT", "/v1/bots/shop/subscribers/u", &headers, body.as_bytes()).await
    };
    assert_eq!(put("first").await.code, 202);
    let refused = put("second").await;
    assert_eq!(refused.problem(), "full", "{refused:?}");
    let detail = refused.json()["detail"].to_string();
    assert!(detail.contains("nothing was changed"), "{detail}");
    assert_eq!(depth(&rig.stores).await, 1);
    assert!(queue.dead_letters(None, 1).await.unwrap().is_empty());
    rig.instance.stop().await;
}

#[tokio::test]
async fn a_deleted_profile_is_not_found_and_a_day_later_its_document_is_deleted() {
    const SUBSCRIBERS: &str = "subscribers";
    let rig = Rig::start(&[]).await;
    rig.put("shop", "r", &rule()).await;
    let set = async |subscriber: &str, body: Value| {
        let path = format!("/v1/bots/shop/subscribers/{subscriber}");
        let headers = [("content-type", "application/json")];
        rig.client.send("PUT", &path, &headers, body.to_string().as_bytes()).await
    };
    let becomes = async |subscriber: &str, expected: Value| {
        eventually(LONG, &format!("{subscriber} is {expected}"), async || {
            profile(&rig.client, "shop", subscriber).await == expected
        })
        .await;
    };
    let tagged = |tag: &str| json!({ "tags": [tag], "fields": {} });
    for subscriber in ["ann", "bob", "eve"] {
        assert_eq!(set(subscriber, tagged("a")).await.code, 202);
        becomes(subscriber, tagged("a")).await;
    }
    let deleted =
        |subscriber: &str, id: &str| event("shop", subscriber, id, "subscriber.deleted", json!({}));
    rig.publish(&[deleted("ann", "1"), deleted("eve", "2")]).await;
    // An empty profile is none.
    assert_eq!(set("bob", json!({})).await.code, 202);
    for subscriber in ["ann", "bob", "eve"] {
        becomes(subscriber, Value::Null).await;
    }
    rig.publish(&[tag("shop", "bob", "3", "b")]).await;
    becomes("bob", tagged("b")).await;

    // As if all that happened two days ago, and as if an earlier version had written the tag.
    eventually(LONG, "the index is there", async || {
        rig.stores.indexes(SUBSCRIBERS).await.contains(&"gone".to_owned())
    })
    .await;
    let count = async |id: &str| rig.stores.count(SUBSCRIBERS, doc! { "id": id }).await;
    let before = DateTime::from_millis(DateTime::now().timestamp_millis() - 2 * 24 * 3_600_000);
    let dated = doc! { "gone": { "$type": "date" } };
    assert_eq!(rig.stores.count(SUBSCRIBERS, dated).await, 2, "those of ann and eve");
    for subscriber in ["ann", "bob"] {
        let update = doc! { "$set": { "gone": before } };
        rig.stores.tamper(SUBSCRIBERS, doc! { "id": subscriber }, update).await;
    }
    rig.stores.expire().await;
    assert_eq!((count("ann").await, count("bob").await, count("eve").await), (0, 1, 1));
    rig.publish(&[tag("shop", "ann", "4", "c"), tag("shop", "bob", "5", "c")]).await;
    becomes("ann", tagged("c")).await;
    becomes("bob", json!({ "tags": ["b", "c"], "fields": {} })).await;
    rig.instance.stop().await;
}

#[tokio::test]
async fn where_no_rules_are_evaluated_the_routes_say_so() {
    let redis = RedisServer::start(Options::default());
    let instance = Instance::start(&config(&redis, "test", &[]), Log::default().content()).await;
    let client = instance.client();
    for path in ["/v1/bots/shop/automations", "/v1/bots/shop/subscribers/u", RULE] {
        let answer = client.get(path).await;
        assert_eq!(answer.code, 404);
        assert_eq!(answer.problem(), "no-automations");
        let detail = answer.json()["detail"].to_string();
        assert!(detail.contains("pipelines.automations.enabled is false"), "{detail}");
    }
    instance.stop().await;
}

#[tokio::test]
async fn while_mongodb_is_unavailable_rules_stay_and_the_answer_says_when_to_retry() {
    let mut rig = Rig::start(&[]).await;
    rig.put("shop", "r", &rule()).await;
    rig.publish(&[tag("shop", "u", "1", "a"), event("shop", "u", "2", "x", json!({}))]).await;
    eventually(LONG, "both are handled", async || {
        profile(&rig.client, "shop", "u").await["tags"] == json!(["a", "t"])
    })
    .await;
    rig.stores.mongo.kill9();
    for (method, body) in [("GET", Value::Null), ("PUT", rule())] {
        let (code, _, body) = send(&rig.client, method, &[], &body).await;
        assert_eq!(code, 503, "{body}");
        assert!(body.contains("mongodb-away"), "{body}");
    }
    let answer = put(&rig.client, "shop", "r", &json!({ "on": [] })).await;
    assert_eq!(answer.code, 400, "what is wrong is wrong without it: {}", answer.problem());
    rig.instance.stop().await;
}

#[tokio::test]
async fn the_page_of_a_bot_shows_its_rules_with_their_history_and_a_subscriber() {
    let rig = Rig::start(&[]).await;
    let hostile = json!({ "name": "<img src=x onerror=alert(1)>", "on": ["x"],
        "filter": "event.data.n > 1 || event.type == '<script>'", "actions": [{ "set_tag": { "tag": "seen" } }] });
    rig.put("a%2Fb", "r", &hostile).await;
    rig.publish(&[
        event("a/b", "u", "1", "x", json!({ "n": 2 })),
        event("a/b", "u", "2", "x", json!({ "n": "<b>" })),
    ])
    .await;
    let page = async |path: &str| {
        let answer = rig.client.get(path).await;
        assert_eq!(answer.code, 200, "{}", answer.problem());
        String::from_utf8(answer.body).unwrap()
    };
    let mut shown = String::new();
    eventually(LONG, "the statistics are shown", async || {
        shown = page("/bots/a%2Fb?subscriber=u").await;
        shown.contains("cannot be evaluated") && shown.contains("<code>seen</code>")
    })
    .await;
    assert!(
        !shown.contains("<img") && !shown.contains("<script>") && !shown.contains("<b>"),
        "{shown}"
    );
    assert!(
        shown.contains("&lt;img src=x onerror=alert(1)&gt;") && shown.contains("set_tag tag=seen"),
        "{shown}"
    );
    let asked = rig.client.get("/bots?bot=a%2Fb").await;
    assert_eq!((asked.code, asked.header("location")), (303, Some("/bots/a%2Fb")));
    assert!(page("/bots").await.contains("name=\"bot\""));
    assert!(page("/bots/nobody").await.contains("PUT /v1/bots/BOT/automations/RULE"));
    rig.instance.stop().await;
}
