//! Waiting for a condition, instead of sleeping for a fixed time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The shortest pause before a condition is asked again.
const POLL: Duration = Duration::from_millis(5);
/// The longest pause, also after a condition that waits itself.
const POLL_MAX: Duration = Duration::from_millis(250);
/// Multiplies every timeout. Timeouts are chosen for an idle machine, and a longer wait costs
/// nothing when a test passes. Tests of a promised time measure that time themselves.
const PATIENCE: u32 = 3;
/// A condition that takes this much longer than the timeout counts as hanging.
const ANSWER: Duration = Duration::from_secs(30);

/// Returns once the condition holds.
///
/// # Panics
/// If it does not hold within the timeout, or if it gives no answer half a minute after it.
pub async fn eventually(
    timeout: Duration,
    description: &str,
    mut condition: impl AsyncFnMut() -> bool,
) {
    let (started, timeout) = (Instant::now(), timeout * PATIENCE);
    loop {
        let asked = Instant::now();
        let answers = timeout.saturating_sub(started.elapsed()) + ANSWER;
        let Ok(holds) = tokio::time::timeout(answers, condition()).await else {
            panic!("no answer within {:?}: {description}", started.elapsed());
        };
        if holds {
            return;
        }
        assert!(started.elapsed() < timeout, "not within {timeout:?}: {description}");
        tokio::time::sleep(pause(asked.elapsed(), started.elapsed())).await;
    }
}

/// The pause after a condition that took so long. A condition that needs much of the processor would
/// slow down what it waits for. A long wait asks less often: that delays it by at most 0.5 %.
fn pause(took: Duration, waited: Duration) -> Duration {
    took.max(waited / 200).clamp(POLL, POLL_MAX)
}

/// Measures the longest pause of the machine, for tests of times that such a pause would exceed.
#[derive(Debug)]
pub struct Stalls {
    longest_ms: Arc<AtomicU64>,
    /// The measurement ends when this is gone.
    _running: Arc<()>,
}

impl Stalls {
    /// Starts to measure, until it is dropped.
    pub fn watch() -> Self {
        let (longest_ms, running) = (Arc::new(AtomicU64::new(0)), Arc::new(()));
        let (longest, watched) = (Arc::clone(&longest_ms), Arc::downgrade(&running));
        std::thread::spawn(move || {
            let mut last = Instant::now();
            while watched.strong_count() > 0 {
                std::thread::sleep(POLL);
                let now = Instant::now();
                let gap = u64::try_from((now - last).as_millis()).unwrap_or(u64::MAX);
                longest.fetch_max(gap, Ordering::Relaxed);
                last = now;
            }
        });
        Self { longest_ms, _running: running }
    }

    /// The longest pause so far.
    pub fn longest(&self) -> Duration {
        Duration::from_millis(self.longest_ms.load(Ordering::Relaxed))
    }
}

/// [`eventually`] for code without a runtime. Returns whether the condition held in time.
pub fn holds_within(timeout: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let started = Instant::now();
    loop {
        let asked = Instant::now();
        if condition() {
            return true;
        }
        if started.elapsed() >= timeout {
            return false;
        }
        std::thread::sleep(pause(asked.elapsed(), started.elapsed()));
    }
}

#[tokio::test]
async fn eventually_asks_until_the_condition_holds() {
    let mut asked = 0;
    eventually(Duration::from_secs(10), "asked three times", async || {
        asked += 1;
        asked == 3
    })
    .await;
    assert_eq!(asked, 3);
}

#[test]
fn an_expensive_condition_is_asked_less_often_and_every_one_after_a_long_wait() {
    let ms = Duration::from_millis;
    for (took, waited, expected) in
        [(0, 0, POLL), (40, 40, ms(40)), (0, 4_000, ms(20)), (3_000, 3_000, POLL_MAX)]
    {
        assert_eq!(pause(ms(took), ms(waited)), expected, "{took} ms of {waited} ms");
    }
}

#[tokio::test]
#[should_panic(expected = "not within 0ns: pigs fly")]
async fn eventually_names_the_condition_that_failed() {
    eventually(Duration::ZERO, "pigs fly", async || false).await;
}
