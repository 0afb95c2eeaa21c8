//! One session of reading: how far it is, and the copying beside it.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use futures_util::future::BoxFuture;
use tokio::time::Instant;

use super::super::Entry;
use super::BATCH_MAX;
use crate::fanout::{FanoutError, Matches, Positions};
use crate::id::Offset;

/// About this many bytes are read at once.
const BATCH_BYTES: usize = 8 << 20;

/// Where the shards stand, and the last entry and number of those that were copied.
pub(super) type Copied = Result<(Positions, Option<(Offset, u64)>), FanoutError>;

/// The copying beside the reading: a copy may take longer than a batch takes to be read.
pub(super) enum Copying<'a> {
    /// None is under way, and this is where the shards stand.
    Rests(Positions),
    Goes(BoxFuture<'a, Copied>),
    /// Ended, and nobody looked yet.
    Ended(Copied),
}

impl Copying<'_> {
    /// Ends with `work`; a copy goes on meanwhile.
    pub(super) async fn beside<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        poll_fn(|context| {
            // First what asks for the next events, or they would come behind the copy.
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

    /// Waits for the copy that is under way, notes it, and answers where the shards stand.
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

/// What one session knows.
pub(super) struct Session {
    pub(super) matches: Matches,
    /// The last entry read.
    pub(super) end: Offset,
    /// Entries ever added to the stream up to `end`, as far as known.
    pub(super) entries: u64,
    /// The last entry copied, and the entries up to there.
    pub(super) copied: (Offset, u64),
    pub(super) batch: usize,
    pub(super) checkpointed: (Instant, Offset),
    /// The last entry read when the lag was last found to be none.
    pub(super) lag_at: Offset,
    /// When it was last trimmed, and up to where nothing is left.
    pub(super) trimmed: (Instant, Offset),
    /// When to look for shards that are missing.
    pub(super) look: Option<Instant>,
}

impl Session {
    pub(super) fn advance(&mut self, batch: &[Entry]) {
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
        self.batch = (self.batch * 2).min(fits).clamp(8, BATCH_MAX);
    }
}
