//! The bus on Redis Streams. An entry has one field: `event` = the CloudEvent as JSON, or `msgpack`
//! = the same map as MessagePack.

mod reply;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use redis::Value;
use tokio::time::Instant;
use tracing::{error, warn};

use self::reply::{entries, extent, offset_of, raw};
use super::source::{Batch, Fetched, Log, Opened, Outgoing, Progress, Released, Source, Standing};
use super::{BusError, Entry, gap, publish};
use crate::clock::{SharedClock, millis};
use crate::id::Offset;
use crate::metrics::BusMetrics;
use crate::redis::scripts::Trim;
use crate::redis::{Link, RedisError, Reply, ReplyError, keys, pages};

/// Time between two trims.
const TRIM: Duration = Duration::from_secs(5);

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

/// The retention of a stream.
#[derive(Clone)]
pub struct Retention {
    /// Whether to trim at all.
    pub trim: bool,
    /// How long copied entries are kept.
    pub keep: Duration,
    /// The clock.
    pub clock: SharedClock,
}

impl std::fmt::Debug for Retention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { trim, keep, .. } = self;
        f.debug_struct("Retention").field("trim", trim).field("keep", keep).finish_non_exhaustive()
    }
}

/// One Redis stream: a bus with one log.
#[derive(Debug)]
pub struct RedisStream {
    name: Arc<str>,
    read_key: String,
    retention: Option<Retention>,
    /// Attributes that events of the bus must not have.
    reserved: Vec<&'static str>,
    /// The connection for blocking reads only.
    blocking: Arc<Link>,
    link: Arc<Link>,
    reading: Mutex<Reading>,
}

/// A fetch that is later than the wait of the last one may miss entries that were trimmed.
const LATE: Duration = Duration::from_millis(100);

/// The state of reading.
#[derive(Debug, Default)]
struct Reading {
    /// The extent when the logs were asked for. The positions of the shards are read after it, so
    /// entries before them that are gone were copied.
    extent: Extent,
    /// The last entry that was fetched.
    at: Offset,
    /// Number of entries ever added up to there, as far as known.
    entries: u64,
    /// A fetch after this time is late.
    late_at: Option<Instant>,
    /// The last entry read at the last check that found no lag.
    lag_at: Option<Offset>,
    lag: u64,
    /// When it was last trimmed, and the offset before which no entry is left.
    trimmed: Option<(Instant, Offset)>,
}

impl RedisStream {
    /// Maximum wait of one read. The response timeout of `blocking` must be longer.
    pub const WAIT_MAX: Duration = Duration::from_secs(2);

    /// The stream `name`. Blocking reads use `blocking`, all other calls use `link`.
    #[must_use]
    pub fn new(name: &str, blocking: Arc<Link>, link: Arc<Link>) -> Self {
        Self {
            name: name.into(),
            read_key: keys::read(link.prefix(), name),
            retention: None,
            reserved: Vec::new(),
            blocking,
            link,
            reading: Mutex::default(),
        }
    }

    /// Removes these attributes from every event: pipelines set them on their own events.
    #[must_use]
    pub fn reserving(self, reserved: Vec<&'static str>) -> Self {
        Self { reserved, ..self }
    }

    /// Deletes copied entries so. Otherwise nothing is deleted.
    #[must_use]
    pub fn retaining(self, retention: Retention) -> Self {
        Self { retention: Some(retention), ..self }
    }

    /// The entries after `after`, up to those of `until_ms`, at most `max`; and their bytes.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub(crate) async fn between(
        &self,
        after: Offset,
        until_ms: u64,
        max: usize,
    ) -> Result<(Vec<Entry>, u64), RedisError> {
        let mut command = redis::cmd("XRANGE");
        command.arg(&*self.name).arg(format!("({after}")).arg(until_ms).arg("COUNT").arg(max);
        let misread = self.misread("XRANGE");
        let (bytes, found) = match self.link.command("XRANGE", command).await? {
            Value::Array(found) => (found.iter().map(pages::bytes).sum(), found),
            other => return Err(misread(ReplyError::unexpected("entries", &format!("{other:?}")))),
        };
        Ok((entries(found, &self.reserved).map_err(misread)?, bytes))
    }

    /// Returns the extent of the stream.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub(crate) async fn extent(&self) -> Result<Extent, RedisError> {
        let mut command = redis::cmd("XINFO");
        command.arg("STREAM").arg(&*self.name);
        match self.link.command("XINFO", command).await {
            Ok(value) => extent(value).map_err(self.misread("XINFO")),
            // No event was published to the stream yet.
            Err(RedisError::Refused { message, .. }) if message.contains("no such key") => {
                Ok(Extent::default())
            }
            Err(error) => Err(error),
        }
    }

    fn misread(&self, command: &'static str) -> impl Fn(ReplyError) -> RedisError + use<> {
        let link = Arc::clone(&self.link);
        move |source| link.misread(command, source)
    }

    fn reading(&self) -> MutexGuard<'_, Reading> {
        self.reading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The progress that the last reader noted: an offset, and how many entries had been added up to
    /// there.
    async fn noted(&self) -> Result<Option<(Offset, u64)>, RedisError> {
        let command = redis::Cmd::hmget(&self.read_key, &["offset", "entries"]);
        let value = self.link.command("HMGET", command).await?;
        let misread = self.misread("HMGET");
        let mut reply = Reply::new(value).map_err(&misread)?;
        let offset = reply.text().map_err(&misread)?;
        let entries = reply.optional().map_err(&misread)?;
        Ok(offset.parse().ok().zip(entries))
    }

    /// Ensures that new entries get offsets above `last`, after the stream lost its entries up to
    /// there.
    async fn raise(&self, last: Offset) -> Result<(), RedisError> {
        let mut command = redis::cmd("XSETID");
        command.arg(&*self.name).arg(last.to_string());
        match self.link.command("XSETID", command).await {
            // The stream is gone, or has later entries already, because the server's clock is ahead
            // of the lost entries.
            Err(RedisError::Refused { message, .. }) if message.starts_with("ERR") => Ok(()),
            raised => raised.map(drop),
        }
    }

    async fn begin(&self, standing: &Standing) -> Result<Opened, RedisError> {
        let Standing { lowest, highest, .. } = *standing;
        let extent = self.reading().extent;
        if highest > extent.last {
            warn!(stream = &*self.name, %highest, last = %extent.last,
                "the stream lost its tail, of which shards have copies; continuing after it");
            self.raise(highest).await?;
        }
        let noted = self.noted().await?;
        let lost = gap::gap(extent, lowest, noted).unwrap_or(0);
        let entries = gap::entries_at(extent, lowest, noted);
        let mut reading = self.reading();
        // What was trimmed stays so.
        let trimmed = reading.trimmed;
        *reading = Reading { at: lowest, entries, extent, trimmed, ..Reading::default() };
        Ok(Opened { at: lowest, entries, lost, noted: noted.map(|(offset, _)| offset) })
    }

    /// Reports entries between `after` and the first one of `fetched` that were trimmed before they were
    /// read. Fairlane's own trimming leaves the entry at `after`.
    async fn check_gap(&self, after: Offset, fetched: &[Value]) -> Result<(), RedisError> {
        let first = fetched.first().and_then(offset_of).filter(|_| after != Offset::default());
        let Some(first) = first else { return Ok(()) };
        let mut command = redis::cmd("XRANGE");
        command.arg(&*self.name).arg(after.to_string()).arg(after.to_string());
        let is_there = match self.link.command("XRANGE", command).await? {
            Value::Array(found) => !found.is_empty(),
            _ => false,
        };
        if is_there {
            return Ok(());
        }
        let extent = self.extent().await?;
        let mut reading = self.reading();
        let missing = gap::gap(extent, after, Some((after, reading.entries)));
        let Some(missing) = missing else { return Ok(()) };
        // What was fetched may have been trimmed since.
        let is_gone = |at: &Offset| extent.first.is_none_or(|first| *at < first);
        let trimmed = fetched.iter().filter_map(offset_of).filter(is_gone).count() as u64;
        let missing = missing.saturating_sub(trimmed);
        if missing > 0 {
            reading.entries += missing;
            BusMetrics::new(&self.name).gap.increment(1);
            error!(log = &*self.name, start = %after, %first, missing,
                "the stream was trimmed beyond what was read: events are missing");
        }
        Ok(())
    }

    /// Counts the entries that are not read yet.
    async fn lag(&self, progress: &Progress) -> Result<Released, RedisError> {
        let idle = self.reading().lag_at == Some(progress.read);
        if idle {
            return Ok(Released { lag: Some(self.reading().lag), ..Released::default() });
        }
        let extent = self.extent().await?;
        let mut reading = self.reading();
        if extent.last == progress.read {
            // Entries that were deleted before they were read count as read too.
            (reading.lag_at, reading.lag) = (Some(progress.read), 0);
            let entries = Some(extent.added);
            return Ok(Released { entries, lag: Some(0), ..Released::default() });
        }
        // More entries are available: check again even if none is read until then.
        reading.lag_at = None;
        reading.lag = extent.added.saturating_sub(progress.entries.0);
        Ok(Released { lag: Some(reading.lag), ..Released::default() })
    }

    /// Deletes entries that are older than the retention and before `keep`.
    async fn trim(&self, keep: Offset) -> Result<u64, RedisError> {
        let Some(Retention { trim: true, keep: retained, clock }) = &self.retention else {
            return Ok(0);
        };
        let before = self.reading().trimmed;
        if before.is_some_and(|(at, _)| at.elapsed() < TRIM) {
            return Ok(0);
        }
        let trimmed = before.map_or(Offset::default(), |(_, trimmed)| trimmed);
        self.reading().trimmed = Some((Instant::now(), trimmed));
        let old = millis(clock.now().saturating_sub(*retained));
        let keep = keep.min(Offset { ms: old, seq: 0 });
        if keep <= trimmed {
            return Ok(0);
        }
        let deleted = self.link.call(&Trim { stream: &self.name, keep }).await?;
        // Entries that a consumer group still needs are tried again, even if nothing new arrives.
        let first = self.extent().await?.first;
        if first.is_none_or(|first| first >= keep) {
            self.reading().trimmed = Some((Instant::now(), keep));
        }
        Ok(deleted)
    }
}

impl Source for RedisStream {
    fn name(&self) -> &str {
        &self.name
    }

    fn topics(&self) -> Vec<Arc<str>> {
        vec![Arc::clone(&self.name)]
    }

    fn deletes_elsewhere(&self) -> bool {
        self.link.target().is_cluster()
    }

    fn logs(&self) -> BoxFuture<'_, Result<Vec<Log>, BusError>> {
        async {
            let extent = self.extent().await?;
            self.reading().extent = extent;
            let Extent { first, last, .. } = extent;
            Ok(vec![Log { name: Arc::clone(&self.name), first, last, ..Log::default() }])
        }
        .boxed()
    }

    fn open<'a>(&'a self, from: &'a [Standing]) -> BoxFuture<'a, Result<Vec<Opened>, BusError>> {
        async move {
            let mut opened = Vec::with_capacity(from.len());
            for standing in from {
                opened.push(self.begin(standing).await?);
            }
            Ok(opened)
        }
        .boxed()
    }

    fn fetch(
        &self,
        max: usize,
        wait: Duration,
    ) -> BoxFuture<'_, Result<Box<dyn Fetched>, BusError>> {
        async move {
            let after = self.reading().at;
            let late_at = self.reading().late_at.replace(Instant::now() + wait + LATE);
            let is_late = late_at.is_some_and(|at| at <= Instant::now());
            let mut command = redis::cmd("XREAD");
            command.arg("COUNT").arg(max);
            command.arg("BLOCK").arg(millis(wait.min(Self::WAIT_MAX)).max(1));
            command.arg("STREAMS").arg(&*self.name).arg(after.to_string());
            let value = self.blocking.command("XREAD", command).await?;
            let entries = raw(value).map_err(self.misread("XREAD"))?;
            // A reader that is not behind reads entries before a producer trims them.
            if is_late || entries.len() == max {
                self.check_gap(after, &entries).await?;
            }
            {
                let mut reading = self.reading();
                reading.at = entries.last().and_then(offset_of).unwrap_or(after);
                reading.entries += entries.len() as u64;
            }
            let fetched = Raw {
                is_all: entries.len() < max,
                entries,
                reserved: self.reserved.clone(),
                misread: Box::new(self.misread("XREAD")),
            };
            Ok(Box::new(fetched) as Box<dyn Fetched>)
        }
        .boxed()
    }

    fn release<'a>(
        &'a self,
        progress: &'a [Progress],
    ) -> BoxFuture<'a, Result<Vec<Released>, BusError>> {
        async move {
            let mut all = Vec::with_capacity(progress.len());
            for one in progress {
                let mut released = self.lag(one).await?;
                if let Some(keep) = one.keep {
                    released.deleted = self.trim(keep).await?;
                }
                all.push(released);
            }
            Ok(all)
        }
        .boxed()
    }

    fn publish<'a>(
        &'a self,
        events: &'a [Outgoing<'a>],
    ) -> BoxFuture<'a, Result<Vec<Offset>, BusError>> {
        async move {
            let texts: Vec<&[u8]> = events.iter().map(|event| event.json).collect();
            Ok(publish::publish(&self.link, &self.name, &texts).await?)
        }
        .boxed()
    }
}

/// The entries of one stream in the reply to `XREAD`.
struct Raw {
    /// Whether there were no others.
    is_all: bool,
    entries: Vec<Value>,
    reserved: Vec<&'static str>,
    misread: Box<dyn Fn(ReplyError) -> RedisError + Send>,
}

impl Fetched for Raw {
    fn len(&self) -> usize {
        self.entries.len()
    }

    fn bytes(&self) -> usize {
        let bytes = self.entries.iter().map(pages::bytes).sum::<u64>();
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    fn is_all(&self) -> bool {
        self.is_all
    }

    fn decode(self: Box<Self>) -> Result<Vec<Batch>, BusError> {
        let entries = entries(self.entries, &self.reserved).map_err(self.misread)?;
        let Some(end) = entries.last().map(|entry| entry.offset) else { return Ok(Vec::new()) };
        Ok(vec![Batch { entries, end, added_ms: end.ms, ..Batch::default() }])
    }
}

/// For [`crate::fuzzing`]: reads the reply to `XREAD`.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz(value: Value) {
    let Ok(found) = raw(value.clone()) else { return };
    let _ = (found.iter().find_map(offset_of), extent(value));
    for entry in entries(found, &["counter"]).unwrap_or_default() {
        match entry.event {
            Ok(event) => assert_eq!(event.extension("counter"), None),
            Err(invalid) => assert!(!invalid.error.to_string().is_empty()),
        }
    }
}
