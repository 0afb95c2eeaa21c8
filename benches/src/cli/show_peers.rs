//! Prints the comparison with other queues.

use std::fmt::Write as _;

use fairlane::cli::{Output, Table};

use crate::error::CommandError;
use crate::peers::{self, Figure};

/// A table per measure, then the settings.
pub(super) fn print_peers(json: bool, report: &peers::Report) -> Result<(), CommandError> {
    let output = Output::new(json);
    output.show(report, |report| {
        let mut text = String::new();
        let mut rates = Table::new(&[
            "SYSTEM", ">EVENTS", ">ENQUEUE/S", ">DRAIN/S", ">RATIO", ">END TO END/S", ">RATIO",
            ">REDIS µS/EVENT", ">LOST", ">REPEATED", ">REORDERED",
        ]);
        let mut waits = Table::new(&[
            "SYSTEM", ">BACKLOG", ">LASTED S", ">QUIET P50 MS", ">P99 MS", ">MAX MS", ">LOST",
            ">REPEATED", ">REORDERED",
        ]);
        for line in &report.systems {
            if let Some(figures) = &line.throughput {
                rates.row(&[
                    line.system.name().to_owned(),
                    figures.events.to_string(),
                    shown(Some(figures.enqueue_per_second), 0),
                    shown(Some(figures.drain_per_second), 0),
                    shown(figures.fairlane_drain_ratio, 2),
                    shown(Some(figures.end_to_end_per_second), 0),
                    shown(figures.fairlane_end_to_end_ratio, 2),
                    shown(Some(figures.redis_cpu_us_per_event), 1),
                    figures.verdict.lost.to_string(),
                    figures.verdict.repeated.to_string(),
                    figures.verdict.reordered.to_string(),
                ]);
            }
            if let Some(figures) = &line.fairness {
                waits.row(&[
                    line.system.name().to_owned(),
                    figures.backlog.to_string(),
                    shown(Some(figures.backlog_seconds), 1),
                    shown(figures.quiet_p50_ms, 1),
                    shown(figures.quiet_p99_ms, 1),
                    shown(figures.quiet_max_ms, 1),
                    figures.verdict.lost.to_string(),
                    figures.verdict.repeated.to_string(),
                    figures.verdict.reordered.to_string(),
                ]);
            }
        }
        if report.systems.iter().any(|line| line.throughput.is_some()) {
            let _ = writeln!(
                text,
                "{} tenants, events of {} bytes; RATIO: Fairlane's rate divided by this one\n{}\n",
                report.tenants,
                report.event_bytes,
                output.table(&rates)
            );
        }
        if report.systems.iter().any(|line| line.fairness.is_some()) {
            let _ = writeln!(
                text,
                "{} busy tenants with a backlog, {} quiet ones with {} events/s for {} s; {} ms per event\n{}\n",
                report.busy_tenants,
                report.tenants - report.busy_tenants,
                report.quiet_per_second,
                report.quiet_seconds,
                report.handling_ms,
                output.table(&waits)
            );
        }
        if report.systems.iter().any(|line| line.faults.is_some()) {
            let _ = writeln!(text, "{}", survival(report, output));
        }
        for line in &report.systems {
            let _ = writeln!(text, "{}: {}", line.system.name(), line.guarantees);
            for (role, settings) in &line.settings {
                let _ = writeln!(text, "  {role}: {settings}");
            }
        }
        let versions = report.versions.iter().map(|(name, version)| format!("{name} {version}"));
        let _ = write!(text, "\nversions: {}", versions.collect::<Vec<_>>().join(", "));
        text
    })?;
    #[expect(clippy::cast_precision_loss, reason = "a number of seconds")]
    let window = (report.head_start_seconds + report.quiet_seconds) as f64;
    for line in &report.systems {
        let lasted = line.fairness.as_ref().map(|figures| figures.backlog_seconds.low);
        if let Some(lasted) = lasted.filter(|lasted| *lasted < window) {
            eprintln!(
                "note: the backlog of {} ended after {lasted:.1} s, before the last quiet events were sent; its waits are too short",
                line.system.name()
            );
        }
    }
    Ok(())
}

fn shown(figure: Option<Figure>, digits: usize) -> String {
    figure.map_or_else(|| "-".to_owned(), |figure| format!("{:.digits$}", figure.median))
}

/// What the systems made of the faults. A count that was not the same in every round has its range.
fn survival(report: &peers::Report, output: Output) -> String {
    let ranged = |figure: Figure| {
        let Figure { median, low, high } = figure;
        if low < high {
            format!("{median:.0} ({low:.0}-{high:.0})")
        } else {
            format!("{median:.0}")
        }
    };
    let mut table = Table::new(&[
        "SYSTEM",
        ">ACKNOWLEDGED",
        ">LOST",
        ">REORDERED",
        ">OVERLAPPING",
        ">REPEATED",
        ">STRANDED",
        ">QUIET P50 MS",
        ">P99 MS",
        ">MAX MS",
        ">DRAINED S",
    ]);
    let mut faults = Vec::new();
    let mut notes = String::new();
    for line in &report.systems {
        let Some(figures) = &line.faults else { continue };
        faults.push(figures.faults);
        table.row(&[
            line.system.name().to_owned(),
            ranged(figures.acknowledged),
            ranged(figures.lost),
            ranged(figures.reordered),
            ranged(figures.overlapping),
            ranged(figures.repeated),
            ranged(figures.stranded_tenants),
            shown(figures.quiet_p50_ms, 0),
            shown(figures.quiet_p99_ms, 0),
            shown(figures.quiet_max_ms, 0),
            shown(figures.drained_seconds, 1),
        ]);
        if figures.waiting.high > 0.0 {
            let (name, waiting) = (line.system.name(), ranged(figures.waiting));
            let _ = writeln!(notes, "{name}: {waiting} events wait in stranded tenants");
        }
        if figures.restarted.high > 0.0 {
            let (name, count) = (line.system.name(), ranged(figures.restarted));
            let _ = writeln!(
                notes,
                "{name}: {count} processes ended by themselves and were started again"
            );
        }
        if let Some(stale) = figures.stale_commits {
            let (name, stale) = (line.system.name(), ranged(stale));
            let _ = writeln!(
                notes,
                "{name}: {stale} commits of an older lease were accepted while a newer one was at work"
            );
        }
    }
    let faults = faults.first().copied().map_or_else(String::new, ranged);
    format!(
        "{faults} faults in {} s, from seed {}; the table has medians of {} rounds, with ranges of counts\n{}\n{notes}",
        report.fault_seconds,
        report.seed,
        report.rounds,
        output.table(&table)
    )
}
