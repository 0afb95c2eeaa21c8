//! Adaptive backpressure: measures how slow a store is compared to its usual latency, and decides
//! which share of the work for it should continue.
//!
//! More workers do not help a slow store. The share is the usual latency, times a tolerance,
//! divided by the current latency. With a store ten times as slow as usual, about two fifths of the
//! workers continue. The usual latency is the best second of the last minute. A store that stays
//! slow for longer counts as normal again, and gets the full load.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// The latency counts as good up to this multiple of the usual one.
const TOLERANCE: f64 = 4.0;
/// The minimum share.
const LEAST: f64 = 1.0 / 16.0;
/// The weight of one call in the moving average.
const STEP: f64 = 1.0 / 16.0;
/// Number of seconds whose best average is the usual latency.
const SECONDS: usize = 60;
const WHOLE: u32 = 10_000;

/// The latency statistics of one store.
#[derive(Debug)]
pub struct Pressure {
    /// The store never counts as slow up to this latency.
    never_slow: Duration,
    began: Instant,
    /// The share in ten thousandths.
    share: AtomicU32,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    /// The moving average of the latency, s.
    recent: Option<f64>,
    second: u64,
    /// The lowest average of the current second.
    best: f64,
    /// The lowest averages of the previous seconds.
    history: VecDeque<f64>,
}

impl Pressure {
    /// A store that is not slow. It never counts as slow up to the latency `never_slow`.
    #[must_use]
    pub fn new(never_slow: Duration) -> Self {
        let (began, share) = (Instant::now(), AtomicU32::new(WHOLE));
        Self { never_slow, began, share, seen: Mutex::default() }
    }

    /// Notes the latency of a call.
    pub fn observe(&self, took: Duration) {
        self.observe_at(took, self.began.elapsed());
    }

    fn observe_at(&self, took: Duration, now: Duration) {
        // Skips this latency if another thread holds the lock and updates the statistics.
        let Ok(mut seen) = self.seen.try_lock() else { return };
        let took = took.as_secs_f64();
        let recent = seen.recent.map_or(took, |recent| recent + STEP * (took - recent));
        seen.recent = Some(recent);
        if now.as_secs() == seen.second {
            seen.best = if seen.best == 0.0 { recent } else { seen.best.min(recent) };
        } else {
            if seen.best > 0.0 {
                let best = seen.best;
                seen.history.push_back(best);
            }
            if seen.history.len() > SECONDS {
                seen.history.pop_front();
            }
            (seen.second, seen.best) = (now.as_secs(), recent);
        }
        let usual = seen.history.iter().copied().fold(seen.best, f64::min);
        let good = (usual * TOLERANCE).max(self.never_slow.as_secs_f64());
        let share = (good / recent.max(1e-9)).clamp(LEAST, 1.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between 0 and 1"
        )]
        self.share.store((share * f64::from(WHOLE)) as u32, Ordering::Relaxed);
    }

    /// The share of the work for the store that should continue: 1/16 to 1.
    #[must_use]
    pub fn share(&self) -> f64 {
        f64::from(self.share.load(Ordering::Relaxed)) / f64::from(WHOLE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drive(pressure: &Pressure, from_ms: u64, took_ms: u64, seconds: u64) -> f64 {
        for ms in (from_ms..from_ms + seconds * 1_000).step_by(10) {
            pressure.observe_at(Duration::from_millis(took_ms), Duration::from_millis(ms));
        }
        pressure.share()
    }

    #[test]
    fn a_store_ten_times_as_slow_gets_less_work_until_it_recovers() {
        let pressure = Pressure::new(Duration::from_millis(20));
        assert!((drive(&pressure, 0, 8, 5) - 1.0).abs() < 1e-9);
        let slow = drive(&pressure, 5_000, 80, 5);
        assert!((0.35..0.45).contains(&slow), "{slow}");
        assert!((drive(&pressure, 10_000, 8, 5) - 1.0).abs() < 1e-9, "it recovered");
    }

    #[test]
    fn a_quick_store_is_never_slow_and_a_lasting_slowness_is_usual_after_a_minute() {
        let pressure = Pressure::new(Duration::from_millis(20));
        drive(&pressure, 0, 1, 5);
        assert!((drive(&pressure, 5_000, 15, 5) - 1.0).abs() < 1e-9);
        assert!(drive(&pressure, 10_000, 200, 5) < 0.2);
        assert!((drive(&pressure, 15_000, 200, 70) - 1.0).abs() < 1e-9);
    }
}
