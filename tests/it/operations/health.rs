//! `/healthz`, `/readyz` and `/metrics`: the input of dashboards, alerts and orchestrators.

use std::time::Duration;

use fairlane::metrics::METRICS;

use crate::support::config::config;
use crate::support::fleet::{Fleet, metrics_address};
use crate::support::http::{get, metric};
use crate::support::mongo::{self, MongoServer, free_port};
use crate::support::redis::{Options, Persistence, RedisServer};
use crate::support::served::Served;
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(30);

/// The series that dashboards need before the first event, each with labels.
const FROM_THE_START: &[(&str, &[(&str, &str)])] = &[
    ("bus_events_total", &[("stream", "fairlane:events")]),
    ("bus_lag_events", &[("stream", "fairlane:events")]),
    ("bus_pipelines", &[]),
    ("bus_gap_total", &[("stream", "fairlane:events")]),
    ("unmatched_total", &[("type", "other")]),
    ("bus_invalid_total", &[("reason", "field")]),
    ("bus_invalid_total", &[("reason", "size")]),
    ("bus_invalid_total", &[("reason", "json")]),
    ("bus_invalid_total", &[("reason", "msgpack")]),
    ("bus_invalid_total", &[("reason", "attribute")]),
    ("bus_invalid_total", &[("reason", "botid")]),
    ("fanout_copies_total", &[("pipeline", "test")]),
    ("fanout_filter_errors_total", &[("pipeline", "test")]),
    ("queue_depth", &[("pipeline", "test")]),
    ("queue_bots", &[("pipeline", "test"), ("state", "ready")]),
    ("queue_bots", &[("pipeline", "test"), ("state", "leased")]),
    ("queue_bots", &[("pipeline", "test"), ("state", "parked")]),
    ("queue_bots", &[("pipeline", "test"), ("state", "paused")]),
    ("queue_oldest_age_seconds", &[("pipeline", "test")]),
    ("dead_letters", &[("pipeline", "test")]),
    ("events_total", &[("pipeline", "test"), ("outcome", "done")]),
    ("events_total", &[("pipeline", "test"), ("outcome", "retried")]),
    ("events_total", &[("pipeline", "test"), ("outcome", "dead")]),
    ("events_total", &[("pipeline", "test"), ("outcome", "expired")]),
    ("events_total", &[("pipeline", "test"), ("outcome", "later")]),
    ("leases_lost_total", &[("pipeline", "test")]),
    ("stale_completions_total", &[("pipeline", "test")]),
    ("workers", &[("pipeline", "test"), ("state", "busy")]),
    ("workers", &[("pipeline", "test"), ("state", "idle")]),
    ("workers_target", &[("pipeline", "test")]),
    ("demand_ratio", &[("pipeline", "test")]),
    ("automation_matches_total", &[]),
    ("automation_actions_total", &[("action", "emit")]),
    ("automation_errors_total", &[]),
    ("automation_doubtful_total", &[]),
    ("counters_views_total", &[]),
    ("counters_unflushed", &[]),
    ("counters_unflushed_oldest_seconds", &[]),
    ("counters_cache_hits_total", &[]),
    ("counters_cache_misses_total", &[]),
    ("reads_refused_total", &[("store", "redis")]),
    ("reads_refused_total", &[("store", "mongodb")]),
    ("admission_total", &[("class", "p2"), ("decision", "shed")]),
    ("shed_total", &[("class", "p0"), ("route", "/readyz"), ("reason", "critical")]),
    ("shed_total", &[("class", "p1"), ("route", "/v1/pipelines"), ("reason", "capacity")]),
    ("shed_total", &[("class", "p1"), ("route", "/v1/pipelines"), ("reason", "wait")]),
    ("shed_total", &[("class", "p1"), ("route", "/v1/pipelines"), ("reason", "displaced")]),
    ("shed_false_positives_total", &[]),
    ("inflight", &[]),
    ("inflight_limit", &[]),
    ("http_demand_ratio", &[]),
    ("http_connections", &[("listener", "metrics")]),
    ("http_connections_refused_total", &[("listener", "metrics")]),
    ("redis_up", &[]),
    ("redis_memory_bytes", &[("kind", "used")]),
    ("redis_memory_bytes", &[("kind", "max")]),
    ("redis_replicas", &[]),
    ("redis_replica_lag_bytes", &[]),
    ("redis_unconfirmed_total", &[]),
    ("mongodb_up", &[]),
    ("build_info", &[("version", env!("CARGO_PKG_VERSION"))]),
];

#[tokio::test]
async fn every_metric_is_there_and_counters_start_at_zero() {
    // No server listens here. The series exists only where a MongoDB is configured.
    let away = format!("\"mongodb://127.0.0.1:{}\"", free_port());
    // The same for the series of traces, and a collector.
    let collector = format!("\"http://127.0.0.1:{}\"", free_port());
    let settings = [
        ("mongodb.url", &*away),
        ("tracing.endpoint", &*collector),
        ("pipelines.automations.enabled", "true"),
        ("pipelines.notifications.enabled", "true"),
    ];
    let mut fleet = Fleet::new(Options::default(), 5, &settings);
    fleet.start(1).await;
    let mut text = String::new();
    let absent = |text: &str| -> Vec<_> {
        let here = |(name, labels): &&(&str, &[_])| {
            metric(text, &format!("fairlane_{name}"), labels).is_none()
        };
        FROM_THE_START.iter().filter(here).collect()
    };
    // The first sample of the state in Redis takes two seconds.
    eventually(LONG, "the first sample is taken", async || {
        text = fleet.metrics(0).await;
        metric(&text, "fairlane_redis_up", &[]) == Some(1.0)
    })
    .await;
    assert!(absent(&text).is_empty(), "{:?} are not there in\n{text}", absent(&text));
    for (name, labels) in FROM_THE_START.iter().filter(|(name, _)| name.ends_with("_total")) {
        assert_eq!(metric(&text, &format!("fairlane_{name}"), labels), Some(0.0), "{name}");
    }

    fleet.publish(20).await;
    fleet.drains(LONG).await;
    let text = fleet.metrics(0).await;
    for known in METRICS {
        let line = format!("# TYPE {} ", known.name);
        assert!(text.contains(&line), "{} is not exported:\n{text}", known.name);
    }
    assert!(text.contains("\nprocess_resident_memory_bytes "), "{text}");
    let pipeline = [("pipeline", "test")];
    for (name, labels) in [
        ("fanout_copies_total", &pipeline[..]),
        ("events_total", &[("pipeline", "test"), ("outcome", "done")]),
        ("dwell_seconds_count", &pipeline),
        ("bus_events_total", &[]),
    ] {
        assert_eq!(metric(&text, &format!("fairlane_{name}"), labels), Some(100.0), "{name}");
    }
    for name in ["enqueue", "claim", "complete"] {
        let labels = [("script", name)];
        assert!(metric(&text, "fairlane_script_seconds_count", &labels) > Some(0.0), "{name}");
    }
    assert!(!text.contains("bot-"), "a label holds a bot");
}

#[tokio::test]
async fn without_a_pipeline_that_takes_events_from_the_bus_no_reader_is_missing() {
    let only = [("pipelines.test.enabled", "false"), ("pipelines.notifications.enabled", "true")];
    let mut fleet = Fleet::new(Options::default(), 1, &only);
    fleet.start(1).await;
    let mut text = String::new();
    eventually(LONG, "the alert knows why", async || {
        text = fleet.metrics(0).await;
        metric(&text, "fairlane_bus_pipelines", &[]) == Some(0.0)
    })
    .await;
    let lag = metric(&text, "fairlane_bus_lag_events", &[("stream", "fairlane:events")]);
    assert_eq!(lag, None, "no reader is missing");
}

#[tokio::test]
async fn only_a_process_that_handles_events_shows_the_share_of_its_workers() {
    let server = RedisServer::start(Options::default());
    let config = config(&server, "test", &[("pipelines.test.handler", "\"log\"")]);
    let share = async |process: &Served| {
        let (_, text) = get(&process.metrics(), "/metrics").await;
        metric(&text, "fairlane_workers_share", &[("pipeline", "test")])
    };
    let without = Served::start_as(&config, "ingest,http,schedule").await;
    assert_eq!(share(&without).await, None);
    let worker = Served::start_as(&config, "work").await;
    eventually(LONG, "its workers run", async || share(&worker).await > Some(0.0)).await;
    assert_eq!(share(&without).await, None);
}

#[tokio::test]
async fn a_process_without_redis_is_alive_but_not_ready() {
    let options = Options { persistence: Persistence::EverySecond, ..Options::default() };
    let mut fleet = Fleet::new(options, 1, &[]);
    fleet.start(1).await;
    let address = metrics_address(&fleet.workers[0]).unwrap();
    let ready = async || get(&address, "/readyz").await;
    let (code, body) = ready().await;
    assert!(code == 200 && body.contains("\"redis\":\"up\""), "{code} {body}");
    assert_eq!(get(&address, "/healthz").await, (200, "ok\n".to_owned()));
    assert_eq!(get(&address, "/nothing").await.0, 404);

    fleet.server.kill9();
    let (code, body) = ready().await;
    assert!(code == 503 && body.contains("\"redis\":\"down\""), "{code} {body}");
    assert_eq!(get(&address, "/healthz").await.0, 200);
    let up = async || metric(&fleet.metrics(0).await, "fairlane_redis_up", &[]);
    eventually(LONG, "the metric says so too", async || up().await == Some(0.0)).await;

    fleet.server.restart();
    eventually(LONG, "it is ready again", async || ready().await.0 == 200).await;
    // A Redis that does not answer counts as unavailable.
    fleet.server.sigstop();
    assert_eq!(ready().await.0, 503);
    fleet.server.sigcont();
    eventually(LONG, "it is ready again", async || ready().await.0 == 200).await;
}

#[tokio::test]
async fn a_process_that_cannot_register_says_why_it_is_not_ready() {
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    // All keys but that of the processes.
    let rights = "ACL SETUSER u reset on >pw +@all ~fl:[^p]* ~fl:pi* ~fairlane:* &fl:*";
    server.ask(&rights.split(' ').collect::<Vec<_>>()).await;
    let url = format!("\"redis://u:pw@{}\"", server.tcp_addr());
    let settings = [("redis.url", &*url), ("pipelines.test.handler", "\"log\"")];
    let process = Served::spawn(&config(&server, "test", &settings), "ingest,work,http,schedule");
    eventually(LONG, "it runs", async || process.log().contains("fairlane is running")).await;
    let reason =
        "this process is not registered in Redis yet: Redis refuses; the log has the reason";
    eventually(LONG, "it says why", async || {
        let (code, body) = get(&process.metrics(), "/readyz").await;
        code == 503 && body.contains(reason)
    })
    .await;
    let log = process.log();
    let line = log.lines().find(|line| line.contains("not ready yet; retrying")).unwrap();
    assert!(line.contains("NOPERM"), "{line}");
}

#[tokio::test]
async fn a_process_without_mongodb_is_degraded_and_says_so() {
    let mut mongo = MongoServer::start(mongo::Options::default());
    let url = format!("{:?}", mongo.url());
    let mut fleet = Fleet::new(Options::default(), 1, &[("mongodb.url", &url)]);
    fleet.start(1).await;
    let address = metrics_address(&fleet.workers[0]).unwrap();
    let ready = async || get(&address, "/readyz").await;
    let said = |answer: &(u16, String), status: &str, mongodb: &str| {
        let has = |key: &str, value: &str| answer.1.contains(&format!("\"{key}\":\"{value}\""));
        answer.0 == 200 && has("status", status) && has("redis", "up") && has("mongodb", mongodb)
    };
    eventually(LONG, "it is ready", async || said(&ready().await, "ready", "up")).await;
    let up = async || metric(&fleet.metrics(0).await, "fairlane_mongodb_up", &[]);
    assert_eq!(up().await, Some(1.0));

    mongo.is_prepared().await;
    mongo.kill9();
    eventually(LONG, "degraded", async || said(&ready().await, "degraded", "down")).await;
    assert_eq!(up().await, Some(0.0));
    // Only the counters need MongoDB, so events continue.
    fleet.publish(20).await;
    fleet.drains(LONG).await;

    mongo.restart(mongo::Options::default());
    eventually(LONG, "it is ready again", async || said(&ready().await, "ready", "up")).await;
    // A MongoDB that does not answer counts as unavailable, and no health check waits for it.
    mongo.sigstop();
    eventually(LONG, "degraded", async || said(&ready().await, "degraded", "down")).await;
    mongo.sigcont();
    eventually(LONG, "it is ready again", async || said(&ready().await, "ready", "up")).await;
}
