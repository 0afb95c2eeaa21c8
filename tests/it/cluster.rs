//! The same promises on a Redis Cluster, and what only a cluster can do to them.

use std::time::Duration;

use fairlane::history::Record;

use crate::fairness::{undisturbed, weighed};
use crate::faults::{FEW, durable, forgotten, interrupted, killed};
use crate::order::in_order;
use crate::support::cluster::Cluster;
use crate::support::config::STREAM;
use crate::support::fleet::Fleet;
use crate::support::redis::Options;

const LONG: Duration = Duration::from_secs(60);
/// The primary of the bus stream; those before and after it have shards too.
const BUS: usize = 1;

async fn three(options: Options) -> Cluster {
    Cluster::start(options, 3, false).await
}

#[tokio::test]
async fn on_a_cluster_events_are_handled_in_order_whatever_fails() {
    in_order(Fleet::on(three(Options::default()).await, 200, &[]), 150).await;
}

#[tokio::test]
async fn on_a_cluster_others_go_on_after_a_kill_in_mid_slice() {
    killed(Fleet::on(three(Options::default()).await, 40, FEW), 250).await;
}

#[tokio::test]
async fn nobody_notices_that_a_primary_forgot_its_scripts() {
    let cluster = three(Options::default()).await;
    forgotten(Fleet::on(cluster, 40, &[]), |cluster| &cluster.nodes[2]).await;
}

#[tokio::test]
async fn on_a_cluster_service_follows_weight_and_the_quiet_do_not_wait() {
    weighed(three(Options::default()).await).await;
    undisturbed(three(Options::default()).await).await;
}

/// Its shards rest; those of the others are filled and handled as if nothing had happened.
#[tokio::test]
async fn a_primary_goes_away_and_the_shards_of_the_others_go_on() {
    let cluster = three(durable()).await;
    let fleet = Fleet::on(cluster, 40, FEW);
    let (fleet, gone, back) = interrupted(fleet, 500, |cluster| &mut cluster.nodes[0]).await;
    let mut meanwhile = 0;
    fleet.records(|record| {
        if let Record::Committed { asked, at, ref events, .. } = *record
            && asked > gone
            && at < back
        {
            meanwhile += events.len();
        }
    });
    assert!(meanwhile > 1_000, "only {meanwhile} events were done while it was away");
}

/// What the replica had not received is filled again from the bus, whose primary lived on.
#[tokio::test]
async fn a_primary_is_killed_under_load_and_its_replica_takes_over() {
    let cluster = Cluster::start(Options::default(), 3, true).await;
    let mut fleet = Fleet::on(cluster, 40, FEW);
    fleet.behaviour.delay = Duration::from_millis(2);
    fleet.publish(400).await;
    fleet.start(3).await;
    fleet.settles(4_000, LONG).await;
    fleet.server.nodes[2].kill9();
    fleet.publish(50).await;
    fleet.server.promotes(5).await;
    fleet.publish(50).await;
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert_eq!((report.lost, report.reordered, report.unhandled), (0, 0, 0), "{report}");
    assert_eq!((report.sent, report.stale_commits, report.given_up), (20_000, 0, 0), "{report}");
}

/// Slots of the queues and that of the bus move to other primaries and back.
#[tokio::test]
async fn slots_move_under_load_and_nothing_is_lost_or_reordered() {
    let mut fleet = Fleet::on(three(Options::default()).await, 40, FEW);
    fleet.behaviour.delay = Duration::from_millis(2);
    fleet.publish(400).await;
    fleet.start(3).await;
    let first = fleet.server.slot_of("{test:3}").await;
    let last = fleet.server.slot_of("{test:0}").await;
    let bus = fleet.server.slot_of(STREAM).await;
    let moves =
        [(first, 0, 2), (last, 2, 0), (bus, BUS, 0), (first, 2, 0), (last, 0, BUS), (bus, 0, 2)];
    for (round, (slot, from, to)) in moves.into_iter().enumerate() {
        fleet.settles((round + 1) * 2_000, LONG).await;
        fleet.server.move_slot(slot, from, to).await;
    }
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert_eq!((report.lost, report.reordered, report.unhandled), (0, 0, 0), "{report}");
    assert_eq!((report.sent, report.stale_commits, report.given_up), (16_000, 0, 0), "{report}");
}
