//! Waiting for a condition, instead of sleeping for a fixed time.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
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

/// A machine that stands still for longer may end a lease. The shortest lease is renewed after 0.6 s, and its
/// holder gives it up 1.02 s later.
pub const LEASE_STALL: Duration = Duration::from_millis(900);

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

/// The pause after a condition that took so long. A condition that needs the processor slows down what it
/// waits for, so a short one has at most a fifth of the time. A long wait asks less often: that delays it
/// by at most 0.5 %.
fn pause(took: Duration, waited: Duration) -> Duration {
    (4 * took).max(waited / 200).clamp(POLL, POLL_MAX)
}

/// Measures the longest pause of the machine, for tests of times that such a pause would exceed.
#[derive(Debug)]
pub struct Stalls(Arc<Pauses>);

#[derive(Debug)]
struct Pauses {
    begun: Instant,
    /// When the measurement last ran, in ms after its beginning.
    looked_ms: AtomicU64,
    longest_ms: AtomicU64,
}

impl Pauses {
    fn since(begun: Instant) -> Self {
        Self { begun, looked_ms: AtomicU64::new(0), longest_ms: AtomicU64::new(0) }
    }

    /// The time since the measurement last ran.
    fn gap_ms(&self) -> u64 {
        let now = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        now.saturating_sub(self.looked_ms.load(Ordering::SeqCst))
    }
}

impl Stalls {
    /// Starts to measure, until it is dropped.
    pub fn watch() -> Self {
        let pauses = Arc::new(Pauses::since(Instant::now()));
        let watched = Arc::downgrade(&pauses);
        std::thread::spawn(move || {
            while let Some(pauses) = watched.upgrade() {
                std::thread::sleep(POLL);
                let gap = pauses.gap_ms();
                pauses.longest_ms.fetch_max(gap, Ordering::SeqCst);
                pauses.looked_ms.fetch_add(gap, Ordering::SeqCst);
            }
        });
        Self(pauses)
    }

    /// The longest pause so far. The test may run before the measurement after a pause, so this includes
    /// the time since the measurement last ran.
    pub fn longest(&self) -> Duration {
        let gap = self.0.gap_ms();
        Duration::from_millis(gap.max(self.0.longest_ms.load(Ordering::SeqCst)))
    }
}

/// Measures something that must take less than a limit. A pause of the machine adds to the limit.
#[derive(Debug)]
pub struct Stopwatch {
    stalls: Stalls,
    begun: Instant,
}

impl Stopwatch {
    /// Starts to measure.
    pub fn start() -> Self {
        Self { stalls: Stalls::watch(), begun: Instant::now() }
    }

    /// Asserts that less time than this has passed since the start.
    ///
    /// # Panics
    /// If more time has passed.
    #[track_caller]
    pub fn within(&self, limit: Duration, what: &str) {
        self.within_steps(limit, 1, what);
    }

    /// The same for steps one after the other. A pause of the machine may delay each of them.
    ///
    /// # Panics
    /// If more time has passed.
    #[track_caller]
    pub fn within_steps(&self, limit: Duration, steps: u32, what: &str) {
        let (took, stall) = (self.begun.elapsed(), self.stalls.longest());
        assert!(
            took < limit + steps * stall,
            "{what}: {took:?} instead of {limit:?}, and the machine stood still for {stall:?}"
        );
    }
}

/// Waits for a promised time, and as long again as the machine stood still meanwhile.
pub async fn promised(time: Duration) {
    let stalls = Stalls::watch();
    tokio::time::sleep(time).await;
    tokio::time::sleep(stalls.longest()).await;
}

/// Runs assertions, and returns whether they hold. If one fails, its panic goes on, unless there is an
/// excuse, such as a pause of the machine: then the caller tries again.
pub fn judged(is_excused: bool, judge: impl FnOnce()) -> bool {
    match catch_unwind(AssertUnwindSafe(judge)) {
        Ok(()) => true,
        Err(_) if is_excused => false,
        Err(panic) => resume_unwind(panic),
    }
}

/// Tries until it is shown. The last try has no excuse: the argument is whether it is the last one.
///
/// # Panics
/// If no try shows it.
pub async fn tried(tries: usize, mut attempt: impl AsyncFnMut(bool) -> bool) {
    for number in 1..=tries {
        // A try is often a whole test, whose future is large.
        if Box::pin(attempt(number == tries)).await {
            return;
        }
    }
    panic!("the machine was too slow in every one of {tries} tries");
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
        [(0, 0, POLL), (40, 40, ms(160)), (0, 4_000, ms(20)), (3_000, 3_000, POLL_MAX)]
    {
        assert_eq!(pause(ms(took), ms(waited)), expected, "{took} ms of {waited} ms");
    }
}

#[tokio::test]
#[should_panic(expected = "not within 0ns: pigs fly")]
async fn eventually_names_the_condition_that_failed() {
    eventually(Duration::ZERO, "pigs fly", async || false).await;
}

#[test]
fn a_pause_counts_although_the_measurement_has_not_run_since() {
    let pause = Duration::from_secs(2);
    let begun = Instant::now().checked_sub(pause).unwrap();
    assert!(Stalls(Arc::new(Pauses::since(begun))).longest() >= pause);
}

#[test]
fn failed_assertions_are_tried_again_with_an_excuse_only() {
    for is_excused in [true, false] {
        assert!(judged(is_excused, || {}));
    }
    assert!(!judged(true, || panic!("excused")));
    let panic = catch_unwind(|| judged(false, || panic!("it goes on"))).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"it goes on"));
}

#[test]
fn a_pause_of_the_machine_may_delay_each_step() {
    let ago = |seconds| Instant::now().checked_sub(Duration::from_secs(seconds)).unwrap();
    let watch = Stopwatch { stalls: Stalls(Arc::new(Pauses::since(ago(2)))), begun: ago(4) };
    let limit = Duration::from_secs(1);
    watch.within_steps(limit, 2, "two steps");
    assert!(!judged(true, || watch.within(limit, "one step")), "4 s are not within 1 s and 2 s");
}

#[tokio::test]
async fn the_last_try_knows_that_it_is_the_last() {
    let mut tries = Vec::new();
    tried(3, async |is_last| {
        tries.push(is_last);
        is_last
    })
    .await;
    assert_eq!(tries, [false, false, true]);
}

#[tokio::test]
#[should_panic(expected = "the machine was too slow in every one of 2 tries")]
async fn tries_that_show_nothing_fail() {
    tried(2, async |_| false).await;
}
