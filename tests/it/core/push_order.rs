//! Events of bots through a receiver in another language, with faults: in order, none lost, and
//! never two concurrent calls for one bot.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use fairlane::clock::{Clock as _, SystemClock, micros};

use crate::support::bus::Publisher;
use crate::support::config::{SHARDS, STREAM};
use crate::support::history::{Checker, Outcome, Record, Report};
use crate::support::push::pushing;
use crate::support::receivers::{ExampleReceiver, Pushed, is_there};
use crate::support::redis::{Options, RedisServer};
use crate::support::served::Served;
use crate::support::wait::{LEASE_STALL, Stalls, eventually, judged, tried};

const BOTS: usize = 120;
/// 120 × 167 = 20,040 events in all.
const EACH: u32 = 167;
const LONG: Duration = Duration::from_secs(90);
/// A process can be killed while an answered slice is still on its way to the commit. A busy
/// machine makes this time longer.
const UNCOMMITTED_US: u64 = 3_000_000;
const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

async fn depth(server: &RedisServer) -> u64 {
    let mut connection = server.connection().await;
    let mut pipe = redis::Pipeline::new();
    for shard in 0..SHARDS {
        pipe.hget(format!("fl:{{test:{shard}}}:meta"), "depth");
    }
    let depths: Vec<Option<u64>> = pipe.query_async(&mut connection).await.unwrap();
    depths.into_iter().flatten().sum()
}

/// For each event that came again: when it was done, and when it came again.
fn repeats(pushes: &[Pushed]) -> Vec<(u64, u64)> {
    let mut first: HashMap<(&str, &str), u64> = HashMap::new();
    let mut again = Vec::new();
    for push in pushes {
        for event in &push.events {
            let key = (push.bot.as_str(), event.id.as_str());
            match event.outcome.as_str() {
                "done" => assert!(first.insert(key, push.ended).is_none(), "{key:?} done twice"),
                "repeat" => again.push((first[&key], push.started)),
                _ => {}
            }
        }
    }
    again
}

/// Asserts what holds however slow the machine is.
fn judge(sent: &std::path::Path, pushes: &[Pushed], is_slow: bool) -> Report {
    let mut checker = Checker::new();
    if is_slow {
        checker = checker.calls_may_arrive_late();
    }
    checker.read_file(sent).unwrap();
    for push in pushes {
        for handled in &push.events {
            let event: u32 = handled.id.parse().unwrap();
            checker.add(&Record::Handled {
                bot: &push.bot,
                event,
                // A receiver does not see the sequence. The position of the event serves as well.
                sequence: event.into(),
                fence: push.fence,
                started: push.started,
                ended: push.ended,
                outcome: if handled.outcome == "failed" { Outcome::Failed } else { Outcome::Done },
                process: 0,
            });
        }
    }
    let report = checker.report();
    assert!(report.is_clean(), "{report}");
    let all = BOTS * EACH as usize;
    assert_eq!((report.bots, report.sent, report.lost), (BOTS, all, 0), "{report}");
    report
}

#[tokio::test]
async fn three_processes_push_every_bots_events_in_order_though_calls_fail_and_one_is_killed() {
    order_survives(&[]).await;
}

#[tokio::test]
async fn with_a_rate_pushes_stay_in_order_though_calls_fail_and_a_process_is_killed() {
    order_survives(&[("pipelines.test.rate", "\"20/s\""), ("pipelines.test.burst", "5")]).await;
}

async fn order_survives(limits: &[(&str, &str)]) {
    if !is_there("python3") {
        return println!("not shown: there is no python3");
    }
    tried(3, async |is_last| is_in_order(limits, is_last).await).await;
}

/// Waits until so many events are done. It fails only if none is done for a while: the total time depends
/// on the machine.
async fn until_done(receiver: &ExampleReceiver, count: usize) {
    let (mut done, mut moved) = (0, Instant::now());
    eventually(10 * LONG, &format!("{count} events are done"), async || {
        let now = receiver.count("done");
        if now > done {
            (done, moved) = (now, Instant::now());
        }
        assert!(moved.elapsed() < LONG, "{done} of {count} are done, and nothing moves");
        done >= count
    })
    .await;
}

/// False: the machine stood still, or processes lost leases.
async fn is_in_order(limits: &[(&str, &str)], is_last: bool) -> bool {
    let server = RedisServer::start(Options::default());
    let receiver = ExampleReceiver::python(&["--fail", "0.03", "--operator-secret", SECRET]);
    let directory = tempfile::tempdir().unwrap();
    let sent = directory.path().join("sent.log");
    let mut publisher = Publisher::new(BOTS, &sent);
    let secrets = format!("[{SECRET:?}]");
    let mut settings = vec![("callbacks.secrets", &*secrets), ("pipelines.test.batch", "20")];
    settings.extend_from_slice(limits);
    let config = pushing(&server, &receiver.url, &settings);
    let mut processes = Vec::new();
    for _ in 0..3 {
        processes.push(Served::start(&config).await);
    }
    let stalls = Stalls::watch();
    publisher.publish(&server, STREAM, EACH).await;
    let total = publisher.total();
    assert_eq!(total, BOTS * EACH as usize);
    until_done(&receiver, total / 3 + 1).await;
    let lost = |process: &Served| process.log().contains("the lease was lost before");
    let mut any_lost = lost(&processes[1]);
    let killed = micros(SystemClock.now());
    processes[1].kill9();
    processes[1] = Served::start(&config).await;
    until_done(&receiver, total).await;
    eventually(LONG, "the queues are empty", async || depth(&server).await == 0).await;

    any_lost |= processes.iter().any(lost);
    let is_slow = !is_last && (any_lost || stalls.longest() > LEASE_STALL);
    let pushes = receiver.pushes();
    let failed = pushes.iter().filter(|push| push.events.iter().any(|e| e.outcome == "failed"));
    assert!(failed.count() > 10, "three of a hundred calls failed");
    let report = judge(&sent, &pushes, is_slow);
    judged(is_slow, || {
        assert_eq!((report.overlaps, report.late), (0, 0), "{report}");
        // An event comes again only when the kill prevented the commit of its answer.
        for (done, again) in repeats(&pushes) {
            assert!(done.abs_diff(killed) <= UNCOMMITTED_US, "done at {done}, killed at {killed}");
            assert!(again > killed);
        }
    })
}
