//! The times of the quiet bots, and the verdict.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock, micros};
use fairlane::sandbox::{quantile_ms, waits};
use hdrhistogram::Histogram;
use serde::Serialize;

use super::resource::Resource;

/// How long the receiver waits for the last events of a phase. A lost one counts with this time.
pub(super) const PATIENCE: Duration = Duration::from_secs(15);
/// The maximum of the quiet bots' p99 beside the hostile one, in relation to their p99 alone.
const RATIO_MAX: f64 = 1.5;
/// The maximum difference of the two, if that allows more.
const SLACK_MS: f64 = 25.0;

/// What happened to the work of the quiet bots in one phase.
#[derive(Debug)]
pub(super) struct Tally {
    waits: Mutex<Histogram<u64>>,
    expected: AtomicU64,
    done: AtomicU64,
    refused: AtomicU64,
}

impl Tally {
    pub(super) fn new() -> Self {
        let none = || AtomicU64::new(0);
        Self { waits: Mutex::new(waits()), expected: none(), done: none(), refused: none() }
    }

    /// One more piece of work is on its way.
    pub(super) fn expect(&self) {
        self.expected.fetch_add(1, Ordering::Relaxed);
    }

    /// It was refused, or its request failed.
    pub(super) fn refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// It is done. `due_us` is when it was due, µs since 1970.
    pub(super) fn done(&self, due_us: u64) {
        self.record(micros(SystemClock.now()).saturating_sub(due_us));
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether nothing is on its way any more.
    pub(super) fn is_complete(&self) -> bool {
        self.lost() == 0
    }

    fn lost(&self) -> u64 {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        count(&self.expected).saturating_sub(count(&self.done) + count(&self.refused))
    }

    fn record(&self, wait_us: u64) {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        waits.saturating_record(wait_us.max(1));
    }

    /// The figures of the phase, which is over.
    pub(super) fn take(&self) -> Phase {
        let lost = self.lost();
        for _ in 0..lost {
            self.record(micros(PATIENCE));
        }
        let waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let refused = self.refused.load(Ordering::Relaxed);
        Phase { waits, refused, lost, ..Phase::default() }
    }
}

/// The figures of one phase, or of several.
#[derive(Debug, Clone)]
pub(super) struct Phase {
    pub(super) waits: Histogram<u64>,
    pub(super) refused: u64,
    pub(super) lost: u64,
    /// The largest memory of the process, MB.
    pub(super) memory_mb: Option<u64>,
    /// Lines in the log of the process, per second.
    pub(super) log_lines: f64,
}

impl Default for Phase {
    fn default() -> Self {
        Self { waits: waits(), refused: 0, lost: 0, memory_mb: None, log_lines: 0.0 }
    }
}

impl Phase {
    /// Adds another phase of the same kind.
    pub(super) fn add(&mut self, other: &Self) {
        // Both have the same bounds.
        let _ = self.waits.add(&other.waits);
        self.refused += other.refused;
        self.lost += other.lost;
        self.memory_mb = self.memory_mb.max(other.memory_mb);
        self.log_lines = self.log_lines.max(other.log_lines);
    }
}

/// Whether a hostile bot stays without effect on the quiet ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    Held,
    Failed,
    Skipped,
}

impl Verdict {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Failed => "FAILED",
            Self::Skipped => "skipped",
        }
    }
}

/// The results for one resource.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Line {
    pub(crate) resource: Resource,
    /// What is measured: `publish to handled`, `lateness`, or `request`.
    pub(crate) measure: &'static str,
    pub(crate) verdict: Verdict,
    pub(crate) alone_p50_ms: f64,
    pub(crate) alone_p99_ms: f64,
    pub(crate) beside_p50_ms: f64,
    pub(crate) beside_p99_ms: f64,
    /// `beside_p99_ms` divided by `alone_p99_ms`.
    pub(crate) ratio: f64,
    /// Pieces of work of the quiet bots beside the hostile one.
    pub(crate) samples: u64,
    /// Refused or failed requests of the quiet bots.
    pub(crate) refused_alone: u64,
    pub(crate) refused_beside: u64,
    /// Not done 15 s after the end of a phase; removed dead letters count too.
    pub(crate) lost: u64,
    /// The largest memory of the process.
    pub(crate) memory_alone_mb: Option<u64>,
    pub(crate) memory_beside_mb: Option<u64>,
    /// Lines that the process logs beside the hostile bot.
    pub(crate) log_lines_per_second: f64,
    /// Why the resource was skipped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) note: Option<String>,
}

impl Line {
    pub(super) fn new(resource: Resource, alone: &Phase, beside: &Phase) -> Self {
        let at = |phase: &Phase, quantile| quantile_ms(&phase.waits, quantile);
        let (alone_p99_ms, beside_p99_ms) = (at(alone, 0.99), at(beside, 0.99));
        let is_held = is_held(alone_p99_ms, beside_p99_ms)
            && beside.refused <= alone.refused
            && beside.lost == 0
            && !beside.waits.is_empty();
        Self {
            resource,
            measure: measure(resource),
            verdict: if is_held { Verdict::Held } else { Verdict::Failed },
            alone_p50_ms: at(alone, 0.5),
            alone_p99_ms,
            beside_p50_ms: at(beside, 0.5),
            beside_p99_ms,
            ratio: if alone_p99_ms > 0.0 { beside_p99_ms / alone_p99_ms } else { 0.0 },
            samples: beside.waits.len(),
            refused_alone: alone.refused,
            refused_beside: beside.refused,
            lost: beside.lost,
            memory_alone_mb: alone.memory_mb,
            memory_beside_mb: beside.memory_mb,
            log_lines_per_second: beside.log_lines,
            note: None,
        }
    }

    pub(super) fn skipped(resource: Resource, note: String) -> Self {
        let nothing = Self::new(resource, &Phase::default(), &Phase::default());
        Self { verdict: Verdict::Skipped, note: Some(note), ..nothing }
    }
}

fn measure(resource: Resource) -> &'static str {
    resource.quiet().first().map_or("", |quiet| quiet.measure())
}

fn is_held(alone_p99_ms: f64, beside_p99_ms: f64) -> bool {
    beside_p99_ms <= (alone_p99_ms * RATIO_MAX).max(alone_p99_ms + SLACK_MS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quiet_bot_may_be_slower_by_half_or_by_25_ms() {
        for (alone, beside, held) in [
            (10.0, 35.0, true),
            (10.0, 36.0, false),
            (100.0, 150.0, true),
            (100.0, 151.0, false),
            (5.0, 4.0, true),
        ] {
            assert_eq!(is_held(alone, beside), held, "{alone} {beside}");
        }
    }

    #[test]
    fn refused_and_lost_work_fails_whatever_the_times_are() {
        let phase = |refused: u64, lost: u64| {
            let tally = Tally::new();
            for n in 0..10 + refused + lost {
                tally.expect();
                match n {
                    n if n < refused => tally.refused(),
                    n if n < refused + lost => {}
                    _ => tally.done(micros(SystemClock.now())),
                }
            }
            tally.take()
        };
        let verdict =
            |alone: &Phase, beside: &Phase| Line::new(Resource::Queue, alone, beside).verdict;
        assert_eq!(verdict(&phase(0, 0), &phase(0, 0)), Verdict::Held);
        assert_eq!(verdict(&phase(0, 0), &phase(1, 0)), Verdict::Failed);
        assert_eq!(verdict(&phase(1, 0), &phase(1, 0)), Verdict::Held);
        assert_eq!(verdict(&phase(0, 0), &phase(0, 1)), Verdict::Failed);
        assert_eq!(
            verdict(&phase(0, 0), &Phase::default()),
            Verdict::Failed,
            "nothing was measured"
        );
    }
}
