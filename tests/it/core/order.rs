//! Per bot and pipeline, events are first handled in the order of the bus and each event is done. A
//! bot has one lease holder at a time.

use std::time::Duration;

use crate::support::fleet::Fleet;
use crate::support::process::number;
use crate::support::redis::{Options, RedisBackend};

/// 200 bots with 250 events each. `make kills` sends more.
#[tokio::test]
async fn three_processes_handle_every_bots_events_in_order_whatever_fails() {
    let each = number("FAIRLANE_TEST_EVENTS", 250);
    in_order(Fleet::new(Options::default(), 200, &[]), each).await;
}

/// Starts three processes and publishes `each` events for each of 200 bots. 5% of the handlings
/// fail.
pub(crate) async fn in_order(mut fleet: Fleet<impl RedisBackend>, each: u32) {
    let sent = 200 * usize::try_from(each).unwrap();
    fleet.behaviour.fail_percent = 5;
    fleet.start(3).await;
    fleet.publish(each).await;
    fleet.drains(Duration::from_secs(120)).await;
    let report = fleet.report_of(sent).await;
    assert!(report.is_clean(), "{report}");
    assert_eq!((report.bots, report.sent, report.overlaps), (200, sent, 0), "{report}");
    // No process was killed and no lease was lost, so no event is done twice.
    assert_eq!(report.duplicates_explained, 0, "{report}");
    assert_eq!((report.committed, report.given_up), (sent, 0), "{report}");
    assert!(report.handled > sent + sent / 40, "five of a hundred handlings failed\n{report}");
}
