//! Imports of history, over HTTP and by the command: each line counts once, in order, in spite of
//! repetitions. Also the totals and days of many ads in one call.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::cli::run_in;
use crate::support::counter_fleet::{self, Node, Stores, Sums, View, acknowledged};
use crate::support::http::{Client, Response};
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::Persistence;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);
const ADS: &str = "/v1/bots/shop/counters";
const DAY: &str = "2026-11-01";

/// The ads `from..to`. Ad `n` has `n` views, all but one of them on a known day.
fn rows(from: u64, to: u64) -> String {
    (from..to).fold(String::new(), |mut text, n| {
        let days = if n > 1 { json!({ DAY: n - 1 }) } else { json!({}) };
        writeln!(text, "{}", json!({ "ad": format!("ad-{n}"), "total": n, "days": days })).unwrap();
        text
    })
}

async fn send(client: &Client, key: &str, line: u64, body: &str) -> Response {
    let path = format!("{ADS}/import?line={line}");
    let headers = [("content-type", "application/x-ndjson"), ("idempotency-key", key)];
    client.send("POST", &path, &headers, body.as_bytes()).await
}

/// Imports lines for which there is space. Returns the numbers of imported and skipped lines, and
/// the next line.
async fn import(client: &Client, key: &str, line: u64, body: &str) -> [u64; 3] {
    let answer = acknowledged(async || send(client, key, line, body).await).await.json();
    ["imported", "skipped", "next"].map(|name| answer[name].as_u64().unwrap())
}

async fn query(client: &Client, body: &Value) -> Response {
    let headers = [("content-type", "application/json")];
    let path = format!("{ADS}/query");
    client.send("POST", &path, &headers, body.to_string().as_bytes()).await
}

/// The totals of ads, and their views on the known day.
async fn told(client: &Client, ids: &[&str]) -> Vec<(u64, u64)> {
    let body = json!({ "ids": ids, "from": DAY, "to": DAY });
    let answer = acknowledged(async || query(client, &body).await).await.json();
    let of = |id: &&str| {
        let days = answer["days"][id].as_array().unwrap();
        assert_eq!((days.len(), &days[0]["day"]), (1, &json!(DAY)), "{answer}");
        (answer["totals"][id].as_u64().unwrap(), days[0]["views"].as_u64().unwrap())
    };
    ids.iter().map(of).collect()
}

struct Rig {
    stores: Stores,
    instance: Instance,
    client: Client,
    config: String,
}

impl Rig {
    async fn start() -> Self {
        let stores = Stores::start(Persistence::Always);
        let config = stores.direct(&[]);
        let instance = Instance::start(&config, Log::default().content()).await;
        let client = instance.client();
        Self { stores, instance, client, config }
    }

    async fn is(&self, ids: &[&str], expected: &[(u64, u64)]) {
        eventually(LONG, "totals and days are told", async || {
            told(&self.client, ids).await == expected
        })
        .await;
    }

    async fn view(&self, ad: &str) {
        let path = format!("{ADS}/{ad}/views");
        acknowledged(async || self.client.post(&path).await).await;
    }

    async fn pause(&self, action: &str) {
        let path = format!("/v1/pipelines/counters/{action}");
        assert_eq!(self.client.post(&path).await.code, 204);
    }
}

#[tokio::test]
async fn lines_are_imported_once_however_requests_are_repeated_and_cut() {
    let rig = Rig::start().await;
    let client = &rig.client;
    let rows = |from, to| rows(from, to);
    assert_eq!(import(client, "k", 1, &rows(1, 11)).await, [10, 0, 11]);
    rig.is(&["ad-1", "ad-10", "ad-11"], &[(1, 0), (10, 9), (0, 0)]).await;
    // A repetition does not undo views that were counted meanwhile.
    rig.view("ad-10").await;
    assert_eq!(import(client, "k", 1, &rows(1, 11)).await, [0, 10, 11]);
    assert_eq!(import(client, "k", 8, &format!("{}\n", rows(8, 14))).await, [3, 3, 15]);
    assert_eq!(import(client, "k", 15, &rows(15, 16)).await, [1, 0, 16]);
    let behind = send(client, "k", 18, &rows(18, 19)).await;
    assert_eq!((behind.code, behind.problem().as_str()), (409, "import-gap"));
    assert!(
        behind.json()["detail"].as_str().unwrap().contains("continue with line 16"),
        "{behind:?}"
    );
    rig.is(&["ad-10", "ad-13", "ad-15", "ad-18"], &[(11, 9), (13, 12), (15, 14), (0, 0)]).await;
    // Another import, and an import of another bot with the same name, are independent.
    assert_eq!(import(client, "other", 1, &rows(10, 11)).await, [1, 0, 2]);
    rig.is(&["ad-10"], &[(10, 9)]).await;
    let path = "/v1/bots/another/counters/import";
    let headers = [("content-type", "application/x-ndjson"), ("idempotency-key", "k")];
    let another = client.send("POST", path, &headers, rows(1, 2).as_bytes()).await;
    assert_eq!(another.json(), json!({ "imported": 1, "skipped": 0, "next": 2 }));
    rig.instance.stop().await;
}

#[tokio::test]
async fn an_import_that_redis_interrupts_says_where_to_go_on() {
    let stores = Stores::start(Persistence::Always);
    let node = Node::start(&stores, &[]).await;
    let client = node.client();
    // The first line of the second write.
    node.redis.swallow("ad-251", 1);
    let answer = send(&client, "k", 1, &rows(1, 601)).await;
    assert_eq!(answer.code, 200, "{answer:?}");
    assert_eq!(answer.json(), json!({ "imported": 250, "skipped": 0, "next": 251 }));
    let log = node.served.log();
    assert!(log.contains("Redis interrupted an import"), "{log}");
    let [imported, skipped, next] = import(&client, "k", 251, &rows(251, 601)).await;
    assert_eq!((imported + skipped, next), (350, 601));
    let sums: Sums = (1..601).map(|n| (("shop".to_owned(), format!("ad-{n}")), n)).collect();
    eventually(LONG, "all totals are stored", async || stores.stored().await.0 == sums).await;
}

#[tokio::test]
async fn a_bad_line_is_told_with_its_number_and_nothing_of_its_request_is_imported() {
    let rig = Rig::start().await;
    let client = &rig.client;
    assert_eq!(import(client, "k", 1, &rows(1, 3)).await, [2, 0, 3]);
    let bad = format!("{}nonsense\n{{\"ad\":\"x\",\"total\":-1}}\n{}", rows(3, 5), rows(7, 8));
    let refused = send(client, "k", 3, &bad).await;
    assert_eq!(refused.code, 400);
    let problem = refused.json();
    let lines: Vec<_> = problem["errors"].as_array().unwrap().iter().map(|e| &e["field"]).collect();
    assert_eq!(lines, ["line 5", "line 6"], "{problem}");
    let detail = "2 lines cannot be used; nothing of this request was imported";
    assert_eq!(problem["detail"], detail);
    rig.is(&["ad-2", "ad-3", "ad-7"], &[(2, 1), (0, 0), (0, 0)]).await;

    let path = format!("{ADS}/import");
    let ndjson = ("content-type", "application/x-ndjson");
    let key = ("idempotency-key", "k");
    for (headers, query, body, code, part) in [
        (vec![ndjson], "", rows(1, 2), 400, "Idempotency-Key: it is missing"),
        (vec![ndjson, key], "?line=0", rows(1, 2), 400, "line: it is 0"),
        (vec![ndjson, key], "?line=x", rows(1, 2), 400, "line"),
        (vec![ndjson, key], "", "\n \n".to_owned(), 400, "no line"),
        (vec![("content-type", "application/json"), key], "", rows(1, 2), 415, "x-ndjson"),
        (vec![ndjson, key], "", rows(1, 50_000), 413, "1048576"),
    ] {
        let path = format!("{path}{query}");
        let answer = client.send("POST", &path, &headers, body.as_bytes()).await;
        assert_eq!(answer.code, code, "{answer:?}");
        assert!(answer.json()["detail"].as_str().unwrap().contains(part), "{answer:?}");
    }
    rig.instance.stop().await;
}

#[tokio::test]
async fn an_import_waits_while_its_records_wait_or_redis_is_nearly_full_and_then_goes_on() {
    let rig = Rig::start().await;
    let client = &rig.client;
    let mut redis = rig.stores.redis.connection().await;
    let mut memory = async |bytes: u64| {
        let mut command = redis::cmd("CONFIG");
        command.arg("SET").arg("maxmemory").arg(bytes);
        command.exec_async(&mut redis).await.unwrap();
    };
    memory(1 << 20).await;
    let full = send(client, "k", 1, &rows(1, 2)).await;
    assert_eq!((full.code, full.problem().as_str()), (503, "full"), "{full:?}");
    assert!(full.header("retry-after").is_some());
    memory(0).await;

    rig.pause("pause").await;
    // Queued views are not replacements, and stop no import.
    let views: Vec<View> = (0..3_000).map(|_| View::new("shop", "busy", 1)).collect();
    rig.stores.publish(&views).await;
    eventually(LONG, "views are queued", async || rig.stores.depth().await == 3_000).await;
    let all = rows(1, 2_301);
    let answer = send(client, "k", 1, &all).await;
    assert_eq!(answer.code, 200);
    let next = answer.json()["next"].as_u64().unwrap();
    assert!((2_001..=2_251).contains(&next), "{answer:?}");
    let rest = rows(next, 2_301);
    let waits = send(client, "k", next, &rest).await;
    assert_eq!((waits.code, waits.problem().as_str()), (503, "busy"));
    assert!(waits.header("retry-after").is_some());
    rig.pause("resume").await;
    let mut next = next;
    eventually(LONG, "the import ends", async || {
        let answer = send(client, "k", next, &rows(next, 2_301)).await;
        if answer.code == 200 {
            next = answer.json()["next"].as_u64().unwrap();
        }
        next == 2_301
    })
    .await;
    let ads = (1..2_301).map(|n| ("shop".to_owned(), format!("ad-{n}"))).collect();
    eventually(LONG, "all totals are told", async || {
        let totals = counter_fleet::told(client, &ads).await;
        totals.iter().all(|((_, ad), total)| total.is_some_and(|n| format!("ad-{n}") == *ad))
    })
    .await;
    rig.instance.stop().await;
}

#[tokio::test]
async fn the_command_imports_a_file_goes_on_where_it_ended_and_refuses_one_with_a_bad_line() {
    let rig = Rig::start().await;
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    write("fairlane.toml", &rig.config);
    let run = async |arguments: &[&str]| {
        let arguments = [&["counters", "import"], arguments, &["--bot", "shop"]].concat();
        let (dir, arguments) = (dir.path().to_owned(), arguments.iter().map(|a| (*a).to_owned()));
        let arguments: Vec<String> = arguments.collect();
        let run = move || {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            run_in(&dir, &arguments, "")
        };
        tokio::task::spawn_blocking(run).await.unwrap()
    };

    write("bad.ndjson", &format!("{}nonsense\n{{\"ad\":\"x\"}}\n", rows(1, 3)));
    let bad = run(&["bad.ndjson"]).await;
    assert_eq!((bad.code, bad.out.as_str()), (1, ""), "{bad:?}");
    assert!(bad.err.contains("bad.ndjson: line 3: ") && bad.err.contains("line 4: "), "{bad:?}");
    assert!(bad.err.contains("2 lines cannot be used, and nothing was imported"), "{bad:?}");
    rig.is(&["ad-1"], &[(0, 0)]).await;

    write("half.ndjson", &rows(1, 151));
    write("all.ndjson", &rows(1, 301));
    let half = run(&["half.ndjson", "--key", "history"]).await;
    assert_eq!((half.code, half.out.trim()), (0, "imported 150 lines"), "{half:?}");
    rig.view("ad-7").await;
    // The rest of the file under the same name, as if the first call had stopped in the middle.
    let all = run(&["all.ndjson", "--key", "history", "--json"]).await;
    let shown: Value = serde_json::from_str(&all.out).unwrap();
    assert_eq!(shown, json!({ "key": "history", "imported": 150, "skipped": 150 }), "{all:?}");
    rig.is(&["ad-7", "ad-300"], &[(8, 6), (300, 299)]).await;
    // Without a name, the content of the file identifies the import.
    write("few.ndjson", &rows(7, 9));
    assert_eq!(run(&["few.ndjson"]).await.out.trim(), "imported 2 lines");
    rig.view("ad-7").await;
    let again = run(&["few.ndjson"]).await;
    assert_eq!(again.out.trim(), "imported 0 lines, 2 lines imported before");
    rig.is(&["ad-7", "ad-8"], &[(8, 6), (8, 7)]).await;

    let missing = run(&["missing.ndjson"]).await;
    assert!(missing.code == 64 && missing.err.contains("missing.ndjson"), "{missing:?}");
    rig.instance.stop().await;
}

#[tokio::test]
async fn totals_and_days_of_many_ads_are_told_in_one_call_within_bounds() {
    let rig = Rig::start().await;
    assert_eq!(import(&rig.client, "k", 1, &rows(1, 4)).await, [3, 0, 4]);
    let body = json!({ "ids": ["ad-3", "never"], "from": "2026-10-31", "to": "2026-11-02" });
    let day = |day: &str, views: u64| json!({ "day": day, "views": views });
    let days = |views| json!([day("2026-10-31", 0), day(DAY, views), day("2026-11-02", 0)]);
    let expected = json!({
        "totals": { "ad-3": 3, "never": 0 },
        "days": { "ad-3": days(2), "never": days(0) },
    });
    eventually(LONG, "totals and days are told", async || {
        query(&rig.client, &body).await.json() == expected
    })
    .await;
    let last = query(&rig.client, &json!({ "ids": ["ad-3"], "to": DAY })).await.json();
    assert_eq!(last["days"]["ad-3"].as_array().unwrap().len(), 30);
    assert_eq!(
        query(&rig.client, &json!({ "ids": [], "from": DAY, "to": DAY })).await.json(),
        json!({ "totals": {}, "days": {} })
    );
    let many: Vec<_> = (0..1_000).map(|n| format!("ad-{n}")).collect();
    let october = json!({ "ids": many, "from": "2026-10-01", "to": "2026-10-31" });
    assert_eq!(query(&rig.client, &october).await.code, 200);
    for (body, part) in [
        (json!({ "ids": many, "from": "2026-10-01", "to": "2026-11-01" }), "the maximum is 31000"),
        (json!({ "ids": ["x"], "from": "2026-11-02", "to": DAY }), "after to"),
        (json!({ "ids": ["x"], "from": "2020-01-01", "to": DAY }), "24 months"),
        (json!({ "ids": ["x"], "from": "1.11.2026" }), "it is no day"),
    ] {
        let answer = query(&rig.client, &body).await;
        assert_eq!(answer.code, 400, "{answer:?}");
        assert!(answer.json()["detail"].as_str().unwrap().contains(part), "{answer:?}");
    }
    rig.instance.stop().await;
}
