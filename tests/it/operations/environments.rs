//! Two environments share one Redis. Neither sees, handles or removes data of the other.

use std::collections::BTreeSet;
use std::time::Duration;

use redis::AsyncCommands as _;
use serde_json::json;

use crate::support::automation_rig::put;
use crate::support::bus::event;
use crate::support::cli::{Ran, run_in};
use crate::support::config::config;
use crate::support::http::Client;
use crate::support::mongo::{self, MongoServer};
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);
const STRUCTURED: &str = "application/cloudevents+json";

/// One environment, and its client.
struct Environment {
    config: String,
    process: Served,
    client: Client,
}

impl Environment {
    async fn start(server: &RedisServer, mongo: &MongoServer, settings: &[(&str, &str)]) -> Self {
        let url = format!("{:?}", mongo.url());
        let all = [
            ("mongodb.url", &*url),
            ("pipelines.shop.handler", "\"log\""),
            ("pipelines.shop.events", "[\"order.*\"]"),
            ("pipelines.automations.enabled", "true"),
            ("pipelines.notifications.enabled", "true"),
            ("callbacks.allow_nets", "[\"127.0.0.1\"]"),
        ];
        let config = config(server, "shop", &[&all, settings].concat());
        let process = Served::start(&config).await;
        let client = Client::new(&process.http());
        Self { config, process, client }
    }

    /// Creates every kind of key: a valid event in both ways, an invalid one, a rule that emits
    /// another event, a view, and a notification.
    async fn work(&self, server: &RedisServer, stream: &str) {
        let rule =
            json!({ "on": ["order.paid"], "actions": [{ "emit": { "type": "order.echo" } }] });
        assert_eq!(put(&self.client, "b", "echo", &rule).await.code, 201);
        let published = run(&self.config, &["publish"], &event("b", "order.paid", 1));
        assert!(published.contains(&format!("to {stream}")), "{published}");
        let answer = self.client.publish(STRUCTURED, event("b", "order.paid", 2)).await;
        assert_eq!(answer.code, 202, "{answer:?}");
        let mut connection = server.connection().await;
        let () = connection.xadd(stream, "*", &[("event", "none")]).await.unwrap();
        eventually(LONG, "a view is counted", async || {
            self.client.post("/v1/bots/b/counters/ad/views").await.code == 200
        })
        .await;
        let path = "/send_delayed?bot=b&delay=3600&type=t&url=http%3A%2F%2F127.0.0.1%3A4099%2F";
        let answer = self.client.get(path).await;
        assert_eq!(answer.code, 200, "{answer:?}");
        eventually(LONG, "its own events are handled, and what the rule made", async || {
            self.done().await == Some(4)
        })
        .await;
    }

    /// The number of events that the pipeline has done.
    async fn done(&self) -> Option<u64> {
        let text = Client::new(&self.process.metrics()).get("/metrics").await.body;
        let labels = [("pipeline", "shop"), ("outcome", "done")];
        let text = String::from_utf8_lossy(&text).into_owned();
        let done = crate::support::http::metric(&text, "fairlane_events_total", &labels)?;
        format!("{done}").parse().ok()
    }
}

fn ran(config: &str, arguments: &[&str], input: &str) -> Ran {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("fairlane.toml"), config).unwrap();
    run_in(directory.path(), arguments, input)
}

/// Runs a command that must succeed, and returns its output.
fn run(config: &str, arguments: &[&str], input: &str) -> String {
    let ran = ran(config, arguments, input);
    assert_eq!(ran.code, 0, "{arguments:?}: {ran:?}");
    ran.out + &ran.err
}

async fn keys(server: &RedisServer) -> BTreeSet<String> {
    server.connection().await.keys::<_, Vec<String>>("*").await.unwrap().into_iter().collect()
}

async fn channels(server: &RedisServer) -> Vec<String> {
    let mut command = redis::cmd("PUBSUB");
    command.arg("CHANNELS").query_async(&mut server.connection().await).await.unwrap()
}

#[tokio::test]
async fn two_environments_share_a_redis_and_nothing_in_it() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let (mongo, other_mongo) = (
        MongoServer::start(mongo::Options::default()),
        MongoServer::start(mongo::Options::default()),
    );
    // The user of the first environment may touch only keys with its prefix.
    let mut acl = redis::cmd("ACL");
    acl.arg(&["SETUSER", "staging", "on", ">secret", "~staging:*", "&staging:*", "+@all"]);
    let () = acl.query_async(&mut server.connection().await).await.unwrap();
    let url = format!("\"redis://staging:secret@{}\"", server.tcp_addr());
    let settings = [("redis.url", &*url), ("redis.prefix", "\"staging\""), ("redis.shards", "4")];
    let staging = Environment::start(&server, &mongo, &settings).await;
    staging.work(&server, "staging:events").await;
    let is_staging = |key: &String| key.starts_with("staging:");
    let made = keys(&server).await;
    assert!(made.iter().all(is_staging), "{made:?}");
    for key in ["staging:shards", "staging:events", "staging:invalid", "staging:lease-key"] {
        assert!(made.contains(key), "{key} is missing in {made:?}");
    }
    let heard = channels(&server).await;
    assert!(!heard.is_empty() && heard.iter().all(is_staging), "{heard:?}");

    // The second environment has no prefix of its own, and another number of shards.
    let usual = Environment::start(&server, &other_mongo, &[]).await;
    usual.work(&server, "fairlane:events").await;
    let usual_key = |key: &String| key.starts_with("fl:") || key.starts_with("fairlane:");
    let all = keys(&server).await;
    assert!(all.iter().all(|key| is_staging(key) || usual_key(key)), "{all:?}");
    assert_eq!(staging.done().await, Some(4), "nothing of the other came here");

    for (environment, prefix, invalid) in
        [(&staging, "staging", "staging:invalid"), (&usual, "fl", "fairlane:invalid")]
    {
        let shown = run(&environment.config, &["status"], "");
        assert!(shown.contains(&format!("XREVRANGE {invalid} ")), "{shown}");
        let checked = ran(&environment.config, &["check"], "").out;
        let other = if prefix == "fl" { "staging" } else { "fl" };
        assert!(checked.contains(&format!("{prefix}; also in this Redis: {other}")), "{checked}");
        let processes = run(&environment.config, &["status", "--json"], "");
        let status: serde_json::Value = serde_json::from_str(&processes).unwrap();
        let processes = status["processes"].as_array().map(Vec::len);
        assert_eq!(processes, Some(1), "{status}");
    }

    // A third environment is refused if it would read the bus of another. It is told when its
    // prefix has no data.
    let third = [
        ("redis.prefix", "\"third\""),
        ("bus.streams", "[\"staging:events\"]"),
        ("pipelines.shop.handler", "\"log\""),
    ];
    let mut refused = Served::spawn(&config(&server, "shop", &third), "work");
    assert_eq!(refused.wait_exit(LONG).expect("it ends").code(), Some(64));
    let log = refused.log();
    assert!(log.contains("staging") && log.contains("another bus.streams"), "{log}");
    let empty = config(&server, "shop", &[("redis.prefix", "\"third\"")]);
    let told = run(&empty, &["pipelines", "list"], "");
    assert!(told.contains("there is no data yet under redis.prefix = \"third\""), "{told}");

    // A drop in one environment leaves the data of the other.
    let mut process = staging.process;
    process.sigterm();
    process.wait_exit(LONG).expect("it ends");
    let before = keys(&server).await.into_iter().filter(usual_key).collect::<BTreeSet<_>>();
    let disabled = format!("{}pipelines.shop.enabled = false\n", staging.config);
    run(&disabled, &["pipelines", "drop", "shop", "--yes"], "");
    let after = keys(&server).await;
    assert!(!after.iter().any(|key| key.starts_with("staging:{shop:")), "{after:?}");
    assert!(before.iter().any(|key| key.starts_with("fl:{shop:")), "{before:?}");
    let lost: Vec<_> = before.iter().filter(|key| !after.contains(*key)).collect();
    let lasting = lost.iter().filter(|key| key.contains("{shop:")).collect::<Vec<_>>();
    assert!(lasting.is_empty(), "{lasting:?}");
    let answer = usual.client.publish(STRUCTURED, event("b", "order.paid", 3)).await;
    assert_eq!(answer.code, 202);
    eventually(LONG, "the other goes on", async || usual.done().await >= Some(6)).await;
}
