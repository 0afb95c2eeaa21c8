//! Requests for reloads that wait for each other.

use std::time::Duration;

use futures_util::future::join_all;

use super::reload::config;
use crate::support::http::Client;
use crate::support::proxy::distance::Distance;
use crate::support::proxy::{Proxy, ProxyMode};
use crate::support::receiver::Receiver;
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;

const LONG: Duration = Duration::from_secs(30);

#[tokio::test]
async fn requests_that_end_while_they_wait_for_their_turn_reload_nothing() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let proxy = Proxy::start(server.tcp_addr()).await;
    let receiver = Receiver::content().await;
    let text = config(&server, &receiver, &["one"], 5).replace(&server.url(), &proxy.url());
    let process = Served::start(&text).await;
    let client = Client::new(&process.http());
    // The new instance waits for Redis.
    proxy.set(ProxyMode::Hold);
    for _ in 0..4 {
        let answer = client.send("POST", "/v1/reload", &[("x-deadline-ms", "300")], b"").await;
        assert_eq!((answer.code, answer.problem().as_str()), (504, "deadline"), "{answer:?}");
    }
    proxy.set(ProxyMode::Pass);
    let answer = client.post("/v1/reload").await;
    assert_eq!(answer.code, 200, "{answer:?}");
    // The first one had begun, and the second one was next.
    let reloads = process.log().matches("the configuration is reloaded").count();
    assert_eq!(reloads, 3, "{}", process.log());
}

#[tokio::test]
async fn a_reload_that_waits_for_others_is_answered_by_an_instance_that_is_replaced_or_stops() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let distance = Distance::start(server.tcp_addr()).await;
    let receiver = Receiver::content().await;
    let text = config(&server, &receiver, &["one"], 5).replace(&server.url(), &distance.url());
    let mut process = Served::start(&text).await;
    let client = Client::new(&process.http());
    let headers = [("x-deadline-ms", "60000")];
    let ask =
        |times: u32| join_all((0..times).map(|_| client.send("POST", "/v1/reload", &headers, b"")));
    // Each takes about 5 s, and the instance that all reach stops 6 s after the first one.
    distance.set(Duration::from_millis(200));
    for answer in ask(3).await {
        assert_eq!(answer.code, 200, "{answer:?}");
    }
    let stops = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        process.sigterm();
    };
    let (answers, ()) = tokio::join!(ask(2), stops);
    for answer in answers {
        assert_eq!((answer.code, answer.problem().as_str()), (503, "starting"), "{answer:?}");
        let detail = answer.json()["detail"].clone();
        assert_eq!(detail, "this process stops, and nothing changed");
    }
    assert!(process.wait_exit(LONG).is_some_and(|status| status.success()));
}
