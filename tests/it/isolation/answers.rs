//! Large answers: requests that wait for their turn.

use std::time::Duration;

use tokio::task::JoinSet;

use crate::support::bus::event;
use crate::support::config::config;
use crate::support::http::{Client, Response};
use crate::support::proxy::distance::Distance;
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::tokens::{Tokens, text};

const ALL: &str = r#"scopes = ["publish", "read", "operate"]"#;
const STRUCTURED: &str = "application/cloudevents+json";

fn tenants() -> Tokens {
    Tokens::new(&[
        ("shop", &format!("{ALL}, bots = [\"shop-*\"]")),
        ("other", &format!("{ALL}, bots = [\"other-*\"]")),
    ])
}

/// The settings of a process with these tokens.
fn settings(server: &RedisServer, tokens: &Tokens) -> String {
    let settings = [("auth.tokens", &*tokens.setting), ("pipelines.test.handler", "\"log\"")];
    config(server, "test", &settings)
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_of_one_token_that_wait_for_their_turn_leave_room_for_other_requests() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let tokens = tenants();
    let far = Distance::start(server.tcp_addr()).await;
    let settings = settings(&server, &tokens).replace(&server.url(), &far.url());
    let process = Served::start(&settings).await;
    let client = Client::new(&process.http());
    let (hostile, quiet) = (client.with_token(&text("shop")), client.with_token(&text("other")));
    assert_eq!(quiet.publish(STRUCTURED, event("other-1", "t", 0)).await.code, 202);
    far.set(Duration::from_millis(60));
    let page = "/pipelines/test/dead?bot=shop-1&reason=zzz";
    for (path, kind) in [
        (page, "text/html; charset=utf-8"),
        ("/pipelines/test", "text/html; charset=utf-8"),
        ("/bots?sort=depth", "text/html; charset=utf-8"),
        ("/v1/pipelines/test/dead", "application/problem+json"),
        ("/v1/events/nothing?bot=shop-1", "application/problem+json"),
    ] {
        let mut asking = JoinSet::new();
        for _ in 0..12 {
            let hostile = hostile.clone();
            asking.spawn(async move { hostile.get(path).await });
        }
        let answers: Vec<Response> = asking.join_all().await;
        let refused: Vec<&Response> = answers.iter().filter(|one| one.code == 429).collect();
        assert!((6..=10).contains(&refused.len()), "{path}: {} of 12", refused.len());
        for one in refused {
            let said = String::from_utf8_lossy(&one.body);
            assert!(said.contains("one after the other"), "{path}: {said}");
            assert_eq!(one.header("retry-after"), Some("1"), "{path}");
            assert_eq!(one.header("content-type"), Some(kind), "{path}");
        }
    }
    let mut asking = JoinSet::new();
    for _ in 0..60 {
        let hostile = hostile.clone();
        asking.spawn(async move { hostile.get(page).await });
    }
    tokio::time::sleep(Duration::from_millis(800)).await;
    for number in 1..=10 {
        let answer = quiet.publish(STRUCTURED, event("other-1", "t", number)).await;
        assert_eq!(answer.code, 202, "{answer:?}");
    }
}
