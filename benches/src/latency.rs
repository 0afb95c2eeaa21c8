//! `fairlane-bench latency`: the time from the arrival on the bus to the handler, at a steady rate.
//!
//! Open loop: events are sent by the clock. The wait counts from the time at which an event
//! *should* have been sent. So a stall of the generator shows as latency and is not hidden.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fairlane::clock::{Clock, SystemClock, micros};
use fairlane::event::{Event, EventError};
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane::id::BotId;
use fairlane::sandbox::{Meter, Producer, Rig, STREAM, drained, quantile_ms, waits};
use hdrhistogram::Histogram;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use redis::Pipeline;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::error::BenchError;
use crate::pipeline::history;
use crate::{cpu, probe};

/// The options.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    /// Events per second.
    pub(crate) rate: u64,
    /// Duration.
    pub(crate) seconds: u64,
    /// Number of bots, chosen at random per event.
    pub(crate) bots: usize,
    /// Number of workers.
    pub(crate) workers: usize,
    /// Whether attempts are kept.
    pub(crate) has_history: bool,
}

/// The results.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    pub(crate) rate: u64,
    pub(crate) events: u64,
    pub(crate) p50_ms: f64,
    pub(crate) p90_ms: f64,
    pub(crate) p99_ms: f64,
    pub(crate) p999_ms: f64,
    pub(crate) max_ms: f64,
    /// Commands in Redis per event, including those of scripts.
    pub(crate) commands_per_event: f64,
    /// CPU time of Redis per event, µs.
    pub(crate) redis_cpu_us_per_event: f64,
    /// CPU time of this process per event, with the generator, µs.
    pub(crate) own_cpu_us_per_event: f64,
    /// The same waits behind a plain worker.
    pub(crate) floor_p50_ms: f64,
    pub(crate) floor_p99_ms: f64,
    pub(crate) lost: u64,
    pub(crate) reordered: u64,
}

#[derive(Deserialize)]
struct Payload {
    due: u64,
}

/// What the plain worker reads.
#[derive(Deserialize)]
struct FloorEvent {
    data: Payload,
}

/// The entries of a stream: their ids and fields.
type Entries = Vec<(String, Vec<String>)>;

/// The stream of the plain worker.
const FLOOR: &str = "floor";
/// Maximum duration of the plain worker, in seconds.
const FLOOR_SECONDS: u64 = 5;
/// Maximum number of events per write.
const BATCH_MAX: usize = 64;

struct Watch {
    meter: Arc<Meter>,
    waits: Arc<Mutex<Histogram<u64>>>,
}

impl Handler for Watch {
    async fn handle(&self, environment: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        let now = micros(environment.clock.now());
        for delivery in &slice.events {
            self.meter.handled(&slice.bot, &delivery.event);
            if let Ok(payload) = delivery.event.data_as::<Payload>() {
                let wait = now.saturating_sub(payload.due);
                self.waits.lock().unwrap_or_else(PoisonError::into_inner).saturating_record(wait);
            }
        }
        Ok(Outcomes::done())
    }

    fn committed(&self, _: &Slice, settled: usize) {
        self.meter.committed(settled);
    }
}

/// Runs the bench.
///
/// # Errors
/// If the private Redis fails or nothing moves for a minute.
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
    let meter = Meter::new(options.bots);
    let histogram = Arc::new(Mutex::new(waits()));
    let handler = Watch { meter: Arc::clone(&meter), waits: Arc::clone(&histogram) };
    let running = Rig::spawn(
        rig.app(options.workers, |pipeline| history(pipeline, options.has_history), handler)
            .await?,
    );
    let Options { rate, seconds, .. } = options;
    // The first second is a warm-up and is not counted.
    let mut generator = Generator::new(rig, options);
    generator.send(STREAM, rate, |n| watch("warming up", n)).await?;
    drained(|| meter.done(), rate, |_| {}).await?;
    histogram.lock().unwrap_or_else(PoisonError::into_inner).reset();
    let (commands, cpu) = (probe::all_commands(rig).await?, probe::cpu(rig).await?);
    let own = cpu::of_process(std::process::id()).unwrap_or_default();
    let total = rate * seconds;
    generator.send(STREAM, total, |n| watch("sending", n)).await?;
    drained(|| meter.done(), rate + total, |_| {}).await?;
    let own_after = cpu::of_process(std::process::id()).unwrap_or_default();
    let (commands_after, cpu_after) = (probe::all_commands(rig).await?, probe::cpu(rig).await?);
    running.stop().await?;
    let floor = floor(rig, options, |n| watch("a plain worker", n)).await?;
    let waits = histogram.lock().unwrap_or_else(PoisonError::into_inner);
    let events = total.max(1) as f64;
    Ok(Report {
        rate,
        events: total,
        p50_ms: quantile_ms(&waits, 0.5),
        p90_ms: quantile_ms(&waits, 0.9),
        p99_ms: quantile_ms(&waits, 0.99),
        p999_ms: quantile_ms(&waits, 0.999),
        max_ms: quantile_ms(&waits, 1.0),
        commands_per_event: (commands_after - commands) as f64 / events,
        redis_cpu_us_per_event: (cpu_after - cpu) * 1e6 / events,
        own_cpu_us_per_event: own_after.saturating_sub(own).as_secs_f64() * 1e6 / events,
        floor_p50_ms: quantile_ms(&floor, 0.5),
        floor_p99_ms: quantile_ms(&floor, 0.99),
        lost: (rate + total).saturating_sub(meter.reached()),
        reordered: meter.reordered(),
    })
}

/// Sends events at a steady rate.
struct Generator {
    options: Options,
    producer: Producer,
    random: SmallRng,
    /// The next position in each bot.
    positions: Vec<u32>,
}

impl Generator {
    fn new(rig: &Rig, options: Options) -> Self {
        let (random, positions) = (SmallRng::seed_from_u64(11), vec![0; options.bots]);
        Self { options, producer: rig.producer(), random, positions }
    }

    /// Sends `total` events, each when it is due and never before.
    #[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
    async fn send(
        &mut self,
        stream: &str,
        total: u64,
        mut watch: impl FnMut(u64),
    ) -> Result<(), BenchError> {
        let step = Duration::from_secs(1).div_f64(self.options.rate as f64);
        let (origin, origin_us) = (Instant::now(), micros(SystemClock.now()));
        let mut batch = Pipeline::new();
        for n in 0..total {
            let due = step.mul_f64(n as f64);
            if !batch.is_empty() && (origin.elapsed() < due || batch.len() >= BATCH_MAX) {
                self.producer.send(&batch).await?;
                batch.clear();
                watch(n);
            }
            // The runtime's timers round up to a millisecond, which would count as latency.
            let early = (origin + due).saturating_duration_since(Instant::now());
            if !early.is_zero() {
                tokio::task::block_in_place(|| std::thread::sleep(early));
            }
            let bot = self.random.random_range(0..self.options.bots);
            let event = make(bot, self.positions[bot], origin_us + micros(due))?;
            self.positions[bot] += 1;
            batch.cmd("XADD").arg(stream).arg("*").arg("event").arg(event);
        }
        Ok(self.producer.send(&batch).await?)
    }
}

/// The waits behind a plain worker that reads a stream with XREADGROUP and confirms with XACK: the
/// floor of any worker on Redis. It has no order per bot, no fairness, no retries and no fences.
async fn floor(
    rig: &Rig,
    options: Options,
    watch: impl FnMut(u64),
) -> Result<Histogram<u64>, BenchError> {
    let (warm_up, total) = (options.rate, options.rate * options.seconds.min(FLOOR_SECONDS));
    let mut connection =
        redis::Client::open(format!("redis+unix://{}", rig.target()))?.get_connection()?;
    let mut create = redis::cmd("XGROUP");
    create.arg("CREATE").arg(FLOOR).arg("group").arg("0").arg("MKSTREAM");
    let () = create.query(&mut connection)?;
    let worker = tokio::task::spawn_blocking(move || {
        let (mut waits, mut count) = (waits(), 0);
        while count < warm_up + total {
            let mut read = redis::cmd("XREADGROUP");
            read.arg("GROUP").arg("group").arg("worker").arg("COUNT").arg(BATCH_MAX);
            read.arg("BLOCK").arg(1_000).arg("STREAMS").arg(FLOOR).arg(">");
            let found: Option<Vec<(String, Entries)>> = read.query(&mut connection)?;
            let now = micros(SystemClock.now());
            let mut confirm = redis::cmd("XACK");
            confirm.arg(FLOOR).arg("group");
            let entries = found.into_iter().flatten().flat_map(|(_, entries)| entries);
            let before = count;
            for (id, fields) in entries {
                let text = fields.get(1).map_or("", String::as_str);
                let event: FloorEvent = serde_json::from_str(text).map_err(EventError::Json)?;
                if count >= warm_up {
                    waits.saturating_record(now.saturating_sub(event.data.due));
                }
                confirm.arg(id);
                count += 1;
            }
            if count > before {
                let () = confirm.query(&mut connection)?;
            }
        }
        Ok::<_, BenchError>(waits)
    });
    Generator::new(rig, options).send(FLOOR, warm_up + total, watch).await?;
    // The task is never cancelled; the caller handles a panic.
    worker.await.unwrap_or_else(|failed| std::panic::resume_unwind(failed.into_panic()))
}

/// An event of a bot that is due at a time, in µs since 1970.
pub(crate) fn make(bot: usize, position: u32, due: u64) -> Result<Vec<u8>, BenchError> {
    #[derive(Serialize)]
    struct Payload {
        due: u64,
        fill: &'static str,
    }
    let fill = "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx";
    let bot = BotId::parse(&format!("bot-{bot}"))?;
    let event = Event::builder("bench.event", &bot).id(position.to_string()).source("bench");
    let event = event.data(&Payload { due, fill }).map_err(EventError::Json)?.build()?;
    Ok(serde_json::to_vec(&event).map_err(EventError::Json)?)
}
