//! The pool of one pipeline in one process: takes bots round robin under leases and hands their
//! events to the handler.
//!
//! ```text
//! wake channel ─▶ board ─▶ dispatcher ── claim, peek ──▶ a worker per lease ──▶ committer ─▶ Redis
//!                   ▲                                                              │
//!                   └──────────────── scores and deadlines from every reply ◀──────┘
//! ```
//!
//! The dispatcher claims only what it has room for: the free workers, plus what they will get
//! through in about a millisecond (prefetching more makes quiet bots wait).

mod board;
mod claim;
mod commit;
mod estimate;
pub(crate) mod open;
pub mod retry;
pub mod scale;
mod settle;
mod worker;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tracing::info;

use self::board::Board;
use self::claim::{by_holder, claim};
use self::commit::Commits;
use self::estimate::Estimate;
use self::retry::{Backoff, RetryBudget};
use self::scale::{Bounds, Load, Scaler};
use crate::handler::{AnyHandler, Environment};
use crate::id::Shard;
use crate::lifecycle::Shutdown;
use crate::metrics::PipelineMetrics;
use crate::presence::Meter;
use crate::pressure::Pressure;
use crate::queue::wake::{Listener, Wake};
use crate::queue::{FAIR_SLICE, Queue, Sent};
use crate::signed_token::SigningKey;
use crate::telemetry::OncePerMinute;

/// Work that may be taken ahead of the workers.
const PREFETCH: Duration = Duration::from_millis(1);
/// Most leases taken ahead of the workers.
const PREFETCH_MAX: usize = 512;
/// A server of a cluster that is slower than this does not hold up claims from the others.
const PATIENCE: Duration = Duration::from_millis(100);
/// Capacity freed one by one is collected until a claim is worth its round trip.
const CLAIM_WORTH: usize = 32;

/// What bounds a pool.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Most events of a slice.
    pub batch: usize,
    /// Most time of a slice.
    pub slice_time: Duration,
    /// How long a confirmed lease lasts.
    pub lease_ttl: Duration,
    /// Most time of a handler.
    pub handler_timeout: Duration,
    /// Workers of this process.
    pub workers: Bounds,
    /// Attempts before an event becomes a dead letter.
    pub max_attempts: u32,
    /// Pauses between attempts.
    pub backoff: Backoff,
    /// Older events are not handled.
    pub max_age: Option<Duration>,
}

/// What a pool does, and who hears of it.
pub(crate) struct Work {
    pub(crate) handler: Arc<dyn AnyHandler>,
    pub(crate) environment: Environment,
    /// Names leases to receivers outside.
    pub(crate) signing_key: SigningKey,
    pub(crate) meter: Arc<Meter>,
    /// How slow the stores are that the handler needs, beside Redis.
    pub(crate) stores: Vec<Arc<Pressure>>,
}

/// What a pool's parts share.
pub(crate) struct Shared {
    queue: Queue,
    settings: Settings,
    handler: Arc<dyn AnyHandler>,
    environment: Environment,
    signing_key: SigningKey,
    metrics: PipelineMetrics,
    meter: Arc<Meter>,
    shutdown: Shutdown,
    board: Arc<Board>,
    commits: Commits,
    /// One permit per worker.
    workers: Semaphore,
    /// Leases this process holds.
    held: AtomicUsize,
    estimate: Estimate,
    /// Age of the oldest event met in the last read, µs.
    oldest_us: AtomicU64,
    /// Attempts again that need not be slowed down.
    retries: RetryBudget,
    /// How slow the stores are that its handler needs, beside Redis.
    stores: Vec<Arc<Pressure>>,
    /// Since when every slice found its target unavailable.
    unavailable_since: Mutex<Option<Instant>>,
    /// When a failure that is tried again was last logged.
    warned: OncePerMinute,
    /// When a lost lease was last logged.
    lost: OncePerMinute,
}

impl Shared {
    /// Time since 1970.
    fn now(&self) -> Duration {
        self.environment.clock.now()
    }

    /// A call for `shard` that goes out now.
    fn sending(&self, shard: Shard) -> Sent {
        let connection = self.queue.link().connection(self.queue.keys(shard));
        Sent { at: Instant::now(), connection }
    }

    /// Notes how a slice ended; answers how long its target has been unavailable.
    fn unavailable_for(&self, unavailable: bool) -> Duration {
        let mut since = self.unavailable_since.lock().unwrap_or_else(PoisonError::into_inner);
        if unavailable {
            return since.get_or_insert_with(Instant::now).elapsed();
        }
        *since = None;
        Duration::ZERO
    }

    /// Counts a busy worker while it lives.
    fn busy(&self) -> impl Drop + use<> {
        struct Busy(metrics::Gauge, Arc<Meter>);
        impl Drop for Busy {
            fn drop(&mut self) {
                self.0.decrement(1.0);
                self.1.busy.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.metrics.workers_busy.increment(1.0);
        self.meter.busy.fetch_add(1, Ordering::Relaxed);
        Busy(self.metrics.workers_busy.clone(), Arc::clone(&self.meter))
    }
}

/// The pool of one pipeline.
pub(crate) struct Pool {
    shared: Arc<Shared>,
}

impl Pool {
    /// Makes the pool and starts its committer. `link` of `queue` carries the hot path.
    pub(crate) fn new(queue: Queue, settings: Settings, work: Work, shutdown: Shutdown) -> Self {
        let Work { handler, environment, signing_key, meter, stores } = work;
        let metrics = PipelineMetrics::new(queue.name());
        let board = Arc::new(Board::new(queue.shard_count()));
        let dead_max = queue.limits().dead_max;
        let (commits, committer) =
            commit::committer(queue.clone(), dead_max, Arc::clone(&board), metrics.clone());
        shutdown.spawn(committer);
        let shared = Shared {
            queue,
            settings,
            handler,
            environment,
            signing_key,
            metrics,
            meter,
            shutdown,
            board,
            commits,
            workers: Semaphore::new(settings.workers.max),
            held: AtomicUsize::new(0),
            estimate: Estimate::default(),
            oldest_us: AtomicU64::new(0),
            retries: RetryBudget::new(),
            stores,
            unavailable_since: Mutex::new(None),
            warned: OncePerMinute::new(),
            lost: OncePerMinute::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Hears what the shards publish.
    pub(crate) fn listener(&self) -> Box<dyn Listener> {
        Box::new(Subscriber(Arc::clone(&self.shared.board)))
    }

    /// Claims and hands out until the soft stop.
    ///
    /// # Cancel safety
    /// Leases that were just claimed run out by themselves. A soft stop waits for the claim under
    /// way instead, so that what it took is given back at once.
    pub(crate) async fn run(self) {
        let shared = self.shared;
        let started = Instant::now();
        let mut scaler = Scaler::new(shared.settings.workers);
        info!(pipeline = %shared.queue.name(), workers = shared.settings.workers.max, "pool started");
        // Claims that a server has not answered yet; each ends with the number of its round.
        let (mut claims, mut round) = (FuturesUnordered::new(), 0_u64);
        while !shared.shutdown.soft.is_cancelled() {
            // Subscribed before looking, so that nothing falls between.
            let changed = shared.board.changed().notified();
            let room = room(&shared, &mut scaler, started.elapsed());
            let slack = i64::try_from(shared.estimate.slice().min(FAIR_SLICE).as_micros());
            let asks = shared.board.next_round(room, slack.unwrap_or(0));
            if asks.is_empty() {
                tokio::select! {
                    biased;
                    () = shared.shutdown.soft.cancelled() => break,
                    () = changed => {}
                    Some(_) = claims.next() => {}
                    () = tokio::time::sleep_until(shared.board.next_look()), if room > 0 => {}
                }
                continue;
            }
            round += 1;
            let before = claims.len();
            for asks in by_holder(&shared, asks) {
                claims.push(claim(&shared, asks).map(move |()| round));
            }
            let asked = claims.len() - before;
            tokio::select! {
                biased;
                () = shared.shutdown.hard.cancelled() => return,
                () = answered(&mut claims, round, asked) => {}
                // In a cluster, the shards of others do not wait for a server that is frozen.
                () = tokio::time::sleep(PATIENCE), if shared.queue.link().target().is_cluster() => {}
            }
        }
        tokio::select! {
            biased;
            () = shared.shutdown.hard.cancelled() => {}
            () = async { while claims.next().await.is_some() {} } => {}
        }
        info!(pipeline = %shared.queue.name(), "pool stopped claiming");
    }
}

/// Waits for so many claims of a round, whatever older ones do.
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

/// Hears what falls below what the dispatcher knows.
struct Subscriber(Arc<Board>);

impl Listener for Subscriber {
    fn heard(&self, shard: Shard, wake: &Wake) {
        match *wake {
            Wake::Ready(score) => self.0.heard(shard, score),
            Wake::Deadline(deadline_ms) => self.0.heard_deadline(shard, deadline_ms),
            Wake::Due(_) | Wake::Told(..) => {}
        }
    }

    fn missed(&self) {
        self.0.look_everywhere();
    }
}

/// How many bots may be claimed now.
fn room(shared: &Shared, scaler: &mut Scaler, now: Duration) -> usize {
    let held = shared.held.load(Ordering::Acquire);
    let oldest_age = Duration::from_micros(shared.oldest_us.load(Ordering::Relaxed));
    let max = shared.settings.workers.max;
    let slice = shared.estimate.slice();
    let load = Load { ready: shared.board.ready(), busy: held.min(max) as u64, oldest_age, slice };
    let share = share(shared);
    let target = of_share(scaler.target(load, now), share, shared.settings.workers.min);
    shared.metrics.workers_share.set(share);
    shared.metrics.workers_target.set(small(target));
    shared.meter.target.store(target, Ordering::Relaxed);
    let wanted = usize::try_from(scale::wanted(load)).unwrap_or(usize::MAX);
    shared.metrics.demand_ratio.set(small(wanted) / small(max));
    let busy = held.min(target);
    shared.metrics.workers_idle.set(small(target - busy));
    let ahead = if slice.is_zero() {
        0
    } else {
        let slices = PREFETCH.as_nanos() * target as u128 / slice.as_nanos();
        usize::try_from(slices).unwrap_or(PREFETCH_MAX).min(PREFETCH_MAX)
    };
    let room = (target + ahead).saturating_sub(held);
    // With much prefetch, a few free places are not worth a round trip while others are in use.
    if ahead >= CLAIM_WORTH && held > 0 && room < CLAIM_WORTH { 0 } else { room }
}

/// How much of the work the slowest store allows.
fn share(shared: &Shared) -> f64 {
    let redis = shared.queue.link().pressure();
    let stores = shared.stores.iter().chain([redis]);
    stores.map(|store| store.share()).fold(1.0, f64::min)
}

/// A store that slowed down is not helped by more workers that wait for it.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a count of workers, times at most 1"
)]
fn of_share(target: usize, share: f64, min: usize) -> usize {
    ((target as f64 * share).ceil() as usize).max(min)
}

#[expect(clippy::cast_precision_loss, reason = "a count of workers")]
fn small(count: usize) -> f64 {
    count as f64
}
