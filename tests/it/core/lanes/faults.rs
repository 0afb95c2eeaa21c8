//! Ordering keys while events fail, and processes are killed and frozen.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock, micros};
use fairlane::handler::{Outcomes, Slice};
use fairlane::id::BotId;
use fairlane::queue::CLAIM_TTL;

use super::{BY_DIGIT, LONG, event};
use crate::support::bus::add;
use crate::support::config::{STREAM, config};
use crate::support::fleet::Fleet;
use crate::support::history::{Outcome, Record};
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

/// `lease_ttl` of the test.
const TTL: Duration = Duration::from_secs(1);
/// Number of events of each bot in a round.
const EACH: u32 = 150;
const ROUNDS: u32 = 20;

fn now() -> u64 {
    micros(SystemClock.now())
}

fn key(event: u32) -> u32 {
    (event % 10).min(5)
}

/// What happened to one event.
#[derive(Debug, Default)]
struct Handlings {
    /// When a handling was done for the first time, us.
    done: Option<u64>,
    /// The start and the fence of each handling.
    started: Vec<(u64, u64)>,
    /// When it was first committed, and under which fence.
    committed: Option<(u64, u64)>,
}

/// Judges a run of a fleet: every event is done, per bot and key in order, and none is handled after its
/// completion. Returns the number of handlings.
fn judge(fleet: &Fleet, bots: usize, each: u32) -> usize {
    let mut all: BTreeMap<(String, u32), Handlings> = BTreeMap::new();
    let mut count = 0;
    fleet.records(|record| match record {
        Record::Handled { bot, event, fence, started, ended, outcome, .. } => {
            count += 1;
            let seen = all.entry(((*bot).to_owned(), *event)).or_default();
            seen.started.push((*started, *fence));
            if *outcome == Outcome::Done {
                seen.done = Some(seen.done.map_or(*ended, |first| first.min(*ended)));
            }
        }
        Record::Committed { bot, events, fence, at, .. } => {
            for event in events.iter() {
                let seen = all.entry(((*bot).to_owned(), *event)).or_default();
                if seen.committed.is_none_or(|(first, _)| *at < first) {
                    seen.committed = Some((*at, *fence));
                }
            }
        }
        Record::Sent { .. } => {}
    });
    assert_eq!(all.len(), bots * each as usize, "every event was handled");
    let mut last: BTreeMap<(&str, u32), (u32, u64)> = BTreeMap::new();
    for ((bot, event), seen) in &all {
        let done = seen.done.unwrap_or_else(|| panic!("{bot} {event} was never done"));
        let first = seen.started.iter().map(|(at, _)| *at).min().unwrap();
        if let Some((before, done)) = last.insert((bot, key(*event)), (*event, done)) {
            assert!(done <= first, "{bot}: {event} was handled before {before} was done");
        }
        if let Some((at, fence)) = seen.committed {
            let late = seen.started.iter().find(|(started, by)| *started > at && *by >= fence);
            assert_eq!(late, None, "{bot} {event} was handled after its completion");
        }
    }
    count
}

/// Whether other processes handled events again that one had done by this time, in us: it had not
/// completed them when it was killed or lost its leases.
fn others_repeat(fleet: &Fleet, one: u32, by: u64) -> bool {
    let mut done = BTreeSet::new();
    fleet.records(|record| {
        if let Record::Handled { bot, event, ended, outcome: Outcome::Done, process, .. } = *record
            && process == one
            && ended <= by
        {
            done.insert((bot.to_owned(), event));
        }
    });
    let mut again = false;
    fleet.records(|record| {
        if let Record::Handled { bot, event, started, process, .. } = *record {
            again |= process != one && started > by && done.contains(&(bot.to_owned(), event));
        }
    });
    again
}

#[tokio::test]
async fn each_key_keeps_its_order_although_events_fail_and_processes_are_killed_and_frozen() {
    let settings = [
        ("pipelines.test.order_by", BY_DIGIT),
        ("pipelines.test.concurrency", "4"),
        ("pipelines.test.max_attempts", "1000"),
        ("pipelines.test.lease_ttl", "\"1s\""),
    ];
    let bots = 6;
    let mut fleet = Fleet::new(Options::default(), bots, &settings);
    fleet.behaviour.fail_percent = 10;
    // Long enough that a process mostly has a slice.
    fleet.behaviour.delay = Duration::from_millis(5);
    fleet.start(3).await;
    let (mut rounds, mut kill_hit, mut freeze_hit) = (0, false, false);
    // A process may have no slice when it is killed or frozen.
    while !(kill_hit && freeze_hit) {
        rounds += 1;
        assert!(rounds <= ROUNDS, "hit a slice: kill {kill_hit}, freeze {freeze_hit}");
        let before = fleet.publisher.total();
        fleet.publish(EACH / 2).await;
        fleet.settles(before + bots * 20, LONG).await;
        fleet.workers[0].kill9();
        let killed = now();
        fleet.workers[1].sigstop();
        let frozen = now();
        fleet.publish(EACH / 2).await;
        fleet.settles(before + bots * 60, LONG).await;
        let until = frozen + micros(2 * TTL);
        eventually(LONG, "its leases have run out", async || now() > until).await;
        fleet.workers[1].sigcont();
        fleet.restart(0).await;
        fleet.drains(LONG).await;
        // The first three processes have the numbers 1 to 3, and each restart has the next one.
        let victim = if rounds == 1 { 1 } else { 2 + rounds };
        kill_hit |= others_repeat(&fleet, victim, killed);
        freeze_hit |= others_repeat(&fleet, 2, frozen);
    }
    let each = rounds * EACH;
    let handlings = judge(&fleet, bots, each);
    assert!(handlings > bots * each as usize, "some failed: {handlings}");
}

/// A process that is frozen while one handler runs goes on inside that handler, and then reaches the next one
/// without a look at its timers. Here, the handler holds its thread instead.
#[tokio::test]
async fn no_further_key_is_handled_under_a_lease_that_ended_while_the_process_was_frozen() {
    for concurrency in ["1", "4"] {
        let server = RedisServer::start(Options::default());
        let calls = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&calls);
        let handler = Log::default().handler(move |slice: Slice| {
            let mut noted = noted.lock().unwrap();
            let subject = slice.events[0].event.subject().unwrap_or_default().to_owned();
            noted.push((slice.fence.get(), subject));
            if noted.len() == 1 {
                std::thread::sleep(CLAIM_TTL);
            }
            async { Ok(Outcomes::done()) }
        });
        let settings = [
            ("pipelines.freeze.order_by", "\"subject\""),
            ("pipelines.freeze.concurrency", concurrency),
        ];
        let instance = Instance::start(&config(&server, "freeze", &settings), handler).await;
        let events: Vec<String> = ["ann", "bob", "cid"]
            .into_iter()
            .enumerate()
            .map(|(id, key)| event("shop", key, id))
            .collect();
        let queue = instance.queue("freeze").clone();
        let shop = BotId::parse("shop").unwrap();
        // All keys are in one slice.
        queue.pause(Some(&shop)).await.unwrap();
        add(&server, STREAM, &events).await;
        eventually(LONG, "all events are queued", async || {
            queue.view_bot(&shop, SystemClock.now()).await.unwrap().depth == 3
        })
        .await;
        queue.resume(Some(&shop)).await.unwrap();
        eventually(LONG, "all events are done", async || {
            let view = queue.view_bot(&shop, SystemClock.now()).await.unwrap();
            view.depth == 0 && calls.lock().unwrap().len() >= 4
        })
        .await;
        let calls = calls.lock().unwrap().clone();
        let (first, key) = &calls[0];
        let under_it: Vec<_> = calls.iter().filter(|(fence, _)| fence == first).collect();
        assert_eq!(under_it.len(), 1, "{calls:?}");
        assert!(calls[1..].iter().any(|(_, again)| again == key), "{calls:?}");
        instance.stop().await;
    }
}

/// Longer than a process has slices under a total limit without a renewal, which is 5 s.
const FROZEN: Duration = Duration::from_secs(5);

/// Other processes use the slices of a frozen process after 5 s, long before its leases end. Here, the handler
/// holds its thread instead, so this takes longer than 5 s.
#[tokio::test]
async fn no_further_key_is_handled_under_slices_that_ended_while_the_process_was_frozen() {
    let server = RedisServer::start(Options::default());
    let calls = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&calls);
    let handler = Log::default().handler(move |slice: Slice| {
        let is_first = {
            let mut noted = noted.lock().unwrap();
            noted.push(slice.fence.get());
            noted.len() == 1
        };
        async move {
            if is_first {
                // Meanwhile the lease is renewed, so that it outlasts the slices.
                tokio::time::sleep(CLAIM_TTL).await;
                std::thread::sleep(FROZEN);
            }
            Ok(Outcomes::done())
        }
    });
    let settings = [
        ("pipelines.few.order_by", "\"subject\""),
        ("pipelines.few.total_concurrency", "3"),
        ("pipelines.few.lease_ttl", "\"30s\""),
        ("pipelines.few.handler_timeout", "\"10s\""),
    ];
    let instance = Instance::start(&config(&server, "few", &settings), handler).await;
    let (queue, shop) = (instance.queue("few").clone(), BotId::parse("shop").unwrap());
    let depth = async || queue.view_bot(&shop, SystemClock.now()).await.unwrap().depth;
    queue.pause(Some(&shop)).await.unwrap();
    let events: Vec<String> = ["ann", "bob", "cid"]
        .into_iter()
        .zip(0..)
        .map(|(key, id)| event("shop", key, id))
        .collect();
    add(&server, STREAM, &events).await;
    eventually(LONG, "all are queued", async || depth().await == 3).await;
    queue.resume(Some(&shop)).await.unwrap();
    // Asks nothing while the thread is held: the answer would be too late.
    eventually(LONG, "it goes on", async || calls.lock().unwrap().len() >= 4).await;
    eventually(LONG, "all events are done", async || depth().await == 0).await;
    let calls = calls.lock().unwrap().clone();
    assert_eq!(calls.iter().filter(|fence| **fence == calls[0]).count(), 1, "{calls:?}");
    instance.stop().await;
}
