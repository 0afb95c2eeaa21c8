//! Troubles of Redis and MongoDB.

use std::time::{Duration, Instant};

use super::{Found, LONG, SAFE, Scene, Trouble};
use crate::support::config::config;
use crate::support::counter_fleet::Stores;
use crate::support::disk::Full;
use crate::support::mongo;
use crate::support::proxy::distance::Distance;
use crate::support::redis::{Persistence, RedisServer};
use crate::support::wait::eventually;

const ALL: &str = "ingest,work,http,schedule";

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_redis_shows_within_seconds() {
    let server = RedisServer::start(SAFE);
    let proxy = Distance::start(server.tcp_addr()).await;
    let url = format!("{:?}", proxy.url());
    let config =
        config(&server, "slow", &[("redis.url", &url), ("pipelines.slow.handler", "\"log\"")]);
    let scene = Scene::start(&[(&config, ALL)]).await;
    let trouble = Trouble {
        name: "Redis is slow",
        code: "redis-slow",
        words: "Redis is slow: a round trip takes",
        remedy: "SLOWLOG GET 10",
        alert: "FairlaneRedisSlow",
        besides: &["not-seen"],
        alert_ends: false,
        ..Trouble::default()
    };
    scene.is_quiet(&trouble).await;
    let began = Instant::now();
    proxy.set(Duration::from_millis(150));
    scene.shows(&trouble, began).await;
    proxy.set(Duration::ZERO);
    scene.ends(&trouble).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_redis_shows_within_seconds() {
    let server = RedisServer::start(SAFE);
    let mut connection = server.connection().await;
    let () = redis::cmd("CONFIG")
        .arg(&["SET", "maxmemory", "32mb"])
        .query_async(&mut connection)
        .await
        .unwrap();
    let config = config(&server, "full", &[("pipelines.full.handler", "\"log\"")]);
    let scene = Scene::start(&[(&config, ALL)]).await;
    let trouble = Trouble {
        name: "Redis is full",
        code: "redis-full",
        words: "Redis is full: it refuses new events",
        remedy: "raise maxmemory",
        alert: "FairlaneRedisFull",
        besides: &[],
        ..Trouble::default()
    };
    scene.is_quiet(&trouble).await;
    let mut filled = 0;
    loop {
        let mut fill = redis::cmd("SET");
        fill.arg(format!("filler:{filled}")).arg(vec![b'x'; 64 << 10]);
        if fill.query_async::<()>(&mut connection).await.is_err() {
            break;
        }
        filled += 1;
    }
    assert!(filled > 100, "{filled}");
    // The buffer of the last command made it full. Without it, less than what counts as full is used.
    let began = Instant::now();
    let mut lower = redis::cmd("CONFIG");
    let () = lower.arg(&["SET", "maxmemory", "31mb"]).query_async(&mut connection).await.unwrap();
    scene.shows(&trouble, began).await;
    for nth in 0..filled {
        let () =
            redis::Cmd::del(format!("filler:{nth}")).query_async(&mut connection).await.unwrap();
    }
    scene.ends(&trouble).await;
}

/// It answers, so the remedy is not to bring it back.
#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_cannot_write_to_its_disk_shows_within_seconds() {
    let server = RedisServer::start(SAFE);
    let config = config(&server, "disk", &[("pipelines.disk.handler", "\"log\"")]);
    let scene = Scene::start(&[(&config, ALL)]).await;
    let trouble = Trouble {
        name: "The disk of Redis is full",
        code: "redis-disk-full",
        words: "Redis cannot write its snapshot, and refuses events",
        remedy: "free space on its disk",
        alert: "FairlaneRedisDown",
        ..Trouble::default()
    };
    scene.is_quiet(&trouble).await;
    let mut full = Full::fill(server.connection().await).await;
    scene.shows(&trouble, Instant::now()).await;
    // A process that cannot register counts as gone after 16 s, but it still runs.
    tokio::time::sleep(Duration::from_secs(20)).await;
    scene.agree(&trouble).await;
    let ready = scene.looking.get("/readyz").await;
    assert_eq!((ready.code, &ready.json()["redis"]), (200, &"up".into()), "{ready:?}");
    // It refuses the scripts of new connections.
    full.cut_others().await;
    // A finding that needs those scripts would be gone by then.
    tokio::time::sleep(Duration::from_secs(3)).await;
    eventually(LONG, "it is still told after new connections", async || {
        Found::of(&scene.listed().await["problems"], &trouble).it.is_some()
    })
    .await;
    full.free().await;
    scene.ends(&trouble).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unavailable_mongodb_shows_within_seconds() {
    let mut stores = Stores::start(Persistence::EverySecond);
    let scene = Scene::start(&[(&stores.direct(&[]), ALL)]).await;
    let trouble = Trouble {
        name: "MongoDB is unavailable",
        code: "mongodb-unavailable",
        words: "MongoDB does not answer",
        remedy: "bring MongoDB back",
        alert: "FairlaneMongoDown",
        besides: &["views-late"],
        ..Trouble::default()
    };
    scene.is_quiet(&trouble).await;
    let began = Instant::now();
    stores.mongo.kill9();
    scene.shows(&trouble, began).await;
    stores.mongo.restart(mongo::Options::default());
    scene.ends(&trouble).await;
}

/// A frozen server accepts connections and never answers.
#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_redis_shows_within_seconds_and_no_command_hangs() {
    let server = RedisServer::start(SAFE);
    let config = config(&server, "frozen", &[("pipelines.frozen.handler", "\"log\"")]);
    let scene = Scene::start(&[(&config, ALL)]).await;
    let trouble = Trouble {
        name: "Redis is frozen",
        code: "redis-unavailable",
        words: "Redis does not answer",
        remedy: "bring Redis back",
        alert: "FairlaneRedisDown",
        exit: 69,
        ..Trouble::default()
    };
    scene.is_quiet(&trouble).await;
    server.sigstop();
    let began = Instant::now();
    scene.shows(&trouble, began).await;
    let began = Instant::now();
    let ran = scene.ran(&["status"]).await;
    let (took, stall) = (began.elapsed(), scene.stalls.longest());
    assert!(took < LONG / 10 + 2 * stall, "{took:?}, stalled for {stall:?}: {ran:?}");
    assert!(ran.out.contains("no answer from Redis at"), "{ran:?}");
    println!("TROUBLE status of a frozen Redis took {:.1} s", took.as_secs_f64());
    server.sigcont();
    scene.ends(&trouble).await;
}
