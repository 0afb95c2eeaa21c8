//! Reads while a store hangs: they get the data of the other store, or 503, and never wait long.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::bus::{add, event};
use crate::support::config::STREAM;
use crate::support::counter_fleet::{Ad, Node, Stores, Sums, View, acknowledged, path, total};
use crate::support::http::{Client, Response};
use crate::support::interceptor::Interception;
use crate::support::mongo::MongoServer;
use crate::support::mongo_proxy::on;
use crate::support::redis::{Persistence, RedisServer};
use crate::support::wait::{Stopwatch, eventually, judged, tried};

const LONG: Duration = Duration::from_secs(60);
/// Time for a read whose timeout is a quarter of a second, on a busy machine. Without that timeout,
/// readers waited 2 to 7 s.
const SOON: Duration = Duration::from_millis(1_500);
const READ_TIMEOUT: Duration = Duration::from_millis(250);
/// `/readyz` waits a second for a Redis that is silent.
const READY: Duration = Duration::from_secs(3);
/// A slow machine may need several: a store that is only slow looks like one that hangs.
const TRIES: usize = 10;
const TOTALS: &str = "/v1/bots/bot/counters?ids=cached,stored";

struct Rig {
    stores: Stores,
    node: Node,
    client: Client,
    expected: Sums,
}

fn ad(id: &str) -> Ad {
    ("bot".to_owned(), id.to_owned())
}

fn daily() -> String {
    path(&ad("stored"), "/daily?from=2026-01-01&to=2026-12-31")
}

/// Reads a path and checks that the answer comes soon.
async fn read(client: &Client, path: &str) -> Response {
    timed(client, path).await.0
}

/// The same, and how long it took.
async fn timed(client: &Client, path: &str) -> (Response, Duration) {
    let (watch, started) = (Stopwatch::start(), Instant::now());
    let answer = client.get(path).await;
    let took = started.elapsed();
    watch.within(SOON, &format!("{path}, {answer:?}"));
    (answer, took)
}

/// Reads whether the process is alive and ready, and checks that it tells it soon.
async fn probe(health: &Client) {
    assert_eq!(read(health, "/healthz").await.code, 200);
    let watch = Stopwatch::start();
    let ready = health.get("/readyz").await;
    watch.within(READY, &format!("{ready:?}"));
}

/// So many ads without views.
fn ads(count: u32) -> Vec<String> {
    (0..count).map(|n| format!("ad-{n}")).collect()
}

async fn query(client: &Client, body: &serde_json::Value) -> Response {
    let headers = [("content-type", "application/json")];
    let path = "/v1/bots/bot/counters/query";
    client.send("POST", path, &headers, body.to_string().as_bytes()).await
}

impl Rig {
    /// Starts with two views of an ad whose total is cached, and three of an ad that only MongoDB
    /// knows.
    async fn start() -> Self {
        let stores = Stores::start(Persistence::Always);
        let settings = [
            ("counters.read_timeout", "\"250ms\""),
            ("pipelines.other.handler", "\"log\""),
            ("pipelines.other.events", "[\"other.*\"]"),
            ("pipelines.other.start", "\"earliest\""),
            ("pipelines.other.handler_timeout", "\"5s\""),
        ];
        let node = Node::start(&stores, &settings).await;
        let client = node.client();
        View::new("bot", "cached", 2).count(|| client.clone()).await;
        stores.publish(&[View::new("bot", "stored", 3)]).await;
        let expected = Sums::from([(ad("cached"), 2), (ad("stored"), 3)]);
        stores.settles(&client, &expected, LONG).await;
        // On a busy machine, the first view may still have to wait for its total.
        eventually(LONG, "the total is cached", async || {
            total(&client, &ad("cached")).await == Some(2)
        })
        .await;
        Self { stores, node, client, expected }
    }

    /// Reads totals until the answer is the expected one: a probe of the store may still run.
    async fn totals(&self, code: u16, body: serde_json::Value) {
        eventually(LONG, "totals are told", async || {
            let answer = read(&self.client, TOTALS).await;
            answer.code == code && (code != 200 || answer.json() == body)
        })
        .await;
    }

    /// The other pipeline continues, and the process reports that it is alive and ready.
    async fn others_go_on(&self, id: &str) {
        let health = Client::new(&self.node.served.metrics());
        probe(&health).await;
        let done = async || {
            let text = String::from_utf8(read(&health, "/metrics").await.body).unwrap();
            let name = "fairlane_events_total{pipeline=\"other\",outcome=\"done\"} ";
            text.lines().find_map(|line| line.strip_prefix(name)?.parse::<u64>().ok())
        };
        let before = done().await.unwrap();
        let others = [event("another", "other.thing", id)];
        add(&self.stores.redis, STREAM, &others).await;
        eventually(LONG, "another pipeline goes on", async || {
            done().await.is_some_and(|now| now > before)
        })
        .await;
    }

    /// With both stores back, every counted view is there.
    async fn settles(mut self, views: &[View]) {
        for view in views {
            *self.expected.entry(view.ad.clone()).or_default() += view.n;
        }
        self.stores.settles(&self.client, &self.expected, LONG).await;
        let answer = acknowledged(async || self.client.get(&daily()).await).await;
        assert_eq!(answer.code, 200);
    }
}

/// Stores that are frozen until this is dropped.
struct Hanging<'a>(Option<&'a RedisServer>, Option<&'a MongoServer>);

impl<'a> Hanging<'a> {
    fn redis(stores: &'a Stores) -> Self {
        stores.redis.sigstop();
        Self(Some(&stores.redis), None)
    }

    fn mongo(stores: &'a Stores) -> Self {
        stores.mongo.sigstop();
        Self(None, Some(&stores.mongo))
    }
}

impl Drop for Hanging<'_> {
    fn drop(&mut self) {
        if let Some(redis) = self.0 {
            redis.sigcont();
        }
        if let Some(mongo) = self.1 {
            mongo.sigcont();
        }
    }
}

#[tokio::test]
async fn while_redis_hangs_readers_get_stale_totals_soon_and_days_as_ever() {
    let rig = Rig::start().await;
    let hanging = Hanging::redis(&rig.stores);
    for _ in 0..10 {
        rig.totals(200, json!({ "totals": { "cached": 2, "stored": 3 }, "stale": true })).await;
        let days = acknowledged(async || read(&rig.client, &daily()).await).await;
        assert_eq!((days.code, &days.json()["stale"]), (200, &json!(true)));
    }
    // Once Redis is known to hang, views that it cannot take are refused immediately.
    let view = View::new("bot", "cached", 1);
    eventually(LONG, "views are refused soon", async || {
        // This one may be the probe of Redis.
        view.post(&rig.client).await;
        let started = Instant::now();
        let answer = view.post(&rig.client).await;
        assert_eq!(answer.code, 503, "{answer:?}");
        assert!(answer.header("retry-after").is_some(), "{answer:?}");
        started.elapsed() < SOON
    })
    .await;
    drop(hanging);
    // The fate of the view that was in flight is unknown. Repeated, it counts once.
    view.count(|| rig.client.clone()).await;
    rig.totals(200, json!({ "totals": { "cached": 3, "stored": 3 } })).await;
    rig.others_go_on("after").await;
    rig.settles(&[view]).await;
}

#[tokio::test]
async fn while_mongodb_hangs_cached_totals_are_told_days_are_503_soon_and_cold_views_are_counted() {
    let rig = Rig::start().await;
    let hanging = Hanging::mongo(&rig.stores);
    let mut cold = Vec::new();
    for number in 0..10 {
        let days = read(&rig.client, &daily()).await;
        assert_eq!((days.code, days.problem().as_str()), (503, "mongodb-away"));
        assert_eq!(days.header("retry-after"), Some("1"));
        let unknown = json!({ "totals": { "cached": 2, "stored": null } });
        rig.totals(200, unknown).await;
        let view = View::new("bot", &format!("cold-{number}"), 1);
        let watch = Stopwatch::start();
        let told = view.count(|| rig.client.clone()).await;
        watch.within(SOON, "the view is counted");
        assert_eq!(told, None);
        cold.push(view);
    }
    rig.others_go_on("during").await;
    drop(hanging);
    rig.settles(&cold).await;
}

/// A large read that MongoDB does not answer, and small ones beside it. False: a store answered late,
/// because the machine was too slow. An open breaker would refuse a small read before that.
async fn small_ones_go_on(rig: &Rig, count: u32, is_last: bool) -> bool {
    let both = json!({ "cached": 2, "stored": 3 });
    // The reads of a slow try may have opened the breakers.
    rig.totals(200, json!({ "totals": both })).await;
    eventually(LONG, "days are told", async || {
        let days = read(&rig.client, &daily()).await;
        days.code == 200 && days.json()["stale"].is_null()
    })
    .await;
    let held = rig.node.mongo.intercept(on("find", "counters_totals"), 1, Interception::HoldReply);
    let many = query(&rig.client, &json!({ "ids": ads(count) })).await;
    let is_held = held.has_caught();
    let (days, days_took) = timed(&rig.client, &daily()).await;
    let (totals, totals_took) = timed(&rig.client, TOTALS).await;
    held.release();
    let is_known = days.code == 200;
    assert!(is_known || days_took >= READ_TIMEOUT, "the breaker is open: {days:?}");
    let is_told = totals.code == 200 && totals.json()["totals"] == both;
    assert!(!is_known || is_told || totals_took >= READ_TIMEOUT, "{totals:?}");
    let is_late = many.code == 503 || !is_held;
    let is_shown = judged(!is_last && is_late, || {
        assert!(is_held, "the reply is held");
        assert_eq!((many.code, &many.json()["totals"]["ad-7"]), (200, &json!(null)), "{count}");
    });
    is_shown && judged(!is_last, || assert!(is_known && is_told, "{days:?}, {totals:?}"))
}

#[tokio::test]
async fn a_large_read_that_takes_too_long_stops_no_small_ones() {
    let rig = Rig::start().await;
    for count in [500, 100, 500, 100] {
        tried(TRIES, async |is_last| small_ones_go_on(&rig, count, is_last).await).await;
    }
    // The totals and the days of one request do not wait for each other.
    let body = json!({ "ids": ads(500), "from": "2026-01-01", "to": "2026-01-31" });
    eventually(LONG, "a large read with days is answered", async || {
        let answer = query(&rig.client, &body).await;
        answer.code == 200 && answer.json()["totals"]["ad-7"] == json!(0)
    })
    .await;
    rig.settles(&[]).await;
}

#[tokio::test]
async fn while_both_stores_hang_readers_are_refused_soon_and_come_back_by_themselves() {
    let rig = Rig::start().await;
    let (redis, mongo) = (Hanging::redis(&rig.stores), Hanging::mongo(&rig.stores));
    for _ in 0..10 {
        for path in [TOTALS, &daily()] {
            let answer = read(&rig.client, path).await;
            assert_eq!(answer.code, 503, "{path}: {answer:?}");
            assert!(answer.header("retry-after").is_some(), "{answer:?}");
        }
        probe(&Client::new(&rig.node.served.metrics())).await;
    }
    drop((redis, mongo));
    rig.totals(200, json!({ "totals": { "cached": 2, "stored": 3 } })).await;
    rig.settles(&[]).await;
}
