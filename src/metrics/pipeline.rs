//! The metrics of one pipeline.

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use super::{
    ASYNC_LEASES, BOTS_SET_ASIDE, BOTS_THROTTLED, DEAD_LETTERS, DEAD_LETTERS_REMOVED, DEMAND_RATIO,
    DWELL_SECONDS, EVENTS, FANOUT_COPIES, FANOUT_FILTER_ERRORS, FANOUT_REPEATED, HANDLE_SECONDS,
    HISTORY_DROPPED, LEASES_LOST, QUEUE_BOTS, QUEUE_DEPTH, QUEUE_DROPPED, QUEUE_OLDEST_AGE,
    RATE_TOKENS, SLICE_EVENTS, STALE_COMPLETIONS, WORKERS, WORKERS_SHARE, WORKERS_TARGET,
};
use crate::id::PipelineName;

/// Metrics of one pipeline. Every series exists from the start, at 0.
#[derive(Clone)]
#[expect(missing_docs, reason = "each is the metric of the same name in `METRICS`")]
pub struct PipelineMetrics {
    pub copies: Counter,
    pub filter_errors: Counter,
    pub depth: Gauge,
    pub ready: Gauge,
    pub leased: Gauge,
    pub async_leases: Gauge,
    pub parked: Gauge,
    pub throttled: Gauge,
    pub set_aside: Gauge,
    pub tokens: Counter,
    pub paused: Gauge,
    pub oldest_age: Gauge,
    pub dropped: Counter,
    pub repeated: Counter,
    pub dead_letters: Gauge,
    pub letters_removed: Counter,
    pub done: Counter,
    pub retried: Counter,
    pub dead: Counter,
    pub expired: Counter,
    pub later: Counter,
    pub handle_seconds: Histogram,
    pub dwell_seconds: Histogram,
    pub slice_events: Histogram,
    pub leases_lost: Counter,
    pub stale_completions: Counter,
    pub workers_busy: Gauge,
    pub workers_idle: Gauge,
    pub workers_target: Gauge,
    pub demand_ratio: Gauge,
}

impl PipelineMetrics {
    /// The handles of `pipeline`.
    #[must_use]
    pub fn new(pipeline: &PipelineName) -> Self {
        let label = || pipeline.as_str().to_owned();
        let count = |name: &'static str| counter!(name, "pipeline" => label());
        let level = |name: &'static str| gauge!(name, "pipeline" => label());
        let observe = |name: &'static str| histogram!(name, "pipeline" => label());
        let bots =
            |state: &'static str| gauge!(QUEUE_BOTS, "pipeline" => label(), "state" => state);
        let workers =
            |state: &'static str| gauge!(WORKERS, "pipeline" => label(), "state" => state);
        let outcome =
            |name: &'static str| counter!(EVENTS, "pipeline" => label(), "outcome" => name);
        let metrics = Self {
            copies: count(FANOUT_COPIES),
            filter_errors: count(FANOUT_FILTER_ERRORS),
            depth: level(QUEUE_DEPTH),
            ready: bots("ready"),
            leased: bots("leased"),
            async_leases: level(ASYNC_LEASES),
            parked: bots("parked"),
            throttled: level(BOTS_THROTTLED),
            set_aside: level(BOTS_SET_ASIDE),
            tokens: count(RATE_TOKENS),
            paused: bots("paused"),
            oldest_age: level(QUEUE_OLDEST_AGE),
            dropped: count(QUEUE_DROPPED),
            repeated: count(FANOUT_REPEATED),
            dead_letters: level(DEAD_LETTERS),
            letters_removed: count(DEAD_LETTERS_REMOVED),
            done: outcome("done"),
            retried: outcome("retried"),
            dead: outcome("dead"),
            expired: outcome("expired"),
            later: outcome("later"),
            handle_seconds: observe(HANDLE_SECONDS),
            dwell_seconds: observe(DWELL_SECONDS),
            slice_events: observe(SLICE_EVENTS),
            leases_lost: count(LEASES_LOST),
            stale_completions: count(STALE_COMPLETIONS),
            workers_busy: workers("busy"),
            workers_idle: workers("idle"),
            workers_target: level(WORKERS_TARGET),
            demand_ratio: level(DEMAND_RATIO),
        };
        for counter in [
            &metrics.copies,
            &metrics.filter_errors,
            &metrics.tokens,
            &metrics.dropped,
            &metrics.repeated,
            &metrics.letters_removed,
            &metrics.done,
            &metrics.retried,
            &metrics.dead,
            &metrics.expired,
            &metrics.later,
            &metrics.leases_lost,
            &metrics.stale_completions,
        ] {
            counter.absolute(0);
        }
        metrics
    }
}

impl std::fmt::Debug for PipelineMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PipelineMetrics")
    }
}

/// The share of the workers of `pipeline` that run. Only processes with a pool have the series: 0
/// would mean that no worker runs.
pub(crate) fn workers_share(pipeline: &PipelineName) -> Gauge {
    let gauge = gauge!(WORKERS_SHARE, "pipeline" => pipeline.as_str().to_owned());
    gauge.set(1.0);
    gauge
}

/// Attempts of `pipeline` that are not kept.
pub(crate) fn history_dropped(pipeline: &PipelineName) -> Counter {
    let counter = counter!(HISTORY_DROPPED, "pipeline" => pipeline.as_str().to_owned());
    counter.absolute(0);
    counter
}
