//! A process whose clock is wrong. Times in Redis are those of its server, and only its clock ends them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fairlane::app::{App, Roles};
use fairlane::clock::{Clock, SystemClock, millis};
use fairlane::config::Config;
use fairlane::event::Event;
use fairlane::handler::Outcomes;
use fairlane::id::{BotId, PipelineName};
use fairlane::lifecycle::Shutdown;
use fairlane::product::{Gauges, OpenError, Opening, Part, Product, Seat, Seen, SharedHandler};
use fairlane::queue::PushOptions;
use jiff::Timestamp;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::support::automation_rig::{RULES, emitted, event, publish, put};
use crate::support::bus::add;
use crate::support::config::{STREAM, config};
use crate::support::counter_fleet::Stores;
use crate::support::instance::{Instance, queue};
use crate::support::recorder::Log;
use crate::support::redis::{Options, Persistence, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);
const MINUTE: i64 = 60;
const DAY: i64 = 86_400;

/// A clock that is ahead by so many seconds.
struct Wrong(i64);

impl Clock for Wrong {
    fn now(&self) -> Duration {
        let (now, by) = (SystemClock.now(), Duration::from_secs(self.0.unsigned_abs()));
        if self.0 < 0 { now.saturating_sub(by) } else { now + by }
    }
}

async fn start(ahead: i64, config: &str, log: &Log) -> Instance {
    Instance::start_at(Arc::new(Wrong(ahead)), Roles::ALL, config, log.content()).await
}

#[tokio::test]
async fn delayed_events_are_on_time_and_no_busy_loop_waits_for_them() {
    const EVENTS: usize = 200;
    for ahead in [-MINUTE, MINUTE] {
        let (server, log) = (RedisServer::start(Options::default()), Log::default());
        let instance = start(ahead, &config(&server, "test", &[]), &log).await;
        let due = SystemClock.now() + Duration::from_secs(5);
        for id in 0..EVENTS {
            let bot = BotId::parse(&format!("bot-{id}")).unwrap();
            let later = Event::builder("test", &bot).build().unwrap();
            let options = PushOptions { due: Some(due), ..PushOptions::default() };
            instance.queue("test").push(&bot, &[later], options).await.unwrap();
        }
        let before = server.calls("evalsha").await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let calls = server.calls("evalsha").await - before;
        // With a look at each of the 8 shards every 5 ms, it would be thousands.
        assert!(calls < 500, "{calls} scripts in two seconds, {ahead} s ahead");
        eventually(LONG, "all are handled", async || log.len() >= EVENTS).await;
        let times: Vec<Duration> = log.all().into_iter().map(|seen| seen.at).collect();
        let (first, last) = (*times.iter().min().unwrap(), *times.iter().max().unwrap());
        assert!(millis(first) >= millis(due), "{ahead} s ahead: early");
        let late = last.saturating_sub(due);
        assert!(late < Duration::from_secs(20), "{ahead} s ahead: {late:?} late");
        instance.stop().await;
    }
}

#[tokio::test]
async fn an_event_that_its_handler_delays_is_handed_out_again_after_the_delay() {
    const DELAY: Duration = Duration::from_secs(3);
    for ahead in [-MINUTE, MINUTE] {
        let (server, log, count) =
            (RedisServer::start(Options::default()), Log::default(), AtomicUsize::new(0));
        let handler = log.handler(move |_| {
            let is_first = count.fetch_add(1, Ordering::Relaxed) == 0;
            async move {
                let done = Outcomes::done();
                Ok(if is_first { done.later(0, DELAY) } else { done })
            }
        });
        let (clock, config) = (Arc::new(Wrong(ahead)), config(&server, "test", &[]));
        let instance = Instance::start_at(clock, Roles::ALL, &config, handler).await;
        let bot = BotId::parse("bot").unwrap();
        let event = Event::builder("test", &bot).build().unwrap();
        instance.queue("test").push(&bot, &[event], PushOptions::default()).await.unwrap();
        eventually(LONG, "it is handled again", async || log.len() == 2).await;
        let times: Vec<Duration> = log.all().into_iter().map(|seen| seen.at).collect();
        let waited = times[1].saturating_sub(times[0]);
        // Times are in whole ms.
        assert!(waited > DELAY.mul_f64(0.9), "{ahead} s ahead: early, after {waited:?}");
        assert!(waited < Duration::from_secs(20), "{ahead} s ahead: late, after {waited:?}");
        instance.stop().await;
    }
}

#[tokio::test]
async fn an_event_expires_by_the_clock_of_redis() {
    let now = SystemClock.now().as_secs().cast_signed();
    let [before, later] =
        [-5 * MINUTE, 5 * MINUTE].map(|seconds| Timestamp::from_second(now + seconds).unwrap());
    let bot = BotId::parse("bot").unwrap();
    let new = |id: &str, expires| {
        Event::builder("test", &bot).id(id).expirytime(expires).build().unwrap()
    };
    let copied = json!({
        "specversion": "1.0", "id": "copied", "source": "test", "type": "test", "botid": "bot",
        "expirytime": later.to_string(),
    });
    for ahead in [-10 * MINUTE, 10 * MINUTE] {
        let (server, log) = (RedisServer::start(Options::default()), Log::default());
        let instance = start(ahead, &config(&server, "test", &[]), &log).await;
        let queue = instance.queue("test");
        let events = [new("expired", before), new("pushed", later)];
        queue.push(&bot, &events, PushOptions::default()).await.unwrap();
        add(&server, STREAM, &[copied.to_string()]).await;
        eventually(LONG, "nothing is queued", async || {
            log.len() >= 2 && queue.view(SystemClock.now()).await.unwrap().depth == 0
        })
        .await;
        let mut ids: Vec<String> = log.all().into_iter().map(|seen| seen.id).collect();
        ids.sort_unstable();
        assert_eq!(ids, ["copied", "pushed"], "{ahead} s ahead");
        instance.stop().await;
    }
}

#[tokio::test]
async fn an_event_that_a_rule_delays_is_on_the_bus_after_the_delay() {
    for ahead in [-MINUTE, MINUTE] {
        let stores = Stores::start(Persistence::Always);
        let instance = start(ahead, &stores.direct(RULES), &Log::default()).await;
        let rule = json!({ "on": ["x"], "actions": [{ "emit": { "type": "y", "delay": 3 } }] });
        put(&instance.client(), "shop", "later", &rule).await;
        let begun = Instant::now();
        publish(&stores, &[event("shop", "u", "1", "x", json!({}))]).await;
        let came = async || !emitted(&stores, "y").await.is_empty();
        eventually(LONG, "the delayed event is on the bus", came).await;
        let waited = begun.elapsed();
        assert!(waited >= Duration::from_secs(3), "{ahead} s ahead: early, after {waited:?}");
        assert!(waited < Duration::from_secs(20), "{ahead} s ahead: late, after {waited:?}");
        instance.stop().await;
    }
}

/// A product that keeps the last sample of its pipeline.
#[derive(Clone, Default)]
struct Watched(Arc<Mutex<Seen>>);

impl Product for Watched {
    fn pipeline(&self) -> &'static str {
        "watched"
    }

    fn open(&self, _: &Opening<'_>) -> Result<Arc<dyn Part>, OpenError> {
        Ok(Arc::new(self.clone()))
    }
}

impl Part for Watched {
    fn handler(&self, _: &Seat<'_>) -> SharedHandler {
        Log::default().content().into()
    }

    fn gauges(&self) -> Option<Box<dyn Gauges>> {
        Some(Box::new(self.clone()))
    }
}

impl Gauges for Watched {
    fn watches_delayed(&self) -> bool {
        true
    }

    fn show(&self, seen: &Seen) {
        *self.0.lock().unwrap() = seen.clone();
    }
}

#[tokio::test]
async fn a_delayed_event_is_not_overdue_before_its_time() {
    let (server, watched) = (RedisServer::start(Options::default()), Watched::default());
    let text = config(&server, "watched", &[("pipelines.watched.handler", "\"watched\"")]);
    let builder = App::builder(Config::from_toml(&text, "the test").unwrap());
    let builder = builder.clock(Arc::new(Wrong(MINUTE))).product(watched.clone());
    let app = Box::pin(builder.build()).await.unwrap();
    let queue = app.queue(&PipelineName::parse("watched").unwrap()).unwrap();
    let mut running = JoinSet::new();
    running.spawn(app.run(Shutdown::new()));
    let bot = BotId::parse("bot").unwrap();
    let later = Event::builder("test", &bot).build().unwrap();
    let due = Some(SystemClock.now() + Duration::from_secs(40));
    let options = PushOptions { due, ..PushOptions::default() };
    queue.push(&bot, &[later], options).await.unwrap();
    let last = || watched.0.lock().unwrap().clone();
    eventually(LONG, "it is sampled", async || last().view.delayed == 1).await;
    assert_eq!(last().overdue_ms, 0);
}

#[tokio::test]
async fn dead_letters_are_kept_for_their_time_and_no_longer() {
    for ahead in [-8 * DAY, 8 * DAY] {
        let server = RedisServer::start(Options::default());
        let config = config(&server, "test", &[]);
        let letters = queue(&config, "test").await.shards()[0].dlq.clone();
        let old = SystemClock.now().saturating_sub(Duration::from_secs(8 * DAY.unsigned_abs()));
        for id in [format!("{}-0", millis(old)), "*".to_owned()] {
            server.ask(&["XADD", &letters, &id, "bot", "b", "record", "x"]).await;
        }
        let instance = start(ahead, &config, &Log::default()).await;
        let left = async || server.ask(&["XLEN", &letters]).await;
        eventually(LONG, "the old one is removed", async || left().await != "2").await;
        assert_eq!(left().await, "1", "{ahead} s ahead: the new one stays");
        instance.stop().await;
    }
}
