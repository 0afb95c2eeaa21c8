//! The gauges of the counters.

use crate::counters::metrics::CounterMetrics;
use crate::queue::sample::{Gauges, Seen};

pub(crate) struct CounterGauges(CounterMetrics);

impl CounterGauges {
    pub(crate) fn new() -> Self {
        Self(CounterMetrics::new())
    }
}

impl Gauges for CounterGauges {
    #[expect(clippy::cast_precision_loss, reason = "counts of what fits into memory")]
    fn show(&self, Seen { view, .. }: &Seen) {
        self.0.unflushed.set(view.depth as f64);
        self.0.unflushed_oldest.set(view.oldest_age_ms as f64 / 1_000.0);
    }
}
