//! Waiting for a condition. The only place in the tests that sleeps.

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
async fn eventually_says_what_did_not_happen() {
    eventually(Duration::ZERO, "pigs fly", async || false).await;
}
