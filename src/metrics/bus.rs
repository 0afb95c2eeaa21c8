//! The metrics of the bus.

use metrics::{Counter, Gauge, counter, gauge};

use super::{
    BUS_EVENTS, BUS_GAP, BUS_INVALID, BUS_LAG, BUS_PIPELINES, BUS_TOMBSTONES, BUS_TRIMMED,
};

/// The metrics of one bus stream.
#[derive(Clone)]
pub struct BusMetrics {
    /// Events read.
    pub events: Counter,
    /// Unread entries.
    pub lag: Gauge,
    /// Gaps.
    pub gap: Counter,
    /// Entries trimmed.
    pub trimmed: Counter,
}

impl BusMetrics {
    /// The handles of `stream`, at 0.
    #[must_use]
    pub fn new(stream: &str) -> Self {
        let label = || stream.to_owned();
        let metrics = Self {
            events: counter!(BUS_EVENTS, "stream" => label()),
            lag: gauge!(BUS_LAG, "stream" => label()),
            gap: counter!(BUS_GAP, "stream" => label()),
            trimmed: counter!(BUS_TRIMMED, "stream" => label()),
        };
        for counter in [&metrics.events, &metrics.gap, &metrics.trimmed] {
            counter.absolute(0);
        }
        counter!(BUS_TOMBSTONES).absolute(0);
        let reasons = ["field", "size", "json", "msgpack", "attribute", "botid"];
        // Only records of NATS and Kafka have these.
        let of_records = ["header", "format", "data", "plain", "mapping"];
        for reason in reasons.into_iter().chain(of_records) {
            counter!(BUS_INVALID, "reason" => reason).absolute(0);
        }
        metrics
    }
}

impl std::fmt::Debug for BusMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("BusMetrics")
    }
}

/// The number of pipelines that take events from the bus.
#[expect(clippy::cast_precision_loss, reason = "a count of pipelines")]
pub(crate) fn bus_pipelines(count: usize) {
    gauge!(BUS_PIPELINES).set(count as f64);
}

/// A bus entry that cannot be read.
pub fn bus_invalid(reason: &'static str) {
    counter!(BUS_INVALID, "reason" => reason).increment(1);
}
