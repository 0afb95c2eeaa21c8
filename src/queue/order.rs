//! Which events of a bot keep their order.

/// The events that are handled one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OrderBy {
    /// All events of a bot.
    Bot,
    /// The events of a bot with the same subject.
    Subject,
    /// The events of a bot for which this CEL expression over `event` gives the same text. Compiled
    /// and checked where it is used.
    Key(String),
}

impl OrderBy {
    /// As the configuration has it.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        match text.trim() {
            "bot" => Self::Bot,
            "subject" => Self::Subject,
            expression => Self::Key(expression.to_owned()),
        }
    }
}
