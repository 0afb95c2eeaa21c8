//! What is read of a log.

use crate::id::Offset;

/// A part of a log: behind the first offset, up to the second one.
pub type Range = (Offset, Offset);

/// Whether an entry is in one of these ranges.
#[must_use]
pub fn is_in(ranges: &[Range], offset: Offset) -> bool {
    ranges.iter().any(|(after, up_to)| offset > *after && offset <= *up_to)
}

/// A batch of a log.
#[derive(Debug, Clone, Copy)]
pub struct Read<'a> {
    /// The place of the log.
    pub log: usize,
    /// Up to where the batch covers it.
    pub end: Offset,
    /// Entries that were read for other shards before, and are not counted again.
    pub known: &'a [Range],
    /// The offsets of its tombstones.
    pub tombstones: &'a [Offset],
}
