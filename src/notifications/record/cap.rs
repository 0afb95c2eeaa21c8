//! Caps: how many notifications a user gets in a time.

use std::str::FromStr;
use std::time::Duration;

use super::DELAY_MAX;
use crate::filter::Glob;
use crate::id::BotId;

/// A user gets at most so many in any window of so long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cap {
    /// How many: 1 to [`Self::N_MAX`].
    pub n: u32,
    /// In how long: [`Self::WINDOW_MIN`] to [`Self::WINDOW_MAX`].
    pub window: Duration,
}

/// A text that is no cap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CapError {
    /// Not of the form.
    #[error("write NUMBER/TIME, such as \"10/day\", \"3/1h\" or \"100/7d\"")]
    Form,
    /// Too many, or none.
    #[error("write a number from 1 to {} before the stroke", Cap::N_MAX)]
    Number,
    /// Too short or too long.
    #[error("write a time from 1s to 366d behind the stroke")]
    Window,
}

impl Cap {
    /// A user's log takes 6 bytes each.
    pub const N_MAX: u32 = 1_000;
    /// Shortest window.
    pub const WINDOW_MIN: Duration = Duration::from_secs(1);
    /// Longest window: so long a user is remembered.
    pub const WINDOW_MAX: Duration = DELAY_MAX;
}

impl FromStr for Cap {
    type Err = CapError;

    fn from_str(text: &str) -> Result<Self, CapError> {
        let (n, window) = text.split_once('/').ok_or(CapError::Form)?;
        let (n, window) = (n.trim(), window.trim());
        if n.is_empty() || !n.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(CapError::Form);
        }
        let n = n.parse().ok().filter(|n| (1..=Self::N_MAX).contains(n)).ok_or(CapError::Number)?;
        let window = match window {
            "minute" => Duration::from_secs(60),
            "hour" => Duration::from_secs(3_600),
            "day" => Duration::from_secs(86_400),
            "week" => Duration::from_secs(7 * 86_400),
            window => humantime::parse_duration(window).map_err(|_| CapError::Form)?,
        };
        if !(Self::WINDOW_MIN..=Self::WINDOW_MAX).contains(&window) {
            return Err(CapError::Window);
        }
        Ok(Self { n, window })
    }
}

/// How many notifications a user gets, at most.
///
/// Those of a bot count every type together; those of a type count that type by itself, beside them.
/// A type without any is not counted at all.
#[derive(Debug, Clone, Default)]
pub struct Caps {
    /// Of every bot.
    pub all: Vec<Cap>,
    /// Of bots whose ids match, instead; the first that matches.
    pub by_bot: Vec<(Glob, Vec<Cap>)>,
    /// Of types.
    pub by_kind: Vec<(String, Vec<Cap>)>,
}

impl Caps {
    /// Those of a bot.
    #[must_use]
    pub fn of_bot(&self, bot: &BotId) -> &[Cap] {
        let named = self.by_bot.iter().find(|(glob, _)| glob.matches(bot.as_str()));
        named.map_or(&self.all, |(_, caps)| caps)
    }

    /// Those of a type beside those of its bot; `None` when it has none of its own.
    #[must_use]
    pub fn of_kind(&self, kind: &str) -> Option<&[Cap]> {
        self.by_kind.iter().find(|(name, _)| name == kind).map(|(_, caps)| &**caps)
    }
}
