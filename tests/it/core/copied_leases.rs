//! A process with free workers leases quiet bots while it copies their events, so it need not claim
//! or read them.

use std::time::{Duration, Instant};

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::id::BotId;
use fairlane::queue::BotState;

use crate::support::bus::{add, bot, event};
use crate::support::config::{STREAM, config};
use crate::support::fleet::Fleet;
use crate::support::instance::Instance;
use crate::support::interceptor::Interception;
use crate::support::process::WorkerProcess;
use crate::support::proxy::{Proxy, holds};
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::roles::worker::{Effect, Poison};
use crate::support::wait::{Stalls, eventually};

const LONG: Duration = Duration::from_secs(20);

#[tokio::test]
async fn events_of_quiet_bots_are_neither_claimed_nor_read_while_workers_are_free() {
    const EVENTS: usize = 40;
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let instance = Instance::start(&config(&server, "copied", &[]), log.content()).await;
    let one_by_one = async |from: usize, to: usize| {
        for n in from..to {
            let id = u32::try_from(n).unwrap();
            add(&server, STREAM, &[event(&format!("bot-{n}"), "tag.applied", id)]).await;
            eventually(LONG, "it is handled", async || log.len() > n).await;
        }
    };
    // The first handlings show how long one takes.
    one_by_one(0, 5).await;
    let before = server.calls("lrange").await;
    one_by_one(5, 5 + EVENTS).await;
    let read = server.calls("lrange").await - before;
    assert!(read < EVENTS as u64 / 4, "{read} of {EVENTS} queues were read");
    instance.stop().await;
}

/// How often this command runs for events at a steady rate, in the best of some rounds. On a busy machine
/// the events of a round are further apart than they should be, and then they share less.
async fn at_a_steady_rate(bots: u32, command: &str, allowed: u64) -> u64 {
    let mut fewest = u64::MAX;
    for _ in 0..ROUNDS {
        fewest = fewest.min(calls(bots, command).await);
        if fewest < allowed {
            break;
        }
    }
    fewest
}

/// Adds events one after another, of `bots` bots by turns, and waits until all are handled. Returns how
/// often this command ran.
async fn calls(bots: u32, command: &str) -> u64 {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let instance = Instance::start(&config(&server, "steady", &[]), log.content()).await;
    let mut before = 0;
    for n in 0..STEADY {
        if n == STEADY / 5 {
            before = server.calls(command).await;
        }
        add(&server, STREAM, &[event(&format!("bot-{}", n % bots), "tag.applied", n)]).await;
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    eventually(LONG, "all are handled", async || log.len() >= STEADY as usize).await;
    let ran = server.calls(command).await - before;
    for bot in 0..bots {
        let seen = log.all().into_iter().filter(|seen| seen.bot == format!("bot-{bot}"));
        let ids: Vec<u32> = seen.map(|seen| seen.id.parse().unwrap()).collect();
        assert_eq!(ids, (bot..STEADY).step_by(bots as usize).collect::<Vec<_>>(), "bot-{bot}");
    }
    instance.stop().await;
    ran
}

const STEADY: u32 = 400;
const ROUNDS: u32 = 5;

#[tokio::test]
async fn completions_of_a_steady_rate_share_calls() {
    // Each call that ends leases removes them from the hash of leases once.
    let allowed = u64::from(STEADY) * 2 / 3;
    let ended = at_a_steady_rate(STEADY, "hdel", allowed).await;
    assert!(ended < allowed, "{ended} calls ended leases of {STEADY} events");
}

#[tokio::test]
async fn a_bot_whose_completion_waits_gets_a_lease_with_its_next_event() {
    let allowed = u64::from(STEADY) / 4;
    let read = at_a_steady_rate(1, "lrange", allowed).await;
    assert!(read < allowed, "{read} of {STEADY} events were read");
}

#[tokio::test]
async fn the_events_of_several_bots_in_one_copy_reach_their_handlers_in_order() {
    const BOTS: usize = 7;
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let instance = Instance::start(&config(&server, "several", &[]), log.content()).await;
    for round in 0..30_u32 {
        let events = (0..BOTS * 3).map(|n| {
            let id = round * 100 + u32::try_from(n).unwrap();
            event(&format!("bot-{}", n % BOTS), "tag.applied", id)
        });
        add(&server, STREAM, &events.collect::<Vec<_>>()).await;
        let handled = (round as usize + 1) * BOTS * 3;
        eventually(LONG, "all are handled", async || log.len() >= handled).await;
    }
    for bot in 0..BOTS {
        let name = format!("bot-{bot}");
        let seen = log.all().into_iter().filter(|seen| seen.bot == name);
        let ids: Vec<u32> = seen.map(|seen| seen.id.parse().unwrap()).collect();
        let expected = (0..30).flat_map(|round| {
            (0..BOTS * 3)
                .filter(move |n| n % BOTS == bot)
                .map(move |n| round * 100 + u32::try_from(n).unwrap())
        });
        assert_eq!(ids, expected.collect::<Vec<_>>(), "bot-{bot}");
    }
    instance.stop().await;
}

#[tokio::test]
async fn another_process_takes_over_soon_when_the_copier_dies_with_its_leases() {
    let mut fleet = Fleet::new(Options::default(), 1, &[]);
    fleet.behaviour.poison = vec![Poison { bot: bot(0), event: 0, effect: Effect::Aborts }];
    fleet.start(2).await;
    // Both have looked at every shard and found nothing. The next look without a message is a
    // minute later.
    tokio::time::sleep(Duration::from_secs(2)).await;
    fleet.publish(1).await;
    let (published, stalls) = (Instant::now(), Stalls::watch());
    let is_dead = |worker: &mut WorkerProcess| worker.wait_exit(Duration::ZERO).is_some();
    while !fleet.workers.iter_mut().any(is_dead) {
        assert!(published.elapsed() < LONG, "no process took the event");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let died = Instant::now();
    fleet.cure();
    fleet.drains(LONG).await;
    // The TTL of a lease, and a second.
    let (took, stall) = (died.elapsed(), stalls.longest());
    assert!(
        took < Duration::from_secs(4) + stall,
        "it took {took:?}, and the machine stood still for {stall:?}"
    );
}

/// Otherwise the bots of this copy would rest until the leases run out.
#[tokio::test]
async fn a_stop_waits_for_the_copy_in_progress_and_gives_its_leases_back() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    let proxy = Proxy::start(server.tcp_addr()).await;
    let url = format!("{:?}", proxy.url());
    let log = Log::default();
    let config = config(&server, "copied", &[("redis.url", &*url)]);
    let instance = Instance::start(&config, log.content()).await;
    let queue = instance.queue("copied").clone();
    add(&server, STREAM, &[event("known", "test", 0)]).await;
    eventually(LONG, "one is handled", async || log.len() == 1).await;
    let copied = proxy.intercept(holds(["}:hwm\r\n"]), 1, Interception::HoldReply);
    add(&server, STREAM, &[event("bot", "test", 1)]).await;
    assert!(copied.catches(LONG).await);
    let release = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        copied.release();
    };
    tokio::join!(instance.stop(), release);
    let (bot, clock) = (BotId::parse("bot").unwrap(), SystemClock);
    let view = queue.view_bot(&bot, clock.now()).await.unwrap();
    assert_eq!((view.depth, view.state, log.len()), (1, BotState::Ready, 1));
}
