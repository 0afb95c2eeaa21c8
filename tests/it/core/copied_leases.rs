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
use crate::support::wait::{Stopwatch, eventually};

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

const STEADY: u32 = 400;
/// The first events are not judged.
const FIRST: u32 = STEADY / 5;
const ROUNDS: u32 = 10;
/// On a machine that is not busy, so many events come within this time. Beyond it, a completion may find
/// no company.
const FEW: usize = 10;
const TOGETHER: Duration = Duration::from_millis(70);

/// Asserts that this command runs at most `allowed` times for the events of a steady rate, in a round or in
/// all rounds so far. On a busy machine the events are further apart than they should be. Those need the
/// command once each, so few events at the rate show nothing.
async fn runs_rarely(bots: u32, command: &str, allowed: u64) {
    let of_round = u64::from(STEADY - FIRST);
    let is_rare = |ran: u64, steady: u64, all: u64| {
        steady >= of_round / 2 && ran <= all - steady + allowed * steady / of_round
    };
    let (mut sum, mut steadies, mut told) = (0, 0, Vec::new());
    for round in 1..=u64::from(ROUNDS) {
        let (ran, steady) = calls(bots, command).await;
        (sum, steadies) = (sum + ran, steadies + steady);
        if is_rare(ran, steady, of_round) || is_rare(sum, steadies, round * of_round) {
            return;
        }
        told.push(format!("{ran} times, with {steady} of {of_round} events at the rate"));
    }
    panic!("{command} ran too often, or the machine was too slow: {told:#?}");
}

/// Adds events one after another, of `bots` bots by turns, and waits until all are handled. Returns how
/// often this command ran, and how many events came at the rate.
async fn calls(bots: u32, command: &str) -> (u64, u64) {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let instance = Instance::start(&config(&server, "steady", &[]), log.content()).await;
    let (mut before, mut added) = (0, Vec::new());
    // A new connection for each event would take the processor from the instance.
    let mut bus = server.connection().await;
    for n in 0..STEADY {
        if n == FIRST {
            before = server.calls(command).await;
        }
        let event = event(&format!("bot-{}", n % bots), "tag.applied", n);
        let mut add = redis::cmd("XADD");
        add.arg(STREAM).arg("*").arg("event").arg(event);
        let () = add.query_async(&mut bus).await.unwrap();
        added.push(Instant::now());
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
    let judged = added[FIRST as usize - FEW..].windows(FEW + 1);
    (ran, judged.filter(|few| few[FEW] - few[0] < TOGETHER).count() as u64)
}

#[tokio::test]
async fn completions_of_a_steady_rate_share_calls() {
    // Each call that ends leases removes them from the hash of leases once.
    runs_rarely(STEADY, "hdel", u64::from(STEADY) * 2 / 3).await;
}

#[tokio::test]
async fn a_bot_whose_completion_waits_gets_a_lease_with_its_next_event() {
    // Otherwise its events are read from its queue.
    runs_rarely(1, "lrange", u64::from(STEADY) / 4).await;
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
    let is_dead = |worker: &mut WorkerProcess| worker.wait_exit(Duration::ZERO).is_some();
    let ends = async || fleet.workers.iter_mut().any(is_dead);
    eventually(LONG, "a process took the event", ends).await;
    let died = Stopwatch::start();
    fleet.cure();
    fleet.drains(LONG).await;
    // The TTL of a lease, and a second.
    died.within(Duration::from_secs(4), "another process takes over");
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
        // The stop has come to the copy by then. On a slow machine it has not, and this shows nothing.
        tokio::time::sleep(Duration::from_millis(200)).await;
        copied.release();
    };
    tokio::join!(instance.stop(), release);
    let (bot, clock) = (BotId::parse("bot").unwrap(), SystemClock);
    let view = queue.view_bot(&bot, clock.now()).await.unwrap();
    assert_eq!((view.depth, view.state, log.len()), (1, BotState::Ready, 1));
}
