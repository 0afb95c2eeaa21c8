//! The scheduler of one pipeline: moves delayed events into their queues when they are due.
//!
//! It sleeps until the next known due time, and is woken when an earlier one arrives. Events never
//! move early: the script compares with the server's clock. Any number of schedulers may run.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use rand::Rng;
use tokio::sync::Notify;
use tracing::{info, warn};

use super::Queue;
use super::wake::{Listener, Wake};
use crate::clock::{SharedClock, millis};
use crate::id::{Shard, ShardCount};
use crate::lifecycle::Shutdown;
use crate::telemetry::{Outage, Recovered};

/// Maximum interval between two scans of a shard.
const SCAN: Duration = Duration::from_secs(60);
/// Its spread over processes and scans.
const SPREAD: Range<f64> = 0.8..1.2;
/// Pause while our clock is ahead of the server's, ms.
const SKEW_MS: u64 = 5;
/// Pause after an error.
const AGAIN: Duration = Duration::from_millis(250);

/// Limits the log lines about due events that cannot be moved, for all pipelines and shards
/// together.
static PROMOTIONS: Outage = Outage::shared();

/// When to scan each shard, ms since 1970.
#[derive(Debug)]
pub(crate) struct DueBoard {
    count: ShardCount,
    shards: Mutex<Vec<u64>>,
    changed: Notify,
}

impl DueBoard {
    pub(crate) fn new(count: ShardCount) -> Arc<Self> {
        let shards = Mutex::new(vec![0; usize::from(count.get())]);
        Arc::new(Self { count, shards, changed: Notify::new() })
    }

    fn lower(&self, shard: Shard, due_ms: u64) {
        let mut shards = self.shards.lock().unwrap_or_else(PoisonError::into_inner);
        let known = &mut shards[shard.index()];
        if due_ms < *known {
            *known = due_ms;
            self.changed.notify_one();
        }
    }

    /// Takes the shards to scan by `now_ms`, postpones each to its next scan, and returns the next
    /// time.
    fn take(&self, now_ms: u64, scan_ms: u64) -> (Vec<Shard>, u64) {
        let mut shards = self.shards.lock().unwrap_or_else(PoisonError::into_inner);
        // No time is later than the last possible scan, unless the clock was set back.
        let times = now_ms + 1..=now_ms + millis(SCAN.mul_f64(SPREAD.end));
        let is_due = |shard: &Shard| !times.contains(&shards[shard.index()]);
        let due: Vec<Shard> = self.count.shards().filter(is_due).collect();
        for shard in &due {
            shards[shard.index()] = now_ms + scan_ms;
        }
        (due, shards.iter().copied().min().unwrap_or(u64::MAX))
    }
}

/// Tells a scheduler about earlier due times.
pub(crate) struct DueEar(pub(crate) Arc<DueBoard>);

impl Listener for DueEar {
    fn heard(&self, shard: Shard, wake: &Wake) {
        if let Wake::Due(due_ms) = *wake {
            self.0.lower(shard, due_ms);
        }
    }

    fn missed(&self) {
        self.0.shards.lock().unwrap_or_else(PoisonError::into_inner).fill(0);
        self.0.changed.notify_one();
    }
}

/// Schedules until the soft stop.
pub(crate) async fn run(
    queue: Queue,
    board: Arc<DueBoard>,
    clock: SharedClock,
    shutdown: Shutdown,
) {
    loop {
        let changed = board.changed.notified();
        let now = clock.now();
        let scan = SCAN.mul_f64(rand::rng().random_range(SPREAD));
        let (due, next_ms) = board.take(millis(now), millis(scan));
        // Shards are handled concurrently. So a server that does not answer delays other shards at
        // most by its timeout.
        let moving = join_all(due.iter().map(|shard| promote(&queue, &board, &clock, *shard, now)));
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            // If this future is dropped, the script may or may not have run: due events stay due,
            // or are moved.
            _ = moving => {}
        }
        if !due.is_empty() {
            continue;
        }
        let wait = Duration::from_millis(next_ms.saturating_sub(millis(clock.now())).max(1));
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            () = changed => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// Moves the due events of one shard, and notes when to scan again.
async fn promote(
    queue: &Queue,
    board: &DueBoard,
    clock: &SharedClock,
    shard: Shard,
    now: Duration,
) {
    match queue.promote(shard, now).await {
        Ok(promoted) => {
            if let Some(Recovered { lasted, failures }) = PROMOTIONS.succeeded() {
                info!(?lasted, failures, "delayed events move again");
            }
            if let Some(next_ms) = next_look(promoted.next_ms, promoted.moved, millis(clock.now()))
            {
                board.lower(shard, next_ms);
            }
        }
        Err(error) => {
            if let Some(suppressed) = PROMOTIONS.failed() {
                warn!(pipeline = %queue.name(), %shard, %error, suppressed, "cannot move due events");
            }
            board.lower(shard, millis(now + AGAIN));
        }
    }
}

/// When to scan a shard again, whose next event is due then. If no event moved, the events are due by our
/// clock but not by the server's: wait a moment. Otherwise another batch is already due.
fn next_look(next_ms: Option<u64>, moved: u64, now_ms: u64) -> Option<u64> {
    let floor = if moved == 0 { now_ms + SKEW_MS } else { 0 };
    next_ms.map(|next_ms| next_ms.max(floor))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn board() -> (Arc<DueBoard>, [Shard; 3]) {
        let count = ShardCount::new(3).unwrap();
        let shards: Vec<Shard> = count.shards().collect();
        (DueBoard::new(count), [shards[0], shards[1], shards[2]])
    }

    #[test]
    fn each_shard_is_scanned_at_the_start_when_an_event_is_due_and_after_a_while() {
        let (board, [a, b, c]) = board();
        assert_eq!(board.take(1_000, 60), (vec![a, b, c], 1_060));
        assert_eq!(board.take(1_059, 60), (vec![], 1_060));
        board.lower(b, 1_059);
        assert_eq!(board.take(1_058, 60), (vec![], 1_059));
        assert_eq!(board.take(1_059, 60), (vec![b], 1_060));
        assert_eq!(board.take(1_060, 60), (vec![a, c], 1_119));
    }

    #[test]
    fn all_shards_are_scanned_after_the_clock_was_set_back() {
        let (board, [a, b, c]) = board();
        let hours = 7_200_000;
        board.take(hours, 60_000);
        board.lower(b, hours + 5);
        assert_eq!(board.take(0, 60_000), (vec![a, b, c], 60_000));
        assert_eq!(board.take(59_999, 60_000), (vec![], 60_000));
    }

    #[tokio::test]
    async fn only_an_earlier_time_wakes_the_scheduler_and_lost_messages_look_everywhere() {
        let (board, [a, b, c]) = board();
        board.take(1_000, 60);
        let is_woken = || futures_util::FutureExt::now_or_never(board.changed.notified()).is_some();
        board.lower(a, 1_060);
        board.lower(a, 2_000);
        assert!(!is_woken());
        DueEar(Arc::clone(&board)).heard(a, &Wake::Due(1_030));
        assert!(is_woken());
        assert_eq!(board.take(1_030, 60), (vec![a], 1_060));
        DueEar(Arc::clone(&board)).missed();
        assert!(is_woken());
        assert_eq!(board.take(1_031, 60).0, [a, b, c]);
    }

    #[test]
    fn a_clock_ahead_of_the_servers_is_no_busy_loop() {
        assert_eq!(next_look(Some(990), 0, 1_000), Some(1_005), "not yet by the server's clock");
        assert_eq!(next_look(Some(1_200), 0, 1_000), Some(1_200));
        assert_eq!(next_look(Some(990), 500, 1_000), Some(990), "the next batch");
        assert_eq!(next_look(None, 0, 1_000), None);
    }
}
