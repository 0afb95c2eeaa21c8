//! The metrics of the counters.

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use crate::metrics::{
    COUNTERS_CACHE_HITS, COUNTERS_CACHE_MISSES, COUNTERS_FLUSH_SECONDS, COUNTERS_UNFLUSHED,
    COUNTERS_UNFLUSHED_OLDEST, COUNTERS_VIEWS,
};

/// Metrics of the counters. Every series exists from the start, at 0.
#[derive(Clone)]
pub(crate) struct CounterMetrics {
    pub(crate) views: Counter,
    pub(crate) flush_seconds: Histogram,
    pub(crate) unflushed: Gauge,
    pub(crate) unflushed_oldest: Gauge,
    pub(crate) cache_hits: Counter,
    pub(crate) cache_misses: Counter,
}

impl CounterMetrics {
    /// Creates the handles and sets the series to 0.
    pub(crate) fn new() -> Self {
        let metrics = Self {
            views: counter!(COUNTERS_VIEWS),
            flush_seconds: histogram!(COUNTERS_FLUSH_SECONDS),
            unflushed: gauge!(COUNTERS_UNFLUSHED),
            unflushed_oldest: gauge!(COUNTERS_UNFLUSHED_OLDEST),
            cache_hits: counter!(COUNTERS_CACHE_HITS),
            cache_misses: counter!(COUNTERS_CACHE_MISSES),
        };
        for counter in [&metrics.views, &metrics.cache_hits, &metrics.cache_misses] {
            counter.absolute(0);
        }
        for gauge in [&metrics.unflushed, &metrics.unflushed_oldest] {
            gauge.set(0.0);
        }
        metrics
    }
}

impl std::fmt::Debug for CounterMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CounterMetrics")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Kind, METRICS, Metric, install, render};

    #[test]
    fn every_metric_of_the_counters_is_exported_from_the_start() {
        install().unwrap();
        let _handles = CounterMetrics::new();
        let text = render();
        let of_counters = |metric: &&Metric| metric.name.starts_with("fairlane_counters_");
        for Metric { name, kind, .. } in METRICS.iter().filter(of_counters) {
            assert!(text.contains(&format!("# TYPE {name} ")), "{name} is missing in\n{text}");
            let series =
                if *kind == Kind::Seconds { format!("{name}_count") } else { (*name).to_owned() };
            assert!(text.contains(&format!("\n{series} ")), "{series} is missing in\n{text}");
        }
    }
}
