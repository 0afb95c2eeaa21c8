//! Nothing of a tenant stays in Redis for ever: after a busy run over every product, each key has a
//! TTL, or is one of those that `docs/security.md` lists with their bounds.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::event::Event;
use fairlane::expression::Glob;
use fairlane::handler::{Failure, Outcomes};
use fairlane::id::BotId;
use fairlane::queue::PushOptions;
use redis::Value;
use redis::aio::MultiplexedConnection;
use serde_json::{Value as Json, json};

use crate::support::automation_rig::{LONG, RULES};
use crate::support::bus::add;
use crate::support::config::STREAM;
use crate::support::counter_fleet::Stores;
use crate::support::http::{Client, Response};
use crate::support::instance::Instance;
use crate::support::receiver::{Call, Receiver, Reply};
use crate::support::recorder::Log;
use crate::support::redis::Persistence;
use crate::support::wait::eventually;

const PAGE: &str = "docs/security.md";
const HEADING: &str = "### Keys without expiry";
const JSON: (&str, &str) = ("content-type", "application/json");
/// What every bot of the run is called, and nothing else.
const BOT: &str = "tenant";

/// A kind of keys without a TTL: its name, what bounds it, and why it may name bots that are idle;
/// empty: it does not.
type Row = (&'static str, &'static str, &'static str);

/// The same table as in the documentation.
const KEPT: &[Row] = &[
    ("`fl:{p:s}:meta`", "one per pipeline and shard", ""),
    ("`fl:{p:s}:ctl`", "bots with queued events, each once", ""),
    ("`fl:{p:s}:busy`, `…:own`", "bots that are leased or parked, each once", ""),
    ("`fl:{p:s}:att`", "bots whose events fail, each once", ""),
    (
        "`fl:{p:s}:fin`",
        "bots that were served lately, each once",
        "until the next claim in the shard",
    ),
    ("`fl:{p:s}:paused`, `…:paused-why`", "bots that an operator paused", "until they are resumed"),
    (
        "`fl:{p:s}:weight`",
        "10,000 bots per shard with a weight, rate or burst of their own",
        "until it is set back",
    ),
    ("`fl:{p:s}:hwm`", "one field per log of a bus", ""),
    ("`fl:{p:s}:q:<bot>`", "`max_queue` events per bot", ""),
    ("`fl:{p:s}:a:<lane>:<bot>`", "64 lists per bot, in `max_queue` too", ""),
    ("`fl:{p:s}:due`, `…:later`", "delayed events and pending notifications", ""),
    ("`fl:{p:s}:dlq`", "`dead.max` letters per pipeline", "for `dead.keep`, 7 days"),
    ("`fl:{p:s}:unflushed:<bot>`", "accounts with queued events", ""),
    ("`fl:{p:s}:n:<id>`", "pending notifications; a TTL after their end", ""),
    ("`fl:{p:s}:online:<bot>`", "pending notifications that wait for a user", ""),
    ("`fl:{p:s}:rules:<bot>`", "statistics of about 1,000 rules per bot", "while it has rules"),
    ("`fl:pipelines`", "one field per pipeline", ""),
    ("`fl:shards`, `fl:lease-key`, `fl:formats`", "one each", ""),
    ("`fl:processes`", "one field per running process", ""),
    ("`fl:notification-kinds`", "about 50 types", "the first user of a type"),
    ("`fl:{<log>}:read`, `…:starts`, `…:logs`", "one per log of a bus", ""),
    ("`fairlane:events`", "`bus.retention`, and what is not copied yet", "for `bus.retention`"),
    (
        "`fairlane:invalid`",
        "about 10,000 entries of at most 4 KiB",
        "until others take their place",
    ),
    ("`fl:{p:s}:held`", "up to nine fields per bot", "while they have dead letters"),
    (
        "`fl:audit`, `fl:audit-often`",
        "1,000 actions of operators each",
        "until others take their place",
    ),
];

/// The patterns of a row.
fn patterns((keys, ..): &Row) -> Vec<Glob> {
    let mut start = String::new();
    let patterns = keys.split(", ").map(|key| {
        let key = key.trim_matches('`');
        // `…:own` has the start of the key before it.
        let key = key.strip_prefix('…').map_or_else(|| key.to_owned(), |end| start.clone() + end);
        start = key.rfind(':').map_or_else(String::new, |at| key[..at].to_owned());
        let mut pattern = key.replace("{p:s}", "{*}");
        while let Some((before, (_, after))) =
            pattern.split_once('<').and_then(|(before, rest)| Some((before, rest.split_once('>')?)))
        {
            pattern = format!("{before}*{after}");
        }
        Glob::new(&pattern)
    });
    patterns.collect()
}

/// The row of a key.
fn row_of(key: &str) -> Option<&'static Row> {
    KEPT.iter().find(|row| patterns(row).iter().any(|pattern| pattern.matches(key)))
}

#[test]
fn a_key_has_one_row() {
    for (key, expected) in [
        ("fl:{work:0}:meta", Some(0)),
        ("fl:{work:12}:own", Some(2)),
        ("fl:{work:0}:q:a b", Some(8)),
        ("fl:{notifications:1}:online:shop\nann", Some(14)),
        ("fl:{fairlane:events}:starts", Some(20)),
        ("fl:{work:0}:other", None),
        ("fl:other", None),
    ] {
        let expected = expected.map(|at: usize| &KEPT[at]);
        assert_eq!(row_of(key), expected, "{key}");
        let count = KEPT.iter().flat_map(patterns).filter(|pattern| pattern.matches(key)).count();
        assert!(count <= 1, "{key} has {count} rows");
    }
}

#[test]
fn the_page_on_security_lists_the_keys_without_expiry() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    let page = fs::read_to_string(page).unwrap();
    let (_, section) = page.split_once(HEADING).expect("the page has the section");
    let section = section.split("\n#").next().unwrap();
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let rows = section.lines().filter(|line| line.starts_with('|')).skip(2).map(cells);
    let expected = KEPT.iter().map(|(keys, bound, idle)| vec![*keys, *bound, *idle]);
    assert_eq!(rows.collect::<Vec<_>>(), expected.collect::<Vec<_>>(), "{PAGE}, {HEADING}");
}

/// All keys, with whether they have a TTL.
async fn keys(connection: &mut MultiplexedConnection) -> BTreeMap<String, bool> {
    let mut keys = BTreeMap::new();
    let names: Vec<String> = redis::cmd("KEYS").arg("*").query_async(connection).await.unwrap();
    for name in names {
        let ttl: i64 = redis::cmd("PTTL").arg(&name).query_async(connection).await.unwrap();
        // -2: it is gone meanwhile.
        if ttl != -2 {
            keys.insert(name, ttl >= 0);
        }
    }
    keys
}

/// Every key without a TTL has a row. Answers those.
async fn known(connection: &mut MultiplexedConnection) -> BTreeSet<String> {
    let all = keys(connection).await;
    let kept: BTreeSet<String> =
        all.into_iter().filter(|(_, ends)| !ends).map(|(key, _)| key).collect();
    let unknown: Vec<&String> = kept.iter().filter(|key| row_of(key).is_none()).collect();
    assert!(unknown.is_empty(), "neither a TTL nor a row in {PAGE}: {unknown:?}");
    kept
}

/// What a key holds, as text.
async fn content(connection: &mut MultiplexedConnection, key: &str) -> String {
    let kind: String = redis::cmd("TYPE").arg(key).query_async(connection).await.unwrap();
    let (command, arguments): (_, &[&str]) = match kind.as_str() {
        "string" => ("GET", &[]),
        "hash" => ("HGETALL", &[]),
        "set" => ("SMEMBERS", &[]),
        "list" => ("LRANGE", &["0", "-1"]),
        "zset" => ("ZRANGE", &["0", "-1"]),
        "stream" => ("XRANGE", &["-", "+"]),
        _ => return String::new(),
    };
    let asked = redis::cmd(command).arg(key).arg(arguments).query_async(connection).await;
    text(&asked.unwrap())
}

fn text(value: &Value) -> String {
    match value {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::Array(values) => values.iter().map(text).collect::<Vec<_>>().join(" "),
        other => format!("{other:?}"),
    }
}

/// The keys without a TTL that name a bot, or hold the name of one, though their rows do not say so.
async fn names_idle_bots(connection: &mut MultiplexedConnection) -> Vec<String> {
    let mut naming = Vec::new();
    for key in known(connection).await {
        let (_, _, idle) = row_of(&key).unwrap();
        if idle.is_empty() && (key.contains(BOT) || content(connection, &key).await.contains(BOT)) {
            naming.push(key);
        }
    }
    naming
}

/// A bot of the run.
fn bot(name: &str) -> String {
    format!("{BOT}-{name}")
}

fn event(name: &str, kind: &str, id: usize) -> String {
    json!({ "specversion": "1.0", "id": id.to_string(), "source": "test", "type": kind,
        "botid": bot(name), "subject": "ann", "data": { "tag": "vip" } })
    .to_string()
}

async fn send(client: &Client, method: &str, path: &str, body: &Json) -> Response {
    let mut answer = Response::default();
    // 503 says to come again: on a busy machine MongoDB may not answer in time.
    eventually(LONG, "the request is answered", async || {
        answer = client.send(method, path, &[JSON], body.to_string().as_bytes()).await;
        answer.code != 503
    })
    .await;
    assert!(matches!(answer.code, 200..=204), "{method} {path}: {answer:?}");
    answer
}

/// Answers pushes with 202, a recheck with `no`, and everything else with 200.
async fn receiver() -> Receiver {
    Receiver::start(|call: Call| async move {
        match call.line.split(' ').nth(1) {
            Some("/push") => Reply::new(202, ""),
            Some("/recheck") => Reply::new(200, "no"),
            _ => Reply::new(200, ""),
        }
    })
    .await
}

/// Schedules a notification and answers its id.
async fn notify(client: &Client, name: &str, url: &str, more: &Json) -> String {
    let mut body = json!({ "bot": bot(name), "url": url, "uid": "ann", "type": "welcome" });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let answer = send(client, "POST", "/send_delayed", &body).await;
    answer.header("x-event-id").expect("an id").to_owned()
}

/// Leases that the receiver took over, and did not complete yet.
fn taken_over(receiver: &Receiver) -> Vec<String> {
    let calls = receiver.calls();
    let pushes = calls.iter().filter(|call| call.line.contains("/push"));
    pushes.map(|call| call.text("lease")).collect()
}

async fn depth(client: &Client, pipeline: &str) -> u64 {
    client.get(&format!("/v1/pipelines/{pipeline}")).await.json()["depth"].as_u64().unwrap()
}

/// The path of a bot of the run.
fn of(name: &str, rest: &str) -> String {
    format!("/v1/bots/{}/{rest}", bot(name))
}

/// A process with every kind of pipeline, which pushes to the receiver.
async fn process(stores: &Stores, receiver: &Receiver) -> Instance {
    let push = format!("\"http://{}/push\"", receiver.address);
    let own = [
        ("pipelines.work.handler", "\"recorder\""),
        ("pipelines.work.events", "[\"work.*\"]"),
        ("pipelines.work.start", "\"earliest\""),
        ("pipelines.work.handler_timeout", "\"5s\""),
        ("pipelines.work.backoff", "{ initial = \"5ms\", max = \"50ms\", jitter = 0.2 }"),
        ("pipelines.pushed.handler", "\"push\""),
        ("pipelines.pushed.events", "[\"pushed.*\"]"),
        ("pipelines.pushed.url", &push),
        ("pipelines.pushed.start", "\"earliest\""),
        ("pipelines.pushed.handler_timeout", "\"5s\""),
        ("bus.retention", "\"1h\""),
    ];
    let config = stores.direct(&[RULES, &own].concat());
    let handler = Log::default().handler(|slice| async move {
        let kinds: Vec<&str> = slice.events.iter().map(|event| event.event.kind()).collect();
        match kinds.iter().position(|kind| kind.ends_with("bad") || kind.ends_with("flaky")) {
            Some(at) if kinds[at].ends_with("bad") => Err(Failure::permanent(at, "it is bad")),
            Some(at) if slice.attempt < 3 => Err(Failure::transient(at, "not yet")),
            _ => Ok(Outcomes::done()),
        }
    });
    Instance::start(&config, handler).await
}

/// Creates rules, a profile, views, and an import.
async fn fill(client: &Client, hook: &str) {
    let rule = json!({ "on": ["work.done"], "actions": [
        { "set_tag": { "tag": "seen" } },
        { "emit": { "type": "work.emitted" } },
        { "emit": { "type": "work.late", "delay": 1 } },
        { "notify": { "url": hook, "type": "of-a-rule" } },
        { "count": { "ad": "ad-rule", "n": 2 } },
    ] });
    send(client, "PUT", &of("rules", "automations/all"), &rule).await;
    send(client, "PUT", &of("rules", "subscribers/ann"), &json!({ "tags": ["old"] })).await;
    for ad in ["ad-1", "ad-2"] {
        send(client, "POST", &of("views", &format!("counters/{ad}/views")), &json!({})).await;
    }
    send(client, "PUT", &of("views", "counters/ad-3"), &json!({ "total": 5 })).await;
    let import = [("content-type", "application/x-ndjson"), ("idempotency-key", "history")];
    let lines = b"{\"ad\":\"ad-4\",\"total\":9}\n";
    let path = of("views", "counters/import?line=1");
    assert_eq!(client.send("POST", &path, &import, lines).await.code, 200);
}

#[tokio::test]
async fn after_a_busy_run_every_key_ends_by_itself_or_has_a_bound() {
    let (stores, receiver) = (Stores::start(Persistence::Always), receiver().await);
    let hook = format!("http://{}/", receiver.address);
    let instance = process(&stores, &receiver).await;
    let (client, mut connection) = (instance.client(), stores.redis.connection().await);

    fill(&client, &hook).await;

    // Events that are done, retried, dead, delayed, paused, and handed over; and what is none.
    send(&client, "POST", &format!("/v1/pipelines/work/bots/{}/pause", bot("paused")), &json!({}))
        .await;
    let heavy = json!({ "weight": 3, "rate": "100/s" });
    send(&client, "PUT", &format!("/v1/pipelines/work/bots/{}", bot("heavy")), &heavy).await;
    let mut events = Vec::new();
    for id in 0..20 {
        events.extend([
            event("done", "work.done", id),
            event("rules", "work.done", id),
            event("heavy", "work.done", id),
            event("retried", "work.flaky", id),
            event("dead", "work.bad", id),
            event("paused", "work.done", id),
            event(&format!("leased-{id}"), "pushed.event", id),
            event("views", "ad.viewed", id).replace("\"tag\":\"vip\"", "\"ad\":\"ad-1\""),
            format!("no event of {}", bot("invalid")),
        ]);
    }
    add(&stores.redis, STREAM, &events).await;
    let work = instance.queue("work");
    let due = SystemClock.now() + Duration::from_secs(3_600);
    let delayed = BotId::parse(&bot("delayed")).unwrap();
    let later = Event::builder("work.done", &delayed).build().unwrap();
    let options = PushOptions { due: Some(due), idempotency: Some(("a-key", LONG)) };
    work.push(&delayed, &[later], options).await.unwrap();

    // Notifications: sent, refused, pending with a key, waiting for their user, cancelled.
    notify(&client, "sent", &hook, &json!({ "delay": 0 })).await;
    let recheck = format!("{hook}recheck");
    notify(&client, "refused", &hook, &json!({ "delay": 0, "recheck_url": recheck })).await;
    let pending = notify(&client, "pending", &hook, &json!({ "delay": 3600, "key": "once" })).await;
    let waiting = notify(&client, "waiting", &hook, &json!({ "send_than_online": true })).await;
    let cancelled = notify(&client, "cancelled", &hook, &json!({ "delay": 3600 })).await;
    send(&client, "DELETE", &format!("/v1/notifications/{cancelled}"), &json!({})).await;

    eventually(LONG, "all has happened", async || {
        let letters = client.get("/v1/pipelines/work/dead?limit=100").await.json();
        taken_over(&receiver).len() == 20
            && letters["dead_letters"].as_array().is_some_and(|letters| letters.len() == 20)
            && receiver.calls().iter().any(|call| call.line.contains("/recheck"))
            && !client.get(&of("rules", "automations/all")).await.json()["stats"]["matched"].eq(&0)
            && depth(&client, "work").await == 20
            && depth(&client, "automations").await == 0
            && stores.depth().await == 0
    })
    .await;
    assert_eq!(client.get(&of("views", "counters/export?day=2026-11-01")).await.code, 200);
    let kept = known(&mut connection).await;
    // The run was busy: there is a key of each row, but for some that live for a moment.
    let missing: Vec<&Row> = KEPT
        .iter()
        .filter(|row| !kept.iter().any(|key| row_of(key) == Some(*row)))
        .filter(|(keys, ..)| {
            ![
                "`fl:{p:s}:ctl`",
                "`fl:{p:s}:att`",
                "`fl:{p:s}:fin`",
                "`fl:{p:s}:a:<lane>:<bot>`",
                "`fl:{p:s}:unflushed:<bot>`",
            ]
            .contains(keys)
        })
        .collect();
    assert!(missing.is_empty(), "no key of these was there: {missing:?}");

    // Everything comes to an end.
    for lease in taken_over(&receiver) {
        let answer = client.post(&format!("/v1/leases/{lease}/complete")).await;
        assert_eq!(answer.code, 204, "{answer:?}");
    }
    for id in [pending, waiting] {
        send(&client, "DELETE", &format!("/v1/notifications/{id}"), &json!({})).await;
    }
    // Another one, which is due: the delayed event of an hour ahead would take too long.
    let path = format!("/v1/pipelines/work/bots/{}/resume", bot("paused"));
    send(&client, "POST", &path, &json!({})).await;
    send(
        &client,
        "PUT",
        &format!("/v1/pipelines/work/bots/{}", bot("heavy")),
        &json!({ "weight": 1 }),
    )
    .await;
    let until = Instant::now() + 3 * LONG;
    loop {
        let mut naming = names_idle_bots(&mut connection).await;
        // The event that is due in an hour.
        naming.retain(|key| !key.ends_with(":later"));
        if naming.is_empty() {
            break;
        }
        assert!(Instant::now() < until, "these keys name idle bots, and have no TTL: {naming:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for pipeline in ["work", "pushed", "automations", "counters", "notifications"] {
        eventually(LONG, pipeline, async || depth(&client, pipeline).await == 0).await;
    }
    instance.stop().await;
}
