//! The state of one reading session, and the concurrent copy.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use futures_util::future::BoxFuture;
use metrics::counter;
use tokio::time::Instant;

use super::super::BusError;
use super::super::source::{Batch, Fetched, Log, Opened, Progress};
use super::turn::Turn;
use super::{BATCH_FIRST, BATCH_MAX, BATCH_UNKNOWN};
use crate::fanout::{Covered, FanoutError, Matches, Positions, Range};
use crate::id::Offset;
use crate::metrics::{BUS_TOMBSTONES, BusMetrics};

/// Approximate number of bytes in one read.
const BATCH_BYTES: usize = 8 << 20;
/// What an entry takes beside its content.
const ENTRY_BYTES: usize = 128;

/// The positions of the shards, and what was copied of each log.
pub(super) type Copied = Result<(Positions, Vec<(usize, Covered)>), FanoutError>;

/// The copy that runs beside the reading: a copy may take longer than reading a batch.
#[derive(Default)]
pub(super) enum Copying<'a> {
    /// No copy is in progress, and its caller has the positions of the shards.
    #[default]
    None,
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

    /// Waits for the copy in progress.
    pub(super) async fn over(&mut self) {
        if let Self::Goes(copy) = self {
            *self = Self::Ended(copy.await);
        }
    }

    /// Waits for the copy in progress, records it, and hands out the positions of the shards. The next
    /// call needs another copy, or them.
    pub(super) async fn ends(&mut self, session: &mut Session) -> Result<Positions, FanoutError> {
        self.over().await;
        let (positions, covered) = match std::mem::take(self) {
            Self::Rests(positions) => return Ok(positions),
            Self::Ended(copied) => copied?,
            Self::Goes(_) | Self::None => unreachable!("the copy is over, and was not taken"),
        };
        for (log, covered) in covered {
            let log = &mut session.logs[log];
            log.copied = (covered.end, log.copied.1 + covered.entries);
            log.metrics.events.increment(covered.new);
            if covered.tombstones > 0 {
                counter!(BUS_TOMBSTONES).increment(covered.tombstones);
            }
        }
        Ok(positions)
    }
}

/// The state of one session.
pub(super) struct Session {
    pub(super) logs: Vec<OpenLog>,
    pub(super) matches: Matches,
    pub(super) batch: usize,
    /// When the last entry read was added, ms since 1970.
    pub(super) added_ms: u64,
    pub(super) checkpointed: Instant,
    /// When it was last found out what other processes need.
    pub(super) kept: Instant,
    /// When to check the missing shards.
    pub(super) look: Option<Instant>,
    pub(super) turn: Turn,
    /// Why it leaves out logs, if it does.
    pub(super) left_out: Option<BusError>,
}

/// A log that the session reads.
pub(super) struct OpenLog {
    pub(super) name: Arc<str>,
    pub(super) metrics: BusMetrics,
    /// The last entry read.
    pub(super) end: Offset,
    /// Number of entries ever added up to `end`, as far as known.
    pub(super) entries: u64,
    /// The last entry copied, and the entries up to there.
    pub(super) copied: (Offset, u64),
    /// The last entry of the last checkpoint; `None`: the first one is due in any case.
    pub(super) checkpointed: Option<Offset>,
    /// Where the session began to read.
    pub(super) began: Offset,
    /// What was read in turns before.
    pub(super) known: Vec<Range>,
    /// Number of entries that are not read yet, when it was known last; `None`: it was not known since the
    /// session began.
    pub(super) lag: Option<u64>,
}

impl OpenLog {
    /// A log that is read from the lowest position of a shard on. If it starts elsewhere, because entries
    /// are gone or it was made anew, the first checkpoint tells the shards: a later session could not find
    /// that out any more, or would report the gap again. If a session ended before it noted what it had
    /// copied, the first checkpoint notes it: otherwise these entries count as unread until the next one.
    pub(super) fn new(log: &Log, opened: Opened, lowest: Offset) -> Self {
        let Opened { at, entries, noted, .. } = opened;
        let is_noted = noted.is_none_or(|noted| noted == at);
        Self {
            name: Arc::clone(&log.name),
            metrics: BusMetrics::new(&log.name),
            end: at,
            entries,
            copied: (at, entries),
            checkpointed: is_noted.then_some(lowest),
            began: at,
            known: Vec::new(),
            lag: None,
        }
    }

    pub(super) fn progress(&self, keep: Option<Offset>) -> Progress {
        Progress {
            log: Arc::clone(&self.name),
            read: self.end,
            copied: self.copied.0,
            entries: (self.entries, self.copied.1),
            keep,
        }
    }
}

impl Session {
    pub(super) fn new(logs: Vec<OpenLog>, turn: Turn) -> Self {
        let now = Instant::now();
        Self {
            logs,
            matches: Matches::default(),
            batch: BATCH_UNKNOWN,
            added_ms: 0,
            checkpointed: now,
            kept: now,
            look: None,
            turn,
            left_out: None,
        }
    }

    /// Learns from a read that asked for `asked` entries how many the next one should ask for. Their bytes
    /// are those that the answer had: those of the events may be far fewer, for example without `data_base64`.
    pub(super) fn learn(&mut self, fetched: &dyn Fetched, asked: usize) {
        let count = fetched.len();
        if count == 0 {
            return;
        }
        let fits = BATCH_BYTES / (ENTRY_BYTES + fetched.bytes() / count);
        // A reader that has caught up begins with few again: the next entries may be large.
        let grown = if count >= asked { (asked * 2).max(BATCH_FIRST) } else { BATCH_FIRST };
        self.batch = grown.min(fits).clamp(8, BATCH_MAX);
    }

    /// Moves behind the entries of a read.
    pub(super) fn advance(&mut self, batches: &[Batch]) {
        let mut count = 0;
        for batch in batches {
            let log = &mut self.logs[batch.log];
            log.end = batch.end;
            log.entries += batch.entries.len() as u64;
            // A compacted log may have hardly anything but tombstones.
            count += batch.entries.len() + batch.skipped;
            if batch.added_ms > 0 {
                self.added_ms = batch.added_ms;
            }
        }
        self.turn.reads(count);
    }
}

#[cfg(test)]
mod tests {
    use super::super::turn::Turns;
    use super::*;

    /// An answer of so many entries and bytes.
    struct Answer(usize, usize);

    impl Fetched for Answer {
        fn len(&self) -> usize {
            self.0
        }

        fn bytes(&self) -> usize {
            self.1
        }

        fn decode(self: Box<Self>) -> Result<Vec<Batch>, BusError> {
            unreachable!("only its size counts")
        }
    }

    fn session(seq: u64) -> Session {
        let at = |seq| Offset { ms: 1, seq };
        let logs: Arc<[Arc<str>]> = [Arc::from("x")].into();
        let shards = [10, seq].map(|seq| Some([at(seq)].into()));
        let positions = Positions::new(logs, vec![shards.into()]);
        let (turn, _) = Turn::new(&Turns::default(), vec![at(100_000)], positions);
        let log = Log { name: "x".into(), ..Log::default() };
        let opened = Opened { at: at(10), entries: 0, lost: 0, noted: None };
        Session::new(vec![OpenLog::new(&log, opened, at(10))], turn)
    }

    #[tokio::test]
    async fn a_read_asks_for_entries_of_about_8_mib_by_the_bytes_of_the_one_before() {
        let mut session = session(10);
        let mut next = |count, bytes, asked| {
            session.learn(&Answer(count, bytes), asked);
            session.batch
        };
        assert_eq!(next(16, 16 * 200, 16), 256, "more are there");
        assert_eq!(next(256, 256 * 200, 256), 512);
        assert_eq!(next(2_048, 2_048 * 200, 2_048), BATCH_MAX);
        assert_eq!(next(BATCH_MAX, BATCH_MAX << 10, BATCH_MAX), BATCH_MAX, "1 KiB each");
        let large = next(BATCH_MAX, BATCH_MAX << 18, BATCH_MAX);
        assert!((30..=32).contains(&large), "256 KiB each: {large}");
        assert_eq!(next(32, 32 << 20, 32), 8, "1 MiB each");
        assert_eq!(next(0, 0, 8), 8, "nothing was learnt");
        assert_eq!(next(3, 300, 8), 256, "it has caught up");
    }

    /// Shards that are far behind would be read for the longest slice otherwise.
    #[tokio::test(start_paused = true)]
    async fn entries_that_are_left_out_count_for_the_slice_of_a_session() {
        let mut session = session(90_000);
        assert_eq!(session.logs[0].lag, None, "not known yet");
        let end = Offset { ms: 1, seq: 4_106 };
        let batch = Batch { skipped: 4_096, end, added_ms: 7, ..Batch::default() };
        session.advance(&[batch]);
        tokio::time::advance(std::time::Duration::from_secs(2)).await;
        assert!(session.turn.next(&session.logs).is_some(), "it is the turn of others");
        assert_eq!(session.added_ms, 7);
    }
}
