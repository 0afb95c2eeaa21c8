//! Until when whoever asked waits for the answer: known to all that is done for the request, however
//! deep, so that a store is not asked for what nobody would read.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;

tokio::task_local! {
    static DEADLINE: Instant;
}

/// Lets all that `work` does know.
pub(crate) fn until<T>(
    deadline: Instant,
    work: impl Future<Output = T>,
) -> impl Future<Output = T> {
    DEADLINE.scope(deadline, work)
}

/// `time`, or what is left until the deadline, if that is less; a millisecond at least, since
/// servers take zero for as long as it takes. Only for what one caller alone waits for: who shares an
/// answer must not cut it short for the others.
pub(crate) fn at_most(time: Duration) -> Duration {
    let left = DEADLINE.try_with(|deadline| deadline.duration_since(Instant::now()));
    left.map_or(time, |left| left.max(Duration::from_millis(1)).min(time))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_is_left_bounds_every_time_within_and_none_outside() {
        const LONG: Duration = Duration::from_secs(5);
        assert_eq!(at_most(LONG), LONG);
        let deadline = Instant::now() + Duration::from_secs(2);
        until(deadline, async {
            assert_eq!(at_most(LONG), Duration::from_secs(2));
            assert_eq!(at_most(Duration::from_secs(1)), Duration::from_secs(1));
            tokio::time::advance(Duration::from_secs(3)).await;
            assert_eq!(at_most(LONG), Duration::from_millis(1));
        })
        .await;
    }
}
