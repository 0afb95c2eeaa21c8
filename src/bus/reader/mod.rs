//! Drives one stream of the bus into the fan-out.
//!
//! 1. Become the one reader (a TTL lock; another takes over when it runs out).
//! 2. Read how far every shard is; begin at the lowest. A gap between there and the first entry
//!    left in the stream is counted and logged as an error, never silently jumped over.
//! 3. Read a batch, and decode it while what is wanted of those before is being copied.
//! 4. Once a second move idle shards forward and note the position; at the start and every few
//!    seconds trim what everybody has.
//!
//! Any error ends the session; the next begins at step 1. A batch that was copied in part is read
//! again, and the shards that have it say so.
//!
//! Where a pipeline starts that never read the stream is fixed before any process that has it is
//! ready, see `bus::starts`. What pipelines of other processes need is not trimmed.
//!
//! A full Redis refuses copies. Steps 1 to 4 need no memory without one: sessions go on, and each
//! makes room by trimming.
//!
//! In a cluster, shards whose primary is away are left out and the others go on; now and then the
//! session begins anew, at the lowest of those that are back. Nothing is trimmed meanwhile.
//!
//! A stream that lost its tail in a failover ends before what shards have of it. What was copied is
//! in the queues and stays; the stream's last id is raised to there, so that no entry gets an id that
//! the shards take for one they have.

mod gap;
mod session;

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::join;
use rand::Rng;
use tokio::time::Instant;
use tracing::{debug, error, info, warn};

use self::gap::{entries_at, gap};
use self::session::{Copied, Copying, Session};
use super::redis_stream::RedisStream;
use super::{Entry, Extent, Fetched as _, Source};
use crate::clock::{SharedClock, millis};
use crate::fanout::{Fanout, FanoutError, Gathered, Matches, Positions, RESTART};
use crate::id::Offset;
use crate::lifecycle::Shutdown;
use crate::metrics::{self, BusMetrics};
use crate::redis::RedisError;
use crate::telemetry::{Outage, Recovered};

/// How long the lock lasts without renewal. A reader that is slow rather than dead loses it sooner
/// than it needs to, and another reads instead: that costs a session, nothing is copied twice.
const LOCK_TTL: Duration = Duration::from_millis(1_500);
/// Between two renewals.
const LOCK_RENEW: Duration = Duration::from_millis(500);
/// Who waits for the lock asks this often.
const LOCK_ASK: Duration = Duration::from_millis(250);
/// Entries of a first read, and the bounds of later ones.
const BATCH_FIRST: usize = 256;
const BATCH_MAX: usize = 4_096;
const CHECKPOINT: Duration = Duration::from_secs(1);
const TRIM: Duration = Duration::from_secs(5);
/// Missing shards are looked for after this long, and each time later up to the last.
const MISSING_FIRST: Duration = Duration::from_secs(1);
const MISSING_LAST: Duration = Duration::from_secs(4);

/// The first batch waits until the pipelines know what they want, but not longer.
const KNOWN_WITHIN: Duration = Duration::from_secs(2);

/// How a stream is kept.
#[derive(Debug, Clone, Copy)]
pub struct Retention {
    /// Whether to trim at all.
    pub trim: bool,
    /// Copied entries are kept this long.
    pub keep: Duration,
}

/// Reads until the soft stop.
///
/// # Cancel safety
/// Nothing is lost: positions are kept with the data.
pub(crate) async fn run<S: Source>(
    source: S,
    fanout: Arc<Fanout>,
    retention: Retention,
    clock: SharedClock,
    shutdown: Shutdown,
) {
    let metrics = BusMetrics::new(source.name());
    let mut reader = Reader {
        source,
        fanout,
        retention,
        clock,
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
        // Another process need not wait for the lock to run out.
        let _ = tokio::time::timeout(RESTART, reader.source.hold(Duration::ZERO)).await;
    }
}

struct Reader<S> {
    source: S,
    fanout: Arc<Fanout>,
    retention: Retention,
    clock: SharedClock,
    metrics: BusMetrics,
    /// This process holds the lock.
    reading: bool,
    /// How long missing shards are left out.
    patience: Duration,
    outage: Outage,
}

impl<S: Source> Reader<S> {
    /// One session; answers how long to wait before the next.
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
        match ended {
            Ok(()) => {
                warn!(stream = self.source.name(), "another process reads the bus now");
                self.lose();
            }
            Err(FanoutError::Missing(_)) => {
                // Each time later, unless all was well for a while.
                let again = started.elapsed() < MISSING_LAST * 8;
                let later = (self.patience * 2).min(MISSING_LAST);
                self.patience = if again { later } else { MISSING_FIRST };
                return Duration::ZERO;
            }
            Err(error) => return self.interrupted(&error).mul_f64(random),
        }
        RESTART.mul_f64(random)
    }

    /// Says why a session ended; answers how long to wait.
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

    /// What the stream holds and how far every shard is.
    async fn positions(&self) -> Result<(Extent, Positions), RedisError> {
        let extent = self.source.extent().await?;
        let positions = self.fanout.positions(self.source.name(), extent.last).await?;
        Ok((extent, positions))
    }

    fn lose(&mut self) {
        self.reading = false;
        // Whoever reads now reports the lag.
        self.metrics.lag.set(0.0);
    }

    /// Reads and copies until something fails.
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
            // While there is more, it is fetched during the work on what is here.
            let (more, next) = (fetched.last().filter(|_| fetched.len() == asked), session.batch);
            let fetch = async {
                let fetching = more.map(|last| self.source.fetch(last, next, Duration::ZERO));
                Some((next, fetching?.await))
            };
            let gather = async {
                // Lets the question out first: what a task has woken last runs behind it on the
                // same thread, and no other may take it.
                tokio::task::yield_now().await;
                let batch = self.source.decode(fetched)?;
                self.put_aside(&batch).await?;
                session.advance(&batch);
                self.fanout.gather(&batch, &mut session.matches, &mut gathered);
                Ok::<_, RedisError>(batch.is_empty())
            };
            let (fetching, nothing) = copying.beside(join(fetch, gather)).await;
            ahead = fetching;
            let nothing = match nothing {
                Err(error) if error.is_full() => {
                    // An entry that is no event finds no room. What came before it is copied, so
                    // that the next session can trim up to there.
                    let positions = copying.ends(&mut session).await?;
                    let copying = Copying::Ended(self.copy(gathered, positions).await);
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
            // Positions are known when no copy is under way.
            let positions = copying.ends(&mut session).await?;
            self.look_for_missing(&mut session, &positions)?;
            copying = Copying::Goes(self.copy(std::mem::take(&mut gathered), positions).boxed());
            // Nothing waits longer than it takes to read what is there already.
            if more.is_none() || due {
                let mut positions = copying.ends(&mut session).await?;
                if due {
                    self.checkpoint(&mut session, &mut positions).await?;
                }
                copying = Copying::Rests(positions);
            }
        }
    }

    /// Copies what was gathered, all that was read since the last copy.
    async fn copy(&self, gathered: Gathered, mut positions: Positions) -> Copied {
        let name = self.source.name();
        let copied = self.fanout.copy(name, &gathered, &mut positions).await;
        if copied.as_ref().is_err_and(FanoutError::is_full) {
            self.fanout.pass_over(name, &gathered, &mut positions).await?;
        }
        if copied.is_ok() {
            if let Some(Recovered { lasted, failures }) = self.outage.succeeded() {
                info!(stream = self.source.name(), ?lasted, failures, "the bus is read again");
            }
            self.metrics.events.increment(gathered.covers().map_or(0, |(_, entries)| entries));
        }
        copied.map(|()| (positions, gathered.covers()))
    }

    /// Ends the session when it is time to see whether shards that are missing are back.
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
        // At once: a Redis that is full lets no session come to its first checkpoint.
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
            metrics::bus_invalid(entry.error.label());
            warn!(stream = self.source.name(), %offset, error = %entry.error,
                "an entry of the bus is no event; kept in {}", self.source.aside());
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
                // Entries that were deleted before they were read are behind it, too.
                if session.copied.0 == session.end {
                    session.copied.1 = extent.added;
                }
            } else {
                // There is more: look again although nothing may be read until then.
                session.lag_at = Offset::default();
            }
            #[expect(clippy::cast_precision_loss, reason = "a count of entries in memory")]
            self.metrics.lag.set(extent.added.saturating_sub(session.entries) as f64);
        }
        let (copied, entries) = session.copied;
        if copied != session.checkpointed.1 {
            // Nothing is under way here, so now all shards stand at the same place.
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

    /// Removes what is older than the retention and nobody needs.
    async fn trim(&self, session: &mut Session, positions: &Positions) -> Result<(), FanoutError> {
        // What missing shards need is not known.
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
        // Asked after the positions were read: a pipeline that is placed later starts behind them.
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
            // What a consumer group still needs is tried again, even if nothing new arrives.
            let first = self.source.extent().await?.first;
            if first.is_none_or(|first| first >= keep) {
                session.trimmed.1 = keep;
            }
        }
        Ok(())
    }
}

/// Renews the lock; ends when it is somebody else's.
async fn keep<S: Source>(source: &S) -> Result<(), RedisError> {
    loop {
        tokio::time::sleep(LOCK_RENEW).await;
        if !source.hold(LOCK_TTL).await? {
            return Ok(());
        }
    }
}
