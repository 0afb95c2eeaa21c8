//! Views of ads while MongoDB is slow: each write shrinks until MongoDB accepts it, abandoned writes do
//! not pile up in the server, and totals are right meanwhile.

use std::pin::pin;
use std::time::{Duration, Instant};

use fairlane::config::MongoUrl;
use fairlane::counters::store::CounterStore;
use fairlane::counters::view::AdId;
use fairlane::id::BotId;
use fairlane::mongo::client::Mongo;
use futures_util::future::{Either, join, join_all, select};

use crate::support::counter_fleet::{Node, Stores, Sums, View, total};
use crate::support::http::Response;
use crate::support::interceptor::{Interception, Interceptor};
use crate::support::mongo::{MongoServer, Options};
use crate::support::mongo_proxy::{MongoProxy, on};
use crate::support::proxy::ProxyMode;
use crate::support::redis::Persistence;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);

/// Publishes `views` views in a row for each of `ads` ads of each of `bots` bots, and waits until
/// all are queued.
async fn queue(stores: &Stores, bots: u64, ads: u64, views: u64) -> Sums {
    let mut expected = Sums::new();
    for bot in 0..bots {
        let views: Vec<View> = (0..ads * views)
            .map(|at| View::new(&format!("bot-{bot}"), &format!("ad-{}", at / views), 1))
            .collect();
        for part in views.chunks(5_000) {
            stores.publish(part).await;
        }
        for view in views {
            *expected.entry(view.ad).or_default() += view.n;
        }
    }
    let records = bots * ads * views;
    eventually(LONG, "all are queued", async || stores.depth().await == records).await;
    expected
}

#[tokio::test]
async fn a_backlog_behind_a_slow_line_is_written_in_portions_that_go_through() {
    let stores = Stores::start(Persistence::Always);
    // A slice has 185 ads, twice what the line carries within the handler timeout.
    let settings = [("pipelines.counters.handler_timeout", "\"3s\"")];
    let node = Node::start(&stores, &settings).await;
    stores.mongo.is_prepared().await;
    node.mongo.set(ProxyMode::Refuse);
    node.mongo.cut();
    let expected = queue(&stores, 2, 300, 27).await;
    node.mongo.set(ProxyMode::Rate(60_000));
    stores.settles(&node.client(), &expected, LONG).await;
}

#[tokio::test]
async fn the_views_of_five_bots_are_written_after_an_outage_within_handlers_of_two_seconds() {
    let stores = Stores::start(Persistence::Always);
    let settings = [
        ("pipelines.counters.handler_timeout", "\"2s\""),
        ("pipelines.counters.workers.max", "16"),
    ];
    let _node = Node::start(&stores, &settings).await;
    stores.mongo.is_prepared().await;
    stores.mongo.sigstop();
    // Many times what this MongoDB writes within a handler.
    let expected = queue(&stores, 5, 1_000, 1).await;
    // The sleep is the fault itself.
    tokio::time::sleep(Duration::from_secs(2)).await;
    stores.mongo.sigcont();
    let (mut least, mut moved) = (u64::MAX, Instant::now());
    eventually(10 * LONG, "all are written", async || {
        let depth = stores.depth().await;
        if depth < least {
            (least, moved) = (depth, Instant::now());
        }
        assert!(moved.elapsed() < LONG, "{depth} are left, and nothing moves");
        depth == 0
    })
    .await;
    assert_eq!(stores.stored().await, (expected.clone(), expected));
}

#[tokio::test]
async fn a_write_that_is_given_up_on_is_waited_for_before_its_bot_writes_again() {
    let stores = Stores::start(Persistence::Always);
    let settings = [
        ("pipelines.counters.handler_timeout", "\"500ms\""),
        ("pipelines.counters.lease_ttl", "\"5s\""),
    ];
    let node = Node::start(&stores, &settings).await;
    stores.mongo.is_prepared().await;
    let held = node.mongo.intercept(on("update", "counters_totals"), 1, Interception::HoldCommand);
    let again = node.mongo.intercept(on("update", "counters_daily"), 2, Interception::Watch);
    let mut expected = Sums::new();
    for n in 1..=3 {
        let view = View::new("bot", "ad", n);
        view.count(|| node.client()).await;
        *expected.entry(view.ad).or_default() += n;
    }
    assert!(held.catches(LONG).await);
    // Several handlers start and end.
    let failure = "/v1/pipelines/counters/bots/bot";
    eventually(LONG, "it is tried again", async || {
        let answer = node.client().get(failure).await;
        String::from_utf8_lossy(&answer.body).contains("still in progress in MongoDB")
    })
    .await;
    assert!(!again.catches(Duration::from_secs(2)).await, "a second write was sent");
    assert!(held.completes(LONG).await);
    stores.settles(&node.client(), &expected, LONG).await;
}

#[tokio::test]
async fn a_total_is_right_while_a_part_of_the_queued_views_of_its_bot_is_written() {
    let stores = Stores::start(Persistence::Always);
    let node = Node::start(&stores, &[("pipelines.counters.batch", "2")]).await;
    let client = node.client();
    // Views from the bus do not cache the total, so it is the sum of the stored and the queued ones.
    let first = View::new("bot", "ad", 7);
    let ad = first.ad.clone();
    stores.publish(&[first]).await;
    let mut expected = Sums::from([(ad.clone(), 7)]);
    stores.settles(&client, &expected, LONG).await;

    assert_eq!(client.post("/v1/pipelines/counters/pause").await.code, 204);
    let views: Vec<View> = (1..=5).map(|n| View::new("bot", "ad", n)).collect();
    stores.publish(&views).await;
    eventually(LONG, "all are queued", async || stores.depth().await == 5).await;
    expected.insert(ad.clone(), 7 + 15);
    // The first slice is written and leaves the queue. The write of the second one is held.
    let held = node.mongo.intercept(on("update", "counters_totals"), 2, Interception::HoldCommand);
    assert_eq!(client.post("/v1/pipelines/counters/resume").await.code, 204);
    assert!(held.catches(LONG).await);
    let depth = stores.depth().await;
    assert!((1..5).contains(&depth), "{depth}");
    let mut told = None;
    eventually(LONG, "the total is known", async || {
        told = total(&client, &ad).await;
        told.is_some()
    })
    .await;
    assert_eq!(told, Some(7 + 15));
    assert!(held.completes(LONG).await);
    stores.settles(&client, &expected, LONG).await;
}

#[tokio::test]
async fn reads_of_few_totals_do_not_wait_for_those_of_many() {
    let server = MongoServer::start(Options::default());
    let proxy = MongoProxy::start_before(server.address()).await;
    let url = MongoUrl::parse(&proxy.mongo_url()).unwrap();
    let store = CounterStore::new(Mongo::open(&url, "fairlane").await.unwrap());
    let bot = BotId::parse("bot").unwrap();
    let ads: Vec<AdId> = (0..11).map(|n| AdId::parse(&format!("ad-{n}")).unwrap()).collect();
    for ads in [&ads[..], &ads[1..]] {
        let answers = async || store.totals(&bot, ads).await.is_ok();
        eventually(LONG, "MongoDB answers", answers).await;
    }
    // As many queries as may be in flight.
    let set = |_| proxy.intercept(on("find", "counters_totals"), 1, Interception::HoldReply);
    let held: Vec<Interceptor> = (0..4).map(set).collect();
    let many = join_all(held.iter().map(|_| store.totals(&bot, &ads)));
    let few = async {
        for held in &held {
            assert!(held.catches(LONG).await);
        }
        store.totals(&bot, &ads[1..]).await
    };
    let (_, few) = join(many, few).await;
    few.unwrap();
}

#[tokio::test]
async fn reads_of_some_totals_of_a_bot_do_not_wait_for_each_other() {
    let stores = Stores::start(Persistence::Always);
    let node = Node::start(&stores, &[("counters.read_timeout", "\"10s\"")]).await;
    let ids: Vec<String> = (0..11).map(|n| format!("ad-{n}")).collect();
    let path = format!("/v1/bots/bot/counters?ids={}", ids.join(","));
    let (one, other) = (node.client(), node.client());
    let is_known = |answer: &Response| answer.code == 200 && answer.json()["totals"]["ad-0"] == 0;
    eventually(LONG, "totals are known", async || is_known(&one.get(&path).await)).await;
    let held = node.mongo.intercept(on("find", "counters_totals"), 1, Interception::HoldReply);
    let first = pin!(one.get(&path));
    let second = pin!(async {
        assert!(held.catches(LONG).await);
        other.get(&path).await
    });
    let Either::Right((second, _)) = select(first, second).await else {
        panic!("the first one ended first")
    };
    assert!(is_known(&second), "{second:?}");
}
