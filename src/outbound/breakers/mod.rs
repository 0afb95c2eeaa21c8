//! Decides whether a bot's request to a host is sent now: by circuit breakers, the number of
//! concurrent requests, and the rate.
//!
//! Tenants choose the URLs, and many call the same host. So each bot has a breaker of its own at
//! each host, and its failures delay no other bot:
//!
//! | breaker | opens after | lets pass while open |
//! |---|---|---|
//! | of a bot at a host | five consecutive failures of this bot | nothing, then one probe |
//! | of a host | five consecutive connection errors | nothing, then one probe of each bot |
//! | of a host | five consecutive failures, of at least three bots | requests of bots without a failure; then one probe of each bot |
//!
//! A breaker is open for 5 s, which doubles up to 60 s with each probe that fails. A success of any
//! bot closes the breaker of the host. A failure of a bot while that is open opens its own one.
//!
//! The places of a host and its rate are shared as `places` describes: what one bot can take
//! leaves some for the next one. A refused request gets a time to return, spread by the speed of
//! its bot at this host. Those that breakers refuse also have turns over all hosts of the bot: however
//! many ports of its own server a tenant calls, they do not return more often.
//!
//! The connections that stay open between requests are bounded too: those to `KEPT_MAX` hosts of a
//! bot at a time. A tenant could otherwise call each port of its own server once, and leave a
//! connection to each.
//!
//! The memory is bounded: a bot has at most `HOSTS_MAX` hosts and a process at most
//! `SEATS_MAX` pairs of bot and host. Beyond that, those that were not used for the longest time
//! are forgotten, which closes their breakers: they open again after five failures.

mod circuit;
mod host;
mod shown;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use utoipa::ToSchema;

use self::circuit::OPEN_FIRST;
pub(crate) use self::host::Outcome;
use self::host::{Host, Seat, Way};
pub(crate) use self::shown::prepare;
use super::places::{AFTER_BREAKER, Cause, Refused, Turns, may_take};
use super::{CheckedUrl, IDLE};
use crate::id::BotId;

/// Bots and hosts without a call for this time are forgotten.
const FORGET: Duration = Duration::from_secs(600);
/// Minimum interval of searching for them.
const SWEEP: Duration = Duration::from_secs(10);
/// Maximum number of hosts of a bot that are remembered.
const HOSTS_MAX: usize = 256;
/// Maximum number of pairs of a bot and a host that are remembered.
const SEATS_MAX: usize = 65_536;
/// Maximum number of hosts of a bot to which connections stay open after a request.
const KEPT_MAX: usize = 64;
/// A host may exceed its rate by the requests of this time, and by as many again of bots that use
/// less than their part of it.
const BURST: Duration = Duration::from_millis(100);

/// The limits of each host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Maximum number of concurrent requests of one bot, at least 1.
    pub(crate) per_bot: usize,
    /// Maximum number of concurrent requests of all bots, at least 1.
    pub(crate) per_host: usize,
    /// Requests per second of all bots; 0: no bound.
    pub(crate) rate: u64,
}

/// A server of others: its scheme, name and port. With another scheme it is another server: a
/// tenant could otherwise cause connection errors at a port by the wrong one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Target {
    secure: bool,
    host: String,
    port: u16,
}

impl From<&CheckedUrl> for Target {
    fn from(url: &CheckedUrl) -> Self {
        let secure = url.expose().scheme() == "https";
        Self { secure, host: url.host().to_owned(), port: url.port() }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// The breakers of all hosts of a process.
#[derive(Debug)]
pub(crate) struct Breakers {
    limits: Limits,
    /// The interval between two requests to a host.
    interval: Duration,
    begun: Instant,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    hosts: HashMap<Arc<Target>, Host>,
    bots: HashMap<BotId, Seats>,
    /// Number of pairs of a bot and a host.
    seats: usize,
    /// When unused ones were last removed.
    swept: Option<Instant>,
}

/// A bot at its hosts.
#[derive(Debug)]
struct Seats {
    at: HashMap<Arc<Target>, Seat>,
    /// The turns of its requests that breakers refused.
    turns: Turns,
}

/// An open circuit breaker: that of the host, or of a bot that calls it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Breaker {
    /// The host and its port.
    pub host: String,
    /// Number of consecutive failures: the largest one, if several breakers of the host are open.
    pub failures: u32,
    /// Seconds until the next probe; 0: now.
    pub seconds: u64,
}

/// The decision on a request.
#[derive(Debug)]
pub(crate) enum Permission {
    /// Send it, and report the result.
    Go(Pass),
    /// The breaker is open; return after this time.
    Open(Duration),
    /// The host or the bot has reached its limit of concurrent requests or its rate; return after
    /// this time.
    Full(Duration),
}

impl Breakers {
    /// Limits each host to `limits`.
    pub(crate) fn new(limits: Limits) -> Arc<Self> {
        let Limits { per_bot, per_host, rate } = limits;
        let limits = Limits { per_bot: per_bot.max(1), per_host: per_host.max(1), rate };
        let interval =
            Duration::from_nanos(1_000_000_000_u64.checked_div(rate).unwrap_or_default());
        Arc::new(Self { limits, interval, begun: Instant::now(), state: Mutex::default() })
    }

    /// Decides whether a request of `bot` to `target` may be sent, and reserves its place. `again`: it
    /// was refused before.
    pub(crate) fn ask(
        self: &Arc<Self>,
        bot: &BotId,
        target: Target,
        again: bool,
        now: Instant,
    ) -> Permission {
        let mut state = self.lock();
        let target = state.make_room(bot, target, now);
        let keeps = state.keeps(bot, &target, now);
        let State { hosts, bots, .. } = &mut *state;
        let Some((host, seat, turns)) = seat(hosts, bots, bot, &target) else {
            unreachable!("make_room creates both");
        };
        (seat.used, seat.keeps) = (now, Some(keeps));
        let active = host.count(seat, now.saturating_duration_since(self.begun).as_secs() + 1);
        let way = match host.way(seat, now) {
            Ok(way) => way,
            Err(until) => {
                let cause = shut(until, turns, now);
                return Permission::Open(self.turn_away((host, seat), (active, again), cause, now));
            }
        };
        if !way.is_probe() {
            let free = self.limits.per_host.saturating_sub(host.under_way);
            // The part of a bot that uses less than its share of the rate is kept for it.
            let ahead = if seat.even <= now { BURST * 2 } else { BURST };
            let cause = if seat.under_way >= self.limits.per_bot || !may_take(seat.under_way, free)
            {
                Some(Cause::Places)
            } else {
                (host.even > now + ahead).then_some(Cause::Rate)
            };
            if let Some(cause) = cause {
                return Permission::Full(self.turn_away((host, seat), (active, again), cause, now));
            }
        }
        host.even = host.even.max(now) + self.interval;
        let among = u32::try_from(active).unwrap_or(u32::MAX).max(1);
        seat.even = seat.even.max(now) + self.interval * among;
        host.start(seat, way, again, now);
        let breakers = Arc::clone(self);
        let bot = bot.clone();
        Permission::Go(Pass { breakers, bot, target, began: now, way, keeps, said: false })
    }

    /// The time until a request may return, if a breaker refuses those of `bot` to `target`. Reserves
    /// nothing.
    pub(crate) fn shut(
        &self,
        bot: &BotId,
        target: &Target,
        again: bool,
        now: Instant,
    ) -> Option<Duration> {
        let mut state = self.lock();
        let State { hosts, bots, .. } = &mut *state;
        let (host, seat, turns) = seat(hosts, bots, bot, target)?;
        let cause = shut(host.way(seat, now).err()?, turns, now);
        Some(self.turn_away((host, seat), (1, again), cause, now))
    }

    /// The time until a refused request may return, spread by the speed of the bot at the host, which
    /// `active` bots call. `again`: it was refused before.
    fn turn_away(
        &self,
        (host, seat): (&mut Host, &mut Seat),
        (active, again): (usize, bool),
        cause: Cause,
        now: Instant,
    ) -> Duration {
        host.waiting.refuse(again, now);
        let active = active.max(1);
        let places = self.limits.per_bot.min(self.limits.per_host / active);
        let interval = self.interval * u32::try_from(active).unwrap_or(u32::MAX);
        let (of_host, all) = (self.interval, self.interval.saturating_mul(host.waiting.count()));
        seat.line.turn_away(Refused { now, cause, again, places, interval, of_host, all })
    }

    /// The hosts with open breakers, those with the largest numbers of failures first. Without those
    /// that are no longer called: it forgets them.
    pub(crate) fn open(&self, now: Instant) -> Vec<Breaker> {
        let mut state = self.lock();
        state.sweep(now);
        let circuits = state.hosts.iter().filter(|(_, host)| host.shown);
        let circuits = circuits.map(|(target, host)| (target, &host.circuit));
        let seats = state.bots.values().flat_map(|seats| &seats.at);
        let seats = seats.map(|(target, seat)| (target, &seat.circuit));
        let mut open: HashMap<&Arc<Target>, Breaker> = HashMap::new();
        for (target, circuit) in circuits.chain(seats) {
            let Some(until) = circuit.open_until() else { continue };
            let seconds = until.saturating_duration_since(now).as_secs_f64().ceil();
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a pause")]
            let seconds = seconds as u64;
            let failures = circuit.failures;
            let new = || Breaker { host: target.to_string(), failures, seconds };
            let breaker = open.entry(target).or_insert_with(new);
            breaker.failures = breaker.failures.max(failures);
            breaker.seconds = breaker.seconds.min(seconds);
        }
        let mut open: Vec<Breaker> = open.into_values().collect();
        open.sort_by(|a, b| (b.failures, &a.host).cmp(&(a.failures, &b.host)));
        open
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn said(&self, pass: &Pass, now: Instant, outcome: Option<Outcome>) {
        let mut state = self.lock();
        let State { hosts, bots, .. } = &mut *state;
        let Some((host, seat, _)) = seat(hosts, bots, &pass.bot, &pass.target) else { return };
        host.end(seat, pass.way);
        let Some(outcome) = outcome else { return };
        seat.line.took(now.saturating_duration_since(pass.began));
        host.learn((&pass.bot, seat), pass.way, outcome, now);
        state.show(&pass.target);
    }
}

/// A host, a bot's seat there, and the turns of the bot after breakers.
fn seat<'a>(
    hosts: &'a mut HashMap<Arc<Target>, Host>,
    bots: &'a mut HashMap<BotId, Seats>,
    bot: &BotId,
    target: &Target,
) -> Option<(&'a mut Host, &'a mut Seat, &'a mut Turns)> {
    let Seats { at, turns } = bots.get_mut(bot)?;
    Some((hosts.get_mut(target)?, at.get_mut(target)?, turns))
}

/// A breaker is open until then; `None`: while others probe.
fn shut(until: Option<Instant>, turns: &mut Turns, now: Instant) -> Cause {
    let turn = turns.take(now, Duration::ZERO, AFTER_BREAKER);
    Cause::Breaker(until.unwrap_or(now + OPEN_FIRST), turn)
}

impl State {
    /// Creates the seat of `bot` at `target` if it has none. Forgets others if there are too many.
    fn make_room(&mut self, bot: &BotId, target: Target, now: Instant) -> Arc<Target> {
        if let Some(Seats { at: seats, .. }) = self.bots.get(bot) {
            if let Some((target, _)) = seats.get_key_value(&target) {
                return Arc::clone(target);
            }
            if seats.len() >= HOSTS_MAX {
                let uses = seats.values().map(|seat| seat.used).collect();
                let before = median(uses);
                self.forget(Some(bot), |seat| seat.used <= before);
            }
        }
        if self.seats >= SEATS_MAX {
            let seats = self.bots.values().flat_map(|seats| seats.at.values());
            let uses = seats.map(|seat| seat.used);
            let before = median(uses.collect());
            self.forget(None, |seat| seat.used <= before);
        } else {
            self.sweep(now);
        }
        let target = match self.hosts.get_key_value(&target) {
            Some((target, _)) => Arc::clone(target),
            None => Arc::new(target),
        };
        let host = self.hosts.entry(Arc::clone(&target)).or_insert_with(|| Host::new(now));
        host.bots += 1;
        self.seats += 1;
        let seats = self.bots.entry(bot.clone());
        let new = || Seats { at: HashMap::new(), turns: Turns::new(now) };
        seats.or_insert_with(new).at.insert(Arc::clone(&target), Seat::new(now));
        target
    }

    /// Forgets bots and hosts without a recent call, at most once per [`SWEEP`].
    fn sweep(&mut self, now: Instant) {
        if self.swept.is_none_or(|swept| now.saturating_duration_since(swept) >= SWEEP) {
            self.swept = Some(now);
            self.forget(None, |seat| now.saturating_duration_since(seat.used) >= FORGET);
        }
    }

    /// Whether connections of `bot` to `target` stay open after a request. Decided again when the
    /// last ones are closed.
    fn keeps(&self, bot: &BotId, target: &Target, now: Instant) -> bool {
        let Some(Seats { at: seats, .. }) = self.bots.get(bot) else { return false };
        let recent = |seat: &&Seat| now.saturating_duration_since(seat.used) < IDLE;
        let decided = seats.get(target).filter(recent).and_then(|seat| seat.keeps);
        let kept = || seats.values().filter(recent).filter(|seat| seat.keeps == Some(true)).count();
        decided.unwrap_or_else(|| kept() < KEPT_MAX)
    }

    /// Forgets seats without a request in flight that `is_old` names, of one bot or of all, and hosts
    /// without a seat.
    fn forget(&mut self, only: Option<&BotId>, is_old: impl Fn(&Seat) -> bool) {
        let mut forgotten = Vec::new();
        let mut prune = |seats: &mut Seats| {
            let old = seats.at.extract_if(|_, seat| seat.under_way == 0 && is_old(seat));
            forgotten.extend(old.map(|(target, seat)| (target, seat.circuit.is_open())));
        };
        match only {
            Some(bot) => self.bots.get_mut(bot).into_iter().for_each(&mut prune),
            None => self.bots.values_mut().for_each(&mut prune),
        }
        if only.is_none() {
            self.bots.retain(|_, seats| !seats.at.is_empty());
        }
        self.seats -= forgotten.len();
        for (target, was_open) in forgotten {
            let Some(host) = self.hosts.get_mut(&target) else { continue };
            host.bots -= 1;
            host.bots_open -= usize::from(was_open);
            let is_last = host.bots == 0;
            if is_last {
                host.circuit.close();
            }
            self.show(&target);
            if is_last {
                self.hosts.remove(&target);
            }
        }
    }

    /// Updates the metrics if a host has its first open breaker, or none any more.
    fn show(&mut self, target: &Arc<Target>) {
        let Some(host) = self.hosts.get_mut(target) else { return };
        let open = host.is_open();
        if host.shown == open {
            return;
        }
        host.shown = open;
        shown::show(target.to_string(), open);
    }
}

impl Drop for State {
    fn drop(&mut self) {
        for (target, _) in self.hosts.iter().filter(|(_, host)| host.shown) {
            shown::show(target.to_string(), false);
        }
    }
}

/// The time before which half of the uses were.
fn median(mut uses: Vec<Instant>) -> Instant {
    let middle = uses.len() / 2;
    *uses.select_nth_unstable(middle).1
}

/// A request that may be sent. If it is dropped without a report, for example after a cancellation,
/// it counts neither as a success nor as a failure.
#[derive(Debug)]
pub(crate) struct Pass {
    breakers: Arc<Breakers>,
    bot: BotId,
    target: Arc<Target>,
    began: Instant,
    way: Way,
    keeps: bool,
    said: bool,
}

impl Pass {
    /// Whether the connection may stay open after the request.
    pub(crate) fn keeps_connection(&self) -> bool {
        self.keeps
    }

    /// Reports how the request ended.
    pub(crate) fn say(mut self, outcome: Outcome, now: Instant) {
        self.said = true;
        self.breakers.said(&self, now, Some(outcome));
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if !self.said {
            self.breakers.said(self, self.began, None);
        }
    }
}

#[cfg(test)]
mod tests;
