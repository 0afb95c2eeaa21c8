//! The audit trail: what operators did, by whom, to what, why, and with which result.

use std::time::Duration;

use fairlane::handler::{Failure, Slice};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::http::{Client, get, metric};
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::tokens::{Tokens, text};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(20);
const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

fn tokens() -> Tokens {
    Tokens::new(&[
        ("ops", r#"scopes = ["publish", "read", "operate"], bots = ["*"]"#),
        ("reader", r#"scopes = ["read"], bots = ["*"]"#),
        ("shop", r#"scopes = ["read", "operate"], bots = ["shop-*"]"#),
    ])
}

/// A pool whose handler dead-letters each event.
struct Place {
    server: RedisServer,
    instance: Instance,
    /// Holds the files.
    _tokens: Tokens,
}

impl Place {
    async fn start() -> Self {
        let (server, tokens) = (RedisServer::start(Options::default()), tokens());
        let config = config(&server, "test", &[("auth.tokens", &tokens.setting)]);
        let log = Log::default();
        let handler =
            log.handler(|_: Slice| async { Err::<_, Failure>(Failure::permanent(0, "no")) });
        let instance = Instance::start(&config, handler).await;
        Self { server, instance, _tokens: tokens }
    }

    fn client(&self, token: &str) -> Client {
        self.instance.client().with_token(&text(token))
    }

    async fn trail(&self, query: &str) -> Vec<Value> {
        let answer = self.client("ops").get(&format!("/v1/audit{query}")).await;
        assert_eq!(answer.code, 200, "{answer:?}");
        answer.json()["actions"].as_array().unwrap().clone()
    }
}

async fn post(client: &Client, path: &str, body: &str) {
    let answer = client.send("POST", path, &JSON, body.as_bytes()).await;
    assert!(matches!(answer.code, 200 | 204), "{path}: {answer:?}");
}

#[tokio::test]
async fn each_action_is_noted_with_who_what_why_and_its_result() {
    let place = Place::start().await;
    let ops = place.client("ops");
    let bot = "/v1/pipelines/test/bots/shop-1";
    add(&place.server, STREAM, &[event("shop-1", "t", 1), event("shop-1", "t", 2)]).await;
    eventually(LONG, "both are dead", async || {
        ops.get("/v1/pipelines/test").await.json()["dead"] == 2
    })
    .await;
    post(&ops, &format!("{bot}/pause"), r#"{"reason": "the shop asked"}"#).await;
    post(&ops, &format!("{bot}/pause"), "").await;
    let set = ops.send("PUT", bot, &JSON, br#"{"weight": 3, "rate": "10/s"}"#).await;
    assert_eq!(set.code, 204, "{set:?}");
    post(&ops, "/v1/pipelines/test/dead/redrive?bot=shop-1", "").await;
    assert_eq!(ops.send("DELETE", &format!("{bot}/queue"), &[], b"").await.code, 200);
    post(&ops, &format!("{bot}/release"), "").await;
    post(&ops, &format!("{bot}/resume"), "").await;
    post(&ops, "/v1/pipelines/test/pause", r#"{"reason": "move"}"#).await;
    post(&ops, "/v1/pipelines/test/resume", "").await;

    let trail = place.trail("").await;
    let seen: Vec<_> = trail
        .iter()
        .rev()
        .map(|noted| {
            assert_eq!((&noted["who"], &noted["pipeline"]), (&json!("ops"), &json!("test")));
            assert_eq!(noted["address"], "127.0.0.1", "{noted}");
            assert!(noted["time_ms"].as_u64().unwrap() > 1_700_000_000_000, "{noted}");
            let text = |field: &str| noted[field].as_str().unwrap_or("-").to_owned();
            [text("action"), text("bot"), text("details"), text("reason"), text("result")].join("|")
        })
        .collect();
    let expected = [
        "pause|shop-1|-|the shop asked|done",
        "pause|shop-1|-|-|nothing changed",
        "set|shop-1|weight 3, rate 10/s|-|done",
        "redrive all|shop-1|-|-|done: 2",
        "purge|shop-1|-|-|done: 2",
        "release|shop-1|-|-|nothing changed",
        "resume|shop-1|-|-|done",
        "pause|-|-|move|done",
        "resume|-|-|-|done",
    ];
    assert_eq!(seen, expected);

    assert_eq!(place.trail("?bot=shop-1").await.len(), 7);
    assert_eq!(place.trail("?pipeline=other").await.len(), 0);
    let newest = trail[0]["time_ms"].as_u64().unwrap();
    assert_eq!(place.trail(&format!("?since_ms={}", newest + 1)).await.len(), 0);
    assert!(!place.trail(&format!("?since_ms={newest}")).await.is_empty());
    // The pages have each action once.
    let (mut paged, mut path) = (Vec::new(), "/v1/audit?limit=4".to_owned());
    loop {
        let page = ops.get(&path).await.json();
        paged.extend(page["actions"].as_array().unwrap().clone());
        let Some(cursor) = page["cursor"].as_str() else { break };
        path = format!("/v1/audit?limit=4&cursor={cursor}");
    }
    assert_eq!(paged, trail);
    let page = ops.get("/audit").await;
    let text = String::from_utf8_lossy(&page.body).into_owned();
    assert!(page.code == 200 && text.contains("reason: the shop asked"), "{page:?}");
    assert!(text.contains("href=\"/bots/shop-1\"") && text.contains("weight 3"), "{text}");
    let other = ops.get("/audit?bot=other&pipeline=").await;
    assert!(String::from_utf8_lossy(&other.body).contains("No action of an operator"), "{other:?}");
    place.instance.stop().await;
}

#[tokio::test]
async fn an_action_is_noted_although_its_client_is_gone() {
    let place = Place::start().await;
    let ops = place.client("ops");
    assert_eq!(ops.post("/v1/pipelines/test/resume").await.code, 204);
    let head = ops.head("POST", "/v1/pipelines/test/bots/shop-1/pause", &[]);
    place.server.sigstop();
    let mut connection = ops.connect().await.unwrap();
    connection.write_all(head.as_bytes()).await.unwrap();
    eventually(LONG, "it waits for Redis", async || {
        // This request is in flight too.
        ops.get("/v1/admission").await.json()["in_flight"].as_u64() >= Some(2)
    })
    .await;
    drop(connection);
    place.server.sigcont();
    eventually(LONG, "it is noted", async || {
        place.trail("?bot=shop-1").await.first().is_some_and(|noted| noted["action"] == "pause")
    })
    .await;
    place.instance.stop().await;
}

#[tokio::test]
async fn a_refused_action_is_not_noted_and_only_operators_of_all_bots_read_the_trail() {
    let place = Place::start().await;
    let (ops, shop) = (place.client("ops"), place.client("shop"));
    let pause = "/v1/pipelines/test/bots/other/pause";
    assert_eq!(shop.post(pause).await.code, 403);
    for (reason, bad) in [("a\\nb", true), (&*"x".repeat(201), true), ("", false)] {
        let body = format!(r#"{{"reason": "{reason}"}}"#);
        let answer = ops.send("POST", pause, &JSON, body.as_bytes()).await;
        assert_eq!(answer.code == 400, bad, "{reason}: {answer:?}");
        if bad {
            assert_eq!(answer.json()["errors"][0]["field"], "reason", "{answer:?}");
        }
    }
    assert_eq!(place.trail("").await.len(), 1);
    for token in ["reader", "shop"] {
        assert_eq!(place.client(token).get("/v1/audit").await.code, 403, "{token}");
    }
    assert_eq!(place.instance.client().get("/v1/audit").await.code, 401);
    place.instance.stop().await;
}

#[tokio::test]
async fn a_pause_shows_since_when_by_whom_and_why() {
    let place = Place::start().await;
    let (ops, shop) = (place.client("ops"), place.client("shop"));
    let bot = "/v1/pipelines/test/bots/shop-1";
    post(&ops, &format!("{bot}/pause"), r#"{"reason": "too loud"}"#).await;
    let told = shop.get(bot).await.json()["pause"].clone();
    assert_eq!((&told["by"], &told["reason"]), (&json!("ops"), &json!("too loud")));
    assert!(told["since_ms"].as_u64().unwrap() > 1_700_000_000_000, "{told}");
    // Without a reason, a further pause changes nothing; with one, it replaces the note.
    post(&shop, &format!("{bot}/pause"), "").await;
    assert_eq!(ops.get(bot).await.json()["pause"], told);
    post(&shop, &format!("{bot}/pause"), r#"{"reason": "as agreed"}"#).await;
    let again = ops.get(bot).await.json()["pause"].clone();
    assert_eq!((&again["by"], &again["reason"]), (&json!("shop"), &json!("as agreed")));
    let listed = ops.get("/v1/pipelines/test/bots?state=paused&prefix=shop").await.json();
    assert_eq!(listed["bots"][0]["reason"], "paused by shop", "{listed}");
    post(&ops, &format!("{bot}/resume"), "").await;
    assert_eq!(ops.get(bot).await.json()["pause"], Value::Null);

    post(&ops, "/v1/pipelines/test/pause", r#"{"reason": "the mail server moves"}"#).await;
    let pipeline = ops.get("/v1/pipelines/test").await.json();
    assert_eq!(pipeline["pause"]["reason"], "the mail server moves", "{pipeline}");
    let hidden = shop.get("/v1/pipelines/test").await.json();
    assert_eq!((&hidden["stopped"], &hidden["pause"]), (&json!(true), &Value::Null));
    eventually(LONG, "the finding says it", async || {
        let problems = ops.get("/v1/problems").await.json();
        problems["problems"].as_array().unwrap().iter().any(|finding| {
            let problem = finding["problem"].as_str().unwrap();
            problem.starts_with("pipeline test is paused by ops, ")
                && problem.ends_with(" ago: the mail server moves")
                && finding["since_ms"].is_u64()
        })
    })
    .await;
    place.instance.stop().await;
}

#[tokio::test]
async fn a_tenant_cannot_push_out_the_actions_of_operators() {
    let place = Place::start().await;
    let shop = place.client("shop");
    post(&place.client("ops"), "/v1/pipelines/test/bots/shop-1/pause", "").await;
    for number in 0..1_010 {
        let action = if number % 2 == 0 { "pause" } else { "resume" };
        post(&shop, &format!("/v1/pipelines/test/bots/shop-2/{action}"), "").await;
    }
    let mut connection = place.server.connection().await;
    for (key, kept) in [("fl:audit", 1), ("fl:audit-often", 1_000)] {
        let length: u64 = redis::cmd("XLEN").arg(key).query_async(&mut connection).await.unwrap();
        assert_eq!(length, kept, "{key}");
    }
    let trail = place.trail("?bot=shop-1").await;
    assert_eq!((trail.len(), &trail[0]["who"]), (1, &json!("ops")), "{trail:?}");
    assert_eq!(place.trail("?limit=1000&bot=shop-2").await.len(), 1_000);
    place.instance.stop().await;
}

#[tokio::test]
async fn operators_are_noted_while_redis_is_full() {
    let place = Place::start().await;
    let mut connection = place.server.connection().await;
    let () = redis::cmd("CONFIG")
        .arg(&["SET", "maxmemory", "1"])
        .query_async(&mut connection)
        .await
        .unwrap();
    post(&place.client("ops"), "/v1/pipelines/test/pause", "").await;
    assert_eq!(place.trail("").await[0]["action"], "pause");
    place.instance.stop().await;
}

#[tokio::test]
async fn an_action_succeeds_although_the_trail_cannot_be_written() {
    let (server, tokens) = (RedisServer::start(Options::default()), tokens());
    let settings = [("auth.tokens", &*tokens.setting), ("pipelines.test.handler", "\"log\"")];
    let process = Served::start(&config(&server, "test", &settings)).await;
    let mut connection = server.connection().await;
    let () = redis::cmd("SET")
        .arg(&["fl:audit", "no stream"])
        .query_async(&mut connection)
        .await
        .unwrap();
    let client = Client::new(&process.http()).with_token(&text("ops"));
    assert_eq!(client.post("/v1/pipelines/test/pause").await.code, 204);
    assert_eq!(client.get("/v1/pipelines/test").await.json()["stopped"], true);
    eventually(LONG, "it is told", async || {
        let log = process.log();
        log.contains("an operator acted") && log.contains("the audit trail may lack an action")
    })
    .await;
    let (_, figures) = get(&process.metrics(), "/metrics").await;
    assert_eq!(metric(&figures, "fairlane_audit_lost_total", &[]), Some(1.0));
}

#[tokio::test]
async fn failing_bots_are_listed_with_the_reason_and_a_strange_name_gets_a_hint() {
    let place = Place::start().await;
    let (ops, shop) = (place.client("ops"), place.client("shop"));
    add(&place.server, STREAM, &[event("shop-7", "t", 1), event("shop-7", "t", 2)]).await;
    add(&place.server, STREAM, &[event("other-7", "t", 3)]).await;
    eventually(LONG, "they are dead", async || {
        ops.get("/v1/pipelines/test").await.json()["dead"] == 3
    })
    .await;
    assert_eq!(ops.get("/v1/pipelines/test/bots").await.json()["bots"], json!([]));
    let failing = ops.get("/v1/pipelines/test/bots?failing=true").await.json();
    let told =
        |bot: &Value| (bot["bot"].clone(), bot["dead_letters"].clone(), bot["reason"].clone());
    let mut found: Vec<_> = failing["bots"].as_array().unwrap().iter().map(told).collect();
    found.sort_by_key(|(bot, ..)| bot.to_string());
    let expected = [
        (json!("other-7"), json!(1), json!("dead letters: 1")),
        (json!("shop-7"), json!(2), json!("dead letters: 2")),
    ];
    assert_eq!(found, expected);
    let own = shop.get("/v1/pipelines/test/bots?failing=true").await.json();
    assert_eq!(own["bots"].as_array().unwrap().len(), 1, "{own}");

    // The attempts are written a moment later.
    eventually(LONG, "the hint names it", async || {
        let near = ops.get("/v1/pipelines/test/bots/shop-8").await.json();
        near["detail"].as_str().unwrap().contains("bots with a name like that: \"shop-7\"")
    })
    .await;
    let near = ops.get("/v1/pipelines/test/bots/shop-8").await.json();
    assert_eq!(
        near["detail"],
        "bot \"shop-8\" was never seen in pipeline test, or left nothing there; bots with a name like that: \"shop-7\""
    );
    // A tenant learns no names of others.
    let near = place.client("shop").get("/v1/pipelines/test/bots/shop-other-8").await.json();
    assert!(!near["detail"].as_str().unwrap().contains("other-7"), "{near}");
    assert_eq!(ops.get("/v1/pipelines/test/bots/shop-7").await.json()["detail"], Value::Null);
    place.instance.stop().await;
}
