//! What a worker in this process has handled. The programs of Node.js count in the same way.

use std::sync::{Mutex, MutexGuard, PoisonError};

use fairlane::clock::{Clock, SystemClock, micros};
use tokio::time::Instant;

use super::judge::Entry;

/// The starts and ends of handlings, and the events that are completed.
#[derive(Debug)]
pub(super) struct Tally {
    inner: Mutex<Inner>,
    /// Number of places for the events of a tenant.
    stride: usize,
}

#[derive(Debug)]
struct Inner {
    log: Vec<Entry>,
    completed: Vec<bool>,
    done: u64,
    started: Instant,
    last: Option<Instant>,
}

/// An event as a worker sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    pub(super) tenant: u32,
    pub(super) position: u32,
    /// When it was due, in microseconds since 1970.
    pub(super) due: u64,
}

impl Seen {
    /// The tenant and the position are in the names that the bench gave. `None` for other names.
    pub(super) fn new(bot: &str, id: &str, due: u64) -> Option<Self> {
        let tenant = bot.strip_prefix("bot-")?.parse().ok()?;
        Some(Self { tenant, position: id.parse().ok()?, due })
    }
}

impl Tally {
    pub(super) fn new(per_tenant: &[u32]) -> Self {
        let stride = per_tenant.iter().copied().max().unwrap_or_default() as usize;
        let total = per_tenant.iter().map(|events| *events as usize).sum::<usize>();
        let inner = Inner {
            log: Vec::with_capacity(2 * total),
            completed: vec![false; stride * per_tenant.len()],
            done: 0,
            started: Instant::now(),
            last: None,
        };
        Self { inner: Mutex::new(inner), stride }
    }

    /// The worker starts now.
    pub(super) fn begin(&self) {
        self.lock().started = Instant::now();
    }

    pub(super) fn started(&self, event: Seen) {
        self.lock().note(event, false);
    }

    pub(super) fn ended(&self, event: Seen) {
        self.lock().note(event, true);
    }

    /// Events that took no time, one after the other.
    pub(super) fn handled(&self, events: impl Iterator<Item = Seen>) {
        let mut inner = self.lock();
        for event in events {
            inner.note(event, false);
            inner.note(event, true);
        }
    }

    /// The queue will not hand out these events again.
    pub(super) fn completed(&self, events: impl Iterator<Item = Seen>) {
        let mut inner = self.lock();
        for event in events {
            let place = event.tenant as usize * self.stride + event.position as usize;
            if let Some(completed) = inner.completed.get_mut(place)
                && !std::mem::replace(completed, true)
            {
                inner.done += 1;
            }
        }
        inner.last = Some(Instant::now());
    }

    /// Number of different events that are completed.
    pub(super) fn done(&self) -> u64 {
        self.lock().done
    }

    /// The log, and the seconds until the last event was completed.
    pub(super) fn take(&self) -> (Vec<Entry>, f64) {
        let mut inner = self.lock();
        let last = inner.last.unwrap_or(inner.started);
        (std::mem::take(&mut inner.log), (last - inner.started).as_secs_f64())
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn note(&mut self, Seen { tenant, position, due }: Seen, is_end: bool) {
        let number = |us| u32::try_from(us).unwrap_or(u32::MAX);
        let wait = if is_end { 0 } else { micros(SystemClock.now()).saturating_sub(due) };
        let at_us = number(micros(self.started.elapsed()));
        self.log.push(Entry { tenant, position, is_end, wait_us: number(wait), at_us });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_that_is_completed_twice_counts_once() {
        let tally = Tally::new(&[2, 1]);
        let event = |bot, id| Seen::new(bot, id, 0).unwrap();
        let (first, second, other) =
            (event("bot-0", "0"), event("bot-0", "1"), event("bot-1", "0"));
        tally.started(first);
        tally.ended(first);
        tally.completed([first, second, first].into_iter());
        tally.completed([second, other].into_iter());
        assert_eq!(tally.done(), 3);
        let (log, seconds) = tally.take();
        assert_eq!(log.iter().map(|entry| entry.is_end).collect::<Vec<_>>(), [false, true]);
        assert!(log[0].wait_us > 0 && seconds > 0.0);
        assert!(Seen::new("heavy-0", "0", 0).is_none() && Seen::new("bot-0", "x", 0).is_none());
    }
}
