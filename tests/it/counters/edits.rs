//! Edits of counters while views are queued and a flush is in flight. Totals and days agree at the
//! end, and each answer is right when it is given.

use std::sync::Arc;
use std::time::Duration;

use fairlane::app::Roles;
use futures_util::future::{join, join_all};
use serde_json::json;

use crate::support::bus::add;
use crate::support::config::STREAM;
use crate::support::counter_fleet::{
    Ad, Node, Stores, Sums, View, acknowledged, judge, letters, path, total,
};
use crate::support::http::{Client, Response};
use crate::support::instance::Instance;
use crate::support::interceptor::{Interception, Interceptor};
use crate::support::manual_clock::ManualClock;
use crate::support::mongo_proxy::{on, on_any};
use crate::support::recorder::Log;
use crate::support::redis::Persistence;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);
const TOTALS: &str = "counters_totals";
const DAILY: &str = "counters_daily";
const JSON: (&str, &str) = ("content-type", "application/json");

/// An edit that replaces the views of an ad.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Edit {
    Reset,
    Put(u64),
    Delete,
}

impl Edit {
    /// The total after the edit.
    pub(crate) fn total(self) -> u64 {
        match self {
            Self::Put(total) => total,
            Self::Reset | Self::Delete => 0,
        }
    }

    /// Sends the edit once.
    pub(crate) async fn send(self, client: &Client, ad: &Ad) -> Response {
        match self {
            Self::Reset => client.post(&path(ad, "/reset")).await,
            Self::Delete => client.send("DELETE", &path(ad, ""), &[], b"").await,
            Self::Put(total) => {
                // The total is spread over two months. Neither needs to be the current one.
                let first = total / 3;
                let days = json!({ "2026-10-31": first, "2026-11-02": total - first });
                let body = json!({ "total": total, "days": days }).to_string();
                client.send("PUT", &path(ad, ""), &[JSON], body.as_bytes()).await
            }
        }
    }
}

fn ad(id: &str) -> Ad {
    ("bot".to_owned(), id.to_owned())
}

fn views(ad: &Ad, count: usize) -> Vec<View> {
    (0..count).map(|_| View::new(&ad.0, &ad.1, 1)).collect()
}

#[tokio::test]
async fn an_edit_amid_queued_views_and_a_flush_in_flight_leaves_exactly_the_newer_views() {
    let stores = Stores::start(Persistence::Always);
    let (node, other) = (Node::start(&stores, &[]).await, Node::start(&stores, &[]).await);
    let mut expected = Sums::new();
    for (edit, held) in [
        (Edit::Reset, TOTALS),
        (Edit::Reset, DAILY),
        (Edit::Put(100), TOTALS),
        (Edit::Put(77), DAILY),
        (Edit::Delete, TOTALS),
        (Edit::Delete, DAILY),
    ] {
        let ad = ad(&format!("{edit:?} {held}").replace(['(', ')', ' '], "-"));
        stores.publish(&views(&ad, 50)).await;
        eventually(LONG, "they are counted", async || total(&node.client(), &ad).await == Some(50))
            .await;
        eventually(LONG, "they are flushed", async || stores.depth().await == 0).await;
        // Several interceptors for each process, so that a repeated flush is held too.
        let held = || {
            [&node, &other]
                .map(|n| n.mongo.intercept(on("update", held), 1, Interception::HoldCommand))
        };
        let interceptors: Vec<Interceptor> = (0..20).flat_map(|_| held()).collect();
        stores.publish(&views(&ad, 1_000)).await;
        eventually(LONG, "a flush is held", async || {
            interceptors.iter().any(Interceptor::has_caught)
        })
        .await;
        eventually(LONG, "the rest is queued", async || stores.depth().await == 1_000).await;

        acknowledged(async || edit.send(&node.client(), &ad).await).await;
        let after = edit.total();
        for client in [node.client(), other.client()] {
            assert_eq!(total(&client, &ad).await, Some(after), "right after {edit:?}");
        }
        let newer = View::new(&ad.0, &ad.1, 7);
        let told = newer.count(|| other.client()).await;
        assert_eq!(told, Some(after + 7), "a view after {edit:?}");
        assert_eq!(total(&node.client(), &ad).await, Some(after + 7));
        for interceptor in interceptors {
            // The others are removed.
            if interceptor.has_caught() {
                interceptor.release();
            }
        }
        expected.insert(ad, after + 7);
        stores.settles(&node.client(), &expected, LONG).await;
    }
}

#[tokio::test]
async fn edits_that_race_with_views_leave_totals_and_days_equal_and_no_newer_view_out() {
    let stores = Stores::start(Persistence::Always);
    let node = Node::start(&stores, &[]).await;
    for (round, edit) in [Edit::Reset, Edit::Put(30), Edit::Delete].into_iter().enumerate() {
        let ad = ad(&format!("x-{round}"));
        let view = async |count| {
            for view in views(&ad, count) {
                view.count(|| node.client()).await;
            }
        };
        view(20).await;
        let racing = join_all((0..4).map(|_| view(25)));
        let editing = acknowledged(async || edit.send(&node.client(), &ad).await);
        let edited = async {
            editing.await;
            view(10).await;
        };
        join(racing, edited).await;
        eventually(LONG, "all is flushed", async || stores.depth().await == 0).await;
        let (totals, _) = stores.stored().await;
        let left = totals[&ad];
        let base = edit.total();
        assert!((base + 10..=base + 110).contains(&left), "{left} after {edit:?}");
        stores.settles(&node.client(), &totals, LONG).await;
    }
}

#[tokio::test]
async fn a_frozen_consumer_does_not_restore_an_ad_forgotten_meanwhile() {
    let stores = Stores::start(Persistence::Always);
    let frozen = Node::start(&stores, &[]).await;
    let ads = [ad("known"), ad("new")];
    stores.publish(&views(&ads[0], 10)).await;
    let known = Sums::from([(ads[0].clone(), 10)]);
    stores.settles(&frozen.client(), &known, LONG).await;
    let interceptors = [TOTALS, DAILY]
        .map(|name| frozen.mongo.intercept(on("update", name), 1, Interception::HoldCommand));
    stores.publish(&[views(&ads[0], 100), views(&ads[1], 100)].concat()).await;
    for interceptor in &interceptors {
        assert!(interceptor.catches(LONG).await);
    }
    eventually(LONG, "all are queued", async || stores.depth().await == 200).await;
    frozen.served.sigstop();
    let other = Node::start(&stores, &[]).await;
    for ad in &ads {
        acknowledged(async || Edit::Delete.send(&other.client(), ad).await).await;
    }
    let mut expected: Sums = ads.iter().map(|ad| (ad.clone(), 0)).collect();
    stores.settles(&other.client(), &expected, LONG).await;
    for interceptor in &interceptors {
        assert!(interceptor.completes(LONG).await, "the late write was executed");
    }
    frozen.served.sigcont();
    let wrong = judge(&expected, &stores.said(&other.client(), &expected).await);
    assert!(wrong.is_empty(), "{wrong:?}");
    // The ads count from 0 again.
    for ad in &ads {
        stores.publish(&views(ad, 3)).await;
        expected.insert(ad.clone(), 3);
    }
    stores.settles(&frozen.client(), &expected, LONG).await;
}

/// MongoDB then already has some of the queued views, so adding the two would count them twice.
#[tokio::test]
async fn no_view_is_told_twice_while_a_flush_is_between_the_collections() {
    let stores = Stores::start(Persistence::Always);
    let node = Node::start(&stores, &[]).await;
    let ad = ad("x");
    let holds = [
        (DAILY, Interception::HoldCommand),
        (TOTALS, Interception::HoldReply),
        (TOTALS, Interception::HoldCommand),
    ];
    for (round, (collection, interception)) in (1..=6).zip(holds.into_iter().cycle()) {
        let interceptor = node.mongo.intercept(on("update", collection), 1, interception);
        // These views arrive over the bus, which fills no cache.
        stores.publish(&views(&ad, 10)).await;
        assert!(interceptor.catches(LONG).await);
        eventually(LONG, "all are queued", async || stores.depth().await == 10).await;
        for _ in 0..20 {
            // It is unknown which of the ten views are written. All earlier views count, and no
            // view counts twice.
            let told = total(&node.client(), &ad).await;
            let right = told.is_none_or(|told| (10 * (round - 1)..=10 * round).contains(&told));
            assert!(right, "told {told:?} in round {round}");
        }
        interceptor.release();
        stores.settles(&node.client(), &Sums::from([(ad.clone(), 10 * round)]), LONG).await;
    }
    // A view during a flush: its total is right or null, and the view counts.
    let mut sum = 60;
    for round in 1..=6 {
        let interceptor = node.mongo.intercept(on("update", TOTALS), 1, Interception::HoldReply);
        let other = View::new("bot", &format!("y-{round}"), 5);
        stores.publish(std::slice::from_ref(&other)).await;
        assert!(interceptor.catches(LONG).await);
        let told = View { key: format!("k-{round}"), n: 1, ..other.clone() };
        let told = told.count(|| node.client()).await;
        assert!(told.is_none() || told == Some(6), "told {told:?}");
        interceptor.release();
        sum += 6;
    }
    eventually(LONG, "all is flushed", async || stores.depth().await == 0).await;
    assert_eq!(stores.stored().await.0.values().sum::<u64>(), sum);
}

#[tokio::test]
async fn views_with_one_idempotency_key_count_once_at_any_process() {
    let stores = Stores::start(Persistence::Always);
    let (node, other) = (Node::start(&stores, &[]).await, Node::start(&stores, &[]).await);
    let clients = [node.client(), other.client()];
    let mut expected = Sums::new();
    for known in [false, true] {
        for round in 0..5_u64 {
            let view = View::new("bot", &format!("x-{round}"), 4);
            let sum = if known { 8 } else { 4 };
            expected.insert(view.ad.clone(), sum);
            let calls = (0..20).map(|call| view.post(&clients[call % 2]));
            for answer in join_all(calls).await {
                assert_eq!((answer.code, answer.json()["total"].as_u64()), (200, Some(sum)));
            }
            // A later call with the same key and another `n`: the first call counts.
            let again = View { n: 1, ..view.clone() };
            assert_eq!(again.count(|| clients[1].clone()).await, Some(sum));
        }
        stores.settles(&clients[0], &expected, LONG).await;
    }
    // The reply of Redis is lost, and the call is repeated at another process.
    for known in [true, false] {
        let view = View::new("bot", if known { "x-0" } else { "new" }, 2);
        node.redis.swallow(view.key.clone(), if known { 1 } else { 2 });
        let sum = expected.entry(view.ad.clone()).or_default();
        *sum += 2;
        assert_eq!(view.count(|| clients[0].clone()).await, Some(*sum));
        assert_eq!(view.count(|| clients[1].clone()).await, Some(*sum));
    }
    assert_eq!(node.redis.swallowed(), 2);
    stores.settles(&clients[0], &expected, LONG).await;
}

#[tokio::test]
async fn an_event_that_is_no_view_becomes_a_dead_letter_and_harms_no_other() {
    let stores = Stores::start(Persistence::Always);
    let node = Node::start(&stores, &[]).await;
    let client = node.client();
    let bad = [
        json!({ "ad": "x", "n": 0 }),
        json!({ "ad": "x", "n": -1 }),
        json!({ "ad": "x", "n": 1_001 }),
        json!({ "ad": "x", "n": "many" }),
        json!({ "ad": "" }),
        json!({ "ad": "é".repeat(65) }),
        json!({ "ad": 7 }),
        json!({}),
        json!(null),
        json!("x"),
        // This event has expired.
        json!({ "ad": "x", "n": 7 }),
    ];
    let mut expected = Sums::new();
    for (at, data) in bad.iter().enumerate() {
        let mut event = json!({
            "specversion": "1.0", "id": at.to_string(), "source": "test", "type": "ad.viewed",
            "botid": "bot", "data": data,
            // A producer set this attribute, which must have no effect.
            "counter": "2026-11-20",
        });
        if data["n"] == 7 {
            event["expirytime"] = json!("2020-01-01T00:00:00Z");
        }
        add(&stores.redis, STREAM, &[event.to_string()]).await;
        stores.publish(&views(&ad("x"), 10)).await;
        *expected.entry(ad("x")).or_default() += 10;
    }
    stores.settles(&client, &expected, LONG).await;
    let dead = letters(&client).await;
    assert_eq!(dead.len(), bad.len(), "{dead:?}");
    // After a redrive they fail in the same way.
    let answer = client.post("/v1/pipelines/counters/dead/redrive").await;
    assert_eq!(answer.json()["redriven"], bad.len(), "{answer:?}");
    eventually(LONG, "they are dead again", async || {
        stores.depth().await == 0 && letters(&client).await.len() == bad.len()
    })
    .await;
    stores.settles(&client, &expected, LONG).await;
}

#[tokio::test]
async fn a_dead_letter_that_can_be_counted_by_now_counts_behind_newer_views() {
    let stores = Stores::start(Persistence::Always);
    let clock = Arc::new(ManualClock::at("2026-11-20T12:00:00Z"));
    let (config, log) = (stores.direct(&[]), Log::default());
    let (its, roles) = (Arc::clone(&clock), Roles::ALL);
    let instance = Instance::start_at(its, roles, &config, log.content()).await;
    let client = instance.client();
    let event = json!({
        "specversion": "1.0", "id": "late", "source": "test", "type": "ad.viewed", "botid": "bot",
        "data": { "ad": "x", "n": 5 }, "expirytime": "2026-11-20T11:00:00Z",
    });
    add(&stores.redis, STREAM, &[event.to_string()]).await;
    stores.publish(&views(&ad("x"), 10)).await;
    let mut expected = Sums::from([(ad("x"), 10)]);
    stores.settles(&client, &expected, LONG).await;
    let dead = letters(&client).await;
    assert_eq!(dead.len(), 1, "{dead:?}");
    // The clock was wrong and is now set right.
    clock.set("2026-11-20T10:00:00Z");
    let id = dead[0]["id"].as_str().unwrap();
    let answer = client.post(&format!("/v1/pipelines/counters/dead/{id}/redrive")).await;
    assert_eq!(answer.json()["redriven"], 1);
    expected.insert(ad("x"), 15);
    stores.settles(&client, &expected, LONG).await;
    assert!(letters(&client).await.is_empty());
    instance.stop().await;
}

#[tokio::test]
async fn an_uncached_total_is_stale_while_its_views_are_being_written() {
    let stores = Stores::start(Persistence::Always);
    let node = Node::start(&stores, &[]).await;
    let client = node.client();
    // Several interceptors, so that a repeated flush is held too.
    let held: Vec<Interceptor> = (0..20)
        .map(|_| node.mongo.intercept(on("update", DAILY), 1, Interception::HoldCommand))
        .collect();
    // Views of the bus cache no total.
    stores.publish(&views(&ad("x"), 10)).await;
    eventually(LONG, "the total is written", async || stores.stored_views().await == 10).await;
    stores.publish(&views(&ad("x"), 5)).await;
    eventually(LONG, "more views are queued", async || stores.depth().await == 15).await;
    let answer = client.get("/v1/bots/bot/counters?ids=x").await;
    assert_eq!(answer.json(), json!({ "totals": { "x": 10 }, "stale": true }));
    held.iter().for_each(Interceptor::release);
    stores.settles(&client, &Sums::from([(ad("x"), 15)]), LONG).await;
    let answer = client.get("/v1/bots/bot/counters?ids=x").await;
    assert_eq!(answer.json(), json!({ "totals": { "x": 15 } }));
}

#[tokio::test]
async fn a_purge_of_views_is_refused_and_takes_none() {
    let stores = Stores::start(Persistence::Always);
    let node = Node::start(&stores, &[]).await;
    let client = node.client();
    let interceptor =
        node.mongo.intercept(on_any("update", "counters_"), 1, Interception::HoldReply);
    stores.publish(&views(&ad("x"), 400)).await;
    assert!(interceptor.catches(LONG).await, "a flush is in flight");
    let answer = client.send("DELETE", "/v1/pipelines/counters/bots/bot/queue", &[], b"").await;
    assert_eq!((answer.code, answer.problem().as_str()), (409, "keeps-views"));
    interceptor.release();
    stores.settles(&client, &Sums::from([(ad("x"), 400)]), LONG).await;
}
