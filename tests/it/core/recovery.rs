//! The maximum delay that a fault in one place may cause elsewhere, and the effects that it must
//! never have.

use std::time::{Duration, Instant};

use fairlane::app::Roles;
use fairlane::clock::{Clock as _, SystemClock};
use fairlane::event::Event;
use fairlane::handler::Outcomes;
use fairlane::id::BotId;
use fairlane::queue::{CLAIM_TTL, PushOptions};
use fairlane::redis::{Link, Target};
use redis::Pipeline;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::support::bus::{add, event};
use crate::support::config::{SHARDS, STREAM, config};
use crate::support::http::{get, metric};
use crate::support::instance::{Instance, queue};
use crate::support::interceptor::Interception;
use crate::support::proxy::{Proxy, holds};
use crate::support::recorder::Log;
use crate::support::redis::{Options, Persistence, RedisServer};
use crate::support::served::Served;
use crate::support::wait::{Stalls, Stopwatch, eventually, tried};

const LONG: Duration = Duration::from_secs(20);
const WORK: Roles = Roles { ingest: false, work: true, http: false, schedule: false };

/// How long a caller waits before it gives up.
const PATIENCE: Duration = Duration::from_millis(300);

/// A slow machine may need several tries: a try whose lease ran out meanwhile shows nothing.
const TRIES: usize = 10;

#[tokio::test]
async fn after_a_redis_restart_no_handler_starts_under_a_lease_that_was_revoked() {
    // The answer to the claim, or the events themselves, reach the process after Redis has
    // restarted and another process holds the bot.
    for needle in ["}:weight", "}:q:"] {
        tried(TRIES, async |_| old_events_arrive_late(needle).await).await;
    }
}

/// Whether the late process still believed in its lease when the events came.
async fn old_events_arrive_late(needle: &'static str) -> bool {
    let options = Options { tcp: true, persistence: Persistence::Always, ..Options::default() };
    let mut server = RedisServer::start(options);
    let proxy = Proxy::start(server.tcp_addr()).await;
    let name = "late-start";
    let settings = [
        ("pipelines.late-start.workers.max", "1"),
        ("pipelines.late-start.handler_timeout", "\"10s\""),
        ("redis.shards", "1"),
    ];
    let direct = config(&server, name, &settings);
    let (late_log, log) = (Log::default(), Log::default());
    let through_proxy = direct.replace(&server.url(), &proxy.url());
    let interceptor = proxy.intercept(holds([needle, "{late-start:"]), 1, Interception::HoldReply);
    let queued = queue(&direct, name).await;
    let bot = BotId::parse("b").unwrap();
    let event = Event::builder("test", &bot).build().unwrap();
    queued.push(&bot, &[event], PushOptions::default()).await.unwrap();
    let started = Instant::now();
    let late = Instance::start_as(WORK, &through_proxy, late_log.content()).await;
    let lost = async |instance: &Instance| {
        let text = get(&instance.address.to_string(), "/metrics").await.1;
        metric(&text, "fairlane_leases_lost_total", &[("pipeline", name)]).unwrap_or_default()
    };
    let lost_before = lost(&late).await;
    assert!(interceptor.catches(LONG).await, "{needle}: the reply is held");
    let held = Instant::now();

    server.restart();
    let (done, may_end) = watch::channel(false);
    let holding = log.handler(move |_| {
        let mut may_end = may_end.clone();
        async move {
            let _ = may_end.wait_for(|done| *done).await;
            Ok(Outcomes::done())
        }
    });
    let other = Instance::start_as(WORK, &direct, holding).await;
    eventually(LONG, "another process has the bot", async || log.len() == 1).await;
    // Longer than a worker trusts a lease without asking again.
    eventually(LONG, "it is late", async || held.elapsed() > Duration::from_millis(100)).await;
    let in_time = started.elapsed() < CLAIM_TTL.mul_f64(0.8);
    interceptor.release();
    eventually(LONG, "the late process has dealt with it", async || {
        late_log.len() > 0 || lost(&late).await > lost_before || started.elapsed() > 2 * CLAIM_TTL
    })
    .await;
    assert_eq!(late_log.len(), 0, "{needle}: started below the fence of {:?}", log.all());
    done.send_replace(true);
    eventually(LONG, "it is done", async || {
        queued.next_events(&bot, 1).await.is_ok_and(|events| events.is_empty())
    })
    .await;
    assert_eq!((late_log.len(), log.len()), (0, 1), "once");
    late.stop().await;
    other.stop().await;
    in_time
}

/// The promised time of a recovery. A pause of the machine adds to it.
const SOON: Duration = Duration::from_secs(2);
/// The recovery from lost replies, for which no time is promised, once took this long.
const TOO_LONG: Duration = Duration::from_millis(4_900);

#[tokio::test]
async fn a_quiet_bot_goes_on_soon_after_the_replies_to_one_process_are_lost() {
    for alone in [true, false] {
        let server = RedisServer::start(Options { tcp: true, ..Options::default() });
        let proxy = Proxy::start(server.tcp_addr()).await;
        let name = if alone { "lost-alone" } else { "lost-beside" };
        let direct = config(&server, name, &[]);
        let log = Log::default();
        let through_proxy = direct.replace(&server.url(), &proxy.url());
        let deaf = Instance::start(&through_proxy, log.content()).await;
        add(&server, STREAM, &[event("b", "test", 0)]).await;
        eventually(LONG, "the first is handled", async || log.len() == 1).await;
        let other = if alone { None } else { Some(Instance::start(&direct, log.content()).await) };
        let (stalls, mut worst) = (Stalls::watch(), Duration::ZERO);
        for id in 1..=3 {
            proxy.lose_replies();
            let lost = SystemClock.now();
            add(&server, STREAM, &[event("b", "test", id)]).await;
            eventually(LONG, "the next is handled", async || {
                log.ids(name).contains(&id.to_string())
            })
            .await;
            worst = worst.max(SystemClock.now().saturating_sub(lost));
        }
        println!("replies lost, alone {alone}: a quiet bot waited {worst:?} at most");
        let stall = stalls.longest();
        assert!(worst < TOO_LONG + stall, "alone {alone}: {worst:?}, stalled for {stall:?}");
        let mut ids = log.ids(name);
        ids.dedup();
        assert_eq!(ids, ["0", "1", "2", "3"], "in order");
        deaf.stop().await;
        if let Some(other) = other {
            other.stop().await;
        }
    }
}

#[tokio::test]
async fn a_connection_without_answers_is_replaced_although_each_call_is_cancelled_early() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let proxy = Proxy::start(server.tcp_addr()).await;
    // No call ever waits for so long.
    let link = Link::new(Target::new(&proxy.url()).unwrap(), Vec::new(), 10_000, LONG * 10);
    let mut ping = Pipeline::new();
    ping.cmd("PING");
    for _ in 0..3 {
        link.run(&ping).await.unwrap();
        proxy.lose_replies();
        timeout(PATIENCE, link.run(&ping)).await.expect_err("no answer comes");
        eventually(LONG, "a call is answered", async || {
            timeout(PATIENCE, link.run(&ping)).await.is_ok_and(|answers| answers.is_ok())
        })
        .await;
    }
}

#[tokio::test]
async fn after_the_reading_process_is_killed_another_reads_the_bus_soon() {
    let server = RedisServer::start(Options::default());
    let config = config(&server, "reader", &[("pipelines.reader.handler", "\"log\"")]);
    let reads = |served: &Served| served.log().contains("reading the bus");
    let mut reader = Served::start(&config).await;
    eventually(LONG, "it reads", async || reads(&reader)).await;
    let stalls = Stalls::watch();
    let (mut usual, mut worst) = (Duration::ZERO, Duration::ZERO);
    for id in 1..=3 {
        let next = Served::start(&config).await;
        // The new process has its workers and waits for the lock.
        let added = Instant::now();
        add(&server, STREAM, &[event("b", "test", format!("before-{id}"))]).await;
        let handled = |served: &Served, what: &str| served.log().contains(what);
        let before = format!("\"before-{id}\"");
        eventually(LONG, "one of the two handles it", async || {
            handled(&reader, &before) || handled(&next, &before)
        })
        .await;
        usual = usual.max(added.elapsed());
        reader.kill9();
        let killed = Instant::now();
        add(&server, STREAM, &[event("b", "test", format!("after-{id}"))]).await;
        let after = format!("\"after-{id}\"");
        eventually(LONG, "the other goes on", async || handled(&next, &after)).await;
        worst = worst.max(killed.elapsed());
        assert!(reads(&next));
        reader = next;
    }
    let stall = stalls.longest();
    println!("a dead reader was replaced within {worst:?}");
    assert!(worst < SOON + stall + usual, "{worst:?}; {usual:?} with a reader, stall {stall:?}");
}

#[tokio::test]
async fn on_a_full_redis_an_idle_process_looks_at_its_queues_as_rarely_as_otherwise() {
    let server = RedisServer::start(Options::default());
    let config = config(&server, "rarely", &[("pipelines.rarely.handler", "\"log\"")]);
    // A full server refuses what the first start writes. Both are processes of their own: after a scrape
    // of the metrics, every instance of a process looks for problems.
    let mut first = Served::start(&config).await;
    first.sigterm();
    eventually(LONG, "it stops", async || !first.is_running()).await;
    server.ask(&["CONFIG", "SET", "maxmemory", "1"]).await;
    server.ask(&["CONFIG", "RESETSTAT"]).await;

    let second = Served::start(&config).await;
    // A look at the queues runs this command once per shard, and nothing else runs it.
    let looks = async || server.calls("hlen").await / u64::from(SHARDS);
    eventually(LONG, "it looks at its queues", async || looks().await > 0).await;
    let before = looks().await;
    // A busy process looks every two seconds.
    tokio::time::sleep(Duration::from_secs(10)).await;
    let more = looks().await - before;
    assert!(more <= 2, "{more} looks in ten seconds without an event");
    drop(second);
}

/// Redis runs the renewal when it wakes, although its worker has given up. The lease would then last for
/// `lease_ttl` without a holder.
#[tokio::test]
async fn a_bot_whose_renewal_waited_in_a_frozen_redis_is_handled_again_soon_after_it_wakes() {
    let server = RedisServer::start(Options::default());
    let settings = [
        ("pipelines.thawed.lease_ttl", "\"60s\""),
        ("pipelines.thawed.handler_timeout", "\"10s\""),
    ];
    let log = Log::default();
    let slow = log.handler(|_| async {
        tokio::time::sleep(2 * CLAIM_TTL).await;
        Ok(Outcomes::done())
    });
    let instance = Instance::start(&config(&server, "thawed", &settings), slow).await;
    let queue = instance.queue("thawed");
    let mut n = 0;
    tried(TRIES, async |_| {
        n += 1;
        let bot = BotId::parse(&format!("b-{n}")).unwrap();
        let attempts = || {
            let all = log.all().into_iter().filter(|seen| seen.bot == bot.as_str());
            all.map(|seen| seen.attempt).collect::<Vec<_>>()
        };
        let started = Instant::now();
        add(&server, STREAM, &[event(bot.as_str(), "test", n)]).await;
        eventually(LONG, "it is handled", async || attempts().len() == 1).await;
        let owners = queue.keys(queue.shard_of(&bot)).owners();
        let lease = server.ask(&["HGET", owners, bot.as_str()]).await;
        server.sigstop();
        // The first renewal is due then. A worker that was slow has asked for one before.
        let in_time = started.elapsed() < CLAIM_TTL / 3 && lease.ends_with("|0");
        tokio::time::sleep(CLAIM_TTL + PATIENCE).await;
        server.sigcont();
        if in_time {
            let woken = Stopwatch::start();
            eventually(LONG, "it is handled again", async || attempts().len() == 2).await;
            woken.within(SOON, "it is handled again");
            let done = async || queue.next_events(&bot, 1).await.unwrap().is_empty();
            eventually(LONG, "it is done", done).await;
            assert_eq!(attempts(), [1, 1], "no worker vanished");
        }
        in_time
    })
    .await;
    instance.stop().await;
}
