//! Ordering keys: the events of a bot with the same key are handled in order, and others go on.

mod faults;
mod push;
mod rate;
mod share;
mod shown;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock, micros};
use fairlane::event::Event;
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane::id::BotId;
use fairlane::queue::BotState;

use crate::support::bus::{add, bot};
use crate::support::config::{STREAM, config};
use crate::support::fleet::Fleet;
use crate::support::history::{Outcome, Record};
use crate::support::instance::{Instance, queue};
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::roles::worker::{Effect, Poison};
use crate::support::wait::{Stopwatch, eventually};

const LONG: Duration = Duration::from_secs(60);
/// Gives each last digit of an id a key of its own.
const BY_DIGIT: &str = "\"event.id.endsWith('0') ? '0' : event.id.endsWith('1') ? '1' : event.id.endsWith('2') ? '2' : event.id.endsWith('3') ? '3' : event.id.endsWith('4') ? '4' : 'other'\"";

fn event(bot: &str, subject: &str, id: usize) -> String {
    serde_json::json!({
        "specversion": "1.0", "id": id.to_string(), "source": "test", "type": "test",
        "botid": bot, "subject": subject,
    })
    .to_string()
}

/// The ids of the events that a handler tried, in order.
type Tried = Arc<Mutex<Vec<String>>>;

/// A handler that tries one event of a slice after the other, and fails at those that `fails` names.
fn trying(fails: impl Fn(&Event) -> bool + Send + Sync + 'static) -> (Tried, impl Handler) {
    let tried = Tried::default();
    let noted = Arc::clone(&tried);
    let handler = Log::default().handler(move |slice: Slice| {
        let failed = slice.events.iter().position(|delivery| {
            noted.lock().unwrap().push(delivery.event.id().to_owned());
            fails(&delivery.event)
        });
        async move {
            failed.map_or_else(|| Ok(Outcomes::done()), |at| Err(Failure::transient(at, "no")))
        }
    });
    (tried, handler)
}

fn ids(tried: &Tried) -> Vec<String> {
    tried.lock().unwrap().clone()
}

#[tokio::test]
async fn a_key_that_fails_holds_only_itself_and_becomes_whole_when_it_succeeds() {
    let server = RedisServer::start(Options::default());
    let fails = Arc::new(AtomicBool::new(true));
    let broken = Arc::clone(&fails);
    let (tried, handler) =
        trying(move |event| event.subject() == Some("bad") && broken.load(Ordering::Relaxed));
    let settings =
        [("pipelines.hold.order_by", "\"subject\""), ("pipelines.hold.max_attempts", "100000")];
    let instance = Instance::start(&config(&server, "hold", &settings), handler).await;
    let subjects = ["bad", "ann", "bob", "bad", "ann", "bad"];
    let events: Vec<String> =
        (0..60).map(|id| event("shop", subjects[id % subjects.len()], id)).collect();
    add(&server, STREAM, &events).await;
    let queue = instance.queue("hold").clone();
    let shop = BotId::parse("shop").unwrap();
    let good: BTreeSet<String> = (0..60)
        .filter(|id| subjects[id % subjects.len()] != "bad")
        .map(|id| id.to_string())
        .collect();
    eventually(LONG, "all others are done, and those of the key wait", async || {
        let ids: BTreeSet<String> = ids(&tried).into_iter().collect();
        let view = queue.view_bot(&shop, SystemClock.now()).await.unwrap();
        good.is_subset(&ids) && view.depth == 30
    })
    .await;
    let bad: Vec<String> = ids(&tried).into_iter().filter(|id| !good.contains(id)).collect();
    assert!(bad.iter().all(|id| id == "0"), "only its first event was tried: {bad:?}");
    fails.store(false, Ordering::Relaxed);
    eventually(LONG, "nothing is left", async || {
        let view = queue.view_bot(&shop, SystemClock.now()).await.unwrap();
        view.depth == 0 && view.state == BotState::Idle
    })
    .await;
    let mut bad: Vec<String> = ids(&tried).into_iter().filter(|id| !good.contains(id)).collect();
    bad.dedup();
    let expected: Vec<String> = (0..60)
        .filter(|id| subjects[id % subjects.len()] == "bad")
        .map(|id| id.to_string())
        .collect();
    assert_eq!(bad, expected, "in order");
    instance.stop().await;
}

#[tokio::test]
async fn an_event_that_never_succeeds_becomes_a_dead_letter_and_its_key_goes_on() {
    let server = RedisServer::start(Options::default());
    let (tried, handler) = trying(|event| event.id() == "2");
    let settings =
        [("pipelines.give.order_by", "\"subject\""), ("pipelines.give.max_attempts", "3")];
    let instance = Instance::start(&config(&server, "give", &settings), handler).await;
    let events: Vec<String> = (0..20).map(|id| event("shop", ["ann", "bob"][id % 2], id)).collect();
    add(&server, STREAM, &events).await;
    let queue = instance.queue("give").clone();
    let shop = BotId::parse("shop").unwrap();
    eventually(LONG, "it is given up, and all others are done", async || {
        let done: BTreeSet<String> = ids(&tried).into_iter().collect();
        let view = queue.view_bot(&shop, SystemClock.now()).await.unwrap();
        done.len() == 20 && view.depth == 0 && view.state == BotState::Idle
    })
    .await;
    let letters = queue.dead_letters(Some(&shop), 10).await.unwrap();
    assert_eq!(letters.len(), 1, "{letters:?}");
    assert_eq!((&*letters[0].reason, letters[0].attempts), ("no", 3));
    let times = ids(&tried).into_iter().filter(|id| id == "2").count();
    assert_eq!(times, 3);
    instance.stop().await;
}

#[tokio::test]
async fn an_event_that_kills_its_process_is_given_up_and_the_others_are_done_in_order() {
    let settings = [
        ("pipelines.test.order_by", BY_DIGIT),
        ("pipelines.test.concurrency", "4"),
        ("pipelines.test.max_attempts", "2"),
        ("pipelines.test.lease_ttl", "\"1s\""),
    ];
    let mut fleet = Fleet::new(Options::default(), 1, &settings);
    let poison = |event, effect| Poison { bot: bot(0), event, effect };
    fleet.behaviour.poison =
        vec![poison(12, Effect::Aborts), poison(3, Effect::Fails), poison(24, Effect::Panics)];
    fleet.start(1).await;
    fleet.publish(40).await;
    let queue = queue(&fleet.config, "test").await;
    let mut deaths = 0;
    while queue.dead_letters(None, 10).await.unwrap().len() < 3 {
        if fleet.workers[0].wait_exit(Duration::from_millis(100)).is_some() {
            deaths += 1;
            assert!(deaths <= 5, "it is given up");
            fleet.restart(0).await;
        }
    }
    eventually(LONG, "the queue is empty", async || {
        queue.view(Duration::ZERO).await.unwrap().depth == 0
    })
    .await;
    let letters = queue.dead_letters(None, 10).await.unwrap();
    let mut given_up: Vec<String> =
        letters.iter().map(|letter| letter.event.as_ref().unwrap().id().to_owned()).collect();
    given_up.sort_unstable();
    assert_eq!(given_up, ["12", "24", "3"]);
    let mut done = BTreeSet::new();
    fleet.records(|record| {
        if let Record::Handled { event, outcome: Outcome::Done, .. } = record {
            done.insert(*event);
        }
    });
    let all: BTreeSet<u32> = (0..40).filter(|event| ![3, 12, 24].contains(event)).collect();
    assert_eq!(done, all);
}

/// The events of the key that is worked off succeed between the deaths, and must not hide them.
#[tokio::test]
async fn an_event_that_kills_its_process_is_given_up_although_another_key_is_worked_off() {
    let settings = [
        ("pipelines.test.order_by", BY_DIGIT),
        ("pipelines.test.max_attempts", "2"),
        // Due when the first lease of the killed process has run out.
        ("pipelines.test.backoff", "{ initial = \"1s\", max = \"1s\", jitter = 0.0 }"),
        ("pipelines.test.lease_ttl", "\"1s\""),
    ];
    let mut fleet = Fleet::new(Options::default(), 1, &settings);
    let poison = |event, effect| Poison { bot: bot(0), event, effect };
    fleet.behaviour.poison = vec![poison(3, Effect::Fails), poison(250, Effect::Aborts)];
    fleet.start(1).await;
    fleet.publish(300).await;
    let queue = queue(&fleet.config, "test").await;
    let mut deaths = 0;
    while queue.dead_letters(None, 10).await.unwrap().len() < 2 {
        if fleet.workers[0].wait_exit(Duration::from_millis(100)).is_some() {
            deaths += 1;
            assert!(deaths <= 6, "it is given up");
            fleet.restart(0).await;
        }
    }
    let letters = queue.dead_letters(None, 10).await.unwrap();
    let mut given_up: Vec<&str> =
        letters.iter().map(|letter| letter.event.as_ref().unwrap().id()).collect();
    given_up.sort_unstable();
    assert_eq!(given_up, ["250", "3"]);
}

#[tokio::test]
async fn a_bot_with_keys_that_fail_is_paused_purged_and_released() {
    let server = RedisServer::start(Options::default());
    let fails = Arc::new(AtomicBool::new(true));
    let broken = Arc::clone(&fails);
    let (tried, handler) =
        trying(move |event| event.subject() == Some("bad") && broken.load(Ordering::Relaxed));
    let settings = [
        ("pipelines.stop.order_by", "\"subject\""),
        ("pipelines.stop.max_attempts", "100000"),
        ("pipelines.stop.backoff", "{ initial = \"1h\", max = \"1h\", jitter = 0.0 }"),
    ];
    let instance = Instance::start(&config(&server, "stop", &settings), handler).await;
    let queue = instance.queue("stop").clone();
    for name in ["purged", "paused", "released"] {
        let events: Vec<String> =
            (0..10).map(|id| event(name, ["bad", "ann"][id % 2], id)).collect();
        add(&server, STREAM, &events).await;
    }
    let id = |name: &str| BotId::parse(name).unwrap();
    let view = async |name: &str| queue.view_bot(&id(name), SystemClock.now()).await.unwrap();
    for name in ["purged", "paused", "released"] {
        eventually(LONG, "its key waits for an hour", async || {
            let view = view(name).await;
            view.depth == 5 && view.state == BotState::Parked
        })
        .await;
    }
    assert_eq!(queue.purge(&id("purged")).await.unwrap(), 5);
    assert_eq!((view("purged").await.depth, view("purged").await.state), (0, BotState::Idle));
    assert!(queue.pause(Some(&id("paused"))).await.unwrap());
    assert!(queue.revoke(&id("paused")).await.unwrap());
    assert_eq!(view("paused").await.state, BotState::Paused);
    add(&server, STREAM, &[event("released", "ann", 10), event("released", "bad", 11)]).await;
    eventually(LONG, "others go on", async || ids(&tried).contains(&"10".to_owned())).await;
    eventually(LONG, "and the key waits", async || {
        let view = view("released").await;
        view.depth == 6 && view.state == BotState::Parked
    })
    .await;
    assert!(!ids(&tried).contains(&"11".to_owned()));
    fails.store(false, Ordering::Relaxed);
    assert!(queue.revoke(&id("released")).await.unwrap());
    eventually(LONG, "a release ends the wait", async || view("released").await.depth == 0).await;
    assert!(ids(&tried).contains(&"11".to_owned()));
    instance.stop().await;
}

#[tokio::test]
async fn a_stop_waits_for_the_keys_that_run_and_starts_no_other_and_repeats_nothing() {
    let server = RedisServer::start(Options::default());
    let done = Tried::default();
    let handler = || {
        let noted = Arc::clone(&done);
        Log::default().handler(move |slice: Slice| {
            let noted = Arc::clone(&noted);
            async move {
                tokio::time::sleep(Duration::from_millis(100)).await;
                let ids = slice.events.iter().map(|delivery| delivery.event.id().to_owned());
                noted.lock().unwrap().extend(ids);
                Ok(Outcomes::done())
            }
        })
    };
    let settings = [
        ("pipelines.stops.order_by", "\"subject\""),
        ("pipelines.stops.concurrency", "2"),
        ("pipelines.stops.slice_time", "\"1s\""),
    ];
    let config = config(&server, "stops", &settings);
    let instance = Instance::start(&config, handler()).await;
    let shop = BotId::parse("shop").unwrap();
    let queue = instance.queue("stops").clone();
    queue.pause(Some(&shop)).await.unwrap();
    let events: Vec<String> = (0..60).map(|id| event("shop", &format!("user-{id}"), id)).collect();
    add(&server, STREAM, &events).await;
    eventually(LONG, "all are queued", async || {
        queue.view_bot(&shop, SystemClock.now()).await.unwrap().depth == 60
    })
    .await;
    queue.resume(Some(&shop)).await.unwrap();
    eventually(LONG, "some are done", async || ids(&done).len() > 20).await;
    let watch = Stopwatch::start();
    instance.stop().await;
    watch.within(Duration::from_secs(2), "the stop");
    let before = ids(&done).len();
    assert!(before < 60, "{before} were done");
    let instance = Instance::start(&config, handler()).await;
    eventually(LONG, "all are done", async || ids(&done).len() >= 60).await;
    eventually(LONG, "nothing is left", async || {
        let view = queue.view_bot(&shop, SystemClock.now()).await.unwrap();
        view.depth == 0 && view.state == BotState::Idle
    })
    .await;
    instance.stop().await;
    let mut all = ids(&done);
    all.sort_unstable_by_key(|id| id.parse::<u32>().unwrap());
    assert_eq!(all, (0..60).map(|id| id.to_string()).collect::<Vec<_>>(), "each once");
}

#[tokio::test]
async fn lanes_that_are_set_aside_are_worked_off_after_the_order_is_that_of_the_bot_again() {
    let server = RedisServer::start(Options::default());
    let fails = Arc::new(AtomicBool::new(true));
    let broken = || {
        let fails = Arc::clone(&fails);
        trying(move |_| fails.load(Ordering::Relaxed))
    };
    let settings =
        [("pipelines.back.order_by", "\"subject\""), ("pipelines.back.max_attempts", "100000")];
    let (before, handler) = broken();
    let instance = Instance::start(&config(&server, "back", &settings), handler).await;
    let events: Vec<String> =
        (0..30).map(|id| event("shop", ["ann", "bob", "eve"][id % 3], id)).collect();
    add(&server, STREAM, &events).await;
    let shop = BotId::parse("shop").unwrap();
    let queue = instance.queue("back").clone();
    eventually(LONG, "each key was tried", async || {
        let first: BTreeSet<String> = ids(&before).into_iter().collect();
        first.len() == 3 && queue.view_bot(&shop, SystemClock.now()).await.unwrap().depth == 30
    })
    .await;
    instance.stop().await;

    fails.store(false, Ordering::Relaxed);
    let (after, handler) = broken();
    let settings = [("pipelines.back.max_attempts", "100000")];
    let instance = Instance::start(&config(&server, "back", &settings), handler).await;
    add(&server, STREAM, &[event("shop", "ann", 30)]).await;
    let queue = instance.queue("back").clone();
    eventually(LONG, "nothing is left", async || {
        let view = queue.view_bot(&shop, SystemClock.now()).await.unwrap();
        view.depth == 0 && view.state == BotState::Idle && ids(&after).len() == 31
    })
    .await;
    let ids = ids(&after);
    assert_eq!(ids.last().map(String::as_str), Some("30"), "the queue comes after them: {ids:?}");
    for key in 0..3 {
        let of_key: Vec<usize> = ids.iter().map(|id| id.parse().unwrap()).collect();
        let of_key: Vec<usize> = of_key.into_iter().filter(|id| id % 3 == key).collect();
        assert!(of_key.is_sorted(), "{of_key:?}");
    }
    instance.stop().await;
}

/// One call ends a slice, and must stay short although the handler may give up each event.
#[tokio::test]
async fn a_slice_of_keys_has_at_most_500_events() {
    let server = RedisServer::start(Options::default());
    let longest = Arc::new(AtomicUsize::new(0));
    let noted = Arc::clone(&longest);
    let handler = Log::default().handler(move |slice: Slice| {
        noted.fetch_max(slice.events.len(), Ordering::Relaxed);
        async { Ok(Outcomes::done()) }
    });
    let settings = [
        ("pipelines.short.order_by", "\"subject\""),
        ("pipelines.short.batch", "5000"),
        ("pipelines.short.slice_time", "\"10s\""),
        ("pipelines.short.lease_ttl", "\"30s\""),
    ];
    let instance = Instance::start(&config(&server, "short", &settings), handler).await;
    let shop = BotId::parse("shop").unwrap();
    let queue = instance.queue("short").clone();
    let depth = async || queue.view_bot(&shop, SystemClock.now()).await.unwrap().depth;
    queue.pause(Some(&shop)).await.unwrap();
    let events: Vec<String> = (0..3_000).map(|id| event("shop", "ann", id)).collect();
    add(&server, STREAM, &events).await;
    eventually(LONG, "all are queued", async || depth().await == 3_000).await;
    queue.resume(Some(&shop)).await.unwrap();
    eventually(LONG, "all are done", async || depth().await == 0).await;
    assert_eq!(longest.load(Ordering::Relaxed), 500);
    instance.stop().await;
}

/// After such a step, the fences are ahead of the clock.
#[tokio::test]
async fn a_key_that_failed_is_soon_tried_again_although_the_clock_of_redis_was_set_back() {
    let server = RedisServer::start(Options::default());
    let fails = AtomicBool::new(true);
    let (tried, handler) =
        trying(move |event| event.subject() == Some("bad") && fails.swap(false, Ordering::Relaxed));
    let settings = [("pipelines.back.order_by", "\"subject\"")];
    let instance = Instance::start(&config(&server, "back", &settings), handler).await;
    let shop = BotId::parse("shop").unwrap();
    let queue = instance.queue("back").clone();
    let depth = async || queue.view_bot(&shop, SystemClock.now()).await.unwrap().depth;
    queue.pause(Some(&shop)).await.unwrap();
    let subjects = ["bad", "ann", "bad"];
    let events: Vec<String> = (0..3).map(|id| event("shop", subjects[id], id)).collect();
    add(&server, STREAM, &events).await;
    eventually(LONG, "all are queued", async || depth().await == 3).await;
    let ahead = micros(SystemClock.now() + Duration::from_secs(3_600));
    let mut connection = server.connection().await;
    let mut set = redis::cmd("HSET");
    set.arg(queue.keys(queue.shard_of(&shop)).meta()).arg("f").arg(ahead);
    let () = set.query_async(&mut connection).await.unwrap();
    queue.resume(Some(&shop)).await.unwrap();
    eventually(LONG, "all are done", async || depth().await == 0).await;
    let bad: Vec<String> = ids(&tried).into_iter().filter(|id| id != "1").collect();
    assert_eq!(bad, ["0", "0", "2"]);
    instance.stop().await;
}

/// Notes the first event of each lane that was committed, and then panics.
#[derive(Debug, Clone, Default)]
struct Loud(Tried);

impl Handler for Loud {
    async fn handle(&self, _: &Environment, _: &Slice) -> Result<Outcomes, Failure> {
        Ok(Outcomes::done())
    }

    fn committed(&self, slice: &Slice, _: usize) {
        self.0.lock().unwrap().push(slice.events[0].event.id().to_owned());
        panic!("as it should");
    }
}

#[tokio::test]
async fn a_panic_after_the_commit_of_a_lane_hides_no_commit_of_another() {
    let server = RedisServer::start(Options::default());
    let loud = Loud::default();
    let settings = [("pipelines.loud.order_by", "\"subject\"")];
    let instance = Instance::start(&config(&server, "loud", &settings), loud.clone()).await;
    let shop = BotId::parse("shop").unwrap();
    let queue = instance.queue("loud").clone();
    queue.pause(Some(&shop)).await.unwrap();
    let events: Vec<String> =
        (0..3).map(|id| event("shop", ["ann", "bob", "eve"][id], id)).collect();
    add(&server, STREAM, &events).await;
    eventually(LONG, "all are queued", async || {
        queue.view_bot(&shop, SystemClock.now()).await.unwrap().depth == 3
    })
    .await;
    queue.resume(Some(&shop)).await.unwrap();
    eventually(LONG, "each lane is told", async || ids(&loud.0).len() == 3).await;
    instance.stop().await;
    let mut told = ids(&loud.0);
    told.sort_unstable();
    assert_eq!(told, ["0", "1", "2"], "each once");
}
