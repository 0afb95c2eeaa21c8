//! The gauges of the notifications.

use crate::notifications::metrics::DueMetrics;
use crate::queue::sample::{Gauges, Seen};

pub(crate) struct DueGauges(DueMetrics);

impl DueGauges {
    pub(crate) fn new() -> Self {
        Self(DueMetrics::new())
    }
}

impl Gauges for DueGauges {
    fn watches_delayed(&self) -> bool {
        true
    }

    #[expect(clippy::cast_precision_loss, reason = "counts of what fits into memory")]
    fn show(&self, Seen { view, overdue_ms }: &Seen) {
        self.0.due.set(view.delayed as f64);
        // A notification that was queued in time may still wait for a worker.
        let overdue_ms = (*overdue_ms).max(view.oldest_age_ms);
        self.0.overdue.set(overdue_ms as f64 / 1_000.0);
    }
}
