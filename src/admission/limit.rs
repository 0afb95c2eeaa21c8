//! The limit of requests in flight. It follows the latency.
//!
//! Once per [`WINDOW`] the P90 of each operation is compared with its baseline: its latency when
//! few requests were in flight. Up to [`TOLERANCE`] times the baseline (and up to [`NEVER_SLOW`] in
//! any case) the latency is good, and the limit grows by its square root if it was reached. Above
//! that, the limit shrinks in proportion to the excess (a gradient, as in Netflix's
//! concurrency-limits).
//!
//! Under constant load there is no moment with few requests in flight. So the limit is occasionally
//! lowered to a few for a moment, to measure the latency then (as BBR does for round trips). This
//! distinguishes a dependency that became slow by itself from an overloaded one.

use std::time::Duration;

use super::{OPERATIONS_MAX, Operation};

/// The limit before the first measurement. If it is too low, it grows within a second, while
/// further requests wait a little. If it were too high, all requests would be late, including the
/// first class.
const FIRST: f64 = 32.0;
/// The minimum limit.
const MIN: f64 = 4.0;
/// Minimum duration of a window.
const WINDOW: Duration = Duration::from_millis(50);
/// Minimum number of samples of a window, unless it lasts for [`WINDOW_LAST`].
const WINDOW_SAMPLES: usize = 16;
const WINDOW_LAST: Duration = Duration::from_secs(1);
/// Number of samples of an operation that give a valid P90.
const SAMPLES_MIN: usize = 8;
/// Maximum number of samples per operation in a window.
const SAMPLES_MAX: usize = 128;
/// A latency up to this multiple of the baseline is good.
const TOLERANCE: f64 = 2.0;
/// The same multiple if the deadlines of callers are shorter.
const TOLERANCE_LEAST: f64 = 1.25;
/// A P90 up to this, in µs, is always good: it is below the noise of a busy machine.
const NEVER_SLOW: f64 = 5_000.0;
/// The fraction of a change that is applied per window.
const STEP: f64 = 0.3;
/// Minimum time between two probes, in general and while the latency is far too high.
const PROBE_EVERY: Duration = Duration::from_secs(10);
const PROBE_SOON: Duration = Duration::from_secs(1);
/// Number of consecutive windows with a far too high latency that trigger a probe.
const PROBE_AFTER: u32 = 4;

/// An answered request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    pub(super) operation: Operation,
    pub(super) took: Duration,
    /// Its deadline.
    pub(super) given: Option<Duration>,
    /// Number of requests in flight, including itself.
    pub(super) in_flight: usize,
    /// Its weight in requests.
    pub(super) places: usize,
}

/// The samples of a window.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    lasted: Duration,
    peak: usize,
    answered: usize,
    took: Duration,
}

/// The result of a window.
#[derive(Debug, Clone, Copy)]
pub(super) struct Verdict {
    pub(super) limit: usize,
    /// The limit for the lower classes.
    pub(super) limit_low: usize,
    /// Whether the latency was good: then the refused requests could have been served.
    pub(super) had_room: bool,
    window: Window,
    is_bound: bool,
}

impl Window {
    /// How many requests are answered in this time, at the rate of the window.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "counts of requests"
    )]
    pub(super) fn answered_in(&self, time: Duration) -> usize {
        let rate = self.answered as f64 / self.lasted.as_secs_f64().max(0.001);
        (rate * time.as_secs_f64()) as usize
    }
}

impl Verdict {
    /// The offered load (served and `shed`) divided by the capacity, both as the number of
    /// concurrent requests that they need (Little's law).
    #[expect(clippy::cast_precision_loss, reason = "counts of requests")]
    pub(super) fn demand_ratio(&self, shed: u64) -> f64 {
        let Window { lasted, answered, took, .. } = self.window;
        let served = took.as_secs_f64() / lasted.as_secs_f64().max(0.001);
        let asked = served * (answered as f64 + shed as f64) / (answered as f64).max(1.0);
        // If the limit was reached, the whole capacity was in use.
        let capacity =
            if self.is_bound { served.min(self.limit as f64) } else { self.limit as f64 };
        asked / capacity.max(0.001)
    }
}

#[derive(Debug, Default, Clone)]
struct Latency {
    /// Latencies in this window, µs.
    samples: Vec<u32>,
    seen: usize,
    /// P90 with few requests in flight, µs.
    baseline: Option<f64>,
    /// Average deadline of the requests that have one, µs.
    given: Option<f64>,
    /// Number of requests of this window that have one.
    timed: usize,
    /// Median latency, µs.
    median: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Probe {
    /// No probe is running.
    No { last: Duration },
    /// The limit was lowered from `from`. The first window still contains earlier requests.
    Settling { from: f64 },
    /// The current window is the measurement.
    Looking { from: f64 },
}

/// Computes the limit.
#[derive(Debug)]
pub(super) struct Limiter {
    limit: f64,
    limit_low: f64,
    operations: Vec<Latency>,
    /// The operations with samples in this window.
    touched: Vec<Operation>,
    begun: Option<Duration>,
    window: Window,
    probe: Probe,
    slow: u32,
    /// Whether the baselines are from a moment with few requests in flight.
    is_sure: bool,
}

const EMPTY: Window = Window { lasted: Duration::ZERO, peak: 0, answered: 0, took: Duration::ZERO };

impl Limiter {
    #[expect(clippy::cast_precision_loss, reason = "a count of requests")]
    pub(super) fn new(max: usize) -> Self {
        Self {
            limit: FIRST.min(max as f64).max(1.0),
            limit_low: FIRST.min(max as f64).max(1.0),
            operations: vec![Latency::default(); OPERATIONS_MAX],
            touched: Vec::new(),
            begun: None,
            window: EMPTY,
            probe: Probe::No { last: Duration::ZERO },
            slow: 0,
            is_sure: false,
        }
    }

    /// The current limit.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 1 and the maximum"
    )]
    pub(super) fn limit(&self) -> usize {
        self.limit as usize
    }

    /// When the current window began; `None`: before the first sample.
    pub(super) fn begun(&self) -> Option<Duration> {
        self.begun
    }

    /// Adds a sample; returns the window when it is complete.
    pub(super) fn observe(&mut self, sample: Sample, now: Duration) -> Option<Window> {
        let begun = *self.begun.get_or_insert(now);
        let number = usize::from(sample.operation.0) % OPERATIONS_MAX;
        let latency = &mut self.operations[number];
        let micros = u32::try_from(sample.took.as_micros()).unwrap_or(u32::MAX);
        if latency.seen == 0 {
            self.touched.push(sample.operation);
        }
        if latency.samples.len() < SAMPLES_MAX {
            latency.samples.push(micros);
        } else {
            latency.samples[latency.seen % SAMPLES_MAX] = micros;
        }
        latency.seen += 1;
        if let Some(given) = sample.given {
            latency.timed += 1;
            let given = given.as_secs_f64() * 1e6;
            let known = latency.given.unwrap_or(given);
            latency.given = Some(known + 0.05 * (given - known));
        }
        self.window.peak = self.window.peak.max(sample.in_flight);
        self.window.answered += 1;
        let places = u32::try_from(sample.places).unwrap_or(u32::MAX);
        self.window.took += sample.took.saturating_mul(places);
        let lasted = now.saturating_sub(begun);
        let is_full = lasted >= WINDOW && self.window.answered >= WINDOW_SAMPLES;
        (is_full || lasted >= WINDOW_LAST).then(|| {
            self.begun = Some(now);
            Window { lasted, ..std::mem::replace(&mut self.window, EMPTY) }
        })
    }

    /// Evaluates a window. Calls `median` with the usual latency of each operation, µs.
    #[expect(clippy::cast_precision_loss, reason = "counts of requests")]
    pub(super) fn adjust(
        &mut self,
        window: &Window,
        is_bound: bool,
        max: usize,
        now: Duration,
        mut median: impl FnMut(Operation, u32),
    ) -> Verdict {
        let max = max as f64;
        let little = !is_bound && (window.peak as f64) <= (self.limit / 16.0).max(2.0);
        self.is_sure |= little;
        let is_looking = matches!(self.probe, Probe::Looking { .. });
        let (mut ratios, mut samples) = (0.0, 0.0);
        for operation in std::mem::take(&mut self.touched) {
            let latency = &mut self.operations[usize::from(operation.0) % OPERATIONS_MAX];
            let seen = std::mem::take(&mut latency.seen);
            let timed = std::mem::take(&mut latency.timed);
            let Some((middle, p90)) = quantiles(&mut latency.samples) else {
                latency.samples.clear();
                continue;
            };
            latency.samples.clear();
            let old = latency.median;
            latency.median = if old == 0.0 { middle } else { old + 0.3 * (middle - old) };
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "µs that came from a u32"
            )]
            median(operation, latency.median as u32);
            let baseline = match latency.baseline {
                None => p90,
                Some(_) if is_looking => p90,
                Some(known) if little => known + 0.3 * (p90 - known),
                Some(known) => known.min(p90),
            };
            latency.baseline = Some(baseline);
            let good = (baseline * TOLERANCE).max(NEVER_SLOW);
            // An answer after half of its deadline is too late for some callers. But the latency
            // cannot be below the one without load. Callers with deadlines count as their part of
            // the requests, so a few of them do not decide for all.
            let good = latency.given.map_or(good, |given| {
                let in_time = good.min(given / 2.0).max(baseline * TOLERANCE_LEAST);
                good + timed as f64 / seen as f64 * (in_time - good)
            });
            // Without a microsecond at least, the limit would be no number.
            ratios += p90 / good.max(1.0) * seen as f64;
            samples += seen as f64;
        }
        let slowness = if samples > 0.0 { ratios / samples } else { 1.0 };
        let had_room = samples > 0.0 && slowness < 1.0 && matches!(self.probe, Probe::No { .. });
        self.slow = if slowness > 2.0 { self.slow + 1 } else { 0 };
        match self.probe {
            Probe::Settling { from } => self.probe = Probe::Looking { from },
            Probe::Looking { from } => {
                self.is_sure = true;
                self.limit = from;
                self.limit_low = from;
                self.slow = 0;
                self.probe = Probe::No { last: now };
            }
            Probe::No { last } => {
                let pause = now.saturating_sub(last);
                let is_due =
                    pause >= PROBE_EVERY || (pause >= PROBE_SOON && self.slow >= PROBE_AFTER);
                if is_bound && ((slowness > 1.0 && is_due) || !self.is_sure) {
                    self.probe = Probe::Settling { from: self.limit };
                    // If only requests of the first class are in flight, the probe must use them,
                    // but should affect them as little as possible.
                    self.limit_low = MIN;
                    self.limit = (self.limit / 4.0).max(MIN);
                } else {
                    let gradient = (1.0 / slowness).clamp(0.5, 1.0);
                    let growth = if is_bound { self.limit.sqrt() } else { 0.0 };
                    // A limit that is far from being reached does not cause the latency.
                    if is_bound || window.peak as f64 * 2.0 >= self.limit {
                        let next = self.limit * gradient + growth;
                        self.limit += STEP * (next - self.limit);
                    }
                    self.limit_low = self.limit;
                }
            }
        }
        self.limit = self.limit.clamp(MIN.min(max), max.max(1.0));
        self.limit_low = self.limit_low.clamp(MIN.min(max), self.limit);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "as the limit")]
        let limit_low = self.limit_low as usize;
        Verdict { limit: self.limit(), limit_low, had_room, window: *window, is_bound }
    }
}

/// The median and the P90, if there are enough samples.
fn quantiles(samples: &mut [u32]) -> Option<(f64, f64)> {
    if samples.len() < SAMPLES_MIN {
        return None;
    }
    let last = samples.len() - 1;
    let (_, p90, _) = samples.select_nth_unstable(last * 9 / 10);
    let p90 = f64::from(*p90);
    let (_, median, _) = samples.select_nth_unstable(last / 2);
    Some((f64::from(*median), p90))
}

#[cfg(test)]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "small counts of a simulation"
)]
mod tests;
