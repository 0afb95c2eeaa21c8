//! What happened to the events of a bot: its last attempts, for operators.
//!
//! A worker notes each slice when it ends. A task writes the notes to Redis twice a second, so that
//! they cost no round trip of their own. Nothing depends on them: a process that is killed loses the
//! notes of half a second, and a full Redis takes none.
//!
//! Failures are kept per bot and before successes. Consecutive slices of a bot that are done share a
//! note.

mod attempt;
mod ids;
mod notes;
mod packed;
mod recorder;

use std::time::Duration;

pub use self::attempt::{Attempt, AttemptResult};
pub(crate) use self::attempt::{kept_id, kept_text};
pub(crate) use self::ids::Ids;
pub(crate) use self::packed::{
    bot_of, bots_of_portion, read_failures, read_portion, read_whole_portion, settled_in,
};
pub(crate) use self::recorder::{Places, Recorder};
use crate::id::ShardCount;
use crate::redis::scripts::Kept;

/// Bounds of what is kept of the attempts of a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct History {
    /// Maximum number of attempts of one bot that are shown. 0: none is kept.
    pub slices: u32,
    /// How long they are kept.
    pub keep: Duration,
    /// Maximum number of bytes of all of them.
    pub max_bytes: u64,
}

/// Maximum number of bytes of the failures of one bot, for each attempt that is shown.
const FAILURE_BYTES: u64 = 512;
/// One bot may use this part of the bytes of the failures of its shard, so that others fit.
const BOT_SHARE: u64 = 8;
/// The bounds of a shard are never smaller than these, so that each holds a few attempts.
const SHARD_MIN: u64 = 16 * 1_024;

impl History {
    /// Nothing is kept.
    pub const NONE: Self = Self { slices: 0, keep: Duration::ZERO, max_bytes: 0 };

    /// The bounds of one of `shards`.
    pub(crate) fn kept(self, shards: ShardCount) -> Kept {
        let shard = (self.max_bytes / u64::from(shards.get())).max(SHARD_MIN);
        let half = shard / 2;
        Kept {
            keep_ms: crate::clock::millis(self.keep),
            done_bytes: half,
            failed_bytes: half,
            bot_bytes: (u64::from(self.slices) * FAILURE_BYTES).min(half / BOT_SHARE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_has_its_part_of_the_bytes_and_a_bot_a_part_of_that() {
        let history =
            History { slices: 100, keep: Duration::from_secs(60), max_bytes: 64 * 1_024 * 1_024 };
        let kept = history.kept(ShardCount::new(64).unwrap());
        assert_eq!((kept.keep_ms, kept.done_bytes), (60_000, 512 * 1_024));
        assert_eq!((kept.failed_bytes, kept.bot_bytes), (512 * 1_024, 51_200));
        let small = History { max_bytes: 1, ..history }.kept(ShardCount::new(64).unwrap());
        assert_eq!((small.done_bytes, small.bot_bytes), (8_192, 1_024));
    }
}
