//! One line per attempt, or one JSON object.

use std::fmt::Write as _;

use serde::Serialize;

use crate::cli::attempts;
use crate::cli::error::CliError;
use crate::cli::output::{Output, Tone, number, plain};
use crate::history::{Attempt, AttemptResult};
use crate::id::PipelineName;
use crate::queue::Outcome;
use crate::telemetry::harmless_json;

/// Longer names are cut, so that one does not push the other columns away.
const NAME_MAX: usize = 32;
/// The same for ids of events. UUIDs have 36 characters.
const ID_MAX: usize = 36;
/// Width of the time: `hh:mm:ss.mmm`.
const TIME: usize = 12;
/// Width of the result: `unavailable 503`.
const RESULT: usize = 15;
/// Width of the number of events, of the attempt and of the duration.
const NUMBER: usize = 7;

/// Makes lines of attempts. Columns only become wider, so that lines stay aligned.
#[derive(Debug)]
pub(super) struct Lines {
    output: Output,
    json: bool,
    /// The width of the terminal.
    columns: Option<usize>,
    pipeline: usize,
    bot: usize,
    event: usize,
    /// Whether the header was printed.
    begun: bool,
}

/// An attempt as JSON.
#[derive(Serialize)]
struct Line<'a> {
    pipeline: &'a PipelineName,
    #[serde(flatten)]
    outcome: &'a Outcome,
}

impl Lines {
    pub(super) fn new(output: Output, json: bool, columns: Option<usize>) -> Self {
        let (pipeline, bot, event) = ("PIPELINE".len(), "BOT".len() + 5, "FIRST EVENT".len());
        Self { output, json, columns, pipeline, bot, event, begun: false }
    }

    /// Makes room for the name of a pipeline.
    pub(super) fn widen(&mut self, name: &PipelineName) {
        self.pipeline = self.pipeline.max(name.as_str().chars().count()).min(NAME_MAX);
    }

    /// The lines of these attempts, with a header before the first ones.
    pub(super) fn of(
        &mut self,
        outcomes: &[(PipelineName, Outcome)],
    ) -> Result<Vec<String>, CliError> {
        if self.json {
            let json = |(pipeline, outcome): &(PipelineName, Outcome)| {
                let line = serde_json::to_string(&Line { pipeline, outcome });
                line.map(|line| harmless_json(&line).into_owned()).map_err(CliError::Json)
            };
            return outcomes.iter().map(json).collect();
        }
        for (_, Outcome { bot, attempt }) in outcomes {
            self.bot = self.bot.max(plain(bot.as_str()).chars().count()).min(NAME_MAX);
            self.event = self.event.max(plain(&attempt.first_id).chars().count()).min(ID_MAX);
        }
        let mut lines = Vec::with_capacity(outcomes.len() + 1);
        if !self.begun {
            self.begun = true;
            let header = self.row(
                "TIME (UTC)",
                "RESULT",
                [("PIPELINE", self.pipeline), ("BOT", self.bot)],
                ["EVENTS", "ATTEMPT", "TOOK"],
                "FIRST EVENT",
            );
            lines.push(self.output.paint(Tone::Strong, &self.fit(&(header + "ANSWER"))));
        }
        lines.extend(outcomes.iter().map(|(pipeline, outcome)| self.line(pipeline, outcome)));
        Ok(lines)
    }

    fn line(&self, pipeline: &PipelineName, Outcome { bot, attempt }: &Outcome) -> String {
        let result = attempts::result(attempt);
        let text = self.row(
            &time(attempt.end_ms()),
            &result,
            [(pipeline.as_str(), self.pipeline), (&plain(bot.as_str()), self.bot)],
            [
                &events(attempt),
                &number(attempt.attempt.into()),
                &attempt.duration_us.map_or_else(|| "-".to_owned(), attempts::took),
            ],
            &plain(&attempt.first_id),
        );
        let mut text = text + &attempts::answer(attempt);
        if let Some(ms) = attempt.retry_ms.filter(|_| attempt.result.is_failure()) {
            let _ = write!(text, " (again in {})", crate::cli::output::duration(ms));
        }
        let text = self.fit(text.trim_end());
        // The result has a fixed place, and its text is ASCII.
        let (before, after) = (TIME + 2, TIME + 2 + result.len());
        match (text.get(..before), text.get(before..after), text.get(after..)) {
            (Some(time), Some(result), Some(rest)) => {
                format!("{time}{}{rest}", self.output.paint(tone(attempt.result), result))
            }
            _ => text,
        }
    }

    fn row(
        &self,
        time: &str,
        result: &str,
        [(pipeline, pipeline_width), (bot, bot_width)]: [(&str, usize); 2],
        [events, attempt, took]: [&str; 3],
        event: &str,
    ) -> String {
        let (pipeline, bot) = (cut(pipeline, pipeline_width), cut(bot, bot_width));
        let (event, event_width) = (cut(event, self.event), self.event);
        format!(
            "{time:<TIME$}  {result:<RESULT$}  {pipeline:<pipeline_width$}  {bot:<bot_width$}  {events:>NUMBER$}  {attempt:>NUMBER$}  {took:>NUMBER$}  {event:<event_width$}  "
        )
    }

    /// Cuts a line at the width of the terminal.
    fn fit(&self, line: &str) -> String {
        cut(line, self.columns.unwrap_or(usize::MAX))
    }
}

fn tone(result: AttemptResult) -> Tone {
    match result {
        AttemptResult::Done | AttemptResult::Accepted => Tone::Good,
        AttemptResult::Partial | AttemptResult::Unavailable | AttemptResult::LeaseLost => {
            Tone::Warning
        }
        AttemptResult::Failed | AttemptResult::Timeout | AttemptResult::Dead => Tone::Bad,
    }
}

/// The number of events; of a slice that is done in part, how many of them.
fn events(attempt: &Attempt) -> String {
    let all = number(attempt.events.into());
    match attempt.result {
        AttemptResult::Partial => format!("{}/{all}", number(attempt.settled.into())),
        _ => all,
    }
}

/// The time of the day, in UTC.
fn time(ms: u64) -> String {
    let (seconds, ms) = (ms / 1_000, ms % 1_000);
    let (hours, minutes, seconds) = (seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{hours:02}:{minutes:02}:{seconds:02}.{ms:03}")
}

fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::Ids;
    use crate::id::BotId;

    fn outcome(bot: &str, result: AttemptResult) -> (PipelineName, Outcome) {
        let failed = result.is_failure();
        let attempt = Attempt {
            time_ms: 86_400_000 + 3_723_000,
            duration_us: Some(4_000),
            result,
            attempt: 1,
            lost: 0,
            slices: 1,
            events: 3,
            settled: 2,
            first_id: "e1".to_owned(),
            last_id: "e3".to_owned(),
            first_sequence: 1,
            last_sequence: 3,
            status: failed.then_some(503),
            reason: None,
            answer: failed.then(|| "closed\u{1b}[2J".to_owned()),
            retry_ms: failed.then_some(30_000),
            process: "host 1".to_owned(),
            ids: Ids::default(),
        };
        let outcome = Outcome { bot: BotId::parse(bot).unwrap(), attempt };
        (PipelineName::parse("orders").unwrap(), outcome)
    }

    fn lines(columns: Option<usize>) -> Lines {
        Lines::new(Output::new(false), false, columns)
    }

    #[test]
    fn lines_align_and_no_text_from_outside_controls_the_terminal() {
        let outcomes = [
            outcome("a", AttemptResult::Done),
            outcome("a-longer-bot", AttemptResult::Unavailable),
            outcome("b", AttemptResult::Partial),
        ];
        assert_eq!(
            lines(None).of(&outcomes).unwrap().join("\n"),
            "\
TIME (UTC)    RESULT           PIPELINE  BOT            EVENTS  ATTEMPT     TOOK  FIRST EVENT  ANSWER
01:02:03.004  done             orders    a                   3        1      4ms  e1
01:02:03.004  unavailable 503  orders    a-longer-bot        3        1      4ms  e1           closed\\u{1b}[2J (again in 30s)
01:02:03.004  partial 503      orders    b                 2/3        1      4ms  e1           closed\\u{1b}[2J (again in 30s)"
        );
    }

    #[test]
    fn the_header_is_printed_once_and_a_line_fits_into_the_terminal() {
        let mut lines = lines(Some(60));
        let first = lines.of(&[outcome("a", AttemptResult::Failed)]).unwrap();
        assert!(first.len() == 2 && first[0].starts_with("TIME"), "{first:?}");
        assert_eq!(first[1].chars().count(), 60);
        let long = "x".repeat(200);
        let next = lines.of(&[outcome(&long, AttemptResult::Done)]).unwrap();
        assert!(next.len() == 1 && next[0].contains("xxx…"), "{next:?}");
        assert_eq!(lines.of(&[]).unwrap(), [""; 0]);
    }

    #[test]
    fn json_is_one_object_per_line_with_the_pipeline_and_the_bot() {
        let mut lines = Lines::new(Output::new(true), true, Some(10));
        let lines = lines.of(&[outcome("a", AttemptResult::Failed)]).unwrap();
        let object: serde_json::Value = serde_json::from_str(&lines[0]).unwrap();
        assert_eq!((&object["pipeline"], &object["bot"]), (&"orders".into(), &"a".into()));
        assert_eq!((&object["result"], &object["status"]), (&"failed".into(), &503.into()));
        assert_eq!(lines.len(), 1);
    }
}
