//! `fairlane-bench growth`: how each cost grows with each size of a deployment.
//!
//! One size varies at a time; the others have their usual values. Each row has its own servers. The
//! backlog is on the bus before the clock starts, as in `pipeline`. Then the same instances handle
//! events at a low rate, and then none.

mod chart;
mod servers;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::ValueEnum;
use fairlane::app::{App, Roles};
use fairlane::clock::{Clock, SystemClock, micros};
use fairlane::config::{PipelineConfig, Start, WorkersConfig};
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane::id::{BotId, ShardCount};
use fairlane::sandbox::{Meter, Rig, STREAM, drained, event, pipeline_name, quantile_ms, waits};
use hdrhistogram::Histogram;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng as _, SeedableRng as _};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

pub(crate) use self::chart::{svg, thousands};
use self::servers::Servers;
use crate::cpu;
use crate::error::BenchError;
use crate::latency::make;

/// Events per second while the latency is measured.
const RATE: u64 = 500;
/// Duration of this, after a first second that does not count.
const LATENCY: Duration = Duration::from_secs(4);
/// Duration of the measurement without events, after a second of rest.
const IDLE: Duration = Duration::from_secs(3);
/// Maximum number of bytes of a backlog.
const BYTES_MAX: usize = 200 << 20;
/// How long parked bots are parked.
const PARKED: Duration = Duration::from_secs(3_600);

/// A size that varies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Axis {
    /// Bots, with at least one event each.
    Bots,
    /// Events of each bot.
    Events,
    /// Shards of the queues.
    Shards,
    /// Bytes of an event.
    Bytes,
    /// Further bots that are parked.
    Parked,
    /// Instances of the service.
    Instances,
    /// Primaries of a Redis cluster.
    Primaries,
}

impl Axis {
    fn values(self) -> &'static [usize] {
        match self {
            Self::Bots => &[1_000, 10_000, 100_000, 1_000_000],
            Self::Events => &[1, 10, 100, 1_000],
            Self::Shards => &[4, 16, 64, 256],
            Self::Bytes => &[100, 1_000, 10_000, 100_000],
            Self::Parked => &[0, 1_000, 10_000, 100_000],
            Self::Instances => &[1, 2, 3, 4],
            Self::Primaries => &[1, 3, 6],
        }
    }

    /// What one of it is called.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Bots => "bots",
            Self::Events => "events per bot",
            Self::Shards => "shards",
            Self::Bytes => "bytes per event",
            Self::Parked => "parked bots",
            Self::Instances => "instances of Fairlane",
            Self::Primaries => "primaries of a cluster",
        }
    }
}

/// The options.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// The sizes that vary.
    pub(crate) axes: Vec<Axis>,
    /// Number of events in a backlog, unless the size demands another number.
    pub(crate) events: usize,
    /// Number of rounds. Figures are medians.
    pub(crate) rounds: usize,
}

/// The results.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    pub(crate) rows: Vec<Row>,
}

/// The results for one value of a size.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Row {
    pub(crate) axis: Axis,
    pub(crate) value: usize,
    pub(crate) bots: usize,
    pub(crate) events: usize,
    #[serde(flatten)]
    pub(crate) figures: Figures,
}

/// The figures of a row.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Figures {
    pub(crate) events_per_second: f64,
    /// CPU time of all primaries per event, µs.
    pub(crate) redis_us_per_event: f64,
    /// That of the busiest primary.
    pub(crate) busiest_redis_us_per_event: f64,
    /// CPU time of the instances per event, µs.
    pub(crate) own_us_per_event: f64,
    pub(crate) wire_commands_per_event: f64,
    pub(crate) inner_commands_per_event: f64,
    /// Waits at a low rate after the backlog.
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    /// Memory of all primaries at most, with the bus.
    pub(crate) redis_peak_mb: f64,
    /// Commands without events, with those inside scripts.
    pub(crate) idle_commands_per_second: f64,
    pub(crate) lost: u64,
    pub(crate) reordered: u64,
}

impl Figures {
    fn fields(&mut self) -> [&mut f64; 10] {
        [
            &mut self.events_per_second,
            &mut self.redis_us_per_event,
            &mut self.busiest_redis_us_per_event,
            &mut self.own_us_per_event,
            &mut self.wire_commands_per_event,
            &mut self.inner_commands_per_event,
            &mut self.p50_ms,
            &mut self.p99_ms,
            &mut self.redis_peak_mb,
            &mut self.idle_commands_per_second,
        ]
    }

    /// The median of each figure; of lost and reordered events the sum.
    fn median(mut rounds: Vec<Self>) -> Self {
        let mut all = Self {
            lost: rounds.iter().map(|round| round.lost).sum(),
            reordered: rounds.iter().map(|round| round.reordered).sum(),
            ..Self::default()
        };
        for (place, field) in all.fields().into_iter().enumerate() {
            let mut values: Vec<f64> =
                rounds.iter_mut().map(|round| *round.fields()[place]).collect();
            values.sort_by(f64::total_cmp);
            *field = values.get(values.len() / 2).copied().unwrap_or_default();
        }
        all
    }
}

/// The sizes of one row.
#[derive(Debug, Clone, Copy)]
struct Plan {
    bots: usize,
    events: usize,
    bytes: usize,
    shards: u16,
    parked: usize,
    instances: usize,
    primaries: usize,
}

impl Plan {
    /// `value` for `axis`, with about `events` events.
    fn new(axis: Axis, value: usize, events: usize) -> Self {
        let usual = Self {
            bots: (events / 10).max(1),
            events,
            bytes: 200,
            shards: 16,
            parked: 0,
            instances: 1,
            primaries: 1,
        };
        let plan = match axis {
            Axis::Bots => Self { bots: value, events: events.max(value), ..usual },
            Axis::Events => Self { bots: (events / value).max(1), ..usual },
            Axis::Shards => Self { shards: u16::try_from(value).unwrap_or(u16::MAX), ..usual },
            Axis::Bytes => {
                let events = events.min(BYTES_MAX / value).max(10);
                Self { bytes: value, events, bots: events / 10, ..usual }
            }
            Axis::Parked => Self { parked: value, ..usual },
            Axis::Instances => Self { instances: value, ..usual },
            Axis::Primaries => Self { primaries: value, ..usual },
        };
        // Every bot has the same number of events.
        Self { events: plan.events / plan.bots * plan.bots, ..plan }
    }
}

#[derive(Deserialize)]
struct Payload {
    due: u64,
}

/// The state that the handlers of all instances share.
struct Watch {
    meter: Arc<Meter>,
    waits: Mutex<Histogram<u64>>,
    parked: Arc<Meter>,
}

struct Watching(Arc<Watch>);

impl Handler for Watching {
    async fn handle(&self, environment: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        let Watch { meter, waits, parked } = &*self.0;
        let now = micros(environment.clock.now());
        for delivery in &slice.events {
            if slice.bot.as_str().starts_with("parked-") {
                parked.handled(&slice.bot, &delivery.event);
                return Err(Failure::unavailable(0, "parked").retry_after(PARKED));
            }
            meter.handled(&slice.bot, &delivery.event);
            if let Ok(payload) = delivery.event.data_as::<Payload>() {
                let wait = now.saturating_sub(payload.due);
                waits.lock().unwrap_or_else(PoisonError::into_inner).saturating_record(wait);
            }
        }
        Ok(Outcomes::done())
    }

    fn committed(&self, _: &Slice, settled: usize) {
        self.0.meter.committed(settled);
    }
}

/// Runs the bench. Calls `watch` with what it does, and a number of events.
///
/// # Errors
/// If a server fails or nothing moves for a minute.
pub(crate) async fn run(
    options: &Options,
    mut watch: impl FnMut(&'static str, u64),
) -> Result<Report, BenchError> {
    let mut rows = Vec::new();
    for &axis in &options.axes {
        for &value in axis.values() {
            let plan = Plan::new(axis, value, options.events);
            let mut rounds = Vec::new();
            for _ in 0..options.rounds {
                let measure = async |rig: &Rig| Box::pin(measure(rig, plan, &mut watch)).await;
                rounds.push(Box::pin(Rig::with(measure)).await?);
            }
            let figures = Figures::median(rounds);
            rows.push(Row { axis, value, bots: plan.bots, events: plan.events, figures });
        }
    }
    Ok(Report { rows })
}

#[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
async fn measure(
    rig: &Rig,
    plan: Plan,
    watch: &mut impl FnMut(&'static str, u64),
) -> Result<Figures, BenchError> {
    let servers = Servers::start(rig, plan.primaries).await?;
    let (meter, parked) = (Meter::new(plan.bots), Meter::new(plan.parked));
    let handler = Arc::new(Watch { meter, waits: Mutex::new(waits()), parked });
    let Watch { meter, parked, .. } = &*handler;
    if plan.parked > 0 {
        let bots = (0..plan.parked).map(|bot| (format!("parked-{bot}"), 0));
        publish(&servers, bots, plan.bytes, |n| watch("publishing", n)).await?;
        let running = Rig::spawn(app(rig, &servers, plan, &handler).await?);
        drained(|| parked.reached(), plan.parked as u64, |n| watch("parking", n)).await?;
        running.stop().await?;
    }
    let mut order: Vec<usize> = (0..plan.events).map(|n| n % plan.bots).collect();
    // A fixed seed, so that two runs do the same work.
    order.shuffle(&mut SmallRng::seed_from_u64(7));
    let mut positions = vec![0_u32; plan.bots];
    let events = order.into_iter().map(|bot| {
        positions[bot] += 1;
        (format!("bot-{bot}"), positions[bot] - 1)
    });
    publish(&servers, events, plan.bytes, |n| watch("publishing", n)).await?;

    let mut apps = Vec::new();
    for _ in 0..plan.instances {
        apps.push(app(rig, &servers, plan, &handler).await?);
    }
    let before = servers.usage().await?;
    let own = cpu::of_process(std::process::id()).unwrap_or_default();
    let started = Instant::now();
    let running: Vec<_> = apps.into_iter().map(Rig::spawn).collect();
    drained(|| meter.done(), plan.events as u64, |n| watch("handling", n)).await?;
    let seconds = started.elapsed().as_secs_f64();
    let own = cpu::of_process(std::process::id()).unwrap_or_default().saturating_sub(own);
    let after = servers.usage().await?;

    let sent = trickle(&servers, plan, &mut positions, |n| watch("low rate", n)).await?;
    drained(|| meter.done(), plan.events as u64 + sent, |_| {}).await?;
    watch("idle", 0);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let resting = servers.usage().await?;
    tokio::time::sleep(IDLE).await;
    let rested = servers.usage().await?;
    for running in running {
        running.stop().await?;
    }
    let waits = handler.waits.lock().unwrap_or_else(PoisonError::into_inner);
    let events = plan.events as f64;
    let cpu = after.cpu.iter().zip(&before.cpu).map(|(after, before)| after - before);
    let cpu: Vec<f64> = cpu.map(|seconds| seconds * 1e6 / events).collect();
    let total = plan.events as u64 + sent;
    Ok(Figures {
        events_per_second: events / seconds,
        redis_us_per_event: cpu.iter().sum(),
        busiest_redis_us_per_event: cpu.iter().copied().fold(0.0, f64::max),
        own_us_per_event: own.as_secs_f64() * 1e6 / events,
        wire_commands_per_event: (after.commands.wire - before.commands.wire) as f64 / events,
        inner_commands_per_event: (after.commands.inner - before.commands.inner) as f64 / events,
        p50_ms: quantile_ms(&waits, 0.5),
        p99_ms: quantile_ms(&waits, 0.99),
        redis_peak_mb: rested.peak_bytes / 1e6,
        idle_commands_per_second: (rested.processed - resting.processed) / IDLE.as_secs_f64(),
        lost: total.saturating_sub(meter.reached()),
        reordered: meter.reordered(),
    })
}

/// An instance of the service.
async fn app(
    rig: &Rig,
    servers: &Servers,
    plan: Plan,
    handler: &Arc<Watch>,
) -> Result<App, BenchError> {
    let name = pipeline_name();
    let mut pipeline = PipelineConfig::new(name.as_str(), ["*"]);
    pipeline.start = Start::Earliest;
    let workers = std::num::NonZero::new(64).unwrap_or(std::num::NonZero::<usize>::MIN);
    pipeline.workers = WorkersConfig { min: workers, max: workers };
    let mut config = rig.config();
    config.redis.url = Some(servers.url().clone());
    config.redis.shards = ShardCount::new(plan.shards).unwrap_or(config.redis.shards);
    config.bus.streams = vec![STREAM.to_owned()];
    config.pipelines.insert(name.clone(), pipeline);
    let roles = Roles { http: false, ..Roles::ALL };
    let builder = App::builder(config).handler(name.as_str(), Watching(Arc::clone(handler)));
    Ok(builder.roles(roles).build().await?)
}

/// Publishes an event per bot and id.
async fn publish(
    servers: &Servers,
    events: impl Iterator<Item = (String, u32)>,
    bytes: usize,
    mut watch: impl FnMut(u64),
) -> Result<(), BenchError> {
    let mut connection = servers.bus()?;
    let (mut pipe, mut count, mut size) = (redis::pipe(), 0, 0);
    for (bot, id) in events {
        let event = event(&BotId::parse(&bot)?, &id.to_string(), "bench", bytes)?;
        size += event.len();
        pipe.cmd("XADD").arg(STREAM).arg("*").arg("event").arg(event).ignore();
        count += 1;
        if count % 500 == 0 || size > 1 << 20 {
            let () = pipe.query(&mut connection)?;
            pipe.clear();
            size = 0;
            watch(count);
            tokio::task::yield_now().await;
        }
    }
    if !pipe.is_empty() {
        let () = pipe.query(&mut connection)?;
    }
    Ok(())
}

/// Sends events at a low rate, each when it is due. Returns their number.
async fn trickle(
    servers: &Servers,
    plan: Plan,
    positions: &mut [u32],
    mut watch: impl FnMut(u64),
) -> Result<u64, BenchError> {
    let mut connection = servers.bus()?;
    let mut random = SmallRng::seed_from_u64(11);
    let step = Duration::from_secs(1) / u32::try_from(RATE).unwrap_or(u32::MAX);
    let (origin, origin_us) = (Instant::now(), micros(SystemClock.now()));
    let total = RATE * (LATENCY + Duration::from_secs(1)).as_secs();
    for n in 0..total {
        let due = step * u32::try_from(n).unwrap_or(u32::MAX);
        let early = (origin + due).saturating_duration_since(Instant::now());
        let bot = random.random_range(0..plan.bots);
        // The first second is a warm-up: its events have no time.
        let json = if n < RATE {
            let id = BotId::parse(&format!("bot-{bot}"))?;
            event(&id, &positions[bot].to_string(), "bench", plan.bytes)?
        } else {
            make(bot, positions[bot], origin_us + micros(due))?
        };
        positions[bot] += 1;
        let mut add = redis::cmd("XADD");
        add.arg(STREAM).arg("*").arg("event").arg(json);
        // The runtime's timers round up to a millisecond, which would count as latency.
        tokio::task::block_in_place(|| {
            std::thread::sleep(early);
            add.exec(&mut connection)
        })?;
        watch(n);
        // Ctrl-C ends the bench here.
        tokio::task::yield_now().await;
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bot_has_the_same_number_of_events_and_only_one_size_varies() {
        for axis in Axis::value_variants() {
            for &value in axis.values() {
                let plan = Plan::new(*axis, value, 200_000);
                assert!(
                    plan.bots > 0 && plan.events.is_multiple_of(plan.bots),
                    "{axis:?} {value}: {plan:?}"
                );
                assert!(plan.events * plan.bytes <= BYTES_MAX, "{axis:?} {value}: {plan:?}");
            }
        }
        let plan = Plan::new(Axis::Events, 1_000, 200_000);
        assert_eq!((plan.bots, plan.events, plan.shards), (200, 200_000, 16));
    }

    #[test]
    fn figures_are_medians_and_faults_are_sums() {
        let round = |figure: f64, lost: u64| Figures {
            events_per_second: figure,
            lost,
            ..Figures::default()
        };
        let all = Figures::median(vec![round(3.0, 1), round(9.0, 0), round(4.0, 2)]);
        assert!((all.events_per_second - 4.0).abs() < 1e-9);
        assert_eq!(all.lost, 3);
    }
}
