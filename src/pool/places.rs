//! Leases that the copier takes: of quiet bots that become ready by a copy while this process has
//! free workers. Their events need no claim and no read, because the copier has them at hand.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::claim::{Release, age_us};
use super::{Shared, worker};
use crate::event::Event;
use crate::id::{BotId, Shard};
use crate::queue::{CLAIM_TTL, Lease, Sent};
use crate::redis::scripts::{Grant, Take, Taken};

/// The free workers of a pool, for the copier of the same process.
#[derive(Clone)]
pub(crate) struct Places(pub(super) Arc<Shared>);

impl fmt::Debug for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Places").field("occupancy", &self.0.occupancy).finish()
    }
}

impl Places {
    /// Notes a copy of this number of bytes. `behind`: how late the last entry is, if more are
    /// available.
    pub(crate) fn copied(&self, behind: Option<Duration>, bytes: usize) {
        match behind {
            Some(late) if bytes > 0 => self.0.deferral.behind(late, bytes),
            Some(_) => {}
            None => self.0.deferral.caught_up(),
        }
    }

    /// Reserves places for up to `max` leases. `None` if none is free, or bots that wait already
    /// need them. With a ledger, the handler merges the events that gather in a queue, so none is
    /// taken at once.
    pub(crate) fn reserve(&self, max: usize) -> Option<Reserved> {
        let shared = &self.0;
        let merges = shared.queue.ledger().is_some();
        if merges || shared.shutdown.soft.is_cancelled() || shared.board.ready() > 0 {
            return None;
        }
        let left = shared.occupancy.reserve(max);
        (left > 0).then(|| Reserved { shared: Arc::clone(shared), left, asked: 0 })
    }
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
            let release = Release(Arc::clone(pool));
            let queued_bytes = 0; // Only claims decide by it how to read the events.
            let grant = Grant {
                bot: bot.clone(),
                fence: taken.fence,
                start: taken.start,
                attempts: taken.attempts,
                weight: taken.weight,
                queued_bytes,
            };
            let lease = Lease::new(grant, Arc::clone(&run), shard, sent, ttl);
            let events = &events[..taken.events.min(events.len())];
            let count = pool.slice_events(&lease, usual);
            let records = (1..).zip(events).take(count);
            let records: Vec<Vec<u8>> =
                records.map(|(nth, event)| Event::record(taken.before + nth, event)).collect();
            oldest_us = oldest_us.max(age_us(pool, &records));
            let pool = Arc::clone(pool);
            pool.shutdown.clone().spawn(async move {
                let _release = release;
                worker::run(pool, lease, records).await;
            });
        }
        pool.oldest_us.store(oldest_us, Ordering::Relaxed);
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if self.left > 0 && self.shared.occupancy.free(self.left) {
            self.shared.board.changed().notify_one();
        }
    }
}
