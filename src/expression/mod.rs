//! Selects events: globs over types, and CEL expressions over an event and, in rules, its
//! subscriber.
//!
//! An expression comes from a configuration or from a tenant. Its text, its depth and its macros
//! are bounded when it is compiled; its cost on one event is bounded before it runs.

mod compile;
mod evaluate;
mod glob;
mod memory;
mod regex;
mod size;
mod volume;
mod walk;

use std::fmt;
use std::sync::Arc;

use cel::IdedExpr;

pub use self::evaluate::Facts;
pub use self::glob::Glob;
pub use self::size::Sizes;
use self::volume::Volume;
use crate::event::Event;

/// Maximum length of a filter, in bytes.
pub const FILTER_MAX_BYTES: usize = 4_096;
/// Maximum nesting of a filter: brackets, operators, selections.
pub const FILTER_MAX_DEPTH: usize = 32;
/// Maximum nesting of macros (`all`, `exists`, `exists_one`, `filter`, `map`).
pub const FILTER_MAX_MACROS: usize = 2;
/// Maximum number of additions in a filter: each copies its operands.
pub const FILTER_MAX_ADDITIONS: usize = 16;
/// Maximum cost of a filter on one event, in steps. One step is about one evaluation of an
/// operator; a large event makes each step more expensive. A copy costs a step for each 100 bytes of
/// memory or fewer, so a filter takes up to about 100 MB.
pub const FILTER_MAX_STEPS: u64 = 1_000_000;
/// Maximum cost of all filters on one event together, in steps.
const EVENT_MAX_STEPS: u64 = 2_000_000;

/// The names that an expression may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sees {
    /// `event`.
    Event,
    /// `event` and `subscriber`.
    Subscriber,
}

impl Sees {
    fn names(self) -> &'static [&'static str] {
        match self {
            Self::Event => &["event"],
            Self::Subscriber => &["event", "subscriber"],
        }
    }

    fn spoken(self) -> &'static str {
        match self {
            Self::Event => "neither `event` nor a function of CEL",
            Self::Subscriber => "neither `event` nor `subscriber` nor a function of CEL",
        }
    }
}

/// A compiled CEL expression.
pub struct Filter {
    expression: IdedExpr,
    shape: Shape,
    sees: Sees,
}

/// The properties that determine the cost of an expression.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Shape {
    /// Number of nodes outside macros, in one macro, and so on.
    nodes: [u64; FILTER_MAX_MACROS + 1],
    additions: usize,
    /// Number of entries of the longest literal list.
    longest: usize,
    /// All values that it copies.
    copies: Volume,
}

/// Why a filter is not usable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FilterError {
    /// Longer than [`FILTER_MAX_BYTES`].
    #[error("the filter has {0} bytes; at most {FILTER_MAX_BYTES} are allowed")]
    TooLong(usize),
    /// Deeper than [`FILTER_MAX_DEPTH`].
    #[error("the filter nests deeper than {FILTER_MAX_DEPTH}")]
    TooDeep,
    /// Macros within macros, deeper than [`FILTER_MAX_MACROS`].
    #[error(
        "the filter nests macros (all, exists, exists_one, filter, map) deeper than {FILTER_MAX_MACROS}"
    )]
    Macros,
    /// More additions than [`FILTER_MAX_ADDITIONS`].
    #[error("the filter has {0} additions; at most {FILTER_MAX_ADDITIONS} are allowed")]
    Additions(usize),
    /// The lists that macros make could grow with every macro.
    #[error(
        "the filter makes lists out of lists: no map stands within another, and no macro goes over a map that adds or writes lists"
    )]
    Grows,
    /// A regular expression that cannot be used.
    #[error("the filter has a regular expression that {0}")]
    Regex(String),
    /// Not CEL.
    #[error("the filter is not valid CEL: {at}: {problem}")]
    Syntax {
        /// The place.
        at: Position,
        /// The problem.
        problem: String,
    },
    /// It names something that does not exist.
    #[error("the filter names {name:?} at {at}, which is {known}")]
    Unknown {
        /// The name.
        name: String,
        /// The place.
        at: Position,
        /// The existing names.
        known: &'static str,
    },
    /// It could not be evaluated.
    #[error("the filter cannot be evaluated: {0}")]
    Evaluation(String),
    /// It would take too long on this event.
    #[error(
        "the filter would take {0} steps on this event; at most {FILTER_MAX_STEPS} are allowed: lists and data are too long for it"
    )]
    TooDear(u64),
    /// All filters on this event together took too long.
    #[error(
        "the filters on this event have used up their {EVENT_MAX_STEPS} steps: write fewer filters for its type, with fewer loops"
    )]
    Spent,
    /// It does not answer yes or no.
    #[error("the filter must answer true or false, not {0}")]
    NotBoolean(String),
    /// It does not give a text.
    #[error("it must give a text, not {0}")]
    NotText(String),
}

/// A CEL expression over an event that gives a text, such as an ordering key.
#[derive(Debug)]
pub struct TextExpression(Filter);

impl TextExpression {
    /// Compiles an expression such as `event.data.order`.
    ///
    /// # Errors
    /// As [`Filter::compile`]; its messages call every expression a filter.
    pub fn compile(text: &str) -> Result<Self, FilterError> {
        match Filter::compile_any(text, Sees::Event)? {
            (filter, Some(cel::Value::String(_)) | None) => Ok(Self(filter)),
            (_, Some(other)) => Err(FilterError::NotText(evaluate::shown(&other))),
        }
    }

    /// The text for an event.
    ///
    /// # Errors
    /// If the expression fails on it, for example on a missing field, gives no text, or would take too
    /// long.
    pub fn text(&self, event: &Event) -> Result<Arc<String>, FilterError> {
        match self.0.evaluate(&Facts::of(event)?)? {
            cel::Value::String(text) => Ok(text),
            other => Err(FilterError::NotText(evaluate::shown(&other))),
        }
    }
}

impl FilterError {
    /// The place of the error in the text, if it has one.
    #[must_use]
    pub fn position(&self) -> Option<Position> {
        match self {
            Self::Syntax { at, .. } | Self::Unknown { at, .. } => Some(*at),
            _ => None,
        }
    }
}

/// A place in the text of a filter, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// The line.
    pub line: usize,
    /// The character in the line.
    pub column: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

impl Position {
    /// The place of the character at `offset`.
    fn of(text: &str, offset: usize) -> Self {
        let before = text.chars().take(offset);
        let (mut line, mut column) = (1, 1);
        for character in before {
            if character == '\n' {
                (line, column) = (line + 1, 1);
            } else {
                column += 1;
            }
        }
        Self { line, column }
    }
}

impl fmt::Debug for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Filter")
    }
}

#[cfg(test)]
mod tests;
