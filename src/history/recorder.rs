//! Collects the notes of a pipeline and writes them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use metrics::Counter;
use tokio::sync::{Notify, mpsc};
use tracing::debug;

use super::notes::Notes;
use super::{Attempt, History, packed};
use crate::clock::SharedClock;
use crate::id::{BotId, PipelineName, Shard, ShardCount};
use crate::metrics::history_dropped;
use crate::redis::Link;
use crate::redis::keys::ShardKeys;
use crate::redis::scripts::{Kept, Record};

/// Interval of writes.
const INTERVAL: Duration = Duration::from_millis(500);
/// Maximum number of notes in an entry of the stream. The oldest entries go first, so they are short.
const PORTION: usize = 64;
/// A write takes at most this long, so that a slow Redis cannot hold back a stop.
const PATIENCE: Duration = Duration::from_secs(2);

/// Takes the notes of one pipeline in this process. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Recorder {
    shared: Arc<Shared>,
    /// The task ends when the last one is dropped.
    _open: mpsc::Sender<()>,
}

#[derive(Debug, Default)]
struct Shared {
    notes: Mutex<Notes>,
    /// The first note since the last write.
    changed: Notify,
}

/// Where the attempts of a pipeline are kept.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    pub(crate) pipeline: PipelineName,
    pub(crate) shards: Arc<[ShardKeys]>,
    pub(crate) count: ShardCount,
    /// Should not be a hot path.
    pub(crate) link: Arc<Link>,
}

/// Writes the notes.
struct Writer {
    shared: Arc<Shared>,
    places: Places,
    kept: Kept,
    clock: SharedClock,
    /// The name of this process in its notes.
    process: String,
    dropped: Counter,
}

impl Recorder {
    /// A recorder, and the task that writes. The task ends after the last clone was dropped, and
    /// writes what is left. `None`: nothing is kept.
    pub(crate) fn new(
        history: History,
        places: Places,
        clock: SharedClock,
    ) -> Option<(Self, impl Future<Output = ()> + Send + 'static)> {
        if history.slices == 0 {
            return None;
        }
        let shared = Arc::<Shared>::default();
        let (open, mut closed) = mpsc::channel(1);
        let kept = history.kept(places.count);
        let dropped = history_dropped(&places.pipeline);
        let writer = Writer {
            shared: Arc::clone(&shared),
            places,
            kept,
            clock,
            process: process(),
            dropped,
        };
        let task = async move {
            let mut ended = false;
            while !ended {
                tokio::select! {
                    _ = closed.recv() => ended = true,
                    () = writer.shared.changed.notified() => {
                        ended = tokio::time::timeout(INTERVAL, closed.recv()).await.is_ok();
                    }
                }
                writer.write().await;
            }
        };
        Some((Self { shared, _open: open }, task))
    }

    /// Notes an attempt. Its process is filled in later.
    pub(crate) fn note(&self, bot: &BotId, attempt: Attempt) {
        let mut notes = self.shared.notes.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = notes.is_empty();
        notes.add(bot, attempt);
        drop(notes);
        if is_first {
            self.shared.changed.notify_one();
        }
    }
}

/// The machine and the process id.
fn process() -> String {
    format!("{} {}", gethostname::gethostname().to_string_lossy(), std::process::id())
}

/// What is written to one shard.
#[derive(Default)]
struct Portions {
    done: Vec<Vec<u8>>,
    failed: Vec<(BotId, Vec<u8>)>,
    /// Number of attempts in both.
    attempts: usize,
}

impl Writer {
    async fn write(&self) {
        let notes = self.shared.notes.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.dropped.increment(notes.dropped);
        if notes.is_empty() {
            return;
        }
        let now_ms = crate::clock::millis(self.clock.now());
        let shards = self.portions(notes);
        let calls: Vec<Record<'_>> = shards
            .iter()
            .map(|(shard, Portions { done, failed, .. })| Record {
                keys: &self.places.shards[shard.index()],
                now_ms,
                kept: self.kept,
                done,
                failed,
            })
            .collect();
        let written = tokio::time::timeout(PATIENCE, self.places.link.call_all(&calls)).await;
        let all = || shards.values().map(|portions| portions.attempts).sum();
        match written {
            Ok(Ok(replies)) => {
                for (portions, reply) in shards.values().zip(replies) {
                    if let Err(error) = reply {
                        self.lost(portions.attempts, &error);
                    }
                }
            }
            Ok(Err(error)) => self.lost(all(), &error),
            Err(_) => self.lost(all(), &"Redis is slow"),
        }
    }

    fn portions(&self, notes: Notes) -> BTreeMap<Shard, Portions> {
        let mut shards: BTreeMap<Shard, Vec<&(BotId, Attempt)>> = BTreeMap::new();
        for note in &notes.done {
            shards.entry(note.0.shard(self.places.count)).or_default().push(note);
        }
        let mut all: BTreeMap<Shard, Portions> = BTreeMap::new();
        for (shard, done) in shards {
            let portion = |done| packed::portion(&self.process, done);
            let of_shard = all.entry(shard).or_default();
            of_shard.attempts += done.len();
            of_shard.done = done.chunks(PORTION).map(portion).collect();
        }
        for (bot, mut failures) in notes.failed {
            for failure in &mut failures {
                failure.process.clone_from(&self.process);
            }
            let packed = failures.iter().flat_map(packed::failure).collect();
            let of_shard = all.entry(bot.shard(self.places.count)).or_default();
            of_shard.attempts += failures.len();
            of_shard.failed.push((bot, packed));
        }
        all
    }

    fn lost(&self, count: usize, error: &dyn std::fmt::Display) {
        self.dropped.increment(count as u64);
        debug!(pipeline = %self.places.pipeline, attempts = count, %error, "attempts are not kept");
    }
}
