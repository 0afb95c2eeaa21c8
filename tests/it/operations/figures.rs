//! Metrics count what their descriptions say.

use crate::support::http::{get, metric};
use crate::support::push::{LONG, Push};
use crate::support::receiver::Reply;
use crate::support::wait::eventually;

#[tokio::test]
async fn repetitions_on_the_bus_tokens_of_bots_and_trimmed_entries_are_counted() {
    let settings = [
        ("bus.dedup", "\"10m\""),
        ("bus.retention", "\"1s\""),
        ("pipelines.test.rate", "\"1000/s\""),
    ];
    let push = Push::new(&settings, async |_| Reply::new(200, "")).await;
    let served = push.serve().await;
    for bot in ["a", "b"] {
        push.publish(bot, 0..5).await;
        push.publish(bot, 3..6).await;
    }
    let figures = async || {
        let (_, text) = get(&served.metrics(), "/metrics").await;
        let pipeline = [("pipeline", "test")];
        [
            metric(&text, "fairlane_fanout_repeated_total", &pipeline),
            metric(&text, "fairlane_rate_tokens_total", &pipeline),
            metric(&text, "fairlane_workers_share", &pipeline),
            metric(&text, "fairlane_bus_trimmed_total", &[]),
        ]
    };
    // The newest entry stays.
    let expected = [Some(4.0), Some(12.0), Some(1.0), Some(15.0)];
    eventually(LONG, "all of them are counted", async || {
        let found = figures().await;
        assert!(found.iter().zip(&expected).all(|(found, most)| found <= most), "{found:?}");
        found == expected
    })
    .await;
}
