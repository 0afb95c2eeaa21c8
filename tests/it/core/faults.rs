//! Several processes under load, with faults: no event is lost, no event overtakes another, and no
//! confirmed event is handled again.

use std::collections::HashMap;
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock, micros};
use fairlane::id::BotId;

use crate::support::bus::bot;
use crate::support::config::STREAM;
use crate::support::fleet::Fleet;
use crate::support::history::{Outcome, Record};
use crate::support::http::metric;
use crate::support::instance::queue;
use crate::support::process::WorkerProcess;
use crate::support::proxy::Proxy;
use crate::support::redis::{Options, Persistence, RedisBackend, RedisServer};
use crate::support::wait::{Stalls, eventually, judged, tried};

/// Settings with few workers.
pub(crate) const FEW: &[(&str, &str)] = &[("pipelines.test.workers.max", "8")];
const LONG: Duration = Duration::from_secs(60);
/// `lease_ttl` of the tests.
const TTL: Duration = Duration::from_secs(3);
/// How long Redis is unavailable. A longer outage would only make the test slower.
const OUTAGE: Duration = Duration::from_secs(5);

fn now() -> u64 {
    micros(SystemClock.now())
}

/// A server that syncs every write loses no answered write when it is killed. A sync every second
/// can lose some: while the disk is busy, Redis answers up to two seconds before it writes.
pub(crate) fn durable() -> Options {
    Options { persistence: Persistence::Always, ..Options::default() }
}

#[tokio::test]
async fn after_a_kill_in_mid_slice_others_go_on_within_the_ttl_and_a_second() {
    killed(Fleet::new(Options::default(), 40, FEW), 400).await;
}

/// Kills one of three processes six times, over `each` events for each of 40 bots.
pub(crate) async fn killed(mut fleet: Fleet<impl RedisBackend>, each: u32) {
    let sent = 40 * usize::try_from(each).unwrap();
    // So slow that every kill comes before the end of the work.
    fleet.behaviour.delay = Duration::from_millis(8);
    fleet.behaviour.fail_percent = 1;
    fleet.publish(each).await;
    fleet.start(3).await;
    let (stalls, mut killed_at) = (Stalls::watch(), None);
    for round in 1..=6 {
        fleet.settles(round * sent / 10, LONG).await;
        let place = round % 3;
        killed_at.get_or_insert_with(now);
        fleet.workers[place].kill9();
        fleet.restart(place).await;
    }
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert!(report.is_clean(), "{report}");
    assert_eq!((report.sent, report.overlaps, report.given_up), (sent, 0, 0), "{report}");
    assert!(report.duplicates_explained > 0, "no kill hit a slice\n{report}");
    let ((rest, _), stall) = (fleet.rests(), stalls.longest());
    // Before, a bot waited for its turn only.
    let turn = fleet.longest_rest(killed_at.expect("the first kill"));
    assert!(
        rest < TTL + Duration::from_secs(1) + turn + stall,
        "a bot rested for {rest:?}, {turn:?} before; the machine stood still for {stall:?}"
    );
}

#[tokio::test]
async fn a_consumer_frozen_past_its_leases_commits_nothing_when_it_wakes() {
    const EACH: u32 = 400;
    const SENT: usize = 16_000;
    let settings = [("pipelines.test.workers.max", "8"), ("pipelines.test.lease_ttl", "\"1s\"")];
    let mut fleet = Fleet::new(Options::default(), 40, &settings);
    // During a freeze, the other process handles at most 4,000 events.
    fleet.behaviour.delay = Duration::from_millis(6);
    fleet.publish(EACH).await;
    fleet.start(2).await;
    let mut naps = Vec::new();
    for _ in 0..3 {
        let more = fleet.settled() + 1_000;
        fleet.settles(more.min(SENT), LONG).await;
        let frozen = now();
        fleet.workers[0].sigstop();
        // The process is frozen beyond the TTL, so other workers take over its leases and handle
        // its events.
        let until = frozen + micros(TTL);
        eventually(LONG, "the leases are gone", async || now() > until).await;
        naps.push((frozen, now()));
        fleet.workers[0].sigcont();
    }
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert!(report.is_clean(), "{report}");
    assert_eq!((report.sent, report.given_up), (SENT, 0), "{report}");
    // The process that finds an expired lease counts it.
    let mut lost = 0.0;
    for process in 0..2 {
        let metrics = fleet.metrics(process).await;
        lost += metric(&metrics, "fairlane_leases_lost_total", &[]).unwrap_or_default();
    }
    assert!(lost >= 3.0, "it was frozen with leases in its hands: {lost:?}");

    // A commit of the frozen process under a fence from before the freeze must itself be from
    // before it.
    fleet.records(|record| {
        let Record::Committed { process: 1, fence, at, ref events, .. } = *record else { return };
        for &(frozen, woken) in &naps {
            let late = fence < frozen && at >= woken && !events.is_empty();
            // A commit that was accepted before the freeze, and whose reply was read after it, is
            // correct.
            let accepted = late && accepted_before(&fleet, record, frozen);
            assert!(!late || accepted, "committed after the nap ({frozen} to {woken}): {record}");
        }
    });
}

/// Whether no worker handled these events after `frozen` under a later lease. Then the queue
/// removed them before the freeze, and only the reply was read late.
fn accepted_before(fleet: &Fleet, commit: &Record<'_>, frozen: u64) -> bool {
    let Record::Committed { bot: of, events, fence: with, .. } = commit else { return false };
    let mut again = false;
    fleet.records(|record| {
        if let Record::Handled { bot, event, fence, started, .. } = record {
            again |= bot == of && events.contains(event) && fence > with && *started > frozen;
        }
    });
    !again
}

/// The holder does not learn of the break: only its fence keeps it from committing beside the next
/// holder.
#[tokio::test]
async fn a_consumer_whose_lease_was_broken_by_an_operator_commits_nothing() {
    let mut fleet = Fleet::new(Options::default(), 20, &[("pipelines.test.workers.max", "8")]);
    fleet.behaviour.delay = Duration::from_millis(2);
    fleet.start(2).await;
    fleet.publish(500).await;
    let queue = queue(&fleet.config, "test").await;
    let mut broken = 0;
    for round in 1..=80 {
        fleet.settles(round * 100, LONG).await;
        let bot = BotId::parse(&bot(round % 20)).unwrap();
        broken += usize::from(queue.revoke(&bot).await.unwrap());
    }
    assert!(broken > 10, "only {broken} leases were met");
    fleet.drains(LONG).await;
    let mut stale = 0.0;
    for place in 0..2 {
        let text = fleet.metrics(place).await;
        stale += metric(&text, "fairlane_stale_completions_total", &[]).unwrap();
    }
    assert!(stale > 0.0, "nobody tried");
    // The old holder continues its slice until it learns of the break. Nothing that it does then is
    // committed.
    let report = fleet.report_of(10_000).await;
    assert_eq!((report.lost, report.reordered, report.unhandled), (0, 0, 0), "{report}");
    assert_eq!((report.sent, report.stale_commits, report.given_up), (10_000, 0, 0), "{report}");
    assert_eq!(report.committed, 10_000, "nothing twice\n{report}");
    let mut committed = HashMap::new();
    fleet.records(|record| {
        if let Record::Committed { bot, events, fence, .. } = record {
            committed.extend(events.iter().map(|&event| (((*bot).to_owned(), event), *fence)));
        }
    });
    fleet.records(|record| {
        if let Record::Handled { bot, event, fence, .. } = *record {
            let by = committed[&(bot.to_owned(), event)];
            assert!(fence <= by, "handed out again after {by} committed it: {record}");
        }
    });
}

#[tokio::test]
async fn work_resumes_soon_after_an_unavailable_redis_is_back() {
    let fleet = Fleet::new(durable(), 40, FEW);
    interrupted(fleet, 500, |server| server, Duration::from_secs(2)).await;
}

/// Kills and restarts one server under `each` events for each of 40 bots. Work resumes `within` this
/// time of its return. Returns the fleet, and from when to when the server was unavailable.
pub(crate) async fn interrupted<S: RedisBackend>(
    mut fleet: Fleet<S>,
    each: u32,
    which: fn(&mut S) -> &mut RedisServer,
    within: Duration,
) -> (Fleet<S>, u64, u64) {
    let sent = 40 * usize::try_from(each).unwrap();
    fleet.behaviour.delay = Duration::from_millis(2);
    fleet.publish(each).await;
    fleet.start(3).await;
    fleet.settles(sent / 4, LONG).await;
    which(&mut fleet.server).kill9();
    let gone = now();
    eventually(LONG + OUTAGE, "the outage is over", async || now() > gone + micros(OUTAGE)).await;
    for worker in &mut fleet.workers {
        assert_eq!(worker.wait_exit(Duration::ZERO), None, "{:?}", worker.lines());
    }
    which(&mut fleet.server).restart();
    let (stalls, back) = (Stalls::watch(), now());
    fleet.drains(LONG).await;
    let mut resumed = u64::MAX;
    fleet.records(|record| {
        if let Record::Committed { asked, at, .. } = *record
            && asked > back
        {
            resumed = resumed.min(at);
        }
    });
    let (took, stall) = (Duration::from_micros(resumed - back), stalls.longest());
    assert!(
        took < within + stall,
        "work resumed {took:?} after Redis was back, and the machine stood still for {stall:?}"
    );
    println!("work resumed {took:?} after Redis was back");
    let report = fleet.report();
    assert!(report.is_clean(), "{report}");
    assert_eq!((report.sent, report.overlaps, report.given_up), (sent, 0, 0), "{report}");
    (fleet, gone, back)
}

#[tokio::test]
async fn a_redis_that_lost_its_scripts_disturbs_no_process() {
    tried(3, async |is_last| {
        forgotten(Fleet::new(Options::default(), 40, &[]), |server| server, is_last).await
    })
    .await;
}

/// Makes a server forget its scripts eight times. False: a process lost a lease, so events came again.
pub(crate) async fn forgotten<S: RedisBackend>(
    mut fleet: Fleet<S>,
    which: fn(&S) -> &RedisServer,
    is_last: bool,
) -> bool {
    fleet.behaviour.delay = Duration::from_millis(1);
    fleet.start(2).await;
    fleet.publish(250).await;
    let mut connection = which(&fleet.server).connection().await;
    for round in 1..=8 {
        fleet.settles(round * 1_000, LONG).await;
        let () = redis::cmd("SCRIPT").arg("FLUSH").query_async(&mut connection).await.unwrap();
    }
    fleet.drains(LONG).await;
    let report = fleet.report_of(10_000).await;
    assert!(report.is_clean(), "{report}");
    assert_eq!((report.sent, report.committed), (10_000, 10_000), "{report}");
    let any_lost = fleet.workers.iter().any(WorkerProcess::lost_a_lease);
    judged(!is_last && any_lost, || {
        assert_eq!((report.overlaps, report.duplicates_explained), (0, 0), "{report}");
    })
}

#[tokio::test]
async fn two_readers_of_one_stream_copy_nothing_twice() {
    tried(3, two_readers).await;
}

/// False: a process lost a lease, so events came again.
async fn two_readers(is_last: bool) -> bool {
    let mut fleet = Fleet::new(Options::default(), 50, &[]);
    fleet.start(3).await;
    let mut connection = fleet.server.connection().await;
    let readers = |fleet: &Fleet| {
        let reads = |line: &String| line.contains("reading the bus");
        fleet.workers.iter().filter(|worker| worker.lines().iter().any(reads)).count()
    };
    let mut rounds = 0;
    while rounds < 40 || readers(&fleet) < 2 {
        rounds += 1;
        assert!(rounds < 1_000, "only one process ever read");
        // The next process to ask becomes a reader too, while the old reader still takes itself for
        // the reader.
        let lock = format!("fl:{{{STREAM}}}:readers");
        let () = redis::cmd("DEL").arg(lock).query_async(&mut connection).await.unwrap();
        fleet.publish(10).await;
        let part = fleet.publisher.total() * 9 / 10;
        fleet.settles(part, LONG).await;
    }
    fleet.drains(LONG).await;
    let sent = rounds * 500;
    let report = fleet.report_of(sent).await;
    assert!(report.is_clean(), "{report}");
    assert_eq!((report.sent, report.committed), (sent, sent), "{report}");
    let any_lost = fleet.workers.iter().any(WorkerProcess::lost_a_lease);
    judged(!is_last && any_lost, || {
        assert_eq!((report.overlaps, report.duplicates_explained), (0, 0), "{report}");
    })
}

/// Redis rolls back to an earlier moment while the workers run. Events confirmed before that moment
/// stay done, and the rest is copied from the bus again.
#[tokio::test]
async fn a_redis_that_lost_its_tail_is_filled_again_from_the_bus() {
    let mut fleet = Fleet::new(durable(), 40, &[("pipelines.test.workers.max", "8")]);
    fleet.start(1).await;
    fleet.publish(250).await;
    fleet.drains(LONG).await;
    fleet.workers[0].sigterm();
    assert!(fleet.workers[0].wait_exit(LONG).unwrap().success());
    fleet.workers.clear();

    // The second half is on the bus, and no process has copied it when the tail starts.
    fleet.publish(250).await;
    let mut tail = 0;
    eventually(LONG, "the file is written", async || {
        std::mem::replace(&mut tail, fleet.server.aof_bytes()) == tail && tail > 0
    })
    .await;
    // Slow enough that the cut falls in the middle of the work, also on a busy machine.
    fleet.behaviour.delay = Duration::from_millis(4);
    fleet.start(3).await;
    fleet.settles(14_000, LONG).await;
    let at_work = fleet.server.aof_bytes();
    fleet.settles(17_000, LONG).await;
    fleet.server.kill9();
    let cut = now();
    let written = fleet.server.aof_bytes();
    assert!(tail < at_work && at_work < written, "{tail} {at_work} {written}");
    fleet.server.truncate_aof(written - at_work);
    fleet.server.restart();
    fleet.drains(LONG).await;

    let report = fleet.report();
    assert_eq!((report.lost, report.reordered, report.unhandled), (0, 0, 0), "{report}");
    // A holder of a lease of the older run learns of the revocation at its next call to Redis.
    // Until then it may start or continue a handling beside the new holder, but it commits nothing.
    assert_eq!(report.stale_commits, 0, "{report}");
    assert_eq!((report.sent, report.given_up), (20_000, 0), "{report}");
    assert!(report.duplicates_unexplained > 0, "no commit was rolled back\n{report}");
    // Fences are times. Among leases of one run, handlings of one bot follow each other and never
    // overlap.
    let mut handlings = Vec::new();
    fleet.records(|record| {
        if let Record::Handled { bot, fence, started, ended, .. } = *record {
            handlings.push((fence > cut, bot.to_owned(), started, ended, fence));
        }
    });
    handlings.sort();
    for pair in handlings.windows(2) {
        let [(run, bot, _, ended, fence), (next_run, next_bot, started, _, next_fence)] = pair
        else {
            continue;
        };
        if (run, bot) == (next_run, next_bot) && fence != next_fence {
            assert!(fence < next_fence && ended <= started, "{pair:?}");
        }
    }
    fleet.records(|record| {
        if let Record::Handled { event, started, outcome: Outcome::Done, .. } = *record {
            assert!(event >= 250 || started < cut, "done before the tail, done again: {record}");
        }
    });
}

/// The server executed the command, but the client got no reply. This happens to claims,
/// completions and copies from the bus.
#[tokio::test]
async fn lost_replies_lose_and_repeat_nothing() {
    let tcp = Options { tcp: true, ..Options::default() };
    let mut fleet = Fleet::new(tcp, 40, &[("pipelines.test.workers.max", "8")]);
    let proxy = Proxy::start(fleet.server.tcp_addr()).await;
    let direct = fleet.server.url();
    fleet.config = fleet.config.replace(&direct, &proxy.url());
    fleet.behaviour.delay = Duration::from_millis(1);
    // Each command is found by a key that no other command uses, or by the one behind another.
    for (needle, nth) in [
        ("}:held\r\n$18\r\nfl:{test:", 3),
        ("}:held\r\n$18\r\nfl:{test:", 10),
        ("}:held\r\n$18\r\nfl:{test:", 20),
        ("}:later", 5),
        ("}:later", 30),
        ("}:later", 60),
        ("}:hwm\r\n$15\r\nfl:{test:", 2),
        ("}:hwm\r\n$15\r\nfl:{test:", 12),
    ] {
        proxy.swallow(needle, nth);
    }
    fleet.start(2).await;
    for _ in 0..5 {
        fleet.publish(100).await;
    }
    fleet.drains(LONG).await;
    assert_eq!(proxy.swallowed(), 8, "every kind of reply was lost");
    let report = fleet.report();
    assert!(report.is_clean(), "{report}");
    assert_eq!((report.sent, report.overlaps, report.given_up), (20_000, 0, 0), "{report}");
}
