//! The reports, as tables or as JSON.

use std::fmt::Write as _;

use fairlane::cli::{CliError, Output, Table};
use serde::Serialize;
use serde_json::Value;

use crate::error::CommandError;
use crate::growth;
use crate::isolation::{self, Verdict};
use crate::limits;
use crate::overload::{self, deployment};

/// Prints the fields of the report, one per line, or as JSON.
pub(super) fn print(json: bool, report: &impl Serialize) -> Result<(), CommandError> {
    let report = serde_json::to_value(report).map_err(CliError::Json)?;
    let shown = Output::new(json).show(&report, |report| {
        let fields = report.as_object().into_iter().flatten();
        // Lists are shown only in JSON.
        let fields = fields.filter(|(_, value)| !value.is_array());
        let width = fields.clone().map(|(name, _)| name.len()).max().unwrap_or(0);
        let line = |(name, value): (&String, &Value)| {
            let text = match value {
                Value::Null => "-".to_owned(),
                Value::Number(number) if number.is_f64() => {
                    format!("{:.3}", number.as_f64().unwrap_or_default())
                }
                other => other.to_string(),
            };
            format!("{:<width$}  {text:>14}", name.replace('_', " "))
        };
        fields.map(line).collect::<Vec<_>>().join("\n")
    });
    Ok(shown?)
}

/// A line per rate and class.
pub(super) fn print_deployment(
    json: bool,
    report: &deployment::Report,
) -> Result<(), CommandError> {
    let output = Output::new(json);
    output.show(report, |report| {
        let mut table = Table::new(&[
            ">RATE/S",
            "CLASS",
            ">ASKED",
            ">IN TIME/S",
            ">SUCCESS",
            ">P50 MS",
            ">P99 MS",
            ">SHED",
            ">LATE",
            ">FAILED",
        ]);
        for step in &report.steps {
            for class in &step.classes {
                let again = if step.again { " again" } else { "" };
                table.row(&[
                    format!("{}{again}", step.rate),
                    class.class.to_owned(),
                    class.offered.to_string(),
                    format!("{:.1}", class.in_time_per_second),
                    format!("{:.4}", class.success),
                    format!("{:.1}", class.p50_ms),
                    format!("{:.1}", class.p99_ms),
                    class.shed.to_string(),
                    class.late.to_string(),
                    class.failed.to_string(),
                ]);
            }
        }
        output.table(&table)
    })?;
    let lag = report.steps.iter().map(|step| step.lag_p99_ms).fold(0.0, f64::max);
    if lag > overload::LAG_MAX_MS {
        eprintln!(
            "note: this machine could not keep up: at one rate 1 % of the requests were sent {lag:.1} ms late or more; ask from another machine, or for less"
        );
    }
    Ok(())
}

/// A line per resource, and one for all of them.
pub(super) fn print_isolation(json: bool, report: &isolation::Report) -> Result<(), CommandError> {
    let output = Output::new(json);
    output.show(report, |report| {
        let mut table = Table::new(&[
            "VERDICT",
            "RESOURCE",
            "MEASURED",
            ">ALONE P50 MS",
            ">P99 MS",
            ">BESIDE P50 MS",
            ">P99 MS",
            ">RATIO",
            ">REFUSED",
            ">LOST",
            ">MB ALONE",
            ">BESIDE",
            ">LOG/S",
        ]);
        let mb = |mb: Option<u64>| mb.map_or_else(|| "-".to_owned(), |mb| mb.to_string());
        for line in &report.resources {
            let is_skipped = line.verdict == Verdict::Skipped;
            let figure = |text: String| if is_skipped { "-".to_owned() } else { text };
            table.row(&[
                line.verdict.as_str().to_owned(),
                line.resource.name().to_owned(),
                line.measure.to_owned(),
                figure(format!("{:.1}", line.alone_p50_ms)),
                figure(format!("{:.1}", line.alone_p99_ms)),
                figure(format!("{:.1}", line.beside_p50_ms)),
                figure(format!("{:.1}", line.beside_p99_ms)),
                figure(format!("{:.2}", line.ratio)),
                figure(line.refused_beside.to_string()),
                figure(line.lost.to_string()),
                mb(line.memory_alone_mb),
                mb(line.memory_beside_mb),
                figure(format!("{:.1}", line.log_lines_per_second)),
            ]);
        }
        let mut text = output.table(&table);
        for line in &report.resources {
            if let Some(note) = &line.note {
                let _ = write!(text, "\n{}: {note}", line.resource.name());
            }
        }
        let of = report.held + report.failed;
        let _ = write!(text, "\n\nisolated: {} of {of} resources", report.held);
        if report.skipped > 0 {
            let _ = write!(text, ", {} skipped", report.skipped);
        }
        text
    })?;
    let failed = report.resources.iter().filter(|line| line.verdict == Verdict::Failed);
    let failed: Vec<&str> = failed.map(|line| line.resource.name()).collect();
    if failed.is_empty() { Ok(()) } else { Err(CommandError::NotIsolated(failed.join(", "))) }
}

/// A line per figure.
pub(super) fn print_limits(json: bool, report: &limits::Report) -> Result<(), CommandError> {
    /// An event that comes later by this much raises the rate of a window of 5 s by half a percent.
    const LATE_MS: f64 = 25.0;
    let output = Output::new(json);
    output.show(report, |report| {
        let mut table = Table::new(&["VERDICT", "FIGURE", ">MEASURED", ">LEAST", ">MOST"]);
        let bound =
            |bound: Option<f64>| bound.map_or_else(|| "-".to_owned(), |n| format!("{n:.2}"));
        for figure in &report.figures {
            let verdict = match figure.held {
                Some(true) => "held",
                Some(false) => "missed",
                None => "-",
            };
            table.row(&[
                verdict.to_owned(),
                figure.name.to_owned(),
                format!("{:.2}", figure.measured),
                bound(figure.least),
                bound(figure.most),
            ]);
        }
        format!(
            "{} bots, {} events/s each, {} s, {} processes; windows of {} s\n{}",
            report.bots,
            report.rate,
            report.seconds,
            report.processes,
            report.window_seconds,
            output.table(&table)
        )
    })?;
    let late = report.sender_late_max_ms;
    if late > LATE_MS {
        eprintln!(
            "note: the bench itself sent an event {late:.1} ms late, which alone moves the rate of a window; this machine is too small, or busy with other things"
        );
    }
    let missed = report.missed();
    if missed.is_empty() { Ok(()) } else { Err(CommandError::LimitsMissed(missed.join(", "))) }
}

/// A line per value of each size.
pub(super) fn print_growth(json: bool, report: &growth::Report) -> Result<(), CommandError> {
    let output = Output::new(json);
    output.show(report, |report| {
        let mut table = Table::new(&[
            "SIZE",
            ">VALUE",
            ">BOTS",
            ">EVENTS",
            ">EVENTS/S",
            ">REDIS US",
            ">BUSIEST",
            ">OWN US",
            ">WIRE",
            ">INNER",
            ">P50 MS",
            ">P99 MS",
            ">REDIS MB",
            ">IDLE/S",
            ">LOST",
            ">REORDERED",
        ]);
        for growth::Row { axis, value, bots, events, figures } in &report.rows {
            table.row(&[
                axis.title().to_owned(),
                growth::thousands(*value),
                growth::thousands(*bots),
                growth::thousands(*events),
                format!("{:.0}", figures.events_per_second),
                format!("{:.1}", figures.redis_us_per_event),
                format!("{:.1}", figures.busiest_redis_us_per_event),
                format!("{:.1}", figures.own_us_per_event),
                format!("{:.2}", figures.wire_commands_per_event),
                format!("{:.2}", figures.inner_commands_per_event),
                format!("{:.1}", figures.p50_ms),
                format!("{:.1}", figures.p99_ms),
                format!("{:.0}", figures.redis_peak_mb),
                format!("{:.0}", figures.idle_commands_per_second),
                figures.lost.to_string(),
                figures.reordered.to_string(),
            ]);
        }
        output.table(&table)
    })?;
    Ok(())
}

/// A table per workload, and its curve.
pub(super) fn print_overload(json: bool, report: &overload::Report) -> Result<(), CommandError> {
    let value = serde_json::to_value(report).map_err(CliError::Json)?;
    Output::new(json).show(&value, |_| {
        let mut text = String::new();
        for figures in &report.workloads {
            let name = serde_json::to_value(figures.workload).unwrap_or_default();
            let _ = writeln!(text, "{}", name.as_str().unwrap_or_default());
            let fields = serde_json::to_value(figures).unwrap_or_default();
            let fields = fields.as_object().into_iter().flatten();
            for (name, value) in fields.filter(|(_, value)| value.is_number()) {
                let value = value.as_f64().unwrap_or_default();
                let _ = writeln!(text, "  {:<24} {value:>12.3}", name.replace('_', " "));
            }
            let _ = writeln!(
                text,
                "  {:<10} {:>6} {:>12} {:>8} {:>8} {:>8} {:>9} {:>9} {:>9}",
                "before it", "load", "in time/s", "p99 ms", "p0", "p1", "shed", "late", "failed"
            );
            for point in &figures.curve {
                let protection = serde_json::to_value(point.protection).unwrap_or_default();
                let _ = writeln!(
                    text,
                    "  {:<10} {:>5}x {:>12.0} {:>8.1} {:>8.4} {:>8.4} {:>9} {:>9} {:>9}",
                    protection.as_str().unwrap_or_default(),
                    point.load,
                    point.goodput_per_second,
                    point.p99_ms,
                    point.p0_success,
                    point.p1_success,
                    point.shed,
                    point.late,
                    point.failed
                );
            }
            text.push('\n');
        }
        if let Some(flood) = report.flood {
            let _ = writeln!(
                text,
                "beside {} connections that send slowly or nothing: p0 {:.4}, p1 {:.4}, p99 {:.1} ms",
                flood.connections, flood.p0_success, flood.p1_success, flood.p1_p99_ms
            );
        }
        text.trim_end().to_owned()
    })?;
    let worst = |figure: fn(&overload::Figures) -> f64| {
        report.workloads.iter().map(figure).fold(0.0, f64::max)
    };
    let away = worst(|figures| figures.away);
    if away > overload::AWAY_MAX {
        eprintln!(
            "note: in five tries of one run the machine withheld the processor from the server for {:.1} % of the time or more; its figures say nothing, run it again on a machine with less to do",
            away * 100.0
        );
    }
    let speed = worst(|figures| figures.speed);
    if speed > overload::SPEED_MAX {
        eprintln!(
            "note: in five tries of one run the server's processor was faster or slower by {:.0} % than while the capacity was measured; its figures say nothing, run it again on a machine with less to do",
            speed * 100.0
        );
    }
    let lag = worst(|figures| figures.lag_p99_ms);
    if lag > overload::LAG_MAX_MS {
        eprintln!(
            "note: the generator could not keep up, in five tries: in one run 1 % of the requests were sent {lag:.1} ms late or more; its figures say nothing, run it again on a machine with less to do"
        );
    }
    Ok(())
}
