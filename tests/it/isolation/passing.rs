//! What ends by itself is bounded too: idempotency keys, and the results of ended notifications.

use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::counters::queue::NewViews;
use fairlane::counters::scripts::Viewed;
use fairlane::counters::view::{AdId, Line, Replacement};
use fairlane::event::Event;
use fairlane::id::BotId;
use fairlane::notifications::record::{Duplicates, NewNotification, When};
use fairlane::notifications::scripts::{Amended, Amendment};
use fairlane::queue::{PushError, PushOptions, Queue};
use fairlane::quotas::QuotaExceeded;
use fairlane::redis::RedisError;
use futures_util::{StreamExt as _, stream};
use redis::aio::MultiplexedConnection;
use serde_json::json;

use crate::support::config::configs;
use crate::support::http::{Client, Response, metric};
use crate::support::instance::{Instance, queue};
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);
/// Number of attempts of the hostile bot, and how many of them run concurrently.
const MANY: usize = 10_000;
const AT_ONCE: usize = 64;
/// A quota of bytes that is met soon.
const SMALL: (&str, u64) = ("102400", 102_400);

fn bot(text: &str) -> BotId {
    BotId::parse(text).unwrap()
}

fn exceeded<T: std::fmt::Debug>(result: Result<T, RedisError>) -> QuotaExceeded {
    match result {
        Err(RedisError::Quota(exceeded)) => exceeded,
        other => panic!("{other:?}"),
    }
}

/// The keys of Redis that match a pattern.
async fn count(connection: &mut MultiplexedConnection, pattern: &str) -> usize {
    let keys: Vec<Vec<u8>> = redis::cmd("KEYS").arg(pattern).query_async(connection).await.unwrap();
    keys.len()
}

/// A notification that is due in an hour.
fn new(of: &str, key: Option<String>) -> NewNotification {
    NewNotification {
        bot: bot(of),
        uid: String::new(),
        kind: "none".to_owned(),
        when: When::After(Duration::from_secs(3_600)),
        expires_in: Duration::from_secs(30 * 86_400),
        waits: false,
        url: "https://example.com/".to_owned(),
        method: "GET".to_owned(),
        body: String::new(),
        recheck: String::new(),
        headers: String::new(),
        trace: None,
        key: key.map(|key| (key, Duplicates::Ignore)),
    }
}

/// Schedules and cancels a notification.
async fn passes(queue: &Queue, new: &NewNotification) -> Result<(), RedisError> {
    let accepted = queue.schedule(new, "none", SystemClock.now()).await?;
    let kept = queue.notification(accepted.id).await?.expect("it is pending");
    let amended = queue.amend(&kept, Amendment::Cancel, SystemClock.now()).await?;
    assert_eq!(amended, Amended::Done);
    Ok(())
}

#[tokio::test]
async fn ended_notifications_without_pause_leave_bounded_results_and_none_is_refused() {
    let server = RedisServer::start(Options::default());
    let settings = [("quotas.result_bytes", SMALL.0)];
    let queue = queue(&configs(&server, &["p"], &settings), "p").await;
    let mut all = stream::iter(0..MANY)
        .map(|_| async { passes(&queue, &new("hog", None)).await })
        .buffer_unordered(AT_ONCE);
    while let Some(passed) = all.next().await {
        passed.unwrap();
    }
    let mut connection = server.connection().await;
    // A hundred records stay for a week, as many for ten minutes, a few more that had room while this
    // test ran, and the last ones for a second.
    let most = usize::try_from(3 * SMALL.1 / 1_024).unwrap();
    eventually(LONG, "the last records end", async || {
        count(&mut connection, "*:n:*").await <= most
    })
    .await;
    assert!(count(&mut connection, "*:n:*").await > most / 2);
    let accepted = queue.schedule(&new("quiet", None), "none", SystemClock.now()).await.unwrap();
    let kept = queue.notification(accepted.id).await.unwrap().unwrap();
    queue.amend(&kept, Amendment::Cancel, SystemClock.now()).await.unwrap();
    let keys = &queue.shards()[queue.shard_of(&bot("quiet")).index()];
    let mut ttl = redis::cmd("PTTL");
    ttl.arg(keys.notification(accepted.id));
    let ttl: u64 = ttl.query_async(&mut connection).await.unwrap();
    assert!(ttl > 6 * 86_400_000, "the result of another bot stays for a week: {ttl}");
}

#[tokio::test]
async fn fresh_keys_of_notifications_without_pause_are_refused_above_the_quota() {
    let server = RedisServer::start(Options::default());
    let settings = [("quotas.key_bytes", SMALL.0), ("quotas.result_bytes", SMALL.0)];
    let queue = queue(&configs(&server, &["p"], &settings), "p").await;
    let mut all = stream::iter(0..MANY)
        .map(|n| {
            let queue = &queue;
            async move { passes(queue, &new("hog", Some(format!("key-{n}")))).await }
        })
        .buffer_unordered(AT_ONCE);
    let mut refused = 0;
    while let Some(passed) = all.next().await {
        refused +=
            usize::from(passed.is_err_and(|error| exceeded::<()>(Err(error)).name == "key_bytes"));
    }
    assert!((MANY - 150..MANY).contains(&refused), "{refused}");
    let mut connection = server.connection().await;
    // The key of a cancelled notification ends with its record, long before it would have expired.
    assert!(count(&mut connection, "*:key:*").await <= 200);
    for key in [None, Some("key".to_owned())] {
        passes(&queue, &new("quiet", key)).await.unwrap();
    }
    passes(&queue, &new("hog", None)).await.expect("one without a key is accepted");
}

/// Counts a view whose total is unknown.
async fn view(queue: &Queue, of: &str, key: Option<&str>) -> Result<Viewed, RedisError> {
    let (bot, ad) = (&bot(of), &AdId::parse("ad").unwrap());
    let event = Event::builder("ad.viewed", bot).build().unwrap().encode();
    queue.upsert(NewViews { bot, ad, n: 1, event: &event, key }, "", None).await
}

#[tokio::test]
async fn fresh_keys_of_views_without_pause_are_refused_above_the_quota_and_known_ones_are_not() {
    let server = RedisServer::start(Options::default());
    let settings = [("quotas.key_bytes", SMALL.0)];
    let queue = queue(&configs(&server, &["p"], &settings), "p").await;
    let mut all = stream::iter(0..MANY)
        .map(|n| {
            let queue = &queue;
            async move { view(queue, "hog", Some(&format!("key-{n}"))).await }
        })
        .buffered(AT_ONCE);
    let mut refused = 0;
    while let Some(viewed) = all.next().await {
        refused +=
            usize::from(viewed.is_err_and(|error| exceeded::<()>(Err(error)).limit == SMALL.1));
    }
    let mut connection = server.connection().await;
    let keys = count(&mut connection, "*:idem:*").await;
    assert_eq!(keys + refused, MANY);
    assert!(keys <= usize::try_from(2 * SMALL.1 / 128).unwrap(), "{keys} keys");
    assert_eq!(count(&mut connection, "*:keys:*").await, 1);
    view(&queue, "hog", Some("key-0")).await.expect("a known key");
    view(&queue, "hog", None).await.expect("no key");
    view(&queue, "quiet", Some("key")).await.expect("another bot");
    let mut length = redis::cmd("LLEN");
    length.arg(queue.shards()[queue.shard_of(&bot("hog")).index()].queue(&bot("hog")));
    let length: usize = length.query_async(&mut connection).await.unwrap();
    assert_eq!(length, keys + 1, "refused views count nothing");
}

#[tokio::test]
async fn fresh_keys_of_delayed_events_and_of_imports_are_bounded() {
    let server = RedisServer::start(Options::default());
    let settings = [("quotas.key_bytes", "950")];
    let queue = queue(&configs(&server, &["p"], &settings), "p").await;
    let push = async |of: &str, key: &str| {
        let event = Event::builder("test", &bot(of)).build().unwrap();
        let options = PushOptions { idempotency: Some((key, HOUR)), due: None };
        queue.push(&bot(of), &[event], options).await.map_err(|error| match error {
            PushError::Redis(error) => error,
            error => panic!("{error}"),
        })
    };
    let import = async |of: &str, key: &str, number: u64| {
        let with = Replacement { total: 1, days: [].into(), forget: false };
        let ad = AdId::parse("ad").unwrap();
        let line = Line { ad, with, before: number - 1, number, upto: number };
        queue.import_lines(&bot(of), key, &[line]).await.unwrap().remove(0)
    };
    let keys = ["a", "b", "c", "d", "e", "f", "g"];
    for key in keys {
        let (pushed, imported) = (push("hog", key).await, import("hog", key, 1).await);
        if key == "g" {
            assert_eq!(exceeded(pushed).name, "key_bytes");
            assert_eq!(exceeded(imported).name, "key_bytes");
        }
    }
    assert!(push("hog", "a").await.unwrap().duplicate);
    import("hog", "a", 1).await.expect("a known line");
    import("hog", "a", 2).await.expect("an import that has begun goes on");
    push("quiet", "a").await.unwrap();
    import("quiet", "a", 1).await.unwrap();
}

async fn schedule(client: &Client, of: &str, key: usize) -> Response {
    let request =
        json!({ "bot": of, "delay": 3_600, "url": "https://example.com/", "key": key.to_string() });
    let headers = [("content-type", "application/json")];
    client.send("POST", "/send_delayed", &headers, request.to_string().as_bytes()).await
}

#[tokio::test]
async fn a_request_above_the_quota_of_keys_gets_429_and_says_what_to_do() {
    let server = RedisServer::start(Options::default());
    let settings = [("pipelines.notifications.enabled", "true"), ("quotas.key_bytes", "3000")];
    let config = configs(&server, &["p"], &settings);
    let instance = Instance::start(&config, Log::default().content()).await;
    let client = instance.client();
    for key in 0..2 {
        assert_eq!(schedule(&client, "b", key).await.code, 200);
    }
    let refused = schedule(&client, "b", 2).await;
    assert_eq!((refused.code, refused.problem().as_str()), (429, "quota"));
    assert_eq!(refused.header("x-shed-reason"), Some("quota"));
    let detail = refused.json()["detail"].as_str().unwrap().to_owned();
    for part in ["quotas.key_bytes is now 3000", "an hour after their first use"] {
        assert!(detail.contains(part), "{detail}");
    }
    assert_eq!(schedule(&client, "b", 0).await.code, 200, "a repetition is answered as before");
    let metrics = Client::new(&instance.address.to_string()).get("/metrics").await;
    let text = String::from_utf8(metrics.body).unwrap();
    let labels = [("quota", "key_bytes")];
    assert!(metric(&text, "fairlane_quota_refused_total", &labels).unwrap() >= 1.0);
    instance.stop().await;
}
