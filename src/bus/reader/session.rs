//! The state of one reading session, and the concurrent copy.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use futures_util::future::BoxFuture;
use tokio::time::Instant;

use super::super::Entry;
use super::{BATCH_FIRST, BATCH_MAX};
use crate::fanout::{FanoutError, Matches, Positions};
use crate::id::Offset;

/// Approximate number of bytes in one read.
const BATCH_BYTES: usize = 8 << 20;

/// The positions of the shards, and the last entry and number of the copied entries.
pub(super) type Copied = Result<(Positions, Option<(Offset, u64)>), FanoutError>;

/// The copy that runs beside the reading: a copy may take longer than reading a batch.
pub(super) enum Copying<'a> {
    /// No copy is in progress; the positions of the shards.
    Rests(Positions),
    Goes(BoxFuture<'a, Copied>),
    /// A copy ended, and its result was not taken yet.
    Ended(Copied),
}

impl Copying<'_> {
    /// Completes `work`; a copy continues meanwhile.
    pub(super) async fn beside<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        poll_fn(|context| {
            // Polls the fetch of the next events first, so that it is not queued behind the copy.
            let worked = work.as_mut().poll(context);
            if let Self::Goes(copy) = self
                && let Poll::Ready(copied) = copy.as_mut().poll(context)
            {
                *self = Self::Ended(copied);
            }
            worked
        })
        .await
    }

    /// Waits for the copy in progress, records it, and returns the positions of the shards.
    pub(super) async fn ends(self, session: &mut Session) -> Result<Positions, FanoutError> {
        let (positions, covered) = match self {
            Self::Rests(positions) => return Ok(positions),
            Self::Goes(copy) => copy.await?,
            Self::Ended(copied) => copied?,
        };
        if let Some((end, entries)) = covered {
            session.copied = (end, session.copied.1 + entries);
        }
        Ok(positions)
    }
}

/// The state of one session.
pub(super) struct Session {
    pub(super) matches: Matches,
    /// The last entry read.
    pub(super) end: Offset,
    /// Number of entries ever added to the stream up to `end`, as far as known.
    pub(super) entries: u64,
    /// The last entry copied, and the entries up to there.
    pub(super) copied: (Offset, u64),
    pub(super) batch: usize,
    pub(super) checkpointed: (Instant, Offset),
    /// The last entry read when there was no lag at the last check.
    pub(super) lag_at: Offset,
    /// When it was last trimmed, and the offset before which no entry is left.
    pub(super) trimmed: (Instant, Offset),
    /// When to check the missing shards.
    pub(super) look: Option<Instant>,
}

impl Session {
    /// Moves behind the entries of a read that asked for `asked` entries.
    pub(super) fn advance(&mut self, batch: &[Entry], asked: usize) {
        let Some(last) = batch.last() else { return };
        self.end = last.offset;
        self.entries += batch.len() as u64;
        let bytes: usize = batch
            .iter()
            .map(|entry| match &entry.event {
                Ok(event) => 256 + event.data().map_or(0, str::len),
                Err(invalid) => invalid.raw.len(),
            })
            .sum();
        let fits = BATCH_BYTES / (bytes / batch.len()).max(1);
        // A reader that has caught up begins with few again: the next entries may be large.
        let grown = if batch.len() == asked { asked * 2 } else { BATCH_FIRST };
        self.batch = grown.min(fits).clamp(8, BATCH_MAX);
    }
}
