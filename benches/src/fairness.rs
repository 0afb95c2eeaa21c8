//! `fairlane-bench fairness`: how long quiet bots wait beside busy ones, and how evenly the busy
//! ones progress.
//!
//! Two instances of the service share the workers, as two processes would. The quiet bots are
//! measured first alone, then beside the backlog. The wait of an event counts from the moment it
//! was sent. One more busy bot has weight 3.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fairlane::clock::{Clock, SystemClock, micros};
use fairlane::config::{OrderBy, PipelineConfig};
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane::id::BotId;
use fairlane::queue::Queue;
use fairlane::sandbox::{Rig, event, pipeline_name, quantile_ms, waits};
use hdrhistogram::Histogram;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::error::BenchError;

/// The options.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    /// Number of bots with a backlog.
    pub(crate) busy: usize,
    /// Number of events of each of them.
    pub(crate) backlog: usize,
    /// Number of quiet bots.
    pub(crate) quiet: usize,
    /// Events per second of all quiet bots together.
    pub(crate) quiet_rate: u64,
    /// Time that the handler takes per event.
    pub(crate) handling: Duration,
    /// Number of workers in both instances together.
    pub(crate) consumers: usize,
    /// Number of events of one more, very large bot; 0: none.
    pub(crate) giant: usize,
    /// Maximum duration of each part.
    pub(crate) window: Duration,
    /// Maximum number of lanes of a bot that are handled concurrently; 0: bots have no lanes. The busy bots
    /// have 1 to 10,000 keys.
    pub(crate) lanes: usize,
    /// The order of the quiet events, and, as a part of the names, the shards of the bots.
    pub(crate) seed: u64,
}

/// The results.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    pub(crate) seed: u64,
    pub(crate) quiet_p50_ms_alone: f64,
    pub(crate) quiet_p99_ms_alone: f64,
    pub(crate) quiet_p50_ms_beside: f64,
    pub(crate) quiet_p99_ms_beside: f64,
    pub(crate) quiet_events_beside: u64,
    pub(crate) jain: f64,
    pub(crate) smallest_share: f64,
    /// Service of the bot with weight 3 divided by the mean of those with weight 1.
    pub(crate) weight_3_share: f64,
    /// Service of the large bot divided by the mean of those with weight 1.
    pub(crate) giant_share: Option<f64>,
    pub(crate) busy_events_per_second: f64,
}

struct Slow {
    handling: Duration,
    quiet: Mutex<Histogram<u64>>,
    served: Mutex<HashMap<BotId, u64>>,
    done: AtomicU64,
}

#[derive(Deserialize)]
struct Payload {
    sent: u64,
}

/// One handler for both instances.
struct Shared(Arc<Slow>);

impl Handler for Shared {
    async fn handle(&self, environment: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        for delivery in &slice.events {
            if delivery.event.source() == "quiet" {
                let now = micros(environment.clock.now());
                let sent = delivery.event.data_as::<Payload>().map_or(now, |payload| payload.sent);
                let wait = now.saturating_sub(sent).max(1);
                let mut quiet = self.0.quiet.lock().unwrap_or_else(PoisonError::into_inner);
                quiet.saturating_record(wait);
            }
            tokio::time::sleep(self.0.handling).await;
        }
        Ok(Outcomes::done())
    }

    fn committed(&self, slice: &Slice, settled: usize) {
        self.0.done.fetch_add(settled as u64, Ordering::Relaxed);
        let mut served = self.0.served.lock().unwrap_or_else(PoisonError::into_inner);
        *served.entry(slice.bot.clone()).or_default() += settled as u64;
    }
}

/// Runs the bench.
///
/// # Errors
/// If the private Redis fails.
pub(crate) async fn run(
    options: Options,
    watch: impl FnMut(&'static str, u64),
) -> Result<Report, BenchError> {
    Rig::with(async |rig| measure(rig, options, watch).await).await
}

#[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
async fn measure(
    rig: &Rig,
    options: Options,
    mut watch: impl FnMut(&'static str, u64),
) -> Result<Report, BenchError> {
    let slow = Arc::new(Slow {
        handling: options.handling,
        quiet: Mutex::new(waits()),
        served: Mutex::default(),
        done: AtomicU64::new(0),
    });
    let (mut running, mut queue) = (Vec::new(), None);
    for instance in 0..2 {
        let workers = options.consumers / 2 + instance * (options.consumers % 2);
        let lanes = |pipeline: &mut PipelineConfig| {
            if let Some(lanes) = NonZeroUsize::new(options.lanes) {
                pipeline.order_by = OrderBy::parse("event.id");
                pipeline.concurrency = lanes;
            }
        };
        let app = rig.app(workers, lanes, Shared(Arc::clone(&slow))).await?;
        queue = app.queue(&pipeline_name());
        running.push(Rig::spawn(app));
    }

    let queue = queue.ok_or_else(|| BenchError::stuck(Duration::ZERO, "no pipeline".to_owned()))?;
    let seed = options.seed;
    let heavy = format!("heavy-{seed}");
    queue.set_weight(&BotId::parse(&heavy)?, 3).await?;

    watch("quiet bots alone", 0);
    send_quiet(rig, options, 3, || true).await?;
    slow.reset();
    send_quiet(rig, options, options.window.as_secs().min(10), || true).await?;
    let alone = slow.take_quiet();

    watch("filling the backlog", 0);
    let names = (0..options.busy).map(|bot| (format!("busy-{seed}-{bot}"), options.backlog));
    let heavy = [(heavy, options.backlog * 3), (format!("giant-{seed}"), options.giant)];
    let mut bots = Vec::new();
    for (name, count) in names.chain(heavy) {
        bots.push((BotId::parse(&name)?, count));
    }
    fill(rig, &queue, &bots, options.lanes > 0).await?;
    slow.reset();
    let started = Instant::now();
    let smallest = options.backlog as u64;
    send_quiet(rig, options, options.window.as_secs(), || {
        let served = slow.served.lock().unwrap_or_else(PoisonError::into_inner);
        watch("quiet bots beside the backlog", served.values().sum());
        // The figures are valid while every busy bot has queued events.
        bots.iter().all(|(bot, count)| {
            *count == 0 || served.get(bot).copied().unwrap_or(0) < (*count as u64).min(smallest)
        })
    })
    .await?;
    let seconds = started.elapsed().as_secs_f64();
    let beside = slow.take_quiet();
    let served = slow.served.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for instance in running {
        instance.stop_immediately().await?;
    }

    let share = |bot: &BotId| served.get(bot).copied().unwrap_or(0) as f64;
    let shares: Vec<f64> = bots[..options.busy].iter().map(|(bot, _)| share(bot)).collect();
    let mean = shares.iter().sum::<f64>() / shares.len() as f64;
    let smallest = shares.iter().copied().fold(f64::INFINITY, f64::min);
    let total: f64 = bots.iter().map(|(bot, _)| share(bot)).sum();
    Ok(Report {
        seed,
        quiet_p50_ms_alone: quantile_ms(&alone, 0.5),
        quiet_p99_ms_alone: quantile_ms(&alone, 0.99),
        quiet_p50_ms_beside: quantile_ms(&beside, 0.5),
        quiet_p99_ms_beside: quantile_ms(&beside, 0.99),
        quiet_events_beside: beside.len(),
        jain: jain(&shares),
        smallest_share: smallest / mean,
        weight_3_share: share(&bots[options.busy].0) / mean,
        giant_share: (options.giant > 0).then(|| share(&bots[options.busy + 1].0) / mean),
        busy_events_per_second: total / seconds,
    })
}

impl Slow {
    fn reset(&self) {
        self.quiet.lock().unwrap_or_else(PoisonError::into_inner).reset();
        self.served.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn take_quiet(&self) -> Histogram<u64> {
        let mut quiet = self.quiet.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut quiet, waits())
    }
}

/// Jain's index of fairness: 1 if all shares are equal, 1/n if one bot has everything.
fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    #[expect(clippy::cast_precision_loss, reason = "a handful of bots")]
    let count = shares.len() as f64;
    if squares == 0.0 { 1.0 } else { sum * sum / (count * squares) }
}

/// Sends quiet events at the rate for `seconds`, or until `go_on` returns false.
#[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
async fn send_quiet(
    rig: &Rig,
    options: Options,
    seconds: u64,
    mut go_on: impl FnMut() -> bool,
) -> Result<(), BenchError> {
    let mut random = rand::rngs::SmallRng::seed_from_u64(options.seed);
    let step = Duration::from_secs(1).div_f64(options.quiet_rate as f64);
    let origin = Instant::now();
    for n in 0..seconds * options.quiet_rate {
        tokio::time::sleep_until(origin + step.mul_f64(n as f64)).await;
        if !go_on() {
            break;
        }
        let bot = format!("quiet-{}-{}", options.seed, random.random_range(0..options.quiet));
        let sent = event(&BotId::parse(&bot)?, &n.to_string(), "quiet", 0)?;
        rig.publish([&sent].into_iter()).await?;
    }
    Ok(())
}

/// Numbers of ordering keys of the busy bots.
const KEYS: [usize; 5] = [1, 10, 100, 1_000, 10_000];

/// Publishes the backlog with bots mixed, and waits until it is queued. `keys`: the ids are ordering keys,
/// so that they repeat.
async fn fill(
    rig: &Rig,
    queue: &Queue,
    bots: &[(BotId, usize)],
    keys: bool,
) -> Result<(), BenchError> {
    let most = bots.iter().map(|(_, count)| *count).max().unwrap_or(0);
    let mut batch = Vec::new();
    for position in 0..most {
        let filled = bots.iter().zip(KEYS.iter().cycle());
        for ((bot, _), most) in filled.filter(|((_, count), _)| position < *count) {
            let id = if keys { position % most } else { position };
            batch.push(event(bot, &id.to_string(), "busy", 0)?);
        }
        if batch.len() > 10_000 || position + 1 == most {
            rig.publish(batch.iter()).await?;
            batch.clear();
        }
    }
    // Workers only lower the depth. So everything is queued once the depth stops growing.
    let mut depth = 0;
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let now = queue.view(SystemClock.now()).await?.depth;
        if now <= depth {
            return Ok(());
        }
        depth = now;
    }
}
