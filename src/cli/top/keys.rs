//! What keys do.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::state::{BotSort, Command, Dialog, Pane, PipelineSort, State};
use crate::cli::output::plain;
use crate::problems::Finding;
use crate::queue::BotState;

/// Rows that a page moves by.
const PAGE: isize = 10;
/// Maximum length of a filter, in characters: that of the longest name.
const PREFIX_MAX: usize = 256;

/// What a key asks for beyond the state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Effect {
    Quit,
    /// Read other figures.
    Read,
    Do(Command),
}

/// The keys with what they do, for the help.
pub(super) const KEYS: [(&str, &str); 9] = [
    ("Tab, Shift-Tab", "next or previous pane"),
    ("↑ ↓ PgUp PgDn Home End, j k", "select a row"),
    ("s", "change the order of the pane"),
    ("/", "show names that start with a text"),
    ("Enter", "bots of the pipeline; or the whole text"),
    ("Esc", "close, end the filter"),
    ("p", "pause or resume the row; asks first"),
    ("?", "this help"),
    ("q, Ctrl-C", "end"),
];

impl State {
    /// Handles a key.
    pub(super) fn press(&mut self, key: KeyEvent) -> Option<Effect> {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return (key.code == KeyCode::Char('c')).then_some(Effect::Quit);
        }
        if let Some(dialog) = self.dialog.take() {
            return self.answer(dialog, key.code);
        }
        if self.typing {
            return self.typed(key.code);
        }
        self.forget_message();
        match key.code {
            KeyCode::Char('q') => return Some(Effect::Quit),
            KeyCode::Char('?') => self.dialog = Some(Dialog::Help),
            KeyCode::Tab => self.pane = self.pane.step(1),
            KeyCode::BackTab => self.pane = self.pane.step(Pane::ALL.len() - 1),
            KeyCode::Up | KeyCode::Char('k') => self.step(-1),
            KeyCode::Down | KeyCode::Char('j') => self.step(1),
            KeyCode::PageUp => self.step(-PAGE),
            KeyCode::PageDown => self.step(PAGE),
            KeyCode::Home => self.step(isize::MIN),
            KeyCode::End => self.step(isize::MAX),
            KeyCode::Char('s') => return self.sort(),
            KeyCode::Char('/') => self.typing = self.prefix().is_some(),
            KeyCode::Char('p') => self.dialog = self.command().map(Dialog::Question),
            KeyCode::Enter => return self.enter(),
            KeyCode::Esc => return self.show_all(),
            _ => {}
        }
        None
    }

    /// A key while a dialog is open.
    fn answer(&mut self, dialog: Dialog, code: KeyCode) -> Option<Effect> {
        match (dialog, code) {
            (Dialog::Question(command), KeyCode::Char('y' | 'Y')) => Some(Effect::Do(command)),
            (Dialog::Help | Dialog::Details(..), _)
            | (_, KeyCode::Char('n' | 'N' | 'q') | KeyCode::Esc) => None,
            // Another key is a mistake, so the question stays.
            (question @ Dialog::Question(_), _) => {
                self.dialog = Some(question);
                None
            }
        }
    }

    /// A key that goes into the filter.
    fn typed(&mut self, code: KeyCode) -> Option<Effect> {
        let prefix = self.prefix()?;
        match code {
            KeyCode::Char(c) if prefix.chars().count() < PREFIX_MAX => prefix.push(c),
            KeyCode::Backspace => drop(prefix.pop()),
            KeyCode::Esc => {
                prefix.clear();
                self.typing = false;
            }
            KeyCode::Enter | KeyCode::Tab => {
                self.typing = false;
                return None;
            }
            _ => return None,
        }
        (self.pane == Pane::Bots).then_some(Effect::Read)
    }

    fn sort(&mut self) -> Option<Effect> {
        match self.pane {
            Pane::Pipelines => {
                self.pipeline_sort = match self.pipeline_sort {
                    PipelineSort::Name => PipelineSort::Depth,
                    PipelineSort::Depth => PipelineSort::Age,
                    PipelineSort::Age => PipelineSort::Failing,
                    PipelineSort::Failing => PipelineSort::Name,
                };
                None
            }
            Pane::Bots => {
                self.bot_sort = match self.bot_sort {
                    BotSort::Depth => BotSort::Age,
                    BotSort::Age => BotSort::Failing,
                    BotSort::Failing => BotSort::Depth,
                };
                Some(Effect::Read)
            }
            Pane::Problems => None,
        }
    }

    fn enter(&mut self) -> Option<Effect> {
        match self.pane {
            Pane::Pipelines => {
                let name = self.pipelines()[self.selected_pipeline()?].name.clone();
                self.only = if self.only.as_ref() == Some(&name) { None } else { Some(name) };
                Some(Effect::Read)
            }
            Pane::Bots => {
                let row = self.bots()[self.selected_bot()?];
                let title = format!("{} in pipeline {}", plain(row.bot.as_str()), row.pipeline);
                let reason = plain(&row.reason);
                let reason =
                    if reason.is_empty() { String::new() } else { format!("\n\n{reason}") };
                let text = format!(
                    "{}, {} queued{reason}\n\nfairlane bots show --pipeline {} {}",
                    state_text(row.state),
                    crate::cli::output::number(row.depth),
                    row.pipeline,
                    crate::cli::output::argument(row.bot.as_str()),
                );
                self.dialog = Some(Dialog::Details(title, text));
                None
            }
            Pane::Problems => {
                let Finding { problem, remedy, severity, runbook, .. } =
                    &self.problems()[self.selected_problem()?];
                let text = format!("{}\n\n{}\n\nsee {runbook}", plain(problem), plain(remedy));
                self.dialog = Some(Dialog::Details(severity.as_str().to_owned(), text));
                None
            }
        }
    }

    /// Ends the filter of the pane.
    fn show_all(&mut self) -> Option<Effect> {
        let filtered = self.prefix().is_some_and(|prefix| !std::mem::take(prefix).is_empty());
        let limited = self.pane != Pane::Problems && self.only.take().is_some();
        (filtered || limited).then_some(Effect::Read)
    }
}

/// The state of a bot in a word.
pub(super) fn state_text(state: BotState) -> &'static str {
    match state {
        BotState::Ready => "ready",
        BotState::Leased => "leased",
        BotState::Parked => "parked",
        BotState::Paused => "paused",
        BotState::Idle => "idle",
    }
}
