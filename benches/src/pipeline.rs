//! `fairlane-bench pipeline`: the maximum throughput from the bus to acknowledged events.
//!
//! The events are on the bus before the clock starts, with bots in random order. The handler only
//! checks the order. So the bench measures reading the bus, fan-out, claims, decoding and
//! completions. With `--handler push`, a receiver in the same process gets the events instead.

use std::sync::Arc;

use fairlane::config::PipelineConfig;
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane::id::BotId;
use fairlane::sandbox::{Meter, Rig, drained, event};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use serde::Serialize;
use tokio::time::Instant;

use crate::error::BenchError;
use crate::push::Receiver;
use crate::{cpu, probe};

/// The options.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    /// Number of bots.
    pub(crate) bots: usize,
    /// Number of events, spread evenly.
    pub(crate) events: usize,
    /// Size of an event's JSON on the bus, bytes.
    pub(crate) bytes: usize,
    /// Number of workers.
    pub(crate) workers: usize,
    /// Whether a receiver gets the events over HTTP. It runs in this process.
    pub(crate) push: bool,
    /// Whether attempts are kept.
    pub(crate) has_history: bool,
}

/// The results.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    pub(crate) bots: usize,
    pub(crate) events: usize,
    pub(crate) seconds: f64,
    pub(crate) events_per_second: f64,
    pub(crate) redis_benchmark_per_second: Option<f64>,
    pub(crate) ratio: Option<f64>,
    pub(crate) wire_commands_per_event: f64,
    pub(crate) inner_commands_per_event: f64,
    pub(crate) redis_cpu_us_per_event: f64,
    pub(crate) own_cpu_us_per_event: f64,
    /// Memory of the attempts that Redis keeps.
    pub(crate) history_bytes: u64,
    pub(crate) lost: u64,
    pub(crate) reordered: u64,
}

/// Checks the order of the events.
pub(crate) struct Check(pub(crate) Arc<Meter>);

impl Handler for Check {
    async fn handle(&self, _: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        for delivery in &slice.events {
            self.0.handled(&slice.bot, &delivery.event);
        }
        Ok(Outcomes::done())
    }

    fn committed(&self, _: &Slice, settled: usize) {
        self.0.committed(settled);
    }
}

/// Runs the bench. Calls `watch` with the number of published events, then with the number of
/// handled ones.
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
    let events = generate(options)?;
    let mut published = 0;
    for chunk in events.chunks(10_000) {
        rig.publish(chunk.iter().map(|(_, json)| json)).await?;
        published += chunk.len() as u64;
        watch("publishing", published);
    }
    drop(events);
    let meter = Meter::new(options.bots);
    let receiver =
        if options.push { Some(Receiver::start(Arc::clone(&meter)).await?) } else { None };
    let change = |pipeline: &mut PipelineConfig| {
        history(pipeline, options.has_history);
        if let Some(receiver) = &receiver {
            "push".clone_into(&mut pipeline.handler);
            pipeline.url = Some(receiver.url.clone());
        }
    };
    let app = rig.app(options.workers, change, Check(Arc::clone(&meter))).await?;
    let (commands, cpu) = (probe::commands(rig).await?, probe::cpu(rig).await?);
    let own = cpu::of_process(std::process::id()).unwrap_or_default();
    let started = Instant::now();
    let running = Rig::spawn(app);
    let total = options.events as u64;
    let done = || receiver.as_ref().map_or_else(|| meter.done(), Receiver::events);
    drained(done, total, |done| watch("handling", done)).await?;
    let seconds = started.elapsed().as_secs_f64();
    let own_after = cpu::of_process(std::process::id()).unwrap_or_default();
    let (commands_after, cpu_after) = (probe::commands(rig).await?, probe::cpu(rig).await?);
    running.stop().await?;
    let history_bytes = probe::history_bytes(rig).await?;
    let benchmark = probe::benchmark(rig).await;
    let events = options.events as f64;
    let events_per_second = events / seconds;
    Ok(Report {
        bots: options.bots,
        events: options.events,
        seconds,
        events_per_second,
        redis_benchmark_per_second: benchmark,
        ratio: benchmark.map(|benchmark| events_per_second / benchmark),
        wire_commands_per_event: (commands_after.wire - commands.wire) as f64 / events,
        inner_commands_per_event: (commands_after.inner - commands.inner) as f64 / events,
        redis_cpu_us_per_event: (cpu_after - cpu) * 1e6 / events,
        own_cpu_us_per_event: own_after.saturating_sub(own).as_secs_f64() * 1e6 / events,
        history_bytes,
        lost: total.saturating_sub(meter.reached()),
        reordered: meter.reordered(),
    })
}

/// Keeps attempts as by default, or none.
pub(crate) fn history(pipeline: &mut PipelineConfig, is_kept: bool) {
    if !is_kept {
        pipeline.history.slices = 0;
    }
}

/// The events as JSON, in order for each bot, with bots mixed at random.
pub(crate) fn generate(options: Options) -> Result<Vec<(BotId, Vec<u8>)>, BenchError> {
    let mut order: Vec<usize> = (0..options.events).map(|n| n % options.bots).collect();
    // A fixed seed, so that two runs do the same work.
    order.shuffle(&mut rand::rngs::SmallRng::seed_from_u64(7));
    let mut positions = vec![0_u32; options.bots];
    order
        .into_iter()
        .map(|bot| {
            let id = positions[bot].to_string();
            positions[bot] += 1;
            let bot = BotId::parse(&format!("bot-{bot}"))?;
            let json = event(&bot, &id, "bench", options.bytes)?;
            Ok((bot, json))
        })
        .collect()
}
