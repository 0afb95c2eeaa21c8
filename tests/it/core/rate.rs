//! The limits of bots and of pipelines: rates, and slices at once.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fairlane::app::Roles;
use fairlane::clock::{Clock as _, SystemClock};
use fairlane::handler::Outcomes;
use fairlane::id::BotId;
use fairlane::queue::{BotChange, BotState};
use fairlane::rate::{BotRate, Change};

use crate::support::bus::{add, event};
use crate::support::cluster::Cluster;
use crate::support::config::{STREAM, config};
use crate::support::fleet::Fleet;
use crate::support::history::Record;
use crate::support::instance::Instance;
use crate::support::interceptor::Interception;
use crate::support::proxy::distance::Distance;
use crate::support::proxy::{Proxy, holds};
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::{Stopwatch, eventually};

const LONG: Duration = Duration::from_secs(40);
const WORK: Roles = Roles { ingest: false, work: true, http: false, schedule: false };

/// Asserts that every window has at most the events of the bucket, two more, and those whose tokens are used
/// later than they were granted: at most those of 250 ms, and of one full bucket.
pub(super) fn assert_within(times_us: &mut [u64], per_second: f64, burst: f64) {
    let late = (per_second * 0.25).min(burst);
    times_us.sort_unstable();
    for (from, &begin) in times_us.iter().enumerate() {
        for (count, &end) in (1_u32..).zip(&times_us[from..]) {
            #[expect(clippy::cast_precision_loss, reason = "a few seconds")]
            let allowed = burst + late + per_second * (end - begin) as f64 / 1e6 + 2.0;
            assert!(f64::from(count) <= allowed, "{count} events in {} us", end - begin);
        }
    }
}

/// The mean rate after the burst.
fn mean(times_us: &[u64], burst: usize) -> f64 {
    let lasted = times_us[times_us.len() - 1] - times_us[0];
    #[expect(clippy::cast_precision_loss, reason = "a few seconds")]
    let mean = (times_us.len() - burst) as f64 / (lasted as f64 / 1e6);
    mean
}

/// Runs up to three times, until the lowest and the highest mean are within these: other work may slow the
/// machine down for a while, or delay the first event. The run itself asserts what must never happen.
async fn reaches(expected: RangeInclusive<f64>, run: impl AsyncFn() -> (f64, f64)) {
    let mut means = Vec::new();
    while means.len() < 3 {
        let (lowest, highest) = run().await;
        if expected.contains(&lowest) && expected.contains(&highest) {
            return;
        }
        means.push((lowest, highest));
    }
    panic!("{expected:?} a second are reached in none of three runs: {means:?}");
}

/// When the events of each bot were handed to a handler, in us.
fn handed(fleet: &Fleet) -> BTreeMap<String, Vec<u64>> {
    let mut bots: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    fleet.records(|record| {
        if let Record::Handled { bot, started, .. } = *record {
            bots.entry(bot.to_owned()).or_default().push(started);
        }
    });
    bots
}

#[tokio::test]
async fn each_bot_gets_its_rate_and_never_more_although_a_process_is_killed() {
    reaches(19.6..=20.1, rates_of_bots).await;
}

async fn rates_of_bots() -> (f64, f64) {
    const BURST: usize = 60;
    let settings = [("pipelines.test.rate", "\"20/s\""), ("pipelines.test.burst", "60")];
    let mut fleet = Fleet::new(Options::default(), 20, &settings);
    fleet.start(2).await;
    fleet.publish(160).await;
    fleet.settles(20 * 90, LONG).await;
    fleet.workers[0].kill9();
    fleet.restart(0).await;
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert!(report.is_clean(), "{report:?}");
    let bots = handed(&fleet);
    assert_eq!(bots.len(), 20);
    let (mut lowest, mut highest) = (f64::INFINITY, 0.0_f64);
    for mut times in bots.into_values() {
        assert_within(&mut times, 20.0, 60.0);
        let mean = mean(&times, BURST);
        (lowest, highest) = (lowest.min(mean), highest.max(mean));
    }
    (lowest, highest)
}

#[tokio::test]
async fn a_frozen_process_hands_out_nothing_late() {
    let settings = [
        ("pipelines.test.rate", "\"50/s\""),
        ("pipelines.test.burst", "5"),
        ("pipelines.test.total_rate", "\"200/s\""),
    ];
    let mut fleet = Fleet::new(Options::default(), 5, &settings);
    fleet.start(2).await;
    fleet.publish(250).await;
    for place in [0, 1, 0] {
        let before = fleet.settled();
        fleet.workers[place].sigstop();
        fleet.settles(before + 50, LONG).await;
        // The tokens of so long are many more than may be late.
        tokio::time::sleep(Duration::from_secs(1)).await;
        fleet.workers[place].sigcont();
    }
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert!(report.is_clean(), "{report:?}");
    let bots = handed(&fleet);
    for mut times in bots.values().cloned() {
        assert_within(&mut times, 50.0, 5.0);
    }
    let mut all: Vec<u64> = bots.into_values().flatten().collect();
    assert_within(&mut all, 200.0, 200.0);
}

#[tokio::test]
async fn bots_that_wait_for_tokens_are_not_claimed() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let settings = [("pipelines.parked.rate", "\"1/m\"")];
    let instance = Instance::start(&config(&server, "parked", &settings), log.content()).await;
    let bots = (0..20).map(|bot| format!("bot-{bot}"));
    let events: Vec<String> =
        bots.flat_map(|bot| (0..3).map(move |id| event(&bot, "test", id))).collect();
    add(&server, STREAM, &events).await;
    eventually(LONG, "each has its first event", async || log.len() == 20).await;
    // A bot without another event rests for a second at most.
    let queue = instance.queue("parked");
    eventually(LONG, "all rest until their next tokens", async || {
        let later = fairlane::clock::millis(SystemClock.now()) + 10_000;
        for bot in 0..20 {
            let bot = BotId::parse(&format!("bot-{bot}")).unwrap();
            let view = queue.view_bot(&bot, SystemClock.now()).await.unwrap();
            if view.until_ms.is_none_or(|until| until < later) {
                return false;
            }
        }
        true
    })
    .await;
    // Only claims and permits use this command; the sampler of metrics does not.
    let claims = async || server.calls("zrangebyscore").await;
    let (before, since) = (claims().await, Instant::now());
    eventually(LONG, "time passes", async || since.elapsed() > Duration::from_secs(4)).await;
    // A shard of theirs is looked at every ten seconds.
    assert!(claims().await - before <= 8, "{} claims in 4 s", claims().await - before);
    assert_eq!(log.len(), 20);
    instance.stop().await;
}

#[tokio::test]
async fn events_come_in_order_no_attempt_is_counted_and_quiet_bots_do_not_wait() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let settings = [
        ("pipelines.slow.rate", "\"20/s\""),
        ("pipelines.slow.burst", "5"),
        ("pipelines.slow.workers.max", "2"),
    ];
    let instance = Instance::start(&config(&server, "slow", &settings), log.content()).await;
    let busy: Vec<String> = (0..40).map(|id| event("busy", "test", id)).collect();
    add(&server, STREAM, &busy).await;
    let (queue, bot) = (instance.queue("slow"), BotId::parse("busy").unwrap());
    eventually(LONG, "the burst is over", async || log.len() > 5).await;
    eventually(LONG, "it is held back", async || {
        let view = queue.view_bot(&bot, SystemClock.now()).await.unwrap();
        assert_eq!(view.attempts, 0);
        view.state == BotState::Parked && view.throttled_since_ms.is_some()
    })
    .await;
    let found = queue.throttled().await.unwrap().unwrap();
    assert_eq!((found.bots, found.bot), (1, bot.clone()));
    for id in 0..5 {
        let handled = || log.all().iter().any(|seen| seen.bot == format!("q-{id}"));
        let sent = Stopwatch::start();
        add(&server, STREAM, &[event(&format!("q-{id}"), "test", "quiet")]).await;
        eventually(LONG, "the quiet one is done", async || handled()).await;
        sent.within(Duration::from_millis(800), "the quiet one is done");
    }
    eventually(LONG, "all are done", async || log.len() == 45).await;
    let seen: Vec<_> = log.all().into_iter().filter(|seen| seen.bot == "busy").collect();
    let ids: Vec<String> = seen.iter().map(|seen| seen.id.clone()).collect();
    assert_eq!(ids, (0..40).map(|id| id.to_string()).collect::<Vec<_>>());
    assert!(seen.iter().all(|seen| seen.attempt == 1), "{seen:?}");
    let mut times: Vec<u64> = seen.iter().map(|seen| fairlane::clock::micros(seen.at)).collect();
    assert_within(&mut times, 20.0, 5.0);
    eventually(LONG, "nothing is held back", async || queue.throttled().await.unwrap().is_none())
        .await;
    instance.stop().await;
}

#[tokio::test]
async fn a_bot_has_the_rate_that_is_set_for_it_from_its_next_slice_on() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let settings = [
        ("pipelines.own.rate", "\"1/h\""),
        ("limits.bots", "[{ bot = \"configured\", pipeline = \"own\", rate = \"unlimited\" }]"),
    ];
    let instance = Instance::start(&config(&server, "own", &settings), log.content()).await;
    let events: Vec<String> = ["set", "configured", "other"]
        .iter()
        .flat_map(|bot| (0..30).map(move |id| event(bot, "test", id)))
        .collect();
    add(&server, STREAM, &events).await;
    let count = |bot: &str| log.all().iter().filter(|seen| seen.bot == bot).count();
    eventually(LONG, "one has no limit", async || count("configured") == 30).await;
    eventually(LONG, "the others have one", async || count("set") == 1 && count("other") == 1)
        .await;
    let queue = instance.queue("own");
    let rate = Change::To(BotRate::Unlimited);
    let change = BotChange { rate, ..BotChange::default() };
    eventually(LONG, "it is parked", async || {
        let view = queue.view_bot(&BotId::parse("set").unwrap(), SystemClock.now()).await.unwrap();
        view.state == BotState::Parked
    })
    .await;
    assert!(queue.set(&BotId::parse("set").unwrap(), change).await.unwrap());
    eventually(LONG, "it need not wait", async || count("set") == 30).await;
    assert_eq!(count("other"), 1);
    instance.stop().await;
}

#[tokio::test]
async fn a_bot_that_its_rate_holds_back_does_not_make_its_pipeline_late() {
    let server = RedisServer::start(Options::default());
    let settings = [("pipelines.own.rate", "\"1/h\"")];
    let log = Log::default();
    let instance = Instance::start(&config(&server, "own", &settings), log.content()).await;
    let queue = instance.queue("own");
    let in_an_hour = SystemClock.now() + Duration::from_secs(3_600);
    add(&server, STREAM, &[event("held", "test", 0), event("held", "test", 1)]).await;
    eventually(LONG, "it is held back", async || {
        let view = queue.view(in_an_hour).await.unwrap();
        (view.depth, view.parked, view.throttled, view.oldest_age_ms) == (1, 1, 1, 0)
    })
    .await;
    let view = queue.view(in_an_hour + Duration::from_secs(3_600)).await.unwrap();
    assert!(view.oldest_age_ms > 7_000_000, "no worker took it after its next token");
    // Its age does not hide that of another bot.
    queue.pause(None).await.unwrap();
    add(&server, STREAM, &[event("other", "test", 0)]).await;
    eventually(LONG, "another one waits", async || {
        let view = queue.view(in_an_hour).await.unwrap();
        view.throttled == 1 && view.oldest_age_ms > 3_000_000
    })
    .await;
    instance.stop().await;
}

/// A bot that used its tokens has nothing to wait for until its next event comes.
#[tokio::test]
async fn an_event_that_comes_after_the_last_token_shows_that_it_waits() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let settings = [("pipelines.own.rate", "\"1/h\"")];
    let instance = Instance::start(&config(&server, "own", &settings), log.content()).await;
    let queue = instance.queue("own");
    let all = async || queue.view(SystemClock.now()).await.unwrap();
    add(&server, STREAM, &[event("bot", "test", 0)]).await;
    eventually(LONG, "it is handled", async || all().await.depth == 0 && log.len() == 1).await;
    assert_eq!(queue.throttled().await.unwrap(), None);
    add(&server, STREAM, &[event("bot", "test", 1)]).await;
    eventually(LONG, "it shows that it waits", async || {
        let found = queue.throttled().await.unwrap();
        found.is_some_and(|found| found.bot.as_str() == "bot") && all().await.parked == 1
    })
    .await;
    assert_eq!(log.len(), 1);
    instance.stop().await;
}

#[tokio::test]
async fn all_bots_of_all_processes_share_the_total_rate_evenly() {
    reaches(95.0..=100.7, rate_of_all_bots).await;
}

async fn rate_of_all_bots() -> (f64, f64) {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let settings = [("pipelines.total.total_rate", "\"100/s\""), ("pipelines.total.batch", "1")];
    let text = config(&server, "total", &settings);
    let first = Instance::start(&text, log.content()).await;
    let second = Instance::start_as(WORK, &text, log.content()).await;
    let bots: Vec<String> = (0..10).map(|bot| format!("bot-{bot}")).collect();
    let events: Vec<String> =
        bots.iter().flat_map(|bot| (0..60).map(move |id| event(bot, "test", id))).collect();
    add(&server, STREAM, &events).await;
    eventually(LONG, "most are done", async || log.len() >= 400).await;
    let seen = log.all();
    let counts: Vec<usize> =
        bots.iter().map(|bot| seen.iter().filter(|seen| seen.bot == *bot).count()).collect();
    let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
    assert!(most - least <= 15, "{counts:?}");
    let mut times: Vec<u64> = seen.iter().map(|seen| fairlane::clock::micros(seen.at)).collect();
    assert_within(&mut times, 100.0, 100.0);
    first.stop().await;
    second.stop().await;
    let mean = mean(&times, 100);
    (mean, mean)
}

/// The maximum time of 60 events at 20 a second, with calls that take up to 300 ms.
const SLOWLY: Duration = Duration::from_secs(15);

/// Tokens travel for several calls, and the process recognises by their age that it was frozen.
#[tokio::test]
async fn pipelines_with_a_rate_handle_events_although_redis_is_slow() {
    const EVENTS: u32 = 60;
    for (setting, delay_ms) in [("total_rate", 30), ("total_rate", 150), ("rate", 150)] {
        let server = RedisServer::start(Options { tcp: true, ..Options::default() });
        let distance = Distance::start(server.tcp_addr()).await;
        let log = Log::default();
        let (url, key) = (format!("{:?}", distance.url()), format!("pipelines.slow.{setting}"));
        let settings = [(&*key, "\"20/s\""), ("redis.url", &*url)];
        let instance = Instance::start(&config(&server, "slow", &settings), log.content()).await;
        distance.set(Duration::from_millis(delay_ms));
        let events: Vec<String> =
            (0..EVENTS).map(|id| event(&format!("bot-{}", id % 10), "test", id)).collect();
        add(&server, STREAM, &events).await;
        let what = format!("{setting}, {delay_ms} ms each way");
        let watch = Stopwatch::start();
        eventually(LONG, &what, async || log.len() >= events.len()).await;
        watch.within(SLOWLY, &what);
        instance.stop().await;
    }
}

/// The shard that keeps the total and the shards of the bots are on different servers.
#[tokio::test]
async fn a_pipeline_with_a_total_rate_handles_events_although_one_primary_is_slow() {
    const EVENTS: u32 = 60;
    let cluster = Cluster::behind_proxies(Options::default(), 3, &[]).await;
    let mut distances = Vec::new();
    for (proxy, node) in cluster.proxies.iter().zip(&cluster.nodes).take(3) {
        let distance = Distance::start(node.tcp_addr()).await;
        proxy.lead_to(distance.address());
        distances.push(distance);
    }
    let log = Log::default();
    let settings = [("pipelines.test.total_rate", "\"20/s\"")];
    let instance = Instance::start(&config(&cluster, "test", &settings), log.content()).await;
    let mut published = 0;
    for (place, distance) in distances.iter().enumerate() {
        distance.set(Duration::from_millis(150));
        let ids = published..published + EVENTS;
        published += EVENTS;
        let events: Vec<String> =
            ids.map(|id| event(&format!("bot-{}", id % 10), "test", id)).collect();
        add(&cluster, STREAM, &events).await;
        let what = format!("primary {place} is slow");
        let watch = Stopwatch::start();
        eventually(LONG, &what, async || log.len() >= published as usize).await;
        watch.within(SLOWLY, &what);
        distance.set(Duration::ZERO);
    }
    instance.stop().await;
}

/// While a process waits for an answer about the limits, bots become ready.
#[tokio::test]
async fn events_that_come_while_unused_tokens_return_are_within_the_total_rate() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let proxy = Proxy::start(server.tcp_addr()).await;
    // At its start it asks for tokens, and returns them while nobody is ready.
    let returning = proxy.intercept(holds([":tokens"]), 2, Interception::HoldReply);
    let log = Log::default();
    let url = format!("{:?}", proxy.url());
    let settings = [
        ("pipelines.test.total_rate", "\"40/s\""),
        ("pipelines.test.batch", "100"),
        ("redis.url", &*url),
    ];
    let instance = Instance::start(&config(&server, "test", &settings), log.content()).await;
    assert!(returning.catches(LONG).await);
    let events: Vec<String> = (0..100).map(|id| event("bot", "test", id)).collect();
    add(&server, STREAM, &events).await;
    let queue = instance.queue("test");
    let bot = BotId::parse("bot").unwrap();
    eventually(LONG, "they are queued", async || {
        queue.view_bot(&bot, SystemClock.now()).await.is_ok_and(|view| view.depth == 100)
    })
    .await;
    returning.release();
    eventually(LONG, "all are handled", async || log.len() == events.len()).await;
    let mut times: Vec<u64> =
        log.all().iter().map(|seen| fairlane::clock::micros(seen.at)).collect();
    assert_within(&mut times, 40.0, 40.0);
    instance.stop().await;
}

#[tokio::test]
async fn all_processes_together_have_at_most_the_total_number_of_slices_under_way() {
    let server = RedisServer::start(Options::default());
    let (log, now, most) =
        (Log::default(), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let handler = || {
        let (now, most) = (Arc::clone(&now), Arc::clone(&most));
        log.handler(move |_| {
            let (now, most) = (Arc::clone(&now), Arc::clone(&most));
            async move {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(20)).await;
                now.fetch_sub(1, Ordering::SeqCst);
                Ok(Outcomes::done())
            }
        })
    };
    let settings = [("pipelines.few.total_concurrency", "3"), ("pipelines.few.batch", "2")];
    let text = config(&server, "few", &settings);
    let first = Instance::start(&text, handler()).await;
    let second = Instance::start_as(WORK, &text, handler()).await;
    let events: Vec<String> =
        (0..200).map(|id| event(&format!("bot-{}", id % 20), "test", id)).collect();
    add(&server, STREAM, &events).await;
    eventually(LONG, "half are done", async || log.len() >= 100).await;
    second.stop().await;
    eventually(LONG, "all are done", async || log.len() == 200).await;
    assert_eq!(most.load(Ordering::SeqCst), 3);
    first.stop().await;
}

#[tokio::test]
async fn one_lost_reply_ends_no_slice() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let proxy = Proxy::start(server.tcp_addr()).await;
    let counts = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    let [started, ended] = counts.clone();
    let handler = Log::default().handler(move |_| {
        let [started, ended] = counts.clone();
        async move {
            started.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_secs(4)).await;
            ended.fetch_add(1, Ordering::SeqCst);
            Ok(Outcomes::done())
        }
    });
    let url = format!("{:?}", proxy.url());
    let settings = [("pipelines.test.total_concurrency", "3"), ("redis.url", &*url)];
    let instance = Instance::start(&config(&server, "test", &settings), handler).await;
    let events: Vec<String> = (0..3).map(|id| event(&format!("bot-{id}"), "test", id)).collect();
    add(&server, STREAM, &events).await;
    eventually(LONG, "all begin", async || started.load(Ordering::SeqCst) == 3).await;
    // It arrives at the end of the test.
    let lost = proxy.intercept(holds([":slots"]), 1, Interception::HoldReply);
    assert!(lost.catches(LONG).await);
    eventually(LONG, "all end", async || ended.load(Ordering::SeqCst) == 3).await;
    assert_eq!(started.load(Ordering::SeqCst), 3);
    instance.stop().await;
}

#[tokio::test]
async fn the_slices_of_a_killed_process_are_used_by_others_soon() {
    let settings = [("pipelines.test.total_concurrency", "3"), ("pipelines.test.batch", "2")];
    let mut fleet = Fleet::new(Options::default(), 12, &settings);
    fleet.behaviour.delay = Duration::from_millis(10);
    fleet.start(2).await;
    fleet.publish(40).await;
    fleet.settles(100, LONG).await;
    fleet.workers[0].kill9();
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert!(report.is_clean(), "{report:?}");
    let mut turns: Vec<(u64, i32)> = Vec::new();
    fleet.records(|record| {
        if let Record::Handled { started, ended, .. } = *record {
            turns.extend([(started, 1), (ended, -1)]);
        }
    });
    turns.sort_unstable();
    let mut under_way = 0;
    for (at, turn) in turns {
        under_way += turn;
        assert!(under_way <= 3, "{under_way} at {at}");
    }
    let (rest, _) = fleet.rests();
    assert!(rest < Duration::from_secs(15), "{rest:?}");
}
