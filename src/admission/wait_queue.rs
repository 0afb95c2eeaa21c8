//! The queue of waiting requests. The caller bounds its length; this module bounds the waiting
//! time.
//!
//! Controlled delay with adaptive order (Nichols and Jacobson; Maurer, "Fail at Scale"): while the
//! queue of a class was empty within its interval, requests wait in order of arrival, up to the
//! interval. Once the queue has not been empty for that long, the overload persists: requests then
//! wait only up to the target, and the newest goes first.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Rank, Request};

/// Per rank, one queue for requests that continue something and one for others.
const QUEUES: usize = 2 * Rank::ALL.len();

/// Waiting requests. `T` tells each one the decision.
#[derive(Debug)]
pub(super) struct WaitQueue<T> {
    queues: [VecDeque<Waiter<T>>; QUEUES],
    /// Per rank, when its queue was last empty.
    empty_at: [Duration; Rank::ALL.len()],
    serial: u64,
    len: usize,
}

#[derive(Debug)]
struct Waiter<T> {
    serial: u64,
    ask: Request,
    since: Duration,
    tell: T,
}

/// The result for a request that left the queue.
#[derive(Debug)]
pub(super) struct Leaving<T> {
    pub(super) ask: Request,
    pub(super) tell: T,
    /// It waited too long.
    pub(super) is_late: bool,
}

impl<T> Default for WaitQueue<T> {
    fn default() -> Self {
        let queues = std::array::from_fn(|_| VecDeque::new());
        Self { queues, empty_at: [Duration::ZERO; Rank::ALL.len()], serial: 0, len: 0 }
    }
}

fn places(rank: Rank) -> [usize; 2] {
    [rank as usize * 2, rank as usize * 2 + 1]
}

impl<T> WaitQueue<T> {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Adds a request; returns its number, and its maximum waiting time.
    pub(super) fn enter(
        &mut self,
        ask: Request,
        rank: Rank,
        now: Duration,
        tell: T,
    ) -> (u64, Duration) {
        if self.is_empty(rank) {
            self.empty_at[rank as usize] = now;
        }
        self.serial += 1;
        let [continuing, beginning] = places(rank);
        let queue = if ask.continues { continuing } else { beginning };
        self.queues[queue].push_back(Waiter { serial: self.serial, ask, since: now, tell });
        self.len += 1;
        (self.serial, self.patience(rank, now))
    }

    /// The rank of the next request.
    pub(super) fn first(&self) -> Option<Rank> {
        Rank::ALL.into_iter().find(|rank| !self.is_empty(*rank))
    }

    /// Takes the next request of a rank.
    pub(super) fn leave(&mut self, rank: Rank, now: Duration) -> Option<Leaving<T>> {
        let is_rule = self.is_rule(rank, now);
        let patience = self.patience(rank, now);
        let queue = places(rank).into_iter().find(|queue| !self.queues[*queue].is_empty())?;
        let queue = &mut self.queues[queue];
        let waiter = if is_rule { queue.pop_back() } else { queue.pop_front() }?;
        self.len -= 1;
        let is_late = now.saturating_sub(waiter.since) > patience;
        Some(Leaving { ask: waiter.ask, tell: waiter.tell, is_late })
    }

    /// Removes the request of the lowest rank that has waited longest.
    pub(super) fn displace(&mut self) -> Option<(Rank, T)> {
        let rank = Rank::ALL.into_iter().rev().find(|rank| !self.is_empty(*rank))?;
        let [continuing, beginning] = places(rank);
        let queue = if self.queues[beginning].is_empty() { continuing } else { beginning };
        let waiter = self.queues[queue].pop_front()?;
        self.len -= 1;
        Some((rank, waiter.tell))
    }

    /// Removes a request by its number; returns whether it was there.
    pub(super) fn remove(&mut self, rank: Rank, serial: u64) -> bool {
        for queue in places(rank) {
            let queue = &mut self.queues[queue];
            // Sorted by number.
            if let Ok(place) = queue.binary_search_by_key(&serial, |waiter| waiter.serial) {
                queue.remove(place);
                self.len -= 1;
                return true;
            }
        }
        false
    }

    fn is_empty(&self, rank: Rank) -> bool {
        places(rank).into_iter().all(|queue| self.queues[queue].is_empty())
    }

    /// Whether the queue has not been empty for longer than its interval.
    fn is_rule(&self, rank: Rank, now: Duration) -> bool {
        !self.is_empty(rank) && now.saturating_sub(self.empty_at[rank as usize]) > rank.interval()
    }

    fn patience(&self, rank: Rank, now: Duration) -> Duration {
        if self.is_rule(rank, now) { rank.target() } else { rank.interval() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Class, Operation};
    use super::*;

    fn ask(class: Class, continues: bool) -> Request {
        let operation = Operation(0);
        let (caller, asks_again, is_stranger, deadline, places) = (0, false, false, None, 1);
        Request { class, operation, continues, caller, asks_again, is_stranger, deadline, places }
    }

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn enter(room: &mut WaitQueue<&'static str>, class: Class, ms: u64, name: &'static str) -> u64 {
        room.enter(ask(class, false), class.rank(), at(ms), name).0
    }

    fn leave(room: &mut WaitQueue<&'static str>, ms: u64) -> Option<(&'static str, bool)> {
        let rank = room.first()?;
        room.leave(rank, at(ms)).map(|left| (left.tell, left.is_late))
    }

    #[test]
    fn the_highest_class_leaves_first_and_within_one_continued_work_and_then_the_oldest() {
        let mut room = WaitQueue::default();
        enter(&mut room, Class::P3, 0, "low");
        enter(&mut room, Class::P2, 1, "first");
        enter(&mut room, Class::P2, 2, "second");
        room.enter(ask(Class::P2, true), Rank::P2, at(3), "later page");
        enter(&mut room, Class::P1, 4, "high");
        let order: Vec<_> = std::iter::from_fn(|| leave(&mut room, 5)).collect();
        let names = ["high", "later page", "first", "second", "low"];
        assert_eq!(order, names.map(|name| (name, false)));
        assert_eq!(room.len(), 0);
    }

    #[test]
    fn under_lasting_overload_the_newest_leaves_first_and_none_waits_beyond_the_target() {
        let mut room = WaitQueue::default();
        enter(&mut room, Class::P2, 0, "old");
        enter(&mut room, Class::P2, 10, "older than the target");
        let (_, patience) = room.enter(ask(Class::P2, false), Rank::P2, at(21), "new");
        assert_eq!(patience, Rank::P2.target());
        assert_eq!(leave(&mut room, 21), Some(("new", false)));
        assert_eq!(leave(&mut room, 21), Some(("older than the target", true)));
        assert_eq!(leave(&mut room, 21), Some(("old", true)));
        let (_, patience) = room.enter(ask(Class::P2, false), Rank::P2, at(22), "rested");
        assert_eq!(patience, Rank::P2.interval(), "the queue was empty again");
    }

    #[test]
    fn a_full_queue_evicts_the_lowest_class_first() {
        let mut room = WaitQueue::default();
        let first = enter(&mut room, Class::P3, 0, "low");
        enter(&mut room, Class::P1, 0, "high");
        assert!(room.remove(Rank::P3, first), "a client that left");
        assert!(!room.remove(Rank::P3, first));
        enter(&mut room, Class::P2, 1, "middle");
        assert_eq!(room.displace(), Some((Rank::P2, "middle")));
        assert_eq!(room.displace(), Some((Rank::P1, "high")));
        assert!(room.displace().is_none());
    }

    #[test]
    fn a_request_may_wait_exactly_its_time_and_a_queue_exactly_its_interval() {
        let mut room = WaitQueue::default();
        enter(&mut room, Class::P2, 0, "first");
        enter(&mut room, Class::P2, 1, "second");
        assert_eq!(leave(&mut room, 20), Some(("first", false)), "the oldest, in time");
        enter(&mut room, Class::P2, 20, "third");
        assert_eq!(leave(&mut room, 21), Some(("third", false)), "not empty for 21 ms");
        assert_eq!(leave(&mut room, 21), Some(("second", true)));
    }
}
