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
    let is_counted = async || {
        let (_, text) = get(&served.metrics(), "/metrics").await;
        let counted = |name, labels| metric(&text, name, labels);
        let pipeline: &[(&str, &str)] = &[("pipeline", "test")];
        counted("fairlane_fanout_repeated_total", pipeline) == Some(4.0)
            && counted("fairlane_rate_tokens_total", pipeline) == Some(12.0)
            // Those at the positions of idle shards stay for a while.
            && counted("fairlane_bus_trimmed_total", &[]) >= Some(8.0)
    };
    eventually(LONG, "all of them are counted", is_counted).await;
}
