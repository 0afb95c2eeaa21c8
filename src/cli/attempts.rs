//! Tables of attempts.

use super::output::{Output, Table, duration, number, plain};
use crate::history::Attempt;

/// The attempts as a table, the newest first.
pub(super) fn table(output: Output, attempts: &[Attempt], now_ms: u64) -> String {
    let mut table =
        Table::new(&["STARTED", "RESULT", ">EVENTS", ">ATTEMPT", ">TOOK", "FIRST EVENT", "ANSWER"]);
    for attempt in attempts {
        let ago = duration(now_ms.saturating_sub(attempt.time_ms));
        table.row(&[
            format!("{ago} ago"),
            result(attempt),
            events(attempt),
            number(attempt.attempt.into()),
            attempt.duration_us.map_or_else(|| "-".to_owned(), took),
            plain(&attempt.first_id),
            answer(attempt),
        ]);
    }
    output.table(&table)
}

pub(super) fn result(attempt: &Attempt) -> String {
    let name = attempt.result.name().replace('_', " ");
    match attempt.status {
        Some(status) => format!("{name} {status}"),
        None => name,
    }
}

fn events(attempt: &Attempt) -> String {
    let events = number(attempt.events.into());
    match attempt.slices {
        0 | 1 => events,
        slices => format!("{events} in {} slices", number(slices.into())),
    }
}

pub(super) fn took(us: u64) -> String {
    if us < 1_000 { format!("{us} µs") } else { duration(us / 1_000) }
}

pub(super) fn answer(attempt: &Attempt) -> String {
    let mut text = match (&attempt.answer, &attempt.reason) {
        (Some(answer), _) => plain(answer),
        (None, Some(reason)) => plain(reason),
        (None, None) => String::new(),
    };
    if attempt.lost > 0 {
        text.extend([" (", &attempt.lost.to_string(), " workers vanished before)"]);
    }
    text
}
