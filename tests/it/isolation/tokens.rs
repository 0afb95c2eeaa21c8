//! Tokens: what they prove, what they allow, and what they tell of other tenants.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use fairlane::app::Roles;
use fairlane::handler::Failure;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::support::admission::{admitted, hang};
use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::http::{Client, Response};
use crate::support::instance::Instance;
use crate::support::manual_clock::ManualClock;
use crate::support::push::Push;
use crate::support::receiver::Reply;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::tokens::{Tokens, text};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(20);
const ALL: &str = r#"scopes = ["publish", "read", "operate"]"#;
const FORM: (&str, &str) = ("content-type", "application/x-www-form-urlencoded");
const JSON: (&str, &str) = ("content-type", "application/json");

/// Three tenants, and an operator.
fn tenants() -> Tokens {
    Tokens::new(&[
        ("third", &format!("{ALL}, bots = [\"third-*\"]")),
        ("shop", &format!("{ALL}, bots = [\"shop-*\"]")),
        ("other", &format!("{ALL}, bots = [\"other-*\"]")),
        ("root", &format!("{ALL}, bots = [\"*\"]")),
    ])
}

/// An answer without what tells the request itself.
fn without(answer: &Response, id: &str) -> (u16, String) {
    (answer.code, String::from_utf8_lossy(&answer.body).replace(id, "ID"))
}

#[tokio::test]
async fn ids_of_other_bots_are_answered_as_unknown_ones() {
    let (server, tokens) = (RedisServer::start(Options::default()), tenants());
    let settings = [
        ("auth.tokens", &*tokens.setting),
        ("pipelines.notifications.enabled", "true"),
        ("callbacks.allow_nets", "[\"127.0.0.1\"]"),
    ];
    let handler =
        Log::default().handler(|_| async { Err(Failure::permanent(0, "a reason of the shop")) });
    let instance = Instance::start(&config(&server, "test", &settings), handler).await;
    let client = instance.client();
    let by = |name: &str| client.with_token(&text(name));
    add(&server, STREAM, &[event("shop-1", "t", 1)]).await;
    let dead = async |name: &str| {
        by(name).get("/v1/pipelines/test/dead").await.json()["dead_letters"].clone()
    };
    eventually(LONG, "it is dead", async || dead("shop").await[0]["id"].is_string()).await;
    let letter = dead("shop").await[0]["id"].as_str().unwrap().to_owned();
    assert_eq!(dead("other").await, json!([]));
    let body = json!({ "bot": "shop-1", "delay": 3_600, "url": "http://127.0.0.1:8088/" });
    let body = body.to_string();
    let accepted = by("shop").send("POST", "/send_delayed", &[JSON], body.as_bytes()).await;
    let notification = accepted.header("x-event-id").expect("it is accepted").to_owned();

    let change = (&[JSON][..], &b"{\"delay\":1}"[..]);
    let none = (&[][..], &b""[..]);
    let unknown_letter = "0.1700000000000-0";
    let unknown_notification = "0.0192f1b0c1d27c3e8f00112233445566";
    for (method, path, (headers, body), id, unknown) in [
        ("GET", "/v1/pipelines/test/dead/ID", none, &letter, unknown_letter),
        ("DELETE", "/v1/pipelines/test/dead/ID", none, &letter, unknown_letter),
        ("POST", "/v1/pipelines/test/dead/ID/redrive", none, &letter, unknown_letter),
        ("GET", "/v1/notifications/ID", none, &notification, unknown_notification),
        ("DELETE", "/v1/notifications/ID", none, &notification, unknown_notification),
        ("PATCH", "/v1/notifications/ID", change, &notification, unknown_notification),
    ] {
        let ask =
            async |id: &str| by("other").send(method, &path.replace("ID", id), headers, body).await;
        let (of_another, of_nobody) = (ask(id).await, ask(unknown).await);
        assert_eq!(of_nobody.code, 404, "{method} {path}: {of_nobody:?}");
        assert_eq!(without(&of_another, id), without(&of_nobody, unknown), "{method} {path}");
        let names = |answer: &Response| answer.header_names();
        assert_eq!(names(&of_another), names(&of_nobody), "{method} {path}");
    }
    let pages = [
        ("GET", "/pipelines/test/dead/ID"),
        ("POST", "/pipelines/test/dead/ID/redrive"),
        ("POST", "/pipelines/test/dead/ID/drop"),
        ("POST", "/notifications/dead/ID/redrive"),
    ];
    for (method, path) in pages {
        let ask =
            async |id: &str| by("other").send(method, &path.replace("ID", id), &[FORM], b"").await;
        let (of_another, of_nobody) = (ask(&letter).await, ask(unknown_letter).await);
        assert_eq!(of_nobody.code, 404, "{method} {path}: {of_nobody:?}");
        let same = (without(&of_another, &letter), without(&of_nobody, unknown_letter));
        assert_eq!(same.0, same.1, "{method} {path}");
    }
    // Nothing was done to them.
    let shown = by("shop").get(&format!("/v1/pipelines/test/dead/{letter}")).await;
    assert_eq!((shown.code, shown.json()["bot"].clone()), (200, json!("shop-1")));
    let shown = by("root").get(&format!("/v1/notifications/{notification}")).await;
    assert_eq!(shown.json()["state"], "scheduled");
    instance.stop().await;
}

#[tokio::test]
async fn a_tenant_resets_the_weight_of_its_bots_and_does_not_raise_it() {
    let (server, tokens) = (RedisServer::start(Options::default()), tenants());
    let setting = tokens.and("trusted", &format!("{ALL}, bots = [\"shop-*\"], max_weight = 5"));
    let config = config(&server, "test", &[("auth.tokens", &setting)]);
    let instance = Instance::start(&config, Log::default().content()).await;
    let client = instance.client();
    let path = "/v1/pipelines/test/bots/shop-1";
    let set = async |name: &str, weight: u32| {
        let (client, body) = (client.with_token(&text(name)), json!({ "weight": weight }));
        client.send("PUT", path, &[JSON], body.to_string().as_bytes()).await
    };
    let weight = async || client.with_token(&text("root")).get(path).await.json()["weight"].clone();
    for (name, wanted, code) in [
        ("root", 1_000, 204),
        ("shop", 2, 403),
        ("shop", 1_000, 403),
        ("trusted", 6, 403),
        ("trusted", 5, 204),
        ("shop", 5, 403),
        ("shop", 1, 204),
    ] {
        let before = weight().await;
        let answer = set(name, wanted).await;
        assert_eq!(answer.code, code, "{name} {wanted}: {answer:?}");
        if code == 403 {
            let detail = answer.json()["detail"].as_str().unwrap().to_owned();
            assert!(detail.contains("max_weight"), "{detail}");
        }
        let expected = if code == 204 { json!(wanted) } else { before };
        assert_eq!(weight().await, expected, "{name} {wanted}");
    }
    instance.stop().await;
}

/// Sends requests of a hostile client while capacity is short. Returns how many requests were refused
/// for their share: of two quiet tenants, and of the hostile client.
async fn refused_for_share(hostile: impl Fn(&Client, u64) -> (Client, String)) -> (usize, usize) {
    let is_refused = |answer: &Response| answer.header("x-shed-reason") == Some("share");
    let (server, tokens) = (RedisServer::start(Options::default()), tenants());
    let settings = [
        ("auth.tokens", &*tokens.setting),
        ("admission.limit_max", "8"),
        ("pipelines.test.handler", "\"log\""),
    ];
    let process = Served::start(&config(&server, "test", &settings)).await;
    let client = Client::new(&process.http());
    let root = client.with_token(&text("root"));
    let over = Arc::new(AtomicBool::new(false));
    // Two tenants that send equally much: none of them is heavy.
    let mut quiet_ones = JoinSet::new();
    for name in ["shop", "third"] {
        let (quiet, over) = (client.with_token(&text(name)), Arc::clone(&over));
        quiet_ones.spawn(async move {
            let mut refused = 0;
            while !over.load(Ordering::Relaxed) {
                refused += usize::from(is_refused(&quiet.get("/v1/admission").await));
                // A refusal comes at once: without a pause, who is refused first sends the most.
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            refused
        });
    }
    let mut attack = JoinSet::new();
    for first in 0..10 {
        let requests: Vec<_> = (0..2_000).map(|n| hostile(&client, n * 10 + first)).collect();
        let over = Arc::clone(&over);
        attack.spawn(async move {
            let mut refused = 0;
            for (client, path) in requests.into_iter().cycle() {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                refused += usize::from(is_refused(&client.get(&path).await));
            }
            refused
        });
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    // Capacity is short while these wait for Redis.
    server.sigstop();
    let mut hanging = JoinSet::new();
    for _ in 0..6 {
        let root = root.clone();
        hanging.spawn(async move { root.get("/v1/pipelines/test").await });
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    server.sigcont();
    over.store(true, Ordering::Relaxed);
    hanging.join_all().await;
    let of_hostile = attack.join_all().await.into_iter().sum();
    (quiet_ones.join_all().await.into_iter().sum(), of_hostile)
}

#[tokio::test]
async fn a_token_that_floods_is_refused_for_its_share_and_quiet_ones_are_not() {
    let flood =
        |client: &Client, _: u64| (client.with_token(&text("other")), "/v1/admission".to_owned());
    let (of_quiet, of_hostile) = refused_for_share(flood).await;
    assert!(of_quiet == 0 && of_hostile > 0, "{of_quiet} quiet, {of_hostile} of the flood");
}

#[tokio::test]
async fn random_tokens_are_no_callers_and_make_no_tenant_look_heavy() {
    let refused = refused_for_share(|client, n| {
        (client.with_token(&format!("wrong-0123456789-{n}")), "/v1/admission".to_owned())
    });
    assert_eq!(refused.await.0, 0);
}

#[tokio::test]
async fn invented_bots_are_no_callers_and_make_no_tenant_look_heavy() {
    for bot in ["other", "unknown"] {
        let refused = refused_for_share(|client, n| {
            (client.with_token(&text("other")), format!("/v1/admission?bot={bot}-{n}"))
        });
        assert_eq!(refused.await.0, 0, "{bot}");
    }
}

#[tokio::test]
async fn bots_of_others_in_a_path_are_neither_charged_nor_told_of() {
    let (server, tokens) = (RedisServer::start(Options::default()), tenants());
    let settings = [
        ("auth.tokens", &*tokens.setting),
        ("admission.bot_rate", "1"),
        ("admission.limit_max", "8"),
        ("pipelines.test.handler", "\"log\""),
    ];
    let process = Served::start(&config(&server, "test", &settings)).await;
    let by = |name: &str| Client::new(&process.http()).with_token(&text(name));
    for _ in 0..200 {
        let answer = by("other").get("/v1/pipelines/test/bots/shop-1").await;
        assert_eq!(answer.code, 403);
    }
    server.sigstop();
    let hanging = hang(&process, &by("root"), 6).await;
    // The bot has used nothing of its quota yet: it is let in, and waits for Redis.
    let headers = [("x-deadline-ms", "700")];
    let own = by("shop").send("GET", "/v1/pipelines/test/bots/shop-1", &headers, b"").await;
    server.sigcont();
    hanging.join_all().await;
    assert_eq!((own.code, own.header("x-shed-reason")), (504, Some("deadline")));
    let seen = by("shop").get("/v1/admission").await.json();
    let reasons = seen["top_bots"][0]["reasons"].clone();
    assert_eq!(reasons, json!([{ "reason": "deadline", "requests": 1 }]), "{seen}");
}

#[tokio::test]
async fn a_lease_that_nobody_has_is_no_critical_request() {
    let push = Push::new(&[], |_| async { Reply::new(202, "") }).await;
    push.publish("b", 0..1).await;
    let process = push.serve().await;
    let client = Client::new(&process.http());
    let critical = async || admitted(&process, "p0").await;
    let call = push.calls(1).await[0].clone();
    let lease = call.text("lease");
    let before = critical().await;
    for wrong in ["x", &lease[1..], "%00", &"A".repeat(900)] {
        let answer = client.post(&format!("/v1/leases/{wrong}/complete")).await;
        assert_eq!((answer.code, answer.problem().as_str()), (404, "no-lease"), "{wrong}");
        let body = b"{\"ack\":1}";
        let path = format!("/v1/leases/{wrong}/fail");
        let answer = client.send("POST", &path, &[JSON], body).await;
        assert_eq!((answer.code, answer.problem().as_str()), (404, "no-lease"), "{wrong}");
    }
    assert!((critical().await - before).abs() < 0.5, "strangers take no place of receivers");
    eventually(LONG, "the lease is handed over", async || push.open().await == 1).await;
    // However its name is written.
    let first = lease.as_bytes()[0];
    let path = format!("/v1/leases/%{first:02x}{}/extend", &lease[1..]);
    assert_eq!(client.post(&path).await.code, 200);
    assert_eq!(client.post(&format!("/v1/leases/{lease}/complete")).await.code, 204);
    assert!((critical().await - before - 2.0).abs() < 0.5);
}

async fn login(client: &Client, name: &str) -> String {
    let body = format!("token={}", text(name));
    let answer = client.send("POST", "/login", &[FORM], body.as_bytes()).await;
    assert_eq!(answer.code, 303, "{answer:?}");
    answer.header("set-cookie").unwrap().split(';').next().unwrap().to_owned()
}

#[tokio::test]
async fn a_browser_keeps_a_session_that_is_not_the_token_and_ends_after_twelve_hours() {
    let (server, tokens) = (RedisServer::start(Options::default()), tenants());
    let clock = Arc::new(ManualClock::at("2026-11-20T12:00:00Z"));
    let config_of = |setting: &str| config(&server, "test", &[("auth.tokens", setting)]);
    let start = async |setting: &str| {
        let clock = Arc::clone(&clock);
        Instance::start_at(clock, Roles::ALL, &config_of(setting), Log::default().content()).await
    };
    let (first, second) = (start(&tokens.setting).await, start(&tokens.setting).await);
    let cookie = login(&first.client(), "shop").await;
    let (_, session) = cookie.split_once('=').unwrap();
    for hidden in [text("shop"), BASE64_URL_SAFE_NO_PAD.encode(text("shop"))] {
        assert!(!cookie.contains(&hidden), "{cookie}");
        let decoded = BASE64_URL_SAFE_NO_PAD.decode(session).unwrap();
        assert!(!String::from_utf8_lossy(&decoded).contains(&hidden));
    }
    let ask = async |instance: &Instance, path: &str, cookie: &str| {
        instance.client().send("GET", path, &[("cookie", cookie)], b"").await.code
    };
    for instance in [&first, &second] {
        assert_eq!(ask(instance, "/", &cookie).await, 200, "every process accepts it");
        assert_eq!(ask(instance, "/v1/pipelines", &cookie).await, 200);
    }
    // It is no token, and changes nothing beyond the pages.
    assert_eq!(first.client().with_token(session).get("/v1/pipelines").await.code, 401);
    let headers = [("cookie", &*cookie)];
    let path = "/v1/pipelines/test/bots/shop-1/pause";
    assert_eq!(first.client().send("POST", path, &headers, b"").await.code, 401);
    let mut forged = session.to_owned();
    forged.replace_range(..1, if forged.starts_with('A') { "B" } else { "A" });
    for wrong in [&forged, &session[1..], "", "x", &BASE64_URL_SAFE_NO_PAD.encode(text("shop"))] {
        let cookie = format!("fairlane-token={wrong}");
        assert_eq!(ask(&first, "/v1/pipelines", &cookie).await, 401, "{wrong}");
    }
    clock.set("2026-11-20T23:59:59Z");
    assert_eq!(ask(&second, "/v1/pipelines", &cookie).await, 200);
    clock.set("2026-11-21T00:00:00Z");
    assert_eq!(ask(&second, "/v1/pipelines", &cookie).await, 401);
    assert_eq!(ask(&first, "/", &cookie).await, 303, "it is asked for the token again");

    // Without its token there is no session.
    let cookie = login(&first.client(), "shop").await;
    second.stop().await;
    let fewer = Tokens::new(&[("root", &format!("{ALL}, bots = [\"*\"]"))]);
    let third = start(&fewer.setting).await;
    assert_eq!(ask(&third, "/v1/pipelines", &cookie).await, 401);
    third.stop().await;
    let replaced = Tokens::new(&[("shop", &format!("{ALL}, bots = [\"*\"]"))]);
    replaced.replace("shop", "another-0123456789abcdef");
    let third = start(&replaced.setting).await;
    assert_eq!(ask(&third, "/v1/pipelines", &cookie).await, 401, "another token of this name");
    third.stop().await;
    first.stop().await;
}

#[tokio::test]
async fn numbers_of_all_bots_are_told_to_tokens_of_all_bots_only() {
    let (server, tokens) = (RedisServer::start(Options::default()), tenants());
    let config = config(&server, "test", &[("auth.tokens", &tokens.setting)]);
    let instance = Instance::start(&config, Log::default().content()).await;
    let client = instance.client();
    let by = |name: &str| client.with_token(&text(name));
    assert_eq!(by("root").post("/v1/pipelines/test/pause").await.code, 204);
    let events: Vec<_> = (0..7_531).map(|n| event("other-1", "t", n)).collect();
    add(&server, STREAM, &events).await;
    eventually(LONG, "they wait", async || {
        by("root").get("/v1/pipelines/test").await.json()["depth"] == 7_531
    })
    .await;
    let whole = by("root").get("/v1/pipelines/test").await.json();
    let part = by("shop").get("/v1/pipelines/test").await.json();
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&part), keys(&whole), "null, not absent");
    for (key, value) in part.as_object().unwrap() {
        match key.as_str() {
            "name" | "enabled" | "stopped" => assert_eq!(value, &whole[key]),
            // The reason may be about another tenant.
            "pause" => assert!(value.is_null() && whole[key].is_object(), "{part}, {whole}"),
            _ => assert!(value.is_null() && whole[key].is_number(), "{key}: {part}, {whole}"),
        }
    }
    assert_eq!(
        by("shop").get("/v1/pipelines").await.json()["pipelines"].as_array().unwrap().len(),
        {
            let all = by("root").get("/v1/pipelines").await.json();
            all["pipelines"].as_array().unwrap().len()
        }
    );
    for path in ["/", "/pipelines/test", "/bots"] {
        let page = async |name: &str| {
            let answer = by(name).get(path).await;
            assert_eq!(answer.code, 200, "{path} by {name}");
            String::from_utf8(answer.body).unwrap()
        };
        assert!(page("root").await.contains("7,531"), "{path}");
        let seen = page("shop").await;
        for hidden in ["7,531", "7531", "other-1", "MongoDB", "Processes"] {
            assert!(!seen.contains(hidden), "{hidden} is in {path}: {seen}");
        }
    }
    instance.stop().await;
}
