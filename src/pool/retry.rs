//! The retry policy.
//!
//! | event | attempt counted | consequence |
//! |---|---|---|
//! | transient failure, panic, handler timeout | yes | the bot is parked for the backoff, then the same event is retried, in order |
//! | the same after `max_attempts` | yes | the event becomes a dead letter, the bot continues |
//! | permanent failure | – | dead letter immediately |
//! | unavailable | no | the bot is parked; the pause grows with the length of the outage |
//! | the lease expired after it was confirmed | yes | the next slices have one event |
//! | the lease expired before that | no | the same |
//!
//! After a lost worker, a panic or a timeout it is unknown which event failed. Such an event
//! becomes a dead letter only after at least one attempt alone, even with `max_attempts = 1`.
//!
//! After a failure, the next slice has one event. If several events failed together and none of them
//! was named, slices grow from there: 1, 2, 4, … up to `batch`, and such a failure starts this again.
//! So a poison event becomes the first one after a few more failures, and is identified exactly,
//! regardless of what the handler reports; and a handler that fails now and then is not asked for each
//! event alone. An event that becomes a dead letter does not count as a success. Slices grow like this
//! also after a receiver did not end a lease that it held (202). After a process lost a lease, `batch`
//! events are handled one by one first, so that an event that ends its process ends few of them.
//!
//! Retries have a budget, a tenth of the first attempts ([`RetryBudget`]). Retries beyond it are
//! delayed, so that first attempts have priority even if everything fails.
//!
//! Backoff: `initial · 2^(attempt − 1)`, at most `max`, times `1 ± jitter` (exponential backoff
//! with bounded jitter, so that bots that failed together do not retry together).

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The settings of the backoff.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Backoff {
    /// The delay before the second attempt.
    pub initial: Duration,
    /// The longest delay.
    pub max: Duration,
    /// The fraction by which each delay varies at random, 0 to 1.
    pub jitter: f64,
}

impl Backoff {
    /// The delay after attempt number `attempt` (from 1) failed: at least `at_least`. `random` in
    /// 0..1 chooses the jitter.
    #[must_use]
    pub fn delay(&self, attempt: u32, random: f64, at_least: Option<Duration>) -> Duration {
        let doublings = attempt.saturating_sub(1).min(31);
        let delay = self.initial.saturating_mul(1 << doublings).min(self.max);
        let factor = 1.0 + self.jitter * (2.0 * random - 1.0);
        delay.mul_f64(factor.max(0.0)).max(at_least.unwrap_or_default())
    }

    /// The delay while a target is unavailable, which it has been for `away`: first `initial`, then
    /// about as long as the outage so far. It grows with time, not with the number of affected
    /// slices, so a short outage does not park any bot for long.
    #[must_use]
    pub fn outage(&self, away: Duration, random: f64) -> Duration {
        let initial = self.initial.as_secs_f64().max(0.001);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a logarithm of a time, at most a few dozen"
        )]
        let step = (1.0 + away.as_secs_f64() / initial).log2() as u32;
        self.delay(step + 1, random, None)
    }
}

/// The number of events until slices are as large as usual again, after any event of a slice failed. The
/// script that claims sets twice as many after a process vanished.
#[must_use]
pub fn isolate_after_failure(batch: usize) -> u32 {
    u32::try_from(batch).unwrap_or(u32::MAX)
}

/// The maximum number of events in the next slice of a bot or a lane, at most `batch`: one while an
/// attempt is `counted` for its first event, then 1, 2, 4, … while they succeed and `isolate` falls.
#[must_use]
pub fn slice_limit(batch: usize, counted: bool, isolate: u32) -> usize {
    if counted {
        return 1;
    }
    let left = usize::try_from(isolate).unwrap_or(usize::MAX);
    (batch.saturating_add(1)).saturating_sub(left).clamp(1, batch.max(1))
}

/// The number of retries that a pool makes without delaying them: a tenth of its first attempts,
/// and a constant rate. If everything fails, first attempts must not wait behind retries.
#[derive(Debug)]
pub struct RetryBudget {
    /// The remaining budget, and when it was last updated.
    left: Mutex<(f64, Instant)>,
}

/// The budget earned per first attempt.
const RETRIES_SHARE: f64 = 0.1;
/// The budget earned per second in any case.
const RETRIES_PER_SECOND: f64 = 10.0;
/// The maximum saved budget.
const RETRIES_MAX: f64 = 100.0;
/// Beyond the budget, a pause is multiplied by this, up to the longest pause.
const RETRIES_SLOWED: u32 = 8;

impl RetryBudget {
    /// A full budget.
    #[must_use]
    pub fn new() -> Self {
        Self { left: Mutex::new((RETRIES_MAX, Instant::now())) }
    }

    /// Notes the first attempts at this many events.
    #[expect(clippy::cast_precision_loss, reason = "events of a slice")]
    pub fn earn(&self, events: usize) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        left.0 = (left.0 + events as f64 * RETRIES_SHARE).min(RETRIES_MAX);
    }

    /// Takes the budget for one retry; `false` if there is none.
    pub fn take(&self) -> bool {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let more = (now - left.1).as_secs_f64() * RETRIES_PER_SECOND;
        *left = ((left.0 + more).min(RETRIES_MAX), now);
        let has = left.0 >= 1.0;
        if has {
            left.0 -= 1.0;
        }
        has
    }

    /// The pause before a retry beyond the budget.
    #[must_use]
    pub fn slowed(pause: Duration, backoff: &Backoff) -> Duration {
        pause.saturating_mul(RETRIES_SLOWED).min(backoff.max).max(pause)
    }
}

impl Default for RetryBudget {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BACKOFF: Backoff =
        Backoff { initial: Duration::from_secs(1), max: Duration::from_secs(300), jitter: 0.2 };

    #[test]
    fn the_delay_doubles_from_initial_to_max() {
        let delays: Vec<u64> =
            (1..=11).map(|attempt| BACKOFF.delay(attempt, 0.5, None).as_secs()).collect();
        assert_eq!(delays, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        let varied = [0.0, 0.25, 1.0].map(|random| BACKOFF.delay(1, random, None).as_millis());
        assert_eq!(varied, [800, 900, 1_200]);
    }

    #[test]
    fn a_short_outage_parks_no_bot_for_long() {
        let pauses: Vec<u64> = [0, 1, 3, 10, 100, 10_000]
            .map(|away| BACKOFF.outage(Duration::from_secs(away), 0.5).as_secs())
            .to_vec();
        assert_eq!(pauses, [1, 2, 4, 8, 64, 300]);
    }

    #[test]
    fn a_targets_wish_to_wait_longer_is_granted() {
        let wish = Some(Duration::from_secs(60));
        assert_eq!(BACKOFF.delay(1, 0.5, wish), Duration::from_secs(60));
        assert_eq!(BACKOFF.delay(9, 0.5, wish), Duration::from_secs(256));
    }

    /// The sizes of the slices until `isolate` is used up, if all of them succeed.
    fn sizes(batch: usize, isolate: u32) -> Vec<usize> {
        let (mut left, mut sizes) = (isolate, Vec::new());
        while left > 0 {
            let size = slice_limit(batch, false, left);
            sizes.push(size);
            left = left.saturating_sub(u32::try_from(size).unwrap());
        }
        sizes
    }

    #[test]
    fn slices_double_after_a_failure_and_stay_alone_for_a_batch_after_a_lost_lease() {
        assert_eq!(sizes(100, isolate_after_failure(100)), [1, 2, 4, 8, 16, 32, 64]);
        let after_loss = sizes(100, 2 * isolate_after_failure(100));
        assert_eq!(after_loss[..100], [1; 100]);
        assert_eq!(after_loss[100..], [1, 2, 4, 8, 16, 32, 64]);
        assert_eq!(sizes(1, isolate_after_failure(1)), [1]);
        // Also with what another version or another `batch` stored.
        assert_eq!(sizes(8, 3), [6]);
        assert_eq!(slice_limit(8, false, u32::MAX), 1);
        assert_eq!(slice_limit(8, true, 0), 1, "the first event is tried alone");
        assert_eq!(slice_limit(8, false, 0), 8);
    }

    #[tokio::test(start_paused = true)]
    async fn a_tenth_of_the_first_attempts_and_ten_a_second_are_tried_again_without_slowing_down() {
        let budget = RetryBudget::new();
        let takes = |budget: &RetryBudget| (0..1_000).filter(|_| budget.take()).count();
        assert_eq!(takes(&budget), 100, "what was saved");
        budget.earn(500);
        assert_eq!(takes(&budget), 50);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(takes(&budget), 20);
        tokio::time::advance(Duration::from_secs(3_600)).await;
        assert_eq!(takes(&budget), 100, "no more than that is saved");
        let slowed = |ms| RetryBudget::slowed(Duration::from_millis(ms), &BACKOFF).as_millis();
        assert_eq!((slowed(1_000), slowed(200_000), slowed(400_000)), (8_000, 300_000, 400_000));
    }

    proptest! {
        #[test]
        fn a_delay_stays_within_jitter_of_its_bounds(attempt in any::<u32>(), random in 0.0..1.0) {
            let delay = BACKOFF.delay(attempt, random, None).as_secs_f64();
            prop_assert!((0.8..=360.0).contains(&delay), "{}", delay);
        }
    }
}
