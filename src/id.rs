//! Parsed identifiers. Text from outside becomes one of these types once, at the edge; everything
//! behind the edge relies on their bounds.

use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;
use std::sync::Arc;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use xxhash_rust::xxh3::xxh3_64;

/// Longest bot id, in bytes.
pub const BOT_ID_MAX_BYTES: usize = 256;
/// Longest pipeline name, in bytes.
pub const PREFIX_MAX_BYTES: usize = 32;
const PIPELINE_NAME_MAX_BYTES: usize = 64;
/// Longest rule id, in bytes.
pub const RULE_ID_MAX_BYTES: usize = 64;

/// Why a piece of text is not an identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// The text has no characters.
    #[error("{what} is empty")]
    Empty {
        /// Which identifier was asked for.
        what: &'static str,
    },
    /// The text is longer than the identifier may be.
    #[error("{what} has {bytes} bytes; at most {max} are allowed")]
    TooLong {
        /// Which identifier was asked for.
        what: &'static str,
        /// Its length.
        bytes: usize,
        /// The bound.
        max: usize,
    },
    /// The text holds a character that the identifier may not have.
    #[error("{what} holds {found:?} at byte {at}; {allowed}")]
    Forbidden {
        /// Which identifier was asked for.
        what: &'static str,
        /// The offending character.
        found: char,
        /// Its position in bytes.
        at: usize,
        /// What is allowed instead.
        allowed: &'static str,
    },
}

/// A tenant: 1 to 256 bytes of UTF-8 without control characters.
///
/// Everything else is legal, also `*`, `{}`, `|` and spaces: a bot id is never a pattern, never
/// part of a hash tag and never joined with a separator, so nothing in it has a meaning.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BotId(Arc<str>);

impl BotId {
    /// Checks the bounds and takes a copy.
    ///
    /// # Errors
    /// When the text is empty, longer than [`BOT_ID_MAX_BYTES`] or holds a control character.
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

    /// The shard this bot belongs to.
    #[must_use]
    pub fn shard(&self, shards: ShardCount) -> Shard {
        #[expect(clippy::cast_possible_truncation, reason = "a remainder of a u16")]
        Shard((xxh3_64(self.0.as_bytes()) % u64::from(shards.0)) as u16)
    }
}

/// The name of a pipeline: 1 to 64 of `a-z 0-9 - _`, beginning with a letter or digit.
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
    /// When the text is empty, too long or holds any other character.
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

/// What the keys and channels of one environment in a Redis begin with: 1 to 32 of `A-Z a-z 0-9 - _ .`,
/// `fl` by default. None of them has a meaning in a pattern, in a hash tag or between the parts of a
/// key.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Prefix(Arc<str>);

impl Prefix {
    /// The default.
    pub const DEFAULT: &str = "fl";

    /// Checks the bounds and takes a copy.
    ///
    /// # Errors
    /// When the text is empty, too long or holds any other character.
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

    /// The stream of bus entries that could not be read.
    #[must_use]
    pub fn invalid_stream(&self) -> String {
        self.stream("invalid")
    }

    /// The bus stream, unless the configuration names others.
    #[must_use]
    pub fn events_stream(&self) -> String {
        self.stream("events")
    }

    /// Streams that people write to or look at have a longer name in the environment that most have.
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

/// Reads an id within the deserializer, which then can say where the text was that is none.
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
    /// When the text is empty, too long or holds any other character.
    pub fn parse(text: &str) -> Result<Self, IdError> {
        const WHAT: &str = "rule id";
        check_length(WHAT, text, RULE_ID_MAX_BYTES)?;
        // What a URL cannot name, and what is a route of its own.
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

/// Whether a character may be in the names of rules, tags and fields.
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

/// How many shards the data is cut into: 1 to 1,024, fixed when the data is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardCount(u16);

impl ShardCount {
    /// Most shards there may be. Each costs one scan a minute when idle.
    pub const MAX: u16 = 1_024;

    /// `None` outside 1 to [`Self::MAX`].
    #[must_use]
    pub fn new(count: u16) -> Option<Self> {
        (1..=Self::MAX).contains(&count).then_some(Self(count))
    }

    /// The number.
    #[must_use]
    pub fn get(self) -> u16 {
        self.0
    }

    /// Every shard.
    pub fn shards(self) -> impl Iterator<Item = Shard> + Clone {
        (0..self.0).map(Shard)
    }
}

/// A fixed slice of the bots: `xxh3(bot) % shards`. All keys of one pipeline and shard share one
/// hash tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Shard(u16);

impl Shard {
    /// The shard's number, from 0.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// The shard of this number, which may be beyond those that there are.
    pub(crate) fn from_digits(text: &str) -> Option<Self> {
        text.parse().ok().filter(|number| *number < ShardCount::MAX).map(Self)
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of a lease. It only grows, so an effect or a commit that carries an older one is
/// known to be late.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Fence(u64);

impl Fence {
    pub(crate) fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number an event gets from the script that queues it: `max(last + 1, Redis time in µs)`.
///
/// It orders the events of a shard, survives a Redis that loses its tail, and tells when the
/// event arrived.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Sequence(u64);

impl Sequence {
    /// The sequence of this number.
    #[must_use]
    pub fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number. As a time: microseconds since 1970 on the Redis server's clock.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A position in a Redis stream: `<ms>-<seq>`, two 64-bit numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Offset {
    /// Milliseconds since 1970, as the stream's server gave them.
    pub ms: u64,
    /// Counts entries of one millisecond.
    pub seq: u64,
}

impl fmt::Display for Offset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.ms, self.seq)
    }
}

/// A text that is no stream offset.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a stream offset, which looks like 1700000000000-0")]
pub struct OffsetError(String);

impl std::str::FromStr for Offset {
    type Err = OffsetError;
    fn from_str(text: &str) -> Result<Self, OffsetError> {
        let parse = || {
            let (ms, seq) = text.split_once('-')?;
            Some(Self { ms: ms.parse().ok()?, seq: seq.parse().ok()? })
        };
        parse().ok_or_else(|| OffsetError(text.to_owned()))
    }
}

/// A dead letter of a pipeline: `<shard>.<ms>-<seq>`, its shard and its place in the stream there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LetterId {
    pub(crate) entry: Offset,
    pub(crate) shard: Shard,
}

impl LetterId {
    pub(crate) fn new(shard: Shard, entry: Offset) -> Self {
        Self { entry, shard }
    }
}

impl fmt::Display for LetterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.shard, self.entry)
    }
}

impl Serialize for LetterId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for LetterId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Parsed(PhantomData))
    }
}

/// A text that is no id of a dead letter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not the id of a dead letter, which looks like 3.1700000000000-0")]
pub struct LetterIdError(String);

impl std::str::FromStr for LetterId {
    type Err = LetterIdError;
    fn from_str(text: &str) -> Result<Self, LetterIdError> {
        let parse = || {
            let (shard, entry) = text.split_once('.')?;
            Some(Self { shard: Shard::from_digits(shard)?, entry: entry.parse().ok()? })
        };
        parse().ok_or_else(|| LetterIdError(text.chars().take(100).collect()))
    }
}

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
mod tests {
    use super::*;

    #[test]
    fn hostile_bot_ids_are_either_kept_whole_or_refused_with_a_reason() {
        for legal in ["*", "{}", "a b", "|||", "fl:{x:1}:ctl", "日本", "'; --", "a/../b", "%00"] {
            assert_eq!(BotId::parse(legal).unwrap().as_str(), legal);
        }
        let refused = [
            ("", "bot id is empty"),
            ("a\0b", "bot id holds '\\0' at byte 1; control characters are not allowed"),
            ("a\n", "bot id holds '\\n' at byte 1; control characters are not allowed"),
            (&"x".repeat(257), "bot id has 257 bytes; at most 256 are allowed"),
        ];
        for (text, why) in refused {
            assert_eq!(BotId::parse(text).unwrap_err().to_string(), why);
        }
    }

    #[test]
    fn pipeline_names_are_plain_words() {
        for legal in ["log", "a", "x-1_y", "0"] {
            assert!(PipelineName::parse(legal).is_ok(), "{legal}");
        }
        for refused in ["", "-a", "A", "a b", "a:b", "{a}", "é", &"a".repeat(65)] {
            assert!(PipelineName::parse(refused).is_err(), "{refused}");
        }
    }

    #[test]
    fn the_id_of_a_dead_letter_is_read_back_and_others_are_refused() {
        let id: LetterId = "15.1700000000000-3".parse().unwrap();
        assert_eq!(id.to_string(), "15.1700000000000-3");
        assert_eq!((id.shard.index(), id.entry.seq), (15, 3));
        for refused in ["", "7", "1700000000000-0", "1024.1-0", "-1.1-0", "1.1", "1.1-", "a.1-0"] {
            assert!(refused.parse::<LetterId>().is_err(), "{refused}");
        }
    }

    #[test]
    fn every_bot_has_one_shard_below_the_count() {
        let shards = ShardCount::new(16).unwrap();
        let mut met = [0_u32; 16];
        for n in 0..16_000 {
            met[BotId::parse(&format!("bot-{n}")).unwrap().shard(shards).index()] += 1;
        }
        assert!(met.iter().all(|&bots| (800..1_200).contains(&bots)), "{met:?}");
    }
}
