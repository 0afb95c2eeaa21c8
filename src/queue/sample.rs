//! Samples the values that all processes share through Redis. One process at a time samples, under
//! a lock with a time to live. The others report zero, so dashboards should use `max`.
//!
//! Without activity the queues are sampled every five minutes. The memory is sampled and the charts
//! get a point every minute: an idle Fairlane costs next to nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use tracing::{debug, warn};

use super::memory::memory_and_replicas;
use super::wake::{Listener, Wake};
use super::{PipelineView, Queue};
use crate::caught::caught;
use crate::clock::{SharedClock, millis};
use crate::id::{PipelineName, Shard};
use crate::lifecycle::Shutdown;
use crate::metrics::{self, PipelineMetrics};
use crate::presence;
use crate::redis::scripts::Hold;
use crate::redis::{Link, RedisError, keys};
use crate::telemetry::OncePerMinute;
use crate::trend::{self, Minute, Point, Sample, Series};

const ACTIVE: Duration = Duration::from_secs(2);
/// The lock of the sampler: another process takes over soon after the sampler died.
const LOCK_TTL: Duration = Duration::from_secs(3);
const IDLE: Duration = Duration::from_secs(60);
/// Sampling interval of empty queues while no wake message arrives.
const QUIET: Duration = Duration::from_secs(300);
/// Interval of removing old dead letters.
const EXPIRE: Duration = Duration::from_secs(60);

/// A pipeline to sample.
pub(crate) struct Sampled {
    pub(crate) queue: Queue,
    pub(crate) metrics: PipelineMetrics,
    /// The age above which dead letters are deleted.
    pub(crate) keep_dead: Duration,
    /// The gauges of its product.
    pub(crate) gauges: Option<Box<dyn Gauges>>,
}

/// The gauges of a product for its pipeline. A call that panics is logged, and the next one is made all the
/// same.
pub trait Gauges: Send + Sync + 'static {
    /// Whether to measure the overdue time of the first delayed event.
    fn watches_delayed(&self) -> bool {
        false
    }

    /// Reports a sample; [`Seen::default`] if another process samples.
    fn show(&self, seen: &Seen);
}

/// A sample of a pipeline.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// The state of its queues.
    pub view: PipelineView,
    /// How long the first delayed event has been overdue, ms. 0 unless it is measured.
    pub overdue_ms: u64,
}

/// Counts wake messages as signs of activity.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    heard: AtomicU64,
    /// Whether this process samples, or cannot know that another one does.
    samples: AtomicBool,
}

impl Activity {
    /// Whether this process reports the values that all processes share.
    pub(crate) fn is_sampled_here(&self) -> bool {
        self.samples.load(Ordering::Relaxed)
    }
}

pub(crate) struct ActivityEar(pub(crate) Arc<Activity>);

impl Listener for ActivityEar {
    fn heard(&self, _: Shard, _: &Wake) {
        self.0.heard.fetch_add(1, Ordering::Relaxed);
    }

    fn missed(&self) {
        self.0.heard.fetch_add(1, Ordering::Relaxed);
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
    let now = Instant::now();
    let (expire, damaged) = (now, OncePerMinute::new());
    let mut sampler = Sampler {
        pipelines,
        link,
        clock,
        token,
        quiet_until: None,
        expire,
        noted: None,
        minute: Minute::default(),
        damaged,
    };
    let mut seen = u64::MAX;
    let mut due = now;
    loop {
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => break,
            () = tokio::time::sleep(ACTIVE) => {}
        }
        metrics::upkeep();
        let heard = activity.heard.load(Ordering::Relaxed);
        let now = Instant::now();
        if heard == seen && now < due {
            continue;
        }
        sampler.quiet_until = sampler.quiet_until.filter(|until| heard == seen && now < *until);
        seen = heard;
        let round = sampler.round(now).await;
        activity.samples.store(!matches!(round, Ok(None)), Ordering::Relaxed);
        match round {
            Ok(Some(pause)) => {
                metrics::redis_up(true);
                due = now + pause;
            }
            Ok(None) => {
                metrics::redis_up(true);
                sampler.leave();
                due = now + ACTIVE;
            }
            Err(error) => {
                debug!(%error, "cannot sample the queues");
                // A full server refuses writes, but it answers.
                metrics::redis_up(error.is_full());
                sampler.quiet_until = None;
                due = now;
            }
        }
    }
}

/// The state of one process while it samples.
struct Sampler {
    pipelines: Vec<Sampled>,
    link: Arc<Link>,
    clock: SharedClock,
    /// The id of this process for the lock.
    token: String,
    /// Set if all queues were found empty: until then they need no sample.
    quiet_until: Option<Instant>,
    /// When old dead letters are removed next.
    expire: Instant,
    /// When the last point of the trend was added.
    noted: Option<Instant>,
    /// The points of the current minute.
    minute: Minute,
    /// When a pipeline that cannot be sampled was last logged.
    damaged: OncePerMinute,
}

impl Sampler {
    /// Samples everything. Returns how long no sample is needed if no wake message arrives; `None`:
    /// another process samples. Reads before it writes, because a full server refuses writes.
    async fn round(&mut self, now: Instant) -> Result<Option<Duration>, RedisError> {
        let link = Arc::clone(&self.link);
        let ttl_ms = millis(LOCK_TTL);
        let lock = keys::sampler(link.prefix());
        if !link.call(&Hold { key: &lock, token: &self.token, ttl_ms }).await? {
            // So far only one primary has answered. This command asks all of them.
            if link.target().is_cluster() {
                link.command("PING", redis::cmd("PING")).await?;
            }
            return Ok(None);
        }
        let info = memory_and_replicas(&link).await?;
        metrics::redis_memory(info.memory_used, info.memory_max);
        metrics::redis_replicas(info.replication.replicas, info.replication.lag_bytes);
        let mut found = Found { quiet: true, rest: QUIET, samples: BTreeMap::new() };
        let looked_at = if self.quiet_until.is_none() { &*self.pipelines } else { &[] };
        if self.quiet_until.is_some() {
            // They are still empty. Their points distinguish an idle process from a stopped one.
            let names = self.pipelines.iter().map(|sampled| sampled.queue.name().clone());
            found.samples = names.map(|name| (name, Sample::default())).collect();
        }
        // Ages and due times are those of Redis: the clock of this process may be wrong.
        let time = link.time().await?;
        for sampled in looked_at {
            match sampled.look(time, now >= self.expire, &mut found).await {
                Err(error) if error.is_passing() && !error.is_full() => return Err(error),
                // The error concerns only this pipeline.
                Err(error) => {
                    found.quiet = false;
                    if let Some(suppressed) = self.damaged.take() {
                        let pipeline = sampled.queue.name();
                        warn!(%pipeline, %error, suppressed, "cannot sample a pipeline");
                    }
                }
                Ok(()) => {}
            }
        }
        if now >= self.expire {
            self.expire = now + EXPIRE;
        }
        let is_due = self.noted.is_none_or(|noted| now >= noted + trend::EVERY);
        if is_due && !found.samples.is_empty() {
            match self.note(found.samples).await {
                Err(error) if error.is_full() => debug!(%error, "cannot add a point to the charts"),
                noted => noted?,
            }
            self.noted = Some(now);
        }
        let Found { quiet, rest, .. } = found;
        self.quiet_until = self.quiet_until.or(quiet.then_some(now + rest));
        Ok(Some(if quiet { IDLE } else { ACTIVE }))
    }

    /// Adds a point to the trend, and that of the minute if it is over.
    async fn note(
        &mut self,
        mut pipelines: BTreeMap<PipelineName, Sample>,
    ) -> Result<(), RedisError> {
        let processes = presence::processes(&self.link).await?;
        for (name, sample) in &mut pipelines {
            let pace = presence::pace(&processes, name);
            let calls = presence::calls(&processes, name);
            sample.queued_per_second = pace.queued_per_second;
            sample.settled_per_second = pace.settled_per_second;
            sample.calls_per_second = calls.per_second;
            sample.failed_per_second = calls.failed_per_second;
            sample.call_ms = calls.mean_ms;
            sample.call_max_ms = calls.max_ms;
        }
        let point = Point { at_ms: millis(self.clock.now()), pipelines };
        trend::add(&self.link, Series::Recent, &point).await?;
        match self.minute.add(&point) {
            Some(minute) => trend::add(&self.link, Series::Minutes, &minute).await,
            None => Ok(()),
        }
    }

    /// Another process samples: clear the gauges of this one.
    fn leave(&mut self) {
        self.quiet_until = None;
        self.minute = Minute::default();
        for sampled in &self.pipelines {
            show(&sampled.metrics, &PipelineView::default(), 0);
            sampled.tell(&Seen::default());
        }
        metrics::redis_memory(0, 0);
        metrics::redis_replicas(0, 0);
    }
}

/// The result of a round.
struct Found {
    /// All queues are empty.
    quiet: bool,
    /// Maximum time that the queues stay empty without a wake message.
    rest: Duration,
    samples: BTreeMap<PipelineName, Sample>,
}

impl Sampled {
    /// Samples this pipeline, and deletes old dead letters if `expires` is set. `now` is the time of Redis.
    async fn look(
        &self,
        now: Duration,
        expires: bool,
        found: &mut Found,
    ) -> Result<(), RedisError> {
        let Self { queue, metrics, keep_dead, .. } = self;
        let view = queue.view(now).await?;
        found.quiet &= view.depth == 0 && view.leased + view.parked == 0;
        show(metrics, &view, queue.limits().linger_ms);
        #[expect(clippy::cast_precision_loss, reason = "a picture")]
        let [depth, oldest_age_ms] = [view.depth, view.oldest_age_ms].map(|number| number as f64);
        let sample = Sample { depth, oldest_age_ms, ..Sample::default() };
        found.samples.insert(queue.name().clone(), sample);
        let mut overdue_ms = 0;
        if self.watches_delayed() {
            let (first, now_ms) = (queue.first_due_ms().await?, millis(now));
            found.quiet &= first.is_none_or(|first| first > now_ms);
            // A due time causes no wake message if no scheduler runs.
            let left = first.map(|first| Duration::from_millis(first.saturating_sub(now_ms)));
            found.rest = left.map_or(found.rest, |left| found.rest.min(left + ACTIVE));
            overdue_ms = first.map_or(0, |first| now_ms.saturating_sub(first));
        }
        self.tell(&Seen { view, overdue_ms });
        if expires {
            let removed = queue.expire_dead_letters(*keep_dead).await?;
            metrics.letters_removed.increment(removed);
        }
        Ok(())
    }

    /// Whether its product wants the overdue time of the first delayed event.
    fn watches_delayed(&self) -> bool {
        self.gauges.as_ref().is_some_and(|gauges| {
            let watches =
                caught(self.queue.name(), "Gauges::watches_delayed", || gauges.watches_delayed());
            watches == Some(true)
        })
    }

    /// Shows a sample in the gauges of its product.
    fn tell(&self, seen: &Seen) {
        if let Some(gauges) = &self.gauges {
            caught(self.queue.name(), "Gauges::show", || gauges.show(seen));
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of what fits into memory")]
fn show(metrics: &PipelineMetrics, view: &PipelineView, linger_ms: u64) {
    metrics.depth.set(view.depth as f64);
    metrics.ready.set(view.ready as f64);
    metrics.leased.set(view.leased as f64);
    metrics.async_leases.set(view.open as f64);
    metrics.parked.set(view.parked as f64);
    metrics.paused.set(view.paused as f64);
    metrics.set_aside.set(view.set_aside as f64);
    metrics.dead_letters.set(view.dead as f64);
    // A bot without tokens is parked.
    let throttled = if view.parked > 0 { view.throttled } else { 0 };
    metrics.throttled.set(throttled as f64);
    // Events that wait for others on purpose are not late.
    let late_ms = view.oldest_age_ms.saturating_sub(linger_ms);
    metrics.oldest_age.set(late_ms as f64 / 1_000.0);
}

#[cfg(test)]
mod tests {
    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;

    /// The value of a metric after a view of a pipeline with a linger of a minute.
    fn shown(metric: &str, view: &PipelineView) -> String {
        let recorder = PrometheusBuilder::new().build_recorder();
        let name = PipelineName::parse("p").unwrap();
        let of_pipeline = ::metrics::with_local_recorder(&recorder, || PipelineMetrics::new(&name));
        show(&of_pipeline, view, 60_000);
        let text = recorder.handle().render();
        let line = text.lines().find(|line| line.starts_with(&format!("{metric}{{"))).unwrap();
        line.rsplit_once(' ').unwrap().1.to_owned()
    }

    #[test]
    fn an_event_that_waits_for_others_has_no_age_until_linger_is_over() {
        let ages = [59_999, 60_000, 90_500].map(|oldest_age_ms| {
            let view = PipelineView { oldest_age_ms, ..PipelineView::default() };
            shown("fairlane_queue_oldest_age_seconds", &view)
        });
        assert_eq!(ages, ["0", "0", "30.5"]);
    }

    #[test]
    fn throttled_bots_are_shown_while_bots_are_parked() {
        let counts = [0, 1].map(|parked| {
            let view = PipelineView { parked, throttled: 2, ..PipelineView::default() };
            shown("fairlane_bots_throttled", &view)
        });
        assert_eq!(counts, ["0", "2"]);
    }
}
