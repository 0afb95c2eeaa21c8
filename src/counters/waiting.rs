//! How long views have waited, by the monotonic clock of this process.
//!
//! The age of a view is the difference of two times of Redis: that of the claim and that of its
//! arrival. If the clock of Redis is set back, arrivals are ahead of it until it has caught up, and no
//! view gets old enough. So for each bot that has to wait, this process notes its last event and
//! when it saw that event. An event that is still at its place after the minimum age is old enough,
//! and so are all events before it.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::handler::{Delivery, Slice};
use crate::id::{BotId, Sequence};

/// Minimum number of notes before old ones are removed.
const SWEEP_MIN: usize = 1_024;
/// Age above which a note is removed: another process handles the bot.
const OLD: Duration = Duration::from_secs(60);

/// An event that was at its place in the queue at a time.
#[derive(Debug, Clone, Copy)]
struct Seen {
    sequence: Sequence,
    /// A hash of its id. After Redis lost its last writes, another event may get the same sequence.
    id: u64,
    at: Instant,
}

#[derive(Default)]
struct Notes {
    bots: HashMap<BotId, Seen>,
    /// The number of notes at which old ones are removed next.
    sweep_at: usize,
}

/// The notes of a process.
#[derive(Default)]
pub(super) struct Waiting {
    notes: Mutex<Notes>,
    seed: RandomState,
}

impl fmt::Debug for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Waiting")
    }
}

impl Waiting {
    /// The number of events at the start of the slice that have waited for `age`, and how long to
    /// wait for the next ones. `by_redis` of them have waited by the clock of Redis.
    pub(super) fn ripe(&self, slice: &Slice, by_redis: usize, age: Duration) -> (usize, Duration) {
        let (events, now) = (&*slice.events, Instant::now());
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = notes.bots.get(&slice.bot).copied();
        let seen = seen.and_then(|seen| Some((self.count(events, seen)?, seen.at)));
        let ripe = match seen {
            Some((count, at)) if now.duration_since(at) >= age => count.max(by_redis),
            _ => by_redis,
        };
        let Some(last) = events.last().filter(|_| ripe < events.len()) else {
            notes.bots.remove(&slice.bot);
            return (ripe, Duration::ZERO);
        };
        let since = match seen {
            Some((count, at)) if count > ripe => at,
            _ => {
                notes.sweep();
                let id = self.seed.hash_one(last.event.id());
                let seen = Seen { sequence: last.sequence, id, at: now };
                notes.bots.insert(slice.bot.clone(), seen);
                now
            }
        };
        (ripe, age.saturating_sub(now.duration_since(since)))
    }

    /// The number of events up to this one, if it is among them.
    fn count(&self, events: &[Delivery], seen: Seen) -> Option<usize> {
        let count = events.partition_point(|event| event.sequence <= seen.sequence);
        let last = events[..count].last()?;
        let is_seen =
            last.sequence == seen.sequence && self.seed.hash_one(last.event.id()) == seen.id;
        is_seen.then_some(count)
    }
}

impl Notes {
    fn sweep(&mut self) {
        if self.bots.len() >= self.sweep_at.max(SWEEP_MIN) {
            self.bots.retain(|_, seen| seen.at.elapsed() < OLD);
            self.sweep_at = 2 * self.bots.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Event;
    use crate::id::Fence;

    const AGE: Duration = Duration::from_secs(2);

    /// Events with these sequences and ids.
    fn slice(bot: &str, events: &[(u64, &str)]) -> Slice {
        let bot = BotId::parse(bot).unwrap();
        let event = |&(sequence, id): &(u64, &str)| {
            let event = Event::builder("ad.viewed", &bot).id(id).build().unwrap();
            Delivery { sequence: Sequence::new(sequence), event }
        };
        let events = events.iter().map(event).collect();
        Slice::new(bot, Fence::new(1), 1, Instant::now(), events)
    }

    #[tokio::test(start_paused = true)]
    async fn events_ripen_by_the_clock_of_the_process_too() {
        let waiting = Waiting::default();
        let ripe = |events: &[(u64, &str)]| waiting.ripe(&slice("b", events), 0, AGE);
        assert_eq!(ripe(&[(1, "a"), (2, "b")]), (0, AGE));
        tokio::time::advance(AGE / 2).await;
        assert_eq!(ripe(&[(1, "a"), (2, "b"), (3, "c")]), (0, AGE / 2), "the first note stays");
        tokio::time::advance(AGE / 2).await;
        assert_eq!(ripe(&[(1, "a"), (2, "b"), (3, "c")]), (2, AGE), "the third is noted now");
        tokio::time::advance(AGE).await;
        assert_eq!(ripe(&[(3, "c")]), (1, Duration::ZERO));
        assert!(waiting.notes.lock().unwrap().bots.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn events_that_redis_lost_ripen_no_others_with_their_sequences() {
        let waiting = Waiting::default();
        let ripe = |events: &[(u64, &str)]| waiting.ripe(&slice("b", events), 0, AGE);
        assert_eq!(ripe(&[(1, "a"), (2, "b")]), (0, AGE));
        tokio::time::advance(AGE).await;
        assert_eq!(ripe(&[(1, "a"), (2, "other")]), (0, AGE));
        tokio::time::advance(AGE).await;
        assert_eq!(ripe(&[(1, "a")]), (0, AGE), "the noted one is not in the slice");
        tokio::time::advance(AGE).await;
        assert_eq!(ripe(&[(1, "a"), (2, "other")]), (1, AGE));
    }

    #[tokio::test(start_paused = true)]
    async fn the_clock_of_redis_decides_while_it_runs_and_old_notes_are_removed() {
        let waiting = Waiting::default();
        let events = [(1, "a"), (2, "b")];
        assert_eq!(waiting.ripe(&slice("b", &events), 1, AGE), (1, AGE));
        assert_eq!(waiting.ripe(&slice("b", &events), 2, AGE), (2, Duration::ZERO));
        for bot in 0..SWEEP_MIN {
            waiting.ripe(&slice(&format!("b{bot}"), &events), 0, AGE);
        }
        tokio::time::advance(OLD).await;
        waiting.ripe(&slice("b", &events), 0, AGE);
        assert_eq!(waiting.notes.lock().unwrap().bots.len(), 1);
    }
}
