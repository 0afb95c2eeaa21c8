//! `fairlane-bench overload`: goodput and latency when the load far exceeds the capacity.
//!
//! A server runs in its own process, pinned to one processor. The generator (`load`) is pinned to
//! another. The capacity is measured first. Then the load goes from half of the capacity to ten
//! times the capacity, while the critical classes stay at half. Each round compares three
//! protections, one after the other: Fairlane's admission control, none, and `tower`'s concurrency
//! limit with load shedding.
//!
//! Workloads: requests that need the processor for 2 ms; requests that wait for a dependency with 8
//! slots of 4 ms; and totals of the real service. The load of the last goes up to three times its
//! capacity, where a refusal costs nearly as much as an answer.

pub(crate) mod chart;
pub(crate) mod deployment;
mod flood;
mod load;
mod outcome;
mod reads;
mod runs;
mod served;
pub(crate) mod server;
mod synthetic;

use std::path::PathBuf;

use serde::Serialize;

pub(crate) use self::runs::{AWAY_MAX, LAG_MAX_MS, SPEED_MAX};
use crate::error::BenchError;
use crate::mongo::Choice;

/// The resource that a request needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Workload {
    /// The processor for 2 ms.
    Cpu,
    /// A dependency with 8 slots of 4 ms.
    Dependency,
    /// Totals of the real service.
    Reads,
}

/// The protection of the server against overload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Protection {
    /// Fairlane's admission control.
    Admission,
    /// No protection.
    None,
    /// `tower`: at most 64 concurrent requests; the others are refused.
    Tower,
}

/// The options.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// The workloads.
    pub(crate) workloads: Vec<Workload>,
    /// Multiples of the capacity, in this order. Empty: 0.5 to 10.
    pub(crate) loads: Vec<f64>,
    /// Duration of each load.
    pub(crate) seconds: u64,
    /// Number of rounds.
    pub(crate) rounds: usize,
    /// The MongoDB for the views of the real service.
    pub(crate) mongo: Choice,
}

/// The results.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    /// Seconds of each load. Figures are medians of the rounds.
    pub(crate) seconds: u64,
    /// Number of rounds.
    pub(crate) rounds: usize,
    /// By workload.
    pub(crate) workloads: Vec<Figures>,
    /// With 2,000 connections that send slowly or nothing: the share of good answers in the
    /// critical classes.
    pub(crate) flood: Option<Flood>,
}

/// The results of a flood.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Flood {
    pub(crate) connections: usize,
    pub(crate) p0_success: f64,
    pub(crate) p1_success: f64,
    pub(crate) p1_p99_ms: f64,
}

/// The results for one workload: medians of the rounds.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Figures {
    /// The workload.
    pub(crate) workload: Workload,
    /// The capacity in requests per second. Measured before every load, because the speed of the
    /// machine varies.
    pub(crate) capacity_per_second: f64,
    /// The highest load, as a multiple of the capacity.
    pub(crate) highest_load: f64,
    /// Goodput at the highest load, divided by the best goodput at any load.
    pub(crate) goodput_at_10x_ratio: f64,
    /// The lowest of the rounds, at the highest load.
    pub(crate) p0_success: f64,
    /// The lowest of the rounds, at the highest load.
    pub(crate) p1_success: f64,
    /// The lowest of the rounds and loads.
    pub(crate) p1_success_least: f64,
    /// At the highest load.
    pub(crate) admitted_p99_ms: f64,
    /// The deadline of requests.
    pub(crate) deadline_ms: u64,
    /// Refusals at 0.8 times the capacity and below, in all rounds.
    pub(crate) shed_below_capacity: u64,
    /// Time from the end of ten times the capacity to the last refusal. The clients retry three
    /// times.
    pub(crate) recovery_ms: Option<f64>,
    /// The share of good answers after that.
    pub(crate) recovered_success: Option<f64>,
    /// With one tenant of 100 at ten times its share: the p99 of the other tenants, divided by
    /// their p99 without that load.
    pub(crate) others_p99_ratio: Option<f64>,
    /// The share of good answers to the other tenants in that case.
    pub(crate) others_success: Option<f64>,
    /// When the dependency becomes ten times slower: goodput divided by its new capacity.
    pub(crate) slow_goodput_ratio: Option<f64>,
    /// The time from its recovery until no request is refused any more.
    pub(crate) slow_recovery_ms: Option<f64>,
    /// Memory of the server at the highest load divided by that at its capacity.
    pub(crate) memory_ratio: f64,
    /// Number of repeated runs. A run is repeated if the generator was late, or if the machine
    /// withheld the server's processor or changed its speed after the capacity was measured.
    pub(crate) void_runs: u64,
    /// The 99th percentile of the generator's delay in the worst run, ms. Above 5, five tries of
    /// that run were too late, and the figures are not valid.
    pub(crate) lag_p99_ms: f64,
    /// The share of the time in which the machine withheld the server's processor, in the worst
    /// run. Above 0.01 the figures are not valid.
    pub(crate) away: f64,
    /// The relative difference between the speed of the server's processor and its speed while the
    /// capacity was measured, in the worst run. Above 0.1 the figures are not valid.
    pub(crate) speed: f64,
    /// All loads.
    pub(crate) curve: Vec<Point>,
}

/// One load.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Point {
    pub(crate) protection: Protection,
    /// The multiple of the capacity.
    pub(crate) load: f64,
    /// Goodput as a share of the capacity at that time, multiplied by the median capacity.
    pub(crate) goodput_per_second: f64,
    pub(crate) p99_ms: f64,
    pub(crate) p0_success: f64,
    pub(crate) p1_success: f64,
    pub(crate) p1_shed: u64,
    pub(crate) p1_late: u64,
    pub(crate) p1_failed: u64,
    pub(crate) shed: u64,
    pub(crate) late: u64,
    pub(crate) failed: u64,
}

/// Runs the bench.
///
/// # Errors
/// If a server cannot be started or does not answer.
pub(crate) async fn run(
    options: Options,
    mut watch: impl FnMut(&'static str, u64),
) -> Result<Report, BenchError> {
    let (mut workloads, mut flood) = (Vec::new(), None);
    for &workload in &options.workloads {
        workloads.push(match workload {
            Workload::Reads => reads::measure(&options, &mut watch).await?,
            Workload::Cpu | Workload::Dependency => {
                synthetic::measure(workload, &options, &mut watch).await?
            }
        });
        if workload == Workload::Dependency {
            watch("dependency: floods of connections", 0);
            flood = Some(flood::measure().await?);
        }
    }
    let Options { seconds, rounds, .. } = options;
    Ok(Report { seconds, rounds, workloads, flood })
}

/// Writes the chart to `path`.
pub(crate) fn draw(report: &Report, path: &PathBuf) -> std::io::Result<()> {
    std::fs::write(path, chart::svg(report))
}
