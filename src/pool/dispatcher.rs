//! The dispatcher: claims bots while there is room for them, round by round.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::time::Instant;
use tracing::info;

use super::claim::{by_holder, claim};
use super::scale::{self, Load, Scaler};
use super::total::{Asked, Reserved};
use super::{Shared, sleep_until, small};
use crate::queue::FAIR_SLICE;

/// The work that may be claimed before workers are free.
const PREFETCH: Duration = Duration::from_millis(1);
/// Maximum number of leases claimed before workers are free.
const PREFETCH_MAX: usize = 512;
/// In a cluster, a slower server does not hold up claims from the others.
const PATIENCE: Duration = Duration::from_millis(100);
/// The dispatcher looks at the load at least this often while the process holds leases.
const LOOK: Duration = Duration::from_secs(1);
/// Free places are collected up to this number, so that a claim is worth its round trip.
const CLAIM_WORTH: usize = 32;

/// Claims and hands out until the soft stop, see [`super::Pool::run`].
pub(super) async fn run(shared: Arc<Shared>) {
    if let Some(total) = &shared.total {
        shared.shutdown.spawn(Arc::clone(total).keep(Arc::clone(&shared)));
    }
    let teller = Arc::clone(&shared);
    shared.shutdown.spawn(async move {
        tokio::select! {
            () = teller.shutdown.soft.cancelled() => {}
            () = teller.deferral.tell(&teller.queue) => {}
        }
    });
    let started = Instant::now();
    let mut scaler = Scaler::new(shared.settings.workers);
    info!(pipeline = %shared.queue.name(), workers = shared.settings.workers.max, "pool started");
    // Claims without an answer so far; each returns the number of its round.
    let (mut claims, mut round) = (FuturesUnordered::new(), 0_u64);
    while !shared.shutdown.soft.is_cancelled() {
        // Subscribed before the check, so that no change is missed.
        let changed = shared.board.changed().notified();
        if let Some(until) = shared.deferral.until(shared.board.next_deadline()) {
            tokio::select! {
                biased;
                () = shared.shutdown.soft.cancelled() => break,
                () = shared.deferral.ended() => {}
                Some(_) = claims.next() => {}
                () = tokio::time::sleep_until(until) => {}
            }
            continue;
        }
        shared.occupancy.set_wanted(true);
        let (room, wanted) = room(&shared, &mut scaler, started.elapsed());
        let slack = i64::try_from(shared.estimate.slice().min(FAIR_SLICE).as_micros());
        let Permitted { room, leases, reserved, closed } = within_total(&shared, room).await;
        shared.show_demand(wanted);
        let asks = shared.board.next_round(leases, slack.unwrap_or(0));
        let reserved = Reserved::split(&shared, reserved, &asks);
        if asks.is_empty() {
            if room > 0 && claims.is_empty() && !shared.board.has_work() {
                shared.deferral.drained();
            }
            // With free places, only the board has news.
            shared.occupancy.set_wanted(room == 0);
            tokio::select! {
                biased;
                () = shared.shutdown.soft.cancelled() => break,
                () = changed => {}
                Some(_) = claims.next() => {}
                () = tokio::time::sleep_until(shared.board.next_look()), if room > 0 => {}
                () = sleep_until(closed), if closed.is_some() => {}
                // The metrics and the target follow the leases of the copier, too.
                () = tokio::time::sleep(LOOK), if shared.occupancy.held() > 0 => {}
            }
            continue;
        }
        round += 1;
        let before = claims.len();
        for asks in by_holder(&shared, asks) {
            let reserved = reserved.of(&asks);
            claims.push(claim(&shared, asks, reserved).map(move |()| round));
        }
        let asked = claims.len() - before;
        tokio::select! {
            biased;
            () = shared.shutdown.hard.cancelled() => return,
            () = answered(&mut claims, round, asked) => {}
            // In a cluster, the other shards do not wait for a frozen server.
            () = tokio::time::sleep(PATIENCE), if shared.queue.link().target().is_cluster() => {}
        }
    }
    shared.occupancy.set_limit(0);
    tokio::select! {
        biased;
        () = shared.shutdown.hard.cancelled() => {}
        () = async { while claims.next().await.is_some() {} } => {}
    }
    info!(pipeline = %shared.queue.name(), "pool stopped claiming");
}

/// What a round may claim.
struct Permitted {
    /// Number of free places, within the limits over all processes.
    room: usize,
    /// Number of leases; all are reserved if there are such limits.
    leases: usize,
    reserved: Option<Asked>,
    /// Until when the limits allow nothing.
    closed: Option<Instant>,
}

/// The part of `room` that the limits over all processes allow, which it reserves.
async fn within_total(shared: &Arc<Shared>, room: usize) -> Permitted {
    let Some(total) = &shared.total else {
        return Permitted { room, leases: room, reserved: None, closed: None };
    };
    if !shared.board.has_work() {
        total.rest(shared).await;
        // Bots may have become ready meanwhile: nothing is reserved for them yet.
        return Permitted { room, leases: 0, reserved: None, closed: None };
    }
    let asked = total.reserve(shared, room).await;
    let closed = (room > 0 && asked.leases == 0).then(|| total.close());
    Permitted { room: asked.leases, leases: asked.leases, reserved: Some(asked), closed }
}

/// Waits for this number of claims of a round, regardless of older claims.
async fn answered(
    claims: &mut FuturesUnordered<impl Future<Output = u64>>,
    round: u64,
    mut asked: usize,
) {
    while asked > 0 {
        match claims.next().await {
            Some(ended) => asked -= usize::from(ended == round),
            None => return,
        }
    }
}

/// The number of bots that may be claimed now, and the number of workers that the load needs.
fn room(shared: &Shared, scaler: &mut Scaler, now: Duration) -> (usize, usize) {
    let held = shared.occupancy.held();
    let oldest_age = Duration::from_micros(shared.oldest_us.load(Ordering::Relaxed));
    let max = shared.settings.workers.max;
    let slice = shared.estimate.slice();
    let load = Load { ready: shared.board.ready(), busy: held.min(max) as u64, oldest_age, slice };
    let share = share(shared);
    let target = of_share(scaler.target(load, now), share, shared.settings.workers.min);
    shared.workers_share.set(share);
    shared.metrics.workers_target.set(small(target));
    shared.meter.target.store(target, Ordering::Relaxed);
    let wanted = usize::try_from(scale::wanted(load)).unwrap_or(usize::MAX);
    let busy = held.min(target);
    shared.metrics.workers_idle.set(small(target - busy));
    let ahead = if slice.is_zero() {
        0
    } else {
        let slices = PREFETCH.as_nanos() * target as u128 / slice.as_nanos();
        usize::try_from(slices).unwrap_or(PREFETCH_MAX).min(PREFETCH_MAX)
    };
    shared.occupancy.set_limit(target + ahead);
    let room = (target + ahead).saturating_sub(held);
    // With much prefetching, a few free places are not worth a round trip while others are in use.
    let waits = ahead >= CLAIM_WORTH && held > 0 && room < CLAIM_WORTH;
    (if waits { 0 } else { room }, wanted)
}

/// The share of the full work that the slowest store allows.
fn share(shared: &Shared) -> f64 {
    let redis = shared.queue.link().share(shared.queue.shards());
    shared.stores.iter().map(|store| store.share()).fold(redis, f64::min)
}

/// A slow store does not become faster if more workers wait for it.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a count of workers, times at most 1"
)]
fn of_share(target: usize, share: f64, min: usize) -> usize {
    ((target as f64 * share).ceil() as usize).max(min)
}
