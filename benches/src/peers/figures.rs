//! The report: the medians of the rounds, and their range.

use std::collections::BTreeMap;

use serde::Serialize;

use super::campaign::Survived;
use super::judge::{Verdict, quantile_ms};
use super::system::System;

/// One run of a system that measured throughput.
#[derive(Debug, Clone)]
pub(super) struct Throughput {
    pub(super) enqueue: f64,
    pub(super) drain: f64,
    pub(super) end_to_end: f64,
    /// CPU time of Redis while the events were added and then drained, µs per event.
    pub(super) redis_us: f64,
    pub(super) verdict: Verdict,
}

/// One run of a system that measured fairness.
#[derive(Debug, Clone)]
pub(super) struct Fairness {
    /// In ascending order, µs.
    pub(super) waits: Vec<u32>,
    pub(super) backlog_seconds: f64,
    pub(super) verdict: Verdict,
}

/// All runs of a system, with what it was given.
#[derive(Debug, Clone)]
pub(super) struct Runs {
    pub(super) system: System,
    pub(super) events: usize,
    pub(super) backlog: usize,
    /// How it was used: name and text.
    pub(super) settings: BTreeMap<&'static str, String>,
    pub(super) throughput: Vec<Throughput>,
    pub(super) fairness: Vec<Fairness>,
    pub(super) faults: Vec<Survived>,
}

/// A figure over the rounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Figure {
    pub(crate) median: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

/// The results.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    pub(crate) tenants: usize,
    pub(crate) rounds: usize,
    pub(crate) event_bytes: usize,
    pub(crate) busy_tenants: usize,
    pub(crate) quiet_seconds: u64,
    /// Time from the start of the workers to the first quiet event.
    pub(crate) head_start_seconds: u64,
    pub(crate) quiet_per_second: u32,
    pub(crate) handling_ms: f64,
    /// Of the faults in the first round. Each further round has the next seed.
    pub(crate) seed: u64,
    pub(crate) fault_seconds: u64,
    /// Of the systems and of what they run on.
    pub(crate) versions: BTreeMap<String, String>,
    pub(crate) systems: Vec<Line>,
}

/// The results of a system.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Line {
    pub(crate) system: System,
    pub(crate) guarantees: &'static str,
    pub(crate) settings: BTreeMap<&'static str, String>,
    pub(crate) throughput: Option<ThroughputFigures>,
    pub(crate) fairness: Option<FairnessFigures>,
    pub(crate) faults: Option<FaultsFigures>,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct ThroughputFigures {
    pub(crate) events: usize,
    pub(crate) enqueue_per_second: Figure,
    pub(crate) drain_per_second: Figure,
    pub(crate) end_to_end_per_second: Figure,
    pub(crate) redis_cpu_us_per_event: Figure,
    /// The rate of Fairlane in the same round, divided by this one's.
    pub(crate) fairlane_drain_ratio: Option<Figure>,
    pub(crate) fairlane_end_to_end_ratio: Option<Figure>,
    #[serde(flatten)]
    pub(crate) verdict: Verdict,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct FairnessFigures {
    pub(crate) backlog: usize,
    pub(crate) backlog_seconds: Figure,
    pub(crate) quiet_p50_ms: Option<Figure>,
    pub(crate) quiet_p99_ms: Option<Figure>,
    pub(crate) quiet_max_ms: Option<Figure>,
    #[serde(flatten)]
    pub(crate) verdict: Verdict,
}

/// Each figure is that of a round: a seed.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct FaultsFigures {
    pub(crate) faults: Figure,
    pub(crate) acknowledged: Figure,
    pub(crate) lost: Figure,
    pub(crate) reordered: Figure,
    pub(crate) overlapping: Figure,
    pub(crate) repeated: Figure,
    pub(crate) stranded_tenants: Figure,
    /// The events of stranded tenants.
    pub(crate) waiting: Figure,
    pub(crate) quiet_p50_ms: Option<Figure>,
    pub(crate) quiet_p99_ms: Option<Figure>,
    pub(crate) quiet_max_ms: Option<Figure>,
    /// Over the rounds in which every event was handled.
    pub(crate) drained_seconds: Option<Figure>,
    pub(crate) restarted: Figure,
    /// Of Fairlane only: commits that were confirmed although a newer lease was at work.
    pub(crate) stale_commits: Option<Figure>,
}

impl Figure {
    /// `None` without values.
    pub(super) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (&low, &high) = (values.first()?, values.last()?);
        let (below, above) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
        Some(Self { median: f64::midpoint(below, above), low, high })
    }
}

/// The figures of every system.
pub(super) fn lines(runs: &[Runs]) -> Vec<Line> {
    let ours = runs.iter().find(|runs| runs.system == System::Fairlane);
    runs.iter()
        .map(|runs| Line {
            system: runs.system,
            guarantees: runs.system.guarantees(),
            settings: runs.settings.clone(),
            throughput: throughput(runs, ours),
            fairness: fairness(runs),
            faults: faults(runs),
        })
        .collect()
}

fn throughput(runs: &Runs, ours: Option<&Runs>) -> Option<ThroughputFigures> {
    let of = |figure: fn(&Throughput) -> f64| Figure::of(runs.throughput.iter().map(figure));
    // The runs of a round follow each other, so that a slow minute of the machine affects all.
    let ratio = |figure: fn(&Throughput) -> f64| {
        let pairs = ours?.throughput.iter().zip(&runs.throughput);
        Figure::of(pairs.map(|(ours, theirs)| figure(ours) / figure(theirs)))
    };
    Some(ThroughputFigures {
        events: runs.events,
        enqueue_per_second: of(|run| run.enqueue)?,
        drain_per_second: of(|run| run.drain)?,
        end_to_end_per_second: of(|run| run.end_to_end)?,
        redis_cpu_us_per_event: of(|run| run.redis_us)?,
        fairlane_drain_ratio: ratio(|run| run.drain),
        fairlane_end_to_end_ratio: ratio(|run| run.end_to_end),
        verdict: sum(runs.throughput.iter().map(|run| run.verdict)),
    })
}

fn fairness(runs: &Runs) -> Option<FairnessFigures> {
    // A round in which no quiet event was handled has no waits, and its events count as lost.
    let waits = |quantile| {
        Figure::of(runs.fairness.iter().filter_map(|run| quantile_ms(&run.waits, quantile)))
    };
    Some(FairnessFigures {
        backlog: runs.backlog,
        backlog_seconds: Figure::of(runs.fairness.iter().map(|run| run.backlog_seconds))?,
        quiet_p50_ms: waits(0.5),
        quiet_p99_ms: waits(0.99),
        quiet_max_ms: waits(1.0),
        verdict: sum(runs.fairness.iter().map(|run| run.verdict)),
    })
}

fn faults(runs: &Runs) -> Option<FaultsFigures> {
    #[expect(clippy::cast_precision_loss, reason = "counts of events")]
    let of =
        |count: fn(&Survived) -> usize| Figure::of(runs.faults.iter().map(|run| count(run) as f64));
    let waits = |quantile| {
        Figure::of(runs.faults.iter().filter_map(|run| quantile_ms(&run.waits, quantile)))
    };
    #[expect(clippy::cast_precision_loss, reason = "a count of commits")]
    let stale = runs.faults.iter().filter_map(|run| run.stale_commits.map(|count| count as f64));
    let drained = runs.faults.iter().filter_map(|run| run.drained);
    Some(FaultsFigures {
        faults: of(|run| run.faults.values().sum())?,
        acknowledged: of(|run| run.acknowledged)?,
        lost: of(|run| run.lost)?,
        reordered: of(|run| run.reordered)?,
        overlapping: of(|run| run.overlapping)?,
        repeated: of(|run| run.repeated)?,
        stranded_tenants: of(|run| run.stranded)?,
        waiting: of(|run| run.waiting)?,
        quiet_p50_ms: waits(0.5),
        quiet_p99_ms: waits(0.99),
        quiet_max_ms: waits(1.0),
        drained_seconds: Figure::of(drained.map(|drained| drained.as_secs_f64())),
        restarted: of(|run| run.restarted)?,
        stale_commits: Figure::of(stale),
    })
}

fn sum(verdicts: impl Iterator<Item = Verdict>) -> Verdict {
    verdicts.fold(Verdict::default(), Verdict::plus)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(system: System, drains: &[f64]) -> Runs {
        let run = |drain: &f64| Throughput {
            enqueue: 1.0,
            drain: *drain,
            end_to_end: drain / 2.0,
            redis_us: 9.0,
            verdict: Verdict { lost: 1, ..Verdict::default() },
        };
        let waits = |_: &f64| Fairness {
            waits: vec![1_000, 2_000],
            backlog_seconds: 6.0,
            verdict: Verdict::default(),
        };
        Runs {
            system,
            events: 10,
            backlog: 4,
            settings: BTreeMap::new(),
            throughput: drains.iter().map(run).collect(),
            fairness: drains.iter().map(waits).collect(),
            faults: Vec::new(),
        }
    }

    #[test]
    fn a_figure_is_the_median_with_its_range() {
        let figure = |median, low, high| Some(Figure { median, low, high });
        assert_eq!(Figure::of([3.0, 1.0, 2.0]), figure(2.0, 1.0, 3.0));
        assert_eq!(Figure::of([4.0, 1.0, 2.0, 3.0]), figure(2.5, 1.0, 4.0));
        assert_eq!(Figure::of([]), None);
    }

    #[test]
    fn ratios_compare_runs_of_the_same_round() {
        let all = [
            runs(System::Groupmq, &[10.0, 100.0, 5.0]),
            runs(System::Fairlane, &[30.0, 100.0, 20.0]),
        ];
        let lines = lines(&all);
        let theirs = lines[0].throughput.as_ref().unwrap();
        let ratio = Figure { median: 3.0, low: 1.0, high: 4.0 };
        assert_eq!(theirs.fairlane_drain_ratio, Some(ratio));
        assert_eq!(theirs.fairlane_end_to_end_ratio, Some(ratio));
        assert_eq!((theirs.drain_per_second.median, theirs.verdict.lost), (10.0, 3));
        let waits = lines[0].fairness.as_ref().unwrap().quiet_p99_ms;
        assert_eq!(waits, Some(Figure { median: 2.0, low: 2.0, high: 2.0 }));
    }

    #[test]
    fn a_report_without_fairlane_has_no_ratios_and_without_runs_no_figures() {
        let lines = lines(&[runs(System::Bullmq, &[10.0]), runs(System::Xreadgroup, &[])]);
        assert_eq!(lines[0].throughput.as_ref().unwrap().fairlane_drain_ratio, None);
        assert!(lines[1].throughput.is_none() && lines[1].fairness.is_none());
        assert!(lines[1].faults.is_none());
    }
}
