//! View counters over HTTP: the answers and the refusals.

mod refusals;

use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};
use jiff::civil::Date;
use serde_json::{Value, json};

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::http::{Client, Response};
use crate::support::instance::Instance;
use crate::support::mongo::{self, MongoServer};
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);
const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

struct Counting {
    redis: RedisServer,
    mongo: MongoServer,
    instance: Instance,
    client: Client,
}

impl Counting {
    async fn start() -> Self {
        Self::start_with(&[]).await
    }

    async fn start_with(settings: &[(&str, &str)]) -> Self {
        let (redis, mongo) =
            (RedisServer::start(Options::default()), MongoServer::start(mongo::Options::default()));
        let url = format!("{:?}", mongo.url());
        let settings = [&[("mongodb.url", &*url)], settings].concat();
        let config = config(&redis, "test", &settings);
        let instance = Instance::start(&config, Log::default().content()).await;
        let client = instance.client();
        Self { redis, mongo, instance, client }
    }

    async fn stop(self) {
        self.instance.stop().await;
    }
}

/// The path of the counters of bot `shop-1`, followed by `rest`.
fn path(rest: &str) -> String {
    format!("/v1/bots/shop-1/counters{rest}")
}

/// Sends a JSON body.
async fn send(client: &Client, method: &str, rest: &str, body: &Value) -> Response {
    client.send(method, &path(rest), &JSON, body.to_string().as_bytes()).await
}

/// Counts a view of an ad and returns its total.
async fn view(client: &Client, ad: &str) -> Value {
    let answer = client.post(&path(&format!("/{ad}/views"))).await;
    assert_eq!(answer.code, 200, "{answer:?}");
    answer.json()["total"].clone()
}

async fn totals(client: &Client, ids: &[&str]) -> Value {
    let answer = send(client, "POST", "/query", &json!({ "ids": ids })).await;
    assert_eq!(answer.code, 200, "{answer:?}");
    answer.json()
}

fn text(answer: &Response) -> &str {
    std::str::from_utf8(&answer.body).unwrap()
}

fn today() -> Date {
    let now = jiff::Timestamp::from_second(SystemClock.now().as_secs().cast_signed()).unwrap();
    now.to_zoned(jiff::tz::TimeZone::UTC).date()
}

/// The sum of the views of the last 30 days.
async fn of_days(client: &Client, ad: &str) -> u64 {
    let answer = client.get(&path(&format!("/{ad}/daily"))).await;
    assert_eq!(answer.code, 200, "{answer:?}");
    let days = answer.json()["days"].as_array().unwrap().clone();
    assert_eq!(days.len(), 30);
    days.iter().map(|day| day["views"].as_u64().unwrap()).sum()
}

/// The lines of a chunked answer, and whether its last chunk came.
fn lines(bytes: &[u8]) -> (Vec<Value>, bool) {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
    let (mut rest, mut body) = (&bytes[end + 4..], Vec::new());
    let complete = loop {
        let Some(line) = rest.windows(2).position(|window| window == b"\r\n") else { break false };
        let size = std::str::from_utf8(&rest[..line]).unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            break true;
        }
        let Some(chunk) = rest.get(line + 2..line + 2 + size) else { break false };
        body.extend(chunk);
        rest = rest.get(line + 4 + size..).unwrap_or_default();
    };
    let lines = String::from_utf8(body).unwrap();
    (lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), complete)
}

#[tokio::test]
async fn a_view_is_counted_immediately_and_told_in_every_way() {
    let counting = Counting::start().await;
    let client = &counting.client;
    assert_eq!(view(client, "x").await, 1);
    assert_eq!(send(client, "POST", "/x/views", &json!({})).await.json(), json!({ "total": 2 }));
    let three = send(client, "POST", "/x/views", &json!({ "n": 3 })).await;
    assert_eq!((three.code, text(&three)), (200, r#"{"total":5}"#));
    assert_eq!(
        send(client, "POST", "/x/views", &json!({ "n": 1000 })).await.json()["total"],
        1_005
    );
    // An ad of the same name of another bot is another ad.
    assert_eq!(client.post("/v1/bots/shop-2/counters/x/views").await.json()["total"], 1);

    let asked = client.get(&path("?ids=y,x,never")).await;
    assert_eq!((asked.code, text(&asked)), (200, r#"{"totals":{"y":0,"x":1005,"never":0}}"#));
    assert_eq!(asked.header("content-type"), Some("application/json"));

    eventually(LONG, "the days have it", async || of_days(client, "x").await == 1_005).await;
    let day = today();
    let daily = client.get(&path(&format!("/x/daily?from={day}&to={day}"))).await;
    assert_eq!(daily.json()["days"].as_array().unwrap().len(), 1, "{daily:?}");
    assert_eq!(daily.json()["days"][0]["day"], day.to_string());
    assert_eq!(of_days(client, "never").await, 0);
    let years = client.get(&path("/x/daily?from=2020-03-01&to=2022-02-28")).await;
    let days = years.json()["days"].as_array().unwrap().clone();
    assert_eq!((days.len(), &days[0]), (730, &json!({ "day": "2020-03-01", "views": 0 })));
    assert_eq!(days[729]["day"], "2022-02-28");
    counting.stop().await;
}

#[tokio::test]
async fn an_event_on_the_bus_counts_as_well() {
    // Views that were published before the instance started count too.
    let start = [("pipelines.counters.start", "\"earliest\"")];
    let counting = Counting::start_with(&start).await;
    let client = &counting.client;
    let viewed = |id: u64, data: Value| {
        let mut event: Value = serde_json::from_str(&event("shop-1", "ad.viewed", id)).unwrap();
        event["data"] = data;
        event.to_string()
    };
    let events = [viewed(1, json!({ "ad": "x" })), viewed(2, json!({ "ad": "x", "n": 4 }))];
    add(&counting.redis, STREAM, &events).await;
    let counted = async || totals(client, &["x"]).await["totals"]["x"] == 5;
    eventually(LONG, "they are counted", counted).await;
    counting.stop().await;
}

#[tokio::test]
async fn an_ad_may_have_any_name_and_is_told_in_the_order_that_was_asked() {
    let counting = Counting::start().await;
    let client = &counting.client;
    for (at, (encoded, ad)) in [
        ("a%2Fb", "a/b"),
        ("a%2Cb", "a,b"),
        ("%22%5C%22", "\"\\\""),
        ("%E2%82%AC%20%25", "€ %"),
        ("%7Ba%7D%3A*%3F", "{a}:*?"),
        ("views", "views"),
        // Routes take precedence over ads with the same name. Such an ad is reached with one letter
        // encoded.
        ("%65xport", "export"),
        ("%69mport", "import"),
        ("%71uery", "query"),
        (&*"x".repeat(128), &*"x".repeat(128)),
    ]
    .into_iter()
    .enumerate()
    {
        let total = at as u64 + 2;
        let put = send(client, "PUT", &format!("/{encoded}"), &json!({ "total": total - 1 })).await;
        assert_eq!(put.code, 204, "{ad}: {put:?}");
        assert_eq!(view(client, encoded).await, total, "{ad}");
        assert_eq!(totals(client, &[ad]).await, json!({ "totals": { ad: total } }));
        if !ad.contains(',') {
            let asked = client.get(&path(&format!("?ids={encoded},no"))).await.json();
            assert_eq!(asked, json!({ "totals": { ad: total, "no": 0 } }));
        }
        assert_eq!(client.get(&path(&format!("/{encoded}/daily"))).await.code, 200, "{ad}");
        assert_eq!(client.post(&path(&format!("/{encoded}/reset"))).await.code, 204, "{ad}");
        let deleted = client.send("DELETE", &path(&format!("/{encoded}")), &[], b"").await;
        assert_eq!(deleted.code, 204, "{ad}");
    }
    // With a further path segment, the name is an ad and not a route.
    assert_eq!(view(client, "export").await, 1);
    assert_eq!(view(client, "query").await, 1);
    for plain in ["export", "import", "query"] {
        let put = send(client, "PUT", &format!("/{plain}"), &json!({ "total": 1 })).await;
        assert_eq!((put.code, put.problem().as_str()), (405, "method"), "{plain}");
    }

    assert_eq!(view(client, "a").await, 1);
    let asked = client.get(&path("?ids=c,a,c,b,a")).await;
    assert_eq!(text(&asked), r#"{"totals":{"c":0,"a":1,"b":0}}"#);
    let asked = send(client, "POST", "/query", &json!({ "ids": ["c", "a", "c", "a,b"] })).await;
    assert_eq!(text(&asked), r#"{"totals":{"c":0,"a":1,"a,b":0}}"#);
    assert_eq!(totals(client, &[]).await, json!({ "totals": {} }));
    let thousand: Vec<String> = (0..1_000).map(|ad| format!("ad-{ad:0>125}")).collect();
    let thousand: Vec<&str> = thousand.iter().map(String::as_str).collect();
    assert_eq!(totals(client, &thousand).await["totals"].as_object().unwrap().len(), 1_000);
    counting.stop().await;
}

#[tokio::test]
async fn a_view_that_is_repeated_with_its_key_counts_once_and_is_answered_alike() {
    let counting = Counting::start().await;
    let client = &counting.client;
    let keyed = async |ad: &str, key: &str| {
        let (path, headers) = (path(&format!("/{ad}/views")), [("Idempotency-Key", key)]);
        client.send("POST", &path, &headers, b"").await.json()["total"].clone()
    };
    assert_eq!(keyed("x", "first").await, 1);
    assert_eq!(keyed("x", "second").await, 2);
    assert_eq!(keyed("x", "first").await, 1);
    assert_eq!(keyed("x", &"k".repeat(255)).await, 3);
    assert_eq!(keyed("x", &"k".repeat(255)).await, 3);
    assert_eq!(totals(client, &["x"]).await["totals"]["x"], 3);
    counting.stop().await;
}

#[tokio::test]
async fn an_ad_is_immediately_reset_set_and_forgotten_and_counts_from_there() {
    let counting = Counting::start().await;
    let client = &counting.client;
    let total = async || totals(client, &["x"]).await["totals"]["x"].clone();
    let of_today = today().to_string();
    for _ in 0..3 {
        view(client, "x").await;
    }
    assert_eq!(client.post(&path("/x/reset")).await.code, 204);
    assert_eq!(total().await, 0);
    assert_eq!(view(client, "x").await, 1);
    eventually(LONG, "so are the days", async || of_days(client, "x").await == 1).await;

    let figures = json!({ "total": 100, "days": { &*of_today: 40, "2020-02-29": 60 } });
    assert_eq!(send(client, "PUT", "/x", &figures).await.code, 204);
    assert_eq!(total().await, 100);
    assert_eq!(view(client, "x").await, 101);
    eventually(LONG, "so are the days", async || of_days(client, "x").await == 41).await;
    let leap = client.get(&path("/x/daily?from=2020-02-28&to=2020-03-01")).await.json();
    let views: Vec<_> = leap["days"].as_array().unwrap().iter().map(|day| &day["views"]).collect();
    assert_eq!(views, [0, 60, 0]);

    assert_eq!(client.send("DELETE", &path("/x"), &[], b"").await.code, 204);
    assert_eq!(total().await, 0);
    eventually(LONG, "so are the days", async || of_days(client, "x").await == 0).await;
    assert_eq!(view(client, "x").await, 1);
    let most = json!({ "total": 1_000_000_000_000_000_u64 });
    assert_eq!(send(client, "PUT", "/x", &most).await.code, 204);
    assert_eq!(view(client, "x").await, 1_000_000_000_000_001_u64);
    counting.stop().await;
}

#[tokio::test]
async fn a_day_is_exported_whole_line_by_line() {
    let counting = Counting::start().await;
    let client = &counting.client;
    // These fill more than one page of the store.
    let before = today();
    for ad in 0..1_100 {
        let views = send(client, "POST", &format!("/ad-{ad}/views"), &json!({ "n": 2 })).await;
        assert_eq!(views.code, 200, "{views:?}");
    }
    // These views have an unknown day.
    assert_eq!(send(client, "PUT", "/other", &json!({ "total": 2 })).await.code, 204);
    let mut days = vec![before, today()];
    days.dedup();
    let export = async |day: Date| {
        let headers = [("connection", "close")];
        let request = client.head("GET", &path(&format!("/export?day={day}")), &headers);
        let bytes = client.raw(request.as_bytes()).await;
        let (answer, _) = Response::parse(&bytes).unwrap();
        assert_eq!(answer.code, 200, "{answer:?}");
        assert_eq!(answer.header("content-type"), Some("application/x-ndjson"));
        let (lines, complete) = lines(&bytes);
        assert!(complete);
        lines
    };
    eventually(LONG, "all are in MongoDB", async || {
        client.get("/v1/pipelines/counters").await.json()["depth"] == 0
    })
    .await;
    let mut ads: Vec<String> = Vec::new();
    for day in days {
        for line in export(day).await {
            assert_eq!(line["views"], 2, "{line}");
            ads.push(line["ad"].as_str().unwrap().to_owned());
        }
    }
    ads.sort_unstable();
    ads.dedup();
    assert_eq!(ads.len(), 1_100);
    assert_eq!(export(before.yesterday().unwrap()).await, [Value::Null; 0]);

    // Only one export runs at a time. MongoDB is frozen, so the first one does not end.
    counting.mongo.sigstop();
    let day = path(&format!("/export?day={before}"));
    let (first, second) = tokio::join!(client.get(&day), client.get(&day));
    let busy = |answer: &Response| answer.code == 503 && answer.problem() == "busy";
    assert!(busy(&first) || busy(&second), "{first:?} {second:?}");
    for answer in [first, second] {
        assert!(answer.header("retry-after").is_some(), "{answer:?}");
    }
    counting.mongo.sigcont();
    eventually(LONG, "it goes on", async || client.get(&day).await.code == 200).await;
    counting.stop().await;
}

/// The tokens of the tests. The text of each is its name with a suffix.
fn tokens(directory: &std::path::Path) -> String {
    let table = |(name, scope): (&str, &str)| {
        let file = directory.join(name);
        std::fs::write(&file, format!("{name}-0123456789abcdef")).unwrap();
        let file = file.display();
        format!(
            "{{ name = \"{name}\", token_file = \"{file}\", scopes = [\"{scope}\"], bots = [\"shop-*\"] }}"
        )
    };
    let all = [("publisher", "publish"), ("reader", "read"), ("operator", "operate")];
    format!("[{}]", all.map(table).join(", "))
}

#[tokio::test]
async fn a_token_counts_sees_and_changes_its_own_bots_only() {
    let directory = tempfile::tempdir().unwrap();
    let counting = Counting::start_with(&[("auth.tokens", &tokens(directory.path()))]).await;
    let figures = json!({ "total": 1 });
    let ids = json!({ "ids": ["x"] });
    for (name, method, rest, body, code) in [
        ("publisher", "POST", "/x/views", None, 200),
        ("reader", "GET", "?ids=x", None, 200),
        ("reader", "POST", "/query", Some(&ids), 200),
        ("reader", "GET", "/x/daily", None, 200),
        ("reader", "GET", "/export?day=2026-11-01", None, 200),
        ("operator", "POST", "/x/reset", None, 204),
        ("operator", "PUT", "/x", Some(&figures), 204),
        ("operator", "DELETE", "/x", None, 204),
    ] {
        let body = body.map(ToString::to_string).unwrap_or_default();
        let ask = async |token: &str, bot: &str| {
            let client = counting.client.with_token(&format!("{token}-0123456789abcdef"));
            let path = format!("/v1/bots/{bot}/counters{rest}");
            client.send(method, &path, &JSON, body.as_bytes()).await
        };
        for token in ["publisher", "reader", "operator"] {
            let answer = ask(token, "shop-1").await;
            if token == name {
                assert_eq!(answer.code, code, "{method} {rest}: {answer:?}");
            } else {
                assert_eq!(answer.problem(), "forbidden", "{method} {rest} by {token}");
            }
            assert_eq!(ask(token, "other").await.problem(), "forbidden", "{method} {rest}");
        }
        assert_eq!(ask("nobody", "shop-1").await.problem(), "unauthorized", "{method} {rest}");
    }
    counting.stop().await;
}

#[tokio::test]
async fn changes_of_an_ad_are_logged_with_the_name_of_the_token() {
    let (redis, mongo) =
        (RedisServer::start(Options::default()), MongoServer::start(mongo::Options::default()));
    let directory = tempfile::tempdir().unwrap();
    let (tokens, url) = (tokens(directory.path()), format!("{:?}", mongo.url()));
    let settings =
        [("auth.tokens", &*tokens), ("mongodb.url", &*url), ("pipelines.test.handler", "\"log\"")];
    let served = Served::start(&config(&redis, "test", &settings)).await;
    let client = Client::new(&served.http()).with_token("operator-0123456789abcdef");
    assert_eq!(client.post(&path("/ad%20x/reset")).await.code, 204);
    assert_eq!(send(&client, "PUT", "/ad%20x", &json!({ "total": 1 })).await.code, 204);
    assert_eq!(client.send("DELETE", &path("/ad%20x"), &[], b"").await.code, 204);
    assert_eq!(client.post(&path("/ad%20x/views")).await.problem(), "forbidden");
    let mut acts = Vec::new();
    eventually(LONG, "it is logged", async || {
        acts = served
            .log()
            .lines()
            .filter(|line| line.contains("an operator acted"))
            .map(str::to_owned)
            .collect();
        acts.len() == 3
    })
    .await;
    for (act, action) in acts.iter().zip(["reset counter", "set counter", "forget counter"]) {
        let act: Value = serde_json::from_str(act).unwrap();
        let fields = json!({
            "message": "an operator acted", "token": "operator", "address": "127.0.0.1",
            "action": action, "pipeline": "counters", "bot": "shop-1", "target": "ad x",
            "details": if action == "set counter" { "total 1" } else { "total 0" }, "result": "done",
        });
        assert_eq!(act["fields"], fields);
    }
}
