//! A Redis behind sentinels: Fairlane follows the primary that they name.

use std::time::Duration;

use super::faults::FEW;
use crate::support::fleet::Fleet;
use crate::support::redis::Options;
use crate::support::sentinel::Watched;

const LONG: Duration = Duration::from_secs(60);

/// The replica has all published events before the kill, and lacks the last completions. These
/// events are handled again.
#[tokio::test]
async fn the_primary_is_killed_under_load_and_work_continues_on_the_one_that_the_sentinels_name() {
    let watched = Watched::start(Options::default(), 2).await;
    let mut fleet = Fleet::on(watched, 40, FEW);
    fleet.behaviour.delay = Duration::from_millis(2);
    fleet.publish(300).await;
    // Enough for the replicas to receive the last events.
    fleet.server.servers[0].ask(&["WAIT", "2", "5000"]).await;
    fleet.start(2).await;
    fleet.settles(3_000, LONG).await;
    fleet.server.servers[0].kill9();
    let new = fleet.server.fails_over(0).await;
    assert_ne!(new, 0);
    fleet.publish(50).await;
    fleet.drains(LONG).await;
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert_eq!((report.lost, report.reordered, report.unhandled), (0, 0, 0), "{report}");
    assert_eq!((report.sent, report.stale_commits, report.given_up), (14_000, 0, 0), "{report}");
}

/// The old primary goes on as a replica, so its clients get `READONLY` or closed connections.
#[tokio::test]
async fn a_planned_failover_under_load_loses_and_reorders_nothing() {
    let watched = Watched::start(Options::default(), 1).await;
    let mut fleet = Fleet::on(watched, 40, FEW);
    fleet.behaviour.delay = Duration::from_millis(2);
    fleet.publish(200).await;
    fleet.server.servers[0].ask(&["WAIT", "1", "5000"]).await;
    fleet.start(2).await;
    fleet.settles(2_000, LONG).await;
    fleet.server.sentinels[0].fail_over().await;
    assert_eq!(fleet.server.fails_over(0).await, 1);
    fleet.publish(50).await;
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert_eq!((report.lost, report.reordered, report.unhandled), (0, 0, 0), "{report}");
    assert_eq!((report.sent, report.stale_commits, report.given_up), (10_000, 0, 0), "{report}");
}
