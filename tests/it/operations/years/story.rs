//! What happens before a sample is taken. A later version may lengthen the story: older samples hold
//! the shorter one, so a check of a new part looks whether the sample has it.
//!
//! 1. A process with all roles handles events, counts views, evaluates a rule and calls a URL. Two
//!    handlers never answer, one answers 202, others fail. Then the process is killed.
//! 2. A process that only takes in queues events, views and notifications. Then it is killed.
//! 3. One more event waits on the bus.

use std::fs;
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::event::Event;
use fairlane::id::BotId;
use fairlane::queue::PushOptions;
use redis::aio::MultiplexedConnection;
use serde_json::{Value, json};

use super::{present, text};
use crate::support::automation_rig::LONG;
use crate::support::bus::add;
use crate::support::config::{STREAM, configs};
use crate::support::counter_fleet::Stores;
use crate::support::http::{Client, Response};
use crate::support::instance::queue;
use crate::support::receiver::{Call, Receiver, Reply};
use crate::support::redis::Persistence;
use crate::support::served::Served;
use crate::support::wait::eventually;

/// Stands for the address of the receiver. It is as long, because lengths are stored too.
const RECEIVER: &str = "receiver.test:1";
const JSON: (&str, &str) = ("content-type", "application/json");
/// A delay of events, notifications and retries.
const HOUR: Duration = Duration::from_secs(3_600);

/// The configuration of every process. `backoff` is the pause after a failure.
pub(super) fn config(stores: &Stores, receiver: &Receiver, backoff: &str) -> String {
    let url = |name: &str| format!("\"http://{}/{name}\"", receiver.address);
    let (orders, letters, lanes) = (url("orders"), url("letters"), url("lanes"));
    let (redis, mongo) = (format!("{:?}", stores.redis.url()), format!("{:?}", stores.mongo.url()));
    let backoff = format!("{{ initial = \"{backoff}\", max = \"{backoff}\", jitter = 0.0 }}");
    let settings: Vec<(&str, &str)> = vec![
        ("redis.url", &redis),
        ("redis.shards", "2"),
        ("mongodb.url", &mongo),
        ("bus.dedup", "\"1h\""),
        ("callbacks.allow_nets", "[\"127.0.0.1\"]"),
        ("pipelines.automations.enabled", "true"),
        ("pipelines.automations.start", "\"earliest\""),
        ("pipelines.counters.start", "\"earliest\""),
        ("pipelines.notifications.enabled", "true"),
        ("pipelines.orders.handler", "\"push\""),
        ("pipelines.orders.events", "[\"order.*\"]"),
        ("pipelines.orders.start", "\"earliest\""),
        ("pipelines.orders.url", &orders),
        ("pipelines.orders.handler_timeout", "\"10s\""),
        ("pipelines.orders.backoff", &backoff),
        ("pipelines.orders.total_concurrency", "100"),
        ("pipelines.letters.handler", "\"push\""),
        ("pipelines.letters.events", "[\"letter.*\"]"),
        ("pipelines.letters.start", "\"earliest\""),
        ("pipelines.letters.url", &letters),
        ("pipelines.letters.handler_timeout", "\"10s\""),
        ("pipelines.letters.max_attempts", "1"),
        ("pipelines.lanes.handler", "\"push\""),
        ("pipelines.lanes.events", "[\"lane.*\"]"),
        ("pipelines.lanes.start", "\"earliest\""),
        ("pipelines.lanes.url", &lanes),
        ("pipelines.lanes.handler_timeout", "\"10s\""),
        ("pipelines.lanes.order_by", "\"subject\""),
        ("pipelines.lanes.backoff", &backoff),
    ];
    configs(&stores.redis, &[], &settings)
}

/// A text of a sample with the address of this receiver.
pub(super) fn received_by(receiver: &Receiver, text: &str) -> String {
    text.replace(RECEIVER, &receiver.address.to_string())
}

pub(super) fn event(bot: &str, kind: &str, id: &str, subject: &str) -> String {
    json!({ "specversion": "1.0", "id": id, "source": "sample", "type": kind, "botid": bot,
        "subject": subject, "data": { "price": 12 } })
    .to_string()
}

fn orders(bot: &str, ids: &[&str]) -> Vec<String> {
    ids.iter().map(|id| event(bot, "order.paid", id, "ann")).collect()
}

pub(super) async fn send(client: &Client, method: &str, path: &str, body: &Value) -> Response {
    let mut answer = Response::default();
    // 503 says to come again: on a busy machine MongoDB may not answer in time.
    eventually(LONG, "the request is answered", async || {
        answer = client.send(method, path, &[JSON], body.to_string().as_bytes()).await;
        answer.code != 503
    })
    .await;
    assert!(matches!(answer.code, 200..=204), "{method} {path}: {answer:?}");
    answer
}

/// A receiver whose answers leave something behind in each way.
async fn receiver() -> Receiver {
    Receiver::start(|call: Call| async move {
        let path = call.line.split(' ').nth(1).unwrap().to_owned();
        let json: Value = serde_json::from_slice(&call.body).unwrap_or_default();
        let bot = json["bot"].as_str().unwrap_or_default();
        let subject = json["events"][0]["subject"].as_str().unwrap_or_default();
        match (path.as_str(), bot, subject) {
            ("/orders", "held", _) => std::future::pending().await,
            ("/orders", "taken", _) => Reply::new(202, ""),
            ("/orders", "resting", _) => Reply::new(200, r#"{"ack":1,"retry_after":3600}"#),
            ("/orders", "failing", _) | ("/letters", ..) | ("/lanes", _, "bad") => {
                Reply::new(500, "not today")
            }
            ("/recheck", ..) => Reply::new(200, "no"),
            _ => Reply::new(200, ""),
        }
    })
    .await
}

async fn notify(client: &Client, receiver: &Receiver, name: &str, more: Value) -> String {
    let mut body = json!({ "bot": "hooks", "uid": name, "type": "welcome", "expires_in": 2 * 86_400,
        "url": format!("http://{}/hook/{name}", receiver.address) });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let answer = send(client, "POST", "/send_delayed", &body).await;
    answer.header("x-event-id").expect("an id").to_owned()
}

/// The sum of a field or length over the shards of a pipeline.
pub(super) async fn sum(
    connection: &mut MultiplexedConnection,
    pipeline: &str,
    command: &str,
    (key, field): (&str, Option<&str>),
) -> i64 {
    let mut pipe = redis::pipe();
    for shard in 0..2 {
        pipe.cmd(command).arg(format!("fl:{{{pipeline}:{shard}}}:{key}")).arg(field);
    }
    let found: Vec<Option<i64>> = pipe.query_async(connection).await.unwrap();
    found.into_iter().flatten().sum()
}

pub(super) async fn depth(connection: &mut MultiplexedConnection, pipeline: &str) -> i64 {
    sum(connection, pipeline, "HGET", ("meta", Some("depth"))).await
}

async fn exists(connection: &mut MultiplexedConnection, pattern: &str) -> bool {
    let keys: Vec<String> = redis::cmd("KEYS").arg(pattern).query_async(connection).await.unwrap();
    !keys.is_empty()
}

/// The first part of the story.
async fn work(stores: &Stores, receiver: &Receiver, client: &Client) {
    let rule = json!({ "on": ["sale.made"], "filter": "event.data.price > 10", "actions": [
        { "set_tag": { "tag": "buyer" } },
        { "set_field": { "field": "price", "value": 12 } },
        { "emit": { "type": "order.emitted" } },
        { "count": { "ad": "ad-rule", "n": 2 } },
    ] });
    send(client, "PUT", "/v1/bots/rules/automations/sale", &rule).await;
    let profile = json!({ "tags": ["old"], "fields": { "age": 31 } });
    send(client, "PUT", "/v1/bots/rules/subscribers/ann", &profile).await;
    for _ in 0..2 {
        send(client, "POST", "/v1/bots/views/counters/ad-1/views", &json!({})).await;
    }
    send(client, "PUT", "/v1/bots/views/counters/ad-3", &json!({ "total": 5 })).await;
    send(client, "POST", "/v1/bots/views/counters/ad-gone/views", &json!({})).await;
    let import = [("content-type", "application/x-ndjson"), ("idempotency-key", "history")];
    let path = "/v1/bots/views/counters/import?line=1";
    let lines = b"{\"ad\":\"ad-4\",\"total\":9}\n";
    assert_eq!(client.send("POST", path, &import, lines).await.code, 200);

    let recheck = format!("http://{}/recheck", receiver.address);
    notify(client, receiver, "sent", json!({ "delay": 0 })).await;
    notify(client, receiver, "refused", json!({ "delay": 0, "recheck_url": recheck })).await;

    let settings = json!({ "weight": 3, "rate": "100/s" });
    send(client, "PUT", "/v1/pipelines/orders/bots/heavy", &settings).await;
    let pause = json!({ "reason": "a sample" });
    send(client, "POST", "/v1/pipelines/orders/bots/paused/pause", &pause).await;

    let mut events = vec![event("rules", "sale.made", "1", "ann"), "no event".to_owned()];
    for bot in ["done", "failing", "resting", "held", "taken", "paused", "heavy"] {
        events.extend(orders(bot, &["1", "2", "3"]));
    }
    events.extend(["1", "2", "3"].map(|id| event("dead", "letter.sent", id, "ann")));
    for id in ["1", "2"] {
        events.push(event("lanes", "lane.used", &format!("bad-{id}"), "bad"));
        events.push(event("lanes", "lane.used", &format!("good-{id}"), "good"));
    }
    add(&stores.redis, STREAM, &events).await;
}

/// What is there before the first process is killed.
async fn is_left(stores: &Stores, receiver: &Receiver, redis: &mut MultiplexedConnection) -> bool {
    let called = |path: &str, bot: &str| {
        let calls = receiver.calls();
        calls.iter().any(|call| {
            call.line.contains(path) && String::from_utf8_lossy(&call.body).contains(bot)
        })
    };
    let patterns = [
        "fl:{orders:*}:failing:*",
        "fl:{orders:*}:history-failed",
        "fl:{lanes:*}:a:*",
        "fl:{notifications:*}:stats:day:*",
        "fl:{automations:*}:rules:rules",
        "fairlane:invalid",
        "fl:trend-minutes",
        "fl:audit",
    ];
    for pattern in patterns {
        if !exists(redis, pattern).await {
            return false;
        }
    }
    called("/orders", "\"held\"")
        && called("/hook/sent", "")
        && called("/recheck", "")
        && called("/orders", "order.emitted")
        && sum(redis, "orders", "HGET", ("meta", Some("open"))).await == 1
        && sum(redis, "letters", "XLEN", ("dlq", None)).await == 3
        // Failing 3, resting 2, held 3, taken 3, paused 3.
        && depth(redis, "orders").await == 14
        && depth(redis, "lanes").await == 2
        && depth(redis, "automations").await == 0
        && stores.depth().await == 0
}

/// The second part of the story.
async fn take_in(stores: &Stores, receiver: &Receiver, client: &Client, config: &str) {
    for _ in 0..3 {
        send(client, "POST", "/v1/bots/views/counters/ad-1/views", &json!({})).await;
    }
    send(client, "PUT", "/v1/bots/views/counters/ad-3", &json!({ "total": 7 })).await;
    send(client, "PUT", "/v1/bots/rules/subscribers/bob", &json!({ "tags": ["new"] })).await;
    notify(client, receiver, "due", json!({ "delay": 0 })).await;
    notify(client, receiver, "pending", json!({ "delay": 3600, "key": "once" })).await;
    notify(client, receiver, "waiting", json!({ "send_than_online": true })).await;
    let cancelled = notify(client, receiver, "cancelled", json!({ "delay": 3600 })).await;
    send(client, "DELETE", &format!("/v1/notifications/{cancelled}"), &json!({})).await;

    let mut events = orders("queued", &["1", "2", "3"]);
    events.extend(orders("failing", &["4"]));
    events.push(event("rules", "sale.made", "2", "ann"));
    events.push(event("lanes", "lane.used", "bad-3", "bad"));
    events.push(event("lanes", "lane.used", "good-3", "good"));
    let view = json!({ "specversion": "1.0", "id": "1", "source": "sample", "type": "ad.viewed",
        "botid": "views", "data": { "ad": "ad-1" } });
    events.push(view.to_string());
    add(&stores.redis, STREAM, &events).await;

    let bot = BotId::parse("delayed").unwrap();
    let queue = queue(config, "orders").await;
    let later = Event::builder("order.paid", &bot).id("1").build().unwrap();
    let due = Some(SystemClock.now() + HOUR);
    let options = PushOptions { due, idempotency: Some(("a-key", HOUR)) };
    queue.push(&bot, &[later], options).await.unwrap();
}

/// The text without the name of this machine and the port of the receiver. Lengths stay the same.
fn anonymous(text: &str, receiver: &Receiver, processes: [u32; 2]) -> String {
    let host = gethostname::gethostname().to_string_lossy().into_owned();
    let name: String = "samplehost-".chars().cycle().take(host.len()).collect();
    let address = receiver.address.to_string();
    assert_eq!(address.len(), RECEIVER.len(), "another port is needed: {address}");
    let mut text = text.replace(&address, RECEIVER);
    text = text.replace(&format!(r#"\"host\":\"{host}\""#), &format!(r#"\"host\":\"{name}\""#));
    for pid in processes {
        text = text.replace(&format!("{host} {pid}"), &format!("{name} {pid}"));
    }
    text
}

/// Writes the sample of this version.
#[tokio::test]
#[ignore = "writes files: make samples"]
async fn write_the_sample_of_this_version() {
    let stores = Stores::start(Persistence::Always);
    let receiver = receiver().await;
    let config = config(&stores, &receiver, "1h");
    let mut redis = stores.redis.connection().await;

    let mut first = Served::start(&config).await;
    work(&stores, &receiver, &Client::new(&first.http())).await;
    eventually(LONG, "the first part of the story is over", async || {
        is_left(&stores, &receiver, &mut redis).await
    })
    .await;
    first.kill9();

    let mut second = Served::start_as(&config, "ingest,http").await;
    take_in(&stores, &receiver, &Client::new(&second.http()), &config).await;
    eventually(LONG, "the second part of the story is over", async || {
        depth(&mut redis, "orders").await == 18
            && depth(&mut redis, "lanes").await == 4
            && depth(&mut redis, "automations").await == 2
            && stores.depth().await >= 2
            && exists(&mut redis, "fl:{counters:*}:unflushed:*").await
            && exists(&mut redis, "fl:{fairlane:events}:read").await
    })
    .await;
    second.kill9();
    add(&stores.redis, STREAM, &orders("queued", &["4"])).await;

    let processes = [first.id(), second.id()];
    let now = u64::try_from(SystemClock.now().as_millis()).unwrap();
    let directory = present();
    fs::create_dir_all(&directory).unwrap();
    for (file, content) in [
        ("redis.txt", text::of_redis(&mut redis).await),
        ("mongodb.txt", text::of_mongo(&stores.mongo.url()).await),
    ] {
        let content = text::head(now) + &anonymous(&content, &receiver, processes);
        fs::write(directory.join(file), content).unwrap();
    }
}
