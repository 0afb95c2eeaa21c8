//! Detects entries that were trimmed before they were read.

use super::redis_stream::Extent;
use crate::id::Offset;

/// The number of entries missing between `start` and the first remaining entry, if any.
pub(super) fn gap(extent: Extent, start: Offset, noted: Option<(Offset, u64)>) -> Option<u64> {
    let nothing_read = start == Offset::default();
    if nothing_read || extent.last <= start || extent.first.is_some_and(|first| first <= start) {
        return None;
    }
    // All remaining entries are later than `start`. If the number of entries at `start` was noted,
    // the missing ones can be counted; otherwise the worst case is assumed.
    match noted {
        Some((offset, entries)) if offset == start => {
            let missing = extent.added.saturating_sub(entries).saturating_sub(extent.length);
            (missing > 0).then_some(missing)
        }
        _ => Some(extent.added.saturating_sub(extent.length)),
    }
}

/// The number of entries ever added up to `start`, as far as known.
pub(super) fn entries_at(extent: Extent, start: Offset, noted: Option<(Offset, u64)>) -> u64 {
    match noted {
        _ if extent.last <= start => extent.added,
        Some((offset, entries)) if offset <= start => entries.min(extent.added),
        _ => extent.added.saturating_sub(extent.length),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Offset {
        Offset { ms, seq: 0 }
    }

    #[test]
    fn a_gap_is_the_part_trimmed_after_the_last_read_entry() {
        let extent = |first: Option<u64>, last, length, added| Extent {
            first: first.map(at),
            last: at(last),
            length,
            added,
        };
        let cases = [
            ("never read", extent(Some(5), 9, 3, 10), Offset::default(), None, None),
            ("the entry read last is still there", extent(Some(5), 9, 3, 10), at(5), None, None),
            ("at the end of an emptied stream", extent(None, 9, 0, 10), at(9), None, None),
            (
                "trimmed up to the entry read last",
                extent(Some(6), 9, 3, 10),
                at(5),
                Some((at(5), 7)),
                None,
            ),
            ("two more trimmed", extent(Some(8), 9, 1, 10), at(5), Some((at(5), 7)), Some(2)),
            (
                "emptied before it was read",
                extent(None, 9, 0, 10),
                at(5),
                Some((at(5), 7)),
                Some(3),
            ),
            ("no note: the worst is assumed", extent(Some(6), 9, 3, 10), at(5), None, Some(7)),
        ];
        for (name, extent, start, noted, expected) in cases {
            assert_eq!(gap(extent, start, noted), expected, "{name}");
        }
    }
}
