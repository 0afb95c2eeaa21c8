//! Every metric: names, labels, buckets and help texts are defined only here.
//!
//! Sum the values of each process (counters, histograms, `workers`) over all processes. Values
//! shared through Redis (`queue_depth`, `queue_bots`, `queue_oldest_age_seconds`, `async_leases`,
//! `dead_letters`, `bus_lag_events`, `redis_memory_bytes`, `redis_replicas`,
//! `redis_replica_lag_bytes`, `counters_unflushed*`, `notifications_due`,
//! `notifications_overdue_seconds`) are sampled by one process at a time: use their `max`. No label ever contains a bot.

mod bus;
mod pipeline;
mod removed;

use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use metrics::{Counter, Unit, counter, gauge, histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::time::Instant;

pub(crate) use self::bus::bus_pipelines;
pub use self::bus::{BusMetrics, bus_invalid};
pub use self::pipeline::PipelineMetrics;
pub(crate) use self::pipeline::{history_dropped, workers_share};
pub(crate) use self::removed::{Shown, show_only};
use crate::id::PipelineName;
use crate::quotas;

/// The type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Observations in buckets, in seconds.
    Seconds,
    /// Observations in buckets, a count.
    Count,
}

/// One metric.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// Its full name.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// The help text.
    pub help: &'static str,
}

macro_rules! table {
    ($($const:ident $name:literal $kind:ident $help:literal;)+) => {
        $(pub(crate) const $const: &str = concat!("fairlane_", $name);)+
        /// All metrics of Fairlane, without `process_*`.
        pub const METRICS: &[Metric] =
            &[$(Metric { name: $const, kind: Kind::$kind, help: $help }),+];
    };
}
table! {
    BUS_EVENTS "bus_events_total" Counter "Events read from a bus stream";
    BUS_LAG "bus_lag_events" Gauge "Unread entries of a bus stream";
    BUS_PIPELINES "bus_pipelines" Gauge "Pipelines of the configuration that take events from the bus; 0: no process needs to read it";
    BUS_GAP "bus_gap_total" Counter "Number of gaps: a bus stream was trimmed beyond the read position, so events are missing";
    BUS_INVALID "bus_invalid_total" Counter "Bus entries that could not be read, kept in fairlane:invalid";
    BUS_TOMBSTONES "bus_tombstones_total" Counter "Records of Kafka without a value and attributes, which delete a key in a compacted topic: skipped";
    UNMATCHED "unmatched_total" Counter "Events of the bus of a type that no pipeline takes; the first 50 types have their own label, all others are other";
    BUS_TRIMMED "bus_trimmed_total" Counter "Bus entries trimmed after all readers have them";
    FANOUT_COPIES "fanout_copies_total" Counter "Copies of events added to queues";
    FANOUT_FILTER_ERRORS "fanout_filter_errors_total" Counter "Events whose filter could not be evaluated: no match";
    FANOUT_REPEATED "fanout_repeated_total" Counter "Events that were not copied because their source, id and bot were copied within bus.dedup";
    FANOUT_SECONDS "fanout_seconds" Seconds "Time from a batch read to all its copies queued";
    QUEUE_DEPTH "queue_depth" Gauge "Events in the queues";
    QUEUE_BOTS "queue_bots" Gauge "Bots by state: ready, leased, parked, paused";
    BOTS_THROTTLED "bots_throttled" Gauge "Bots whose events wait because of their rate";
    BOTS_SET_ASIDE "bots_with_lanes_set_aside" Gauge "Bots with lanes that are set aside after a failure (order_by)";
    RATE_TOKENS "rate_tokens_total" Counter "Tokens that bots with a rate took: one for each event given to the handler";
    QUEUE_OLDEST_AGE "queue_oldest_age_seconds" Gauge "Age of the oldest queued event, minus linger: how late the pipeline is. Paused and throttled bots do not count";
    QUEUE_DROPPED "queue_dropped_total" Counter "Events dropped because the queue of their bot was full (on_overflow = drop_new)";
    DEAD_LETTERS "dead_letters" Gauge "Dead letters kept";
    DEAD_LETTERS_REMOVED "dead_letters_removed_total" Counter "Dead letters removed because there were too many or they were too old";
    QUOTA_REFUSED "quota_refused_total" Counter "Requests, copies of events, dead letters and delays of events (each attempt) that a storage quota of a bot refused, by quota";
    EVENTS "events_total" Counter "Events by outcome: done, retried, dead, expired, later";
    HANDLE_SECONDS "handle_seconds" Seconds "Duration of a handler for a slice";
    DWELL_SECONDS "dwell_seconds" Seconds "Time from the arrival of an event in its queue to done";
    SLICE_EVENTS "slice_events" Count "Events in a slice";
    LEASES_LOST "leases_lost_total" Counter "Leases that ended before their slice was completed, without leases of push handlers that an operator or receiver ended";
    STALE_COMPLETIONS "stale_completions_total" Counter "Completions refused because another lease was current";
    ASYNC_LEASES "async_leases" Gauge "Leases held by receivers: answered with 202, not completed yet";
    WORKERS "workers" Gauge "Workers of this process by state: busy, idle";
    WORKERS_TARGET "workers_target" Gauge "Target number of workers of this process";
    WORKERS_SHARE "workers_share" Gauge "Share of the target workers that run: below 1 while Redis or a needed MongoDB is much slower than usual";
    DEMAND_RATIO "demand_ratio" Gauge "Workers that the load needs, divided by their maximum";
    SCRIPT_SECONDS "script_seconds" Seconds "Round trip of a script, all its calls in one write";
    HTTP_REQUESTS "http_requests_total" Counter "HTTP requests by route and status code of the answer; 499: the connection ended while the request was handled; 500 also if its handler panicked";
    HTTP_SECONDS "http_seconds" Seconds "Time from the first byte of an HTTP request to the last byte of its answer, by route; without requests refused by admission control";
    HTTP_BODY_SECONDS "http_body_seconds" Seconds "Part of http_seconds: the time until the body of the request has arrived, by route; only requests with a body";
    HTTP_HANDLER_SECONDS "http_handler_seconds" Seconds "Part of http_seconds: the time of the handler until the head of the answer, by route";
    HTTP_ANSWER_SECONDS "http_answer_seconds" Seconds "Part of http_seconds: the time from the head of the answer to its last byte, by route";
    ADMISSION "admission_total" Counter "Requests by class and decision: admitted, waited (and then admitted), shed, shadow (would have been shed or have waited); a request cancelled at its deadline counts as admitted and as shed";
    SHED "shed_total" Counter "Requests refused before they started, or cancelled at their deadline, by class, route and reason";
    SHED_FALSE_POSITIVES "shed_false_positives_total" Counter "Requests shed for lack of a slot although the latency was good";
    SHED_SECONDS "shed_seconds" Seconds "Time from the first byte of a refused request to the last byte of the refusal, including delayed refusals";
    INFLIGHT "inflight" Gauge "HTTP requests in flight, without those of p0; a request with a body counts once per 16 KiB of it";
    INFLIGHT_LIMIT "inflight_limit" Gauge "Limit of HTTP requests in flight, which follows the latency";
    QUEUE_WAIT_SECONDS "queue_wait_seconds" Seconds "Time that requests waited for a slot and for their turn to start, including 0, by class; p0 never waits";
    HTTP_DEMAND_RATIO "http_demand_ratio" Gauge "Offered HTTP load (served and shed) divided by the capacity; above 1 more processes are needed";
    HTTP_CONNECTIONS "http_connections" Gauge "Open connections, by listener";
    HTTP_CONNECTIONS_REFUSED "http_connections_refused_total" Counter "Connections closed immediately because their address had too many";
    AUDIT_LOST "audit_lost_total" Counter "Actions of operators that the audit trail may lack, because Redis did not take them; the log has them";
    HTTP_PROXY_ERRORS "http_proxy_errors_total" Counter "Connections of trusted proxies closed because they do not start with a valid PROXY protocol header, by listener and reason: v1, missing, malformed, timeout";
    COUNTERS_VIEWS "counters_views_total" Counter "Views counted, from all sources";
    COUNTERS_FLUSH_SECONDS "counters_flush_seconds" Seconds "Time to write a portion of a slice of views to both collections in MongoDB";
    COUNTERS_UNFLUSHED "counters_unflushed" Gauge "Records of views that are not in MongoDB yet";
    COUNTERS_UNFLUSHED_OLDEST "counters_unflushed_oldest_seconds" Gauge "Age of the oldest record of views that is not in MongoDB yet";
    COUNTERS_CACHE_HITS "counters_cache_hits_total" Counter "Totals found in the cache in Redis";
    COUNTERS_CACHE_MISSES "counters_cache_misses_total" Counter "Totals read from MongoDB";
    READS_REFUSED "reads_refused_total" Counter "Requests that skipped a store (redis, mongodb) because it does not answer in time: readers got the data of the other store, or 503";
    AUTOMATION_MATCHES "automation_matches_total" Counter "Matches of rules with events";
    AUTOMATION_ACTIONS "automation_actions_total" Counter "Actions caused by rules, by action";
    AUTOMATION_ERRORS "automation_errors_total" Counter "Filters that failed, actions that cannot be done, events that cannot be applied to a profile";
    AUTOMATION_DOUBTFUL "automation_doubtful_total" Counter "Events copied while the index of rules was stale";
    NOTIFICATIONS "notifications_total" Counter "Notifications by type (the first 50; else other) and outcome: received, retried, or the end: sent, refused, throttled, expired, dead, cancelled. gone: it was due and had no record";
    NOTIFICATIONS_LATENESS "notifications_lateness_seconds" Seconds "Time from when a notification could be sent to its first send: its due time, or when the limits of its user allowed it; without those that waited for their user";
    NOTIFICATIONS_DUE "notifications_due" Gauge "Notifications with a due time: scheduled, waiting, to be retried, in flight";
    NOTIFICATIONS_OVERDUE "notifications_overdue_seconds" Gauge "How long the first due notification has been overdue, including its time in a queue; without those that wait for their host";
    BREAKER_OPEN "breaker_open" Gauge "1 while a circuit breaker is open at a host, for all bots or for one, by host (the first 20; the number of others as other)";
    HISTORY_DROPPED "history_dropped_total" Counter "Attempts that are not kept for operators: too many concurrently, or Redis did not take them";
    TRACE_SPANS "trace_spans_total" Counter "Spans that the collector took (tracing.endpoint)";
    TRACE_DROPPED "trace_spans_dropped_total" Counter "Spans that are lost, by reason: buffer_full (the exporter is slower than the spans), not_taken (by the collector)";
    PROBLEMS "problems" Gauge "1 while the finding exists, by problem, severity and pipeline (empty: none): those of fairlane status. One process at a time reports them: use max";
    REDIS_UP "redis_up" Gauge "1 while Redis answers";
    REDIS_MEMORY "redis_memory_bytes" Gauge "Redis memory: used, and max (0: no bound)";
    REDIS_REPLICAS "redis_replicas" Gauge "Replicas of Redis that are connected and have its data; in a cluster, those of the primary with the fewest";
    REDIS_REPLICA_LAG "redis_replica_lag_bytes" Gauge "Bytes of the replication stream that the last replica has not confirmed; replicas confirm once a second";
    REDIS_UNCONFIRMED "redis_unconfirmed_total" Counter "Writes that fewer replicas than redis.wait_replicas confirmed within redis.wait_timeout: their outcome counted as unknown";
    MONGODB_UP "mongodb_up" Gauge "1 while MongoDB answers; absent if it is not used";
    BUILD_INFO "build_info" Gauge "Always 1; the labels describe the running build";
}

const SECONDS: &[f64] = &[
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0, 30.0, 60.0, 300.0,
];
const COUNTS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1_000.0, 5_000.0];

/// `None`: the program has installed another recorder.
static RECORDER: OnceLock<Option<PrometheusHandle>> = OnceLock::new();

/// The program has installed another recorder of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "this program has installed another recorder of the crate `metrics`, so Fairlane's metrics would be lost; call fairlane::metrics::install() instead: /metrics then also shows what the program records with that crate"
)]
pub struct RecorderTaken;

/// Installs the recorder of this process, once, and describes every metric. Building an instance
/// does it too. A program that records metrics earlier calls it first, and installs no other one.
///
/// # Errors
/// If another recorder is already installed in this process.
pub fn install() -> Result<&'static PrometheusHandle, RecorderTaken> {
    RECORDER.get_or_init(recorder).as_ref().ok_or(RecorderTaken)
}

/// Installs the recorder. `None`: there is another one.
fn recorder() -> Option<PrometheusHandle> {
    let mut builder = PrometheusBuilder::new();
    for metric in METRICS {
        let buckets = match metric.kind {
            Kind::Counter | Kind::Gauge => continue,
            Kind::Seconds => SECONDS,
            Kind::Count => COUNTS,
        };
        builder = builder
            .set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), buckets)
            .expect("the bucket lists above are not empty");
    }
    let handle = builder.install_recorder().ok()?;
    for metric in METRICS {
        match metric.kind {
            Kind::Counter => metrics::describe_counter!(metric.name, metric.help),
            Kind::Gauge => metrics::describe_gauge!(metric.name, metric.help),
            Kind::Seconds => metrics::describe_histogram!(metric.name, Unit::Seconds, metric.help),
            Kind::Count => metrics::describe_histogram!(metric.name, metric.help),
        }
    }
    metrics_process::Collector::default().describe();
    let commit = option_env!("FAIRLANE_COMMIT").unwrap_or("unknown");
    gauge!(BUILD_INFO, "version" => env!("CARGO_PKG_VERSION"), "commit" => commit).set(1.0);
    gauge!(REDIS_UP).set(0.0);
    counter!(REDIS_UNCONFIRMED).absolute(0);
    for name in quotas::NAMES {
        counter!(QUOTA_REFUSED, "quota" => name).absolute(0);
    }
    Some(handle)
}

/// When the metrics were scraped last.
static SCRAPED: Mutex<Option<Instant>> = Mutex::new(None);

/// Whether the metrics were scraped within this time.
pub(crate) fn was_scraped(within: Duration) -> bool {
    let scraped = *SCRAPED.lock().unwrap_or_else(PoisonError::into_inner);
    scraped.is_some_and(|at| at.elapsed() < within)
}

/// Whether a finding exists.
pub(crate) fn problem(
    code: &'static str,
    severity: &'static str,
    pipeline: Option<&PipelineName>,
    exists: bool,
) {
    let pipeline = pipeline.map_or_else(String::new, ToString::to_string);
    let gauge = gauge!(PROBLEMS, "problem" => code, "severity" => severity, "pipeline" => pipeline);
    gauge.set(if exists { 1.0 } else { 0.0 });
}

/// The exposition text of this process. Empty if the program has installed another recorder.
#[must_use]
pub fn render() -> String {
    *SCRAPED.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    metrics_process::Collector::default().collect();
    removed::left_out(install().map(PrometheusHandle::render).unwrap_or_default())
}

/// Moves the observations into the buckets. Call it every few seconds, so that memory stays bounded
/// even without scrapes.
pub fn upkeep() {
    if let Ok(handle) = install() {
        handle.run_upkeep();
    }
}

/// Round trip of a script.
pub fn script_seconds(script: &'static str, took: Duration) {
    histogram!(SCRIPT_SECONDS, "script" => script).record(took.as_secs_f64());
}

/// What bots were not given because of the quota `name`.
pub(crate) fn quota_refused(name: &'static str, count: u64) {
    if count > 0 {
        counter!(QUOTA_REFUSED, "quota" => name).increment(count);
    }
}

/// Whether Redis answers.
pub fn redis_up(up: bool) {
    gauge!(REDIS_UP).set(if up { 1.0 } else { 0.0 });
}

/// Whether MongoDB answers.
pub fn mongodb_up(up: bool) {
    gauge!(MONGODB_UP).set(if up { 1.0 } else { 0.0 });
}

/// Redis memory; `max` 0: no bound.
#[expect(clippy::cast_precision_loss, reason = "bytes of memory are far below 2^52")]
pub fn redis_memory(used: u64, max: u64) {
    gauge!(REDIS_MEMORY, "kind" => "used").set(used as f64);
    gauge!(REDIS_MEMORY, "kind" => "max").set(max as f64);
}

/// The replicas of Redis.
#[expect(clippy::cast_precision_loss, reason = "bytes of a replication stream are below 2^52")]
pub(crate) fn redis_replicas(replicas: u64, lag_bytes: u64) {
    gauge!(REDIS_REPLICAS).set(replicas as f64);
    gauge!(REDIS_REPLICA_LAG).set(lag_bytes as f64);
}

/// A write that too few replicas confirmed.
pub(crate) fn redis_unconfirmed() {
    counter!(REDIS_UNCONFIRMED).increment(1);
}

/// Events of a type that no pipeline takes.
pub fn unmatched(kind: &str, events: u64) {
    counter!(UNMATCHED, "type" => kind.to_owned()).increment(events);
}

/// Actions of operators that the audit trail may lack.
pub(crate) fn audit_lost(actions: u64) {
    counter!(AUDIT_LOST).increment(actions);
}

/// Time from reading a batch until all its copies are queued.
pub fn fanout_seconds(took: Duration) {
    histogram!(FANOUT_SECONDS).record(took.as_secs_f64());
}

/// Why a span is lost.
#[cfg(feature = "otel")]
#[derive(Debug, Clone, Copy)]
pub(crate) enum TraceDrop {
    BufferFull,
    NotTaken,
}

/// Spans that the collector took.
#[cfg(feature = "otel")]
pub(crate) fn trace_exported() -> Counter {
    let counter = counter!(TRACE_SPANS);
    counter.absolute(0);
    counter
}

/// Spans that are lost.
#[cfg(feature = "otel")]
pub(crate) fn trace_dropped(why: TraceDrop) -> Counter {
    let reason = match why {
        TraceDrop::BufferFull => "buffer_full",
        TraceDrop::NotTaken => "not_taken",
    };
    let counter = counter!(TRACE_DROPPED, "reason" => reason);
    counter.absolute(0);
    counter
}

/// Requests that skipped a store because it does not answer in time.
pub(crate) fn reads_refused(store: &'static str) -> Counter {
    let counter = counter!(READS_REFUSED, "store" => store);
    counter.absolute(0);
    counter
}
