//! Feeds the logs of one bus into the fan-out.
//!
//! 1. Become the reader of a share of the logs, see `share`.
//! 2. Read the position of every shard in each log; start at the lowest. Entries missing between there
//!    and the first remaining entry are counted and logged as an error, never silently skipped.
//! 3. Read a batch of all these logs, and decode it while the matches of earlier batches are being
//!    copied.
//! 4. Once a second, move idle shards forward, note the positions, and tell the bus how far its logs
//!    are copied. At the start and every few seconds, tell it also what may be deleted: on another
//!    server than the positions, some seconds later, see `settled`.
//!
//! Any error ends the session; the next one starts at step 1. A batch that was copied in part is
//! read again, and the shards that have it report a duplicate.
//!
//! The start of a pipeline in a new log is fixed before any process that has the pipeline is ready,
//! see `fanout::starts`. Entries that pipelines of other processes need are not deleted.
//!
//! A full Redis refuses copies. Steps 1 to 4 need no additional memory if there is nothing to copy:
//! sessions continue, and each frees memory by trimming.
//!
//! Shards that are far behind the others are read in turns with them, see `turn`. While they are left
//! out, nothing is deleted, and no progress is noted: all of it is read again for them.
//!
//! In a cluster, shards whose primary is unavailable are left out and the others continue. From
//! time to time the session restarts, at the lowest position of the shards that are available
//! again. No entries are deleted meanwhile. What could not be noted, or put aside, is tried again.
//!
//! A new pipeline whose start the bus cannot tell waits, and the others continue. The session ends when
//! the pipeline has a start. No entries are deleted meanwhile.
//!
//! A log whose server alone does not answer is left out, and the others are read. The session ends when it
//! answers.
//!
//! A process that cannot read a bus gives its share up after some seconds: others may reach it, or have the
//! rights. It takes a share again once the bus has told its logs.
//!
//! A log that lost its last entries in a failover ends before the positions of the shards. Copied
//! events stay in the queues. [`Source::open`] ensures that no new entry gets an offset that the
//! shards take for a copied one.

mod checkpoint;
mod error;
pub(crate) mod growth;
mod opening;
mod session;
mod settled;
mod share;
mod turn;
mod watch;

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::join;
use rand::Rng;
use tokio::time::Instant;
use tracing::{debug, error, info, warn};

use self::error::ReadError;
use self::growth::Growth;
use self::session::{Copied, Copying, OpenLog, Session};
use self::settled::Settled;
use self::share::{Share, Shared};
use self::turn::{Turned, Turns};
use self::watch::Watch;
use super::BusError;
use super::aside::Aside;
use super::backlog::{Backlog, TOLD_EVERY};
use super::source::{Batch, Log, Source};
use crate::clock::SharedClock;
use crate::fanout::starts::LogEnd;
use crate::fanout::{Fanout, FanoutError, Gathered, Positions, Read};
use crate::id::Offset;
use crate::lifecycle::Shutdown;
use crate::presence::BusMeter;
use crate::queue::CLAIM_TTL;
use crate::redis::{Link, keys};
use crate::telemetry::{OncePerMinute, Outage, Recovered};

/// How long a failed fan-out waits before it starts again.
const RESTART: Duration = Duration::from_millis(250);
/// Maximum wait of one read, and while shards are left out.
const WAIT: Duration = Duration::from_secs(2);
const WAIT_IN_TURN: Duration = Duration::from_millis(50);
/// Number of entries in the first read of a session: they may be large.
const BATCH_UNKNOWN: usize = 16;
/// Number of entries in the next read, and the maximum of later ones.
const BATCH_FIRST: usize = 256;
const BATCH_MAX: usize = 4_096;
const CHECKPOINT: Duration = Duration::from_secs(1);
/// Interval of finding out what other processes need of the logs.
const KEEP: Duration = Duration::from_secs(5);
/// Missing shards are checked after this time, then after twice the time, up to the last.
const MISSING_FIRST: Duration = Duration::from_secs(1);
const MISSING_LAST: Duration = Duration::from_secs(4);

/// Maximum wait of the first batch until the pipelines know their interests.
const KNOWN_WITHIN: Duration = Duration::from_secs(2);

/// A bus to read, and into what.
pub(crate) struct Reading {
    /// The bus.
    pub(crate) source: Arc<dyn Source>,
    /// The queues.
    pub(crate) fanout: Arc<Fanout>,
    /// Redis, where the readers agree.
    pub(crate) link: Arc<Link>,
    pub(crate) clock: SharedClock,
    /// The uncopied events of the bus, if this process publishes to it and it has one log.
    pub(crate) backlog: Option<Arc<Backlog>>,
    /// How long new logs wait for producers, if the bus gets new ones while it is read.
    pub(crate) partition_wait: Option<Duration>,
    /// Where the state of the bus is noted, unless Redis knows it.
    pub(crate) meter: Option<Arc<BusMeter>>,
}

/// Reads until the soft stop.
///
/// # Cancel safety
/// Nothing is lost: positions are stored with the data.
pub(crate) async fn run(reading: Reading, shutdown: Shutdown) {
    let Reading { source, fanout, link, clock, backlog, partition_wait, meter } = reading;
    let growth = partition_wait.map(|wait| {
        let (fanout, clock) = (Arc::clone(&fanout), Arc::clone(&clock));
        Growth { fanout, clock, wait, waiting: Mutex::default(), missing: Mutex::default() }
    });
    let watch = Watch::new(meter, Arc::clone(&clock));
    let share = Share::new(Arc::clone(&source), Arc::clone(&link), growth, watch.clone());
    let mut reader = Reader {
        source,
        fanout,
        link,
        clock,
        backlog,
        share,
        watch,
        aside: Arc::default(),
        untold: AtomicU64::new(0),
        settled: Settled::default(),
        patience: MISSING_FIRST,
        gave_up: None,
        turns: Turns::default(),
        told: OncePerMinute::default(),
        partial: OncePerMinute::default(),
        outage: Outage::shared(),
    };
    tokio::select! {
        biased;
        () = shutdown.soft.cancelled() => return,
        () = reader.fanout.ready(KNOWN_WITHIN) => {}
    }
    let (aside, link) = (Arc::clone(&reader.aside), Arc::clone(&reader.link));
    // Also between sessions, and while other processes read the bus.
    tokio::select! {
        biased;
        () = reader.sessions(&shutdown).boxed() => {}
        () = aside.keep_trying(&link).boxed() => {}
    }
    // Other processes need not wait until the share expires.
    let leave = tokio::time::timeout(RESTART, reader.share.leave());
    let _ = join(leave, aside.try_last(&link, reader.bus(), RESTART)).await;
}

struct Reader {
    source: Arc<dyn Source>,
    fanout: Arc<Fanout>,
    link: Arc<Link>,
    clock: SharedClock,
    backlog: Option<Arc<Backlog>>,
    share: Share,
    watch: Watch,
    aside: Arc<Aside>,
    /// Number of copied entries that other processes were not told of.
    untold: AtomicU64,
    settled: Settled,
    /// How long missing shards are left out.
    patience: Duration,
    /// When the share was last given up, because a session panicked or the bus could not be read, and the
    /// wait after it.
    gave_up: Option<(Instant, Duration)>,
    turns: Turns,
    /// Limits the log line about shards that are far behind.
    told: OncePerMinute,
    /// Limits the log line about logs that cannot be read while others can.
    partial: OncePerMinute,
    outage: Outage,
}

impl Reader {
    fn bus(&self) -> &str {
        self.source.name()
    }

    /// Runs sessions until the soft stop.
    async fn sessions(&mut self, shutdown: &Shutdown) {
        while !shutdown.soft.is_cancelled() {
            let ended = AssertUnwindSafe(self.session(shutdown)).catch_unwind().await;
            let pause = match ended {
                Ok(pause) => pause,
                Err(_) => self.panicked().await,
            };
            tokio::select! {
                biased;
                () = shutdown.soft.cancelled() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Runs one session, at most until the soft stop; returns the wait before the next one.
    async fn session(&mut self, shutdown: &Shutdown) -> Duration {
        let random = rand::rng().random_range(0.8..1.2);
        let taken = tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return Duration::ZERO,
            taken = self.share.take() => taken,
        };
        let shared = match taken {
            Ok(Some(shared)) => shared,
            Ok(None) => {
                self.others_read();
                return share::ASK.mul_f64(random);
            }
            Err(error) => {
                if let Some(suppressed) = self.outage.failed() {
                    warn!(bus = self.bus(), %error, suppressed, "cannot read the bus; retrying");
                }
                return self.unread(&error).await;
            }
        };
        let (started, mut copying) = (Instant::now(), Copying::None);
        let ended = tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => Ok(()),
            ended = self.share.keep(&shared) => ended.map_err(ReadError::from),
            ended = self.read(&shared, &mut copying) => ended,
        };
        // Its answers have leases, and completions travel with it. Later, these leases have run out.
        let _ = tokio::time::timeout(CLAIM_TTL, copying.over()).await;
        drop(copying);
        self.fanout.rests();
        if let Err(ReadError::Turned(turned)) = ended {
            self.turn(turned);
            return Duration::ZERO;
        }
        self.turns.over();
        match ended {
            Ok(()) => Duration::ZERO,
            Err(ReadError::Fanout(FanoutError::Missing(_))) => {
                // The wait grows, unless the session lasted for a while.
                let again = started.elapsed() < MISSING_LAST * 8;
                let later = (self.patience * 2).min(MISSING_LAST);
                self.patience = if again { later } else { MISSING_FIRST };
                Duration::ZERO
            }
            Err(error) => {
                let mut pause = self.interrupted(&error);
                if let ReadError::Bus(error) = &error {
                    pause = pause.max(self.unread(error).await);
                }
                pause.mul_f64(random)
            }
        }
    }

    /// The next session reads for other shards.
    fn turn(&mut self, turned: Turned) {
        if let Some((log, at)) = self.turns.turn(turned).first()
            && let Some(suppressed) = self.told.take()
        {
            info!(bus = self.source.name(), log = &**log, %at, suppressed,
                "some shards are far behind; they are read in turns with the others");
        }
    }

    /// Logs why a session ended; returns the wait before the next one.
    fn interrupted(&self, error: &ReadError) -> Duration {
        let bus = self.bus();
        if let ReadError::Bus(error) = error {
            self.watch.failed(error);
        }
        match error {
            ReadError::Fanout(FanoutError::Moved { .. }) => {
                warn!(bus, %error, "reading the bus again from there");
            }
            error if error.is_full() => {
                if let Some(suppressed) = self.outage.failed() {
                    error!(bus, %error, suppressed,
                        "Redis is full: the bus keeps the events until there is room");
                }
                return RESTART * 4;
            }
            _ => {
                if let Some(suppressed) = self.outage.failed() {
                    warn!(bus, %error, suppressed, "reading the bus was interrupted");
                }
            }
        }
        RESTART
    }

    /// Reads and copies until an error.
    ///
    /// # Cancel safety
    /// The copy in progress is in `copying`.
    async fn read<'a>(
        &'a self,
        shared: &Shared,
        copying: &mut Copying<'a>,
    ) -> Result<(), ReadError> {
        let (mut session, positions) = self.begin(shared).await?;
        *copying = Copying::Rests(positions);
        let (mut gathered, mut ahead) = (Gathered::default(), None);
        loop {
            if let Some(floors) = session.turn.next(&session.logs) {
                self.copy_and_note(gathered, &mut session, copying).await?;
                return Err(ReadError::Turned(session.turn.ends(floors, &session.logs)));
            }
            let (asked, fetched) = if let Some((asked, fetched)) = ahead.take() {
                (asked, fetched?)
            } else {
                let asked = session.batch;
                let wait = if session.turn.leaves_out() { WAIT_IN_TURN } else { WAIT };
                (asked, self.source.fetch(asked, wait).await?)
            };
            self.watch.fetched(&*fetched);
            if fetched.is_all() {
                session.turn.read_all();
            }
            // If more entries are available, they are fetched while this batch is processed.
            session.learn(&*fetched, asked);
            let (more, next) = (fetched.len() >= asked, session.batch);
            let fetch = async {
                let fetching = more.then(|| self.source.fetch(next, Duration::ZERO));
                Some((next, fetching?.await))
            };
            let gather = async {
                // Sends the fetch first: the scheduler runs the task that was woken last on this
                // thread, behind the current one, and no other thread may take it.
                tokio::task::yield_now().await;
                let batches = fetched.decode()?;
                for batch in &batches {
                    let OpenLog { name, known, .. } = &session.logs[batch.log];
                    self.aside.put(&self.link, name, known, &batch.entries).await?;
                }
                session.advance(&batches);
                for Batch { log, entries, end, tombstones, .. } in &batches {
                    let (log, end, known) = (*log, *end, &session.logs[*log].known);
                    let read = Read { log, end, known, tombstones };
                    self.fanout.gather(read, entries, &mut session.matches, &mut gathered);
                }
                Ok::<_, BusError>(batches.is_empty())
            };
            let (fetching, nothing) = copying.beside(join(fetch, gather)).await;
            ahead = fetching;
            let nothing = match nothing {
                Err(error) if error.is_full() => {
                    // Redis has no memory for an unreadable entry. The entries before it are copied
                    // first, so that the next session can trim up to there.
                    self.copy_and_note(gathered, &mut session, copying).await?;
                    return Err(error.into());
                }
                nothing => nothing?,
            };
            let due = nothing || session.checkpointed.elapsed() >= CHECKPOINT;
            if more && !due && !gathered.is_full() {
                continue;
            }
            // Positions are only known when no copy is in progress.
            let positions = self.ends(copying, &mut session).await?;
            if let Some(missing) = self.looks_for_missing(&mut session, &positions) {
                *copying = Copying::Rests(positions);
                self.copy_and_note(gathered, &mut session, copying).await?;
                return Err(missing.into());
            }
            let behind = more.then(|| self.age(session.added_ms));
            let taken = std::mem::take(&mut gathered);
            *copying = Copying::Goes(self.copy(taken, behind, positions).boxed());
            // Nothing waits longer than the time to read the available entries.
            if !more || due {
                let mut positions = self.ends(copying, &mut session).await?;
                if due {
                    self.checkpoint(&mut session, &mut positions).await?;
                }
                *copying = Copying::Rests(positions);
            }
        }
    }

    /// Copies what is gathered, and makes the last checkpoint of the session.
    async fn copy_and_note<'a>(
        &'a self,
        gathered: Gathered,
        session: &mut Session,
        copying: &mut Copying<'a>,
    ) -> Result<(), ReadError> {
        let positions = self.ends(copying, session).await?;
        *copying = Copying::Goes(self.copy(gathered, None, positions).boxed());
        let mut positions = self.ends(copying, session).await?;
        self.checkpoint(session, &mut positions).await
    }

    /// Waits for the copy in progress, and notes what it copied and counted.
    async fn ends(
        &self,
        copying: &mut Copying<'_>,
        session: &mut Session,
    ) -> Result<Positions, FanoutError> {
        let positions = copying.ends(session).await?;
        self.turns.copied(&session.logs);
        Ok(positions)
    }

    /// How long ago an entry was added.
    fn age(&self, added_ms: u64) -> Duration {
        self.clock.now().saturating_sub(Duration::from_millis(added_ms))
    }

    /// Copies the gathered events of all batches since the last copy.
    async fn copy(
        &self,
        gathered: Gathered,
        behind: Option<Duration>,
        mut positions: Positions,
    ) -> Copied {
        let copied = self.fanout.copy(&gathered, behind, &mut positions).await;
        if copied.as_ref().is_err_and(FanoutError::is_full) {
            self.fanout.pass_over(&gathered, &mut positions).await?;
        }
        copied?;
        if let Some(Recovered { lasted, failures }) = self.outage.succeeded() {
            info!(bus = self.bus(), ?lasted, failures, "the bus is read again");
        }
        let covered: Vec<_> = gathered.covers().collect();
        let logs = Arc::clone(positions.logs());
        for (log, covered) in &covered {
            self.tell(&logs[*log], covered.end, covered.entries).await;
        }
        Ok((positions, covered))
    }

    /// Tells the publishers that further `entries` of a log are copied, up to `end`.
    async fn tell(&self, log: &str, end: Offset, entries: u64) {
        let Some(backlog) = &self.backlog else { return };
        backlog.copied(end);
        let untold = self.untold.fetch_add(entries, Ordering::Relaxed) + entries;
        if untold < TOLD_EVERY {
            return;
        }
        self.untold.store(0, Ordering::Relaxed);
        let key = keys::read(self.link.prefix(), log);
        let command = redis::Cmd::hset(key, "copied", end.to_string());
        // Untold publishers wait a little longer.
        if let Err(error) = self.link.command("HSET", command).await {
            debug!(log, %error, "other processes do not know what is copied");
        }
    }

    /// Why the session ends when it is time to check the missing shards.
    fn looks_for_missing(
        &self,
        session: &mut Session,
        positions: &Positions,
    ) -> Option<FanoutError> {
        let missing = positions.away();
        // A session that leaves shards out is short, and all are looked for after it.
        if missing == 0 || session.turn.leaves_out() {
            return None;
        }
        let look = *session.look.get_or_insert_with(|| Instant::now() + self.patience);
        (Instant::now() >= look).then_some(FanoutError::Missing(missing))
    }
}

/// The log for those who fix the starts of pipelines.
pub(crate) fn end_of(log: &Log) -> LogEnd {
    let (name, start) = (Arc::clone(&log.name), log.start.clone());
    LogEnd { name, last: log.last, start, before: log.before }
}

#[cfg(test)]
mod tests;
