//! Identifiers that are numbers: shards, fences, sequences, offsets, dead letters.

use std::fmt;
use std::marker::PhantomData;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Parsed;

/// The number of shards: 1 to 1,024, fixed when the data is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardCount(pub(super) u16);

impl ShardCount {
    /// Maximum number of shards. Each costs one scan a minute when idle.
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

/// A fixed subset of the bots: `xxh3(bot) % shards`. All keys of one pipeline and shard share one
/// hash tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Shard(pub(super) u16);

impl Shard {
    /// The shard's number, from 0.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// The shard with this number, which may be higher than the number of shards.
    pub(crate) fn from_digits(text: &str) -> Option<Self> {
        text.parse().ok().filter(|number| *number < ShardCount::MAX).map(Self)
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of a lease. It only increases, so an effect or a commit with a lower fence is stale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Fence(u64);

impl Fence {
    /// The fence with this number. Fairlane makes the fences of leases; others are for tests of handlers.
    #[must_use]
    pub fn new(number: u64) -> Self {
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

/// The number that the queueing script gives an event: `max(last + 1, Redis time in µs)`.
///
/// It orders the events of a shard, stays increasing when Redis loses its last writes, and shows
/// when the event arrived.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Sequence(u64);

impl Sequence {
    /// The sequence with this number.
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
    /// Milliseconds since 1970, by the clock of the stream's server.
    pub ms: u64,
    /// Counts entries of one millisecond.
    pub seq: u64,
}

impl fmt::Display for Offset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.ms, self.seq)
    }
}

/// A text that is not a stream offset.
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

/// A dead letter of a pipeline: `<shard>.<ms>-<seq>`, its shard and its offset in the stream of the
/// shard.
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

/// A text that is not the id of a dead letter.
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
