//! Claims: takes leases, reads their events and starts their workers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use redis::{Pipeline, Value};
use tracing::{info, warn};

use super::board::Ask;
use super::retry::isolate_after_failure;
use super::total::{Reserved, Share};
use super::{Shared, worker};
use crate::event::Event;
use crate::queue::{CLAIM_TTL, FAIR_SLICE_US, Lease, Sent};
use crate::redis::scripts::{Claim, ReadSlice};
use crate::redis::{RedisError, Reply};
use crate::telemetry::{Outage, Recovered};

/// Maximum number of bytes of a slice, unless its first event alone has more: a bot with large events
/// must not use up the memory of the process.
pub(super) const SLICE_BYTES: usize = 4 << 20;

/// The log state of claims and reads that fail, shared by all pipelines.
static CLAIMS: Outage = Outage::shared();
static READS: Outage = Outage::shared();

/// Groups claims by the server of their shards.
pub(super) fn by_holder(shared: &Shared, asks: Vec<Ask>) -> impl Iterator<Item = Vec<Ask>> {
    let link = shared.queue.link();
    let mut holders: BTreeMap<usize, Vec<Ask>> = BTreeMap::new();
    for ask in asks {
        holders.entry(link.holder(shared.queue.keys(ask.shard))).or_default().push(ask);
    }
    holders.into_values()
}

/// Sends the claims in one write. The leased events are read and handled while the next claim runs.
pub(super) async fn claim(shared: &Arc<Shared>, asks: Vec<Ask>, reserved: Reserved) {
    let ttl = CLAIM_TTL.min(shared.settings.lease_ttl);
    let calls: Vec<Claim<'_>> = asks
        .iter()
        .map(|ask| Claim {
            keys: shared.queue.keys(ask.shard),
            max: ask.max,
            bound: ask.bound,
            ttl_ms: crate::clock::millis(ttl),
            seen: ask.seen,
            slice_us: FAIR_SLICE_US,
            alone: ask.alone,
            isolate: if shared.queue.ledger().is_some() {
                0
            } else {
                isolate_after_failure(shared.settings.batch)
            },
        })
        .collect();
    let sent: Vec<Sent> = asks.iter().map(|ask| shared.sending(ask.shard)).collect();
    let replies = match shared.queue.link().call_all(&calls).await {
        Ok(replies) => replies,
        Err(error) => {
            if let Some(suppressed) = CLAIMS.failed() {
                warn!(pipeline = %shared.queue.name(), %error, suppressed, "cannot claim; retrying");
            }
            for ask in &asks {
                shared.board.failed(ask.shard);
            }
            return;
        }
    };
    let (mut leases, mut failed) = (Vec::new(), false);
    for ((ask, sent), reply) in asks.iter().zip(sent).zip(replies) {
        match reply {
            Ok(mut claimed) => {
                shared.metrics.leases_lost.increment(claimed.vanished);
                let grants = std::mem::take(&mut claimed.leases);
                let (run, now_us) = (&claimed.run, claimed.now_us);
                let lease = |grant| Lease::new(grant, Arc::clone(run), ask.shard, sent, ttl);
                leases.extend(grants.into_iter().map(|grant| lease(grant).granted_at(now_us)));
                shared.board.claimed(ask.shard, &claimed);
            }
            Err(error) => {
                failed = true;
                if let Some(suppressed) = CLAIMS.failed() {
                    warn!(pipeline = %shared.queue.name(), shard = %ask.shard, %error, suppressed,
                        "cannot claim");
                }
                shared.board.failed(ask.shard);
            }
        }
    }
    if !failed && let Some(Recovered { lasted, failures }) = CLAIMS.succeeded() {
        info!(?lasted, failures, "claims are answered again");
    }
    if leases.is_empty() {
        return;
    }
    shared.occupancy.take(leases.len());
    let share = reserved.answered(leases.len(), shared.usual_events());
    // Not awaited: the next claim is sent while the events are read.
    shared.shutdown.spawn(feed(Arc::clone(shared), leases, share));
}

/// Reads the heads of the queues and starts the workers. One write reads all of them, except those of
/// bots that hold more than [`SLICE_BYTES`].
async fn feed(shared: Arc<Shared>, leases: Vec<Lease>, share: Share) {
    let usual = shared.usual_events();
    let events = |lease: &Lease| shared.slice_events(lease, usual).min(share.events);
    let (large, small): (Vec<_>, Vec<_>) =
        leases.into_iter().partition(|lease| lease.queued_bytes > SLICE_BYTES as u64);
    for lease in large {
        let (shared, limit, tokens) = (Arc::clone(&shared), events(&lease), share.tokens());
        shared.shutdown.clone().spawn(async move {
            let place = Release(Arc::clone(&shared));
            let records = read_large(&shared, &lease, limit).await;
            tokens.used(records.as_ref().map_or(0, Vec::len));
            if let Some(records) = records {
                shared.oldest_us.fetch_max(age_us(shared.now(), &records), Ordering::Relaxed);
                worker::run(shared, lease, records, None, place).await;
            }
        });
    }
    let mut oldest_us = 0;
    for (lease, records) in read_small(&shared, small, events).await {
        let place = Release(Arc::clone(&shared));
        share.tokens().used(records.as_ref().map_or(0, Vec::len));
        let Some(records) = records else { continue };
        oldest_us = oldest_us.max(age_us(shared.now(), &records));
        let shared = Arc::clone(&shared);
        let shutdown = shared.shutdown.clone();
        shutdown.spawn(worker::run(shared, lease, records, None, place));
    }
    shared.oldest_us.store(oldest_us, Ordering::Relaxed);
}

/// Reads the first events of these bots in one write; `None` where this fails.
async fn read_small(
    shared: &Shared,
    leases: Vec<Lease>,
    events: impl Fn(&Lease) -> usize,
) -> Vec<(Lease, Option<Vec<Vec<u8>>>)> {
    let mut pipe = Pipeline::with_capacity(leases.len());
    for lease in &leases {
        let last = events(lease) - 1;
        pipe.cmd("LRANGE").arg(shared.queue.keys(lease.shard).queue(&lease.bot)).arg(0).arg(last);
    }
    let mut values = Vec::new();
    if !leases.is_empty() {
        values = noted(shared, leases.len(), shared.queue.link().run_each(&pipe).await)
            .unwrap_or_default();
    }
    let mut values = values.into_iter();
    let mut next = || values.next().and_then(Result::ok).and_then(records);
    leases.into_iter().map(|lease| (lease, next())).collect()
}

/// Reads the first events of a bot with large ones, in a call of its own.
async fn read_large(shared: &Shared, lease: &Lease, limit: usize) -> Option<Vec<Vec<u8>>> {
    let keys = shared.queue.keys(lease.shard);
    let slice = ReadSlice { keys, bot: &lease.bot, limit, bytes: SLICE_BYTES };
    noted(shared, 1, shared.queue.link().call(&slice).await)
}

/// Logs the first of several failures, and their end.
fn noted<T>(shared: &Shared, leases: usize, read: Result<T, RedisError>) -> Option<T> {
    match read {
        Ok(read) => {
            if let Some(Recovered { lasted, failures }) = READS.succeeded() {
                info!(?lasted, failures, "the queues of leased bots can be read again");
            }
            Some(read)
        }
        Err(error) => {
            if let Some(suppressed) = READS.failed() {
                warn!(pipeline = %shared.queue.name(), leases, %error, suppressed,
                    "cannot read the queues of leased bots; their leases run out");
            }
            None
        }
    }
}

/// The age of the first of these records.
pub(super) fn age_us(now: Duration, records: &[Vec<u8>]) -> u64 {
    let now_us = crate::clock::micros(now);
    let arrived = records.first().and_then(|first| Event::sequence_of(first));
    arrived.map_or(0, |arrived| now_us.saturating_sub(arrived.get()))
}

/// Frees the place of one lease, however its worker ends.
pub(super) struct Release(pub(super) Arc<Shared>);

impl Drop for Release {
    fn drop(&mut self) {
        if self.0.occupancy.free(1) {
            self.0.board.changed().notify_one();
        }
    }
}

fn records(value: Value) -> Option<Vec<Vec<u8>>> {
    let mut reply = Reply::new(value).ok()?;
    let mut records = Vec::with_capacity(reply.len());
    while reply.len() > 0 {
        records.push(reply.bytes().ok()??);
    }
    Some(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_age_is_that_of_the_first_event_and_never_negative() {
        let now = Duration::from_secs(10);
        let records = [9_000_000, 1].map(|sequence| Event::record(sequence, b"{}"));
        assert_eq!(age_us(now, &records), 1_000_000);
        assert_eq!(age_us(Duration::from_secs(8), &records), 0, "its clock is behind");
        assert_eq!(age_us(now, &[]), 0);
    }

    #[test]
    fn an_event_that_is_missing_makes_a_slice_unreadable() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let read = |values| records(Value::Array(values));
        assert_eq!(read(vec![text("a"), text("b")]), Some(vec![b"a".to_vec(), b"b".to_vec()]));
        assert_eq!(read(vec![text("a"), Value::Nil]), None);
        assert_eq!(read(Vec::new()), Some(Vec::new()));
    }
}
