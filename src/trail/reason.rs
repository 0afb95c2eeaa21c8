//! Why an operator acts, in the operator's own words.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Maximum length of a reason, in characters.
pub const REASON_MAX: usize = 200;

/// Why an operator acts: 1 to [`REASON_MAX`] characters without control characters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Reason(String);

/// The text is not usable as a reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("write 1 to {REASON_MAX} characters on one line, without control characters")]
pub struct ReasonError;

/// Characters that change the direction or the lines of the text around them.
fn disturbs(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

impl Reason {
    /// Reads a reason. Blanks around it are removed.
    ///
    /// # Errors
    /// If the text is empty, too long, or has characters that disturb the text around it.
    pub fn parse(text: &str) -> Result<Self, ReasonError> {
        let text = text.trim_matches(' ');
        if text.is_empty() || text.chars().any(disturbs) || text.chars().count() > REASON_MAX {
            return Err(ReasonError);
        }
        Ok(Self(text.to_owned()))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Reason {
    type Err = ReasonError;

    fn from_str(text: &str) -> Result<Self, ReasonError> {
        Self::parse(text)
    }
}

impl TryFrom<String> for Reason {
    type Error = ReasonError;

    fn try_from(text: String) -> Result<Self, ReasonError> {
        Self::parse(&text)
    }
}

impl From<Reason> for String {
    fn from(reason: Reason) -> Self {
        reason.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_one_line_of_bounded_length() {
        for good in ["maintenance", "the shop asked: ticket 7", &"日".repeat(REASON_MAX)] {
            assert_eq!(Reason::parse(good).unwrap().as_str(), good);
        }
        assert_eq!(Reason::parse("  as asked ").unwrap().as_str(), "as asked");
        let long = "x".repeat(REASON_MAX + 1);
        for bad in ["", "   ", "a\nb", "\u{1b}[2J", "a\u{202e}b", "\u{2028}", "tab\t", &long] {
            assert_eq!(Reason::parse(bad), Err(ReasonError), "{bad:?}");
        }
    }
}
