//! Feeds one stream of the bus into the fan-out.
//!
//! 1. Become the only reader (a TTL lock; another process takes over when it expires).
//! 2. Read the position of every shard; start at the lowest. Entries missing between there and the
//!    first remaining entry are counted and logged as an error, never silently skipped.
//! 3. Read a batch, and decode it while the matches of earlier batches are being copied.
//! 4. Once a second, move idle shards forward and note the position. At the start and every few
//!    seconds, trim the entries that every pipeline has copied.
//!
//! Any error ends the session; the next one starts at step 1. A batch that was copied in part is
//! read again, and the shards that have it report a duplicate.
//!
//! The start of a pipeline on a new stream is fixed before any process that has the pipeline is
//! ready, see `fanout::starts`. Entries that pipelines of other processes need are not trimmed.
//!
//! A full Redis refuses copies. Steps 1 to 4 need no additional memory if there is nothing to copy:
//! sessions continue, and each frees memory by trimming.
//!
//! In a cluster, shards whose primary is unavailable are left out and the others continue. From
//! time to time the session restarts, at the lowest position of the shards that are available
//! again. No entries are trimmed meanwhile.
//!
//! A stream that lost its last entries in a failover ends before the positions of the shards.
//! Copied events stay in the queues. The stream's last id is raised to the highest position, so
//! that no new entry gets an id that the shards take for a copied one.

mod gap;
mod session;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::join;
use rand::Rng;
use tokio::time::Instant;
use tracing::{debug, error, info, warn};

use self::gap::{entries_at, gap};
use self::session::{Copied, Copying, Session};
use super::backlog::{Backlog, TOLD_EVERY};
use super::redis_stream::RedisStream;
use super::{Entry, Extent, Fetched as _, Source};
use crate::clock::{SharedClock, millis};
use crate::fanout::{Fanout, FanoutError, Gathered, Matches, Positions, RESTART};
use crate::id::Offset;
use crate::lifecycle::Shutdown;
use crate::metrics::{self, BusMetrics};
use crate::redis::RedisError;
use crate::telemetry::{Outage, PerReason, Recovered};

/// How long the lock lasts without renewal. A reader that is only slow may lose it too early, and
/// another process reads instead: this costs a session, but copies nothing twice.
const LOCK_TTL: Duration = Duration::from_millis(1_500);
/// Interval of renewals.
const LOCK_RENEW: Duration = Duration::from_millis(500);
/// Interval of attempts to get the lock.
const LOCK_ASK: Duration = Duration::from_millis(250);
/// Number of entries in the first read, and the bounds for later ones.
const BATCH_FIRST: usize = 256;
const BATCH_MAX: usize = 4_096;
/// When entries that are no events were last logged, by reason: each producer can write many.
static INVALID: PerReason = PerReason::new();
const CHECKPOINT: Duration = Duration::from_secs(1);
const TRIM: Duration = Duration::from_secs(5);
/// Missing shards are checked after this time, then after twice the time, up to the last.
const MISSING_FIRST: Duration = Duration::from_secs(1);
const MISSING_LAST: Duration = Duration::from_secs(4);

/// Maximum wait of the first batch until the pipelines know their interests.
const KNOWN_WITHIN: Duration = Duration::from_secs(2);

/// The retention of a stream.
#[derive(Debug, Clone, Copy)]
pub struct Retention {
    /// Whether to trim at all.
    pub trim: bool,
    /// How long copied entries are kept.
    pub keep: Duration,
}

/// Reads until the soft stop. `backlog`: the uncopied events of the stream, if this process publishes
/// to it.
///
/// # Cancel safety
/// Nothing is lost: positions are stored with the data.
pub(crate) async fn run<S: Source>(
    source: S,
    fanout: Arc<Fanout>,
    retention: Retention,
    clock: SharedClock,
    backlog: Option<Arc<Backlog>>,
    shutdown: Shutdown,
) {
    let metrics = BusMetrics::new(source.name());
    let mut reader = Reader {
        source,
        fanout,
        retention,
        clock,
        backlog,
        untold: AtomicU64::new(0),
        metrics,
        reading: false,
        patience: MISSING_FIRST,
        outage: Outage::shared(),
    };
    tokio::select! {
        biased;
        () = shutdown.soft.cancelled() => return,
        () = reader.fanout.ready(KNOWN_WITHIN) => {}
    }
    loop {
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => break,
            pause = reader.session() => tokio::select! {
                biased;
                () = shutdown.soft.cancelled() => break,
                () = tokio::time::sleep(pause) => {}
            },
        }
    }
    if reader.reading {
        // Releases the lock, so that another process need not wait until it expires.
        let _ = tokio::time::timeout(RESTART, reader.source.hold(Duration::ZERO)).await;
    }
}

struct Reader<S> {
    source: S,
    fanout: Arc<Fanout>,
    retention: Retention,
    clock: SharedClock,
    backlog: Option<Arc<Backlog>>,
    /// Number of copied entries that other processes were not told of.
    untold: AtomicU64,
    metrics: BusMetrics,
    /// Whether this process holds the lock.
    reading: bool,
    /// How long missing shards are left out.
    patience: Duration,
    outage: Outage,
}

impl<S: Source> Reader<S> {
    /// Runs one session; returns the wait before the next one.
    async fn session(&mut self) -> Duration {
        let random = rand::rng().random_range(0.8..1.2);
        match self.source.hold(LOCK_TTL).await {
            Ok(true) => {}
            Ok(false) => {
                self.lose();
                return LOCK_ASK.mul_f64(random);
            }
            Err(error) => {
                if let Some(suppressed) = self.outage.failed() {
                    warn!(stream = self.source.name(), %error, suppressed, "cannot read the bus; trying again");
                }
                return RESTART;
            }
        }
        if !self.reading {
            info!(stream = self.source.name(), "reading the bus");
            self.reading = true;
        }
        let started = Instant::now();
        let ended = tokio::select! {
            biased;
            ended = keep(&self.source) => ended.map_err(FanoutError::from),
            ended = self.read() => ended,
        };
        self.fanout.rests();
        match ended {
            Ok(()) => {
                warn!(stream = self.source.name(), "another process reads the bus now");
                self.lose();
            }
            Err(FanoutError::Missing(_)) => {
                // The wait grows, unless the session lasted for a while.
                let again = started.elapsed() < MISSING_LAST * 8;
                let later = (self.patience * 2).min(MISSING_LAST);
                self.patience = if again { later } else { MISSING_FIRST };
                return Duration::ZERO;
            }
            Err(error) => return self.interrupted(&error).mul_f64(random),
        }
        RESTART.mul_f64(random)
    }

    /// Logs why a session ended; returns the wait before the next one.
    fn interrupted(&self, error: &FanoutError) -> Duration {
        let stream = self.source.name();
        match error {
            FanoutError::Moved { .. } => warn!(stream, %error, "reading the bus again from there"),
            FanoutError::Store(error) if error.is_full() => {
                if let Some(suppressed) = self.outage.failed() {
                    error!(stream, %error, suppressed,
                        "Redis is full: the bus keeps the events until there is room");
                }
                return RESTART * 4;
            }
            _ => {
                if let Some(suppressed) = self.outage.failed() {
                    warn!(stream, %error, suppressed, "reading the bus was interrupted");
                }
            }
        }
        RESTART
    }

    /// The extent of the stream, and the position of every shard.
    async fn positions(&self) -> Result<(Extent, Positions), RedisError> {
        let extent = self.source.extent().await?;
        let positions = self.fanout.positions(self.source.name(), extent.last).await?;
        Ok((extent, positions))
    }

    fn lose(&mut self) {
        self.reading = false;
        // The process that reads now reports the lag.
        self.metrics.lag.set(0.0);
    }

    /// Reads and copies until an error.
    async fn read(&self) -> Result<(), FanoutError> {
        let (mut session, positions) = self.begin().await?;
        let mut copying = Copying::Rests(positions);
        let (mut gathered, mut ahead) = (Gathered::default(), None);
        loop {
            let (asked, fetched) = if let Some((asked, fetched)) = ahead.take() {
                (asked, fetched?)
            } else {
                let asked = session.batch;
                (asked, self.source.fetch(session.end, asked, RedisStream::WAIT_MAX).await?)
            };
            // If more entries are available, they are fetched while this batch is processed.
            let (more, next) = (fetched.last().filter(|_| fetched.len() == asked), session.batch);
            let fetch = async {
                let fetching = more.map(|last| self.source.fetch(last, next, Duration::ZERO));
                Some((next, fetching?.await))
            };
            let gather = async {
                // Sends the fetch first: the scheduler runs the task that was woken last on this
                // thread, behind the current one, and no other thread may take it.
                tokio::task::yield_now().await;
                let batch = self.source.decode(fetched)?;
                self.put_aside(&batch).await?;
                session.advance(&batch, asked);
                self.fanout.gather(&batch, &mut session.matches, &mut gathered);
                Ok::<_, RedisError>(batch.is_empty())
            };
            let (fetching, nothing) = copying.beside(join(fetch, gather)).await;
            ahead = fetching;
            let nothing = match nothing {
                Err(error) if error.is_full() => {
                    // Redis has no memory for an unreadable entry. The entries before it are copied
                    // first, so that the next session can trim up to there.
                    let positions = copying.ends(&mut session).await?;
                    let copying = Copying::Ended(self.copy(gathered, None, positions).await);
                    let mut positions = copying.ends(&mut session).await?;
                    self.checkpoint(&mut session, &mut positions).await?;
                    return Err(error.into());
                }
                nothing => nothing?,
            };
            let due = nothing || session.checkpointed.0.elapsed() >= CHECKPOINT;
            if more.is_some() && !due && !gathered.is_full() {
                continue;
            }
            // Positions are only known when no copy is in progress.
            let positions = copying.ends(&mut session).await?;
            self.look_for_missing(&mut session, &positions)?;
            let behind = more.map(|_| self.age(session.end));
            let taken = std::mem::take(&mut gathered);
            copying = Copying::Goes(self.copy(taken, behind, positions).boxed());
            // Nothing waits longer than the time to read the available entries.
            if more.is_none() || due {
                let mut positions = copying.ends(&mut session).await?;
                if due {
                    self.checkpoint(&mut session, &mut positions).await?;
                }
                copying = Copying::Rests(positions);
            }
        }
    }

    /// How long ago an entry was added, if its id is a time, as ids of Redis are.
    fn age(&self, offset: Offset) -> Duration {
        self.clock.now().saturating_sub(Duration::from_millis(offset.ms))
    }

    /// Copies the gathered events of all batches since the last copy.
    async fn copy(
        &self,
        gathered: Gathered,
        behind: Option<Duration>,
        mut positions: Positions,
    ) -> Copied {
        let name = self.source.name();
        let copied = self.fanout.copy(name, &gathered, behind, &mut positions).await;
        if copied.as_ref().is_err_and(FanoutError::is_full) {
            self.fanout.pass_over(name, &gathered, &mut positions).await?;
        }
        if copied.is_ok() {
            if let Some(Recovered { lasted, failures }) = self.outage.succeeded() {
                info!(stream = self.source.name(), ?lasted, failures, "the bus is read again");
            }
            if let Some((end, entries)) = gathered.covers() {
                self.metrics.events.increment(entries);
                self.tell(end, entries).await;
            }
        }
        copied.map(|()| (positions, gathered.covers()))
    }

    /// Tells the publishers that further `entries` are copied, up to `end`.
    async fn tell(&self, end: Offset, entries: u64) {
        if let Some(backlog) = &self.backlog {
            backlog.copied(end);
        }
        let untold = self.untold.fetch_add(entries, Ordering::Relaxed) + entries;
        if untold < TOLD_EVERY {
            return;
        }
        self.untold.store(0, Ordering::Relaxed);
        // Untold publishers wait a little longer.
        if let Err(error) = self.source.tell(end).await {
            debug!(stream = self.source.name(), %error, "other processes do not know what is copied");
        }
    }

    /// Ends the session when it is time to check the missing shards.
    fn look_for_missing(
        &self,
        session: &mut Session,
        positions: &Positions,
    ) -> Result<(), FanoutError> {
        let missing = positions.missing();
        if missing == 0 {
            return Ok(());
        }
        let look = *session.look.get_or_insert_with(|| Instant::now() + self.patience);
        if Instant::now() < look { Ok(()) } else { Err(FanoutError::Missing(missing)) }
    }

    async fn begin(&self) -> Result<(Session, Positions), FanoutError> {
        let (extent, positions) = self.positions().await?;
        if let Some(highest) = positions.highest().filter(|highest| *highest > extent.last) {
            warn!(stream = self.source.name(), %highest, last = %extent.last,
                "the stream lost its tail, of which shards have copies; going on behind it");
            self.source.raise(highest).await?;
        }
        let start = positions.lowest().unwrap_or(extent.last);
        let noted = self.source.noted().await?;
        let now = Instant::now();
        if let Some(missing) = gap(extent, start, noted) {
            self.metrics.gap.increment(1);
            error!(stream = self.source.name(), %start, first = ?extent.first, missing,
                "the stream was trimmed beyond what was read: events are missing");
        }
        let entries = entries_at(extent, start, noted);
        let mut session = Session {
            matches: Matches::default(),
            end: start,
            entries,
            copied: (start, entries),
            batch: BATCH_FIRST,
            checkpointed: (now, start),
            lag_at: Offset::default(),
            trimmed: (now, Offset::default()),
            look: None,
        };
        // Trims now: a full Redis lets no session reach its first checkpoint.
        self.trim(&mut session, &positions).await?;
        Ok((session, positions))
    }

    async fn put_aside(&self, batch: &[Entry]) -> Result<(), RedisError> {
        let invalid: Vec<_> = batch
            .iter()
            .filter_map(|entry| Some((entry.offset, entry.event.as_ref().err()?)))
            .collect();
        if invalid.is_empty() {
            return Ok(());
        }
        self.source.put_aside(&invalid).await?;
        for (offset, entry) in &invalid {
            let reason = entry.error.label();
            metrics::bus_invalid(reason);
            if let Some(suppressed) = INVALID.take(reason) {
                warn!(stream = self.source.name(), %offset, reason, error = %entry.error, suppressed,
                    "an entry of the bus is no event; kept in {}", self.source.aside());
            }
        }
        Ok(())
    }

    /// Updates the lag, moves idle shards forward, notes the position, trims.
    async fn checkpoint(
        &self,
        session: &mut Session,
        positions: &mut Positions,
    ) -> Result<(), FanoutError> {
        let name = self.source.name();
        if session.end != session.lag_at {
            session.lag_at = session.end;
            let extent = self.source.extent().await?;
            if extent.last == session.end {
                session.entries = extent.added;
                // Entries that were deleted before they were read count as copied too.
                if session.copied.0 == session.end {
                    session.copied.1 = extent.added;
                }
            } else {
                // More entries are available: check again even if none is read until then.
                session.lag_at = Offset::default();
            }
            #[expect(clippy::cast_precision_loss, reason = "a count of entries in memory")]
            self.metrics.lag.set(extent.added.saturating_sub(session.entries) as f64);
        }
        let (copied, entries) = session.copied;
        if copied != session.checkpointed.1 {
            // No copy is in progress, so all shards have the same position.
            self.fanout.checkpoint(name, copied, positions).await?;
            self.source.note(copied, entries).await?;
            session.checkpointed.1 = copied;
        }
        session.checkpointed.0 = Instant::now();
        if session.trimmed.0.elapsed() >= TRIM {
            self.trim(session, positions).await?;
        }
        Ok(())
    }

    /// Deletes entries that are older than the retention and that no pipeline needs.
    async fn trim(&self, session: &mut Session, positions: &Positions) -> Result<(), FanoutError> {
        // The positions of missing shards are unknown.
        if !self.retention.trim || positions.missing() > 0 {
            return Ok(());
        }
        session.trimmed.0 = Instant::now();
        let old = self.clock.now().saturating_sub(self.retention.keep);
        let old = Offset { ms: millis(old), seq: 0 };
        let mut keep = positions.lowest().unwrap_or(session.end).min(old);
        if keep <= session.trimmed.1 {
            return Ok(());
        }
        // Read after the positions: a pipeline that is added later starts after them.
        match self.fanout.needed_elsewhere(self.source.name()).await {
            Ok(needed) => keep = needed.map_or(keep, |needed| keep.min(needed)),
            Err(error) if error.is_passing() => {
                debug!(stream = self.source.name(), %error,
                    "what other processes need is not known; nothing is trimmed");
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        }
        if keep > session.trimmed.1 {
            self.metrics.trimmed.increment(self.source.trim(keep).await?);
            // Entries that a consumer group still needs are tried again, even if nothing new
            // arrives.
            let first = self.source.extent().await?.first;
            if first.is_none_or(|first| first >= keep) {
                session.trimmed.1 = keep;
            }
        }
        Ok(())
    }
}

/// Renews the lock; returns when another process has it.
async fn keep<S: Source>(source: &S) -> Result<(), RedisError> {
    loop {
        tokio::time::sleep(LOCK_RENEW).await;
        if !source.hold(LOCK_TTL).await? {
            return Ok(());
        }
    }
}
