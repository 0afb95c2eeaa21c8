//! What a bus must do to be read and published to. [`super::reader`] does the rest: the lock, the
//! positions, the gaps, the lag, setting aside what cannot be read.

use std::borrow::Cow;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::Deserialize;

use super::BusError;
use crate::event::entry::Entry;
use crate::fanout::NewStart;
use crate::id::Offset;

/// A part of the bus with an order of its own: a stream of Redis or NATS, or a partition of a Kafka
/// topic.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Log {
    /// Its name, unique among all logs of the environment. Positions are stored under it.
    pub name: Arc<str>,
    /// The offset of its first entry; `None` without any.
    pub first: Option<Offset>,
    /// The last offset ever assigned, even if that entry is deleted. Zero if there was none.
    pub last: Offset,
    /// Where a pipeline that is new to the log starts: as it says, or behind the last entry that a
    /// consumer group has handled (`start = "group:NAME"`).
    pub start: NewStart,
    /// The position before its first entry now, and before any entry that it ever had. Zero if the bus
    /// cannot tell from there what is lost later.
    pub before: (Offset, Offset),
    /// Whether it may have been made anew: its offsets may be older than those that are stored.
    pub is_doubtful: bool,
    /// Why its extent is not known now, although it exists. It cannot be opened, and the other logs can.
    pub unknown: Option<Arc<str>>,
}

/// From where a log is to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// The log, as [`Source::logs`] told it.
    pub log: Log,
    /// The lowest position of a shard: the first entry to read is the next one.
    pub lowest: Offset,
    /// The highest position. Above [`Log::last`] if the log lost its last entries.
    pub highest: Offset,
}

/// A log that is read now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opened {
    /// The position: the first entry that [`Source::fetch`] returns is the next one.
    pub at: Offset,
    /// Number of entries ever added up to there, as far as known. Only for the lag.
    pub entries: u64,
    /// Number of entries that are gone and were not copied, at most.
    pub lost: u64,
    /// The position that an earlier session noted last, if the bus asked for it.
    pub noted: Option<Offset>,
}

/// How far a log is copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// Its name.
    pub log: Arc<str>,
    /// The last entry that is read.
    pub read: Offset,
    /// Everything up to here is copied by every shard that can be reached.
    pub copied: Offset,
    /// Number of entries ever added up to [`Self::read`] and to [`Self::copied`], see
    /// [`Opened::entries`].
    pub entries: (u64, u64),
    /// Entries before this offset are no longer needed; they may still be kept for their time
    /// (`bus.retention`). `None`: not known now, nothing may be deleted or committed.
    pub keep: Option<Offset>,
}

/// The state of a log after [`Source::release`].
#[derive(Debug, Clone, Default)]
pub struct Released {
    /// Number of entries ever added up to [`Progress::read`], if it is known better now.
    pub entries: Option<u64>,
    /// Number of entries that are not read yet; 0 once everything is read. `None`: not known now.
    pub lag: Option<u64>,
    /// Number of entries that were deleted by this call.
    pub deleted: u64,
    /// Why it, or what belongs to its source, is not read, while the others are.
    pub problem: Option<BusError>,
}

/// Consecutive entries of a log.
#[derive(Debug, Default)]
pub struct Batch {
    /// The place of the log in the last [`Source::open`].
    pub log: usize,
    /// The entries, in order. May be empty: some buses have offsets without an entry.
    pub entries: Vec<Entry>,
    /// Number of entries that are left out: tombstones, and what the client does not read.
    pub skipped: usize,
    /// The offsets of those tombstones.
    pub tombstones: Vec<Offset>,
    /// The offset up to which this batch covers the log: of the last entry, or later.
    pub end: Offset,
    /// When the last entry was added, ms since 1970; 0: not known.
    pub added_ms: u64,
}

/// Entries that are not decoded yet.
pub trait Fetched: Send {
    /// The number of entries.
    fn len(&self) -> usize;

    /// Whether there are no entries.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of the entries as the bus has them, about.
    fn bytes(&self) -> usize;

    /// Whether the source knows that these are all entries that were there. Otherwise it may just be
    /// slow.
    fn is_all(&self) -> bool {
        false
    }

    /// Decodes the entries: at most one batch a log, each behind the one before of its log. Entries
    /// that are not events are returned as such.
    ///
    /// # Errors
    /// If the answer of the bus cannot be read at all.
    fn decode(self: Box<Self>) -> Result<Vec<Batch>, BusError>;
}

/// An event to publish.
#[derive(Debug, Clone, Copy)]
pub struct Outgoing<'a> {
    /// The `CloudEvent` as JSON.
    pub json: &'a [u8],
    /// Its bot: events of one bot keep their order.
    pub bot: &'a str,
}

/// The attributes that name an event.
#[derive(Debug, Deserialize)]
pub struct Name<'a> {
    /// Its source.
    #[serde(borrow)]
    pub source: Cow<'a, str>,
    /// Its id, unique in its source.
    #[serde(borrow)]
    pub id: Cow<'a, str>,
}

impl<'a> Outgoing<'a> {
    /// The source and the id of the event; `None` if it is no event.
    #[must_use]
    pub fn name(&self) -> Option<Name<'a>> {
        serde_json::from_slice(self.json).ok()
    }
}

/// A bus: one or more logs on the same servers.
///
/// All calls are idempotent except [`Self::publish`]. Calls are made by one reader at a time in this
/// process, except [`Self::publish`] and [`Self::logs`]. Another process may read the same logs for
/// a short time: this must not disturb this one.
pub trait Source: Debug + Send + Sync + 'static {
    /// The name of the bus, unique in the environment: of the Redis stream, or `nats:NAME` and
    /// `kafka:NAME` with the name of the source in the configuration.
    fn name(&self) -> &str;

    /// The logs of the configuration, also those that do not exist yet, without those that the last
    /// [`Self::logs`] had no right to see. With partitions: what the names of the logs of each topic begin
    /// with, up to the slash.
    fn topics(&self) -> Vec<Arc<str>>;

    /// Whether it deletes entries on another server than those with the positions. A server that has
    /// both loses them together.
    fn deletes_elsewhere(&self) -> bool {
        false
    }

    /// All logs, with their extents. The order may differ between calls.
    ///
    /// # Errors
    /// If the bus does not answer or refuses. A log that does not exist yet is no error, nor is one whose
    /// server alone does not answer.
    fn logs(&self) -> BoxFuture<'_, Result<Vec<Log>, BusError>>;

    /// Reads these logs from now on, and no others; ends what was open before. The answers are in the
    /// order of `from`.
    ///
    /// # Errors
    /// If the bus does not answer or refuses. Then nothing is open.
    fn open<'a>(&'a self, from: &'a [Standing]) -> BoxFuture<'a, Result<Vec<Opened>, BusError>>;

    /// The next entries of the open logs, at most `max`. Waits up to `wait` for the first one. Fewer
    /// than `max` entries mean that no others are available now.
    ///
    /// # Errors
    /// If the bus does not answer or refuses.
    ///
    /// # Cancel safety
    /// After an error, and after the future is dropped, the logs must be opened again.
    fn fetch(
        &self,
        max: usize,
        wait: Duration,
    ) -> BoxFuture<'_, Result<Box<dyn Fetched>, BusError>>;

    /// Tells the bus how far its open logs are copied, once a second and at the end: it may delete,
    /// acknowledge or commit. The answers are in the order of `progress`.
    ///
    /// # Errors
    /// If the log must be opened again. That the bus does not answer is no error: reading would tell that,
    /// and the next call repeats what was not done. Nothing is lost by an error.
    fn release<'a>(
        &'a self,
        progress: &'a [Progress],
    ) -> BoxFuture<'a, Result<Vec<Released>, BusError>>;

    /// Adds events in this order, and returns their offsets once the bus has stored all of them.
    ///
    /// # Errors
    /// [`BusError::Partly`] if some may be stored and others not: repeating is safe with
    /// `bus.dedup`. After [`BusError::Unknown`] all, some or none may be stored.
    ///
    /// # Cancel safety
    /// After the future is dropped, the events may or may not be added.
    fn publish<'a>(
        &'a self,
        events: &'a [Outgoing<'a>],
    ) -> BoxFuture<'a, Result<Vec<Offset>, BusError>>;
}
