//! Events of a bot in and out of one pipeline in each of the last 15 minutes.

use maud::{Markup, html};

use super::super::lines::{Line, Unit, large};
use super::super::{grouped, spoken};
use crate::history::Attempt;
use crate::id::PipelineName;
use crate::queue::Recent;

/// Number of minutes.
pub(super) const MINUTES: usize = 15;
const MINUTE_MS: u64 = 60_000;

/// The counts of each minute, the oldest first.
#[derive(Debug, PartialEq)]
pub(super) struct Flow {
    arrived: [f64; MINUTES],
    left: [f64; MINUTES],
    /// The attempts are complete since then, ms since 1970.
    since_ms: u64,
    now_ms: u64,
}

/// The start of the first minute, ms since 1970.
pub(super) fn start_ms(now_ms: u64) -> u64 {
    now_ms.saturating_sub(MINUTES as u64 * MINUTE_MS)
}

/// The starts of all minutes.
pub(super) fn starts(now_ms: u64) -> Vec<u64> {
    (0..MINUTES as u64).map(|minute| start_ms(now_ms) + minute * MINUTE_MS).collect()
}

impl Flow {
    /// `before` counts the queued events that arrived until the start of each minute; `length` counts
    /// all of them.
    #[expect(clippy::cast_precision_loss, reason = "a picture")]
    pub(super) fn new(recent: &Recent, before: &[u64], length: u64, now_ms: u64) -> Self {
        let mut flow = Self {
            arrived: [0.0; MINUTES],
            left: [0.0; MINUTES],
            since_ms: recent.since_ms,
            now_ms,
        };
        for (minute, &from) in before.iter().enumerate().take(MINUTES) {
            let until = before.get(minute + 1).copied().unwrap_or(length);
            flow.arrived[minute] += until.saturating_sub(from) as f64;
        }
        for attempt in &recent.attempts {
            flow.add(attempt);
        }
        flow
    }

    /// Adds the events that left the queue by an attempt. Their arrivals are spread evenly between
    /// those of the first and the last one.
    fn add(&mut self, attempt: &Attempt) {
        if attempt.settled == 0 {
            return;
        }
        let settled = f64::from(attempt.settled);
        let end_ms = attempt.time_ms.saturating_add(attempt.duration_us.unwrap_or(0) / 1_000);
        if let Some(minute) = self.minute(end_ms) {
            self.left[minute] += settled;
        }
        let (first, last) = (attempt.first_sequence / 1_000, attempt.last_sequence / 1_000);
        let start = start_ms(self.now_ms);
        for (minute, arrived) in (0_u64..).zip(&mut self.arrived) {
            let from = start + minute * MINUTE_MS;
            *arrived += settled * share((first, last.max(first)), (from, from + MINUTE_MS));
        }
    }

    fn minute(&self, ms: u64) -> Option<usize> {
        let since = ms.checked_sub(start_ms(self.now_ms))?;
        let minute = usize::try_from(since / MINUTE_MS).ok()?;
        // The clock of the process that wrote it may be ahead.
        Some(minute.min(MINUTES - 1))
    }

    /// The counts of the last minute, rounded.
    pub(super) fn last_minute(&self) -> (u64, u64) {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts")]
        let whole = |counts: &[f64; MINUTES]| counts[MINUTES - 1].round() as u64;
        (whole(&self.arrived), whole(&self.left))
    }

    fn is_empty(&self) -> bool {
        self.arrived.iter().chain(&self.left).all(|count| *count < 0.5)
    }

    /// The counts as a line. A minute without all its attempts is unknown.
    fn line(&self, counts: &[f64; MINUTES]) -> Line {
        let mut points: Vec<(u64, Option<f64>)> = Vec::with_capacity(MINUTES + 1);
        for (from, count) in starts(self.now_ms).into_iter().zip(counts) {
            let known = from + MINUTE_MS > self.since_ms;
            let middle = self.now_ms.saturating_sub(from + MINUTE_MS / 2);
            points.push((middle, known.then_some(*count)));
        }
        let last = points.last().and_then(|(_, count)| *count);
        points.push((0, last));
        Line::recent(points)
    }
}

/// The part of a span of time that is within a minute.
#[expect(clippy::cast_precision_loss, reason = "a picture")]
fn share((first, last): (u64, u64), (from, until): (u64, u64)) -> f64 {
    if first == last {
        return if (from..until).contains(&first) { 1.0 } else { 0.0 };
    }
    let within = last.min(until).saturating_sub(first.max(from));
    within as f64 / (last - first) as f64
}

/// The chart, if there was anything.
pub(super) fn chart(pipeline: &PipelineName, flow: &Flow) -> Markup {
    let about = format!("Events a minute in and out of {pipeline}");
    let lines = [("in", flow.line(&flow.arrived)), ("out", flow.line(&flow.left))];
    let from = start_ms(flow.now_ms);
    html! {
        @if !flow.is_empty() {
            h4 { "Events a minute" }
            (large(&about, &lines, Unit::Count, "Counted from the attempts that are kept."))
            p.fine {
                "In: events by their time of arrival, if they still wait or were completed. Out: events that are done or became dead letters. Purged events are in neither."
                @if flow.since_ms > from + MINUTE_MS {
                    " The kept attempts cover only the last " (spoken(flow.now_ms.saturating_sub(flow.since_ms) / 1_000 * 1_000)) "."
                }
            }
        }
    }
}

/// The facts of the last minute.
pub(super) fn facts(flow: &Flow) -> Markup {
    let (arrived, left) = flow.last_minute();
    html! {
        div { dt { "In, last minute" } dd { (grouped(arrived)) } }
        div { dt { "Out, last minute" } dd { (grouped(left)) } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::{AttemptResult, Ids};

    const NOW: u64 = 1_000_000_000;

    fn attempt(end_ms: u64, settled: u32, (first, last): (u64, u64)) -> Attempt {
        Attempt {
            time_ms: end_ms - 10,
            duration_us: Some(10_000),
            result: AttemptResult::Done,
            attempt: 1,
            lost: 0,
            slices: 1,
            events: settled,
            settled,
            first_id: String::new(),
            last_id: String::new(),
            first_sequence: first * 1_000,
            last_sequence: last * 1_000,
            status: None,
            reason: None,
            answer: None,
            retry_ms: None,
            process: String::new(),
            ids: Ids::default(),
        }
    }

    fn recent(attempts: Vec<Attempt>) -> Recent {
        Recent { attempts, since_ms: start_ms(NOW) }
    }

    #[test]
    fn events_are_counted_when_they_arrived_and_when_they_left() {
        // Half of its events arrived two minutes ago, and half in the last minute.
        let done = attempt(NOW - 5_000, 10, (NOW - 90_000, NOW - 30_000));
        let failed = Attempt { settled: 0, ..attempt(NOW - 5_000, 99, (NOW - 9_000, NOW)) };
        let flow = Flow::new(&recent(vec![done, failed]), &[], 0, NOW);
        assert_eq!(flow.last_minute(), (5, 10));
        assert!((flow.arrived[MINUTES - 2] - 5.0).abs() < 0.01, "{flow:?}");
        assert!((flow.arrived.iter().sum::<f64>() - 10.0).abs() < 0.01);
    }

    #[test]
    fn events_that_wait_have_arrived_and_not_left() {
        let mut before = vec![100; MINUTES];
        before[MINUTES - 1] = 130;
        let flow = Flow::new(&recent(Vec::new()), &before, 137, NOW);
        assert_eq!(flow.last_minute(), (7, 0));
        assert!((flow.arrived[MINUTES - 2] - 30.0).abs() < 0.01, "{flow:?}");
        assert!((flow.arrived.iter().sum::<f64>() - 37.0).abs() < 0.01, "older ones are not shown");
    }

    #[test]
    fn unknown_values_are_not_drawn_as_zero() {
        let attempts = vec![attempt(NOW - 5_000, 3, (NOW - 9_000, NOW - 9_000))];
        let since_ms = NOW - 150_000;
        let flow = Flow::new(&Recent { attempts, since_ms }, &[], 0, NOW);
        let pipeline = PipelineName::parse("p").unwrap();
        let page = chart(&pipeline, &flow).into_string();
        assert!(page.contains("only the last 2 min"), "{page}");
        assert!(
            page.contains("Events a minute in and out of p, last 15 minutes: at most 3"),
            "{page}"
        );
        let nothing = Flow::new(&recent(Vec::new()), &[], 0, NOW);
        assert_eq!(chart(&pipeline, &nothing).into_string(), "");
    }
}
