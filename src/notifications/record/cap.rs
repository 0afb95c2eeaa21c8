//! The caps of bots and types.

use crate::expression::Glob;
use crate::id::BotId;

pub use crate::config::{Cap, CapError};

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
