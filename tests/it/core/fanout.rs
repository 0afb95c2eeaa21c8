//! Which events a pipeline gets: by type, and by filter. Each pipeline gets its own copy.

use std::time::Duration;

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, configs};
use crate::support::http::{get, metric};
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(20);

fn with_data(kind: &str, id: u32, data: &str) -> String {
    event("b", kind, id).replacen('{', &format!("{{\"data\":{data},"), 1)
}

#[tokio::test]
async fn every_matching_pipeline_gets_a_copy_and_a_filter_that_fails_is_no_match() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let pipelines = ["fan-tags", "fan-applied", "fan-vips", "fan-all"];
    let settings = [
        ("pipelines.fan-tags.events", "[\"tag.*\", \"label\"]"),
        ("pipelines.fan-applied.events", "[\"*.applied\"]"),
        ("pipelines.fan-vips.events", "[\"tag.*\"]"),
        ("pipelines.fan-vips.filter", "'event.data.vip && event.botid == \"b\"'"),
    ];
    let text = configs(&server, &pipelines, &settings);
    let instance = Instance::start(&text, log.content()).await;
    let events = [
        with_data("tag.applied", 0, "{\"vip\":true}"),
        with_data("tag.applied", 1, "{\"vip\":false}"),
        with_data("tag.removed", 2, "{}"),
        event("b", "tag.applied", 3),
        with_data("coupon.applied", 4, "{\"vip\":true}"),
        event("b", "label", 5),
        event("b", "labels", 6),
        with_data("tag.x.applied", 7, "{\"vip\":true}"),
        with_data("tag.removed", 8, "{\"vip\":7}"),
    ];
    add(&server, STREAM, &events).await;
    let expected = [
        ("fan-tags", vec!["0", "1", "2", "3", "5", "7", "8"]),
        ("fan-applied", vec!["0", "1", "3", "4", "7"]),
        ("fan-vips", vec!["0", "7"]),
        ("fan-all", vec!["0", "1", "2", "3", "4", "5", "6", "7", "8"]),
    ];
    eventually(LONG, "all are handled", async || log.len() >= 23).await;
    let text = get(&instance.address.to_string(), "/metrics").await.1;
    let counted =
        |name: &str, pipeline: &str| metric(&text, name, &[("pipeline", pipeline)]).unwrap();
    for (pipeline, ids) in expected {
        assert_eq!(log.ids(pipeline), ids, "{pipeline}");
        #[expect(clippy::cast_precision_loss, reason = "a handful")]
        let copies = ids.len() as f64;
        assert!((counted("fairlane_fanout_copies_total", pipeline) - copies).abs() < 0.1);
    }
    // Two events lack the field, and one has a number in its place.
    assert!((counted("fairlane_fanout_filter_errors_total", "fan-vips") - 3.0).abs() < 0.1);
    assert!(counted("fairlane_fanout_filter_errors_total", "fan-tags") < 0.1);
}

#[tokio::test]
async fn a_pipeline_that_stands_still_does_not_hold_up_another() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let config = configs(&server, &["fan-moves", "fan-stands"], &[]);
    let instance = Instance::start(&config, log.content()).await;
    instance.queue("fan-stands").pause(None).await.unwrap();
    let events: Vec<String> = (0..50).map(|id| event("b", "x", id)).collect();
    add(&server, STREAM, &events).await;
    eventually(LONG, "one is done", async || log.count("fan-moves") == 50).await;
    let waiting = instance.queue("fan-stands").view(Duration::ZERO).await.unwrap();
    assert_eq!((waiting.depth, waiting.stopped, log.len()), (50, true, 50));
}
