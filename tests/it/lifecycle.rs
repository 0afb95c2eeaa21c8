//! A process that is asked to stop finishes what it began and leaves nothing for others to wait for.

use std::time::Duration;

use crate::support::fleet::Fleet;
use crate::support::http;
use crate::support::proxy::{Mode, Proxy};
use crate::support::redis::Options;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn sigterm_under_load_repeats_nothing_and_makes_nobody_wait() {
    let settings = [("pipelines.test.workers.max", "8"), ("pipelines.test.lease_ttl", "\"30s\"")];
    let mut fleet = Fleet::new(Options::default(), 60, &settings);
    fleet.behaviour.delay = Duration::from_millis(3);
    fleet.start(2).await;
    fleet.publish(300).await;
    for round in 1..=3 {
        fleet.settles(round * 3_000, LONG).await;
        let place = round % 2;
        fleet.workers[place].sigterm();
        let status = fleet.workers[place].wait_exit(LONG).expect("it ends");
        assert_eq!(status.code(), Some(0), "{:?}", fleet.workers[place].lines());
        fleet.restart(place).await;
    }
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert!(report.is_clean(), "{report}");
    assert_eq!((report.sent, report.handled, report.overlaps), (18_000, 18_000, 0), "{report}");
    // A lease that was not given back would block its bot for 3 s at least.
    let rest = fleet.longest_rest();
    assert!(rest < Duration::from_secs(2), "a bot waited {rest:?} for another process");
}

/// Behind a slow network, so that claims are under way whenever the signal comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_process_that_stopped_leaves_no_lease_behind() {
    let options = Options { tcp: true, ..Options::default() };
    let mut fleet = Fleet::new(options, 100, &[("pipelines.test.lease_ttl", "\"30s\"")]);
    let proxy = Proxy::start(fleet.server.tcp_addr()).await;
    fleet.config = fleet.config.replace(&fleet.server.url(), &proxy.url());
    proxy.set(Mode::Delay(Duration::from_millis(2)));
    fleet.behaviour.delay = Duration::from_millis(1);
    fleet.publish(200).await;
    fleet.start(1).await;
    for round in 1..=5 {
        fleet.settles(round * 500, LONG).await;
        fleet.workers[0].sigterm();
        let status = fleet.workers[0].wait_exit(LONG).expect("it ends");
        assert_eq!(status.code(), Some(0), "{:?}", fleet.workers[0].lines());
        assert_eq!(fleet.leases().await, 0, "round {round}: {:#?}", fleet.workers[0].lines());
        fleet.restart(0).await;
    }
    let report = fleet.report();
    assert_eq!((report.reordered, report.overlaps, report.stale_commits), (0, 0, 0), "{report}");
    assert_eq!((report.duplicates_explained, report.duplicates_unexplained), (0, 0), "{report}");
}

#[tokio::test]
async fn a_second_signal_stops_at_once_and_a_long_slice_comes_again() {
    let mut fleet = Fleet::new(Options::default(), 1, &[]);
    fleet.behaviour.delay = Duration::from_secs(4);
    fleet.start(1).await;
    fleet.publish(1).await;
    let busy = ("fairlane_workers", [("state", "busy")]);
    eventually(LONG, "the handler runs", async || {
        http::metric(&fleet.metrics(0).await, busy.0, &busy.1) == Some(1.0)
    })
    .await;
    fleet.workers[0].sigterm();
    let address = crate::support::fleet::metrics_address(&fleet.workers[0]).unwrap();
    eventually(LONG, "it says that it is stopping", async || {
        let (code, body) = http::get(&address, "/readyz").await;
        code == 503 && body.contains("stopping")
    })
    .await;
    assert_eq!(http::get(&address, "/healthz").await.0, 200, "alive until the end");
    fleet.workers[0].sigterm();
    assert_eq!(fleet.workers[0].wait_exit(Duration::from_secs(2)).unwrap().code(), Some(0));
    fleet.behaviour.delay = Duration::ZERO;
    fleet.restart(0).await;
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert!(report.is_clean() && report.handled == 1, "{report}");
}
