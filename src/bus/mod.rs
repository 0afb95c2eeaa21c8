//! The sources of events. A [`Source`] reads one stream of the bus; [`reader`] copies it into the
//! queues.
//!
//! The position of a stream is stored with the data (`hwm` per shard, see `lua/enqueue.lua`), not
//! with the source. So the queues and the position roll back together if Redis loses its last
//! writes, and each entry is copied exactly once, regardless of which process repeats the copy.

pub(crate) mod backlog;
mod error;
#[cfg(feature = "kafka")]
pub mod kafka;
mod publish;
pub mod reader;
pub mod record;
pub mod redis_stream;
pub mod source;

use std::future::Future;
use std::time::Duration;

pub use self::error::BusError;
pub(crate) use self::publish::publish;
pub use crate::event::entry::{Entry, EntryError, InvalidEntry};
use crate::id::Offset;
use crate::redis::RedisError;

/// The extent of a stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Extent {
    /// The offset of its first entry.
    pub first: Option<Offset>,
    /// The last offset ever assigned, even if that entry is deleted.
    pub last: Offset,
    /// Number of entries in it.
    pub length: u64,
    /// Number of entries ever added.
    pub added: u64,
}

/// Entries that are not decoded yet.
pub trait Fetched: Send {
    /// The number of entries.
    fn len(&self) -> usize;

    /// Whether there are no entries.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The position of the last one; `None` if there is none, or it cannot be read.
    fn last(&self) -> Option<Offset>;
}

/// One stream of the bus.
///
/// Implement it to support another bus (NATS, Kafka) instead of Redis Streams. All calls are
/// idempotent except `put_aside`, which may store an entry twice after an error.
pub trait Source: Send + Sync + 'static {
    /// Raw entries.
    type Fetched: Fetched;

    /// The name of the stream.
    fn name(&self) -> &str;

    /// Tries to become or stay the only reader of the stream for `ttl`; zero releases it. This is
    /// only for efficiency: concurrent readers do no harm.
    fn hold(&self, ttl: Duration) -> impl Future<Output = Result<bool, RedisError>> + Send;

    /// Reads entries after `after`, in order, at most `max`; waits up to `wait` for the first one.
    ///
    /// Cancel safe: nothing is consumed.
    fn fetch(
        &self,
        after: Offset,
        max: usize,
        wait: Duration,
    ) -> impl Future<Output = Result<Self::Fetched, RedisError>> + Send;

    /// Decodes the entries.
    ///
    /// # Errors
    /// If the reply is not an answer to [`Self::fetch`]. Entries that are not events are returned
    /// as such.
    fn decode(&self, fetched: Self::Fetched) -> Result<Vec<Entry>, RedisError>;

    /// Returns the extent of the stream.
    fn extent(&self) -> impl Future<Output = Result<Extent, RedisError>> + Send;

    /// Returns the progress that the last reader noted: an offset, and how many entries had been
    /// added to the stream up to there.
    fn noted(&self) -> impl Future<Output = Result<Option<(Offset, u64)>, RedisError>> + Send;

    /// Notes the progress.
    fn note(
        &self,
        offset: Offset,
        entries: u64,
    ) -> impl Future<Output = Result<(), RedisError>> + Send;

    /// Tells other processes that everything up to `offset` is copied.
    fn tell(&self, offset: Offset) -> impl Future<Output = Result<(), RedisError>> + Send;

    /// Ensures that new entries get offsets above `last`, after the stream lost its entries up to
    /// there.
    fn raise(&self, last: Offset) -> impl Future<Output = Result<(), RedisError>> + Send;

    /// Deletes entries older than `keep` that no consumer group of the stream still needs.
    fn trim(&self, keep: Offset) -> impl Future<Output = Result<u64, RedisError>> + Send;

    /// The name of the stream that keeps unreadable entries.
    fn aside(&self) -> &str;

    /// Stores unreadable entries for inspection by an operator.
    fn put_aside(
        &self,
        entries: &[(Offset, &InvalidEntry)],
    ) -> impl Future<Output = Result<(), RedisError>> + Send;
}
