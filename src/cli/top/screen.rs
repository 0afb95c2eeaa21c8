//! The terminal while the view is shown.

use ratatui::DefaultTerminal;

use super::draw;
use super::state::State;
use crate::cli::error::CliError;

/// The alternate screen in raw mode. The terminal is as before when this is dropped, and before the
/// message of a panic.
#[derive(Debug)]
pub(super) struct Screen(DefaultTerminal);

/// Restores the terminal also if it could only be prepared in part.
struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        // There is no other way to tell that this failed.
        let _ = ratatui::try_restore();
    }
}

impl Screen {
    pub(super) fn open() -> Result<Self, CliError> {
        let on_failure = Restore;
        let terminal = ratatui::try_init().map_err(CliError::Terminal)?;
        std::mem::forget(on_failure);
        Ok(Self(terminal))
    }

    pub(super) fn draw(&mut self, state: &State, now_ms: u64) -> Result<(), CliError> {
        let drawn = self.0.draw(|frame| draw::draw(frame, state, now_ms));
        drawn.map(drop).map_err(CliError::Terminal)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.0.show_cursor();
        drop(Restore);
    }
}
