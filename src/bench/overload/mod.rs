//! `fairlane bench overload`: what is answered in time when far more is asked for than can be.
//!
//! A server in a process of its own, pinned to one processor; the generator (`load`) pinned to
//! another. Capacity is measured first. Then the load goes from half of it to ten times of it, the
//! critical classes held at half, against the admission of this program, against none, and against
//! `tower`'s concurrency limit with load shedding, one after the other in every round.
//!
//! Workloads: requests that need the processor for 2 ms; requests that wait for a dependency with 8
//! slots of 4 ms; and totals of the real service, up to three times its capacity, where a refusal
//! costs nearly as much as an answer.

pub mod chart;
pub mod deployment;
mod flood;
mod load;
mod reads;
mod runs;
mod served;
pub mod server;
mod synthetic;

use std::path::PathBuf;

use serde::Serialize;

pub use self::runs::{AWAY_MAX, LAG_MAX_MS, SPEED_MAX};
use super::BenchError;
use super::mongo::Choice;

/// What a request needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Workload {
    /// The processor for 2 ms.
    Cpu,
    /// A dependency with 8 slots of 4 ms.
    Dependency,
    /// Totals of the real service.
    Reads,
}

/// What stands before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Protection {
    /// The admission of this program.
    Admission,
    /// Nothing.
    None,
    /// `tower`: 64 at once, the others refused.
    Tower,
}

/// What to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// What requests need.
    pub workloads: Vec<Workload>,
    /// Times the capacity that is asked for, in this order; none: half of it to ten times of it.
    pub loads: Vec<f64>,
    /// How long each load lasts.
    pub seconds: u64,
    /// How often it is all done.
    pub rounds: usize,
    /// Where the views of the real service are.
    pub mongo: Choice,
}

/// What came out.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Seconds of each load, and how often it was all done; figures are medians.
    pub seconds: u64,
    /// Rounds.
    pub rounds: usize,
    /// By workload.
    pub workloads: Vec<Figures>,
    /// With 2,000 connections that send slowly or nothing: the share of the critical classes that
    /// was answered in time.
    pub flood: Option<Flood>,
}

/// What came out of a flood.
#[derive(Debug, Clone, Copy, Serialize)]
#[expect(missing_docs, reason = "said above")]
pub struct Flood {
    pub connections: usize,
    pub p0_success: f64,
    pub p1_success: f64,
    pub p1_p99_ms: f64,
}

/// What came out for one workload; medians of the rounds.
#[derive(Debug, Clone, Serialize)]
pub struct Figures {
    /// What requests need.
    pub workload: Workload,
    /// Requests per second that can be answered; measured before every load, since the machine is not
    /// always as fast.
    pub capacity_per_second: f64,
    /// How many times the capacity was asked for at the most.
    pub highest_load: f64,
    /// Answered in time at that load, over the best at any load.
    pub goodput_at_10x_ratio: f64,
    /// The lowest of the rounds, at the highest load.
    pub p0_success: f64,
    /// The lowest of the rounds, at the highest load.
    pub p1_success: f64,
    /// The lowest of the rounds and loads.
    pub p1_success_least: f64,
    /// At the highest load.
    pub admitted_p99_ms: f64,
    /// That requests have.
    pub deadline_ms: u64,
    /// Refused at 0.8 times the capacity and below, in all rounds.
    pub shed_below_capacity: u64,
    /// From the end of ten times the capacity, with clients that try again three times, to the last
    /// refusal.
    pub recovery_ms: Option<f64>,
    /// After that, the share that is answered.
    pub recovered_success: Option<f64>,
    /// One tenant of 100 at ten times its share: the p99 of the others, over theirs without it.
    pub others_p99_ratio: Option<f64>,
    /// And the share of the others' requests that was answered in time.
    pub others_success: Option<f64>,
    /// The dependency becomes ten times slower: answered in time then, over what it can do then.
    pub slow_goodput_ratio: Option<f64>,
    /// And from when it recovers until nothing is refused any more.
    pub slow_recovery_ms: Option<f64>,
    /// Memory of the server at the highest load over that at its capacity.
    pub memory_ratio: f64,
    /// Runs that were done again, because the generator was late, or the machine took the server's
    /// processor away or ran it at another speed than while the capacity was measured.
    pub void_runs: u64,
    /// The generator sent 99 % at most so late, in the worst run that counts; above 5, no try of
    /// five was better, and the figures are void.
    pub lag_p99_ms: f64,
    /// The share of the time in which the machine took the server's processor away, in the worst run
    /// that counts; above 0.01 likewise.
    pub away: f64,
    /// By which share the server's processor was faster or slower than while the capacity was
    /// measured, in the worst run that counts; above 0.1 likewise.
    pub speed: f64,
    /// Every load.
    pub curve: Vec<Point>,
}

/// One load.
#[derive(Debug, Clone, Serialize)]
#[expect(missing_docs, reason = "as in the figures")]
pub struct Point {
    pub protection: Protection,
    /// Times the capacity.
    pub load: f64,
    /// The share of the capacity at that time, times the capacity.
    pub goodput_per_second: f64,
    pub p99_ms: f64,
    pub p0_success: f64,
    pub p1_success: f64,
    pub p1_shed: u64,
    pub p1_late: u64,
    pub p1_failed: u64,
    pub shed: u64,
    pub late: u64,
    pub failed: u64,
}

/// Runs it.
///
/// # Errors
/// When a server cannot be started or does not answer.
pub async fn run(
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

/// Where the chart goes, and what it shows.
pub fn draw(report: &Report, path: &PathBuf) -> std::io::Result<()> {
    std::fs::write(path, chart::svg(report))
}
