//! The scheduler of one pipeline: moves delayed events into their queues when they are due.
//!
//! It sleeps until the next known due time, and is woken when an earlier one arrives. Due times are those
//! of the server's clock: the scripts compare with it, so events never move early, and each answer tells
//! its time. The wall clock of the process has no effect. Any number of schedulers may run.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use rand::Rng;
use tokio::sync::Notify;
use tokio::time::Instant;
use tracing::{info, warn};

use super::Queue;
use super::wake::{Listener, Wake};
use crate::id::{Shard, ShardCount};
use crate::lifecycle::Shutdown;
use crate::redis::RedisError;
use crate::redis::scripts::{Due, FindDue, Promote, Promoted};
use crate::telemetry::{Outage, Recovered};

/// Maximum interval between two scans of a shard.
const SCAN: Duration = Duration::from_secs(60);
/// Its spread over processes and scans.
const SPREAD: Range<f64> = 0.8..1.2;
/// Pause after an error, and while no due event can be moved.
const AGAIN: Duration = Duration::from_millis(250);

/// Maximum number of delayed events moved by one call.
const BATCH: usize = 100;
/// Maximum number of their bytes, but at least one event: the script reads all of them while Redis waits.
const BATCH_BYTES: usize = 4 << 20;

/// Limits the log lines about due events that cannot be moved, for all pipelines and shards
/// together.
static PROMOTIONS: Outage = Outage::shared();

/// When to look at each shard.
#[derive(Debug)]
pub(crate) struct DueBoard {
    count: ShardCount,
    shards: Mutex<Vec<Known>>,
    changed: Notify,
}

/// What is known of one shard.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// When to look next. A look that is under way ends first.
    look: Instant,
    is_under_way: bool,
    /// Whether the last look failed.
    fails: bool,
    /// The time of the server in its last answer, ms since 1970, and when that look began.
    clock: Option<(u64, Instant)>,
}

impl Known {
    /// When a look must begin to find this time at the server. `None`: never.
    fn time_of(&self, server_ms: u64) -> Option<Instant> {
        let Some((told_ms, begun)) = self.clock else { return Some(Instant::now()) };
        begun.checked_add(Duration::from_millis(server_ms.saturating_sub(told_ms)))
    }
}

impl DueBoard {
    pub(crate) fn new(count: ShardCount) -> Arc<Self> {
        let known = Known { look: Instant::now(), is_under_way: false, fails: false, clock: None };
        let shards = Mutex::new(vec![known; usize::from(count.get())]);
        Arc::new(Self { count, shards, changed: Notify::new() })
    }

    fn shards(&self) -> MutexGuard<'_, Vec<Known>> {
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An event is due at this time of the server, ms since 1970.
    fn lower(&self, shard: Shard, due_ms: u64) {
        let mut shards = self.shards();
        let known = &mut shards[shard.index()];
        if let Some(at) = known.time_of(due_ms)
            && at < known.look
        {
            known.look = at;
            self.changed.notify_one();
        }
    }

    /// Takes the shards to look at by `now`, postpones each to its next scan, and returns the next
    /// time for the shards without a look under way.
    fn take(&self, now: Instant, scan: Duration) -> (Vec<Shard>, Instant) {
        let mut shards = self.shards();
        let is_due = |shard: &Shard| {
            let known = &shards[shard.index()];
            !known.is_under_way && known.look <= now
        };
        let due: Vec<Shard> = self.count.shards().filter(is_due).collect();
        for shard in &due {
            let known = &mut shards[shard.index()];
            (known.look, known.is_under_way) = (now + scan, true);
        }
        let waiting = shards.iter().filter(|known| !known.is_under_way);
        (due, waiting.map(|known| known.look).min().unwrap_or(now + scan))
    }

    /// Notes the end of a look that began at `begun`; `None`: it failed. Returns whether the last look
    /// failed at no shard.
    fn ended(&self, shard: Shard, begun: Instant, moved: Option<Moved>) -> bool {
        let mut shards = self.shards();
        let known = &mut shards[shard.index()];
        (known.is_under_way, known.fails) = (false, moved.is_none());
        let again = Some(Instant::now() + AGAIN);
        let next = match moved {
            None => again,
            Some(Moved { count, now_ms, next_ms }) => {
                known.clock = Some((now_ms, begun));
                match next_ms {
                    // Another process moves them, or they are damaged: this is no busy loop.
                    Some(next_ms) if count == 0 && next_ms <= now_ms => again,
                    // Another batch may be due already.
                    Some(next_ms) => known.time_of(next_ms),
                    None => None,
                }
            }
        };
        known.look = next.map_or(known.look, |next| next.min(known.look));
        !shards.iter().any(|known| known.fails)
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
        let (now, mut shards) = (Instant::now(), self.0.shards());
        for known in &mut *shards {
            known.look = known.look.min(now);
        }
        self.0.changed.notify_one();
    }
}

/// Schedules until the soft stop.
pub(crate) async fn run(queue: Queue, board: Arc<DueBoard>, shutdown: Shutdown) {
    // At most one look per shard. A server that does not answer delays its own shards only.
    let mut looks = FuturesUnordered::new();
    loop {
        let changed = board.changed.notified();
        let scan = SCAN.mul_f64(rand::rng().random_range(SPREAD));
        let (due, next) = board.take(Instant::now(), scan);
        looks.extend(due.into_iter().map(|shard| look(&queue, &board, shard)));
        tokio::select! {
            biased;
            // If looks are dropped, their scripts may or may not have run: due events stay due, or
            // are moved.
            () = shutdown.soft.cancelled() => return,
            Some(()) = looks.next() => {}
            () = changed => {}
            () = tokio::time::sleep_until(next) => {}
        }
    }
}

/// Moves the due events of one shard, and notes when to look again.
async fn look(queue: &Queue, board: &DueBoard, shard: Shard) {
    let begun = Instant::now();
    let moved = queue.promote(shard).await;
    let none_fails = board.ended(shard, begun, moved.as_ref().ok().copied());
    match moved {
        // Other shards may go on while one fails: that is no recovery.
        Ok(_) if none_fails => {
            if let Some(Recovered { lasted, failures }) = PROMOTIONS.succeeded() {
                info!(?lasted, failures, "delayed events move again");
            }
        }
        Ok(_) => {}
        Err(error) => {
            if let Some(suppressed) = PROMOTIONS.failed() {
                warn!(pipeline = %queue.name(), %shard, %error, suppressed, "cannot move due events");
            }
        }
    }
}

/// The result of a look at one shard.
#[derive(Debug, Clone, Copy)]
struct Moved {
    /// Number of moved events.
    count: u64,
    /// The server's clock at the start, ms since 1970.
    now_ms: u64,
    /// When the next event is due, ms since 1970.
    next_ms: Option<u64>,
}

impl Queue {
    /// Moves delayed events of one shard that are due into the queues, oldest first, at most
    /// [`BATCH`] and [`BATCH_BYTES`] of them.
    async fn promote(&self, shard: Shard) -> Result<Moved, RedisError> {
        let keys = self.keys(shard);
        let find = FindDue { keys, most: BATCH, bytes: BATCH_BYTES };
        let Due { now_ms, next_ms, events } = self.link().call(&find).await?;
        if events.is_empty() {
            return Ok(Moved { count: 0, now_ms, next_ms });
        }
        let promote = Promote { keys, slice_us: self.limits().slice_us, events: &events };
        let Promoted { moved, next_ms } = self.link().call(&promote).await?;
        Ok(Moved { count: moved, now_ms, next_ms })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCANNED: Duration = Duration::from_secs(60);
    /// The clock of the server at the start of a test. That of the process plays no part.
    const SERVER_MS: u64 = 5_000;

    /// A board that has not looked yet, its shards, and its start.
    fn board() -> (Arc<DueBoard>, [Shard; 3], Instant) {
        let count = ShardCount::new(3).unwrap();
        let shards: Vec<Shard> = count.shards().collect();
        (DueBoard::new(count), [shards[0], shards[1], shards[2]], Instant::now())
    }

    /// A board that has looked at its start, and found no delayed event.
    fn looked() -> (Arc<DueBoard>, [Shard; 3], Instant) {
        let (board, shards, start) = board();
        board.take(start, SCANNED);
        for shard in shards {
            board.ended(shard, start, Some(moved(0, 0, None)));
        }
        (board, shards, start)
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// What a look found that reached the server so many ms after the start. The next event is due so
    /// many ms after the start.
    fn moved(count: u64, at: u64, next: Option<u64>) -> Moved {
        let next_ms = next.map(|next| SERVER_MS + next);
        Moved { count, now_ms: SERVER_MS + at, next_ms }
    }

    #[test]
    fn each_shard_is_looked_at_at_the_start_when_an_event_is_due_and_after_a_while() {
        let (board, [a, b, c], start) = board();
        let scanned = start + SCANNED;
        assert_eq!(board.take(start, SCANNED), (vec![a, b, c], scanned));
        for shard in [a, b, c] {
            board.ended(shard, start, Some(moved(0, 0, None)));
        }
        assert_eq!(board.take(start + ms(59_999), SCANNED), (vec![], scanned));
        board.lower(b, SERVER_MS + 59_000);
        let due = start + ms(59_000);
        assert_eq!(board.take(start + ms(58_999), SCANNED), (vec![], due));
        assert_eq!(board.take(due, SCANNED), (vec![b], scanned));
        assert_eq!(board.take(scanned, SCANNED).0, [a, c]);
    }

    #[test]
    fn the_next_look_is_when_the_servers_clock_shows_the_due_time() {
        let (board, [a, ..], start) = looked();
        board.lower(a, SERVER_MS + 100);
        assert_eq!(board.take(start + ms(100), SCANNED).0, [a]);
        // The clock of the server was set back by 30 ms.
        board.ended(a, start + ms(100), Some(moved(0, 70, Some(100))));
        assert_eq!(board.take(start + ms(129), SCANNED).0, []);
        assert_eq!(board.take(start + ms(130), SCANNED).0, [a]);
        board.ended(a, start + ms(130), Some(moved(100, 100, Some(90))));
        assert_eq!(board.take(start + ms(130), SCANNED).0, [a], "the next batch");
        board.ended(a, start + ms(130), Some(moved(1, 100, Some(u64::MAX - SERVER_MS))));
        assert_eq!(board.take(start + ms(131), SCANNED).0, []);
    }

    #[test]
    fn due_events_that_do_not_move_and_errors_are_no_busy_loop() {
        for found in [Some(moved(0, 100, Some(100))), None] {
            let (board, [a, ..], start) = looked();
            board.lower(a, SERVER_MS + 100);
            assert_eq!(board.take(start + ms(100), SCANNED).0, [a]);
            board.ended(a, start + ms(100), found);
            assert_eq!(board.take(start + ms(200), SCANNED).0, []);
            assert_eq!(board.take(start + ms(59_999), SCANNED).0, [a]);
        }
    }

    #[test]
    fn a_shard_is_looked_at_once_at_a_time_and_waits_for_no_other() {
        let (board, [a, b, _], start) = looked();
        board.lower(a, SERVER_MS + 10);
        board.lower(b, SERVER_MS + 10);
        let at = start + ms(10);
        assert_eq!(board.take(at, SCANNED).0, [a, b]);
        board.lower(a, SERVER_MS + 11);
        board.lower(b, SERVER_MS + 11);
        board.ended(b, at, Some(moved(1, 10, None)));
        assert_eq!(board.take(start + ms(11), SCANNED), (vec![b], start + SCANNED));
        board.ended(a, at, Some(moved(1, 10, None)));
        assert_eq!(board.take(start + ms(12), SCANNED).0, [a]);
    }

    #[test]
    fn while_a_shard_fails_the_others_do_not_show_that_it_recovered() {
        let (board, [a, b, _], start) = looked();
        assert!(!board.ended(a, start, None));
        assert!(!board.ended(b, start, Some(moved(1, 0, None))));
        assert!(board.ended(a, start, Some(moved(1, 0, None))));
    }

    #[test]
    fn only_an_earlier_time_wakes_the_scheduler_and_lost_messages_look_everywhere() {
        let (board, [a, b, c], start) = looked();
        let is_woken = || futures_util::FutureExt::now_or_never(board.changed.notified()).is_some();
        board.lower(a, SERVER_MS + 60_000);
        board.lower(a, u64::MAX);
        assert!(!is_woken());
        DueEar(Arc::clone(&board)).heard(a, &Wake::Due(SERVER_MS + 30));
        assert!(is_woken());
        assert_eq!(board.take(start + ms(30), SCANNED).0, [a]);
        board.ended(a, start + ms(30), Some(moved(1, 30, None)));
        DueEar(Arc::clone(&board)).missed();
        assert!(is_woken());
        assert_eq!(board.take(Instant::now(), SCANNED).0, [a, b, c]);
    }

    #[test]
    fn a_message_before_the_first_answer_looks_after_it() {
        let (board, [a, b, c], start) = board();
        board.take(start, SCANNED);
        board.lower(b, SERVER_MS + 1_000);
        for shard in [a, b, c] {
            board.ended(shard, start, Some(moved(0, 0, None)));
        }
        assert_eq!(board.take(Instant::now(), SCANNED).0, [b]);
    }
}
