//! What a consumer group has handled, from which Fairlane takes over (`start = "group:NAME"`).
//!
//! A group commits an offset only for the partitions of which it has read something. So a partition
//! without an offset starts at its first record, if the group has an offset for another partition of the
//! topic. Otherwise the group does not read the topic, and its name may be wrong: then there is no start.

use std::collections::HashMap;

use super::Partition;
use super::position::{Committed, Ends, offset};
use crate::fanout::NewStart;

/// The offsets of the next records that the group reads.
#[derive(Debug)]
pub(super) struct Handled(HashMap<Partition, i64>);

impl Handled {
    pub(super) fn new(partitions: &[Partition], found: Vec<Option<Committed>>) -> Self {
        let found = partitions.iter().zip(found);
        let next = |(partition, found): (&Partition, Option<Committed>)| {
            Some((partition.clone(), found?.next))
        };
        Self(found.filter_map(next).collect())
    }

    /// Where new pipelines start in a partition.
    pub(super) fn start(
        &self,
        group: &str,
        partition: &Partition,
        incarnation: u64,
        ends: Ends,
    ) -> NewStart {
        if let Some(next) = self.0.get(partition) {
            return NewStart::At(offset(incarnation, *next));
        }
        if self.reads(&partition.topic) {
            return NewStart::At(offset(incarnation, ends.first));
        }
        NewStart::Unknown(missing(group, &partition.topic).into())
    }

    /// Whether the group has an offset in this topic.
    pub(super) fn reads(&self, topic: &str) -> bool {
        self.0.keys().any(|known| *known.topic == *topic)
    }
}

/// Why a group gives no start.
pub(super) fn missing(group: &str, topic: &str) -> String {
    format!(
        "the consumer group {group:?} has no offset in the topic {topic:?}; correct `start` of the \
         source, or remove it if all pipelines have begun"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Offset;

    #[test]
    fn a_partition_without_an_offset_starts_at_its_first_record_unless_the_group_reads_none() {
        let partition = |topic: &str, number| Partition { topic: topic.into(), number };
        let all = [partition("a", 0), partition("a", 1), partition("b", 0)];
        let committed = Committed { next: 7, incarnation: 1, newest_ms: 0 };
        let handled = Handled::new(&all, vec![Some(committed), None, None]);
        let ends = Ends { first: 3, next: 9 };
        let start = |partition| handled.start("old", partition, 2, ends);
        assert_eq!(start(&all[0]), NewStart::At(Offset { ms: 2, seq: 7 }));
        assert_eq!(start(&all[1]), NewStart::At(Offset { ms: 2, seq: 3 }));
        let NewStart::Unknown(cause) = start(&all[2]) else { panic!("{:?}", start(&all[2])) };
        assert!(cause.contains("\"old\"") && cause.contains("\"b\""), "{cause}");
    }
}
