//! The sizes of pages of a stream that is read for one caller.

use redis::Value;

/// Number of entries of the first page: few, because their sizes are unknown.
pub(crate) const FIRST: usize = 16;
/// Maximum number of entries of a page: entries of up to 1 MiB may follow small ones.
pub(crate) const MAX: usize = 64;
/// Bytes that a page should have.
pub(crate) const BYTES: usize = 4 << 20;

/// The number of entries of the next page, after one that had `count` entries with these bytes.
pub(crate) fn next(count: usize, bytes: u64) -> usize {
    if count == 0 {
        return FIRST;
    }
    let each = (bytes / count as u64).max(1);
    let fits = usize::try_from(BYTES as u64 / each).unwrap_or(usize::MAX);
    fits.min(count * 2).clamp(1, MAX)
}

/// The bytes of entries, also of those that are not events.
pub(crate) fn bytes(entries: &Value) -> u64 {
    match entries {
        Value::BulkString(bytes) => bytes.len() as u64,
        Value::Array(values) => values.iter().map(bytes).sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::EVENT_MAX_BYTES;

    #[test]
    fn pages_grow_while_entries_are_small_and_shrink_to_one_large_entry() {
        assert_eq!((next(16, 16 * 200), next(64, 64 * 200)), (32, 64));
        assert_eq!((next(500, 500 << 20), next(4, 8 << 20)), (4, 2));
        assert_eq!((next(4, 40 << 20), next(16, 0)), (1, 32));
    }

    /// Entries of another stream follow it.
    #[test]
    fn after_a_short_page_the_next_one_has_at_most_twice_its_entries() {
        assert_eq!((next(1, 200), next(1, 3 << 20), next(0, 0)), (2, 1, FIRST));
    }

    #[test]
    fn all_fields_of_entries_count_whatever_their_names_are() {
        let text = |length| Value::BulkString(vec![b'x'; length]);
        let entry = |fields| Value::Array(vec![text(3), Value::Array(fields)]);
        let invalid = entry(vec![text(5), text(2 << 20), text(7), text(1)]);
        let found = bytes(&Value::Array(vec![entry(vec![text(5), text(100)]), invalid]));
        assert_eq!(found, 108 + 16 + (2 << 20));
        assert_eq!((bytes(&Value::Nil), next(64, 64 * found)), (0, 1));
    }

    #[test]
    fn a_page_of_large_entries_behind_small_ones_has_at_most_64_mib() {
        let grown = (0..20).fold(FIRST, |count, _| next(count, count as u64));
        assert!(grown * EVENT_MAX_BYTES <= 64 << 20, "{grown}");
    }
}
