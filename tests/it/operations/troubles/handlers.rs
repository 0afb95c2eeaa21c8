//! Troubles of handlers, bots and operators.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::{SAFE, Scene, Trouble};
use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::receiver::{Call, Receiver, Reply};
use crate::support::redis::{RedisServer, free_port};

const ALL: &str = "ingest,work,http,schedule";

/// Settings of a pipeline that pushes to `url`.
fn pushing(server: &RedisServer, pipeline: &str, url: &str) -> String {
    let url = format!("{url:?}");
    let of = |key: &str| format!("pipelines.{pipeline}.{key}");
    let (handler, to, attempts) = (of("handler"), of("url"), of("max_attempts"));
    let settings = [(&*handler, "\"push\""), (&*to, &*url), (&*attempts, "100000")];
    config(server, pipeline, &settings)
}

async fn publish(server: &RedisServer, bots: &[&str]) {
    let events: Vec<_> = bots.iter().enumerate().map(|(id, bot)| event(bot, "t", id)).collect();
    add(server, STREAM, &events).await;
}

/// A receiver that answers 500 while the switch is on.
async fn switched() -> (Receiver, Arc<AtomicBool>) {
    let broken = Arc::new(AtomicBool::new(false));
    let is_broken = Arc::clone(&broken);
    let answer = move |_: Call| {
        let status = if is_broken.load(Ordering::Relaxed) { 500 } else { 200 };
        async move { Reply::new(status, "") }
    };
    (Receiver::start(answer).await, broken)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_fails_every_call_shows_within_seconds() {
    let server = RedisServer::start(SAFE);
    let (receiver, broken) = switched().await;
    let scene = Scene::start(&[(&pushing(&server, "billing", &receiver.url()), ALL)]).await;
    let trouble = Trouble {
        name: "a handler fails every call",
        code: "pipeline-fails",
        pipeline: "billing",
        words: "pipeline billing fails",
        remedy: "fairlane bots show --pipeline billing shop-1",
        alert: "FairlanePipelineFails",
        besides: &["host-unavailable"],
        alert_ends: false,
        ..Trouble::default()
    };
    scene.is_quiet(&trouble).await;
    broken.store(true, Ordering::Relaxed);
    let began = Instant::now();
    publish(&server, &["shop-1"]).await;
    scene.shows(&trouble, began).await;
    broken.store(false, Ordering::Relaxed);
    scene.ends(&trouble).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_is_unavailable_shows_within_seconds() {
    let server = RedisServer::start(SAFE);
    let address = format!("127.0.0.1:{}", free_port());
    let url = format!("http://{address}/hook");
    let scene = Scene::start(&[(&pushing(&server, "orders", &url), ALL)]).await;
    let trouble = Trouble {
        name: "the receiver is unavailable",
        code: "pipeline-fails",
        pipeline: "orders",
        words: "pipeline orders fails",
        remedy: "repair the service that its handler calls",
        alert: "FairlanePipelineFails",
        besides: &["host-unavailable"],
        alert_ends: false,
        ..Trouble::default()
    };
    scene.is_quiet(&trouble).await;
    let began = Instant::now();
    publish(&server, &["shop-1"]).await;
    scene.shows(&trouble, began).await;
    let _receiver =
        Receiver::start_at(address.parse().unwrap(), |_| async { Reply::new(200, "") }).await;
    scene.ends(&trouble).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_pipeline_shows_within_seconds() {
    let server = RedisServer::start(SAFE);
    let receiver = Receiver::content().await;
    let scene = Scene::start(&[(&pushing(&server, "mails", &receiver.url()), ALL)]).await;
    let trouble = Trouble {
        name: "a pipeline is paused",
        code: "pipeline-paused",
        pipeline: "mails",
        words: "pipeline mails is paused",
        remedy: "fairlane pipelines resume mails",
        alert: "FairlanePipelinePaused",
        alert_ends: false,
        ..Trouble::default()
    };
    scene.is_quiet(&trouble).await;
    let began = Instant::now();
    scene.run(&["pipelines", "pause", "mails"]).await;
    scene.shows(&trouble, began).await;
    scene.run(&["pipelines", "resume", "mails"]).await;
    scene.ends(&trouble).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_always_fails_shows_as_a_dead_letter_within_seconds() {
    let server = RedisServer::start(SAFE);
    let receiver = Receiver::start(async |call: Call| {
        let status = if call.ids().iter().any(|id| id == "poison") { 500 } else { 200 };
        Reply::new(status, "no such product")
    })
    .await;
    let url = format!("{:?}", receiver.url());
    let config = config(
        &server,
        "stock",
        &[
            ("pipelines.stock.handler", "\"push\""),
            ("pipelines.stock.url", &url),
            ("pipelines.stock.max_attempts", "3"),
        ],
    );
    let scene = Scene::start(&[(&config, ALL)]).await;
    let trouble = Trouble {
        name: "an event always fails",
        code: "dead-letters",
        pipeline: "stock",
        words: "pipeline stock has 1 dead letter",
        remedy: "fairlane dead list --pipeline stock",
        alert: "FairlaneDeadLettersGrowing",
        besides: &["pipeline-fails", "bots-fail"],
        alert_ends: false,
        ..Trouble::default()
    };
    scene.is_quiet(&trouble).await;
    let began = Instant::now();
    add(&server, STREAM, &[event("shop-1", "t", "poison")]).await;
    scene.shows(&trouble, began).await;
    scene.run(&["dead", "drop", "--all", "--yes", "--pipeline", "stock"]).await;
    // The next call succeeds.
    add(&server, STREAM, &[event("shop-1", "t", "fine")]).await;
    scene.ends(&trouble).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bot_that_its_rate_holds_back_shows_within_seconds() {
    let server = RedisServer::start(SAFE);
    let receiver = Receiver::content().await;
    let scene = Scene::start(&[(&pushing(&server, "texts", &receiver.url()), ALL)]).await;
    scene.run(&["bots", "set", "shop-1", "--rate", "1/h", "--burst", "1"]).await;
    let trouble = Trouble {
        name: "a bot is throttled by its rate",
        code: "bots-throttled",
        pipeline: "texts",
        words: "in pipeline texts the rate holds back 1 bot; bot shop-1 for",
        remedy: "fairlane bots set --pipeline texts shop-1 --rate RATE",
        alert: "FairlaneBotsThrottled",
        alert_ends: false,
        ..Trouble::default()
    };
    scene.is_quiet(&trouble).await;
    let began = Instant::now();
    publish(&server, &["shop-1", "shop-1", "shop-1"]).await;
    scene.shows(&trouble, began).await;
    scene.run(&["bots", "set", "shop-1", "--rate", "unlimited", "--burst", "default"]).await;
    scene.ends(&trouble).await;
}
