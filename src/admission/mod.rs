//! Admission control: which requests to accept under overload.
//!
//! 1. A request has a [`Class`]. Health and completions ([`Class::P0`]) have a separate bound and
//!    never compete with other requests.
//! 2. All others share one limit of requests in flight, which follows the latency (`limit`): when
//!    the latency rises above the one without load, fewer requests start. The lower classes may use
//!    only a part of the limit, so that a higher class finds a free place immediately.
//! 3. A request without a free place waits for a few milliseconds in a queue of bounded size
//!    (`wait_queue`). The highest class goes first. Within a class the oldest request goes first;
//!    under persistent overload the newest, because its caller has most probably not given up. A
//!    request that waits too long, or is displaced by a higher class, is shed.
//! 4. Admitted requests start by turns (`turns`), as many concurrently as there are processors, and
//!    again the highest class first.
//! 5. Callers that send much more than the others (`share`) rank below all classes while capacity is
//!    short. Strangers rank there always, and never wait: they cannot displace a caller.
//! 6. A request is refused if it cannot meet its deadline.
//!
//! A decision takes well below a microsecond (`benches/parts.rs`). It takes no lock for a refusal
//! or when a place is free. The caller provides the time; nothing here waits, and nothing depends
//! on HTTP.

pub(crate) mod aside;
mod limit;
pub(crate) mod lull;
pub(crate) mod metrics;
mod permit;
pub mod quota;
mod request;
mod share;
mod shed;
pub(crate) mod turns;
mod wait_queue;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

pub use self::aside::Crowded;
use self::aside::Lines;
use self::limit::{Limiter, Sample, Window};
pub use self::permit::{Permit, Ticket};
use self::request::Rank;
pub use self::request::{Class, Mode, Operation, Reason, Request};
use self::share::Shares;
pub use self::shed::{AsName, Refused, ShedCounts, Top};
use self::wait_queue::WaitQueue;
use crate::admission::metrics::AdmissionMetrics;

/// Maximum number of requests of [`Class::P0`] in flight.
pub const CRITICAL_MAX: usize = 256;
/// Bounds for the length of the queue of waiting requests.
const ROOM_MIN: usize = 16;
const ROOM_MAX: usize = 1_024;
/// An operation that usually misses its deadlines is still tried once per this time, in µs.
const TRY_EVERY_US: u64 = 20_000;
/// Maximum number of operations with separate latencies.
pub const OPERATIONS_MAX: usize = 256;

/// The decision about a request.
#[derive(Debug)]
pub enum Decision {
    /// It starts now.
    Begin(Permit),
    /// It waits.
    Wait(Ticket),
    /// It is refused.
    Shed(Reason),
}

/// The settings that can change while the process runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// The mode of each class.
    pub modes: [Mode; 4],
    /// Maximum number of requests in flight, whatever their latency.
    pub limit_max: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { modes: [Mode::Enforce; 4], limit_max: 1_000 }
    }
}

/// A monotonic clock: the time since some moment.
pub type Ticks = Arc<dyn Fn() -> Duration + Send + Sync>;

/// The clock of this process.
#[must_use]
pub fn system_ticks() -> Ticks {
    let start = tokio::time::Instant::now();
    Arc::new(move || start.elapsed())
}

/// Decides which requests start. All requests of the process share one instance, behind an `Arc`.
pub struct Admission {
    ticks: Ticks,
    modes: [AtomicU8; 4],
    limit: AtomicUsize,
    /// The limit for the lower classes, which a probe lowers.
    limit_low: AtomicUsize,
    limit_max: AtomicUsize,
    in_flight: AtomicUsize,
    critical: AtomicUsize,
    /// Per rank.
    waiting: [AtomicUsize; Rank::ALL.len()],
    /// Maximum number of waiting requests: those that can be served within the target of the first
    /// class.
    room_max: AtomicUsize,
    room: Mutex<WaitQueue<oneshot::Sender<Result<Permit, Reason>>>>,
    limiter: Mutex<Limiter>,
    /// Per operation, µs; 0: unknown.
    medians: Box<[AtomicU32]>,
    /// Per operation, the time of the last request that was tried although its deadline seemed too
    /// short, µs.
    tried: Box<[AtomicU64]>,
    /// Whether a request found no free place since the last evaluation.
    is_bound: AtomicBool,
    /// Number of requests shed for lack of capacity since the last evaluation.
    shed_lately: AtomicU64,
    shares: Shares,
    lines: Lines,
    counts: ShedCounts,
    metrics: AdmissionMetrics,
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admission").field("state", &self.state()).finish_non_exhaustive()
    }
}

/// The current state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// Requests in flight, without critical ones; a large request counts more than once.
    pub in_flight: usize,
    /// The limit of requests in flight.
    pub limit: usize,
    /// Critical requests in flight.
    pub critical: usize,
    /// Number of waiting requests, per class. Those of heavy callers count for the lowest class.
    pub waiting: [usize; 4],
}

impl Admission {
    /// With no request in flight.
    #[must_use]
    pub fn new(settings: Settings, ticks: Ticks) -> Arc<Self> {
        let limiter = Limiter::new(settings.limit_max);
        let limit = limiter.limit();
        let admission = Self {
            ticks,
            modes: Default::default(),
            limit: AtomicUsize::new(limit),
            limit_low: AtomicUsize::new(limit),
            limit_max: AtomicUsize::new(settings.limit_max),
            in_flight: AtomicUsize::new(0),
            critical: AtomicUsize::new(0),
            waiting: Default::default(),
            room_max: AtomicUsize::new(limit.clamp(ROOM_MIN, ROOM_MAX)),
            room: Mutex::default(),
            limiter: Mutex::new(limiter),
            medians: (0..OPERATIONS_MAX).map(|_| AtomicU32::new(0)).collect(),
            tried: (0..OPERATIONS_MAX).map(|_| AtomicU64::new(0)).collect(),
            is_bound: AtomicBool::new(false),
            shed_lately: AtomicU64::new(0),
            shares: Shares::new(),
            lines: Lines::default(),
            counts: ShedCounts::default(),
            metrics: AdmissionMetrics::new(),
        };
        admission.metrics.limit.set(small(limit));
        admission.apply(settings);
        Arc::new(admission)
    }

    /// Changes the settings; requests in flight continue.
    pub fn apply(&self, settings: Settings) {
        for (mode, new) in self.modes.iter().zip(settings.modes) {
            mode.store(new as u8, Ordering::Relaxed);
        }
        self.limit_max.store(settings.limit_max, Ordering::Relaxed);
    }

    /// The clock of deadlines.
    #[must_use]
    pub fn now(&self) -> Duration {
        (self.ticks)()
    }

    /// The current state.
    #[must_use]
    pub fn state(&self) -> State {
        let read = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        let mut waiting = [0, 1, 2, 3].map(|class| read(&self.waiting[class]));
        waiting[Class::P3 as usize] += read(&self.waiting[Rank::Last as usize]);
        let (in_flight, critical) = (read(&self.in_flight), read(&self.critical));
        State { in_flight, limit: read(&self.limit), critical, waiting }
    }

    /// Statistics of shed requests and their callers.
    #[must_use]
    pub fn counts(&self) -> &ShedCounts {
        &self.counts
    }

    /// Decides whether a request may start.
    #[must_use]
    pub fn ask(self: &Arc<Self>, ask: &Request) -> Decision {
        let mode = self.mode(ask.class);
        let now = self.now();
        match mode {
            Mode::Off => return Decision::Begin(self.force(ask, now)),
            Mode::Refuse => return self.shed(ask, Reason::Switch),
            Mode::Enforce | Mode::Shadow => {}
        }
        if ask.class == Class::P0 {
            return self.ask_critical(ask, now, mode);
        }
        let is_heavy = self.shares.judge(ask, now);
        let decided = self.decide(ask, is_heavy, now, mode == Mode::Shadow);
        match (decided, mode) {
            (Ok(answer), _) => answer,
            (Err(_), Mode::Shadow) => {
                self.metrics.decided(ask.class, Counted::Shadow);
                Decision::Begin(self.force(ask, now))
            }
            (Err(reason), _) => self.shed(ask, reason),
        }
    }

    fn ask_critical(self: &Arc<Self>, ask: &Request, now: Duration, mode: Mode) -> Decision {
        if self.critical.fetch_add(1, Ordering::Relaxed) < CRITICAL_MAX || mode == Mode::Shadow {
            self.metrics.decided(ask.class, Counted::Admitted);
            return Decision::Begin(self.permit(ask, now));
        }
        self.critical.fetch_sub(1, Ordering::Relaxed);
        self.shed(ask, Reason::Critical)
    }

    fn decide(
        self: &Arc<Self>,
        ask: &Request,
        is_heavy: bool,
        now: Duration,
        is_shadow: bool,
    ) -> Result<Decision, Reason> {
        if let Some(deadline) = ask.deadline {
            let is_over = deadline <= now;
            if is_over || (deadline <= now + self.median(ask.operation) && !self.is_try(ask, now)) {
                return Err(Reason::Deadline);
            }
        }
        let is_low = ask.is_stranger || (is_heavy && self.is_tight());
        let rank = if is_low { Rank::Last } else { ask.class.rank() };
        if self.ahead(rank) == 0 && self.take(rank) {
            self.metrics.decided(ask.class, Counted::Admitted);
            return Ok(Decision::Begin(self.permit(ask, now)));
        }
        if ask.is_stranger {
            return Err(Reason::Capacity);
        }
        self.is_bound.store(true, Ordering::Relaxed);
        let no_room = if is_low { Reason::Share } else { Reason::Capacity };
        let (waiting, room_max) = (self.ahead(Rank::Last), self.room_max.load(Ordering::Relaxed));
        if is_shadow || (waiting >= room_max && waiting == self.ahead(rank)) {
            return Err(no_room);
        }
        let (tell, told) = oneshot::channel();
        let mut room = self.room();
        let (serial, patience) = room.enter(*ask, rank, now, tell);
        self.waiting[rank as usize].fetch_add(1, Ordering::SeqCst);
        // A place may have become free since the first attempt.
        self.hand_out(&mut room, now);
        if room.len() > room_max
            && let Some((lowest, out)) = room.displace()
        {
            self.waiting[lowest as usize].fetch_sub(1, Ordering::SeqCst);
            let _ = out.send(Err(Reason::Displaced));
        }
        drop(room);
        let admission = Arc::clone(self);
        Ok(Decision::Wait(Ticket {
            admission,
            ask: *ask,
            rank,
            serial,
            since: now,
            patience,
            told,
        }))
    }

    /// Gives free places to waiting requests.
    fn hand_out(
        self: &Arc<Self>,
        room: &mut WaitQueue<oneshot::Sender<Result<Permit, Reason>>>,
        now: Duration,
    ) {
        while let Some(rank) = room.first() {
            if !self.take(rank) {
                return;
            }
            let mut given = false;
            while let Some(left) = room.leave(rank, now) {
                self.waiting[rank as usize].fetch_sub(1, Ordering::SeqCst);
                if left.is_late {
                    let _ = left.tell.send(Err(Reason::Wait));
                    continue;
                }
                match left.tell.send(Ok(self.permit(&left.ask, now))) {
                    Ok(()) => {
                        given = true;
                        break;
                    }
                    // The request was cancelled. Its permit must not end here, while the queue is
                    // locked.
                    Err(Ok(permit)) => permit.forget(),
                    Err(Err(_)) => {}
                }
            }
            if !given {
                self.in_flight.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    /// Ends a request. `is_answered`: its duration is a valid sample.
    fn end(self: &Arc<Self>, permit: &Permit, is_answered: bool) {
        let Permit { operation, class, began, given, places, .. } = *permit;
        if class == Class::P0 {
            self.critical.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let in_flight = self.in_flight.fetch_sub(places, Ordering::SeqCst);
        let now = self.now();
        if is_answered {
            // If the lock is taken, this sample is skipped.
            if let Ok(mut limiter) = self.limiter.try_lock() {
                let took = now.saturating_sub(began);
                let sample = Sample { operation, took, given, in_flight, places };
                if let Some(window) = limiter.observe(sample, now) {
                    self.adjust(&mut limiter, window, now);
                }
            }
        }
        self.fill(now);
    }

    /// Lets waiting requests in after places became free.
    fn fill(self: &Arc<Self>, now: Duration) {
        if self.ahead(Rank::Last) > 0 {
            self.hand_out(&mut self.room(), now);
        }
    }

    fn adjust(&self, limiter: &mut Limiter, window: Window, now: Duration) {
        let is_bound = self.is_bound.swap(false, Ordering::Relaxed);
        let shed = self.shed_lately.swap(0, Ordering::Relaxed);
        let max = self.limit_max.load(Ordering::Relaxed);
        let verdict = limiter.adjust(&window, is_bound, max, now, |operation, median| {
            self.medians[usize::from(operation.0) % OPERATIONS_MAX]
                .store(median, Ordering::Relaxed);
        });
        let through = window.answered_in(Rank::P1.target());
        let room_max = through.max(verdict.limit).clamp(ROOM_MIN, ROOM_MAX);
        self.room_max.store(room_max, Ordering::Relaxed);
        self.limit.store(verdict.limit, Ordering::SeqCst);
        self.limit_low.store(verdict.limit_low, Ordering::SeqCst);
        self.metrics.limit.set(small(verdict.limit));
        self.metrics.in_flight.set(small(self.in_flight.load(Ordering::Relaxed)));
        if verdict.had_room {
            self.metrics.false_positives.increment(shed);
        }
        self.metrics.demand_ratio.set(verdict.demand_ratio(shed));
    }

    fn shed(&self, ask: &Request, reason: Reason) -> Decision {
        self.refused(ask.class, reason);
        Decision::Shed(reason)
    }

    /// Counts a refusal, also one that another module decided.
    pub fn refused(&self, class: Class, reason: Reason) {
        if reason.is_want_of_room() {
            self.shed_lately.fetch_add(1, Ordering::Relaxed);
        }
        self.metrics.decided(class, Counted::Shed);
        self.counts.note(class, reason);
    }

    /// Records how long a request waited, for a place and for its turn, until it started or was
    /// refused.
    pub(crate) fn waited(&self, class: Class, waited: Duration) {
        self.metrics.waited(class, waited);
    }

    /// Starts a request regardless of the limit.
    fn force(self: &Arc<Self>, ask: &Request, now: Duration) -> Permit {
        if ask.class == Class::P0 {
            self.critical.fetch_add(1, Ordering::Relaxed);
        } else {
            self.in_flight.fetch_add(1, Ordering::SeqCst);
        }
        self.permit(ask, now)
    }

    fn permit(self: &Arc<Self>, ask: &Request, began: Duration) -> Permit {
        let given = ask.deadline.map(|deadline| deadline.saturating_sub(began));
        let mut permit = Permit::new(Arc::clone(self), ask, began, given);
        permit.grow(ask.places);
        permit
    }

    /// The number of places in flight below which one is free for the rank.
    fn allowed(&self, rank: Rank) -> usize {
        let limit = if rank <= Rank::P1 { &self.limit } else { &self.limit_low };
        rank.allowed(limit.load(Ordering::SeqCst), self.limit_max.load(Ordering::Relaxed))
    }

    /// Takes a place in flight, if one is free for the rank.
    fn take(&self, rank: Rank) -> bool {
        let allowed = self.allowed(rank);
        let more = |count| (count < allowed).then_some(count + 1);
        self.in_flight.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_ok()
    }

    /// Number of waiting requests of the same or a higher rank.
    fn ahead(&self, rank: Rank) -> usize {
        self.waiting[..=rank as usize].iter().map(|count| count.load(Ordering::SeqCst)).sum()
    }

    /// Whether capacity is short: requests wait, or at least three quarters of the limit is in use.
    pub(crate) fn is_tight(&self) -> bool {
        let limit = self.limit.load(Ordering::Relaxed);
        self.ahead(Rank::Last) > 0 || self.in_flight.load(Ordering::Relaxed) >= limit - limit / 4
    }

    /// Whether to try a request although such requests usually take too long. Otherwise Fairlane
    /// would never notice that they became faster.
    fn is_try(&self, ask: &Request, now: Duration) -> bool {
        let tried = &self.tried[usize::from(ask.operation.0) % OPERATIONS_MAX];
        let last = tried.load(Ordering::Relaxed);
        let now = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
        let is_due = now.saturating_sub(last) >= TRY_EVERY_US;
        is_due && tried.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// The median latency of such a request.
    #[must_use]
    pub fn median(&self, operation: Operation) -> Duration {
        let median =
            self.medians[usize::from(operation.0) % OPERATIONS_MAX].load(Ordering::Relaxed);
        Duration::from_micros(median.into())
    }

    fn mode(&self, class: Class) -> Mode {
        let mode = self.modes[class as usize].load(Ordering::Relaxed);
        Mode::ALL.get(usize::from(mode)).copied().unwrap_or_default()
    }

    fn room(&self) -> MutexGuard<'_, WaitQueue<oneshot::Sender<Result<Permit, Reason>>>> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The result that is counted for every request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Counted {
    Admitted,
    Waited,
    Shed,
    Shadow,
}

impl Counted {
    pub(crate) const ALL: [Self; 4] = [Self::Admitted, Self::Waited, Self::Shed, Self::Shadow];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Admitted => "admitted",
            Self::Waited => "waited",
            Self::Shed => "shed",
            Self::Shadow => "shadow",
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a count of requests")]
fn small(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests;
