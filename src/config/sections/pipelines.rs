//! `[pipelines.NAME]`.

use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::time::Duration;

use crate::clock::millis;
use crate::config::{OnOverflow, OrderBy, load};
use crate::history::History;
use crate::id::ShardCount;
use crate::outbound::CheckedUrl;
use crate::queue::FAIR_SLICE_US;
use crate::quotas::Quota;
use crate::rate::Rate;
use crate::redis::scripts::Limits;

/// One pipeline: its events, its handler, its limits.
#[derive(Debug, Clone)]
pub struct PipelineConfig {
    /// A disabled pipeline takes no events and has no workers; its queued events are kept.
    pub enabled: bool,
    /// The name of the handler. Only the application knows whether it exists.
    pub handler: String,
    /// Globs over the event's type; `*` spans dots. At most 1,000, and at least one if enabled.
    pub events: Vec<String>,
    /// Where a new pipeline starts on the bus.
    pub start: Start,
    /// A CEL expression over `event`. Compiled and checked where it is used.
    pub filter: Option<String>,
    /// The target of the handler `push`. Required for that handler, refused for others.
    pub url: Option<CheckedUrl>,
    /// Maximum number of events per slice: 1 to 5,000.
    pub batch: NonZeroUsize,
    /// A slice takes no further event after this: 1 ms to a third of [`Self::lease_ttl`].
    pub slice_time: Duration,
    /// Time without a renewal after which another worker takes the bot: 1 s to 1 h.
    pub lease_ttl: Duration,
    /// A handler that runs longer is cancelled: 1 ms to
    /// [`Config::shutdown_grace`](crate::config::Config::shutdown_grace).
    pub handler_timeout: Duration,
    /// Number of concurrent slices of one process.
    pub workers: WorkersConfig,
    /// An event that failed this often becomes a dead letter: 1 to 1,000,000.
    pub max_attempts: NonZeroU32,
    /// How long a bot waits after a failure.
    pub backoff: BackoffConfig,
    /// How long a bot waits for more events before its slice: at most 1 h, and less than
    /// [`Self::max_age`].
    pub linger: Duration,
    /// Maximum number of queued events per bot: up to 1,000,000,000. `None`: no bound.
    pub max_queue: Option<NonZeroU64>,
    /// What happens to an event beyond [`Self::max_queue`].
    pub on_overflow: OnOverflow,
    /// What keeps the order of its events.
    pub order_by: OrderBy,
    /// Maximum number of ordering keys of one bot that are handled at once: 1 to 64. Above 1 only if
    /// [`Self::order_by`] is below the bot.
    pub concurrency: NonZeroUsize,
    /// Maximum rate of the events of one bot. `None`: no limit.
    pub rate: Option<Rate>,
    /// Maximum number of events of one bot at once: 1 to 1,000,000. `None`: those of one second.
    pub burst: Option<NonZeroU32>,
    /// Maximum rate of the events of all bots together. `None`: no limit.
    pub total_rate: Option<Rate>,
    /// Maximum number of slices at once over all processes: up to 100,000. `None`: no limit.
    pub total_concurrency: Option<NonZeroUsize>,
    /// Age above which events are not handled: above [`Self::linger`], at most 3,650 days. `None`: no
    /// bound.
    pub max_age: Option<Duration>,
    /// Number of dead letters kept, and for how long.
    pub dead: DeadConfig,
    /// The attempts that are kept for operators: up to 1,000 of one bot, for 1 min to 30 days, in 1 MiB
    /// to 4 GiB.
    pub history: History,
}

/// Where a new pipeline starts on the bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// At the end: with events published from now on.
    New,
    /// At the oldest event that the bus still has.
    Earliest,
}

/// Number of concurrent slices of one process: `1 <= min <= max <= 1024`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkersConfig {
    /// Workers that always run.
    pub min: NonZeroUsize,
    /// Workers under full load.
    pub max: NonZeroUsize,
}

/// The wait after a failure: doubles from `initial` to `max`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BackoffConfig {
    /// The wait after the first failure: 1 ms to `max`.
    pub initial: Duration,
    /// The longest wait: up to 7 days.
    pub max: Duration,
    /// The fraction by which each wait varies, so that bots that failed together do not retry
    /// together: 0.0 to 1.0.
    pub jitter: f64,
}

/// The bounds of the dead letters of a pipeline. The oldest are deleted first. Each shard keeps its
/// part of `max`, so the maximum of one bot is `max / redis.shards`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeadConfig {
    /// Maximum number of dead letters: 1 to 100,000,000.
    pub max: NonZeroU64,
    /// How long they are kept: 1 s to 3,650 days.
    pub keep: Duration,
}

impl PipelineConfig {
    /// An enabled pipeline with the default limits.
    ///
    /// `handler` is the name under which the handler is registered; `events` are globs over the
    /// event's type, for example `["subscriber.*"]`.
    #[must_use]
    pub fn new<E: Into<String>>(
        handler: impl Into<String>,
        events: impl IntoIterator<Item = E>,
    ) -> Self {
        Self {
            handler: handler.into(),
            events: events.into_iter().map(Into::into).collect(),
            ..load::default_pipeline()
        }
    }

    /// Its limits, divided over its `shards`.
    #[must_use]
    pub fn limits(&self, shards: ShardCount) -> Limits {
        Limits {
            slice_us: FAIR_SLICE_US,
            linger_ms: millis(self.linger),
            max_queue: self.max_queue.map_or(0, NonZeroU64::get),
            overflow_dead: self.on_overflow == OnOverflow::Dead,
            // The bound applies to the pipeline; each shard keeps its part of it.
            dead_max: self.dead.max.get().div_ceil(u64::from(shards.get())),
            quota: Quota::NONE,
        }
    }
}
