//! Measures what a backlog of one shape costs: processor time, memory and network of Redis.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fairlane::app::Roles;
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane::metrics;
use fairlane::sandbox::{Meter, Rig, drained, pipeline_name};
use serde::Serialize;

use crate::buses::copies;
use crate::error::BenchError;
use crate::pipeline::{self, generate};
use crate::{cpu, probe};

/// Number of events between two steps of the progress.
const CHUNK: usize = 10_000;

/// The shape of a backlog.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Shape {
    /// Number of bots.
    pub(crate) bots: usize,
    /// Number of events of each bot.
    pub(crate) events_per_bot: usize,
    /// Size of an event's JSON on the bus.
    pub(crate) bytes: usize,
}

impl Shape {
    pub(crate) fn events(self) -> usize {
        self.bots * self.events_per_bot
    }
}

/// What a backlog of one shape cost. Processor times are µs of Redis' main thread per event.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Measured {
    /// One step of the yardstick, before and after.
    pub(crate) yardstick_us: f64,
    /// Putting an event on the bus.
    pub(crate) write_us: f64,
    /// Only reading the bus and copying into the queues.
    pub(crate) copy_us: f64,
    /// Reading the bus, copying, claims and completions.
    pub(crate) handle_us: f64,
    /// Processor time of Fairlane for the same, with a handler that does nothing.
    pub(crate) own_us: f64,
    /// That of a process that only copies.
    pub(crate) own_copy_us: f64,
    pub(crate) events_per_visit: f64,
    /// Memory of an event on the bus.
    pub(crate) bus_bytes: f64,
    /// Memory of the queues per event, with those of the bots.
    pub(crate) queue_bytes: f64,
    /// Memory of the attempts that are kept, in all.
    pub(crate) history_bytes: u64,
    /// Network of Redis per event, with putting it on the bus.
    pub(crate) received_bytes: f64,
    pub(crate) sent_bytes: f64,
}

/// Checks the order of the events, and counts slices.
struct Visits {
    meter: Arc<Meter>,
    count: Arc<AtomicU64>,
}

impl Handler for Visits {
    async fn handle(&self, _: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        for delivery in &slice.events {
            self.meter.handled(&slice.bot, &delivery.event);
        }
        Ok(Outcomes::done())
    }

    fn committed(&self, _: &Slice, settled: usize) {
        self.meter.committed(settled);
        self.count.fetch_add(1, Ordering::Relaxed);
    }
}

/// What Redis has used so far.
#[derive(Debug, Clone, Copy)]
struct Usage {
    cpu_us: f64,
    /// Memory of the data, without buffers of connections and of the append-only file.
    bytes: f64,
    received: f64,
    sent: f64,
    own_us: f64,
}

impl Usage {
    async fn now(rig: &Rig) -> Result<Self, BenchError> {
        let info = probe::info(rig, "everything").await?;
        let field = |name| probe::field_of(&info, name);
        let own = cpu::of_process(std::process::id()).unwrap_or_default();
        Ok(Self {
            cpu_us: probe::cpu_of(&info) * 1e6,
            bytes: probe::memory_of(&info),
            received: field("total_net_input_bytes"),
            sent: field("total_net_output_bytes"),
            own_us: own.as_secs_f64() * 1e6,
        })
    }
}

/// Measures one shape on a new private Redis.
///
/// # Errors
/// If the private Redis fails, nothing moves for a minute, or an event is lost or reordered.
pub(crate) async fn measure(
    shape: Shape,
    mut watch: impl FnMut(&'static str, u64),
) -> Result<Measured, BenchError> {
    Rig::with(async |rig| Box::pin(on(rig, shape, &mut watch)).await).await
}

#[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
async fn on(
    rig: &Rig,
    shape: Shape,
    watch: &mut impl FnMut(&'static str, u64),
) -> Result<Measured, BenchError> {
    let (total, events) = (shape.events() as u64, shape.events() as f64);
    watch("yardstick", 0);
    let yardstick = probe::yardstick(rig).await?;
    let (empty, made) = (Usage::now(rig).await?, generate(load(shape))?);
    let before = Usage::now(rig).await?;
    let mut published = 0;
    for chunk in made.chunks(CHUNK) {
        rig.publish(chunk.iter().map(|(_, json)| json)).await?;
        published += chunk.len() as u64;
        watch("publishing", published);
    }
    drop(made);
    let on_bus = Usage::now(rig).await?;

    // Only copies, so that all events are in the queues.
    let roles = Roles { ingest: true, work: false, http: false, schedule: false };
    let nowhere = ([127, 0, 0, 1], 0).into();
    let handler = |meter, count| Visits { meter, count };
    let idle = handler(Meter::new(1), Arc::default());
    let app = rig.app_as(&pipeline_name(), roles, nowhere, 64, |_| {}, idle).await?;
    let so_far = || copies(&metrics::render());
    let (copied, start) = (so_far(), Usage::now(rig).await?);
    let running = Rig::spawn(app);
    drained(|| so_far() - copied, total, |count| watch("copying", count)).await?;
    let queued = Usage::now(rig).await?;
    running.stop().await?;
    probe::forget_positions(rig).await?;

    let (meter, visits) = (Meter::new(shape.bots), Arc::new(AtomicU64::new(0)));
    let busy = handler(Arc::clone(&meter), Arc::clone(&visits));
    let app = rig.app(64, |_| {}, busy).await?;
    let begun = Usage::now(rig).await?;
    let running = Rig::spawn(app);
    drained(|| meter.done(), total, |count| watch("handling", count)).await?;
    let done = Usage::now(rig).await?;
    running.stop().await?;
    let (lost, reordered) = (total.saturating_sub(meter.reached()), meter.reordered());
    if lost + reordered > 0 {
        return Err(BenchError::Faulty { lost, reordered });
    }
    let history_bytes = probe::history_bytes(rig).await?;
    watch("yardstick", 0);
    let again = probe::yardstick(rig).await?;
    let each = |from: f64, to: f64| (to - from) / events;
    Ok(Measured {
        yardstick_us: f64::midpoint(yardstick, again),
        write_us: each(before.cpu_us, on_bus.cpu_us),
        copy_us: each(start.cpu_us, queued.cpu_us),
        handle_us: each(begun.cpu_us, done.cpu_us),
        own_us: each(begun.own_us, done.own_us),
        own_copy_us: each(start.own_us, queued.own_us),
        events_per_visit: events / visits.load(Ordering::Relaxed).max(1) as f64,
        bus_bytes: each(empty.bytes, on_bus.bytes),
        queue_bytes: each(on_bus.bytes, queued.bytes),
        history_bytes,
        received_bytes: each(before.received, on_bus.received)
            + each(begun.received, done.received),
        sent_bytes: each(before.sent, on_bus.sent) + each(begun.sent, done.sent),
    })
}

fn load(shape: Shape) -> pipeline::Options {
    pipeline::Options {
        bots: shape.bots,
        events: shape.events(),
        bytes: shape.bytes,
        workers: 64,
        push: false,
        has_history: true,
    }
}
