//! `fairlane-bench plan --check`: measures some loads on this machine and compares them with the
//! model.

use serde::Serialize;

use super::measure::{Measured, Shape, measure};
use super::model::{self, Density};
use crate::error::BenchError;

/// Deviation from which on the model is wrong.
pub(crate) const DEVIATION_MAX: f64 = 0.2;

/// A figure of a load, by the model and measured.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Compared {
    pub(crate) bots: usize,
    pub(crate) events_per_bot: usize,
    pub(crate) bytes: usize,
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) model: f64,
    /// The median of the rounds.
    pub(crate) measured: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
    /// Of the model from the measured, relative.
    pub(crate) deviation: f64,
    /// Whether the check fails if the deviation is large.
    pub(crate) is_judged: bool,
}

impl Compared {
    pub(crate) fn is_within(&self) -> bool {
        self.deviation.abs() <= DEVIATION_MAX
    }
}

/// The results of the check.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Check {
    pub(crate) rounds: usize,
    pub(crate) figures: Vec<Compared>,
    /// What was measured, per load and round.
    pub(crate) measured: Vec<(Shape, Vec<Measured>)>,
}

impl Check {
    /// The judged figures that deviate too much.
    pub(crate) fn missed(&self) -> impl Iterator<Item = &Compared> {
        self.figures.iter().filter(|figure| figure.is_judged && !figure.is_within())
    }
}

/// Measures loads and compares them with the model.
///
/// # Errors
/// As for [`measure`].
pub(crate) async fn check(
    shapes: &[Shape],
    rounds: usize,
    mut watch: impl FnMut(&'static str, u64),
) -> Result<Check, BenchError> {
    let mut measured = Vec::new();
    for _ in 0..rounds {
        for (at, &shape) in shapes.iter().enumerate() {
            let one = Box::pin(measure(shape, &mut watch)).await?;
            if measured.len() <= at {
                measured.push((shape, Vec::new()));
            }
            measured[at].1.push(one);
        }
    }
    let figures = measured.iter().flat_map(|(shape, rounds)| compare(*shape, rounds)).collect();
    Ok(Check { rounds, figures, measured })
}

/// The figures of a load.
#[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
fn compare(shape: Shape, rounds: &[Measured]) -> Vec<Compared> {
    let (bots, each) = (shape.bots as f64, shape.events_per_bot as f64);
    let (bytes, events) = (shape.bytes as f64, shape.events() as f64);
    let density = Density::of_backlog(bots, each);
    let (received, sent) = model::network(density, bytes);
    let figure = |name, unit, model: f64, is_judged, of: fn(&Measured) -> f64| {
        let mut all: Vec<f64> = rounds.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        let measured = all[all.len() / 2];
        Compared {
            bots: shape.bots,
            events_per_bot: shape.events_per_bot,
            bytes: shape.bytes,
            name,
            unit,
            model,
            measured,
            least: all[0],
            most: all[all.len() - 1],
            deviation: model / measured - 1.0,
            is_judged,
        }
    };
    let queues = model::queue_bytes(bots, events, bytes) / events;
    vec![
        figure("Redis per event", "yardsticks", model::handle(density, bytes), true, |one| {
            one.handle_us / one.yardstick_us
        }),
        figure("Redis, memory of the queues per event", "bytes", queues, true, |one| {
            one.queue_bytes
        }),
        figure(
            "Redis, memory of the bus per event",
            "bytes",
            model::bus_bytes(bytes),
            true,
            |one| one.bus_bytes,
        ),
        figure("Redis, putting on the bus", "yardsticks", model::write(bytes), false, |one| {
            one.write_us / one.yardstick_us
        }),
        figure("Redis receives per event", "bytes", received, false, |one| one.received_bytes),
        figure("Redis sends per event", "bytes", sent, false, |one| one.sent_bytes),
        figure("events per visit", "events", density.per_visit, false, |one| one.events_per_visit),
        figure("Fairlane per event", "yardsticks", model::own(density, bytes), false, |one| {
            one.own_us / one.yardstick_us
        }),
        figure("Fairlane, copying", "yardsticks", model::own_copy(bytes), false, |one| {
            one.own_copy_us / one.yardstick_us
        }),
    ]
}
