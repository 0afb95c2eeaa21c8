//! Processes that evaluate rules, and the effects of these rules.

use std::collections::BTreeMap;
use std::time::Duration;

use fairlane::app::Roles;
use serde_json::{Value, json};

use super::bus::add;
use super::config::STREAM;
use super::counter_fleet::Stores;
use super::http::{Client, Response};
use super::instance::Instance;
use super::recorder::Log;
use super::redis::Persistence;
use super::wait::eventually;

pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Settings of processes that evaluate rules and soon take over from a killed process.
pub(crate) const RULES: &[(&str, &str)] = &[
    ("bus.trim", "false"),
    ("pipelines.automations.enabled", "true"),
    ("pipelines.automations.start", "\"earliest\""),
    ("pipelines.automations.lease_ttl", "\"1s\""),
    ("pipelines.automations.handler_timeout", "\"10s\""),
    ("pipelines.automations.workers.max", "4"),
    ("pipelines.automations.backoff", "{ initial = \"20ms\", max = \"200ms\", jitter = 0.2 }"),
    ("pipelines.notifications.enabled", "true"),
    ("callbacks.allow_nets", "[\"127.0.0.1\"]"),
];

/// Redis, MongoDB, and an instance inside the test process.
pub(crate) struct Rig {
    pub(crate) stores: Stores,
    pub(crate) config: String,
    pub(crate) instance: Instance,
    pub(crate) client: Client,
}

impl Rig {
    pub(crate) async fn start(settings: &[(&str, &str)]) -> Self {
        let stores = Stores::start(Persistence::Always);
        let config = stores.direct(&[RULES, settings].concat());
        let instance = Instance::start(&config, Log::default().content()).await;
        let client = instance.client();
        Self { stores, config, instance, client }
    }

    /// Another instance with the same configuration.
    pub(crate) async fn another(&self) -> Instance {
        Instance::start_as(Roles::ALL, &self.config, Log::default().content()).await
    }

    pub(crate) async fn publish(&self, events: &[Value]) {
        publish(&self.stores, events).await;
    }

    /// Waits until `entries` events are on the bus and all are handled.
    pub(crate) async fn settles(&self, entries: usize) {
        settles(&self.stores, entries).await;
    }

    pub(crate) async fn put(&self, bot: &str, rule: &str, body: &Value) -> Response {
        let answer = put(&self.client, bot, rule, body).await;
        assert!(matches!(answer.code, 200 | 201), "{}", answer.problem());
        answer
    }

    pub(crate) async fn stats(&self, bot: &str, rule: &str) -> Value {
        let path = format!("/v1/bots/{bot}/automations/{rule}");
        self.client.get(&path).await.json()["stats"].clone()
    }
}

pub(crate) async fn put(client: &Client, bot: &str, rule: &str, body: &Value) -> Response {
    let path = format!("/v1/bots/{bot}/automations/{rule}");
    let headers = [("content-type", "application/json")];
    let mut answer = Response::default();
    // 503 asks the client to try again: on a busy machine MongoDB may not answer in time.
    eventually(LONG, "the rule is answered for", async || {
        answer = client.send("PUT", &path, &headers, body.to_string().as_bytes()).await;
        answer.code != 503
    })
    .await;
    answer
}

/// An event about a subscriber.
#[expect(clippy::needless_pass_by_value, reason = "callers write it in place")]
pub(crate) fn event(bot: &str, subject: &str, id: &str, kind: &str, data: Value) -> Value {
    json!({
        "specversion": "1.0", "id": id, "source": "test", "type": kind, "botid": bot,
        "subject": subject, "data": data,
    })
}

#[expect(clippy::needless_pass_by_value, reason = "callers write it in place")]
pub(crate) fn field(bot: &str, subject: &str, id: &str, field: &str, value: Value) -> Value {
    event(bot, subject, id, "field.changed", json!({ "field": field, "value": value }))
}

pub(crate) fn tag(bot: &str, subject: &str, id: &str, tag: &str) -> Value {
    event(bot, subject, id, "tag.applied", json!({ "tag": tag }))
}

pub(crate) async fn publish(stores: &Stores, events: &[Value]) {
    let texts: Vec<String> = events.iter().map(Value::to_string).collect();
    add(&stores.redis, STREAM, &texts).await;
}

/// The events on the bus, in order.
pub(crate) async fn on_the_bus(stores: &Stores) -> Vec<Value> {
    let mut connection = stores.redis.connection().await;
    let entries: Vec<(String, BTreeMap<String, String>)> = redis::cmd("XRANGE")
        .arg(STREAM)
        .arg("-")
        .arg("+")
        .query_async(&mut connection)
        .await
        .unwrap();
    entries.iter().map(|(_, fields)| serde_json::from_str(&fields["event"]).unwrap()).collect()
}

/// The events of this type that rules put on the bus.
pub(crate) async fn emitted(stores: &Stores, kind: &str) -> Vec<Value> {
    let all = on_the_bus(stores).await;
    all.into_iter()
        .filter(|event| event["type"] == kind && event["source"] == "fairlane/automations")
        .collect()
}

/// The number of events that are queued for the rules or leased.
pub(crate) async fn depth(stores: &Stores) -> u64 {
    let mut connection = stores.redis.connection().await;
    let mut pipe = redis::pipe();
    for shard in 0..super::config::SHARDS {
        pipe.hget(format!("fl:{{automations:{shard}}}:meta"), "depth");
    }
    let depths: Vec<Option<u64>> = pipe.query_async(&mut connection).await.unwrap();
    depths.into_iter().flatten().sum()
}

/// Waits until `entries` events are on the bus, all are read, and none is queued.
pub(crate) async fn settles(stores: &Stores, entries: usize) {
    let count = async || {
        let mut connection = stores.redis.connection().await;
        let count: usize =
            redis::cmd("XLEN").arg(STREAM).query_async(&mut connection).await.unwrap();
        count
    };
    eventually(LONG, &format!("{entries} events on the bus"), async || count().await >= entries)
        .await;
    eventually(LONG, "all is read", async || is_read(stores).await && depth(stores).await == 0)
        .await;
    // Unwanted further events would arrive now.
    tokio::time::sleep(Duration::from_millis(300)).await;
    eventually(LONG, "all is read", async || is_read(stores).await && depth(stores).await == 0)
        .await;
    assert_eq!(count().await, entries, "the number of events on the bus");
}

/// Whether every shard has copied the last entry of the bus.
async fn is_read(stores: &Stores) -> bool {
    let mut connection = stores.redis.connection().await;
    let last: Vec<(String, BTreeMap<String, String>)> = redis::cmd("XREVRANGE")
        .arg(STREAM)
        .arg("+")
        .arg("-")
        .arg("COUNT")
        .arg(1)
        .query_async(&mut connection)
        .await
        .unwrap();
    let Some((last, _)) = last.first() else { return true };
    let mut pipe = redis::pipe();
    for shard in 0..super::config::SHARDS {
        pipe.hget(format!("fl:{{automations:{shard}}}:hwm"), STREAM);
    }
    let read: Vec<Option<String>> = pipe.query_async(&mut connection).await.unwrap();
    read.iter().all(|read| read.as_ref() == Some(last))
}

/// The profile of a subscriber, or `null` if there is none.
pub(crate) async fn profile(client: &Client, bot: &str, subscriber: &str) -> Value {
    let answer = client.get(&format!("/v1/bots/{bot}/subscribers/{subscriber}")).await;
    match answer.code {
        200 => json!({ "tags": answer.json()["tags"], "fields": answer.json()["fields"] }),
        404 => Value::Null,
        _ => panic!("{}", answer.problem()),
    }
}
