//! The deadline of a request. All code that works for the request can read it, so that no store is
//! asked for an answer that would come too late.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;

tokio::task_local! {
    static DEADLINE: Instant;
}

/// Runs `work` with this deadline.
pub(crate) fn until<T>(
    deadline: Instant,
    work: impl Future<Output = T>,
) -> impl Future<Output = T> {
    DEADLINE.scope(deadline, work)
}

/// `time`, or the remaining time until the deadline if that is less. At least a millisecond,
/// because servers interpret zero as no limit. Only for calls of a single caller: shared calls must
/// not use the deadline of one caller.
pub(crate) fn at_most(time: Duration) -> Duration {
    let left = DEADLINE.try_with(|deadline| deadline.duration_since(Instant::now()));
    left.map_or(time, |left| left.max(Duration::from_millis(1)).min(time))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_remaining_time_bounds_every_time_within_and_none_outside() {
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
