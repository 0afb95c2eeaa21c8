//! What all bots of a process share, beside one hostile bot: the bus, the batches of the fan-out and
//! of the workers, time for filters, exports, live pages, metrics, and the log.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fairlane::counters::store::DAILY;
use fairlane::handler::{Failure, Outcomes, Slice};
use futures_util::future::{BoxFuture, join_all};
use mongodb::bson::{Document, doc};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::support::automation_rig::{self, Rig};
use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::http::{Client, get};
use crate::support::instance::Instance;
use crate::support::receiver::Receiver;
use crate::support::recorder::{Log, Noting};
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::wait::{Stopwatch, eventually, judged, tried};

const LONG: Duration = Duration::from_secs(60);
/// A quiet bot's event is handled within this, whatever a hostile one does. On an idle machine it
/// takes milliseconds; behind a hostile backlog it would take ten times as long as this.
const SOON: Duration = Duration::from_secs(5);
/// Steps from the publishing of an event to its handling. A pause of the machine may delay each of them.
const STEPS: u32 = 4;
const BATCH: &str = "application/cloudevents-batch+json";
const STRUCTURED: &str = "application/cloudevents+json";

type Handled = BoxFuture<'static, Result<Outcomes, Failure>>;

/// Takes so long for each event of the bot `hostile`, and no time for those of others.
fn slow(log: &Log, each: Duration) -> Noting<impl Fn(Slice) -> Handled + use<>> {
    log.handler(move |slice: Slice| -> Handled {
        Box::pin(async move {
            if slice.bot.as_str() == "hostile" {
                tokio::time::sleep(each * u32::try_from(slice.events.len()).unwrap()).await;
            }
            Ok(Outcomes::done())
        })
    })
}

/// Events of a bot that were handled.
fn handled(log: &Log, bot: &str) -> usize {
    log.all().iter().filter(|seen| seen.bot == bot).count()
}

/// Publishes events of a quiet bot one after the other, and waits until each is handled.
async fn quiet_is_served(server: &RedisServer, log: &Log, count: usize) {
    assert!(quiet_is_soon(server, log, count, false).await);
}

/// The same. Returns whether each was handled soon: with an excuse, the caller tries again.
async fn quiet_is_soon(server: &RedisServer, log: &Log, count: usize, is_excused: bool) -> bool {
    let before = handled(log, "quiet");
    for id in 0..count {
        let published = Stopwatch::start();
        add(server, STREAM, &[event("quiet", "test", before + id)]).await;
        let is_done = async || handled(log, "quiet") > before + id;
        eventually(LONG, "the quiet bot's event is handled", is_done).await;
        let soon = || published.within_steps(SOON, STEPS, "the quiet bot's event is handled");
        if !judged(is_excused, soon) {
            return false;
        }
    }
    true
}

/// An event with nearly as much data as the bus takes.
fn large(bot: &str, id: usize) -> String {
    json!({ "specversion": "1.0", "id": id.to_string(), "source": "test", "type": "test",
        "botid": bot, "data": "x".repeat(900_000) })
    .to_string()
}

#[tokio::test]
async fn large_events_of_one_bot_delay_no_small_ones_of_another() {
    let (server, log) = (RedisServer::start(Options::default()), Log::default());
    let settings = [("pipelines.large.workers.max", "4")];
    let each = Duration::from_millis(250);
    let instance = Instance::start(&config(&server, "large", &settings), slow(&log, each)).await;
    let events: Vec<String> = (0..150).map(|id| large("hostile", id)).collect();
    add(&server, STREAM, &events).await;
    eventually(LONG, "they are being handled", async || handled(&log, "hostile") > 0).await;
    quiet_is_served(&server, &log, 20).await;
    assert!(handled(&log, "hostile") < events.len(), "there was a backlog all the time");
    instance.stop().await;
}

#[tokio::test]
async fn a_burst_of_one_tenant_on_the_bus_delays_no_other_bot_by_its_backlog() {
    const BURST: usize = 20_000;
    let (server, log) = (RedisServer::start(Options::default()), Log::default());
    let settings = [("pipelines.burst.workers.max", "4")];
    let each = Duration::from_millis(5);
    let instance = Instance::start(&config(&server, "burst", &settings), slow(&log, each)).await;
    let events: Vec<String> = (0..BURST).map(|id| event("hostile", "test", id)).collect();
    add(&server, STREAM, &events).await;
    // Behind the burst on the bus, but not behind its handling: that takes 100 s.
    let published = Instant::now();
    add(&server, STREAM, &[event("quiet", "test", 0)]).await;
    eventually(LONG, "it is handled", async || handled(&log, "quiet") == 1).await;
    assert!(published.elapsed() < SOON * 6, "it took {:?}", published.elapsed());
    assert!(handled(&log, "hostile") < BURST / 2, "most of the burst waits");
    quiet_is_served(&server, &log, 20).await;
    drop(instance);
}

async fn publish_for_ever(client: &Client, body: &str) {
    loop {
        client.publish(BATCH, body).await;
    }
}

#[tokio::test]
async fn a_tenant_that_publishes_without_pause_over_http_delays_no_other_bot() {
    let (server, log) = (RedisServer::start(Options::default()), Log::default());
    let settings = [("pipelines.pressed.workers.max", "4")];
    let each = Duration::from_millis(1);
    let instance = Instance::start(&config(&server, "pressed", &settings), slow(&log, each)).await;
    let client = instance.client();
    let events: Vec<_> = (0..50).map(|id| event("hostile", "test", id)).collect();
    let body = format!("[{}]", events.join(","));
    let flood = join_all((0..4).map(|_| publish_for_ever(&client, &body)));
    let handles = async {
        eventually(LONG, "the flood has begun", async || handled(&log, "hostile") > 50).await;
        for id in 0..20 {
            let published = Stopwatch::start();
            let answer = client.publish(STRUCTURED, event("quiet", "test", id)).await;
            assert_eq!(answer.code, 202, "{answer:?}");
            let is_done = async || handled(&log, "quiet") > id;
            eventually(LONG, "the quiet bot's event is handled", is_done).await;
            published.within_steps(SOON, STEPS, "the quiet bot's event is handled");
        }
    };
    tokio::select! {
        _ = flood => unreachable!("it has no end"),
        () = handles => {}
    }
    drop(instance);
}

/// Near the bound of steps of a filter.
const HEAVY: &str = "event.data.list.exists(x, event.data.list.exists(y, x + y == -1))";

/// On a runtime with one thread, heavy rules keep it from all other tasks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heavy_rules_of_one_bot_delay_no_rules_of_another() {
    let rig = Rig::start(&[]).await;
    let receiver = Receiver::content().await;
    let rule =
        json!({ "on": ["heavy"], "filter": HEAVY, "actions": [{ "set_tag": { "tag": "t" } }] });
    for number in 0..20 {
        rig.put("hostile", &format!("rule-{number}"), &rule).await;
    }
    let rule = json!({ "on": ["ask"], "actions": [{ "push": { "url": receiver.url() } }] });
    rig.put("quiet", "tell", &rule).await;
    let list: Vec<u64> = (0..50).collect();
    let heavy = |id: usize| {
        automation_rig::event("hostile", "ann", &id.to_string(), "heavy", json!({ "list": list }))
    };
    let heavy: Vec<Value> = (0..500).map(heavy).collect();
    rig.publish(&heavy).await;
    let waiting = async || automation_rig::depth(&rig.stores).await;
    eventually(LONG, "they wait", async || waiting().await > 100).await;
    let mut asked = 0;
    tried(3, async |is_last| {
        for _ in 0..5 {
            let published = Stopwatch::start();
            asked += 1;
            let id = format!("quiet-{asked}");
            rig.publish(&[automation_rig::event("quiet", "bob", &id, "ask", json!({}))]).await;
            eventually(LONG, "the rule is applied", async || receiver.called() >= asked).await;
            let second = Duration::from_secs(1);
            let soon = || published.within_steps(second, STEPS, "the rule is applied");
            if !judged(!is_last, soon) {
                return false;
            }
        }
        true
    })
    .await;
    assert!(waiting().await > 0, "there was a backlog all the time");
    drop(rig.instance);
}

#[tokio::test]
async fn checks_of_long_filters_wait_by_turns_and_costly_classes_are_refused() {
    let rig = Rig::start(&[]).await;
    let test = async |filter: &str| {
        let rule =
            json!({ "on": ["a"], "filter": filter, "actions": [{ "set_tag": { "tag": "t" } }] });
        let body = json!({ "event": { "type": "a" }, "rule": rule }).to_string();
        let path = "/v1/bots/hostile/automations/test";
        rig.client
            .send("POST", path, &[("content-type", "application/json")], body.as_bytes())
            .await
    };
    // Each would take milliseconds to compile, at each of thousands of evaluations.
    for class in [r"(?i)[\\PL&&a]", r"(?i)[\\D]", r"(?i)\\p{any}"] {
        let refused = test(&format!("[0, 0].exists(x, event.type.matches('{class}'))")).await;
        assert_eq!(refused.code, 400, "{refused:?}");
        let detail = refused.json()["detail"].to_string();
        assert!(detail.contains("ignores the case of a class"), "{detail}");
    }
    let long = format!("event.data.n in [{}]", vec!["-1"; 400].join(","));
    // On a busy machine, admission control refuses some before they ask for a turn.
    let asked = async || loop {
        let answer = test(&long).await;
        if answer.code != 503 {
            break answer;
        }
    };
    let flood = join_all((0..40).map(|_| asked()));
    let quiet = async {
        // Behind the flood. On a slow machine it is before the flood, and this shows nothing.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let begun = Instant::now();
        rig.put(
            "quiet",
            "rule",
            &json!({ "on": ["ask"], "filter": "event.data.n == 1",
            "actions": [{ "set_tag": { "tag": "t" } }] }),
        )
        .await;
        begun.elapsed()
    };
    let (flood, took) = tokio::join!(flood, quiet);
    assert!(took < SOON, "a short rule took {took:?}");
    let refused = flood.iter().filter(|answer| answer.code == 429).count();
    let served = flood.iter().filter(|answer| answer.code == 200).count();
    assert!(refused >= 20 && served >= 1, "{refused} refused, {served} served");
}

#[tokio::test]
async fn exports_that_one_tenant_never_reads_delay_no_other() {
    let rig = Rig::start(&[]).await;
    // More than the buffers of the connections take.
    let documents = (0..30_000).map(|number| {
        let (ad, mut days) = (format!("{number}-{}", "long-name-".repeat(12)), vec![0_i64; 31]);
        days[0] = 7;
        let id = format!("hostile\u{1f}{ad}\u{1f}2026-11");
        doc! { "_id": id, "bot": "hostile", "ad": ad, "month": "2026-11", "days": days, "s": 0_i64 }
    });
    let database = mongodb::Client::with_uri_str(rig.stores.mongo.url()).await.unwrap();
    let daily = database.database("fairlane").collection::<Document>(DAILY);
    for some in documents.collect::<Vec<_>>().chunks(5_000) {
        daily.insert_many(some).await.unwrap();
    }
    eventually(LONG, "a view is counted", async || {
        rig.client.post("/v1/bots/quiet/counters/ad-1/views").await.code == 200
    })
    .await;
    eventually(LONG, "they are written", async || rig.stores.depth().await == 0).await;
    let mut open = Vec::new();
    for _ in 0..64 {
        let mut stream = TcpStream::connect(&rig.client.address).await.unwrap();
        let head = rig.client.head("GET", "/v1/bots/hostile/counters/export?day=2026-11-01", &[]);
        stream.write_all(head.as_bytes()).await.unwrap();
        open.push(stream);
    }
    eventually(LONG, "one of them is answered", async || {
        let day = "/v1/bots/hostile/counters/export?day=2026-11-01";
        rig.client.get(day).await.code == 503
    })
    .await;
    // The top ads of a page are an export too.
    for (bot, shown) in [("hostile", "Busy: "), ("quiet", "ad-1")] {
        let path = format!("/counters?bot={bot}");
        eventually(LONG, shown, async || {
            String::from_utf8(rig.client.get(&path).await.body).unwrap().contains(shown)
        })
        .await;
    }
    for _ in 0..10 {
        let asked = Stopwatch::start();
        let totals = rig.client.get("/v1/bots/quiet/counters?ids=ad-1").await;
        assert_eq!((totals.code, &totals.json()["totals"]["ad-1"]), (200, &json!(1)));
        let export = rig.client.get("/v1/bots/quiet/counters/export?day=2026-11-01").await;
        assert_eq!(export.code, 200, "{export:?}");
        asked.within_steps(SOON, 2, "they are answered");
    }
    drop(open);
    drop(rig.instance);
}

/// Reads a live page for ever, and counts its events: each ends with an empty line.
async fn watch(page: &mut TcpStream, shown: &AtomicUsize) {
    let (mut bytes, mut last) = ([0; 4_096], 0);
    loop {
        let read = page.read(&mut bytes).await.unwrap();
        assert!(read > 0, "the page has ended");
        for byte in &bytes[..read] {
            if (last, *byte) == (b'\n', b'\n') {
                shown.fetch_add(1, Ordering::Relaxed);
            }
            last = *byte;
        }
    }
}

/// On a runtime with one thread, pages and events share what a busy machine leaves of one processor.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn live_pages_of_a_full_bot_delay_no_events_of_another() {
    tried(3, pages_delay_none).await;
}

/// False: a busy machine may have delayed the events.
async fn pages_delay_none(is_last: bool) -> bool {
    let (server, log) = (RedisServer::start(Options::default()), Log::default());
    let instance = Instance::start(&config(&server, "watched", &[]), log.content()).await;
    let client = instance.client();
    let paused = client.post("/v1/pipelines/watched/bots/hostile/pause").await;
    assert_eq!(paused.code, 204, "{paused:?}");
    let events: Vec<String> = (0..30).map(|id| large("hostile", id)).collect();
    add(&server, STREAM, &events).await;
    let mut pages = Vec::new();
    for _ in 0..16 {
        let mut stream = TcpStream::connect(&client.address).await.unwrap();
        let head = client.head("GET", "/bots/hostile", &[("accept", "text/event-stream")]);
        stream.write_all(head.as_bytes()).await.unwrap();
        pages.push(stream);
    }
    let shown: Vec<_> = pages.iter().map(|_| AtomicUsize::new(0)).collect();
    let each_is_shown =
        |times: usize| shown.iter().all(|shown| shown.load(Ordering::Relaxed) >= times);
    let watching = join_all(pages.iter_mut().zip(&shown).map(|(page, shown)| watch(page, shown)));
    let beside = async {
        // Each page is read from Redis every two seconds, and shown again.
        eventually(LONG, "each page is shown again", async || each_is_shown(2)).await;
        let begun = Instant::now();
        while !each_is_shown(4) {
            if !quiet_is_soon(&server, &log, 10, !is_last).await {
                return false;
            }
            assert!(begun.elapsed() < LONG, "the pages are not shown again");
        }
        true
    };
    let is_soon = tokio::select! {
        _ = watching => unreachable!("they have no end"),
        is_soon = beside => is_soon,
    };
    drop(pages);
    drop(instance);
    is_soon
}

/// The series of a process: names and labels, without values.
async fn series(process: &Served) -> BTreeSet<String> {
    let text = get(&process.metrics(), "/metrics").await.1;
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| Some(line.rsplit_once(' ')?.0.to_owned())).collect()
}

/// Everything whose names a caller chooses, with new ones: bots, types, hosts, paths, tokens, ads.
async fn invent(server: &RedisServer, client: &Client, round: usize) {
    let mut events = Vec::new();
    for n in 0..120 {
        let name = format!("invented-{round}-{n}");
        events.push(event(&name, &format!("taken.{name}"), n));
        events.push(event(&name, &format!("unknown.{name}"), n));
        let paths = [
            format!("/v1/pipelines/test/bots/{name}"),
            format!("/v1/pipelines/{name}"),
            format!("/v1/bots/{name}/counters?ids={name}"),
            format!("/v1/{name}"),
            format!("/{name}"),
            format!("/user_online?bot={name}&uid={name}"),
        ];
        for path in &paths {
            client.get(path).await;
        }
        let kind = ["get", "INVENTED"][n % 2];
        client.with_token(&name).send(kind, "/v1/pipelines", &[], b"").await;
        let url = format!("http%3A%2F%2F{name}.example%3A{}%2F", 20_000 + n);
        client.get(&format!("/send_delayed?bot={name}&type={name}&delay=3600&url={url}")).await;
    }
    add(server, STREAM, &events).await;
}

#[tokio::test]
async fn invented_names_add_no_series_to_the_metrics() {
    let server = RedisServer::start(Options::default());
    let settings = [
        ("pipelines.test.handler", "\"log\""),
        ("pipelines.test.events", "[\"taken.*\"]"),
        ("pipelines.notifications.enabled", "true"),
    ];
    let process = Served::start(&config(&server, "test", &settings)).await;
    let client = Client::new(&process.http());
    let copied = async |count: f64| {
        eventually(LONG, "they are copied", async || {
            let text = get(&process.metrics(), "/metrics").await.1;
            let name = "fairlane_bus_events_total";
            crate::support::http::metric(&text, name, &[("stream", STREAM)]) >= Some(count)
        })
        .await;
    };
    // Some labels have a bounded number of values, which the first round uses up.
    invent(&server, &client, 0).await;
    copied(240.0).await;
    // 50 types of events that match no pipeline, and 50 types of notifications.
    let mut before = BTreeSet::new();
    eventually(LONG, "all places for names are taken", async || {
        before = series(&process).await;
        before.iter().filter(|series| series.contains("invented-0-")).count() >= 100
    })
    .await;
    let named = before.iter().filter(|series| series.contains("invented-0-")).count();
    assert_eq!(named, 100, "series have names that a caller chose");
    for round in 1..3 {
        invent(&server, &client, round).await;
    }
    copied(720.0).await;
    let after = series(&process).await;
    let new: Vec<&String> = after.difference(&before).collect();
    let named: Vec<&&String> = new.iter().filter(|series| series.contains("invented")).collect();
    assert!(named.is_empty(), "{named:?}");
    // Some appear with the first event of their kind, from any sender, and with the first call of a
    // script, which has a fixed name.
    let new: Vec<_> =
        new.into_iter().filter(|series| !series.starts_with("fairlane_script_seconds")).collect();
    assert!(new.len() < 30, "{} new series: {new:#?}", new.len());
}

/// Bad input of one tenant, of every kind that a request can carry.
async fn bad_input(client: &Client, n: usize) {
    let json = [("content-type", "application/json")];
    let hostile = format!("hostile\u{202e}\n{n}");
    client.publish(STRUCTURED, b"{\"specversion\":").await;
    client.publish(STRUCTURED, event(&hostile, "\u{0}", n)).await;
    client.with_token("an-unknown-token-000").get("/v1/pipelines").await;
    client.get("/send_delayed?delay=0&url=http://10.0.0.1/").await;
    client.get("/send_delayed?delay=0&url=http://no-such-name.invalid/").await;
    client.send("PUT", "/v1/bots/hostile/automations/x", &json, b"{\"filter\":\"((\"}").await;
    client.send("POST", "/v1/leases/none/complete", &json, b"{}").await;
    client.get("/v1/pipelines/none/dead?cursor=bad").await;
}

#[tokio::test]
async fn bad_input_of_one_tenant_writes_few_lines() {
    const ROUNDS: usize = 150;
    let server = RedisServer::start(Options::default());
    let settings = [
        ("pipelines.test.handler", "\"push\""),
        ("pipelines.test.url", "\"http://127.0.0.1:20009/\""),
        ("pipelines.notifications.enabled", "true"),
    ];
    let process = Served::start(&config(&server, "test", &settings)).await;
    let client = Client::new(&process.http());
    let (before, begun) = (process.log().lines().count(), Instant::now());
    for n in 0..ROUNDS {
        bad_input(&client, n).await;
    }
    let lines: Vec<String> = process.log().lines().skip(before).map(str::to_owned).collect();
    println!("{} lines in {:?}", lines.len(), begun.elapsed());
    assert!(lines.len() <= 20, "{} lines: {lines:#?}", lines.len());
}

#[tokio::test]
async fn dead_letters_of_one_bot_write_few_lines_and_those_of_another_are_logged() {
    const LETTERS: usize = 300;
    let server = RedisServer::start(Options::default());
    let receiver = Receiver::start(async |_| crate::support::receiver::Reply::new(500, "")).await;
    let url = format!("{:?}", receiver.url());
    let settings = [
        ("pipelines.test.handler", "\"push\""),
        ("pipelines.test.url", &*url),
        ("pipelines.test.max_attempts", "1"),
    ];
    let process = Served::start(&config(&server, "test", &settings)).await;
    let client = Client::new(&process.http());
    let letters = async |bot: &str| {
        let path = format!("/v1/pipelines/test/dead?bot={bot}&limit=1000");
        client.get(&path).await.json()["dead_letters"].as_array().map_or(0, Vec::len)
    };
    let events: Vec<String> = (0..LETTERS).map(|id| event("hostile", "bad", id)).collect();
    add(&server, STREAM, &events).await;
    eventually(LONG, "all are dead", async || letters("hostile").await == LETTERS).await;
    add(&server, STREAM, &[event("quiet", "bad", 0)]).await;
    eventually(LONG, "it is dead", async || letters("quiet").await == 1).await;
    let lines_of = |bot: &str| {
        let log = process.log();
        let named = format!("\"bot\":\"{bot}\"");
        let told = log.lines().filter(|line| line.contains("became a dead letter"));
        told.filter(|line| line.contains(&named)).count()
    };
    eventually(LONG, "the quiet bot's is logged", async || lines_of("quiet") == 1).await;
    // One a minute.
    assert!(lines_of("hostile") <= 5, "{} lines", lines_of("hostile"));
}
