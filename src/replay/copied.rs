//! Up to where the fan-out has copied. What it has not copied yet is still to be handled for the first
//! time, so a replay leaves it alone: otherwise it would be handled twice.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::fanout::starts;
use crate::id::{Offset, Shard};
use crate::queue::Queue;
use crate::redis::RedisError;

/// The positions of the shards of a pipeline on each stream of a replay, when it started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Copied(Vec<OfStream>);

/// The positions on one stream. Shards without new events stand where the first one stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct OfStream {
    /// The position of the first shard.
    most: (u64, u64),
    /// The positions of the shards that stand elsewhere.
    others: BTreeMap<usize, (u64, u64)>,
}

impl Copied {
    /// Reads the positions. A shard without a position has copied nothing.
    ///
    /// # Errors
    /// If a shard does not answer.
    pub(super) async fn read(queue: &Queue, streams: &[String]) -> Result<Self, RedisError> {
        let mut copied = Vec::with_capacity(streams.len());
        for stream in streams {
            copied.push(OfStream::new(&starts::standing(queue, stream).await?));
        }
        Ok(Self(copied))
    }

    /// Whether an entry of a stream was copied into a shard that wants it.
    pub(super) fn has(&self, stream: usize, shard: Shard, offset: Offset) -> bool {
        let Some(OfStream { most, others }) = self.0.get(stream) else { return false };
        (offset.ms, offset.seq) <= *others.get(&shard.index()).unwrap_or(most)
    }
}

impl OfStream {
    fn new(positions: &[Offset]) -> Self {
        let most = positions.first().copied().unwrap_or_default();
        let others = positions.iter().enumerate().filter(|(_, at)| **at != most);
        let others = others.map(|(shard, at)| (shard, (at.ms, at.seq))).collect();
        Self { most: (most.ms, most.seq), others }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ShardCount;

    #[test]
    fn each_shard_has_what_is_not_behind_its_position() {
        let at = |ms| Offset { ms, seq: 1 };
        let copied = Copied(vec![OfStream::new(&[at(5), at(5), at(9), Offset::default()])]);
        assert_eq!(copied.0[0].others.len(), 2);
        let shards: Vec<_> = ShardCount::new(4).unwrap().shards().collect();
        let has = |shard: usize, offset| copied.has(0, shards[shard], offset);
        for shard in [0, 1] {
            assert!(has(shard, at(5)) && !has(shard, Offset { ms: 5, seq: 2 }));
        }
        assert!(has(2, at(9)) && !has(2, at(10)) && !has(3, at(1)));
        assert!(!copied.has(1, shards[0], at(1)), "an unknown stream");
        let text = serde_json::to_string(&copied).unwrap();
        assert_eq!(serde_json::from_str::<Copied>(&text).unwrap(), copied);
    }
}
