//! Waiting for a condition. The only place in the tests that sleeps.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(5);
/// Timeouts are meant for a machine that has nothing else to do. Waiting longer costs a test that
/// passes nothing; what is promised within a time is asserted by the tests that promise it.
const PATIENCE: u32 = 3;
/// A question that takes so much longer than the wait is never answered.
const ANSWER: Duration = Duration::from_secs(30);

/// Returns once the condition holds.
///
/// # Panics
/// When it does not within the timeout, or when nobody knows half a minute after it.
pub(crate) async fn eventually(
    timeout: Duration,
    description: &str,
    mut condition: impl AsyncFnMut() -> bool,
) {
    let (started, timeout) = (Instant::now(), timeout * PATIENCE);
    loop {
        let answers = timeout.saturating_sub(started.elapsed()) + ANSWER;
        let Ok(holds) = tokio::time::timeout(answers, condition()).await else {
            panic!("no answer within {:?}: {description}", started.elapsed());
        };
        if holds {
            return;
        }
        assert!(started.elapsed() < timeout, "not within {timeout:?}: {description}");
        tokio::time::sleep(POLL).await;
    }
}

/// Measures how long the machine stood still, for promises of time that it cannot break.
#[derive(Debug)]
pub(crate) struct Stalls {
    longest_ms: Arc<AtomicU64>,
    /// The measurement ends when this is gone.
    _running: Arc<()>,
}

impl Stalls {
    /// Starts to measure, until it is dropped.
    pub(crate) fn watch() -> Self {
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

    /// The longest time so far.
    pub(crate) fn longest(&self) -> Duration {
        Duration::from_millis(self.longest_ms.load(Ordering::Relaxed))
    }
}

/// [`eventually`] for code without a runtime: whether the condition came to hold.
pub(crate) fn holds_within(timeout: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let started = Instant::now();
    while !condition() {
        if started.elapsed() >= timeout {
            return false;
        }
        std::thread::sleep(POLL);
    }
    true
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

#[tokio::test]
#[should_panic(expected = "not within 0ns: pigs fly")]
async fn eventually_names_the_condition_that_failed() {
    eventually(Duration::ZERO, "pigs fly", async || false).await;
}
