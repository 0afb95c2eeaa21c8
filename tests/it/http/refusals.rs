//! `/v1/admission` lists the refused callers. Each token sees only its own refusals.

use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::support::bus::event;
use crate::support::config::config;
use crate::support::http::{Client, Response, get, metric};
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::wait::{Stopwatch, eventually};

const LONG: Duration = Duration::from_secs(20);
const STRUCTURED: &str = "application/cloudevents+json";
const BATCH: &str = "application/cloudevents-batch+json";

struct Guarded {
    server: RedisServer,
    process: Served,
    directory: TempDir,
}

fn text(token: &str) -> String {
    format!("{token}-0123456789abcdef")
}

/// `auth.tokens` with the files in `directory`.
fn tokens(directory: &Path) -> String {
    let mut tables = String::new();
    for (name, scopes, bots) in [
        ("root", "\"publish\", \"read\", \"operate\"", "*"),
        ("shop", "\"publish\", \"read\"", "shop-*"),
        ("other", "\"publish\", \"read\"", "other-*"),
        ("crawler", "\"read\"", "*"),
    ] {
        let file = directory.join(name);
        std::fs::write(&file, text(name)).unwrap();
        let quoted = format!("{:?}", file.display().to_string());
        let table = "{ name = \"NAME\", token_file = FILE, scopes = [SCOPES], bots = [\"BOTS\"] },";
        let table = table.replace("NAME", name).replace("FILE", &quoted);
        let class = if name == "crawler" { ", class = \"p3\" }" } else { " }" };
        let table = table.replace(" }", class);
        write!(tables, "{}", table.replace("SCOPES", scopes).replace("BOTS", bots)).unwrap();
    }
    format!("[{tables}]")
}

impl Guarded {
    async fn start(more: &[(&str, &str)]) -> Self {
        let server = RedisServer::start(Options::default());
        let directory = tempfile::tempdir().unwrap();
        let tokens = tokens(directory.path());
        let own = [("pipelines.test.handler", "\"log\""), ("auth.tokens", &*tokens)];
        let process = Served::start(&config(&server, "test", &[&own, more].concat())).await;
        Self { server, process, directory }
    }

    fn by(&self, token: &str) -> Client {
        assert!(self.directory.path().join(token).exists(), "no token {token}");
        Client::new(&self.process.http()).with_token(&text(token))
    }

    async fn seen_by(&self, token: &str) -> Value {
        let answer = self.by(token).get("/v1/admission").await;
        assert_eq!(answer.code, 200, "{answer:?}");
        answer.json()
    }
}

async fn publish(client: &Client, bot: &str, headers: &[(&str, &str)]) -> u16 {
    let headers = [&[("content-type", STRUCTURED)], headers].concat();
    client.send("POST", "/v1/events", &headers, event(bot, "e", 0).as_bytes()).await.code
}

fn refused(what: &str, name: &str, reason: &str, times: u64) -> Value {
    let reasons = json!([{ "reason": reason, "requests": times }]);
    json!({ what: name, "requests": times, "over": 0, "reasons": reasons })
}

#[tokio::test]
async fn a_refused_request_is_told_by_token_address_and_bot_and_each_token_sees_itself_alone() {
    let guarded = Guarded::start(&[("admission.p2", "\"refuse\"")]).await;
    for _ in 0..3 {
        assert_eq!(publish(&guarded.by("shop"), "shop-1", &[]).await, 503);
    }
    assert_eq!(publish(&guarded.by("other"), "other-1", &[]).await, 503);
    let path = "/user_online?uid=ann&bot=shop%2D2";
    let lowered = guarded.by("shop").send("POST", path, &[("x-priority", "p2")], b"").await;
    assert_eq!(lowered.code, 503);
    // An unknown token is counted for no token.
    let wrong = Client::new(&guarded.process.http()).with_token("wrong-0123456789abcdef");
    assert_eq!(publish(&wrong, "shop-1", &[]).await, 503);

    let all = guarded.seen_by("root").await;
    let tokens = [refused("token", "shop", "switch", 4), refused("token", "other", "switch", 1)];
    assert_eq!(all["top_tokens"], json!(tokens));
    assert_eq!(all["top_addresses"], json!([refused("address", "127.0.0.1", "switch", 6)]));
    // These requests are refused before their body is read, so their bot is unknown.
    assert_eq!(all["top_bots"], json!([refused("bot", "shop-2", "switch", 1)]));
    assert_eq!(all["shed"], json!([{ "class": "p2", "reason": "switch", "requests": 6 }]));
    assert_eq!(all["quotas"]["bot"], json!({ "rate": 0, "in_flight": 0 }));

    let shop = guarded.seen_by("shop").await;
    let own = json!({
        "top_bots": [refused("bot", "shop-2", "switch", 1)],
        "top_tokens": [refused("token", "shop", "switch", 4)],
        "top_addresses": [],
    });
    assert_eq!(shop, own);
    let other = guarded.seen_by("other").await;
    assert_eq!(other["top_bots"], json!([]), "{other}");
    assert_eq!(other["top_tokens"], json!([refused("token", "other", "switch", 1)]));
}

#[tokio::test]
async fn a_missed_deadline_is_told_with_the_bots_of_the_body() {
    let guarded = Guarded::start(&[]).await;
    guarded.server.sigstop();
    // A connection that cannot be made within 3 s counts as refused: 503. The deadline is shorter.
    let late = publish(&guarded.by("shop"), "shop-7", &[("x-deadline-ms", "1500")]).await;
    guarded.server.sigcont();
    assert_eq!(late, 504);
    let all = guarded.seen_by("root").await;
    assert_eq!(all["top_bots"], json!([refused("bot", "shop-7", "deadline", 1)]));
    assert_eq!(all["top_tokens"], json!([refused("token", "shop", "deadline", 1)]));
    assert_eq!(all["top_addresses"], json!([refused("address", "127.0.0.1", "deadline", 1)]));
}

#[tokio::test]
async fn a_quota_that_is_used_up_is_told_with_the_bots_of_the_body() {
    let quota = [("admission.bot_rate", "1"), ("admission.limit_max", "8")];
    let guarded = Guarded::start(&quota).await;
    let client = guarded.by("shop");
    // The first batch is within the guaranteed rate, however many events it has. They are charged
    // afterwards.
    let events: Vec<_> = (0..60).map(|n| event("shop-9", "e", n)).collect();
    let batch = format!("[{}]", events.join(","));
    assert_eq!(client.publish(BATCH, &batch).await.code, 202);
    guarded.server.sigstop();
    let mut hanging = JoinSet::new();
    for _ in 0..6 {
        let client = guarded.by("root");
        hanging.spawn(async move { client.get("/v1/pipelines/test").await.code });
    }
    eventually(LONG, "there is not room for all", async || {
        let (_, text) = get(&guarded.process.metrics(), "/metrics").await;
        let admitted = [("class", "p1"), ("decision", "admitted")];
        metric(&text, "fairlane_admission_total", &admitted) >= Some(6.0)
    })
    .await;
    let refused = client.publish(BATCH, &batch).await;
    assert_eq!((refused.code, refused.header("x-shed-reason")), (429, Some("quota")));
    guarded.server.sigcont();
    while hanging.join_next().await.is_some() {}
    let all = guarded.seen_by("root").await;
    let of = |list: &str, what: &str, name: &str| {
        let found = all[list].as_array().unwrap().iter().find(|one| one[what] == name);
        let reasons = found.unwrap_or_else(|| panic!("no {name} in {all}"))["reasons"].clone();
        let reasons = reasons.as_array().unwrap().clone();
        reasons.into_iter().any(|one| one["reason"] == "quota")
    };
    assert!(of("top_bots", "bot", "shop-9"), "{all}");
    assert!(of("top_tokens", "token", "shop"), "{all}");
    assert!(of("top_addresses", "address", "127.0.0.1"), "{all}");
}

#[tokio::test]
async fn a_bot_in_the_body_of_a_notification_is_charged_and_told_and_no_other_bot_is() {
    let guarded = Guarded::start(&[
        ("admission.bot_in_flight", "1"),
        ("admission.limit_max", "8"),
        ("pipelines.notifications.enabled", "true"),
        ("callbacks.allow_nets", "[\"127.0.0.1\"]"),
    ])
    .await;
    let delayed = |bot: &str| {
        let body = json!({ "bot": bot, "delay": 3_600, "url": "http://127.0.0.1:8088/" });
        ("/send_delayed", "application/json", body.to_string())
    };
    let online = |bot: &str| {
        ("/user_online", "application/x-www-form-urlencoded", format!("uid=ann&bot={bot}"))
    };
    let post = |client: Client, (path, kind, body): (&'static str, &'static str, String)| async move {
        client.send("POST", path, &[("content-type", kind)], body.as_bytes()).await
    };
    let over_quota =
        |answer: &Response| (answer.code, answer.header("x-shed-reason")) == (429, Some("quota"));
    // Hanging requests end after 5 s, so a slow machine may need several tries.
    let mut refused = false;
    for _ in 0..10 {
        guarded.server.sigstop();
        let stopped = Instant::now();
        let in_flight = async |least: &dyn Fn(i64) -> i64| {
            eventually(LONG, "requests hang", async || {
                let all = guarded.seen_by("root").await;
                let number = |name: &str| all[name].as_i64().unwrap();
                // The request for this state counts as one.
                number("in_flight") > least(number("limit"))
                    || stopped.elapsed() > Duration::from_secs(4)
            })
            .await;
        };
        // One request of the bot is in flight, and other requests take the rest of the limit.
        let mut hanging = JoinSet::new();
        hanging.spawn(post(guarded.by("shop"), delayed("shop-9")));
        in_flight(&|_| 1).await;
        for _ in 0..5 {
            let client = guarded.by("root");
            hanging.spawn(async move { client.get("/v1/pipelines/test").await });
        }
        in_flight(&|limit| limit - limit / 4).await;
        let first = post(guarded.by("shop"), delayed("shop-9")).await;
        let second = post(guarded.by("shop"), online("shop-9")).await;
        // A request of another bot is accepted.
        hanging.spawn(post(guarded.by("shop"), online("shop-8")));
        in_flight(&|limit| limit - limit / 4 + 1).await;
        guarded.server.sigcont();
        let others = hanging.join_all().await;
        refused = over_quota(&first) && over_quota(&second) && !others.iter().any(over_quota);
        if refused {
            break;
        }
    }
    assert!(refused, "its quota is charged for what the body names, unless every try was too slow");
    let all = guarded.seen_by("root").await;
    let told = |bot: &str| {
        let bots = all["top_bots"].as_array().unwrap();
        let mut found = bots.iter().filter(|one| one["bot"] == bot);
        found.any(|one| {
            let mut reasons = one["reasons"].as_array().unwrap().iter();
            reasons.any(|one| one["reason"] == "quota")
        })
    };
    assert!(told("shop-9") && !told("shop-8"), "{all}");
    // While the limit is not reached, the bot is served even over its quota.
    eventually(LONG, "it is served", async || {
        post(guarded.by("shop"), delayed("shop-9")).await.code == 200
    })
    .await;
}

#[tokio::test]
async fn a_token_of_a_lower_class_lowers_its_requests_and_no_others() {
    let guarded = Guarded::start(&[("admission.p3", "\"refuse\"")]).await;
    assert_eq!(guarded.by("root").get("/v1/pipelines").await.code, 200);
    let crawler = guarded.by("crawler").get("/v1/pipelines").await;
    assert_eq!((crawler.code, crawler.header("x-shed-reason")), (503, Some("switch")));
    let raised = [("x-priority", "p1")];
    let raised = guarded.by("crawler").send("GET", "/v1/pipelines", &raised, b"").await;
    assert_eq!(raised.code, 503, "a header raises nothing");
    assert_eq!(guarded.by("crawler").get("/healthz").await.code, 200, "health stays p0");
    let all = guarded.seen_by("root").await;
    assert_eq!(all["top_tokens"], json!([refused("token", "crawler", "switch", 2)]));
}

#[tokio::test]
async fn without_a_deadline_of_its_own_a_request_has_that_of_its_class() {
    let guarded = Guarded::start(&[("admission.p1_deadline", "\"400ms\"")]).await;
    let root = guarded.by("root");
    let shown = guarded.seen_by("root").await["deadlines"].clone();
    let expected = [("p1", 400), ("p2", 30_000), ("p3", 300_000)];
    assert_eq!(shown, json!(expected.map(|(class, ms)| json!({ "class": class, "ms": ms }))));

    // A live page continues beyond the deadline.
    let mut live = TcpStream::connect(guarded.process.http()).await.unwrap();
    let head = root.head("GET", "/", &[("accept", "text/event-stream")]);
    live.write_all(head.as_bytes()).await.unwrap();
    let opened = Instant::now();
    let mut received = Vec::new();
    while opened.elapsed() < Duration::from_secs(3) || !has_event(&received) {
        let read = tokio::time::timeout(LONG, live.read_buf(&mut received)).await;
        assert!(read.expect("it goes on").unwrap() > 0, "it ended after {:?}", opened.elapsed());
    }

    guarded.server.sigstop();
    let (watch, begun) = (Stopwatch::start(), Instant::now());
    let cut = root.get("/v1/pipelines/test").await;
    let took = begun.elapsed();
    // Without the deadline, the process would wait 5 s for Redis.
    watch.within(Duration::from_secs(4), "the deadline is told");
    assert_eq!((cut.code, cut.problem().as_str()), (504, "deadline"));
    assert!(took >= Duration::from_millis(400), "{took:?}");
    let own = [("x-deadline-ms", "1200")];
    let begun = Instant::now();
    let cut = root.send("GET", "/v1/pipelines/test", &own, b"").await;
    assert_eq!(cut.code, 504);
    assert!(begun.elapsed() >= Duration::from_millis(1_200), "its own counts, if it is longer too");
    guarded.server.sigcont();
}

fn has_event(received: &[u8]) -> bool {
    received.windows(6).any(|window| window == b"\ndata:")
}

#[tokio::test]
async fn a_batch_takes_places_by_its_size() {
    let guarded = Guarded::start(&[]).await;
    let in_flight = async || guarded.seen_by("root").await["in_flight"].clone();
    assert_eq!(in_flight().await, 1, "the question itself");
    let events: Vec<_> = (0..900).map(|n| event("shop-1", "e", n)).collect();
    let batch = format!("[{}]", events.join(","));
    let places = batch.len().div_ceil(16 << 10);
    assert!(places > 3, "{places}");
    guarded.server.sigstop();
    let mut publishing = JoinSet::new();
    let (client, body) = (guarded.by("shop"), batch.clone());
    publishing.spawn(async move { client.publish(BATCH, body).await.code });
    eventually(LONG, "the batch takes its places", async || in_flight().await == places + 1).await;
    guarded.server.sigcont();
    assert_eq!(publishing.join_all().await, [202]);
    assert_eq!(in_flight().await, 1);

    // A batch without an announced size takes places too.
    guarded.server.sigstop();
    let chunk = format!("{:x}\r\n{batch}\r\n0\r\n\r\n", batch.len());
    let headers =
        [("content-type", BATCH), ("transfer-encoding", "chunked"), ("connection", "close")];
    let client = guarded.by("shop");
    let request = client.head("POST", "/v1/events", &headers) + &chunk;
    let mut chunked = JoinSet::new();
    chunked.spawn(async move { client.raw(request.as_bytes()).await });
    eventually(LONG, "it takes its places", async || in_flight().await == places + 1).await;
    guarded.server.sigcont();
    let answers = chunked.join_all().await;
    assert_eq!(Response::parse(&answers[0]).unwrap().0.code, 202);
}
