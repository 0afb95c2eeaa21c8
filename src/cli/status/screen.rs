//! Prints the status.

use super::Status;
use crate::cli::output::{self, Output, Table, Tone, age, bytes, duration, number, rate};
use crate::presence::{BusView, Pace, Process};
use crate::problems::{Finding, PipelineFacts, Severity};
use crate::redis::{StreamKind, StreamView};

/// Pipelines as a table.
pub(in super::super) fn pipeline_table(pipelines: &[PipelineFacts]) -> Table {
    let mut table = Table::new(&[
        "PIPELINE", "STATE", ">DEPTH", ">READY", ">LEASED", ">PARKED", ">PAUSED", ">DELAYED",
        ">DEAD", ">OLDEST", ">IN/S", ">OUT/S", ">WORKERS",
    ]);
    for PipelineFacts { name, state, view, pace, .. } in pipelines {
        table.row(&[
            name.to_string(),
            state.text().to_owned(),
            number(view.depth),
            number(view.ready),
            number(view.leased),
            number(view.parked),
            number(view.paused),
            number(view.delayed),
            number(view.dead),
            age(view.oldest_age_ms, view.oldest_age_ms > 0),
            rate(pace.queued_per_second),
            rate(pace.settled_per_second),
            format!("{}/{}", pace.workers_busy, pace.workers_max),
        ]);
    }
    table
}

/// Processes as a table.
fn process_table(processes: &[Process], now_ms: u64) -> Table {
    let mut table = Table::new(&["PROCESS", "VERSION", "ROLES", ">UP", ">WORKERS"]);
    for process in processes {
        let sum = |count: fn(&Pace) -> usize| process.pipelines.values().map(count).sum::<usize>();
        table.row(&[
            process.at(),
            process.version.clone(),
            process.roles.join(","),
            duration(now_ms.saturating_sub(process.started_ms)),
            format!("{}/{}", sum(|pace| pace.workers_busy), sum(|pace| pace.workers_max)),
        ]);
    }
    table
}

pub(super) fn screen(output: Output, status: &Status) -> String {
    let Status { facts, problems } = status;
    let mut text = if let Some(info) = &facts.redis.info {
        let max = match info.memory_max {
            0 => "no maxmemory".to_owned(),
            max => format!("of {}", bytes(max)),
        };
        format!(
            "{} {} at {}\nup {}, memory {} ({max}, {}), AOF {}\n\n",
            output.paint(Tone::Strong, "Redis"),
            info.version,
            facts.redis.target,
            duration(info.uptime_seconds * 1_000),
            bytes(info.memory_used),
            info.eviction,
            if info.append_only { "on" } else { "off" },
        )
    } else {
        String::new()
    };
    if facts.only_error().is_none() {
        if !facts.streams.is_empty() {
            text.push_str(&output.table(&stream_table(&facts.streams)));
            text.push_str("\n\n");
        }
        if !facts.buses.is_empty() {
            text.push_str(&output.table(&bus_table(&facts.buses)));
            text.push_str("\n\n");
        }
        if facts.processes.is_empty() {
            text.push_str("no processes");
        } else {
            text.push_str(&output.table(&process_table(&facts.processes, facts.now_ms)));
        }
        text.push_str("\n\n");
        if facts.pipelines.is_empty() {
            text.push_str("no pipelines");
        } else {
            text.push_str(&output.table(&pipeline_table(&facts.pipelines)));
        }
        text.push_str("\n\n");
    }
    if problems.is_empty() {
        text.push_str(&output.paint(Tone::Good, "nothing is wrong"));
    }
    for (at, Finding { problem, remedy, severity, runbook, .. }) in problems.iter().enumerate() {
        text.push_str(if at > 0 { "\n" } else { "" });
        let (tone, mark) = match severity {
            Severity::Critical => (Tone::Bad, "!!"),
            Severity::Warning => (Tone::Warning, "!"),
            Severity::Notice => (Tone::Strong, "-"),
        };
        text.push_str(&output.paint(tone, mark));
        text.extend([" ", &output::plain(problem), "\n    ", &output::plain(remedy)]);
        text.extend(["\n    see ", runbook]);
    }
    text
}

fn bus_table(buses: &[BusView]) -> Table {
    let mut table = Table::new(&["BUS", ">LOGS", ">UNREAD", ">PROCESSES", "STATE"]);
    for view in buses {
        table.row(&[
            view.bus.clone(),
            number(view.logs as u64),
            number(view.unread),
            number(view.processes as u64),
            match (&view.failing, view.processes, view.logs) {
                (Some(_), ..) => "cannot be read",
                (None, 0, _) => "no reader",
                (None, _, 0) => "no log yet",
                _ => "is read",
            }
            .to_owned(),
        ]);
    }
    table
}

fn stream_table(streams: &[StreamView]) -> Table {
    let mut table = Table::new(&["BUS STREAM", ">LENGTH", ">UNREAD", "READER", "GROUPS"]);
    for view in streams {
        let groups: Vec<_> = view
            .groups
            .iter()
            .map(|group| {
                let lag = group.lag.map_or_else(|| "?".to_owned(), number);
                format!("{} (lag {lag}, pending {})", group.name, number(group.pending))
            })
            .collect();
        table.row(&[
            view.stream.clone(),
            match view.kind {
                StreamKind::Absent => "none yet".to_owned(),
                StreamKind::Stream => number(view.length),
                StreamKind::Other => "no stream".to_owned(),
            },
            view.unread.map_or_else(|| "-".to_owned(), number),
            if view.reader { "yes" } else { "no" }.to_owned(),
            if groups.is_empty() { "-".to_owned() } else { groups.join(", ") },
        ]);
    }
    table
}
