//! The caps of bots and types.

use crate::expression::Glob;
use crate::id::BotId;

pub use crate::config::{Cap, CapError};

/// The maximum number of notifications per user.
///
/// The caps of a bot count all types together. The caps of a type count this type alone, in
/// addition to those of the bot. A type with an empty list of caps is not counted.
#[derive(Debug, Clone, Default)]
pub struct Caps {
    /// The caps of every bot.
    pub all: Vec<Cap>,
    /// The caps of bots with matching ids, which replace `all`; the first match counts.
    pub by_bot: Vec<(Glob, Vec<Cap>)>,
    /// The caps of types.
    pub by_kind: Vec<(String, Vec<Cap>)>,
}

impl Caps {
    /// The caps of a bot.
    #[must_use]
    pub fn of_bot(&self, bot: &BotId) -> &[Cap] {
        let named = self.by_bot.iter().find(|(glob, _)| glob.matches(bot.as_str()));
        named.map_or(&self.all, |(_, caps)| caps)
    }

    /// The caps of a type, in addition to those of its bot; `None` if none are configured.
    #[must_use]
    pub fn of_kind(&self, kind: &str) -> Option<&[Cap]> {
        self.by_kind.iter().find(|(name, _)| name == kind).map(|(_, caps)| &**caps)
    }
}
