//! The gauges of the counters.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::counters::metrics::CounterMetrics;
use crate::id::Sequence;
use crate::queue::sample::{Gauges, Seen};

pub(crate) struct CounterGauges {
    metrics: CounterMetrics,
    oldest: Mutex<Oldest>,
}

impl CounterGauges {
    pub(crate) fn new() -> Self {
        Self { metrics: CounterMetrics::new(), oldest: Mutex::default() }
    }
}

impl Gauges for CounterGauges {
    #[expect(clippy::cast_precision_loss, reason = "counts of what fits into memory")]
    fn show(&self, Seen { view, .. }: &Seen) {
        self.metrics.unflushed.set(view.depth as f64);
        let mut oldest = self.oldest.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = oldest.waited(view.oldest, Instant::now());
        let age = waited.max(Duration::from_millis(view.oldest_age_ms));
        self.metrics.unflushed_oldest.set(age.as_secs_f64());
    }
}

/// The oldest view, and when it was first seen. After the clock was set back, its age by the clock
/// is 0 until the clock has caught up.
#[derive(Debug, Default)]
struct Oldest(Option<(Sequence, Instant)>);

impl Oldest {
    /// How long this view has been the oldest.
    fn waited(&mut self, oldest: Option<Sequence>, now: Instant) -> Duration {
        let since = self.0.filter(|(known, _)| Some(*known) == oldest);
        self.0 = since.or(oldest.map(|oldest| (oldest, now)));
        since.map_or(Duration::ZERO, |(_, since)| now.duration_since(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_view_ages_although_the_clock_was_set_back() {
        let (mut oldest, start) = (Oldest::default(), Instant::now());
        let mut waited = |sequence: Option<u64>, seconds: u64| {
            let now = start + Duration::from_secs(seconds);
            oldest.waited(sequence.map(Sequence::new), now).as_secs()
        };
        assert_eq!(waited(None, 0), 0);
        assert_eq!((waited(Some(7), 10), waited(Some(7), 40)), (0, 30));
        assert_eq!((waited(Some(8), 50), waited(Some(8), 51)), (0, 1), "the first one was written");
        assert_eq!((waited(None, 60), waited(Some(8), 61)), (0, 0));
    }
}
