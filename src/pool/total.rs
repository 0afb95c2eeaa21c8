//! The limits of a pipeline over all processes: events per second, and slices under way at once.
//!
//! One shard keeps both (`lua/budget.lua`), so they are exact although shards may be on different
//! servers. The dispatcher asks it before it claims, so bots wait in the control set, in their order.
//! It asks only while bots are ready.
//!
//! - *Slices.* The process holds a number of them for [`TTL`], and renews them while they are in use.
//!   When a renewal is not confirmed in time, every handler is cancelled. So a process that was frozen
//!   and one that took its slices never exceed the limit together.
//! - *Tokens.* The process takes those of about [`BATCH`], uses them at once, and returns the rest.
//!   Each lease needs one, and its slice has as many events as it gets tokens.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

use super::Shared;
use super::board::Ask;
use crate::rate::Bucket;
use crate::redis::scripts::{Budget, Budgeted};
use crate::telemetry::Outage;

/// How long a process holds slices without a renewal.
const TTL: Duration = Duration::from_secs(3);
/// The process stops using them this long before they end.
const MARGIN: Duration = Duration::from_millis(300);
/// A process takes the tokens of about this time at once.
const BATCH: Duration = Duration::from_millis(50);
/// Tokens that are older are not used any more: a late event could exceed the rate.
pub(super) const LATE: Duration = Duration::from_millis(250);
/// A process that gets nothing asks again after this time at the latest.
const AGAIN: Duration = Duration::from_secs(1);
/// A process that got no token does not ask again earlier.
const PAUSE: Duration = Duration::from_millis(5);

static ASKS: Outage = Outage::shared();

/// The limits of a pipeline over all processes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Totals {
    /// Events per time.
    pub rate: Option<Bucket>,
    /// Maximum number of slices at once.
    pub concurrency: Option<usize>,
}

/// What this process may do.
#[derive(Debug)]
struct State {
    /// Number of slices it holds.
    slices: usize,
    /// When it must not use them any more.
    until: Instant,
    /// Number of leases that claims without an answer may return.
    asked: usize,
    /// Tokens that are left, when they were asked for, and the stamp of their grant.
    tokens: usize,
    taken_at: Instant,
    stamp: u64,
    /// It asks no earlier.
    again: Instant,
}

#[derive(Debug)]
pub(super) struct Total {
    limits: Totals,
    process: String,
    state: Mutex<State>,
    /// One call at a time: a later one must not overtake an earlier one.
    calls: tokio::sync::Mutex<()>,
}

impl Total {
    /// `None` without limits.
    pub(super) fn new(limits: Totals) -> Option<Self> {
        if limits == Totals::default() {
            return None;
        }
        let now = Instant::now();
        let state = State {
            slices: 0,
            until: now,
            asked: 0,
            tokens: 0,
            taken_at: now,
            stamp: 0,
            again: now,
        };
        let process = uuid::Uuid::now_v7().to_string();
        Some(Self { limits, process, state: Mutex::new(state), calls: tokio::sync::Mutex::new(()) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves what may be claimed now, at most `room` leases: asks if it has nothing, unless it asked
    /// a moment ago.
    pub(super) async fn reserve(&self, shared: &Shared, room: usize) -> Asked {
        let asked = self.take(shared, room);
        if asked.leases > 0 || room == 0 || Instant::now() < self.state().again {
            return asked;
        }
        self.ask(shared, room).await;
        let asked = self.take(shared, room);
        let mut state = self.state();
        if asked.leases == 0 && state.again <= Instant::now() {
            state.again = Instant::now() + AGAIN;
        }
        asked
    }

    /// When it may ask again; `None`: at once.
    pub(super) fn closed_until(&self) -> Option<Instant> {
        Some(self.state().again).filter(|again| *again > Instant::now())
    }

    /// When slices must end unless they are renewed.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.limits.concurrency.map(|_| self.state().until)
    }

    /// Whether events are limited.
    pub(super) fn has_rate(&self) -> bool {
        self.limits.rate.is_some()
    }

    /// The least cost of `n` events, µs: where events are limited, bots share these, and not the time
    /// of the workers.
    #[expect(clippy::cast_precision_loss, reason = "a slice has at most 5,000 events")]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a time of tokens")]
    pub(super) fn cost_us(&self, n: usize) -> u128 {
        self.limits.rate.map_or(0, |bucket| (n as f64 * bucket.interval_us) as u128)
    }

    /// Takes from what this process has.
    fn take(&self, shared: &Shared, room: usize) -> Asked {
        let mut state = self.state();
        let now = Instant::now();
        let mut left = room;
        if self.limits.concurrency.is_some() {
            let held = if now < state.until { state.slices } else { 0 };
            left = left.min(held.saturating_sub(shared.occupancy.held() + state.asked));
        }
        if self.limits.rate.is_some() {
            let fresh = now.duration_since(state.taken_at) < BATCH;
            left = left.min(if fresh { state.tokens } else { 0 });
            state.tokens -= left;
        }
        state.asked += left;
        Asked { leases: left, stamp: state.stamp }
    }

    /// Asks for `more` leases than this process has.
    async fn ask(&self, shared: &Shared, more: usize) {
        let _one = self.calls.lock().await;
        let sent = Instant::now();
        let (budget, wanted) = {
            let mut state = self.state();
            let used = shared.occupancy.held() + state.asked;
            let slices = self.limits.concurrency.map(|max| ((used + more).min(max), max));
            let wanted = slices.map_or(0, |(wanted, _)| wanted);
            // Until the answer, it holds what is certain.
            state.slices = state.slices.min(wanted);
            let tokens = self.limits.rate.map(|bucket| {
                let batch = BATCH.as_secs_f64() * 1e6 / bucket.interval_us;
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "small"
                )]
                let batch = (batch as usize).max(1);
                let events = more.saturating_mul(shared.usual_events());
                (if more == 0 { 0 } else { events.min(batch) }, bucket)
            });
            let unused = (state.tokens, state.stamp);
            state.tokens = 0;
            let budget = Budget {
                keys: &shared.queue.shards()[0],
                process: &self.process,
                slices,
                ttl_ms: crate::clock::millis(TTL),
                tokens,
                unused,
            };
            (budget, wanted)
        };
        match shared.queue.link().call(&budget).await {
            Ok(Budgeted { slices, tokens, wait_ms, stamp }) => {
                ASKS.succeeded();
                let mut state = self.state();
                if self.limits.concurrency.is_some() {
                    state.slices = slices.min(wanted);
                    state.until = sent + TTL - MARGIN;
                }
                (state.tokens, state.taken_at, state.stamp) = (tokens, sent, stamp);
                let now = Instant::now();
                state.again = match self.limits.rate {
                    Some(_) if tokens == 0 => now + Duration::from_millis(wait_ms).max(PAUSE),
                    _ => now,
                };
            }
            Err(error) => {
                if let Some(suppressed) = ASKS.failed() {
                    warn!(pipeline = %shared.queue.name(), %error, suppressed,
                        "cannot ask for the limits of all processes; trying again");
                }
                self.state().again = Instant::now() + AGAIN;
            }
        }
    }

    /// Notes what became of a reservation: `leases`, which the occupancy counts already.
    pub(super) fn answered(&self, asked: Asked, leases: usize) {
        let mut state = self.state();
        state.asked = state.asked.saturating_sub(asked.leases);
        self.put_back_to(&mut state, asked.leases.saturating_sub(leases), asked.stamp);
    }

    /// The tokens of each of `leases` slices that have up to `usual` events, and their stamp. One of
    /// each is reserved already.
    pub(super) fn share(&self, leases: usize, usual: usize) -> (usize, u64) {
        if self.limits.rate.is_none() {
            return (usual, 0);
        }
        let mut state = self.state();
        let more = (state.tokens / leases.max(1)).min(usual.saturating_sub(1));
        state.tokens -= more * leases;
        (1 + more, state.stamp)
    }

    /// Takes back tokens that were not used.
    pub(super) fn put_back(&self, tokens: usize, stamp: u64) {
        let mut state = self.state();
        self.put_back_to(&mut state, tokens, stamp);
    }

    fn put_back_to(&self, state: &mut State, tokens: usize, stamp: u64) {
        // Those of an older grant are too old.
        if self.limits.rate.is_some() && state.stamp == stamp {
            state.tokens += tokens;
        }
    }

    /// Returns unused tokens while nobody is ready.
    pub(super) async fn rest(&self, shared: &Shared) {
        let has_tokens = {
            let state = self.state();
            state.tokens > 0 && state.asked == 0
        };
        if has_tokens && shared.occupancy.held() == 0 {
            self.ask(shared, 0).await;
        }
    }

    /// Renews the slices that are in use, and returns the others, until the stop.
    pub(super) async fn keep(self: Arc<Self>, shared: Arc<Shared>) {
        if self.limits.concurrency.is_none() {
            return;
        }
        loop {
            let stopping = shared.shutdown.soft.is_cancelled();
            let pause = if stopping { MARGIN / 3 } else { TTL / 3 };
            tokio::select! {
                biased;
                () = shared.shutdown.hard.cancelled() => return,
                () = shared.shutdown.soft.cancelled(), if !stopping => {}
                () = tokio::time::sleep(pause) => {}
            }
            if self.state().slices > 0 {
                self.ask(&shared, 0).await;
            } else if stopping && shared.occupancy.held() == 0 {
                return;
            }
        }
    }
}

/// Reserved leases, each with a token, and the stamp of their grant.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    pub(super) leases: usize,
    stamp: u64,
}

/// What a claim reserved, until its answer. Without limits: nothing.
#[derive(Debug)]
pub(super) struct Reserved(Option<(Arc<Total>, Asked)>);

impl Reserved {
    /// Gives back what these claims do not ask for. Call [`Self::of`] once for each of them.
    pub(super) fn split(shared: &Shared, asked: Option<Asked>, asks: &[Ask]) -> Self {
        let total = shared.total.as_ref();
        let Some((total, asked)) = total.zip(asked) else { return Self(None) };
        let needed = leases_of(asks).min(asked.leases);
        total.answered(Asked { leases: asked.leases - needed, ..asked }, 0);
        Self(Some((Arc::clone(total), Asked { leases: 0, ..asked })))
    }

    /// The part of these claims.
    pub(super) fn of(&self, asks: &[Ask]) -> Self {
        let part = |(total, asked): &(Arc<Total>, Asked)| {
            (Arc::clone(total), Asked { leases: leases_of(asks), ..*asked })
        };
        Self(self.0.as_ref().map(part))
    }

    /// The claims returned this number of leases.
    pub(super) fn answered(mut self, leases: usize) {
        if let Some((total, asked)) = self.0.take() {
            total.answered(asked, leases);
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if let Some((total, asked)) = self.0.take() {
            total.answered(asked, 0);
        }
    }
}

fn leases_of(asks: &[Ask]) -> usize {
    asks.iter().map(|ask| ask.max).sum()
}
