//! How long calls of one server take.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::pressure::Pressure;

/// A write that takes up to this long is never slow: it may hold hundreds of commands.
const NEVER_SLOW: Duration = Duration::from_millis(50);

/// How long calls of one server take at present.
#[derive(Debug)]
pub(super) struct Latency {
    began: Instant,
    present_us: AtomicU32,
    seen: Mutex<Lowest>,
    /// Compares it with the usual latency.
    pressure: Pressure,
}

#[derive(Debug)]
struct Lowest {
    second: u64,
    /// The lowest latencies of this second, and of the one before that had calls, us.
    us: [u32; 2],
}

impl Latency {
    pub(super) fn new() -> Self {
        let seen = Mutex::new(Lowest { second: 0, us: [u32::MAX; 2] });
        let pressure = Pressure::new(NEVER_SLOW);
        Self { began: Instant::now(), present_us: AtomicU32::new(0), seen, pressure }
    }

    /// Notes how long a caller has waited, with the time to connect, whether there was an answer or not.
    pub(super) fn observe_wait(&self, took: Duration) {
        self.pressure.observe(took);
    }

    /// The share of the work for the server that should continue, see [`Pressure::share`].
    pub(super) fn share(&self) -> f64 {
        self.pressure.share()
    }

    /// Notes the latency of a call that was answered, without the time to connect.
    pub(super) fn observe(&self, took: Duration) {
        self.observe_at(took, self.began.elapsed());
    }

    fn observe_at(&self, took: Duration, now: Duration) {
        // Skips this latency if another thread notes one.
        let Ok(mut seen) = self.seen.try_lock() else { return };
        let took = u32::try_from(took.as_micros()).unwrap_or(u32::MAX);
        if now.as_secs() == seen.second {
            seen.us[0] = seen.us[0].min(took);
        } else {
            seen.second = now.as_secs();
            seen.us = [took, seen.us[0]];
        }
        self.present_us.store(seen.us[0].min(seen.us[1]), Ordering::Relaxed);
    }

    /// The latency of a call at present: the lowest one of this second and of the last one with calls;
    /// zero before the first call. It follows a server that becomes slow within two seconds. The
    /// latencies that a process sees when it was frozen do not count: the calls before were quick.
    pub(super) fn present(&self) -> Duration {
        Duration::from_micros(self.present_us.load(Ordering::Relaxed).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_present_latency_follows_a_slow_server_but_no_frozen_process() {
        let latency = Latency::new();
        let ms = || latency.present().as_millis();
        let drive = |from_ms: u64, took_ms: u64, seconds: u64| {
            for at in (from_ms..from_ms + seconds * 1_000).step_by(10) {
                latency.observe_at(Duration::from_millis(took_ms), Duration::from_millis(at));
            }
        };
        assert_eq!(ms(), 0);
        drive(0, 2, 5);
        assert_eq!(ms(), 2);
        for call in 0..20 {
            // It was frozen for 4 s, while 20 calls waited for their answers.
            latency.observe_at(Duration::from_secs(4), Duration::from_millis(9_000 + call));
        }
        assert_eq!(ms(), 2);
        drive(9_100, 2, 3);
        assert_eq!(ms(), 2);
        drive(12_100, 300, 3);
        assert_eq!(ms(), 300);
        drive(15_100, 2, 1);
        assert_eq!(ms(), 2);
    }

    #[test]
    fn the_first_calls_to_a_slow_server_show_that_it_is_slow() {
        let latency = Latency::new();
        latency.observe_at(Duration::from_millis(400), Duration::from_millis(400));
        assert_eq!(latency.present().as_millis(), 400);
    }
}
