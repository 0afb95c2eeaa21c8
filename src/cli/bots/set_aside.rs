//! The lanes of a bot that are set aside, as tables.

use std::time::Duration;

use super::super::output::{Output, Table, duration, number};
use crate::clock::{micros, millis};
use crate::queue::{LaneAside, QueuedEvent};

/// One table of the lanes, and one of their first events.
pub(super) fn text(lanes: &[LaneAside], output: Output, now: Duration) -> String {
    if lanes.is_empty() {
        return String::new();
    }
    let mut table = Table::new(&["LANE SET ASIDE", ">EVENTS", ">ATTEMPTS", "NEXT ATTEMPT"]);
    for LaneAside { lane, depth, attempts, due_ms, .. } in lanes {
        let next = match due_ms.saturating_sub(millis(now)) {
            0 => "now".to_owned(),
            left => format!("in {}", duration(left)),
        };
        table.row(&[lane.to_string(), number(*depth), number((*attempts).into()), next]);
    }
    let mut events = Table::new(&["LANE", "EVENT SET ASIDE", "SUBJECT", "TYPE", ">AGE"]);
    for LaneAside { lane, next, .. } in lanes {
        for QueuedEvent { sequence, event } in next {
            let (id, subject, kind) = match event {
                Some(event) => (event.id(), event.subject().unwrap_or("-"), event.kind()),
                None => ("(not readable)", "-", "-"),
            };
            let old = micros(now).saturating_sub(*sequence) / 1_000;
            let cells = [&*lane.to_string(), id, subject, kind, &*duration(old)];
            events.row(&cells.map(str::to_owned));
        }
    }
    let events = if events.is_empty() { String::new() } else { output.table(&events) };
    let events = if events.is_empty() { events } else { format!("\n\n{events}") };
    format!("\n\n{}{events}", output.table(&table))
}
