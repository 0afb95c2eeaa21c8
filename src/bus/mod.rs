//! Where events come from. A [`Source`] reads one stream of the bus; [`reader`] drives it into the
//! fan-out.
//!
//! The position of a stream is kept with the data (`hwm` per shard, see `lua/enqueue.lua`), not
//! with the source: list and position roll back together when Redis loses its tail, and the copy
//! happens once whoever repeats it.

mod publish;
pub mod reader;
pub mod redis_stream;
pub(crate) mod starts;

use std::future::Future;
use std::time::Duration;

pub(crate) use self::publish::publish;
use crate::event::{Event, EventError};
use crate::id::Offset;
use crate::keyspace::StoreError;

/// One entry of a bus stream.
#[derive(Debug)]
pub struct Entry {
    /// Its position.
    pub offset: Offset,
    /// The event, or why it cannot be read.
    pub event: Result<Event, InvalidEntry>,
}

/// An entry that is no event.
#[derive(Debug)]
pub struct InvalidEntry {
    /// Why.
    pub error: EntryError,
    /// What was there, cut to 64 KiB.
    pub raw: Vec<u8>,
}

/// Why an entry is no event.
#[derive(Debug, thiserror::Error)]
pub enum EntryError {
    /// It has neither of the two fields.
    #[error("the entry has no field `event` (JSON) or `msgpack` (MessagePack)")]
    Field,
    /// The field does not hold an event.
    #[error(transparent)]
    Event(#[from] EventError),
}

impl EntryError {
    /// The metric label `reason`.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::Field => "field",
            Self::Event(error) => error.label(),
        }
    }
}

/// What a stream holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Extent {
    /// Its first entry.
    pub first: Option<Offset>,
    /// The last offset ever given, also when that entry is gone.
    pub last: Offset,
    /// Entries in it.
    pub length: u64,
    /// Entries ever added.
    pub added: u64,
}

/// Entries that are not decoded yet.
pub trait Fetched: Send {
    /// How many there are.
    fn len(&self) -> usize;

    /// Whether there is none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The position of the last one; `None` if there is none, or it cannot be read.
    fn last(&self) -> Option<Offset>;
}

/// One stream of the bus.
///
/// The seam at which another bus (NATS, Kafka) takes the place of Redis Streams. All
/// calls are idempotent but `put_aside`, which may repeat an entry after an error.
pub trait Source: Send + Sync + 'static {
    /// Entries as they came.
    type Fetched: Fetched;

    /// The stream's name.
    fn name(&self) -> &str;

    /// Tries to become, or stay, the one reader of the stream for `ttl`; zero gives it up. For
    /// efficiency only: two readers at once would do no harm.
    fn hold(&self, ttl: Duration) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Entries after `after`, in order, at most `max`; waits up to `wait` for the first.
    ///
    /// Cancel safe: nothing is consumed.
    fn fetch(
        &self,
        after: Offset,
        max: usize,
        wait: Duration,
    ) -> impl Future<Output = Result<Self::Fetched, StoreError>> + Send;

    /// What they say.
    ///
    /// # Errors
    /// When it is no answer to [`Self::fetch`]. Entries that are no events are answered as such.
    fn decode(&self, fetched: Self::Fetched) -> Result<Vec<Entry>, StoreError>;

    /// What the stream holds.
    fn extent(&self) -> impl Future<Output = Result<Extent, StoreError>> + Send;

    /// Where the last reader noted how far it was: an offset, and how many entries had been added
    /// to the stream up to there.
    fn noted(&self) -> impl Future<Output = Result<Option<(Offset, u64)>, StoreError>> + Send;

    /// Notes that.
    fn note(
        &self,
        offset: Offset,
        entries: u64,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Makes every entry to come later than `last`, where the stream lost what it had up to there.
    fn raise(&self, last: Offset) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Removes entries older than `keep` that no consumer group of the stream needs.
    fn trim(&self, keep: Offset) -> impl Future<Output = Result<u64, StoreError>> + Send;

    /// Where entries are kept that cannot be read.
    fn aside(&self) -> &str;

    /// Keeps entries that cannot be read where a person can look at them.
    fn put_aside(
        &self,
        entries: &[(Offset, &InvalidEntry)],
    ) -> impl Future<Output = Result<(), StoreError>> + Send;
}
