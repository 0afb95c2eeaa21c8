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
use fairlane::sandbox::{Meter, Rig, drained, quantile_ms, waits};
use hdrhistogram::Histogram;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::error::BenchError;

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
    pub(crate) lost: u64,
    pub(crate) reordered: u64,
}

#[derive(Deserialize)]
struct Payload {
    due: u64,
}

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
                let wait = now.saturating_sub(payload.due).max(1);
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
    let running = Rig::spawn(rig.app(options.workers, |_| {}, handler).await?);
    let mut random = rand::rngs::SmallRng::seed_from_u64(11);
    let mut positions = vec![0_u32; options.bots];
    let total = options.rate * options.seconds;
    // The first second is a warm-up and is not counted.
    let warm_up = options.rate;
    let step = Duration::from_secs(1).div_f64(options.rate as f64);
    let (origin, origin_us) = (Instant::now(), micros(SystemClock.now()));
    let mut batch = Vec::new();
    for n in 0..warm_up + total {
        if n == warm_up {
            histogram.lock().unwrap_or_else(PoisonError::into_inner).reset();
        }
        let due = step.mul_f64(n as f64);
        let bot = random.random_range(0..options.bots);
        batch.push(make(bot, positions[bot], origin_us + micros(due))?);
        positions[bot] += 1;
        // At most one write per millisecond: the generator must not be the bottleneck.
        if origin.elapsed() < due || batch.len() >= 64 {
            rig.publish(batch.iter()).await?;
            batch.clear();
            watch("sending", n);
            // The runtime's timers round up to a millisecond, which would count as latency.
            let early = (origin + due).saturating_duration_since(Instant::now());
            tokio::task::block_in_place(|| std::thread::sleep(early));
        }
    }
    rig.publish(batch.iter()).await?;
    drained(|| meter.done(), warm_up + total, |_| {}).await?;
    running.stop().await?;
    let waits = histogram.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(Report {
        rate: options.rate,
        events: total,
        p50_ms: quantile_ms(&waits, 0.5),
        p90_ms: quantile_ms(&waits, 0.9),
        p99_ms: quantile_ms(&waits, 0.99),
        p999_ms: quantile_ms(&waits, 0.999),
        max_ms: quantile_ms(&waits, 1.0),
        lost: (warm_up + total).saturating_sub(meter.reached()),
        reordered: meter.reordered(),
    })
}

fn make(bot: usize, position: u32, due: u64) -> Result<Vec<u8>, BenchError> {
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
