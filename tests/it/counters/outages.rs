//! Views of ads while a store is unavailable. They are accepted as long as Redis is available, none
//! is lost, and everything recovers without help.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlane::app::Roles;
use fairlane::clock::{Clock as _, SystemClock};
use redis::AsyncCommands as _;
use serde_json::json;

use crate::support::config::SHARDS;
use crate::support::counter_fleet::{
    Ad, Node, Stores, Sums, View, acknowledged, path, told, total,
};
use crate::support::http::Client;
use crate::support::instance::Instance;
use crate::support::manual_clock::ManualClock;
use crate::support::mongo;
use crate::support::proxy::ProxyMode;
use crate::support::recorder::Log;
use crate::support::redis::Persistence;
use crate::support::served::Served;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);

fn ad(id: &str) -> Ad {
    ("bot".to_owned(), id.to_owned())
}

/// The days of an ad that are not 0, as a process reports them.
async fn days(client: &Client, ad: &Ad) -> BTreeMap<String, u64> {
    let query = "/daily?from=2026-10-01&to=2026-12-31";
    let answer = acknowledged(async || client.get(&path(ad, query)).await).await.json();
    let days = answer["days"].as_array().unwrap();
    assert_eq!(days.len(), 31 + 30 + 31);
    let day = |day: &serde_json::Value| {
        (day["day"].as_str().unwrap().to_owned(), day["views"].as_u64().unwrap())
    };
    days.iter().map(day).filter(|(_, views)| *views > 0).collect()
}

#[tokio::test]
async fn views_of_a_night_without_mongodb_over_two_midnights_are_counted_on_their_days() {
    let mut stores = Stores::start(Persistence::Always);
    let clock = Arc::new(ManualClock::at("2026-11-30T22:30:00Z"));
    // Midnight in Berlin is at 23:00 UTC.
    let config = stores.direct(&[("counters.time_zone", "\"Europe/Berlin\"")]);
    let log = Log::default();
    let instance =
        Instance::start_at(Arc::clone(&clock) as _, Roles::ALL, &config, log.content()).await;
    let client = instance.client();
    let (cached, known) = (ad("cached"), ad("known"));
    assert_eq!(View::new("bot", "cached", 2).count(|| client.clone()).await, Some(2));
    // These views arrive over the bus, which fills no cache.
    stores.publish(&[View::new("bot", "known", 5)]).await;
    let mut expected = Sums::from([(cached.clone(), 2), (known.clone(), 5)]);
    stores.settles(&client, &expected, LONG).await;

    stores.mongo.kill9();
    let mut view = async |ad: &Ad, n: u64| {
        let view = View::new(&ad.0, &ad.1, n);
        let sum = expected.entry(ad.clone()).or_default();
        *sum += n;
        (view.count(|| client.clone()).await, *sum)
    };
    let mut n = 0;
    for time in [
        "2026-11-30T22:59:59Z",
        "2026-11-30T23:00:00Z",
        "2026-12-01T22:59:59Z",
        "2026-12-01T23:00:01Z",
        "2026-12-02T06:00:00Z",
    ] {
        clock.set(time);
        n += 1;
        let (told, sum) = view(&cached, n).await;
        assert_eq!(told, Some(sum), "a cached total at {time}");
        let (told, _) = view(&known, 10 * n).await;
        assert_eq!(told, None, "an unknown total at {time}");
        let (told, _) = view(&ad("new"), n).await;
        assert_eq!(told, None, "nobody can tell whether {time} is its first");
    }
    let told = told(&client, &expected.keys().cloned().collect()).await;
    assert_eq!(told[&cached], Some(17));
    assert_eq!((told[&known], told[&ad("new")]), (None, None));
    let answer = client.get(&path(&cached, "/daily?from=2026-11-01&to=2026-12-01")).await;
    assert_eq!(answer.code, 503);

    stores.mongo.restart(mongo::Options::default());
    stores.settles(&client, &expected, LONG).await;
    let on = |days: [u64; 3]| {
        let names = ["2026-11-30", "2026-12-01", "2026-12-02"].map(str::to_owned);
        names.into_iter().zip(days).filter(|(_, n)| *n > 0).collect::<BTreeMap<_, _>>()
    };
    assert_eq!(days(&client, &cached).await, on([2 + 1, 2 + 3, 4 + 5]));
    assert_eq!(days(&client, &known).await, on([5 + 10, 50, 90]));
    assert_eq!(days(&client, &ad("new")).await, on([1, 5, 9]));
    instance.stop().await;
}

#[tokio::test]
async fn views_that_exceeded_a_quota_in_an_outage_count_on_their_day_after_a_redrive() {
    let mut stores = Stores::start(Persistence::Always);
    let clock = Arc::new(ManualClock::at("2026-11-30T12:00:00Z"));
    let config = stores.direct(&[("quotas.queued_bytes", "2000")]);
    let log = Log::default();
    let instance =
        Instance::start_at(Arc::clone(&clock) as _, Roles::ALL, &config, log.content()).await;
    let client = instance.client();
    stores.mongo.kill9();
    stores.publish(&(0..100).map(|_| View::new("bot", "x", 1)).collect::<Vec<_>>()).await;
    let mut dead = 0;
    eventually(LONG, "some views are queued, and the others are dead letters", async || {
        let answer = client.get("/v1/pipelines/counters/dead?limit=100").await.json();
        dead = answer["dead_letters"].as_array().unwrap().len() as u64;
        stores.depth().await > 0 && stores.depth().await + dead == 100
    })
    .await;
    assert!(dead > 0, "the quota is reached");

    clock.set("2026-12-02T12:00:00Z");
    stores.mongo.restart(mongo::Options::default());
    let mut expected = Sums::from([(ad("x"), 100 - dead)]);
    stores.settles(&client, &expected, LONG).await;
    let answer = client.post("/v1/pipelines/counters/dead/redrive").await;
    assert_eq!(answer.json()["redriven"], dead, "{answer:?}");
    expected.insert(ad("x"), 100);
    stores.settles(&client, &expected, LONG).await;
    let day = BTreeMap::from([("2026-11-30".to_owned(), 100)]);
    assert_eq!(days(&client, &ad("x")).await, day);
    instance.stop().await;
}

/// After a step back, sequences and fences are ahead of the clock, and grow by one each. A fence may be
/// far ahead of the sequences: while MongoDB was unavailable, bots were leased again and again.
#[tokio::test]
async fn views_are_written_although_the_clock_of_redis_was_set_back_by_an_hour() {
    let stores = Stores::start(Persistence::EverySecond);
    let mut connection = stores.redis.connection().await;
    let ahead = SystemClock.now() + Duration::from_secs(3_600);
    let mut set = async |field: &str, time: Duration| {
        for shard in 0..SHARDS {
            let meta = format!("fl:{{counters:{shard}}}:meta");
            let time = time.as_micros().to_string();
            let _: () = connection.hset(meta, field, time).await.unwrap();
        }
    };
    set("seq", ahead).await;
    set("f", ahead).await;
    let node = Node::start(&stores, &[]).await;
    let client = node.client();
    let mut expected = Sums::new();
    for round in 0..3_u32 {
        set("f", ahead + round * Duration::from_secs(10)).await;
        let began = Instant::now();
        let views: Vec<View> =
            (0..50).map(|n| View::new(&format!("bot-{}", n % 5), "x", 1)).collect();
        stores.publish(&views).await;
        for view in &views {
            *expected.entry(view.ad.clone()).or_default() += view.n;
        }
        stores.settles(&client, &expected, LONG).await;
        // Redis may lose what is younger.
        assert!(began.elapsed() >= Duration::from_secs(2), "written after {:?}", began.elapsed());
    }
}

/// While MongoDB is unavailable, `records` views of 200 ads arrive. They are written while new
/// views are answered.
async fn drains(records: usize) {
    let stores = Stores::start(Persistence::EverySecond);
    let node = Node::start(&stores, &[("pipelines.counters.linger", "\"2s\"")]).await;
    node.mongo.set(ProxyMode::Refuse);
    node.mongo.cut();
    let client = node.client();
    let mut expected = Sums::new();
    let mut add = |view: &View| *expected.entry(view.ad.clone()).or_default() += view.n;
    let began = Instant::now();
    for from in (0..records).step_by(10_000) {
        let views: Vec<View> = (from..records.min(from + 10_000))
            .map(|at| View::new(&format!("bot-{}", at % 10), &format!("ad-{}", at % 200), 1))
            .collect();
        stores.publish(&views).await;
        views.iter().for_each(&mut add);
    }
    let minutes = Duration::from_secs(600);
    eventually(minutes, "all are queued", async || stores.depth().await == records as u64).await;
    let queued = began.elapsed();

    node.mongo.set(ProxyMode::Pass);
    let began = Instant::now();
    let mut waited = Vec::new();
    // The pace keeps the new views, which are too young to be written, below the bound.
    let mut pace = tokio::time::interval(Duration::from_millis(10));
    while stores.depth().await > 2_000 {
        pace.tick().await;
        let at = waited.len();
        let view = View::new(&format!("bot-{}", at % 10), &format!("new-{}", at % 20), 1);
        let asked = Instant::now();
        view.count(|| client.clone()).await;
        waited.push(asked.elapsed());
        add(&view);
        assert!(began.elapsed() < minutes, "{} are left", stores.depth().await);
    }
    waited.sort();
    let drained = began.elapsed();
    println!(
        "{records} records queued in {queued:?}, drained in {drained:?}; {} views answered meanwhile, p50 {:?}, p99 {:?}, most {:?}",
        waited.len(),
        waited[waited.len() / 2],
        waited[waited.len() * 99 / 100],
        waited.last()
    );
    stores.settles(&client, &expected, LONG).await;
    // This machine may be busy with other tests.
    assert!(waited[waited.len() / 2] < Duration::from_millis(250), "new views wait");
}

#[tokio::test]
async fn a_backlog_drains_while_new_views_are_answered() {
    drains(20_000).await;
}

#[tokio::test]
#[ignore = "takes minutes; `cargo test --test it -- --ignored a_backlog_of_a_million`"]
async fn a_backlog_of_a_million_views_drains_while_new_views_are_answered() {
    drains(1_000_000).await;
}

async fn code(client: &Client, view: &View) -> u16 {
    view.post(client).await.code
}

async fn query(client: &Client, ids: &str) -> (u16, serde_json::Value) {
    let answer = client.get(&format!("/v1/bots/bot/counters?ids={ids}")).await;
    let body = if answer.code == 200 { answer.json() } else { json!(null) };
    (answer.code, body)
}

#[tokio::test]
async fn without_redis_totals_are_stale_and_views_refused_and_without_both_nothing_ends() {
    let mut stores = Stores::start(Persistence::Always);
    let mut node = Node::start(&stores, &[]).await;
    let client = node.client();
    let (x, y) = (ad("x"), ad("y"));
    assert_eq!(View::new("bot", "x", 2).count(|| client.clone()).await, Some(2));
    stores.publish(&[View::new("bot", "y", 3)]).await;
    let mut expected = Sums::from([(x.clone(), 2), (y.clone(), 3)]);
    stores.settles(&client, &expected, LONG).await;
    let (code_now, body) = query(&client, "x,y,z").await;
    assert_eq!((code_now, &body["totals"]), (200, &json!({ "x": 2, "y": 3, "z": 0 })));
    assert!(body.get("stale").is_none_or(|stale| stale == false), "{body}");

    stores.redis.kill9();
    eventually(LONG, "totals are known to be stale", async || {
        let (code, body) = query(&client, "x,y,z").await;
        code == 200 && body == json!({ "totals": { "x": 2, "y": 3, "z": 0 }, "stale": true })
    })
    .await;
    let refused = View::new("bot", "x", 1);
    assert_eq!(code(&client, &refused).await, 503);
    assert_eq!(client.post(&path(&x, "/reset")).await.code, 503);

    stores.mongo.kill9();
    for _ in 0..2 {
        assert_eq!(code(&client, &refused).await, 503);
        assert_eq!(query(&client, "x").await.0, 503);
        assert_eq!(client.get("/healthz").await.code, 200);
    }
    assert!(node.served.is_running(), "{}", node.served.log());

    // Redis comes back first: cached totals of its previous run are not trusted.
    stores.redis.restart();
    assert_eq!(
        acknowledged(async || refused.post(&client).await).await.json()["total"],
        json!(null)
    );
    *expected.get_mut(&x).unwrap() += 1;
    assert_eq!(total(&client, &x).await, None);
    stores.mongo.restart(mongo::Options::default());
    stores.settles(&client, &expected, LONG).await;
    let told = View::new("bot", "y", 1).count(|| client.clone()).await;
    assert_eq!(told, Some(4));
    expected.insert(y, 4);
    stores.settles(&client, &expected, LONG).await;
}

#[tokio::test]
async fn a_process_starts_without_mongodb_and_counts() {
    let mut stores = Stores::start(Persistence::Always);
    stores.mongo.kill9();
    let config = stores.direct(&[]);
    let mut served = Served::start(&config).await;
    let client = Client::new(&served.http());
    let mut expected = Sums::new();
    for number in 0..20 {
        let view = View::new("bot", &format!("x-{number}"), 3);
        assert_eq!(view.count(|| client.clone()).await, None);
        expected.insert(view.ad, 3);
    }
    assert_eq!(client.get("/readyz").await.code, 200, "degraded is not away");
    stores.mongo.restart(mongo::Options::default());
    stores.settles(&client, &expected, LONG).await;
    eventually(LONG, "the indexes are made when it came", async || {
        stores.indexes("counters_daily").await.len() > 1
    })
    .await;
    assert!(served.is_running());
}
