//! Parsed identifiers. Text from outside is converted to one of these types once, at the edge; all
//! other code relies on their bounds.

mod lane;
mod number;

use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;
use std::sync::Arc;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use xxhash_rust::xxh3::xxh3_64;

pub use self::lane::{LANES, Lane};
pub use self::number::{
    Fence, LetterId, LetterIdError, Offset, OffsetError, Sequence, Shard, ShardCount,
};

/// Maximum length of a bot id, in bytes.
pub const BOT_ID_MAX_BYTES: usize = 256;
/// Longest pipeline name, in bytes.
pub const PREFIX_MAX_BYTES: usize = 32;
const PIPELINE_NAME_MAX_BYTES: usize = 64;
/// Maximum length of a rule id, in bytes.
pub const RULE_ID_MAX_BYTES: usize = 64;

/// Why a text is not an identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdError {
    /// The text is empty.
    #[error("{what} is empty")]
    Empty {
        /// The kind of identifier.
        what: &'static str,
    },
    /// The text is too long for the identifier.
    #[error("{what} has {bytes} bytes; at most {max} are allowed")]
    TooLong {
        /// The kind of identifier.
        what: &'static str,
        /// Its length.
        bytes: usize,
        /// The bound.
        max: usize,
    },
    /// The text contains a character that the identifier must not have.
    #[error("{what} holds {found:?} at byte {at}; {allowed}")]
    Forbidden {
        /// The kind of identifier.
        what: &'static str,
        /// The invalid character.
        found: char,
        /// Its position in bytes.
        at: usize,
        /// The allowed characters.
        allowed: &'static str,
    },
}

/// A tenant: 1 to 256 bytes of UTF-8 without control characters.
///
/// All other characters are allowed, also `*`, `{}`, `|` and spaces: a bot id is never a pattern,
/// never part of a hash tag and never joined with a separator, so no character in it is special.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BotId(Arc<str>);

impl BotId {
    /// Checks the bounds and takes a copy.
    ///
    /// # Errors
    /// If the text is empty, longer than [`BOT_ID_MAX_BYTES`] or contains a control character.
    pub fn parse(text: &str) -> Result<Self, IdError> {
        check_length("bot id", text, BOT_ID_MAX_BYTES)?;
        match text.char_indices().find(|(_, c)| c.is_control()) {
            Some((at, found)) => Err(IdError::Forbidden {
                what: "bot id",
                found,
                at,
                allowed: "control characters are not allowed",
            }),
            None => Ok(Self(text.into())),
        }
    }

    /// The text of the id.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The shard of this bot.
    #[must_use]
    pub fn shard(&self, shards: ShardCount) -> Shard {
        #[expect(clippy::cast_possible_truncation, reason = "a remainder of a u16")]
        Shard((xxh3_64(self.0.as_bytes()) % u64::from(shards.0)) as u16)
    }
}

/// The name of a pipeline: 1 to 64 of `a-z 0-9 - _`, starting with a letter or digit.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PipelineName(Arc<str>);

impl PipelineName {
    /// Whether it is `name`.
    #[must_use]
    pub fn is(&self, name: &str) -> bool {
        self.as_str() == name
    }

    /// Checks the bounds and takes a copy.
    ///
    /// # Errors
    /// If the text is empty, too long or contains another character.
    pub fn parse(text: &str) -> Result<Self, IdError> {
        const WHAT: &str = "pipeline name";
        check_length(WHAT, text, PIPELINE_NAME_MAX_BYTES)?;
        let legal = |at: usize, c: char| {
            c.is_ascii_lowercase() || c.is_ascii_digit() || (at > 0 && matches!(c, '-' | '_'))
        };
        match text.char_indices().find(|&(at, c)| !legal(at, c)) {
            Some((at, found)) => Err(IdError::Forbidden {
                what: WHAT,
                found,
                at,
                allowed: "a name begins with a-z or 0-9 and goes on with a-z, 0-9, '-' and '_'",
            }),
            None => Ok(Self(text.into())),
        }
    }

    /// The text of the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The prefix of the keys and channels of one environment in a Redis: 1 to 32 of `A-Z a-z 0-9 - _
/// .`, `fl` by default. None of these characters is special in a pattern, in a hash tag or between
/// the parts of a key.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Prefix(Arc<str>);

impl Prefix {
    /// The default.
    pub const DEFAULT: &str = "fl";

    /// Checks the bounds and takes a copy.
    ///
    /// # Errors
    /// If the text is empty, too long or contains another character.
    pub fn parse(text: &str) -> Result<Self, IdError> {
        const WHAT: &str = "prefix";
        check_length(WHAT, text, PREFIX_MAX_BYTES)?;
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        match text.char_indices().find(|&(_, c)| !legal(c)) {
            Some((at, found)) => Err(IdError::Forbidden {
                what: WHAT,
                found,
                at,
                allowed: "a prefix has A-Z, a-z, 0-9, '-', '_' and '.'",
            }),
            None => Ok(Self(text.into())),
        }
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The stream of unreadable bus entries.
    #[must_use]
    pub fn invalid_stream(&self) -> String {
        self.stream("invalid")
    }

    /// The default bus stream.
    #[must_use]
    pub fn events_stream(&self) -> String {
        self.stream("events")
    }

    /// Streams that people use directly have a longer prefix in the default environment.
    fn stream(&self, name: &str) -> String {
        let prefix = if self.as_str() == Self::DEFAULT { "fairlane" } else { self.as_str() };
        format!("{prefix}:{name}")
    }
}

impl Default for Prefix {
    fn default() -> Self {
        Self(Self::DEFAULT.into())
    }
}

impl fmt::Debug for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

fn check_length(what: &'static str, text: &str, max: usize) -> Result<(), IdError> {
    match text.len() {
        0 => Err(IdError::Empty { what }),
        bytes if bytes > max => Err(IdError::TooLong { what, bytes, max }),
        _ => Ok(()),
    }
}

/// Parses an id within the deserializer, which can then report the position of an invalid one.
struct Parsed<T>(PhantomData<T>);

impl<T: FromStr<Err: fmt::Display>> Visitor<'_> for Parsed<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
}

/// The id of a bot's rule: 1 to 64 of `A-Z a-z 0-9 _ . -`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuleId(Arc<str>);

impl RuleId {
    /// Checks the bounds and takes a copy.
    ///
    /// # Errors
    /// If the text is empty, too long or contains another character.
    pub fn parse(text: &str) -> Result<Self, IdError> {
        const WHAT: &str = "rule id";
        check_length(WHAT, text, RULE_ID_MAX_BYTES)?;
        // `.` and `..` cannot be part of a URL path, and `test` is a route.
        if matches!(text, "." | ".." | "test") {
            let allowed = "neither \".\" nor \"..\" nor \"test\" is a rule id";
            let found = text.chars().next().unwrap_or('.');
            return Err(IdError::Forbidden { what: WHAT, found, at: 0, allowed });
        }
        match text.char_indices().find(|&(_, c)| !is_plain(c)) {
            Some((at, found)) => Err(IdError::Forbidden {
                what: WHAT,
                found,
                at,
                allowed: "it has A-Z, a-z, 0-9, '_', '.' and '-'",
            }),
            None => Ok(Self(text.into())),
        }
    }

    /// The text of the id.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether the names of rules, tags and fields may contain a character.
pub(crate) fn is_plain(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '_' | '.' | '-')
}

macro_rules! text_id {
    ($type:ty) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_str(Parsed(PhantomData))
            }
        }
        impl std::str::FromStr for $type {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                Self::parse(text)
            }
        }
    };
}
text_id!(BotId);
text_id!(PipelineName);
text_id!(RuleId);

macro_rules! text_schema {
    ($type:ty, $name:literal, $max:expr, $pattern:expr, $example:literal, $description:literal) => {
        impl utoipa::PartialSchema for $type {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                utoipa::openapi::ObjectBuilder::new()
                    .schema_type(utoipa::openapi::schema::Type::String)
                    .pattern(Some($pattern))
                    .min_length(Some(1))
                    .max_length(Some($max))
                    .examples([$example])
                    .description(Some($description))
                    .into()
            }
        }
        impl utoipa::ToSchema for $type {
            fn name() -> std::borrow::Cow<'static, str> {
                $name.into()
            }
        }
    };
}
text_schema!(
    BotId,
    "BotId",
    BOT_ID_MAX_BYTES,
    r"^[^\x00-\x1f\x7f-\x9f]+$",
    "shop-7",
    "A tenant: no control characters"
);
text_schema!(
    PipelineName,
    "PipelineName",
    PIPELINE_NAME_MAX_BYTES,
    "^[a-z0-9][a-z0-9_-]*$",
    "billing",
    "A pipeline: a-z, 0-9, '-' and '_', beginning with a letter or digit"
);
text_schema!(
    RuleId,
    "RuleId",
    RULE_ID_MAX_BYTES,
    "^[A-Za-z0-9_.-]+$",
    "10-welcome",
    "A rule of a bot: A-Z, a-z, 0-9, '_', '.' and '-'; rules apply in the order of their ids"
);
text_schema!(
    LetterId,
    "LetterId",
    48,
    r"^(0|[1-9][0-9]{0,2})\.[0-9]{1,19}-[0-9]{1,19}$",
    "3.1763640000000-0",
    "A dead letter: `<shard>.<ms>-<seq>`"
);

#[cfg(test)]
mod tests;
