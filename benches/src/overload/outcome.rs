//! The results of the requests of a load.

use hdrhistogram::Histogram;

/// The results of the requests of one class.
#[derive(Debug, Clone)]
pub(super) struct Tally {
    pub(super) offered: u64,
    /// Answered with success before the deadline.
    pub(super) good: u64,
    /// Refused: 429, 503, 504.
    pub(super) shed: u64,
    /// No answer before the deadline.
    pub(super) late: u64,
    /// No connection, a broken connection, or another status.
    pub(super) failed: u64,
    /// Latencies of the good answers, µs.
    pub(super) latency: Histogram<u64>,
}

/// The results of a load.
#[derive(Debug, Clone)]
pub(super) struct Outcome {
    pub(super) classes: [Tally; 4],
    /// Latencies of the good answers to all tenants except 0, µs.
    pub(super) others: Histogram<u64>,
    /// The number of their requests.
    pub(super) others_offered: u64,
    /// Per [`TICK`](super::load::TICK): the number of good answers to requests due then, and of
    /// refusals.
    pub(super) timeline: Vec<(u64, u64)>,
    pub(super) seconds: f64,
    /// The 99th percentile of the generator's delay, ms.
    pub(super) lag_p99_ms: f64,
    /// The state of the server's processor meanwhile.
    pub(super) processor: Processor,
    /// The measured capacity, in requests per second.
    pub(super) capacity: f64,
}

/// The state of a processor over some time.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Processor {
    /// The share of the time in which the machine withheld the processor.
    pub(super) away: f64,
    /// The median duration of a fixed small amount of work, µs. The speed of shared machines
    /// varies.
    pub(super) work_us: f64,
}

pub(super) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000, 3).unwrap_or_else(|error| unreachable!("{error}"))
}

impl Outcome {
    pub(super) fn new() -> Self {
        let tally =
            || Tally { offered: 0, good: 0, shed: 0, late: 0, failed: 0, latency: histogram() };
        Self {
            classes: [tally(), tally(), tally(), tally()],
            others: histogram(),
            others_offered: 0,
            timeline: Vec::new(),
            seconds: 0.0,
            lag_p99_ms: 0.0,
            processor: Processor::default(),
            capacity: 0.0,
        }
    }

    pub(super) fn sum(&self, of: impl Fn(&Tally) -> u64) -> u64 {
        self.classes.iter().map(of).sum()
    }

    /// Good answers per second.
    #[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
    pub(super) fn goodput(&self) -> f64 {
        self.sum(|class| class.good) as f64 / self.seconds
    }

    /// Good answers as a share of the capacity.
    pub(super) fn share(&self) -> f64 {
        self.goodput() / self.capacity.max(1.0)
    }

    /// The share of good answers of a class; 1 without requests.
    #[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
    pub(super) fn success(&self, class: usize) -> f64 {
        let Tally { offered, good, .. } = self.classes[class];
        if offered == 0 { 1.0 } else { good as f64 / offered as f64 }
    }

    /// The 99th percentile of the latency of all good answers, ms.
    pub(super) fn p99_ms(&self) -> f64 {
        let mut all = histogram();
        for class in &self.classes {
            let _ = all.add(&class.latency);
        }
        quantile_ms(&all, 0.99)
    }
}

#[expect(clippy::cast_precision_loss, reason = "µs of a bench")]
pub(super) fn quantile_ms(histogram: &Histogram<u64>, quantile: f64) -> f64 {
    histogram.value_at_quantile(quantile) as f64 / 1_000.0
}
