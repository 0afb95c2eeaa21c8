//! Bounds how many events of one sender are on the bus and not copied yet.
//!
//! A bus stream is copied in order. Without a bound, a tenant that publishes faster than the fan-out
//! copies delays the events of all others by its whole backlog. So a request waits while its sender
//! has too many uncopied events, and is refused when it has waited for [`PATIENCE`]. The requests of
//! other senders pass. Each process counts the events that it publishes itself.
//!
//! The reader says how far the stream is copied: directly to its own process, and through Redis to
//! the others, which ask only while a request waits.
//!
//! When nothing was copied for [`STUCK`], all requests pass: no process reads the bus, or the queues
//! take no events. Then the bus keeps the events.

use std::collections::VecDeque;
use std::hash::{BuildHasher as _, Hash, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashMap;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::id::Offset;
use crate::redis::{Link, RedisError, Reply, keys};

/// Maximum number of uncopied events of a sender, if no other sender waits.
const EVENTS_MAX: u64 = 700;
/// Maximum number if several senders wait.
const EVENTS_MIN: u64 = 250;
/// The reader tells other processes its progress after this number of entries. So a sender with
/// fewer events may have none.
pub(super) const TOLD_EVERY: u64 = 200;
/// When nothing was copied for this time, requests do not wait.
const STUCK: Duration = Duration::from_millis(300);
/// Maximum wait of a request.
const PATIENCE: Duration = Duration::from_millis(500);
/// Maximum number of waiting requests: of a sender, and in total. They hold memory and connections.
const WAITING_PER_SENDER: u32 = 8;
const WAITING_MAX: u32 = 64;
/// Time between two questions to Redis while a request waits, and while nothing is copied.
const ASK: Duration = Duration::from_millis(5);
const ASK_STUCK: Duration = Duration::from_millis(100);
/// Maximum number of requests of a sender that are remembered one by one.
const REMEMBERED_MAX: usize = 1_024;
/// How long events count whose request was cancelled after they were sent: they may be on the bus.
const UNKNOWN: Duration = Duration::from_secs(2);
/// Time between two removals of senders without uncopied events.
const SWEEP: Duration = Duration::from_secs(1);

/// The uncopied events on one stream that this process published, by sender.
#[derive(Debug)]
pub(crate) struct Backlog {
    link: Arc<Link>,
    /// The key with the read position of the stream. `None`: there are several, and nothing is bounded.
    key: Option<String>,
    copied: watch::Sender<Offset>,
    senders: Mutex<Senders>,
    /// When Redis was asked last.
    asked: tokio::sync::Mutex<Option<Instant>>,
    seed: RandomState,
}

/// A sender and its number of events in a request.
pub(crate) type Part = (u64, u64);

/// Too many events of a sender are not copied yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exceeded {
    /// The place of the sender in the request.
    pub(crate) place: usize,
    /// Its uncopied events.
    pub(crate) events: u64,
}

/// Events that are being published. Dropping it gives up their places.
#[derive(Debug)]
pub(crate) struct Entering<'a> {
    backlog: &'a Backlog,
    parts: Vec<Part>,
    is_sent: bool,
}

impl Entering<'_> {
    /// The events are sent from now on. If this is dropped then, they count for [`UNKNOWN`] all the same:
    /// otherwise requests that are cancelled in time would have no bound.
    pub(crate) fn sends(&mut self) {
        self.is_sent = true;
    }

    /// The events are not on the bus.
    pub(crate) fn failed(mut self) {
        self.is_sent = false;
    }

    /// The events are on the bus, the last of them at `last`.
    pub(crate) fn added(mut self, last: Offset) {
        let parts = std::mem::take(&mut self.parts);
        if parts.is_empty() {
            return;
        }
        let copied = *self.backlog.copied.borrow();
        self.backlog.senders().added(&parts, last, copied, Instant::now());
    }
}

impl Drop for Entering<'_> {
    fn drop(&mut self) {
        let parts = std::mem::take(&mut self.parts);
        if parts.is_empty() {
            return;
        }
        let mut senders = self.backlog.senders();
        if self.is_sent {
            senders.unknown.push_back((Instant::now() + UNKNOWN, parts));
        } else {
            senders.left(&parts);
        }
    }
}

impl Backlog {
    /// The backlog of `stream`. `None`: all requests pass.
    pub(crate) fn new(link: Arc<Link>, stream: Option<&str>) -> Arc<Self> {
        let key = stream.map(|stream| keys::read(link.prefix(), stream));
        let (copied, senders) = (watch::Sender::default(), Mutex::default());
        Arc::new(Self {
            link,
            key,
            copied,
            senders,
            asked: tokio::sync::Mutex::default(),
            seed: RandomState::new(),
        })
    }

    fn senders(&self) -> MutexGuard<'_, Senders> {
        self.senders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A sender as a number.
    pub(crate) fn sender(&self, name: impl Hash) -> u64 {
        self.seed.hash_one(name)
    }

    /// Everything up to `offset` is copied.
    pub(crate) fn copied(&self, offset: Offset) {
        let moved = self.copied.send_if_modified(|copied| {
            let further = offset > *copied;
            *copied = offset.max(*copied);
            further
        });
        if moved {
            self.senders().moved(Instant::now());
        }
    }

    /// Waits until the senders of a request may add its events.
    ///
    /// # Errors
    /// A sender with too many uncopied events, after a wait of at most [`PATIENCE`].
    ///
    /// # Cancel safety
    /// The request gives up its place.
    pub(crate) async fn enter(&self, parts: Vec<Part>) -> Result<Entering<'_>, Exceeded> {
        let began = Instant::now();
        if self.key.is_none() {
            return Ok(Entering { backlog: self, parts: Vec::new(), is_sent: false });
        }
        let mut copied = self.copied.subscribe();
        let mut waiting = None;
        loop {
            let entered = {
                let copied = *copied.borrow_and_update();
                self.senders().enter(&parts, copied, (began, Instant::now()))
            };
            let exceeded = match entered {
                Ok(state) => {
                    if state == Copying::Stuck {
                        let _ =
                            tokio::time::timeout_at(began + PATIENCE, self.ask(ASK_STUCK)).await;
                    }
                    return Ok(Entering { backlog: self, parts, is_sent: false });
                }
                Err(exceeded) if began.elapsed() >= PATIENCE => return Err(exceeded),
                Err(exceeded) => exceeded,
            };
            if waiting.is_none() {
                let (sender, _) = parts[exceeded.place];
                waiting = Some(Waiting::new(self, sender).ok_or(exceeded)?);
            }
            if tokio::time::timeout(ASK, copied.changed()).await.is_err() {
                // A slow Redis does not make the wait longer.
                let _ = tokio::time::timeout_at(began + PATIENCE, self.ask(ASK)).await;
            }
        }
    }

    /// As [`Self::enter`], for events that go to the bus at `until` all the same. They take no place of a
    /// waiting request. `None`: it is that time.
    ///
    /// # Cancel safety
    /// Nothing is entered.
    pub(crate) async fn enter_until(
        &self,
        parts: Vec<Part>,
        until: Instant,
    ) -> Option<Entering<'_>> {
        let (began, mut copied) = (Instant::now(), self.copied.subscribe());
        loop {
            let known = *copied.borrow_and_update();
            let enters = || self.senders().enter(&parts, known, (began, Instant::now())).is_ok();
            if self.key.is_none() || enters() {
                let parts = if self.key.is_none() { Vec::new() } else { parts };
                return Some(Entering { backlog: self, parts, is_sent: false });
            }
            if Instant::now() >= until {
                return None;
            }
            if tokio::time::timeout(ASK, copied.changed()).await.is_err() {
                let _ = tokio::time::timeout_at(until, self.ask(ASK)).await;
            }
        }
    }

    /// Asks Redis how far the stream is copied, unless it was asked within `pause`.
    async fn ask(&self, pause: Duration) {
        let Ok(mut asked) = self.asked.try_lock() else { return };
        if asked.is_some_and(|asked| asked.elapsed() < pause) {
            return;
        }
        // Without an answer, nothing counts as copied.
        if let Ok(Some(offset)) = self.told().await {
            self.copied(offset);
        }
        *asked = Some(Instant::now());
    }

    /// How far the reader says that the stream is copied.
    async fn told(&self) -> Result<Option<Offset>, RedisError> {
        let Some(key) = &self.key else { return Ok(None) };
        let command = redis::Cmd::hmget(key, &["copied"]);
        let value = self.link.command("HMGET", command).await?;
        let misread = |error| self.link.misread("HMGET", error);
        let text = Reply::new(value).map_err(misread)?.text().map_err(misread)?;
        Ok(text.parse().ok())
    }
}

/// A waiting request.
struct Waiting<'a>(&'a Backlog, u64);

impl<'a> Waiting<'a> {
    fn new(backlog: &'a Backlog, sender: u64) -> Option<Self> {
        let waits = backlog.senders().wait(sender);
        waits.then(|| Self(backlog, sender))
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.senders().waited(self.1);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Copying {
    Goes,
    Stuck,
}

#[derive(Debug)]
struct Senders {
    uncopied: FxHashMap<u64, Uncopied>,
    /// Events of cancelled requests, and until when they count.
    unknown: VecDeque<(Instant, Vec<Part>)>,
    /// Number of waiting requests, and of the senders that have any.
    waiting: u32,
    waiters: u64,
    /// When the stream was last copied further, as far as known.
    moved: Option<Instant>,
    copying: Copying,
    swept: Option<Instant>,
}

impl Default for Senders {
    fn default() -> Self {
        Self {
            uncopied: FxHashMap::default(),
            unknown: VecDeque::new(),
            waiting: 0,
            waiters: 0,
            moved: None,
            copying: Copying::Goes,
            swept: None,
        }
    }
}

/// The uncopied events of one sender.
#[derive(Debug, Default)]
struct Uncopied {
    /// Number of events that are being added to the bus.
    flying: u64,
    /// Number of events on the bus, and the last one of each request with their number.
    events: u64,
    added: VecDeque<(Offset, u64, Instant)>,
    waiting: u32,
}

impl Uncopied {
    fn total(&self) -> u64 {
        self.flying + self.events
    }

    fn forget(&mut self, copied: Offset) {
        while let Some((last, events, _)) = self.added.front()
            && *last <= copied
        {
            self.events -= events;
            self.added.pop_front();
        }
    }

    fn is_idle(&self) -> bool {
        self.total() == 0 && self.waiting == 0
    }
}

impl Senders {
    fn moved(&mut self, now: Instant) {
        (self.moved, self.copying) = (Some(now), Copying::Goes);
    }

    /// Counts the events of a request that began to wait at a time as being added, if each sender has
    /// room for its own.
    fn enter(
        &mut self,
        parts: &[Part],
        copied: Offset,
        (began, now): (Instant, Instant),
    ) -> Result<Copying, Exceeded> {
        while self.unknown.front().is_some_and(|(until, _)| *until <= now) {
            let parts = self.unknown.pop_front().map(|(_, parts)| parts);
            self.left(&parts.unwrap_or_default());
        }
        self.sweep(copied, now);
        let max = (EVENTS_MAX / self.waiters.max(1)).max(EVENTS_MIN);
        for (place, (sender, events)) in parts.iter().enumerate() {
            let uncopied = self.uncopied.entry(*sender).or_default();
            uncopied.forget(copied);
            let fits = uncopied.total() + events <= max;
            if fits || uncopied.total() <= TOLD_EVERY || self.copying == Copying::Stuck {
                continue;
            }
            // While nobody waits, Redis is not asked: what was copied meanwhile is not known.
            let since = self.moved.map_or(began, |moved| moved.max(began));
            if now - since > STUCK {
                self.copying = Copying::Stuck;
                continue;
            }
            return Err(Exceeded { place, events: uncopied.total() });
        }
        for (sender, events) in parts {
            self.uncopied.entry(*sender).or_default().flying += events;
        }
        Ok(self.copying)
    }

    /// The events are on the bus.
    fn added(&mut self, parts: &[Part], last: Offset, copied: Offset, now: Instant) {
        self.left(parts);
        if self.copying == Copying::Stuck || last <= copied {
            return;
        }
        for (sender, events) in parts {
            let uncopied = self.uncopied.entry(*sender).or_default();
            uncopied.events += events;
            let remembered = uncopied.added.len();
            match uncopied.added.back_mut() {
                // Concurrent requests may end in another order than their events have.
                Some(newest) if newest.0 >= last => newest.1 += events,
                Some(newest) if remembered >= REMEMBERED_MAX => {
                    (newest.0, newest.1) = (last, newest.1 + events);
                }
                _ => uncopied.added.push_back((last, *events, now)),
            }
        }
    }

    /// The events are not being added any more.
    fn left(&mut self, parts: &[Part]) {
        for (sender, events) in parts {
            if let Some(uncopied) = self.uncopied.get_mut(sender) {
                uncopied.flying = uncopied.flying.saturating_sub(*events);
            }
        }
    }

    /// Whether one more request of the sender may wait.
    fn wait(&mut self, sender: u64) -> bool {
        let uncopied = self.uncopied.entry(sender).or_default();
        let waits = uncopied.waiting < WAITING_PER_SENDER && self.waiting < WAITING_MAX;
        if waits {
            self.waiters += u64::from(uncopied.waiting == 0);
            uncopied.waiting += 1;
            self.waiting += 1;
        }
        waits
    }

    fn waited(&mut self, sender: u64) {
        self.waiting -= 1;
        if let Some(uncopied) = self.uncopied.get_mut(&sender) {
            uncopied.waiting -= 1;
            self.waiters -= u64::from(uncopied.waiting == 0);
        }
    }

    /// Removes the senders without uncopied events, once a second.
    fn sweep(&mut self, copied: Offset, now: Instant) {
        if self.swept.is_some_and(|swept| now - swept < SWEEP) {
            return;
        }
        self.swept = Some(now);
        let is_stuck = self.copying == Copying::Stuck;
        self.uncopied.retain(|_, uncopied| {
            uncopied.forget(copied);
            if is_stuck {
                (uncopied.events, uncopied.added) = (0, VecDeque::new());
            }
            !uncopied.is_idle()
        });
    }
}

#[cfg(test)]
mod tests;
