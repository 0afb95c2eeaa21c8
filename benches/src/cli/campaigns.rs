//! The reports of campaigns: promises that held, and what was measured.

use std::fmt::Write as _;

use fairlane::cli::{Output, Table};

use crate::error::CommandError;
use crate::faults::{self, Pipeline, soak};

/// What was sent, and what became of it.
fn counts(pipelines: &[Pipeline]) -> Table {
    let mut table = Table::new(&[
        "PIPELINE",
        ">SENT",
        ">HANDLED",
        ">LOST",
        ">REORDERED",
        ">STALE COMMITS",
        ">OLDER FENCE",
        ">AGAIN AFTER COMMIT",
        ">AGAIN",
    ]);
    for row in pipelines {
        let figure = |count: usize| count.to_string();
        table.row(&[
            row.name.clone(),
            figure(row.sent),
            figure(row.handled),
            figure(row.lost),
            figure(row.reordered),
            figure(row.stale_commits),
            figure(row.fence_regressions),
            figure(row.repeated_after_commit),
            figure(row.repeated),
        ]);
    }
    table
}

/// The promises that did not hold, and where to look.
fn verdict(violations: &[String], directory: Option<&str>) -> String {
    let mut text = String::new();
    for violation in violations {
        let _ = writeln!(text, "BROKEN: {violation}");
    }
    if let Some(directory) = directory {
        let _ = writeln!(text, "histories and logs: {directory}");
    }
    text + if violations.is_empty() { "every promise held" } else { "BROKEN" }
}

/// The verdict of a campaign, what it did, and what it measured.
pub(super) fn print_faults(json: bool, report: &faults::Report) -> Result<(), CommandError> {
    let output = Output::new(json);
    output.show(report, |report| {
        let mut text = String::new();
        let _ = writeln!(text, "{}", output.table(&counts(&report.pipelines)));
        let mut recoveries =
            Table::new(&["FAULT", ">TIMES", ">LATEST EVENT, MEDIAN MS", ">MAX MS"]);
        for row in &report.recoveries {
            let [times, median, max] = [row.times as u64, row.median_ms, row.max_ms].map(|n| n.to_string());
            recoveries.row(&[row.fault.clone(), times, median, max]);
        }
        let _ = writeln!(text, "{}", output.table(&recoveries));
        for (reason, letters) in &report.dead_letters {
            let _ = writeln!(text, "{letters} dead letters of {reason}");
        }
        let _ = writeln!(
            text,
            "{} faults in {} s on {} processes, seed {}; {} views, {} sales with rules, {} notifications \
             ({} calls again), {} leases completed, {} failed, {} left, {} dead letters redriven, {} actions \
             of operators, {} replays of {} events, {} requests repeated, {} processes started again",
            report.faults.values().sum::<usize>(), report.seconds, report.processes, report.seed,
            report.views, report.sales, report.notifications, report.notifications_repeated,
            report.leases_completed, report.leases_failed, report.leases_left,
            report.dead_letters_redriven, report.operations, report.replays.acknowledged, report.replays.events,
            report.requests_repeated, report.restarts,
        );
        let _ = writeln!(text, "drained in {} ms after the last fault", report.drained_ms);
        for (when, used) in ["start", "maximum", "end"].iter().zip(&report.resources) {
            let _ = writeln!(
                text, "process 0, {when}: {} MB, {} descriptors, {} threads",
                used.memory_mb, used.descriptors, used.threads
            );
        }
        for (level, lines) in &report.log_lines_per_minute {
            let _ = writeln!(text, "log lines of level {level}: {lines:.0} a minute");
        }
        let keys: u64 = report.keys.values().sum();
        let _ = writeln!(text, "{keys} keys of {} kinds in Redis", report.keys.len());
        for planned in report.smallest.iter().flatten() {
            let _ = writeln!(
                text, "still fails with: {} at {} ms, process {}, for {} ms",
                planned.fault.name(), planned.at_ms, planned.process, planned.lasts_ms
            );
        }
        text + &verdict(&report.violations, report.directory.as_deref())
    })?;
    match report.violations.len() {
        0 => Ok(()),
        broken => Err(CommandError::PromisesBroken(broken, report.seed)),
    }
}

/// The verdict of a soak, and what was used over time.
pub(super) fn print_soak(json: bool, report: &soak::Report) -> Result<(), CommandError> {
    let output = Output::new(json);
    output.show(report, |report| {
        let mut text = String::new();
        let _ = writeln!(text, "{}", output.table(&counts(&report.pipelines)));
        let mut periods = Table::new(&[
            ">FROM MIN", ">PLAIN EVENTS/S", ">P50 MS", ">P99 MS", ">MAX MS", ">MB OF PROCESS 0",
            ">MB OF REDIS", ">KEYS", ">WITHOUT TTL", ">DESCRIPTORS", ">THREADS",
        ]);
        for row in &report.periods {
            let used = row.used;
            periods.row(&[
                (row.from_s / 60).to_string(),
                row.events_per_s.to_string(),
                format!("{:.1}", row.p50_ms),
                format!("{:.1}", row.p99_ms),
                format!("{:.0}", row.max_ms),
                used.process.memory_mb.to_string(),
                used.redis_mb.to_string(),
                used.keys.to_string(),
                used.lasting_keys.to_string(),
                used.process.descriptors.to_string(),
                used.process.threads.to_string(),
            ]);
        }
        let _ = writeln!(text, "{}", output.table(&periods));
        let _ = writeln!(
            text,
            "{} days in {} s and {} runs on {} processes, up to {} events/s; {} views, {} sales with rules, {} \
             notifications ({} calls again), {} dead letters redriven, {} restarts, {} reloads; the \
             longest night took {} ms",
            report.days, report.seconds, report.runs, report.processes, report.rate, report.views,
            report.sales,
            report.notifications, report.notifications_repeated, report.dead_letters_redriven,
            report.restarts, report.reloads, report.drained_ms,
        );
        text + &verdict(&report.violations, report.directory.as_deref())
    })?;
    match report.violations.len() {
        0 => Ok(()),
        broken => Err(CommandError::SoakFailed(broken)),
    }
}
