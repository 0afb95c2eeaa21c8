//! Connections to a Redis that is slow, or frozen for a moment.

use std::time::Duration;

use fairlane::redis::{Link, Target};

use crate::support::config::config;
use crate::support::instance::Instance;
use crate::support::interceptor::Interception;
use crate::support::proxy::{Proxy, ProxyMode, holds};
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);

/// Whether any connection subscribes to a wake channel.
async fn is_subscribed(server: &RedisServer) -> bool {
    server.ask(&["PUBSUB", "CHANNELS"]).await.contains(":wake")
}

#[tokio::test]
async fn a_subscription_that_is_not_answered_is_made_again() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let proxy = Proxy::start(server.tcp_addr()).await;
    let held = proxy.intercept(holds(["SUBSCRIBE"]), 1, Interception::HoldCommand);
    let url = format!("{:?}", proxy.url());
    let config = config(&server, "wakes", &[("redis.url", &url)]);
    let instance = Instance::start(&config, Log::default().content()).await;
    assert!(held.catches(LONG).await, "it subscribes");
    assert!(!is_subscribed(&server).await, "the command is held");
    eventually(LONG, "another connection subscribes", async || is_subscribed(&server).await).await;
    instance.stop().await;
}

#[tokio::test]
async fn a_connection_is_made_although_no_caller_waits_for_all_of_it() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let proxy = Proxy::start(server.tcp_addr()).await;
    // An answer takes 400 ms. The connection needs several before the first command.
    proxy.set(ProxyMode::Delay(Duration::from_millis(200)));
    let target = Target::new(&proxy.url()).unwrap();
    let link = Link::new(target, Vec::new(), 0, Duration::from_secs(60));
    let mut ping = redis::pipe();
    ping.cmd("PING");
    let first = tokio::time::timeout(Duration::from_millis(600), link.run(&ping)).await;
    assert!(first.is_err(), "the first caller gives up");
    eventually(LONG, "a later one finds the connection", async || {
        let call = tokio::time::timeout(Duration::from_millis(600), link.run(&ping));
        call.await.is_ok_and(|answer| answer.is_ok())
    })
    .await;
}
