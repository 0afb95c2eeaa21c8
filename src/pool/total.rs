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
//!   Each lease needs one, and its slice has as many events as it gets tokens. While Redis is slow, it
//!   takes more at once, and they may be older, see [`Shared::late`].

mod reserved;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

pub(super) use self::reserved::{Reserved, Share};
use super::Shared;
use crate::rate::Bucket;
use crate::redis::keys::ShardKeys;
use crate::redis::scripts::{Budget, Budgeted};
use crate::telemetry::Outage;

/// How long a process holds slices without a renewal. Two calls without an answer do not end it.
const TTL: Duration = Duration::from_secs(5);
/// Interval of renewals.
const RENEW: Duration = Duration::from_secs(1);
/// A renewal that failed is repeated after this time.
const RETRY: Duration = Duration::from_millis(100);
/// The process stops using them this long before they end.
const MARGIN: Duration = Duration::from_millis(300);
/// A process takes the tokens of about this time at once, and of the calls until it asks again: it asks,
/// claims, and only then asks for more.
const BATCH: Duration = Duration::from_millis(50);
const CALLS_OF_BATCH: u32 = 2;
/// Tokens are not used this long after the calls that brought them and their events: late events could
/// exceed the rate.
const LATE: Duration = Duration::from_millis(250);
/// Number of these calls: the grant or the claim, the read, and the confirmation of the lease.
const CALLS: u32 = 4;
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
    /// Tokens that are left, when they arrived, and the stamp of their grant.
    tokens: usize,
    arrived_at: Instant,
    stamp: u64,
    /// It asks no earlier.
    again: Instant,
    /// Until then, the limits count as reached.
    reached_until: Instant,
}

/// What a process asks for.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Wish {
    /// Number of slices, of at most this number over all processes.
    slices: Option<(usize, usize)>,
    /// Number of slices in use, also by claims without an answer.
    used: usize,
    /// Number of tokens of the bucket.
    tokens: Option<(usize, Bucket)>,
    /// The unused tokens of the grant with this stamp, which it returns.
    unused: (usize, u64),
}

impl State {
    fn new(now: Instant) -> Self {
        Self {
            slices: 0,
            until: now,
            asked: 0,
            tokens: 0,
            arrived_at: now,
            stamp: 0,
            again: now,
            reached_until: now,
        }
    }

    /// Takes what may be claimed at most, and at most `room` leases. `held`: the number of leases that
    /// the process holds.
    fn take(&mut self, limits: Totals, held: usize, room: usize, now: Instant) -> Asked {
        let mut left = room;
        if limits.concurrency.is_some() {
            let slices = if now < self.until { self.slices } else { 0 };
            left = left.min(slices.saturating_sub(held + self.asked));
        }
        if limits.rate.is_some() {
            left = left.min(if self.is_fresh(now) { self.tokens } else { 0 });
            self.tokens -= left;
        }
        self.asked += left;
        Asked { leases: left, stamp: self.stamp }
    }

    fn is_fresh(&self, now: Instant) -> bool {
        now.duration_since(self.arrived_at) < BATCH
    }

    /// What to ask for, for `more` leases with up to `usual` events each, and at most the tokens of
    /// `batch`. Until the answer, the process has only what is certain.
    fn wish(
        &mut self,
        limits: Totals,
        held: usize,
        more: usize,
        usual: usize,
        batch: Duration,
    ) -> Wish {
        let used = held + self.asked;
        let slices = limits.concurrency.map(|max| ((used + more).min(max), max));
        self.slices = self.slices.min(slices.map_or(0, |(wanted, _)| wanted));
        let tokens = limits.rate.map(|bucket| {
            let batch = batch.as_secs_f64() * 1e6 / bucket.interval_us;
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small")]
            let batch = (batch as usize).max(1);
            let events = more.saturating_mul(usual);
            (if more == 0 { 0 } else { events.min(batch) }, bucket)
        });
        let unused = (std::mem::take(&mut self.tokens), self.stamp);
        Wish { slices, used, tokens, unused }
    }

    /// Notes the answer to a wish, and when it was sent and answered. `late`: it took so long only because
    /// the process was frozen.
    fn granted(
        &mut self,
        limits: Totals,
        wish: &Wish,
        Budgeted { slices, tokens, wait_ms, stamp }: Budgeted,
        (sent, now): (Instant, Instant),
        late: Duration,
    ) {
        if let Some((wanted, _)) = wish.slices {
            self.slices = slices.min(wanted);
            // Other processes took slices that are in use here, while this one was frozen: these must
            // end when they would have ended without the renewal.
            if slices >= wish.used {
                self.until = sent + TTL - MARGIN;
            }
        }
        self.tokens = tokens;
        // Without tokens and with the stamp of an earlier grant, what comes back from it is as old as before.
        if tokens > 0 || stamp != self.stamp {
            let is_late = now.duration_since(sent) > late;
            (self.arrived_at, self.stamp) = (if is_late { sent } else { now }, stamp);
        }
        self.again = match limits.rate {
            Some(_) if tokens == 0 => now + Duration::from_millis(wait_ms).max(PAUSE),
            _ => now,
        };
    }

    /// It got nothing. Returns when it may ask again.
    fn close(&mut self, now: Instant) -> Instant {
        // A limit that is still reached then refuses it again before this ends.
        self.reached_until = self.again.max(now) + AGAIN;
        self.again
    }

    /// The number of workers that the load needs: `wanted`, or the `busy` ones while the limits refuse
    /// more. What they refuse is no demand: other processes would not get it either.
    fn needed(&self, limits: Totals, wanted: usize, busy: usize, now: Instant) -> usize {
        let most = limits.concurrency.unwrap_or(usize::MAX);
        if now < self.reached_until { busy } else { wanted.min(most) }
    }

    fn answered(&mut self, limits: Totals, asked: Asked, leases: usize) {
        self.asked = self.asked.saturating_sub(asked.leases);
        self.put_back(limits, asked.leases.saturating_sub(leases), asked.stamp);
    }

    fn share(&mut self, leases: usize, usual: usize) -> (usize, u64) {
        let more = (self.tokens / leases.max(1)).min(usual.saturating_sub(1));
        self.tokens -= more * leases;
        (more, self.stamp)
    }

    fn put_back(&mut self, limits: Totals, tokens: usize, stamp: u64) {
        // Those of an older grant are too old.
        if limits.rate.is_some() && self.stamp == stamp {
            self.tokens += tokens;
        }
    }
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
        let state = State::new(Instant::now());
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
        let (mut state, now) = (self.state(), Instant::now());
        if asked.leases == 0 && state.again <= now {
            // The next call returns tokens that came too late, and may get others.
            let is_late = state.tokens > 0 && !state.is_fresh(now);
            state.again = now + if is_late { PAUSE } else { AGAIN };
        }
        asked
    }

    /// It got nothing. Returns when it may ask again; the time may have passed meanwhile.
    pub(super) fn close(&self) -> Instant {
        self.state().close(Instant::now())
    }

    /// The number of workers that the load needs, see [`State::needed`].
    pub(super) fn needed(&self, wanted: usize, busy: usize) -> usize {
        self.state().needed(self.limits, wanted, busy, Instant::now())
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
        // Read under the lock: an answered claim counts as held before it stops counting as asked.
        let held = shared.occupancy.held();
        state.take(self.limits, held, room, Instant::now())
    }

    /// Asks for `more` leases than this process has. Returns whether there was an answer.
    async fn ask(&self, shared: &Shared, more: usize) -> bool {
        let _one = self.calls.lock().await;
        let sent = Instant::now();
        let wish = {
            let mut state = self.state();
            let held = shared.occupancy.held();
            let batch =
                BATCH + shared.queue.link().latency(shard_of_limits(shared)) * CALLS_OF_BATCH;
            state.wish(self.limits, held, more, shared.usual_events(), batch)
        };
        let Wish { slices, tokens, unused, .. } = wish;
        let budget = Budget {
            keys: shard_of_limits(shared),
            process: &self.process,
            slices,
            ttl_ms: crate::clock::millis(TTL),
            tokens,
            unused,
        };
        match shared.queue.link().call(&budget).await {
            Ok(granted) => {
                ASKS.succeeded();
                let (calls, late) = ((sent, Instant::now()), shared.late(shard_of_limits(shared)));
                self.state().granted(self.limits, &wish, granted, calls, late);
                true
            }
            Err(error) => {
                if let Some(suppressed) = ASKS.failed() {
                    warn!(pipeline = %shared.queue.name(), %error, suppressed,
                        "cannot ask for the limits of all processes; retrying");
                }
                self.state().again = Instant::now() + AGAIN;
                false
            }
        }
    }

    /// Notes what became of a reservation: `leases`, which the occupancy counts already.
    pub(super) fn answered(&self, asked: Asked, leases: usize) {
        self.state().answered(self.limits, asked, leases);
    }

    /// The tokens of each of `leases` slices that have up to `usual` events, beside the one that `asked`
    /// reserved for each.
    pub(super) fn share(self: &Arc<Self>, asked: Asked, leases: usize, usual: usize) -> Share {
        if self.limits.rate.is_none() {
            return Share::unlimited(usual);
        }
        let (more, stamp) = self.state().share(leases, usual);
        let total = Some(Arc::clone(self));
        Share { total, events: 1 + more, reserved: asked.stamp, more: stamp }
    }

    /// Takes back tokens that were not used.
    pub(super) fn put_back(&self, tokens: usize, stamp: u64) {
        self.state().put_back(self.limits, tokens, stamp);
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
        let mut answered = true;
        loop {
            let stopping = shared.shutdown.soft.is_cancelled();
            let pause = if stopping || !answered { RETRY } else { RENEW };
            tokio::select! {
                biased;
                () = shared.shutdown.hard.cancelled() => return,
                () = shared.shutdown.soft.cancelled(), if !stopping => {}
                () = tokio::time::sleep(pause) => {}
            }
            if self.state().slices > 0 {
                answered = self.ask(&shared, 0).await;
            } else if stopping && shared.occupancy.held() == 0 {
                return;
            }
        }
    }
}

/// The shard that keeps the limits.
fn shard_of_limits(shared: &Shared) -> &ShardKeys {
    &shared.queue.shards()[0]
}

impl Shared {
    /// After this time, the tokens of a bot in this shard are not used any more: the process was frozen.
    /// Slow calls are no reason, or a pipeline with a rate would handle nothing while Redis is slow.
    pub(super) fn late(&self, shard: &ShardKeys) -> Duration {
        let link = self.queue.link();
        let of_limits = self.total.as_ref().map(|_| link.latency(shard_of_limits(self)));
        LATE + link.latency(shard).max(of_limits.unwrap_or_default()) * CALLS
    }
}

/// Reserved leases, each with a token, and the stamp of their grant.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    pub(super) leases: usize,
    stamp: u64,
}

#[cfg(test)]
mod tests;
