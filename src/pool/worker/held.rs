//! Keeping a lease: renewed while something runs, and given back or lost without completed events.

use std::future::poll_fn;
use std::ops::ControlFlow;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{debug, warn};

use super::super::commit::Committed;
use super::super::total::Total;
use super::super::{Shared, sleep_until};
use super::{Ended, Worker};
use crate::queue::Sent;
use crate::redis::scripts::{Completion, Mode};

/// Interval between attempts to renew a lease.
const RENEW_AGAIN: Duration = Duration::from_millis(250);
/// After a hard stop, the leases must be given back within this time.
const LAST_COMMIT: Duration = Duration::from_secs(1);

/// Until when a worker holds its lease, and this process its slices under a total limit, for what runs
/// under them.
///
/// Timers do not suffice: after a pause of the process, a task may be polled before its timers fire, and
/// a task that runs several handlers goes from one to the next in one poll.
#[derive(Debug, Clone)]
pub(super) struct Term {
    lease: Arc<Mutex<Instant>>,
    total: Option<Arc<Total>>,
}

impl Term {
    pub(super) fn new(deadline: Instant, total: Option<Arc<Total>>) -> Self {
        Self { lease: Arc::new(Mutex::new(deadline)), total }
    }

    fn move_to(&self, deadline: Instant) {
        *self.lease.lock().unwrap_or_else(PoisonError::into_inner) = deadline;
    }

    fn is_over(&self) -> bool {
        let lease = *self.lease.lock().unwrap_or_else(PoisonError::into_inner);
        let total = self.total.as_ref().and_then(|total| total.deadline());
        total.map_or(lease, |total| total.min(lease)) <= Instant::now()
    }

    /// Polls `work` only while they are held. After that, it waits to be dropped.
    pub(super) async fn run<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        poll_fn(|context| {
            if self.is_over() {
                // A renewal that has been sent may still be confirmed. Then the work goes on.
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            work.as_mut().poll(context)
        })
        .await
    }
}

impl Worker {
    /// Runs `work`, renewing the lease meanwhile. Cancels it when the lease is lost or a hard stop
    /// starts. This loses nothing: the events are still queued.
    pub(super) async fn while_held<T>(
        &mut self,
        work: impl Future<Output = T>,
    ) -> Result<T, Ended> {
        let shared = Arc::clone(&self.shared);
        let term = self.term.clone();
        let mut work = pin!(work);
        // By reference: a copy would double the memory of each slice.
        let mut work = pin!(term.run(work.as_mut()));
        let (started, mut long) = (Instant::now(), None);
        loop {
            let (renew_at, deadline) = (self.lease.renew_at(), self.lease.deadline());
            tokio::select! {
                biased;
                () = interrupted(&shared) => return Err(Ended::NotHandled),
                () = tokio::time::sleep_until(deadline) => return Err(Ended::LeaseLost),
                done = &mut work => return Ok(done),
                () = tokio::time::sleep_until(renew_at) => {
                    if long.is_none() {
                        long = Some(self.note_long(started));
                    }
                    let mut renewing = pin!(self.renew());
                    tokio::select! {
                        biased;
                        () = interrupted(&shared) => return Err(Ended::NotHandled),
                        // Before the deadline: after a handler that blocked the thread, both have come, and
                        // the lease goes on.
                        renewed = &mut renewing => if renewed.is_break() {
                            return Err(Ended::LeaseLost);
                        },
                        () = tokio::time::sleep_until(deadline) => return Err(Ended::LeaseLost),
                        done = &mut work => return Ok(done),
                    }
                }
            }
        }
    }

    /// Tells operators that this process handles the bot, until the result is dropped.
    fn note_long(&self, started: Instant) -> crate::presence::Noted {
        let since = self.shared.environment.clock.now().saturating_sub(started.elapsed());
        self.shared.meter.long.note(&self.lease.bot, crate::clock::millis(since))
    }

    /// Renews the lease until Redis confirms it; returns whether this worker still holds it. A
    /// renewal without an answer proves nothing, and the next one may find that the lease has
    /// ended.
    pub(super) async fn confirm(&mut self) -> bool {
        let before = self.lease.confirmed_at();
        while self.lease.confirmed_at() == before {
            if self.renew().await.is_break() || !self.lease.is_held() {
                return false;
            }
        }
        true
    }

    /// Renews the lease. Breaks if the lease has ended.
    async fn renew(&mut self) -> ControlFlow<()> {
        let ttl = self.shared.settings.lease_ttl;
        let sent = self.shared.sending(self.lease.shard);
        let deadline = self.lease.deadline();
        let mut renewal = self.lease.renewal(ttl);
        renewal.aside.clone_from(&self.noted);
        let before = std::mem::replace(&mut self.unanswered, true);
        match self.shared.commits.commit(self.lease.shard, renewal, deadline).await {
            Committed::Done | Committed::Full => {
                self.unanswered = false;
                self.extend(sent, ttl);
                ControlFlow::Continue(())
            }
            Committed::Stale => {
                self.unanswered = before;
                ControlFlow::Break(())
            }
            Committed::Unknown => {
                // The attempts ended at the deadline, or the lease has ended.
                tokio::time::sleep(RENEW_AGAIN).await;
                if self.lease.is_held() {
                    ControlFlow::Continue(())
                } else {
                    ControlFlow::Break(())
                }
            }
        }
    }

    /// Applies a renewal.
    pub(super) fn extend(&mut self, sent: Sent, ttl: Duration) {
        self.lease.extend(sent, ttl);
        self.term.move_to(self.lease.deadline());
    }

    /// Ends the lease without completed events.
    pub(super) async fn give_back(&self) {
        self.give_back_with(Mode::Release).await;
    }

    /// Ends the lease in this way, without completed events. Waits at most until the lease ends: then its
    /// place in the pool is free, and the committer goes on alone.
    pub(super) async fn give_back_with(&self, mode: Mode) {
        let (completion, deadline) = self.end_with(mode);
        let commit = self.shared.commits.commit(self.lease.shard, completion, deadline);
        if self.shared.shutdown.hard.is_cancelled() {
            // Otherwise the lease expires by itself.
            let _ = tokio::time::timeout(LAST_COMMIT, commit).await;
        } else {
            let _ = tokio::time::timeout_at(self.lease.deadline(), commit).await;
        }
    }

    /// The end of the lease in this way, without completed events, and until when to send it. After a
    /// renewal without an answer, this is later than the end of the lease: a Redis that was frozen runs
    /// the renewal when it wakes, and then the lease lasts for another ttl, without a holder. It is safe:
    /// nothing is handled under the lease any more, and a later lease has another fence.
    fn end_with(&self, mode: Mode) -> (Completion, Instant) {
        let completion = self.lease.completion((0, 0), mode, 0, Vec::new());
        let deadline = if self.unanswered {
            Instant::now() + self.shared.settings.lease_ttl
        } else {
            self.lease.deadline()
        };
        (completion, deadline)
    }

    /// Whether a lease that ended early was most likely ended by its receiver, through `/v1/leases`
    /// while this worker still waited for its answer. Such a lease is not counted as lost. A lease
    /// that an operator revoked looks the same, so it is not counted either.
    pub(super) fn ended_outside(&self) -> bool {
        self.shared.handler.is_remote() && self.lease.is_held()
    }

    /// Notes that the lease was lost. Whatever was handled under it has ended.
    pub(super) fn lost(&self) {
        if self.unanswered {
            let (release, deadline) = self.end_with(Mode::Release);
            self.shared.commits.commit_unheard(self.lease.shard, release, deadline);
        }
        if self.ended_outside() {
            return debug!("the lease was completed outside, or revoked");
        }
        if self.lease.is_held() {
            // The lease was revoked. An expired lease is counted by the process that reaps it.
            self.shared.metrics.leases_lost.increment(1);
        }
        let (bot, fence) = (&self.lease.bot, self.lease.fence);
        if let Some(suppressed) = self.shared.lost.take() {
            let pipeline = self.shared.queue.name();
            warn!(%pipeline, %bot, %fence, suppressed,
                "the lease was lost before its slice was completed; nothing of it was committed");
        } else {
            debug!(%bot, %fence, "the lease was lost before its slice was completed");
        }
    }
}

/// Waits until no handler may go on: until a hard stop, or until the slices that this process has under a total
/// limit are not confirmed in time.
async fn interrupted(shared: &Shared) {
    let deadline = || shared.total.as_ref().and_then(|total| total.deadline());
    loop {
        let total = deadline();
        tokio::select! {
            biased;
            () = shared.shutdown.hard.cancelled() => return,
            () = sleep_until(total) => {}
        }
        // Renewed meanwhile: it has another deadline.
        if deadline() == total {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::stream::FuturesUnordered;
    use futures_util::task::noop_waker_ref;
    use futures_util::{FutureExt as _, StreamExt as _};

    use super::*;
    use crate::pool::Totals;

    #[test]
    fn work_goes_on_only_while_the_lease_is_held_though_no_timer_fires() {
        let polled = AtomicUsize::new(0);
        let work = poll_fn(|_| {
            polled.fetch_add(1, Ordering::Relaxed);
            Poll::<()>::Pending
        });
        let term = Term::new(Instant::now() + Duration::from_secs(60), None);
        let mut running = pin!(term.run(work));
        let mut context = std::task::Context::from_waker(noop_waker_ref());
        let mut polls = || {
            assert!(running.as_mut().poll(&mut context).is_pending());
            polled.load(Ordering::Relaxed)
        };
        assert_eq!(polls(), 1);
        term.move_to(Instant::now());
        assert_eq!((polls(), polls()), (1, 1), "the lease has ended");
        term.move_to(Instant::now() + Duration::from_secs(60));
        assert_eq!(polls(), 2, "a renewal was confirmed");
    }

    #[test]
    fn work_waits_while_the_slices_under_a_total_limit_are_not_confirmed() {
        let far = Instant::now() + Duration::from_secs(60);
        let polled = |totals| {
            let term = Term::new(far, Total::new(totals).map(Arc::new));
            let mut running = pin!(term.run(std::future::ready(())));
            let mut context = std::task::Context::from_waker(noop_waker_ref());
            running.as_mut().poll(&mut context).is_ready()
        };
        assert!(!polled(Totals { concurrency: Some(3), rate: None }), "none was confirmed yet");
        assert!(polled(Totals::default()));
    }

    #[test]
    fn a_lane_that_was_not_polled_is_polled_again_when_a_renewal_is_confirmed() {
        let term = Term::new(Instant::now(), None);
        let mut lanes: FuturesUnordered<_> =
            [1, 2].map(|lane| term.run(ready(lane))).into_iter().collect();
        assert_eq!(lanes.next().now_or_never(), None, "the lease has ended");
        term.move_to(Instant::now() + Duration::from_secs(60));
        let mut ended = [lanes.next().now_or_never(), lanes.next().now_or_never()];
        ended.sort_unstable();
        assert_eq!(ended, [Some(Some(1)), Some(Some(2))]);
    }
}
