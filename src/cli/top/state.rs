//! What the view shows: the last reading, and what the operator has chosen.

use std::time::Duration;

use super::read::Reading;
use super::rows::{BotRow, PipelineRow, Snapshot};
use crate::clock::millis;
use crate::id::{BotId, PipelineName};
use crate::problems::Finding;
use crate::queue::BotState;

/// A message at the bottom is shown for this time, ms.
const MESSAGE_MS: u64 = 8_000;
/// Figures are not marked as old before this age, ms.
const OLD_MS: u64 = 10_000;

/// A part of the screen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Pane {
    #[default]
    Pipelines,
    Bots,
    Problems,
}

impl Pane {
    pub(super) const ALL: [Self; 3] = [Self::Pipelines, Self::Bots, Self::Problems];

    /// The pane `steps` further on.
    pub(super) fn step(self, steps: usize) -> Self {
        Self::ALL[(self as usize + steps) % Self::ALL.len()]
    }
}

/// The order of the pipelines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum PipelineSort {
    #[default]
    Name,
    Depth,
    Age,
    Failing,
}

/// The order of the bots, and which ones are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum BotSort {
    #[default]
    Depth,
    Age,
    /// Only bots that fail, those that have failed for longest first.
    Failing,
}

/// Which bots the reader reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) sort: BotSort,
    /// The start of their names.
    pub(super) prefix: String,
    /// Only those of this pipeline.
    pub(super) only: Option<PipelineName>,
}

/// What to pause or resume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Command {
    pub(super) pause: bool,
    pub(super) pipeline: PipelineName,
    /// `None`: the whole pipeline.
    pub(super) bot: Option<BotId>,
}

/// How a command ended, as a sentence.
pub(super) type Answer = Result<String, String>;

/// What is in front of the panes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Dialog {
    Help,
    Question(Command),
    /// Title and text.
    Details(String, String),
}

/// The selected row of a pane. It stays on what it names, wherever that moves.
#[derive(Debug)]
pub(super) struct Cursor<K> {
    /// `None`: the first row.
    key: Option<K>,
    /// The place where it was last, for when the row is gone.
    place: usize,
}

impl<K> Default for Cursor<K> {
    fn default() -> Self {
        Self { key: None, place: 0 }
    }
}

impl<K: PartialEq> Cursor<K> {
    /// The place of the selected row; `None`: there are no rows.
    pub(super) fn place(&self, rows: &[K]) -> Option<usize> {
        let found = self.key.as_ref().and_then(|key| rows.iter().position(|row| row == key));
        let last = rows.len().checked_sub(1)?;
        Some(found.unwrap_or(self.place).min(last))
    }

    /// Moves by this number of rows.
    fn step(&mut self, mut rows: Vec<K>, by: isize) {
        let Some(place) = self.place(&rows) else { return };
        self.place = place.saturating_add_signed(by).min(rows.len() - 1);
        self.key = Some(rows.swap_remove(self.place));
    }
}

/// The state of the view.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) colour: bool,
    /// Figures of this age are marked as old, ms.
    old_from_ms: u64,
    /// The last figures.
    pub(super) shown: Option<Snapshot>,
    /// Why Redis does not answer.
    pub(super) silent: Option<String>,
    pub(super) pane: Pane,
    pub(super) pipeline_sort: PipelineSort,
    pub(super) bot_sort: BotSort,
    /// The starts of the names of pipelines and of bots that are shown.
    pub(super) pipeline_prefix: String,
    pub(super) bot_prefix: String,
    /// Only the bots of this pipeline are shown.
    pub(super) only: Option<PipelineName>,
    /// Whether keys go into the filter.
    pub(super) typing: bool,
    pub(super) dialog: Option<Dialog>,
    message: Option<(Answer, u64)>,
    pub(super) pipeline: Cursor<PipelineName>,
    pub(super) bot: Cursor<(PipelineName, BotId)>,
    pub(super) problem: Cursor<String>,
}

impl State {
    /// `interval`: the time between two readings.
    pub(super) fn new(colour: bool, interval: Duration) -> Self {
        Self { colour, old_from_ms: OLD_MS.max(millis(2 * interval)), ..Self::default() }
    }

    /// Takes a reading. Without one, the last figures stay.
    pub(super) fn take(&mut self, reading: Reading) {
        match reading {
            Err(error) => self.silent = Some(error),
            Ok(mut new) => {
                for row in self.shown.iter().flat_map(|shown| &shown.pipelines) {
                    let is_new = new.pipelines.iter().any(|new| new.name == row.name);
                    if !is_new && new.not_seen.contains(&row.name) {
                        new.pipelines.push(PipelineRow { is_old: true, ..row.clone() });
                    }
                }
                (self.shown, self.silent) = (Some(new), None);
            }
        }
    }

    /// Shows how a command ended.
    pub(super) fn tell(&mut self, answer: Answer, now_ms: u64) {
        self.message = Some((answer, now_ms));
    }

    pub(super) fn message(&self, now_ms: u64) -> Option<&Answer> {
        let (answer, told_ms) = self.message.as_ref()?;
        (now_ms.saturating_sub(*told_ms) < MESSAGE_MS).then_some(answer)
    }

    pub(super) fn forget_message(&mut self) {
        self.message = None;
    }

    /// The age of the figures, ms, if they are old.
    pub(super) fn old_ms(&self, now_ms: u64) -> Option<u64> {
        let age = now_ms.saturating_sub(self.shown.as_ref()?.time_ms);
        (self.silent.is_some() || age >= self.old_from_ms).then_some(age)
    }

    pub(super) fn wanted(&self) -> Wanted {
        Wanted { sort: self.bot_sort, prefix: self.bot_prefix.clone(), only: self.only.clone() }
    }

    /// The pipelines that are shown, in order.
    pub(super) fn pipelines(&self) -> Vec<&PipelineRow> {
        let all = self.shown.iter().flat_map(|shown| &shown.pipelines);
        let starts = |row: &&PipelineRow| row.name.as_str().starts_with(&self.pipeline_prefix);
        let mut rows: Vec<_> = all.filter(starts).collect();
        rows.sort_by(|a, b| {
            let by = match self.pipeline_sort {
                PipelineSort::Name => std::cmp::Ordering::Equal,
                PipelineSort::Depth => b.depth.cmp(&a.depth),
                PipelineSort::Age => b.oldest_ms.cmp(&a.oldest_ms),
                PipelineSort::Failing => {
                    let urgency = |row: &PipelineRow| {
                        (row.severity.is_none(), row.severity, usize::MAX - row.failing)
                    };
                    urgency(a).cmp(&urgency(b))
                }
            };
            by.then_with(|| a.name.cmp(&b.name))
        });
        rows
    }

    /// The bots that are shown, in order.
    pub(super) fn bots(&self) -> Vec<&BotRow> {
        let all = self.shown.iter().flat_map(|shown| &shown.bots);
        let fits = |row: &&BotRow| {
            row.bot.as_str().starts_with(&self.bot_prefix)
                && self.only.as_ref().is_none_or(|only| *only == row.pipeline)
                && (self.bot_sort != BotSort::Failing || row.failing_since_ms.is_some())
        };
        let mut rows: Vec<_> = all.filter(fits).collect();
        rows.sort_by(|a, b| {
            let by = match self.bot_sort {
                BotSort::Depth => b.depth.cmp(&a.depth),
                BotSort::Age => b.oldest_ms.cmp(&a.oldest_ms),
                BotSort::Failing => a.failing_since_ms.cmp(&b.failing_since_ms),
            };
            by.then_with(|| (&a.bot, &a.pipeline).cmp(&(&b.bot, &b.pipeline)))
        });
        rows
    }

    pub(super) fn problems(&self) -> &[Finding] {
        self.shown.as_ref().map_or(&[], |shown| &shown.problems)
    }

    /// The places of the selected rows.
    pub(super) fn selected_pipeline(&self) -> Option<usize> {
        self.pipeline.place(&self.pipeline_keys())
    }

    pub(super) fn selected_bot(&self) -> Option<usize> {
        self.bot.place(&self.bot_keys())
    }

    pub(super) fn selected_problem(&self) -> Option<usize> {
        self.problem.place(&self.problem_keys())
    }

    fn pipeline_keys(&self) -> Vec<PipelineName> {
        self.pipelines().into_iter().map(|row| row.name.clone()).collect()
    }

    fn bot_keys(&self) -> Vec<(PipelineName, BotId)> {
        self.bots().into_iter().map(|row| (row.pipeline.clone(), row.bot.clone())).collect()
    }

    fn problem_keys(&self) -> Vec<String> {
        self.problems().iter().map(problem_key).collect()
    }

    /// Moves the selection of the pane.
    pub(super) fn step(&mut self, by: isize) {
        match self.pane {
            Pane::Pipelines => self.pipeline.step(self.pipeline_keys(), by),
            Pane::Bots => self.bot.step(self.bot_keys(), by),
            Pane::Problems => self.problem.step(self.problem_keys(), by),
        }
    }

    /// The filter of the pane; none of the problems, of which there are few.
    pub(super) fn prefix(&mut self) -> Option<&mut String> {
        match self.pane {
            Pane::Pipelines => Some(&mut self.pipeline_prefix),
            Pane::Bots => Some(&mut self.bot_prefix),
            Pane::Problems => None,
        }
    }

    /// What pauses or resumes the selected row.
    pub(super) fn command(&self) -> Option<Command> {
        match self.pane {
            Pane::Pipelines => {
                let row = self.pipelines()[self.selected_pipeline()?];
                let pause = !row.is_paused;
                Some(Command { pause, pipeline: row.name.clone(), bot: None })
            }
            Pane::Bots => {
                let row = self.bots()[self.selected_bot()?];
                let pause = row.state != BotState::Paused;
                let (pipeline, bot) = (row.pipeline.clone(), Some(row.bot.clone()));
                Some(Command { pause, pipeline, bot })
            }
            Pane::Problems => None,
        }
    }
}

/// What tells a problem from others while its figures change.
fn problem_key(found: &Finding) -> String {
    let pipeline = found.pipeline.as_ref().map_or("", PipelineName::as_str);
    let first = found.bots.first().map_or("", BotId::as_str);
    format!("{} {pipeline} {first}", found.code.as_str())
}
