//! The views and commands of operators over HTTP, on a running pool.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fairlane::handler::{Failure, Outcomes, Slice};
use serde_json::{Value, json};

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::http::{Client, Response};
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(20);

/// A pool whose handler accepts every event, or dead-letters it immediately while `poison` is set.
struct Pool {
    server: RedisServer,
    instance: Instance,
    client: Client,
    log: Log,
    poison: Arc<AtomicBool>,
}

impl Pool {
    async fn start(settings: &[(&str, &str)]) -> Self {
        let server = RedisServer::start(Options::default());
        let (log, poison) = (Log::default(), Arc::new(AtomicBool::new(false)));
        let poisoned = Arc::clone(&poison);
        let handler = log.handler(move |_: Slice| {
            let poisoned = poisoned.load(Ordering::Relaxed);
            async move {
                if poisoned { Err(Failure::permanent(0, "poison")) } else { Ok(Outcomes::done()) }
            }
        });
        let instance = Instance::start(&config(&server, "test", settings), handler).await;
        let client = instance.client();
        Self { server, instance, client, log, poison }
    }

    /// Publishes one event for each bot. The id is the index of the bot.
    async fn publish(&self, bots: &[&str]) {
        let events: Vec<_> = bots.iter().enumerate().map(|(id, bot)| event(bot, "t", id)).collect();
        add(&self.server, STREAM, &events).await;
    }

    async fn bot(&self, bot: &str) -> Value {
        let answer = self.client.get(&format!("/v1/pipelines/test/bots/{bot}")).await;
        assert_eq!(answer.code, 200, "{answer:?}");
        answer.json()
    }

    async fn pipeline(&self) -> Value {
        self.client.get("/v1/pipelines/test").await.json()
    }

    async fn dead(&self, query: &str) -> Value {
        let answer = self.client.get(&format!("/v1/pipelines/test/dead{query}")).await;
        assert_eq!(answer.code, 200, "{answer:?}");
        answer.json()
    }

    async fn post(&self, rest: &str) -> Response {
        self.client.post(&format!("/v1/pipelines/test{rest}")).await
    }
}

#[tokio::test]
async fn a_paused_bot_keeps_its_events_until_it_is_resumed() {
    let pool = Pool::start(&[]).await;
    assert_eq!(pool.post("/bots/b%2F1/pause").await.code, 204);
    pool.publish(&["b/1", "b/1", "other"]).await;
    eventually(LONG, "the other is handled", async || pool.log.len() == 1).await;
    eventually(LONG, "both wait", async || pool.bot("b%2F1").await["depth"] == 2).await;
    let bot = pool.bot("b%2F1").await;
    assert_eq!((&bot["bot"], &bot["state"]), (&json!("b/1"), &json!("paused")), "{bot}");
    let next: Vec<_> = bot["next"].as_array().unwrap().iter().collect();
    assert_eq!((next.len(), &next[0]["event"]["id"]), (2, &json!("0")), "{bot}");
    let fewer = pool.bot("b%2F1?limit=1").await;
    assert_eq!(fewer["next"].as_array().unwrap().len(), 1);
    assert_eq!(pool.pipeline().await["paused"], 1);

    assert_eq!(pool.post("/bots/b%2F1/resume").await.code, 204);
    eventually(LONG, "they are handled", async || pool.log.len() == 3).await;
    eventually(LONG, "it is idle", async || pool.bot("b%2F1").await["state"] == "idle").await;
    pool.instance.stop().await;
}

#[tokio::test]
async fn a_paused_pipeline_stands_still_until_it_is_resumed() {
    let pool = Pool::start(&[]).await;
    assert_eq!(pool.post("/pause").await.code, 204);
    assert_eq!(pool.pipeline().await["stopped"], true);
    pool.publish(&["a", "b"]).await;
    eventually(LONG, "they wait", async || pool.pipeline().await["depth"] == 2).await;
    assert_eq!(pool.log.len(), 0);
    let listed = pool.client.get("/v1/pipelines").await.json();
    let listed = &listed["pipelines"][0];
    assert_eq!((&listed["name"], &listed["depth"]), (&json!("test"), &json!(2)), "{listed}");
    assert_eq!((&listed["enabled"], &listed["stopped"]), (&json!(true), &json!(true)), "{listed}");
    for field in ["ready", "leased", "parked", "paused", "oldest_age_ms", "dead", "workers_max"] {
        assert!(listed[field].is_number(), "{field}: {listed}");
    }
    assert_eq!(pool.post("/resume").await.code, 204);
    eventually(LONG, "they are handled", async || pool.log.len() == 2).await;
    pool.instance.stop().await;
}

#[tokio::test]
async fn a_weight_is_set_and_shown() {
    let pool = Pool::start(&[]).await;
    let path = "/v1/pipelines/test/bots/b";
    let put = async |body: &str| {
        pool.client
            .send("PUT", path, &[("content-type", "application/json")], body.as_bytes())
            .await
    };
    assert_eq!(put(r#"{"weight":3}"#).await.code, 204);
    assert_eq!(pool.bot("b").await["weight"], 3);
    for (body, field) in [
        (r#"{"weight":0}"#, "weight"),
        (r#"{"weight":1001}"#, "weight"),
        (r#"{"weight":"x"}"#, "weight"),
        (r#"{"weight":-1}"#, "weight"),
        (r#"{"weight":1,"more":2}"#, "more"),
    ] {
        let answer = put(body).await;
        assert_eq!(answer.problem(), "invalid-request", "{body}");
        assert_eq!(answer.json()["errors"][0]["field"], field, "{body}: {answer:?}");
    }
    let cut = put(r#"{"weight":"#).await;
    assert!(cut.json()["detail"].as_str().unwrap().contains("line 1 column 10"), "{cut:?}");
    assert_eq!(put("{}").await.code, 204, "what is left out stays");
    assert_eq!(pool.bot("b").await["weight"], 3);
    assert_eq!(put(r#"{"weight":1}"#).await.code, 204);
    assert_eq!(pool.bot("b").await["weight"], 1);
    pool.instance.stop().await;
}

#[tokio::test]
async fn a_rate_and_a_burst_are_set_changed_shown_and_removed() {
    let pool = Pool::start(&[]).await;
    let put = async |body: &str| {
        let headers = [("content-type", "application/json")];
        pool.client.send("PUT", "/v1/pipelines/test/bots/b", &headers, body.as_bytes()).await
    };
    let shown = async || {
        let bot = pool.bot("b").await;
        ["rate", "burst", "weight"].map(|field| bot[field].clone())
    };
    // What is left out stays as it is.
    for (body, expected) in [
        (r#"{"rate":"10/s","burst":20,"weight":0.5}"#, json!(["10/s", 20, 0.5])),
        (r#"{"rate":"30/m"}"#, json!(["30/m", 20, 0.5])),
        (r#"{"burst":5,"weight":2}"#, json!(["30/m", 5, 2])),
        (r#"{"rate":"unlimited"}"#, json!(["unlimited", 5, 2])),
        (r#"{"rate":null}"#, json!([null, 5, 2])),
        (r#"{"rate":"0.5/s","burst":null,"weight":1}"#, json!(["0.5/s", null, 1])),
    ] {
        let answer = put(body).await;
        assert_eq!(answer.code, 204, "{body}: {answer:?}");
        assert_eq!(json!(shown().await), expected, "{body}");
    }
    for (body, field, remedy) in [
        (r#"{"rate":"10"}"#, "rate", "events per second, minute or hour"),
        (r#"{"rate":"0/s"}"#, "rate", "to stop a bot, pause it"),
        (r#"{"rate":"2000000/s"}"#, "rate", "from 0.001 to 1000000"),
        (r#"{"rate":""}"#, "rate", "such as \"10/s\""),
        (r#"{"rate":10}"#, "rate", ""),
        (r#"{"burst":0}"#, "burst", "a whole number from 1 to 1000000"),
        (r#"{"burst":1000001}"#, "burst", "a whole number from 1 to 1000000"),
        (r#"{"burst":1.5}"#, "burst", ""),
        (r#"{"weight":0.001}"#, "weight", "a number from 0.01 to 1000"),
        (r#"{"rate":"1/s","burst":0}"#, "burst", "a whole number"),
    ] {
        let answer = put(body).await;
        assert_eq!((answer.code, answer.problem().as_str()), (400, "invalid-request"), "{body}");
        let flaw = &answer.json()["errors"][0];
        assert_eq!(flaw["field"], field, "{body}: {answer:?}");
        assert!(flaw["detail"].as_str().unwrap().contains(remedy), "{body}: {flaw}");
    }
    assert_eq!(json!(shown().await), json!(["0.5/s", null, 1]), "nothing of them is kept");
    pool.instance.stop().await;
}

#[tokio::test]
async fn a_token_for_certain_bots_sets_no_rate_and_no_burst() {
    let directory = tempfile::tempdir().unwrap();
    let token = |name: &str, scopes: &str, bots: &str| {
        let file = directory.path().join(name);
        std::fs::write(&file, format!("{name}-0123456789abcdef")).unwrap();
        format!("{{ name = {name:?}, token_file = {file:?}, scopes = {scopes}, bots = {bots} }}")
    };
    let tokens = [
        token("reader", r#"["read"]"#, r#"["*"]"#),
        token("tenant", r#"["read", "operate"]"#, r#"["shop-*"]"#),
        token("root", r#"["read", "operate"]"#, r#"["*"]"#),
    ];
    let tokens = format!("[{}]", tokens.join(", "));
    let pool = Pool::start(&[("auth.tokens", &tokens)]).await;
    let [reader, tenant, root] = ["reader", "tenant", "root"]
        .map(|name| pool.client.with_token(&format!("{name}-0123456789abcdef")));
    let put = async |client: &Client, bot: &str, body: &str| {
        let path = format!("/v1/pipelines/test/bots/{bot}");
        let headers = [("content-type", "application/json")];
        client.send("PUT", &path, &headers, body.as_bytes()).await
    };
    assert_eq!(put(&root, "shop-1", r#"{"rate":"10/s","burst":3}"#).await.code, 204);
    for body in
        [r#"{"rate":"unlimited"}"#, r#"{"rate":null}"#, r#"{"burst":9}"#, r#"{"burst":null}"#]
    {
        let answer = put(&tenant, "shop-1", body).await;
        assert_eq!((answer.code, answer.problem().as_str()), (403, "forbidden"), "{body}");
        assert!(answer.json()["detail"].as_str().unwrap().contains("bots = [\"*\"]"), "{answer:?}");
        assert_eq!(put(&reader, "shop-1", body).await.code, 403, "{body}");
    }
    // Its weight, up to that of the token, but not that of another's bot.
    assert_eq!(put(&tenant, "shop-1", r#"{"weight":0.5}"#).await.code, 204);
    assert_eq!(put(&tenant, "shop-1", r#"{"weight":2}"#).await.code, 403);
    assert_eq!(put(&tenant, "other", r#"{"weight":0.5}"#).await.code, 403);
    let bot = root.get("/v1/pipelines/test/bots/shop-1").await.json();
    let set = ["rate", "burst", "weight"].map(|field| bot[field].clone());
    assert_eq!(json!(set), json!(["10/s", 3, 0.5]), "{bot}");
    pool.instance.stop().await;
}

#[tokio::test]
async fn release_ends_a_backoff_and_purge_empties_a_queue() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let fail = Arc::new(AtomicBool::new(true));
    let failing = Arc::clone(&fail);
    let handler =
        log.handler(move |_: Slice| {
            let failing = failing.load(Ordering::Relaxed);
            async move {
                if failing { Err(Failure::transient(0, "not yet")) } else { Ok(Outcomes::done()) }
            }
        });
    let backoff = ("pipelines.test.backoff", "{ initial = \"1h\", max = \"1h\", jitter = 0.0 }");
    let instance = Instance::start(&config(&server, "test", &[backoff]), handler).await;
    let client = instance.client();
    let path = |bot: &str, rest: &str| format!("/v1/pipelines/test/bots/{bot}{rest}");
    let state = async |bot: &str| client.get(&path(bot, "")).await.json()["state"].clone();
    add(&server, STREAM, &[event("b", "t", 1), event("b", "t", 2), event("c", "t", 3)]).await;
    eventually(LONG, "both are parked", async || {
        state("b").await == "parked" && state("c").await == "parked"
    })
    .await;
    assert!(client.get(&path("b", "")).await.json()["attempts"].as_u64().unwrap() >= 1);

    let purged = client.send("DELETE", &path("c", "/queue"), &[], b"").await;
    assert_eq!((purged.code, purged.json()), (200, json!({"purged": 1})));
    assert_eq!(client.get(&path("c", "")).await.json()["depth"], 0);
    let again = client.send("DELETE", &path("c", "/queue"), &[], b"").await;
    assert_eq!(again.json(), json!({"purged": 0}));

    fail.store(false, Ordering::Relaxed);
    assert_eq!(client.post(&path("b", "/release")).await.code, 204);
    eventually(LONG, "it is done within the hour", async || state("b").await == "idle").await;
    instance.stop().await;
}

#[tokio::test]
async fn dead_letters_are_listed_shown_put_back_and_dropped() {
    let pool = Pool::start(&[]).await;
    pool.poison.store(true, Ordering::Relaxed);
    let bots = ["a", "a", "a", "b", "b", "c"];
    pool.publish(&bots).await;
    eventually(LONG, "all are dead", async || pool.pipeline().await["dead"] == 6).await;
    pool.poison.store(false, Ordering::Relaxed);

    // Dead letters are shown with their bot, also when the bot has no queued events.
    let of_a = pool.bot("a").await["dead_letters"].clone();
    assert_eq!((&of_a["count"], &of_a["at_least"]), (&json!(3), &json!(false)), "{of_a}");
    let newest = &of_a["newest"][0];
    assert_eq!((&newest["event"], &newest["type"]), (&json!("2"), &json!("t")), "{of_a}");
    assert!(newest["reason"].as_str().unwrap().contains("poison"), "{of_a}");
    assert_eq!(pool.bot("nobody").await["dead_letters"]["count"], 0);
    let page = pool.client.get("/bots/a").await;
    let page = String::from_utf8_lossy(&page.body).into_owned();
    assert!(page.contains("3 dead letters") && page.contains("poison"), "{page}");
    assert!(page.contains("/pipelines/test/dead?bot=a"), "{page}");

    // The pages list each dead letter once, the newest first.
    let (mut ids, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = pool.dead(&format!("?limit=4{cursor}")).await;
        ids.extend(page["dead_letters"].as_array().unwrap().iter().cloned());
        let Some(next) = page["cursor"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    let distinct: BTreeSet<_> = ids.iter().map(|letter| letter["id"].to_string()).collect();
    assert_eq!((ids.len(), distinct.len()), (6, 6), "{ids:?}");
    // The order follows the clock of the ids. The clock of `time_ms` may be a millisecond behind
    // it.
    let time_of = |letter: &Value| -> u64 {
        let (_, entry) = letter["id"].as_str().unwrap().split_once('.').unwrap();
        entry.split_once('-').unwrap().0.parse().unwrap()
    };
    let times: Vec<u64> = ids.iter().map(time_of).collect();
    assert!(times.is_sorted_by(|a, b| a >= b), "{times:?}");
    let of_b = pool.dead("?bot=b").await["dead_letters"].clone();
    assert_eq!(of_b.as_array().unwrap().len(), 2);
    assert!(of_b[0]["reason"].as_str().unwrap().contains("poison"), "{of_b}");

    let path =
        |letter: &Value| format!("/v1/pipelines/test/dead/{}", letter["id"].as_str().unwrap());
    let shown = pool.client.get(&path(&of_b[0])).await;
    assert_eq!((shown.code, shown.json()), (200, of_b[0].clone()));
    let dropped = pool.client.send("DELETE", &path(&of_b[0]), &[], b"").await;
    assert_eq!(dropped.code, 204);
    for (method, rest) in [("GET", ""), ("DELETE", ""), ("POST", "/redrive")] {
        let gone = pool.client.send(method, &(path(&of_b[0]) + rest), &[], b"").await;
        assert_eq!((gone.code, gone.problem().as_str()), (404, "no-dead-letter"), "{method}");
    }

    let redriven = pool.client.post(&(path(&of_b[1]) + "/redrive")).await;
    assert_eq!((redriven.code, redriven.json()), (200, json!({"redriven": 1})));
    let redriven = pool.post("/dead/redrive?bot=a").await;
    assert_eq!((redriven.code, redriven.json()), (200, json!({"redriven": 3})));
    let redriven = pool.post("/dead/redrive").await;
    assert_eq!((redriven.code, redriven.json()), (200, json!({"redriven": 1})));
    assert_eq!(pool.post("/dead/redrive").await.json(), json!({"redriven": 0}));
    eventually(LONG, "they are handled", async || {
        let view = pool.pipeline().await;
        view["dead"] == 0 && view["depth"] == 0
    })
    .await;
    let seen = pool.log.all();
    let of_a: Vec<_> = seen.iter().filter(|seen| seen.bot == "a").map(|seen| &*seen.id).collect();
    assert!(of_a.ends_with(&["0", "1", "2"]), "in order: {of_a:?}");
    pool.instance.stop().await;
}

#[tokio::test]
async fn pages_of_bots_hold_each_bot_once_in_either_order() {
    let pool = Pool::start(&[]).await;
    assert_eq!(pool.post("/pause").await.code, 204);
    let names: Vec<_> = (0..60).map(|number| format!("bot-{number}")).collect();
    let mut bots = Vec::new();
    for (number, name) in names.iter().enumerate() {
        bots.extend(std::iter::repeat_n(name.as_str(), number % 7 + 1));
    }
    pool.publish(&bots).await;
    let total = bots.len();
    eventually(LONG, "all wait", async || pool.pipeline().await["depth"] == total).await;
    for (sort, place) in [("depth", "depth"), ("age", "oldest_age_ms")] {
        let (mut found, mut cursor) = (Vec::new(), String::new());
        loop {
            let path = format!("/v1/pipelines/test/bots?sort={sort}&limit=7{cursor}");
            let page = pool.client.get(&path).await.json();
            let bots = page["bots"].as_array().unwrap();
            assert!(!bots.is_empty() && bots.len() <= 7, "{page}");
            let places: Vec<_> = bots.iter().map(|bot| bot[place].as_u64().unwrap()).collect();
            assert!(places.is_sorted_by(|a, b| a >= b), "{sort}: {places:?}");
            found.extend(bots.iter().cloned());
            let Some(next) = page["cursor"].as_str() else { break };
            cursor = format!("&cursor={next}");
        }
        let mut distinct: Vec<_> = found.iter().map(|bot| bot["bot"].as_str().unwrap()).collect();
        assert_eq!(distinct.len(), names.len(), "{sort}");
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), names.len(), "{sort}");
        let other = if sort == "depth" { "age" } else { "depth" };
        let path = format!("/v1/pipelines/test/bots?sort={other}{cursor}");
        assert_eq!(pool.client.get(&path).await.json()["errors"][0]["field"], "cursor");
    }
    pool.instance.stop().await;
}

#[tokio::test]
async fn a_pipeline_that_is_unknown_is_told_those_there_are_and_one_that_ever_ran_can_be_operated()
{
    let pool = Pool::start(&[]).await;
    let answer = pool.client.get("/v1/pipelines/nope").await;
    assert_eq!((answer.code, answer.problem().as_str()), (404, "no-pipeline"));
    assert!(answer.json()["detail"].as_str().unwrap().contains("there is: test"), "{answer:?}");

    let mut connection = pool.server.connection().await;
    let mut command = redis::cmd("HSET");
    command.arg("fl:pipelines").arg("former").arg(1);
    let () = command.query_async(&mut connection).await.unwrap();
    let shown = pool.client.get("/v1/pipelines/former").await.json();
    assert_eq!((&shown["name"], &shown["enabled"]), (&json!("former"), &json!(false)));
    assert_eq!(pool.client.post("/v1/pipelines/former/pause").await.code, 204);
    assert_eq!(pool.client.get("/v1/pipelines/former").await.json()["stopped"], true);
    assert_eq!(pool.client.get("/v1/pipelines").await.json()["pipelines"][0]["name"], "former");
    pool.instance.stop().await;
}
