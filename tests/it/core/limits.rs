//! Bounds: the length of a bot's queue, and the time for which an event is worth handling.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane::id::BotId;
use fairlane::queue::Queue;

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config};
use crate::support::http::{get, metric};
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(20);

fn bot() -> BotId {
    BotId::parse("b").unwrap()
}

fn events(ids: std::ops::Range<u32>) -> Vec<String> {
    ids.map(|id| event("b", "test", id)).collect()
}

fn with_expiry(id: u32, expirytime: &str) -> String {
    event("b", "test", id).replacen('{', &format!("{{\"expirytime\":\"{expirytime}\","), 1)
}

fn ids(ids: impl IntoIterator<Item = u32>) -> Vec<String> {
    ids.into_iter().map(|id| id.to_string()).collect()
}

async fn counted(instance: &Instance, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    let text = get(&instance.address.to_string(), "/metrics").await.1;
    metric(&text, &format!("fairlane_{name}"), labels)
}

async fn has(queue: &Queue, count: usize) {
    eventually(LONG, "they are queued", async || {
        queue.next_events(&bot(), 100).await.unwrap().len() == count
    })
    .await;
}

/// Fills the queue of a bot with five events and sends fifteen more, then lets the bot continue.
async fn overflow(pipeline: &'static str, on_overflow: &str) -> (Instance, RedisServer, Log) {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let keys = ["max_queue", "on_overflow"].map(|key| format!("pipelines.{pipeline}.{key}"));
    let settings = [(&*keys[0], "5"), (&*keys[1], on_overflow)];
    let instance = Instance::start(&config(&server, pipeline, &settings), log.content()).await;
    let queue = instance.queue(pipeline);
    queue.pause(Some(&bot())).await.unwrap();
    add(&server, STREAM, &events(0..20)).await;
    // An event of another bot follows them. Once it is done, all events were copied.
    add(&server, STREAM, &[event("other", "test", "last")]).await;
    eventually(LONG, "all are copied", async || log.ids(pipeline) == ["last"]).await;
    has(queue, 5).await;
    queue.resume(Some(&bot())).await.unwrap();
    eventually(LONG, "five are done", async || log.len() == 6).await;
    has(queue, 0).await;
    add(&server, STREAM, &events(20..22)).await;
    eventually(LONG, "there is room again", async || log.len() == 8).await;
    assert_eq!(log.ids(pipeline)[1..], ids((0..5).chain(20..22)));
    // A redrive revokes a lease, and what is handled but not yet removed would be handled again.
    has(queue, 0).await;
    (instance, server, log)
}

#[tokio::test]
async fn events_beyond_a_full_queue_are_dropped_and_counted() {
    let (instance, _server, _log) = overflow("full-drop", "\"drop_new\"").await;
    let labels = [("pipeline", "full-drop")];
    assert_eq!(counted(&instance, "queue_dropped_total", &labels).await, Some(15.0));
    assert!(instance.queue("full-drop").dead_letters(None, 100).await.unwrap().is_empty());
}

#[tokio::test]
async fn events_beyond_a_full_queue_become_dead_letters_and_can_be_redriven() {
    let (instance, _server, log) = overflow("full-dead", "\"dead\"").await;
    let labels = [("pipeline", "full-dead"), ("outcome", "dead")];
    assert_eq!(counted(&instance, "events_total", &labels).await, Some(15.0));
    let queue = instance.queue("full-dead");
    let letters = queue.dead_letters(None, 100).await.unwrap();
    assert_eq!(letters.len(), 15);
    queue.pause(Some(&bot())).await.unwrap();
    for letter in &letters {
        assert_eq!(letter.reason, "the queue of the bot is full (max_queue = 5)");
        assert!(queue.redrive(&letter.bot, letter.id).await.unwrap());
    }
    queue.resume(Some(&bot())).await.unwrap();
    eventually(LONG, "they are done", async || log.len() == 23).await;
    assert_eq!(log.ids("full-dead")[8..], ids(5..20));
}

#[tokio::test]
async fn an_event_whose_time_has_passed_is_not_handled() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let instance = Instance::start(&config(&server, "expiry", &[]), log.content()).await;
    let mixed = [
        with_expiry(0, "2020-01-01T00:00:00Z"),
        with_expiry(1, "2999-01-01T00:00:00+01:00"),
        event("b", "test", 2),
        with_expiry(3, "2020-01-01T00:00:00Z"),
    ];
    add(&server, STREAM, &mixed).await;
    let labels = [("pipeline", "expiry"), ("outcome", "expired")];
    eventually(LONG, "two are expired", async || {
        counted(&instance, "events_total", &labels).await == Some(2.0)
    })
    .await;
    assert_eq!(log.ids("expiry"), ids([1, 2]));
    let letters = instance.queue("expiry").dead_letters(None, 10).await.unwrap();
    assert_eq!(letters.len(), 2);
    for letter in &letters {
        assert_eq!((&*letter.reason, letter.attempts), ("its expirytime has passed", 0));
    }
}

/// Notes the number of events of each slice that was committed.
#[derive(Debug, Clone, Default)]
struct Committed(Arc<Mutex<Vec<usize>>>);

impl Handler for Committed {
    async fn handle(&self, _: &Environment, _: &Slice) -> Result<Outcomes, Failure> {
        Ok(Outcomes::done())
    }

    fn committed(&self, slice: &Slice, _: usize) {
        self.0.lock().unwrap().push(slice.events.len());
    }
}

#[tokio::test]
async fn a_handler_is_not_told_of_the_end_of_a_slice_that_it_did_not_get() {
    let server = RedisServer::start(Options::default());
    let committed = Committed::default();
    let config = config(&server, "expiry-alone", &[]);
    let instance = Instance::start(&config, committed.clone()).await;
    add(&server, STREAM, &[with_expiry(0, "2020-01-01T00:00:00Z")]).await;
    let labels = [("pipeline", "expiry-alone"), ("outcome", "expired")];
    eventually(LONG, "it is expired", async || {
        counted(&instance, "events_total", &labels).await == Some(1.0)
    })
    .await;
    add(&server, STREAM, &events(1..2)).await;
    eventually(LONG, "the next one is committed", async || {
        committed.0.lock().unwrap().contains(&1)
    })
    .await;
    assert_eq!(*committed.0.lock().unwrap(), [1]);
}

#[tokio::test]
async fn an_event_older_than_max_age_is_not_handled() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let settings = [("pipelines.age.max_age", "\"5s\"")];
    let instance = Instance::start(&config(&server, "age", &settings), log.content()).await;
    let queue = instance.queue("age");
    queue.pause(Some(&bot())).await.unwrap();
    add(&server, STREAM, &events(0..3)).await;
    has(queue, 3).await;
    let old = SystemClock.now() + Duration::from_millis(5_100);
    eventually(LONG, "they are old", async || SystemClock.now() > old).await;
    add(&server, STREAM, &events(3..5)).await;
    has(queue, 5).await;
    queue.resume(Some(&bot())).await.unwrap();
    eventually(LONG, "the young ones are done", async || log.len() == 2).await;
    assert_eq!(log.ids("age"), ids([3, 4]));
    let letters = queue.dead_letters(None, 10).await.unwrap();
    assert_eq!(letters.len(), 3);
    assert!(letters.iter().all(|letter| letter.reason == "it is older than max_age"));
    let labels = [("pipeline", "age"), ("outcome", "expired")];
    eventually(LONG, "they are counted", async || {
        counted(&instance, "events_total", &labels).await == Some(3.0)
    })
    .await;
}

#[tokio::test]
async fn dead_letters_are_bounded_and_the_oldest_go_first() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let settings = [
        ("redis.shards", "1"),
        ("pipelines.letters.dead.max", "10"),
        ("pipelines.letters.max_attempts", "1"),
    ];
    let handler = log.handler(|_| async { Err(fairlane::handler::Failure::transient(0, "never")) });
    let instance = Instance::start(&config(&server, "letters", &settings), handler).await;
    add(&server, STREAM, &events(0..25)).await;
    let labels = [("pipeline", "letters")];
    eventually(LONG, "fifteen had to go", async || {
        counted(&instance, "dead_letters_removed_total", &labels).await == Some(15.0)
    })
    .await;
    let letters = instance.queue("letters").dead_letters(None, 100).await.unwrap();
    let left = letters.iter().map(|letter| letter.event.as_ref().unwrap().id().to_owned());
    assert_eq!(left.collect::<Vec<_>>(), ids((15..25).rev()));
}
