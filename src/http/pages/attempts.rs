//! A table of attempts.

use maud::{Markup, html};

use super::times::ago;
use super::{grouped, spoken};
use crate::history::{Attempt, AttemptResult};

/// The result in words.
fn result(attempt: &Attempt) -> String {
    match attempt.result {
        AttemptResult::Done => "done".to_owned(),
        AttemptResult::Partial => format!("{} done", grouped(attempt.settled.into())),
        AttemptResult::Failed => "failed".to_owned(),
        AttemptResult::Timeout => "timeout".to_owned(),
        AttemptResult::Unavailable => "unavailable".to_owned(),
        AttemptResult::Dead => "dead letter".to_owned(),
        AttemptResult::LeaseLost => "lease lost".to_owned(),
        AttemptResult::Accepted => "accepted".to_owned(),
    }
}

fn duration(us: u64) -> String {
    match us {
        0..1_000 => format!("{us} µs"),
        _ => spoken(us / 1_000),
    }
}

/// Attempts, the newest first. `label` names the table for screen readers.
pub(super) fn table(attempts: &[Attempt], now_ms: u64, label: &str) -> Markup {
    html! {
        div.wide tabindex="0" role="region" aria-label=(label) {
            table {
                thead {
                    tr {
                        th scope="col" { "Started" }
                        th scope="col" { "Result" }
                        th.number scope="col" { "Events" }
                        th.number scope="col" { "Attempt" }
                        th.number scope="col" { "Took" }
                        th scope="col" { "Events from, to" }
                        th scope="col" { "Answer" }
                    }
                }
                tbody { @for attempt in attempts { (row(attempt, now_ms)) } }
            }
        }
    }
}

fn row(attempt: &Attempt, now_ms: u64) -> Markup {
    let is_bad = attempt.result.is_failure();
    html! {
        tr data-key={ (attempt.time_ms) "-" (attempt.first_sequence) "-" (attempt.attempt) } {
            td.when { (ago(attempt.time_ms, now_ms)) }
            th scope="row" { span.bad[is_bad] { (result(attempt)) } }
            td.number {
                (grouped(attempt.events.into()))
                @if attempt.slices > 1 { " in " (grouped(attempt.slices.into())) " slices" }
            }
            td.number { (attempt.attempt) }
            td.number { @if let Some(us) = attempt.duration_us { (duration(us)) } }
            td.text {
                (attempt.first_id)
                @if attempt.last_id != attempt.first_id { " … " (attempt.last_id) }
            }
            td.text {
                @if let Some(status) = attempt.status { (status) " " }
                @match (&attempt.answer, &attempt.reason) {
                    (Some(answer), _) => { code { (answer) } }
                    (None, Some(reason)) => { (reason) }
                    (None, None) => {}
                }
                @if let Some(retry) = attempt.retry_ms { "; next try after " (spoken(retry)) }
                @if attempt.lost > 0 { "; " (attempt.lost) " workers vanished before" }
            }
        }
    }
}
