//! What can be wrong with a configuration, said so that its author can mend it.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why a configuration is refused. The text is complete: where, which key, what is wrong, what to
/// do. It never holds a value that may be secret.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: the configuration cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file is not TOML.
    #[error("{at}: this is not TOML: {problem}")]
    Syntax {
        /// Where.
        at: Origin,
        /// What the parser met. The parser's own error also quotes the line, which may be secret.
        problem: String,
    },
    /// A table or a key is in the file twice.
    #[error("{at}: {what} is in the file already{}; {}", first_text(*.first), remedy_of(what))]
    Twice {
        /// Where the second one is.
        at: Origin,
        /// The table or key, as it stands in the file.
        what: String,
        /// The line of the first one, if it can be told.
        first: Option<usize>,
    },
    /// There is no such key.
    #[error("{at}: unknown key {key:?}; {remedy}")]
    UnknownKey {
        /// Where.
        at: Origin,
        /// The key, dotted.
        key: String,
        /// The nearest known key, or where to look.
        remedy: String,
    },
    /// The value is of another type than the key's default.
    #[error("{at}: {key} must be {expected}, not {found}")]
    WrongType {
        /// Where.
        at: Origin,
        /// The key, dotted.
        key: String,
        /// The type of the default, with an example.
        expected: &'static str,
        /// The type that was met.
        found: &'static str,
    },
    /// The value is out of bounds, or contradicts another one.
    #[error("{at}: {key} {problem}")]
    Invalid {
        /// Where.
        at: Origin,
        /// The key, dotted.
        key: String,
        /// What is wrong and what to do.
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
        /// Its name.
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
