//! No bot can fill Redis: what each one holds is counted and bounded.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::event::Event;
use fairlane::id::BotId;
use fairlane::queue::{Holdings, PushError, PushOptions, Pushed, Queue, RedisError};
use fairlane::quotas::QuotaExceeded;
use serde_json::json;

use crate::support::config::{SHARDS, configs};
use crate::support::http::{Client, Response, metric};
use crate::support::instance::{Instance, queue};
use crate::support::mongo::{self, MongoServer};
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;
const YEAR: u64 = 31_536_000;

fn bot(text: &str) -> BotId {
    BotId::parse(text).unwrap()
}

/// Events whose data has `bytes` bytes.
fn events(of: &str, count: usize, bytes: usize) -> Vec<Event> {
    let data = json!("x".repeat(bytes));
    let one = || Event::builder("test", &bot(of)).data(&data).unwrap().build().unwrap();
    (0..count).map(|_| one()).collect()
}

/// An event that is due in a year.
async fn delay(
    queue: &Queue,
    of: &str,
    bytes: usize,
    key: Option<&str>,
) -> Result<Pushed, PushError> {
    let due = Some(SystemClock.now() + Duration::from_secs(YEAR));
    let idempotency = key.map(|key| (key, LONG));
    queue.push(&bot(of), &events(of, 1, bytes), PushOptions { idempotency, due }).await
}

/// Schedules a notification that is due in a year.
async fn schedule(client: &Client, of: &str, bytes: usize) -> Response {
    let request = json!({
        "bot": of, "delay": YEAR, "url": "https://example.com/x", "body": "x".repeat(bytes),
    });
    let headers = [("content-type", "application/json")];
    client.send("POST", "/send_delayed", &headers, request.to_string().as_bytes()).await
}

fn refusal(result: Result<Pushed, PushError>) -> QuotaExceeded {
    match result {
        Err(PushError::Redis(RedisError::Quota(exceeded))) => exceeded,
        other => panic!("{other:?}"),
    }
}

const NOTIFIES: [(&str, &str); 1] = [("pipelines.notifications.enabled", "true")];

async fn start(server: &RedisServer, settings: &[(&str, &str)]) -> Instance {
    let settings = [&NOTIFIES[..], settings].concat();
    Instance::start(&configs(server, &["p"], &settings), Log::default().content()).await
}

#[tokio::test]
async fn a_request_above_a_quota_gets_429_and_says_what_the_bot_holds() {
    let server = RedisServer::start(Options::default());
    let instance = start(&server, &[("quotas.notifications", "2")]).await;
    let client = instance.client();
    for _ in 0..2 {
        assert_eq!(schedule(&client, "b", 1).await.code, 200);
    }
    let refused = schedule(&client, "b", 1).await;
    assert_eq!((refused.code, refused.problem().as_str()), (429, "quota"));
    assert_eq!(refused.header("x-shed-reason"), Some("quota"));
    assert!(refused.header("retry-after").unwrap().parse::<u32>().unwrap() > 0);
    let detail = refused.json()["detail"].as_str().unwrap().to_owned();
    assert!(
        detail.contains("holds 2") && detail.contains("quotas.notifications is now 2"),
        "{detail}"
    );
    assert_eq!(schedule(&client, "c", 1).await.code, 200, "each bot has its own quota");
    let shown = client.get("/v1/pipelines/notifications/bots/b").await.json();
    assert_eq!((&shown["holds"]["pending"], &shown["quotas"]["pending"]), (&json!(2), &json!(2)));
    // Other tests of the process may count too.
    let metrics = Client::new(&instance.address.to_string()).get("/metrics").await;
    let text = String::from_utf8(metrics.body).unwrap();
    let labels = [("quota", "notifications")];
    assert!(metric(&text, "fairlane_quota_refused_total", &labels).unwrap() >= 1.0);
    instance.stop().await;
}

#[tokio::test]
async fn a_repeated_request_is_answered_as_before_at_the_quota() {
    let server = RedisServer::start(Options::default());
    let config = configs(&server, &["p"], &[("quotas.delayed_events", "1")]);
    let queue = queue(&config, "p").await;
    let first = delay(&queue, "b", 1, Some("key")).await.unwrap();
    let exceeded = QuotaExceeded { name: "delayed_events", held: 1, limit: 1 };
    assert_eq!(refusal(delay(&queue, "b", 1, Some("other")).await), exceeded);
    let again = delay(&queue, "b", 1, Some("key")).await.unwrap();
    assert_eq!((again.sequence, again.duplicate), (first.sequence, true));
}

#[tokio::test]
async fn a_bot_may_have_quotas_of_its_own() {
    let server = RedisServer::start(Options::default());
    let own = r#"[{ bot = "big", delayed_events = 5 }, { bot = "free", delayed_events = 0 }]"#;
    let settings = [("quotas.delayed_events", "2"), ("quotas.bots", own)];
    let queue = queue(&configs(&server, &["p"], &settings), "p").await;
    for (name, room) in [("big", 5), ("small", 2)] {
        for _ in 0..room {
            delay(&queue, name, 1, None).await.unwrap();
        }
        assert_eq!(refusal(delay(&queue, name, 1, None).await).limit, room);
    }
    for _ in 0..10 {
        delay(&queue, "free", 1, None).await.unwrap();
    }
}

#[tokio::test]
async fn quotas_are_exact_over_three_processes() {
    let server = RedisServer::start(Options::default());
    let settings = [("quotas.notifications", "50"), ("quotas.delayed_events", "30")];
    let mut instances = Vec::new();
    for _ in 0..3 {
        instances.push(start(&server, &settings).await);
    }
    let asked = instances.iter().map(|instance| async move {
        let (client, mut accepted) = (instance.client(), (0, 0));
        for _ in 0..40 {
            let answer = schedule(&client, "b", 10).await;
            assert!(matches!(answer.code, 200 | 429), "{answer:?}");
            accepted.0 += u64::from(answer.code == 200);
            accepted.1 += u64::from(delay(instance.queue("p"), "b", 10, None).await.is_ok());
        }
        accepted
    });
    let accepted = futures_util::future::join_all(asked).await;
    let sums = accepted.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    assert_eq!(sums, (50, 30), "{accepted:?}");
    let queue = |name| instances[0].queue(name);
    assert_eq!(queue("notifications").holdings(&bot("b")).await.unwrap().pending, 50);
    assert_eq!(queue("p").holdings(&bot("b")).await.unwrap().delayed_events, 30);
    for instance in instances {
        instance.stop().await;
    }
}

#[tokio::test]
async fn the_first_dead_letters_of_a_bot_stay_and_those_of_others_too() {
    let server = RedisServer::start(Options::default());
    let settings = [("quotas.dead_letters", "3"), ("pipelines.p.max_queue", "1")];
    let queue = queue(&configs(&server, &["p"], &settings), "p").await;
    let push = async |of: &str, count| {
        queue.push(&bot(of), &events(of, count, 1), PushOptions::default()).await.unwrap().queued
    };
    push("other", 2).await;
    let queued = push("b", 10).await;
    assert_eq!((queued.appended, queued.dead), (1, 9));
    assert_eq!((queued.letters_removed, queued.letters_over_quota), (6, 6));
    assert_eq!(queue.holdings(&bot("b")).await.unwrap().dead_letters, 3);
    assert_eq!(queue.dead_letters(Some(&bot("other")), 9).await.unwrap().len(), 1);
    let letters = queue.dead_letters(Some(&bot("b")), 9).await.unwrap();
    assert_eq!(letters.len(), 3);
    assert!(queue.drop_dead_letter(letters[0].id).await.unwrap());
    assert_eq!(push("b", 2).await.letters_over_quota, 1, "there is room for one again");
    let now = SystemClock.now() + LONG;
    assert_eq!(queue.drop_dead_letters(None, now).await.unwrap(), 4);
    assert_eq!(queue.holdings(&bot("b")).await.unwrap().dead_bytes, 0);
}

#[tokio::test]
async fn a_bot_with_many_dead_letters_displaces_none_of_a_bot_with_few() {
    let server = RedisServer::start(Options::default());
    // Each shard keeps four letters.
    let dead_max = (4 * SHARDS).to_string();
    let settings = [("pipelines.p.max_queue", "1"), ("pipelines.p.dead.max", &*dead_max)];
    let queue = queue(&configs(&server, &["p"], &settings), "p").await;
    let few = bot("few");
    let shard = queue.shard_of(&few);
    let mut same = (0..).map(|n| format!("many-{n}"));
    let many = same.find(|name| queue.shard_of(&bot(name)) == shard).unwrap();
    let dead = async |of: &str, count: usize| {
        queue.push(&bot(of), &events(of, count, 1), PushOptions::default()).await.unwrap().queued
    };
    let left = async |of: &str| queue.dead_letters(Some(&bot(of)), 9).await.unwrap().len();
    // The first event of each is queued.
    dead("few", 3).await;
    let refused = dead(&many, 11).await;
    assert_eq!((left("few").await, left(&many).await), (2, 2));
    assert_eq!((refused.letters_removed, refused.letters_over_quota), (8, 8));
    dead("few", 1).await;
    assert_eq!(left("few").await, 2, "it displaces its own oldest letter");
    queue.drop_dead_letters(Some(&few), SystemClock.now() + LONG).await.unwrap();
    dead(&many, 9).await;
    assert_eq!(left(&many).await, 4, "nobody else needs the room");
    dead("few", 1).await;
    assert_eq!((left("few").await, left(&many).await), (1, 3), "a bot with few gets room");
}

/// Deletes what is counted, as if an older version had written the data.
async fn forget(server: &RedisServer) {
    let mut connection = server.connection().await;
    for shard in 0..SHARDS {
        let key = format!("fl:{{p:{shard}}}:held");
        let () = redis::cmd("DEL").arg(key).query_async(&mut connection).await.unwrap();
    }
}

#[tokio::test]
async fn a_queue_is_counted_from_32_events_or_a_large_one_on_until_it_is_empty() {
    let server = RedisServer::start(Options::default());
    let queue = queue(&configs(&server, &["p"], &[]), "p").await;
    let mut connection = server.connection().await;
    for (name, small, large) in [("long", 32, 0), ("large", 1, 1)] {
        let keys = &queue.shards()[queue.shard_of(&bot(name)).index()];
        let mut counted = async || {
            let mut command = redis::cmd("HGET");
            command.arg(keys.held()).arg(format!("q{name}"));
            command.query_async::<Option<u64>>(&mut connection).await.unwrap()
        };
        let push = async |count, bytes| {
            queue
                .push(&bot(name), &events(name, count, bytes), PushOptions::default())
                .await
                .unwrap();
            queue.holdings(&bot(name)).await.unwrap().queued_bytes
        };
        for pushed in 1..small {
            let bytes = push(1, 100).await;
            assert!((pushed * 100..pushed * 500).contains(&bytes), "{bytes}");
            assert_eq!(counted().await, None, "it is short");
        }
        let bytes = if large == 1 { push(1, 70_000).await } else { push(1, 100).await };
        assert!(bytes > (small - 1) * 100 + large * 70_000, "{bytes}");
        assert_eq!(counted().await, Some(bytes));
        assert_eq!(push(1, 100).await, counted().await.unwrap());
        queue.purge(&bot(name)).await.unwrap();
        assert_eq!(counted().await, None);
    }
}

#[tokio::test]
async fn data_of_a_version_that_did_not_count_is_handled_and_the_audit_counts_it() {
    let server = RedisServer::start(Options::default());
    let settings = [("pipelines.p.max_queue", "40")];
    let queue = queue(&configs(&server, &["p"], &settings), "p").await;
    let fill = async || {
        queue.push(&bot("b"), &events("b", 42, 9), PushOptions::default()).await.unwrap();
        delay(&queue, "b", 9, None).await.unwrap();
    };
    fill().await;
    let counted = queue.holdings(&bot("b")).await.unwrap();
    assert_eq!((counted.delayed_events, counted.dead_letters), (1, 2));
    assert!(counted.queued_bytes > 40 * 9 && counted.dead_bytes > 2 * 9);
    forget(&server).await;
    let audit = async || {
        let mut wrong = 0;
        for shard in queue.shard_count().shards() {
            let (more, all) = queue.reconcile_holdings(shard).await.unwrap();
            assert!(all);
            wrong += more;
        }
        wrong
    };
    assert_eq!(audit().await, 5);
    assert_eq!((queue.holdings(&bot("b")).await.unwrap(), audit().await), (counted, 0));
    // Without an audit, nothing is ever below zero.
    forget(&server).await;
    queue.push(&bot("b"), &events("b", 1, 9), PushOptions::default()).await.unwrap();
    let now = SystemClock.now() + LONG;
    queue.drop_dead_letters(None, now).await.unwrap();
    assert_eq!(queue.purge(&bot("b")).await.unwrap(), 40);
    assert_eq!(queue.holdings(&bot("b")).await.unwrap(), Holdings::default());
    // A process of that version emptied a queue that was counted.
    let held = queue.shards()[queue.shard_of(&bot("b")).index()].held().to_owned();
    let mut connection = server.connection().await;
    let mut command = redis::cmd("HSET");
    command.arg(held).arg("qb").arg(1_u64 << 40);
    let () = command.query_async(&mut connection).await.unwrap();
    let queued = queue.push(&bot("b"), &events("b", 1, 9), PushOptions::default()).await;
    assert_eq!(queued.unwrap().queued.appended, 1);
    assert!(queue.holdings(&bot("b")).await.unwrap().queued_bytes < 1_000);
}

#[tokio::test]
async fn the_audit_leaves_out_a_queue_of_more_than_16_mib_and_counts_the_others() {
    let server = RedisServer::start(Options::default());
    let queue = queue(&configs(&server, &["p"], &[]), "p").await;
    let large = bot("large");
    let shard = queue.shard_of(&large);
    let mut same = (0..).map(|n| bot(&format!("small-{n}")));
    let small = same.find(|name| queue.shard_of(name) == shard).unwrap();
    for _ in 0..17 {
        let event = events("large", 1, 1_000_000);
        queue.push(&large, &event, PushOptions::default()).await.unwrap();
    }
    queue.push(&small, &events(small.as_str(), 40, 9), PushOptions::default()).await.unwrap();
    let counted = queue.holdings(&small).await.unwrap();
    assert!(counted.queued_bytes > 40 * 9);
    forget(&server).await;
    assert_eq!(queue.reconcile_holdings(shard).await.unwrap(), (1, false));
    assert_eq!(queue.holdings(&small).await.unwrap(), counted);
    queue.purge(&large).await.unwrap();
    assert_eq!(queue.reconcile_holdings(shard).await.unwrap(), (0, true));
}

#[tokio::test]
async fn a_nearly_full_redis_refuses_the_bot_that_holds_most_and_serves_the_others() {
    let server = RedisServer::start(Options::default());
    let mut connection = server.connection().await;
    let ballast = "x".repeat(40 << 20);
    let () =
        redis::cmd("SET").arg("ballast").arg(ballast).query_async(&mut connection).await.unwrap();
    let mut bound = async |bytes: u64| {
        let mut command = redis::cmd("CONFIG");
        command.arg("SET").arg("maxmemory").arg(bytes);
        let () = command.query_async(&mut connection).await.unwrap();
    };
    bound(1 << 30).await;
    let instance = start(&server, &[]).await;
    let client = instance.client();
    for _ in 0..20 {
        assert_eq!(schedule(&client, "hog", 60_000).await.code, 200);
    }
    let used = async || {
        let mut connection = server.connection().await;
        let info: String =
            redis::cmd("INFO").arg("memory").query_async(&mut connection).await.unwrap();
        let used = info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
        used.trim().parse::<u64>().unwrap()
    };
    // Then 92 % are in use, and a fifth of the quotas is left: a fifth of 1/16 of the memory.
    bound(used().await / 92 * 100).await;
    let refuses = async || schedule(&client, "hog", 60_000).await.code == 429;
    eventually(LONG, "the largest holder is refused", refuses).await;
    for _ in 0..5 {
        let answer = schedule(&client, "quiet", 1_000).await;
        assert_eq!(answer.code, 200, "{answer:?}");
    }
    bound(1 << 30).await;
    let accepts = async || schedule(&client, "hog", 60_000).await.code == 200;
    eventually(LONG, "there is room for all again", accepts).await;
    instance.stop().await;
}

#[tokio::test]
async fn a_bot_that_fills_what_it_can_stops_no_other() {
    const ROUNDS: usize = 12;
    const BOTS: usize = 10;
    let server = RedisServer::start(Options { max_memory: 64 * MIB, ..Options::default() });
    let mongo = MongoServer::start(mongo::Options::default());
    let url = format!("{:?}", mongo.url());
    let settings = [
        &NOTIFIES[..],
        &[("mongodb.url", &*url), ("bus.retention", "\"0s\""), ("pipelines.d.max_queue", "1")],
    ];
    let log = Log::default();
    let config = configs(&server, &["p", "d"], &settings.concat());
    let instance = Instance::start(&config, log.content()).await;
    let client = instance.client();
    let hog = bot("hog");
    for pipeline in ["p", "d"] {
        instance.queue(pipeline).pause(Some(&hog)).await.unwrap();
    }

    let done = AtomicBool::new(false);
    let fills = async {
        let (mut refused, mut delayed) = (0, 0);
        while !done.load(Ordering::Relaxed) || refused < 20 || delayed < 20 {
            refused += u32::from(schedule(&client, "hog", 60_000).await.code == 429);
            delayed += u32::from(delay(instance.queue("p"), "hog", 60_000, None).await.is_err());
            let event = json!({
                "specversion": "1.0", "id": "1", "source": "test", "type": "test", "botid": "hog",
                "data": "x".repeat(60_000),
            });
            client.publish("application/cloudevents+json", event.to_string()).await;
        }
        (refused, delayed)
    };
    let lives = async {
        // The hostile bot is ahead.
        eventually(LONG, "it is refused", async || {
            schedule(&client, "hog", 60_000).await.code == 429
        })
        .await;
        for round in 0..ROUNDS {
            for n in 0..BOTS {
                let name = format!("quiet-{n}");
                let event = json!({
                    "specversion": "1.0", "id": format!("{n}-{round}"), "source": "test",
                    "type": "test", "botid": name,
                });
                let kind = "application/cloudevents+json";
                let answer = client.publish(kind, event.to_string()).await;
                assert_eq!(answer.code, 202, "{answer:?}");
                let answer = schedule(&client, &name, 100).await;
                assert_eq!(answer.code, 200, "{answer:?}");
                let answer = client.post(&format!("/v1/bots/{name}/counters/ad/views")).await;
                assert_eq!(answer.code, 200, "{answer:?}");
            }
        }
        done.store(true, Ordering::Relaxed);
    };
    let (refused, ()) = tokio::join!(fills, lives);
    assert!(refused.0 >= 20 && refused.1 >= 20, "{refused:?}");

    let expected = 2 * ROUNDS * BOTS;
    eventually(LONG, "all events of the quiet bots are done", async || log.len() >= expected).await;
    for n in 0..BOTS {
        let name = format!("quiet-{n}");
        let held = instance.queue("notifications").holdings(&bot(&name)).await.unwrap();
        assert_eq!(held.pending, ROUNDS as u64, "{name}");
        let of = |pipeline: &str| {
            let seen = log.all().into_iter();
            let ids = seen.filter(|seen| seen.pipeline == pipeline && seen.bot == name);
            ids.map(|seen| seen.id).collect::<Vec<_>>()
        };
        let sent: Vec<String> = (0..ROUNDS).map(|round| format!("{n}-{round}")).collect();
        assert_eq!((of("p"), of("d")), (sent.clone(), sent), "{name}");
        let view = client.post(&format!("/v1/bots/{name}/counters/ad/views")).await;
        assert_eq!(view.json()["total"], ROUNDS + 1, "{name}");
    }
    // What the hostile bot holds is bounded in each of the ways.
    let quota = 4 * MIB;
    let [p, d] = ["p", "d"].map(|name| instance.queue(name));
    let (of_p, of_d) = (p.holdings(&hog).await.unwrap(), d.holdings(&hog).await.unwrap());
    let notes = instance.queue("notifications").holdings(&hog).await.unwrap();
    for held in [of_p.queued_bytes, of_p.delayed_bytes, of_d.dead_bytes, notes.pending_bytes] {
        assert!(
            (quota / 2..=quota).contains(&held),
            "{held} of {quota}: {of_p:?} {of_d:?} {notes:?}"
        );
    }
    instance.stop().await;
}

/// A rule can emit large events with a short delay.
#[tokio::test]
async fn delayed_events_that_are_due_exceed_the_quota_of_a_queue_by_at_most_their_own() {
    const EVENT: u64 = 60_000;
    let server = RedisServer::start(Options::default());
    let quota = MIB.to_string();
    let settings = [("quotas.queued_bytes", &*quota), ("quotas.delayed_bytes", &*quota)];
    let instance = start(&server, &settings).await;
    let (queue, hog) = (instance.queue("p"), bot("hog"));
    queue.pause(Some(&hog)).await.unwrap();
    let delay = async || {
        let options = PushOptions { due: Some(SystemClock.now()), ..PushOptions::default() };
        let size = usize::try_from(EVENT).unwrap();
        queue.push(&hog, &events("hog", 1, size), options).await
    };
    let mut refused = None;
    for _ in 0..5 {
        for _ in 0..MIB / EVENT {
            refused = delay().await.err();
        }
        eventually(LONG, "all are due", async || {
            queue.holdings(&hog).await.unwrap().delayed_events == 0
        })
        .await;
    }
    let held = queue.holdings(&hog).await.unwrap().queued_bytes;
    assert!((MIB - 2 * EVENT..=2 * MIB).contains(&held), "{held}");
    assert!(
        matches!(&refused, Some(PushError::Redis(RedisError::Quota(exceeded))) if exceeded.name == "queued_bytes"),
        "{refused:?}"
    );
    queue.purge(&hog).await.unwrap();
    delay().await.unwrap();
    instance.stop().await;
}
