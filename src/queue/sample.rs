//! Samples the values that all processes share through Redis. One process at a time does it, under
//! a TTL lock; the others show zero, so the values are to be shown with `max`.
//!
//! While nothing happens, the queues are looked at every five minutes and the memory every minute: an
//! idle Fairlane costs next to nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use tracing::debug;

use super::wake::{Listener, Wake};
use super::{PipelineView, Queue};
use crate::clock::{SharedClock, millis};
use crate::id::Shard;
use crate::keyspace::scripts::Hold;
use crate::keyspace::{Link, ServerInfo, StoreError, keys};
use crate::lifecycle::Shutdown;
use crate::metrics::{self, CounterMetrics, DueMetrics, PipelineMetrics};
use crate::presence;
use crate::trend::{self, Point, Sample};

const ACTIVE: Duration = Duration::from_secs(2);
const IDLE: Duration = Duration::from_secs(60);
/// Empty queues of which nothing was heard are looked at this often.
const QUIET: Duration = Duration::from_secs(300);
/// Old dead letters are removed this often.
const EXPIRE: Duration = Duration::from_secs(60);

/// One pipeline to sample.
pub(crate) struct Sampled {
    pub(crate) queue: Queue,
    pub(crate) metrics: PipelineMetrics,
    /// Dead letters older than this are removed.
    pub(crate) keep_dead: Duration,
    /// Of the pipeline that counts views.
    pub(crate) views: Option<CounterMetrics>,
    /// Of the pipeline of the notifications.
    pub(crate) due: Option<DueMetrics>,
}

/// Counts what is heard: a sign of life.
#[derive(Debug, Default)]
pub(crate) struct Activity(AtomicU64);

pub(crate) struct ActivityEar(pub(crate) Arc<Activity>);

impl Listener for ActivityEar {
    fn heard(&self, _: Shard, _: &Wake) {
        self.0.0.fetch_add(1, Ordering::Relaxed);
    }

    fn missed(&self) {
        self.0.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Samples until the soft stop.
pub(crate) async fn run(
    pipelines: Vec<Sampled>,
    link: Arc<Link>,
    activity: Arc<Activity>,
    clock: SharedClock,
    shutdown: Shutdown,
) {
    let token = uuid::Uuid::now_v7().to_string();
    let mut seen = u64::MAX;
    let mut due = Instant::now();
    // Until when empty queues need not be looked at, if all were found empty.
    let mut quiet_until: Option<Instant> = None;
    let mut expire = Instant::now();
    let mut noted: Option<Instant> = None;
    loop {
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => break,
            () = tokio::time::sleep(ACTIVE) => {}
        }
        metrics::upkeep();
        let heard = activity.0.load(Ordering::Relaxed);
        let now = Instant::now();
        if heard == seen && now < due {
            continue;
        }
        quiet_until = quiet_until.filter(|until| heard == seen && now < *until);
        seen = heard;
        let mut round = async || -> Result<bool, StoreError> {
            let ttl_ms = millis(ACTIVE * 3);
            if !link.call(&Hold { key: keys::SAMPLER, token: &token, ttl_ms }).await? {
                // That one primary answers is known now.
                if link.target().is_cluster() {
                    link.command("PING", redis::cmd("PING")).await?;
                }
                return Ok(false);
            }
            let (mut quiet, mut rest) = (true, QUIET);
            let looked_at = if quiet_until.is_none() { &*pipelines } else { &[] };
            let mut point = Point { at_ms: millis(clock.now()), pipelines: BTreeMap::new() };
            for Sampled { queue, metrics, views, due, keep_dead } in looked_at {
                let view = queue.view(clock.now()).await?;
                quiet &= view.depth == 0 && view.leased + view.parked == 0;
                show(metrics, views.as_ref(), &view);
                let sample = Sample {
                    depth: view.depth,
                    oldest_age_ms: view.oldest_age_ms,
                    ..Sample::default()
                };
                point.pipelines.insert(queue.name().clone(), sample);
                if let Some(due) = due {
                    let (first, now_ms) = (queue.first_due_ms().await?, millis(clock.now()));
                    quiet &= first.is_none_or(|first| first > now_ms);
                    // Nobody is heard when a time comes and no scheduler is there.
                    let left =
                        first.map(|first| Duration::from_millis(first.saturating_sub(now_ms)));
                    rest = left.map_or(rest, |left| rest.min(left + ACTIVE));
                    let overdue_ms = first.map_or(0, |first| now_ms.saturating_sub(first));
                    // What was moved in time may still wait for a worker.
                    show_due(due, view.delayed, overdue_ms.max(view.oldest_age_ms));
                }
                if now >= expire {
                    let removed = queue.expire_dead_letters(*keep_dead, clock.now()).await?;
                    metrics.letters_removed.increment(removed);
                }
            }
            if now >= expire {
                expire = now + EXPIRE;
            }
            let is_due = noted.is_none_or(|noted| now >= noted + trend::EVERY);
            if is_due && !point.pipelines.is_empty() {
                let processes = presence::processes(&link).await?;
                for (name, sample) in &mut point.pipelines {
                    let pace = presence::pace(&processes, name);
                    sample.queued_per_second = pace.queued_per_second;
                    sample.settled_per_second = pace.settled_per_second;
                }
                trend::add(&link, &point).await?;
                noted = Some(now);
            }
            let (used, max) = memory(&link).await?;
            metrics::redis_memory(used, max);
            due = now + if quiet { IDLE } else { ACTIVE };
            quiet_until = quiet_until.or(quiet.then_some(now + rest));
            Ok(true)
        };
        match round().await {
            Ok(true) => metrics::redis_up(true),
            Ok(false) => {
                quiet_until = None;
                metrics::redis_up(true);
                due = now + ACTIVE * 3;
                for sampled in &pipelines {
                    show(&sampled.metrics, sampled.views.as_ref(), &PipelineView::default());
                    if let Some(due) = &sampled.due {
                        show_due(due, 0, 0);
                    }
                }
                metrics::redis_memory(0, 0);
            }
            Err(error) => {
                debug!(%error, "cannot sample");
                quiet_until = None;
                metrics::redis_up(false);
                due = now;
            }
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of what fits into memory")]
fn show(metrics: &PipelineMetrics, views: Option<&CounterMetrics>, view: &PipelineView) {
    metrics.depth.set(view.depth as f64);
    metrics.ready.set(view.ready as f64);
    metrics.leased.set(view.leased as f64);
    metrics.async_leases.set(view.open as f64);
    metrics.parked.set(view.parked as f64);
    metrics.paused.set(view.paused as f64);
    metrics.dead_letters.set(view.dead as f64);
    metrics.oldest_age.set(view.oldest_age_ms as f64 / 1_000.0);
    if let Some(views) = views {
        views.unflushed.set(view.depth as f64);
        views.unflushed_oldest.set(view.oldest_age_ms as f64 / 1_000.0);
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of what fits into memory")]
fn show_due(metrics: &DueMetrics, count: u64, overdue_ms: u64) {
    metrics.due.set(count as f64);
    metrics.overdue.set(overdue_ms as f64 / 1_000.0);
}

/// Used and maximum memory of the server, bytes; of a cluster, of the fullest primary.
async fn memory(link: &Link) -> Result<(u64, u64), StoreError> {
    let mut command = redis::cmd("INFO");
    command.arg("memory");
    let answers = link.ask_every("INFO", &command).await?;
    let infos = answers.into_iter().map(|value| {
        ServerInfo::parse(&redis::from_redis_value::<String>(value).unwrap_or_default())
    });
    let fullest = infos.max_by_key(ServerInfo::fullness);
    Ok(fullest.map_or((0, 0), |info| (info.memory_used, info.memory_max)))
}
