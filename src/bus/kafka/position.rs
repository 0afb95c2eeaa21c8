//! Positions in a partition, and where to go on after its topic was made anew or lost its tail.
//!
//! An offset of Fairlane is (incarnation, offset of Kafka + 1). The incarnation begins at 1. It grows
//! when the partition ends before the highest position: either the topic was deleted and made anew,
//! or an unclean leader election truncated it. Brokers distinguish both, with topic ids and leader
//! epochs, but the client library passes neither on. So the offsets that Fairlane commits carry what
//! is needed, see [`Committed`]:
//! - *Truncated*: the committed offset is still there (brokers delete it together with the topic) and
//!   behind the end, and no entry is newer than what was read when it was committed. Reading goes on
//!   at the end: all before it is copied.
//! - *Made anew*, in any other case: reading starts at the first entry. If the topic was truncated
//!   after all, its remaining entries are copied again. No entry is ever skipped.
//!
//! Nothing remembers where an incarnation began. So shards that were missing or ahead of others when a
//! topic was truncated may get entries a second time that were still in the topic then.
//!
//! A topic that was made anew and has grown beyond the position before anybody looks is not noticed:
//! its first entries are skipped.

use rdkafka::Offset as KafkaOffset;

use crate::bus::source::Standing;
use crate::id::Offset;

/// The first incarnation.
pub(super) const FIRST: u64 = 1;

/// The extent of a partition, in offsets of Kafka.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Ends {
    /// Of the first entry, or the next one if there is none.
    pub(super) first: i64,
    /// Of the next entry that can be read: entries of transactions that are still open come later.
    pub(super) next: i64,
}

/// What the group of Fairlane has committed for a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Committed {
    /// The offset of the next entry.
    pub(super) next: i64,
    pub(super) incarnation: u64,
    /// No entry that was read until then is newer than this, ms since 1970; 0: not known.
    pub(super) newest_ms: u64,
}

impl Committed {
    /// The text that is committed beside the offset.
    pub(super) fn metadata(incarnation: u64, newest_ms: u64) -> String {
        format!("incarnation={incarnation} newest={newest_ms}")
    }

    /// Reads what was committed; `None` if nothing was.
    pub(super) fn read(offset: KafkaOffset, metadata: &str) -> Option<Self> {
        let KafkaOffset::Offset(next) = offset else { return None };
        let field = |name: &str| {
            let mut fields = metadata.split(' ').filter_map(|field| field.split_once('='));
            fields.find(|(found, _)| *found == name).and_then(|(_, value)| value.parse().ok())
        };
        Some(Self {
            next,
            incarnation: field("incarnation").unwrap_or(FIRST).max(FIRST),
            newest_ms: field("newest").unwrap_or(0),
        })
    }
}

/// No entry of this incarnation that was read is newer than this, as far as what was committed tells;
/// 0: not known. Entries that were read later may be: then the partition counts as made anew, and its
/// entries are read again.
pub(super) fn newest_ms(committed: Option<Committed>, incarnation: u64) -> u64 {
    let same = committed.filter(|committed| committed.incarnation == incarnation);
    same.map_or(0, |committed| committed.newest_ms)
}

/// Where reading of a partition starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Start {
    pub(super) incarnation: u64,
    /// The offset of the next entry.
    pub(super) next: i64,
    /// Number of entries that are gone and were not copied, at most and as far as known.
    pub(super) lost: u64,
}

/// Our offset of the entry before `next`.
pub(super) fn offset(incarnation: u64, next: i64) -> Offset {
    Offset { ms: incarnation, seq: u64::try_from(next).unwrap_or(0) }
}

/// Kafka's offset of the entry behind `at`.
pub(super) fn next(at: Offset) -> i64 {
    i64::try_from(at.seq).unwrap_or(i64::MAX)
}

/// Whether the partition ends before what was read of it.
pub(super) fn is_shorter(standing: &Standing, ends: Ends) -> bool {
    next(standing.highest) > ends.next
}

/// Where to start. `truncated`: only asked for if [`is_shorter`].
pub(super) fn start(standing: &Standing, ends: Ends, truncated: bool) -> Start {
    let (lowest, highest) = (standing.lowest, standing.highest);
    let incarnation = highest.ms.max(FIRST);
    let in_this = lowest.ms == highest.ms && lowest.ms != 0;
    let from = if in_this { next(lowest) } else { 0 };
    if !is_shorter(standing, ends) {
        // A shard of an earlier incarnation needs all of this one.
        let gone = u64::try_from(ends.first.saturating_sub(from)).unwrap_or(0);
        let read = lowest != Offset::default();
        return Start {
            incarnation,
            next: from.max(ends.first),
            lost: if read { gone } else { 0 },
        };
    }
    let incarnation = incarnation + 1;
    if truncated {
        let next = from.clamp(ends.first, ends.next);
        let gone = ends.first.saturating_sub(from);
        return Start { incarnation, next, lost: u64::try_from(gone).unwrap_or(0) };
    }
    // Slower shards lack the rest of the old one, and all lack what was deleted of the new one.
    let behind = if in_this { highest.seq - lowest.seq.min(highest.seq) } else { highest.seq };
    let gone = u64::try_from(ends.first).unwrap_or(0);
    Start { incarnation, next: ends.first, lost: behind.saturating_add(gone) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::bus::source::Log;

    fn standing(lowest: (u64, u64), highest: (u64, u64)) -> Standing {
        let log = Log { name: Arc::from("l"), ..Log::default() };
        let at = |(ms, seq)| Offset { ms, seq };
        Standing { log, lowest: at(lowest), highest: at(highest) }
    }

    #[test]
    fn reading_goes_on_where_it_ended_and_says_what_is_gone() {
        let ends = |first, next| Ends { first, next };
        let cases = [
            ("nothing read", (0, 0), (0, 0), ends(5, 9), false, (1, 5, 0)),
            ("nothing read, and five deleted since", (1, 0), (1, 0), ends(5, 9), false, (1, 5, 5)),
            ("in the middle", (1, 7), (1, 8), ends(5, 9), false, (1, 7, 0)),
            ("at the end", (1, 9), (1, 9), ends(5, 9), false, (1, 9, 0)),
            ("three deleted", (1, 2), (1, 2), ends(5, 9), false, (1, 5, 3)),
            ("all deleted", (1, 2), (1, 2), ends(9, 9), false, (1, 9, 7)),
            ("a second incarnation", (2, 7), (2, 8), ends(5, 9), false, (2, 7, 0)),
            ("a shard of the first one", (1, 80), (2, 8), ends(0, 9), false, (2, 0, 0)),
            ("truncated", (1, 20), (1, 20), ends(5, 9), true, (2, 9, 0)),
            ("truncated, one shard behind", (1, 7), (1, 20), ends(5, 9), true, (2, 7, 0)),
            ("made anew", (1, 20), (1, 20), ends(0, 9), false, (2, 0, 0)),
            ("made anew, one shard behind", (1, 15), (1, 20), ends(0, 9), false, (2, 0, 5)),
            ("made anew and trimmed", (1, 20), (1, 20), ends(4, 9), false, (2, 4, 4)),
            ("made anew and empty", (3, 20), (3, 20), ends(0, 0), false, (4, 0, 0)),
        ];
        for (name, lowest, highest, ends, truncated, (incarnation, next, lost)) in cases {
            let found = start(&standing(lowest, highest), ends, truncated);
            assert_eq!(found, Start { incarnation, next, lost }, "{name}");
        }
    }

    #[test]
    fn the_time_of_the_newest_entry_survives_a_session_of_the_same_incarnation() {
        let committed = Committed { next: 9, incarnation: 2, newest_ms: 17 };
        assert_eq!(newest_ms(Some(committed), 2), 17);
        assert_eq!([newest_ms(Some(committed), 3), newest_ms(None, 1)], [0, 0]);
    }

    #[test]
    fn offsets_grow_with_the_incarnation() {
        assert!(offset(1, i64::MAX) < offset(2, 0));
        assert_eq!(next(offset(1, 42)), 42);
    }

    #[test]
    fn committed_offsets_are_read_back_also_those_of_other_clients() {
        let text = Committed::metadata(3, 17);
        let read = Committed::read(KafkaOffset::Offset(9), &text);
        assert_eq!(read, Some(Committed { next: 9, incarnation: 3, newest_ms: 17 }));
        let read = Committed::read(KafkaOffset::Offset(9), "of another tool = x");
        assert_eq!(read, Some(Committed { next: 9, incarnation: 1, newest_ms: 0 }));
        assert_eq!(Committed::read(KafkaOffset::Invalid, ""), None);
    }
}
