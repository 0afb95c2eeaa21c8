//! Leases that the copier takes: of quiet bots that become ready by a copy while this process has
//! free workers. Their events need no claim and no read, because the copier has them at hand.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::claim::{Release, age_us};
use super::{Shared, worker};
use crate::event::Event;
use crate::id::{BotId, Shard};
use crate::queue::{CLAIM_TTL, Lease, Queue, Sent};
use crate::redis::scripts::{Grant, Take, Taken};

/// While a slice takes less than this, a sparse backlog is leased by its copies.
const BRIEF: Duration = Duration::from_millis(1);
/// The leases of a process reach about this much work of a core by the copies of a sparse backlog.
const SPARSE_WORK: Duration = Duration::from_millis(20);
/// The bounds for their number.
const SPARSE_MIN: usize = 128;
const SPARSE_MAX: usize = 1_536;

/// The free workers of a pool, for the copier of the same process.
#[derive(Clone)]
pub(crate) struct Places(pub(super) Arc<Shared>);

impl fmt::Debug for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Places").field("occupancy", &self.0.occupancy).finish()
    }
}

impl Places {
    /// Notes a copy of this number of bytes. `behind`: how late the last entry is, if more are available.
    /// `bots`: of each event.
    pub(crate) fn copied<'a>(
        &self,
        behind: Option<Duration>,
        bytes: usize,
        bots: impl Iterator<Item = &'a BotId>,
    ) {
        let brief = match self.0.estimate.slice() {
            _ if self.0.queue.ledger().is_some() => Some(false),
            Duration::ZERO => None,
            slice => Some(slice < BRIEF),
        };
        match behind {
            Some(late) if bytes > 0 => self.0.deferral.behind(late, bytes, bots, brief),
            Some(late) => self.0.deferral.passed(late),
            None => self.0.deferral.caught_up(),
        }
    }

    /// Commits the waiting completions that should travel with a copy for these bots, over the link of
    /// `queue`. Sends them when it is first polled.
    pub(crate) async fn commit_along<'a>(
        &self,
        queue: &Queue,
        bots: impl Iterator<Item = &'a BotId>,
    ) {
        self.0.commits.commit_along(queue, bots).await;
    }

    /// Whether copies should lease although more entries are available: see [`super::deferral`].
    pub(crate) fn is_sparse(&self) -> bool {
        self.0.deferral.is_sparse() && !self.0.estimate.slice().is_zero()
    }

    fn sparse_places(&self) -> usize {
        sparse_places(self.0.estimate.slice())
    }

    /// Waits until this number of places is free and nobody is ready, at most until a time.
    pub(crate) async fn room(&self, places: usize, until: Instant) {
        let shared = &self.0;
        let is_full = || is_full(shared.occupancy.held(), places, self.sparse_places());
        while (is_full() || shared.board.ready() > 0) && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Reserves places for up to `max` leases. `None` if none is free, or bots that wait already
    /// need them. With a ledger, the handler merges the events that gather in a queue, so none is
    /// taken at once. With a limit over all processes, only the dispatcher knows what is left.
    pub(crate) fn reserve(&self, max: usize) -> Option<Reserved> {
        let shared = &self.0;
        let merges = shared.queue.ledger().is_some();
        let total = shared.total.is_some();
        if merges || total || shared.shutdown.soft.is_cancelled() || shared.board.ready() > 0 {
            return None;
        }
        let at_least = if self.is_sparse() { self.sparse_places() } else { 0 };
        let left = shared.occupancy.reserve(max, at_least);
        (left > 0).then(|| Reserved { shared: Arc::clone(shared), left, asked: 0 })
    }
}

/// The number of leases while the backlog is sparse, if a slice takes so long.
fn sparse_places(slice: Duration) -> usize {
    let slices = SPARSE_WORK.as_nanos() / slice.as_nanos().max(1);
    usize::try_from(slices).unwrap_or(SPARSE_MAX).clamp(SPARSE_MIN, SPARSE_MAX)
}

/// Whether `places` more, or all of them, are too many beside those that are held.
fn is_full(held: usize, places: usize, most: usize) -> bool {
    held + places.min(most) > most
}

/// Reserved places, for the calls of one copy. Unused ones become free when it is dropped.
pub(crate) struct Reserved {
    shared: Arc<Shared>,
    left: usize,
    /// Number of places that calls ask for.
    asked: usize,
}

impl Reserved {
    /// The leases that a call for `bots` bots asks for.
    pub(crate) fn ask(&mut self, bots: usize) -> Take {
        let max = bots.min(self.left - self.asked);
        self.asked += max;
        let ttl = CLAIM_TTL.min(self.shared.settings.lease_ttl);
        Take { max, ttl_ms: crate::clock::millis(ttl), seen: self.shared.board.clock() }
    }

    /// Marks the start of the calls for `shard`.
    pub(crate) fn sending(&self, shard: Shard) -> Sent {
        self.shared.sending(shard)
    }

    /// Starts a worker per lease. `bots`: those of the call, with their encoded events.
    pub(crate) fn start(
        &mut self,
        (shard, sent): (Shard, Sent),
        taken: Taken,
        bots: &[(BotId, Vec<&[u8]>)],
    ) {
        let Taken { run, leases } = taken;
        let pool = &self.shared;
        if leases.is_empty() {
            return;
        }
        let ttl = CLAIM_TTL.min(pool.settings.lease_ttl);
        pool.board.leased(shard, ttl);
        let usual = pool.usual_events();
        let mut oldest_us = 0;
        for taken in leases {
            // A lease without a place ends by itself.
            let (Some((bot, events)), Some(left)) =
                (bots.get(taken.place), self.left.checked_sub(1))
            else {
                continue;
            };
            self.left = left;
            let place = Release(Arc::clone(pool));
            let queued_bytes = 0; // Only claims decide by it how to read the events.
            let grant = Grant {
                bot: bot.clone(),
                fence: taken.fence,
                start: taken.start,
                attempts: taken.attempts,
                aside: taken.aside,
                own: taken.own,
                queued_bytes,
            };
            let lease = Lease::new(grant, Arc::clone(&run), shard, sent, ttl);
            let events = &events[..taken.events.min(events.len())];
            let count = pool.slice_events(&lease, usual);
            let records = (1..).zip(events).take(count);
            let records: Vec<Vec<u8>> =
                records.map(|(nth, event)| Event::record(taken.before + nth, event)).collect();
            oldest_us = oldest_us.max(age_us(pool.now(), &records));
            let is_whole = records.len() == taken.events;
            let whole = is_whole.then(|| pool.commits.watch(&lease));
            let pool = Arc::clone(pool);
            let shutdown = pool.shutdown.clone();
            shutdown.spawn(worker::run(pool, lease, records, whole, place));
        }
        pool.oldest_us.store(oldest_us, Ordering::Relaxed);
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.shared.deferral.leased(self.asked, self.asked.saturating_sub(self.left));
        if self.left > 0 && self.shared.occupancy.free(self.left) {
            self.shared.board.changed().notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn while_the_backlog_is_sparse_the_leases_reach_20_ms_of_work_within_bounds() {
        for (slice_us, places) in [(0, 1_536), (10, 1_536), (20, 1_000), (100, 200), (900, 128)] {
            assert_eq!(sparse_places(Duration::from_micros(slice_us)), places, "{slice_us} us");
        }
    }

    #[test]
    fn a_copy_of_more_bots_than_places_waits_until_all_places_are_free() {
        let full = |held, places| is_full(held, places, 128);
        assert!(!full(0, 500) && full(1, 500));
        assert!(!full(28, 100) && full(29, 100));
    }
}
