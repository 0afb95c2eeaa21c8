//! Which reads of the counters are large.

use crate::mongo::large::LargeReads;

/// Number of documents above which a read is large.
const DOCUMENTS: usize = 100;

/// Whether a read of so many documents is large.
pub(super) fn is_large(documents: usize) -> bool {
    documents > DOCUMENTS
}

/// The large reads of a process. One request reads both kinds side by side, so each kind has turns
/// of its own.
#[derive(Debug, Clone, Default)]
pub(super) struct Large {
    pub(super) totals: LargeReads,
    pub(super) days: LargeReads,
}
