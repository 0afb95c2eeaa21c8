//! The pool of one pipeline in one process: takes bots round robin under leases and passes their
//! events to the handler.
//!
//! ```text
//! wake channel ─▶ board ─▶ dispatcher ── claim, peek ──▶ a worker per lease ──▶ committer ─▶ Redis
//!                   ▲                                                              │
//!                   └──────────────── scores and deadlines from every reply ◀──────┘
//! ```
//!
//! The dispatcher claims only as many bots as there are free workers, plus the bots that the
//! workers finish in about a millisecond. More prefetching would make quiet bots wait.

mod board;
mod claim;
mod commit;
mod deferral;
mod dispatcher;
mod ending;
mod estimate;
mod lanes;
mod note;
mod occupancy;
pub(crate) mod open;
mod places;
pub mod retry;
pub mod scale;
mod settle;
mod shelf;
mod total;
mod worker;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use self::board::Board;
use self::commit::{CALL_EXCEPTIONS, Commits};
use self::deferral::Deferral;
use self::estimate::Estimate;
pub(crate) use self::lanes::Lanes;
use self::occupancy::Occupancy;
pub(crate) use self::places::{Places, Reserved};
use self::retry::{Backoff, RetryBudget};
use self::scale::Bounds;
use self::total::Total;
pub use self::total::Totals;
use crate::handler::{AnyHandler, Environment};
use crate::history::Recorder;
use crate::id::{BotId, Shard};
use crate::lifecycle::Shutdown;
use crate::metrics::{PipelineMetrics, workers_share};
use crate::presence::Meter;
use crate::pressure::Pressure;
use crate::queue::wake::{Listener, Wake};
use crate::queue::{FAIR_SLICE, Lease, Queue, Sent};
use crate::rate::BotLimits;
use crate::signed_token::SigningKey;
use crate::telemetry::OncePerMinute;
use crate::trace::Tracer;

/// The limits of a pool.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Maximum number of events in a slice.
    pub batch: usize,
    /// Maximum duration of a slice.
    pub slice_time: Duration,
    /// How long a confirmed lease lasts.
    pub lease_ttl: Duration,
    /// Timeout of the handler.
    pub handler_timeout: Duration,
    /// Number of workers in this process.
    pub workers: Bounds,
    /// Maximum number of attempts before an event becomes a dead letter.
    pub max_attempts: u32,
    /// The pauses between attempts.
    pub backoff: Backoff,
    /// Events older than this are not handled.
    pub max_age: Option<Duration>,
}

/// How fast the bots of a pool are handled.
#[derive(Debug, Clone, Default)]
pub struct BotsLimits {
    /// All bots, unless they have their own.
    pub general: BotLimits,
    /// Bots with their own limits in the configuration.
    pub bots: BTreeMap<BotId, BotLimits>,
    /// All bots together.
    pub total: Totals,
}

/// The handler of a pool, and the observers of its results.
pub(crate) struct Work {
    pub(crate) handler: Arc<dyn AnyHandler>,
    pub(crate) environment: Environment,
    /// Signs the names of leases for external receivers.
    pub(crate) signing_key: SigningKey,
    pub(crate) meter: Arc<Meter>,
    pub(crate) limits: BotsLimits,
    /// The stores that the handler needs, except Redis: measure how slow they are.
    pub(crate) stores: Vec<Arc<Pressure>>,
    /// The ordering keys below the bot; `None`: each bot has one order.
    pub(crate) lanes: Option<Arc<Lanes>>,
    /// Keeps attempts for operators.
    pub(crate) recorder: Option<Recorder>,
    pub(crate) tracer: Tracer,
}

/// The shared state of a pool.
pub(crate) struct Shared {
    queue: Queue,
    settings: Settings,
    limits: BotsLimits,
    /// What all processes may do together.
    total: Option<Arc<Total>>,
    handler: Arc<dyn AnyHandler>,
    environment: Environment,
    signing_key: SigningKey,
    metrics: PipelineMetrics,
    workers_share: metrics::Gauge,
    meter: Arc<Meter>,
    shutdown: Shutdown,
    board: Arc<Board>,
    commits: Commits,
    /// One permit per worker.
    workers: Semaphore,
    /// The leases that this process holds.
    occupancy: Occupancy,
    /// Whether the copier goes first.
    deferral: Deferral,
    estimate: Estimate,
    /// Age of the oldest event in the last read, µs.
    oldest_us: AtomicU64,
    /// The budget of retries that are not delayed.
    retries: RetryBudget,
    /// The stores that the handler needs, except Redis: measure how slow they are.
    stores: Vec<Arc<Pressure>>,
    /// The ordering keys below the bot; `None`: each bot has one order.
    lanes: Option<Arc<Lanes>>,
    /// Keeps attempts for operators.
    recorder: Option<Recorder>,
    tracer: Tracer,
    /// The time since which every slice found its target unavailable.
    unavailable_since: Mutex<Option<Instant>>,
    /// Limits the log line about failures that are retried.
    warned: OncePerMinute,
    /// Limits the log line about lost leases.
    lost: OncePerMinute,
}

impl Shared {
    /// Time since 1970.
    fn now(&self) -> Duration {
        self.environment.clock.now()
    }

    /// The number of events in the slice of a bot without failures.
    fn usual_events(&self) -> usize {
        let settings = &self.settings;
        let leases = self.board.ready() + self.occupancy.held() as u64;
        let contended = leases > settings.workers.max as u64;
        let time =
            if contended { settings.slice_time.min(FAIR_SLICE) } else { settings.slice_time };
        // With a ledger, the handler merges events, so a slice may have the maximum number of
        // events; none is dead-lettered for failures.
        let usual = if self.queue.ledger().is_some() {
            settings.batch
        } else if self.mostly_waits() {
            self.estimate.waiting()
        } else {
            self.estimate.events_in(time)
        };
        usual.clamp(1, settings.batch)
    }

    /// The number of events in the slice of a lease.
    fn slice_events(&self, lease: &Lease, usual: usize) -> usize {
        let most = self.bucket_of(lease).map_or(usize::MAX, |bucket| bucket.burst as usize);
        let most = if self.has_lanes(lease) { most.min(CALL_EXCEPTIONS) } else { most };
        let attempts = lease.attempts;
        let counted = attempts.failed > 0 || attempts.vanished();
        usual.min(most).min(self.slice_limit(counted, attempts.isolate))
    }

    /// The maximum number of events in a slice of a bot or a lane with these attempts at its first event.
    fn slice_limit(&self, counted: bool, isolate: u32) -> usize {
        if self.queue.ledger().is_some() {
            return usize::MAX;
        }
        retry::slice_limit(self.settings.batch, counted, isolate)
    }

    /// Whether the events of the bot have an order by lanes, or had one.
    fn has_lanes(&self, lease: &Lease) -> bool {
        self.lanes.is_some() || !lease.aside.is_empty()
    }

    /// Marks the start of a call for `shard`.
    fn sending(&self, shard: Shard) -> Sent {
        let connection = self.queue.link().connection(self.queue.keys(shard));
        Sent { at: Instant::now(), connection }
    }

    /// Records how a slice ended; returns how long its target has been unavailable.
    fn unavailable_for(&self, unavailable: bool) -> Duration {
        let mut since = self.unavailable_since.lock().unwrap_or_else(PoisonError::into_inner);
        if unavailable {
            return since.get_or_insert_with(Instant::now).elapsed();
        }
        *since = None;
        Duration::ZERO
    }

    /// Shows the demand of `wanted` workers, within the limits over all processes.
    fn show_demand(&self, wanted: usize) {
        let max = self.settings.workers.max;
        let busy = self.occupancy.held().min(max);
        let needed = self.total.as_ref().map_or(wanted, |total| total.needed(wanted, busy));
        self.metrics.demand_ratio.set(small(needed) / small(max));
    }

    /// Counts a busy worker until it is dropped.
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
    /// Creates the pool and starts its committer. The `link` of `queue` is a hot path.
    pub(crate) fn new(queue: Queue, settings: Settings, work: Work, shutdown: Shutdown) -> Self {
        let Work { handler, environment, signing_key, meter, limits, stores, .. } = work;
        let (lanes, recorder, tracer) = (work.lanes, work.recorder, work.tracer);
        let total = Total::new(limits.total).map(Arc::new);
        let metrics = PipelineMetrics::new(queue.name());
        let patient = limits.general.rate.is_some();
        let board = Arc::new(Board::new(queue.shard_count()).patient(patient));
        let dead_max = queue.limits().dead_max;
        let (commits, committer) =
            commit::committer(queue.clone(), dead_max, Arc::clone(&board), metrics.clone());
        shutdown.spawn(committer);
        let shared = Shared {
            workers_share: workers_share(queue.name()),
            queue,
            settings,
            limits,
            total,
            handler,
            environment,
            signing_key,
            metrics,
            meter,
            shutdown,
            board,
            commits,
            workers: Semaphore::new(settings.workers.max),
            occupancy: Occupancy::default(),
            deferral: Deferral::default(),
            estimate: Estimate::default(),
            oldest_us: AtomicU64::new(0),
            retries: RetryBudget::new(),
            stores,
            lanes,
            recorder,
            tracer,
            unavailable_since: Mutex::new(None),
            warned: OncePerMinute::new(),
            lost: OncePerMinute::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Receives the messages of the shards.
    pub(crate) fn listener(&self) -> Box<dyn Listener> {
        Box::new(Subscriber(Arc::clone(&self.shared)))
    }

    /// The free workers, for the copier of this process.
    pub(crate) fn places(&self) -> Places {
        Places(Arc::clone(&self.shared))
    }

    /// Claims and hands out until the soft stop.
    ///
    /// # Cancel safety
    /// New leases expire by themselves. A soft stop, in contrast, waits for the claim in progress,
    /// so that its leases are given back immediately.
    pub(crate) fn run(self) -> impl Future<Output = ()> + Send {
        dispatcher::run(self.shared)
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Passes published scores and deadlines to the dispatcher.
struct Subscriber(Arc<Shared>);

impl Listener for Subscriber {
    fn heard(&self, shard: Shard, wake: &Wake) {
        match *wake {
            Wake::Ready(score) => self.0.board.heard(shard, score),
            Wake::Deadline(deadline_ms) => self.0.board.heard_deadline(shard, deadline_ms),
            Wake::Defer(holds) => self.0.deferral.heard(holds),
            Wake::Due(_) | Wake::Told(..) => {}
        }
    }

    fn missed(&self) {
        self.0.board.look_everywhere();
    }
}

#[expect(clippy::cast_precision_loss, reason = "a count of workers")]
fn small(count: usize) -> f64 {
    count as f64
}
