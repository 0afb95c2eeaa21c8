//! What keys change for the service of bots: how many run at once, and who waits for whom.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::handler::{Outcomes, Slice};
use fairlane::id::BotId;

use super::{LONG, event};
use crate::support::bus::add;
use crate::support::config::{STREAM, config};
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::{Stalls, Stopwatch, eventually, judged, tried};

/// How many slices of a bot run at once.
async fn most_at_once(pipeline: &str, settings: &[(&str, &str)]) -> usize {
    let server = RedisServer::start(Options::default());
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (running, highest) = (Arc::clone(&now), Arc::clone(&most));
    let log = Log::default();
    let handler = log.handler(move |_| {
        let (running, highest) = (Arc::clone(&running), Arc::clone(&highest));
        async move {
            let at_once = running.fetch_add(1, Ordering::Relaxed) + 1;
            highest.fetch_max(at_once, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(20)).await;
            running.fetch_sub(1, Ordering::Relaxed);
            Ok(Outcomes::done())
        }
    });
    let instance = Instance::start(&config(&server, pipeline, settings), handler).await;
    let queue = instance.queue(pipeline).clone();
    let shop = BotId::parse("shop").unwrap();
    queue.pause(Some(&shop)).await.unwrap();
    let events: Vec<String> = (0..64).map(|id| event("shop", &format!("user-{id}"), id)).collect();
    add(&server, STREAM, &events).await;
    eventually(LONG, "all are queued", async || {
        queue.view_bot(&shop, SystemClock.now()).await.unwrap().depth == 64
    })
    .await;
    queue.resume(Some(&shop)).await.unwrap();
    eventually(LONG, "all are handled", async || log.len() == 64).await;
    instance.stop().await;
    most.load(Ordering::Relaxed)
}

#[tokio::test]
async fn a_bot_has_at_most_that_many_keys_at_once_and_leaves_a_quarter_of_the_workers_free() {
    let by_subject = |name: &str| (format!("pipelines.{name}.order_by"), "\"subject\"");
    let (order_by, subject) = by_subject("one");
    assert_eq!(most_at_once("one", &[(&order_by, subject)]).await, 1);
    let (order_by, subject) = by_subject("four");
    let settings = [(order_by.as_str(), subject), ("pipelines.four.concurrency", "4")];
    assert_eq!(most_at_once("four", &settings).await, 4);
    let (order_by, subject) = by_subject("few");
    let settings = [
        (order_by.as_str(), subject),
        ("pipelines.few.concurrency", "8"),
        ("pipelines.few.workers.max", "8"),
    ];
    assert_eq!(most_at_once("few", &settings).await, 6, "a quarter of the workers stays free");
}

/// Jain's index of fairness: 1 if all are equal.
fn jain(shares: &[f64]) -> f64 {
    let (sum, squares) = shares
        .iter()
        .fold((0.0, 0.0), |(sum, squares), share| (sum + share, squares + share * share));
    sum * sum / (f64::from(u32::try_from(shares.len()).unwrap()) * squares)
}

/// A pause of the machine is a long slice of the bots that it hits. A longer one makes shares unequal.
const STALL: Duration = Duration::from_millis(80);

#[tokio::test]
async fn bots_share_the_workers_equally_however_many_keys_they_have() {
    tried(3, share_equally).await;
}

/// False: the machine stood still.
async fn share_equally(is_last: bool) -> bool {
    let (bots, each) = (20, 300);
    let server = RedisServer::start(Options::default());
    let (log, service) = (Log::default(), Arc::new(Mutex::new(BTreeMap::<String, f64>::new())));
    let noted = Arc::clone(&service);
    let handler = log.handler(move |slice: Slice| {
        let noted = Arc::clone(&noted);
        async move {
            let begun = Instant::now();
            tokio::time::sleep(Duration::from_millis(2 * slice.events.len() as u64)).await;
            let mut noted = noted.lock().unwrap();
            *noted.entry(slice.bot.to_string()).or_default() += begun.elapsed().as_secs_f64();
            Ok(Outcomes::done())
        }
    });
    let settings = [
        ("pipelines.share.order_by", "\"subject\""),
        ("pipelines.share.concurrency", "8"),
        ("pipelines.share.workers.max", "4"),
    ];
    let instance = Instance::start(&config(&server, "share", &settings), handler).await;
    let queue = instance.queue("share").clone();
    queue.pause(None).await.unwrap();
    let keys = |bot: usize| [1, 2, 5, 20, each][bot % 5];
    let events: Vec<String> = (0..each)
        .flat_map(|id| (0..bots).map(move |bot| (id, bot)))
        .map(|(id, bot)| event(&format!("bot-{bot}"), &format!("user-{}", id % keys(bot)), id))
        .collect();
    add(&server, STREAM, &events).await;
    eventually(LONG, "all are queued", async || {
        queue.view(Duration::ZERO).await.unwrap().depth == (bots * each) as u64
    })
    .await;
    let stalls = Stalls::watch();
    queue.resume(None).await.unwrap();
    eventually(LONG, "half of them are handled", async || log.len() >= bots * each / 2).await;
    let shares: Vec<f64> = service.lock().unwrap().values().copied().collect();
    let (index, stall) = (jain(&shares), stalls.longest());
    println!("Jain {index:.4} of {shares:?}");
    instance.stop().await;
    assert_eq!(shares.len(), bots, "{shares:?}");
    judged(!is_last && stall > STALL, || {
        assert!(index >= 0.99, "{index} of {shares:?}, stalled for {stall:?}");
    })
}

#[tokio::test]
async fn a_quiet_bot_does_not_wait_for_the_keys_of_a_busy_one() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let handler = log.handler(|slice: Slice| async move {
        if slice.bot.as_str() == "busy" {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(Outcomes::done())
    });
    let settings = [
        ("pipelines.calm.order_by", "\"subject\""),
        ("pipelines.calm.concurrency", "8"),
        ("pipelines.calm.workers.max", "4"),
    ];
    let instance = Instance::start(&config(&server, "calm", &settings), handler).await;
    let busy: Vec<String> = (0..400).map(|id| event("busy", &format!("user-{id}"), id)).collect();
    add(&server, STREAM, &busy).await;
    eventually(LONG, "the busy bot is served", async || log.len() > 20).await;
    let (stalls, mut longest) = (Stalls::watch(), Duration::ZERO);
    for id in 0..20 {
        let begun = Instant::now();
        add(&server, STREAM, &[event("quiet", "ann", id)]).await;
        eventually(LONG, "the quiet bot is served", async || {
            log.all().iter().any(|seen| seen.bot == "quiet" && seen.id == id.to_string())
        })
        .await;
        longest = longest.max(begun.elapsed());
    }
    println!("the quiet bot waited at most {longest:?}");
    assert!(log.all().iter().filter(|seen| seen.bot == "busy").count() < 400, "it was busy");
    let stall = stalls.longest();
    assert!(longest < Duration::from_millis(800) + stall, "{longest:?}, {stall:?}");
    instance.stop().await;
}

#[tokio::test]
async fn a_quiet_bot_gets_a_worker_while_each_key_of_another_hangs() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let hanging = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&hanging);
    let handler = log.handler(move |slice: Slice| {
        let counted = Arc::clone(&counted);
        async move {
            if slice.bot.as_str() == "slow" {
                counted.fetch_add(1, Ordering::Relaxed);
                std::future::pending::<()>().await;
            }
            Ok(Outcomes::done())
        }
    });
    let settings = [
        ("pipelines.hang.order_by", "\"subject\""),
        ("pipelines.hang.concurrency", "64"),
        ("pipelines.hang.workers.max", "4"),
    ];
    let instance = Instance::start(&config(&server, "hang", &settings), handler).await;
    let slow: Vec<String> = (0..100).map(|id| event("slow", &format!("user-{id}"), id)).collect();
    add(&server, STREAM, &slow).await;
    eventually(LONG, "three keys hang", async || hanging.load(Ordering::Relaxed) >= 3).await;
    let watch = Stopwatch::start();
    add(&server, STREAM, &[event("quiet", "ann", 0)]).await;
    eventually(LONG, "the quiet bot is served", async || {
        log.all().iter().any(|seen| seen.bot == "quiet")
    })
    .await;
    // The first keys end after `handler_timeout`, 5 s.
    watch.within(Duration::from_secs(2), "the quiet bot is served");
    assert_eq!(hanging.load(Ordering::Relaxed), 3, "a fourth key has no worker");
    instance.stop().await;
}

/// How long a bot with 40 keys takes for 80 events of 10 ms, and how long the machine stood still.
async fn takes(pipeline: &str, concurrency: &str) -> (Duration, Duration) {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let handler = log.handler(|slice: Slice| async move {
        tokio::time::sleep(Duration::from_millis(10) * u32::try_from(slice.events.len()).unwrap())
            .await;
        Ok(Outcomes::done())
    });
    let (order_by, at_once) =
        (format!("pipelines.{pipeline}.order_by"), format!("pipelines.{pipeline}.concurrency"));
    let settings = [(order_by.as_str(), "\"subject\""), (at_once.as_str(), concurrency)];
    let instance = Instance::start(&config(&server, pipeline, &settings), handler).await;
    let queue = instance.queue(pipeline).clone();
    let hot = BotId::parse("hot").unwrap();
    queue.pause(Some(&hot)).await.unwrap();
    let events: Vec<String> =
        (0..80).map(|id| event("hot", &format!("user-{}", id % 40), id)).collect();
    add(&server, STREAM, &events).await;
    eventually(LONG, "all are queued", async || {
        queue.view_bot(&hot, SystemClock.now()).await.unwrap().depth == 80
    })
    .await;
    let (stalls, begun) = (Stalls::watch(), Instant::now());
    queue.resume(Some(&hot)).await.unwrap();
    eventually(LONG, "all are handled", async || {
        queue.view_bot(&hot, SystemClock.now()).await.unwrap().depth == 0
    })
    .await;
    let took = (begun.elapsed(), stalls.longest());
    instance.stop().await;
    took
}

#[tokio::test]
async fn a_hot_bot_gains_from_several_keys_at_once() {
    tried(3, gains).await;
}

/// False: a busy machine may have delayed the eight keys.
async fn gains(is_last: bool) -> bool {
    let (one, eight) = (takes("slow", "1").await, takes("fast", "8").await);
    let told = format!("one key at a time, and the longest stall: {one:?}, eight: {eight:?}");
    println!("{told}");
    let moving = |(took, stall): (Duration, Duration)| took.saturating_sub(stall);
    judged(!is_last, || assert!(moving(eight) * 2 < moving(one), "{told}"))
}
