//! The errors of a configuration, with enough context to correct it.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why Fairlane refuses a configuration. Each text is complete: the location, the key, the problem
/// and the remedy. It never contains a value that may be secret.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: the configuration cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The file is not TOML.
    #[error("{at}: invalid TOML: {problem}")]
    Syntax {
        /// The location.
        at: Origin,
        /// The problem, without the parser's quote of the line, which may be secret.
        problem: String,
    },
    /// A table or a key occurs twice in the file.
    #[error("{at}: {what} is in the file already{}; {}", first_text(*.first), remedy_of(what))]
    Twice {
        /// The location of the second one.
        at: Origin,
        /// The table or key, in the notation of the file.
        what: String,
        /// The line of the first one, if known.
        first: Option<usize>,
    },
    /// The key is unknown.
    #[error("{at}: unknown key {key:?}; {remedy}")]
    UnknownKey {
        /// The location.
        at: Origin,
        /// The key, dotted.
        key: String,
        /// The nearest known key, or where to find the list.
        remedy: String,
    },
    /// The value is of another type than the key's default.
    #[error("{at}: {key} must be {expected}, not {found}")]
    WrongType {
        /// The location.
        at: Origin,
        /// The key, dotted.
        key: String,
        /// The type of the default, with an example.
        expected: &'static str,
        /// The type of the value.
        found: &'static str,
    },
    /// The value is out of bounds, or contradicts another one.
    #[error("{at}: {key} {problem}")]
    Invalid {
        /// The location.
        at: Origin,
        /// The key, dotted.
        key: String,
        /// The problem and the remedy.
        problem: String,
    },
}

fn first_text(line: Option<usize>) -> String {
    line.map_or_else(String::new, |line| format!(", in line {line}"))
}

fn remedy_of(what: &str) -> &'static str {
    if what.starts_with("table") {
        "put the keys of both under one heading and remove the other"
    } else {
        "remove one of the two"
    }
}

/// Where a setting was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// In a file.
    File {
        /// The path of the file.
        name: String,
        /// The line, from 1.
        line: usize,
    },
    /// In an environment variable of this name.
    Environment(String),
    /// In the built-in defaults, or in code.
    Code,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { name, line } => write!(f, "{name}:{line}"),
            Self::Environment(name) => write!(f, "environment variable {name}"),
            Self::Code => f.write_str("configuration"),
        }
    }
}
