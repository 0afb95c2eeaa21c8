//! `POST /v1/events`: accepted events are on the bus, all or none.

use std::time::Duration;

use fairlane::app::Roles;
use redis::aio::MultiplexedConnection;
use serde_json::{Value, json};

use crate::support::automation_rig::Rig;
use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::http::{Client, get, metric};
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(20);
const STRUCTURED: &str = "application/cloudevents+json";
const BATCH: &str = "application/cloudevents-batch+json";

/// Serves HTTP only, so that events on the bus stay there.
const DOOR: Roles = Roles { ingest: false, work: false, http: true, schedule: false };

async fn door(server: &RedisServer) -> (Instance, Client) {
    let config = config(server, "test", &[]);
    let instance = Instance::start_as(DOOR, &config, Log::default().content()).await;
    let client = instance.client();
    (instance, client)
}

/// The events on the bus.
async fn on_the_bus(connection: &mut MultiplexedConnection) -> Vec<Value> {
    type Entry = (String, Vec<(String, String)>);
    let mut command = redis::cmd("XRANGE");
    command.arg(STREAM).arg("-").arg("+");
    let entries: Vec<Entry> = command.query_async(connection).await.unwrap();
    let mut events = Vec::new();
    for (_, fields) in entries {
        let [(field, text)] = fields.as_slice() else { panic!("one field an entry: {fields:?}") };
        assert_eq!(field, "event");
        events.push(serde_json::from_str(text).unwrap());
    }
    events
}

#[tokio::test]
async fn an_event_is_on_the_bus_once_it_is_accepted_however_it_is_written() {
    let server = RedisServer::start(Options::default());
    let (instance, client) = door(&server).await;
    let mut connection = server.connection().await;
    let (one, two) = (event("b", "t", 1), event("b", "t", 2));
    let batch = format!("[{one}, {two}]");
    let mut expected = Vec::new();
    for (kind, body, ids) in [
        (STRUCTURED, &one, &["1"][..]),
        ("Application/CloudEvents+JSON; charset=UTF-8", &one, &["1"]),
        (BATCH, &batch, &["1", "2"]),
        (BATCH, &"[]".to_owned(), &[]),
        ("application/json", &two, &["2"]),
        ("application/json", &batch, &["1", "2"]),
    ] {
        let answer = client.publish(kind, body).await;
        assert_eq!((answer.code, answer.json()), (202, json!({"accepted": ids.len()})), "{kind}");
        expected.extend_from_slice(ids);
        let events = on_the_bus(&mut connection).await;
        let found: Vec<_> = events.iter().map(|event| event["id"].as_str().unwrap()).collect();
        assert_eq!(found, expected, "{kind}");
    }

    let attributes = [
        ("content-type", "text/plain"),
        ("ce-specversion", "1.0"),
        ("ce-id", "3"),
        ("ce-source", "/s"),
        ("ce-type", "t"),
        ("ce-botid", "b%C3%A4r"),
    ];
    let answer = client.send("POST", "/v1/events", &attributes, b"hello").await;
    assert_eq!((answer.code, answer.json()), (202, json!({"accepted": 1})));
    let last = on_the_bus(&mut connection).await.pop().unwrap();
    let expected = json!({
        "specversion": "1.0", "id": "3", "source": "/s", "type": "t", "botid": "bär",
        "datacontenttype": "text/plain", "data": "hello",
    });
    assert_eq!(last, expected);
    instance.stop().await;
}

#[tokio::test]
async fn one_bad_event_keeps_the_whole_batch_out_and_each_bad_one_is_named() {
    let server = RedisServer::start(Options::default());
    let (instance, client) = door(&server).await;
    let body = format!(r#"[{}, {{"id": 7}}, {}, 5]"#, event("b", "t", 1), event("", "t", 2));
    let answer = client.publish(BATCH, body).await;
    assert_eq!((answer.code, answer.problem().as_str()), (400, "invalid-events"));
    let errors = answer.json()["errors"].clone();
    let named = |at: usize| (errors[at]["index"].clone(), errors[at]["field"].clone());
    assert_eq!(named(0), (json!(1), json!("id")), "{errors}");
    assert_eq!(named(1), (json!(2), json!("botid")), "{errors}");
    assert_eq!(named(2), (json!(3), Value::Null), "{errors}");
    assert_eq!(errors.as_array().unwrap().len(), 3);
    assert!(on_the_bus(&mut server.connection().await).await.is_empty());

    let many = format!("[{}]", vec![event("b", "t", 1); 1_001].join(","));
    let answer = client.publish(BATCH, many).await;
    assert_eq!((answer.code, answer.problem().as_str()), (413, "body-too-large"));
    assert!(on_the_bus(&mut server.connection().await).await.is_empty());
    let most = format!("[{}]", vec![event("b", "t", 1); 1_000].join(","));
    assert_eq!(client.publish(BATCH, most).await.json(), json!({"accepted": 1_000}));
    assert_eq!(on_the_bus(&mut server.connection().await).await.len(), 1_000);
    instance.stop().await;
}

#[tokio::test]
async fn a_full_redis_stores_nothing_and_says_when_to_come_again() {
    let server = RedisServer::start(Options::default());
    let (instance, client) = door(&server).await;
    let mut connection = server.connection().await;
    let maxmemory = async |connection: &mut MultiplexedConnection, bytes: u64| {
        let mut command = redis::cmd("CONFIG");
        command.arg("SET").arg("maxmemory").arg(bytes);
        let () = command.query_async(connection).await.unwrap();
    };
    maxmemory(&mut connection, 1).await;
    let answer = client.publish(STRUCTURED, event("b", "t", 1)).await;
    assert_eq!((answer.code, answer.problem().as_str()), (503, "full"));
    assert!(answer.header("retry-after").unwrap().parse::<u32>().unwrap() > 0);
    maxmemory(&mut connection, 0).await;
    assert!(on_the_bus(&mut connection).await.is_empty());
    assert_eq!(client.publish(STRUCTURED, event("b", "t", 1)).await.code, 202);
    instance.stop().await;
}

#[tokio::test]
async fn while_redis_is_unavailable_nothing_is_accepted_and_afterwards_everything() {
    let mut server = RedisServer::start(Options::default());
    let (instance, client) = door(&server).await;
    assert_eq!(client.publish(STRUCTURED, event("b", "t", 1)).await.code, 202);
    server.kill9();
    for _ in 0..2 {
        let answer = client.publish(STRUCTURED, event("b", "t", 2)).await;
        assert_eq!((answer.code, answer.problem().as_str()), (503, "unavailable"));
        assert!(answer.header("retry-after").is_some());
    }
    server.restart();
    assert_eq!(client.publish(STRUCTURED, event("b", "t", 3)).await.code, 202);
    // A frozen Redis gives no answer, so it is unknown whether it has the event.
    server.sigstop();
    let answer = client.publish(STRUCTURED, event("b", "t", 4)).await;
    server.sigcont();
    assert_eq!((answer.code, answer.problem().as_str()), (503, "unavailable"));
    assert!(answer.json()["detail"].as_str().unwrap().contains("unknown"), "{answer:?}");
    instance.stop().await;
}

#[tokio::test]
async fn an_event_from_http_is_handled_like_any_other() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let config = config(&server, "from-http", &[]);
    let instance = Instance::start(&config, log.content()).await;
    let events: Vec<_> = (0..50).map(|id| event("b", "t", id)).collect();
    let answer = instance.client().publish(BATCH, format!("[{}]", events.join(","))).await;
    assert_eq!(answer.code, 202);
    eventually(LONG, "all are handled", async || log.len() >= 50).await;
    let ids: Vec<_> = (0..50).map(|id| id.to_string()).collect();
    assert_eq!(log.ids("from-http"), ids);
    instance.stop().await;
}

#[tokio::test]
async fn a_client_that_asks_for_it_gets_the_ids_and_the_places_on_the_bus() {
    let server = RedisServer::start(Options::default());
    let (instance, client) = door(&server).await;
    let batch = format!("[{}, {}]", event("b", "t", 1), event("b", "t", 2));
    let headers = [("content-type", BATCH), ("prefer", "wait=5, return=representation")];
    let answer = client.send("POST", "/v1/events", &headers, batch.as_bytes()).await;
    assert_eq!(answer.code, 202, "{answer:?}");
    assert_eq!(answer.header("preference-applied"), Some("return=representation"));
    let entries: Vec<(String, Value)> = redis::cmd("XRANGE")
        .arg(&[STREAM, "-", "+"])
        .query_async::<Vec<(String, Vec<(String, String)>)>>(&mut server.connection().await)
        .await
        .unwrap()
        .into_iter()
        .map(|(offset, fields)| (offset, serde_json::from_str(&fields[0].1).unwrap()))
        .collect();
    let expected: Vec<_> = entries
        .iter()
        .map(|(offset, event)| json!({ "id": event["id"], "offset": offset }))
        .collect();
    assert_eq!(answer.json(), json!({ "accepted": 2, "events": expected }));
    let answer = client.publish(BATCH, &batch).await;
    assert_eq!(
        (answer.json(), answer.header("preference-applied")),
        (json!({"accepted": 2}), None)
    );
    instance.stop().await;
}

#[tokio::test]
async fn a_type_that_no_pipeline_takes_is_named_counted_and_logged_once() {
    let server = RedisServer::start(Options::default());
    let settings = [
        ("pipelines.test.handler", "\"log\""),
        ("pipelines.test.events", "[\"tag.*\"]"),
        ("pipelines.test.filter", "'event.id != \"9\"'"),
    ];
    let process = Served::start(&config(&server, "test", &settings)).await;
    let client = Client::new(&process.http());
    let batch = [
        event("a", "tga.applied", 1),
        event("b", "tag.applied", 2),
        event("b", "tga.applied", 3),
        event("b", "order.piad", 4),
    ];
    let answer = client.publish(BATCH, format!("[{}]", batch.join(","))).await;
    let expected = json!({ "accepted": 4, "unmatched": ["order.piad", "tga.applied"] });
    assert_eq!((answer.code, answer.json()), (202, expected));
    // The event is accepted, although the filter does not match it.
    let answer = client.publish(STRUCTURED, event("a", "tag.applied", 9)).await;
    assert_eq!((answer.code, answer.json()), (202, json!({ "accepted": 1 })));
    // These events arrive directly on the bus.
    add(&server, STREAM, &[event("c", "tga.applied", 5), event("c", "tag.removed", 6)]).await;
    let counted = async |kind| {
        let (_, text) = get(&process.metrics(), "/metrics").await;
        metric(&text, "fairlane_unmatched_total", &[("type", kind)])
    };
    eventually(LONG, "it is counted", async || counted("tga.applied").await == Some(3.0)).await;
    assert_eq!(counted("order.piad").await, Some(1.0));
    assert_eq!((counted("other").await, counted("tag.applied").await), (Some(0.0), None));
    let log = process.log();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("that no pipeline")).collect();
    assert!(lines.len() == 2 && lines.iter().all(|line| line.contains("WARN")), "{lines:?}");
    for kind in ["tga.applied", "order.piad"] {
        assert_eq!(lines.iter().filter(|line| line.contains(kind)).count(), 1, "{lines:?}");
    }

    // A process with the role `http` only knows the pipelines too.
    let front = Served::start_as(&config(&server, "test", &settings), "http").await;
    let answer = Client::new(&front.http()).publish(STRUCTURED, event("a", "tga.applied", 7)).await;
    assert_eq!(answer.json(), json!({ "accepted": 1, "unmatched": ["tga.applied"] }));
}

#[tokio::test]
async fn a_type_is_taken_where_the_bot_has_a_rule_for_it() {
    let rig = Rig::start(&[]).await;
    let rule = json!({ "on": ["cart.abandoned"], "actions": [{ "set_tag": { "tag": "left" } }] });
    rig.put("shop-1", "left", &rule).await;
    let unmatched = async |bot| {
        let answer = rig.client.publish(STRUCTURED, event(bot, "cart.abandoned", 1)).await;
        assert_eq!(answer.code, 202, "{answer:?}");
        answer.json().get("unmatched").is_some()
    };
    eventually(LONG, "the rule is known", async || !unmatched("shop-1").await).await;
    eventually(LONG, "no doubt is left", async || unmatched("shop-2").await).await;
    assert!(!unmatched("shop-1").await);
}
