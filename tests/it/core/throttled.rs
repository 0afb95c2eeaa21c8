//! Bots that their rate holds back, and those that wait for something else although they have a rate.

use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::handler::Failure;
use fairlane::id::BotId;
use fairlane::queue::{BotChange, BotState};
use fairlane::rate::Change;

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);
const HOUR: Duration = Duration::from_secs(3_600);

async fn two_events(server: &RedisServer) {
    add(server, STREAM, &[event("bot", "test", 0), event("bot", "test", 1)]).await;
}

#[tokio::test]
async fn a_bot_with_a_rate_whose_handler_fails_makes_its_pipeline_late() {
    let server = RedisServer::start(Options::default());
    let settings = [
        ("pipelines.failing.rate", "\"1/h\""),
        ("pipelines.failing.burst", "3"),
        ("pipelines.failing.batch", "1"),
    ];
    let handler = Log::default().handler(|_| async { Err(Failure::transient(0, "it fails")) });
    let instance = Instance::start(&config(&server, "failing", &settings), handler).await;
    let queue = instance.queue("failing");
    two_events(&server).await;
    eventually(LONG, "it waits for tokens and fails", async || {
        let view = queue.view(SystemClock.now() + HOUR / 2).await.unwrap();
        (view.parked, view.throttled) == (1, 1) && view.oldest_age_ms > 1_000_000
    })
    .await;
    instance.stop().await;
}

#[tokio::test]
async fn a_bot_with_a_rate_that_waits_for_a_worker_makes_its_pipeline_late() {
    let server = RedisServer::start(Options::default());
    let settings = [("pipelines.unserved.rate", "\"1/h\""), ("pipelines.unserved.batch", "1")];
    let config = config(&server, "unserved", &settings);
    let instance = Instance::start(&config, Log::default().content()).await;
    let (queue, bot) = (instance.queue("unserved"), BotId::parse("bot").unwrap());
    let view = async |at| queue.view(at).await.unwrap();
    two_events(&server).await;
    eventually(LONG, "it waits for tokens", async || {
        let view = view(SystemClock.now()).await;
        (view.depth, view.parked, view.throttled) == (1, 1, 1)
    })
    .await;
    // It is ready now, and no worker takes it.
    queue.pause(None).await.unwrap();
    let burst = BotChange { burst: Change::To(2), ..BotChange::default() };
    assert!(queue.set(&bot, burst).await.unwrap());
    let state = queue.view_bot(&bot, SystemClock.now()).await.unwrap().state;
    assert_eq!(state, BotState::Ready);
    assert_eq!(view(SystemClock.now() + HOUR / 2).await.oldest_age_ms, 0, "its bucket is not full");
    let late = view(SystemClock.now() + 2 * HOUR).await;
    assert!(late.throttled == 1 && late.oldest_age_ms > 7_000_000, "{late:?}");
    instance.stop().await;
}
