//! A lease as its holder sees it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::id::{BotId, Fence, Shard};
use crate::keyspace::scripts::{Attempts, Completion, Exception, Grant, Mode};

/// How long a lease lasts before its holder confirms it, at most, whatever `lease_ttl` says. Short,
/// because a claim whose reply was lost blocks its bots for this long. A slice that takes longer
/// than a third of it is renewed for `lease_ttl`; a process that stalls before that loses the lease
/// after nine tenths of it, and what it had begun is handled again.
pub const CLAIM_TTL: Duration = Duration::from_millis(1_800);

/// A lease that was granted or confirmed longer ago than this is confirmed again before a handler
/// starts under it: Redis may have restarted since, which revokes every lease, and another process
/// may have started its handler. Above the usual time from a claim to its handler, and below what a
/// restart takes.
const FRESH: Duration = Duration::from_millis(50);

/// A holder stops by itself this share of the ttl before the deadline, at most one second.
pub const MARGIN: u32 = 10;

/// A call that grants or renews leases, as it goes out.
#[derive(Debug, Clone, Copy)]
pub struct Sent {
    /// When.
    pub at: Instant,
    /// The number of the connection it takes, or of one before that.
    pub connection: Option<u64>,
}

/// The TTL lock on one bot.
#[derive(Debug, Clone)]
pub struct Lease {
    /// Whose queue.
    pub bot: BotId,
    /// Its shard.
    pub shard: Shard,
    /// Its number.
    pub fence: Fence,
    /// The run of the server that gave it.
    run: Arc<str>,
    /// What happened since the bot made progress.
    pub attempts: Attempts,
    /// Relative share of the service.
    pub weight: u32,
    /// Events already removed under this lease.
    removed: usize,
    /// After this moment the holder no longer acts: sent + ttl − margin, by the monotonic clock.
    deadline: Instant,
    /// When to renew: a third of the ttl after it was set.
    renew_at: Instant,
    /// The call that granted or last renewed it.
    confirmed: Sent,
}

impl Lease {
    /// A lease that the call `sent` asked for, with `ttl`.
    #[must_use]
    pub fn new(grant: Grant, run: Arc<str>, shard: Shard, sent: Sent, ttl: Duration) -> Self {
        let Grant { bot, fence, attempts, weight, .. } = grant;
        let mut lease = Self {
            bot,
            shard,
            fence,
            run,
            attempts,
            weight,
            removed: 0,
            deadline: sent.at,
            renew_at: sent.at,
            confirmed: sent,
        };
        lease.extend(sent, ttl);
        lease
    }

    /// The call `sent` renewed the lease.
    pub fn extend(&mut self, sent: Sent, ttl: Duration) {
        let margin = (ttl / MARGIN).min(Duration::from_secs(1));
        self.deadline = sent.at + ttl.saturating_sub(margin);
        self.renew_at = sent.at + ttl / 3;
        self.confirmed = sent;
    }

    /// Whether a handler may start without asking Redis again: the lease was granted or confirmed
    /// a moment ago, over the connection that is in use now. Over another, Redis may be another
    /// run, and the lease revoked.
    #[must_use]
    pub fn is_fresh(&self, connection: Option<u64>) -> bool {
        let Sent { at, connection: over } = self.confirmed;
        over.is_some() && over == connection && at.elapsed() < FRESH
    }

    /// When the call was sent that granted or last renewed it.
    #[must_use]
    pub fn confirmed_at(&self) -> Instant {
        self.confirmed.at
    }

    /// When the holder stops acting.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// When the holder renews.
    #[must_use]
    pub fn renew_at(&self) -> Instant {
        self.renew_at
    }

    /// Whether the holder may still act. To be asked before every effect: a process that wakes
    /// from a stop acts before its timers fire.
    #[must_use]
    pub fn is_held(&self) -> bool {
        Instant::now() < self.deadline
    }

    /// `n` events were removed under it.
    pub fn removed(&mut self, n: usize) {
        self.removed += n;
    }

    /// The call that renews and confirms it.
    #[must_use]
    pub fn renewal(&self, ttl: Duration) -> Completion {
        let mode = Mode::Keep { ttl_ms: crate::clock::millis(ttl) };
        self.completion(0, mode, 0, Vec::new())
    }

    /// The call that hands it over to a receiver outside for `ttl`, while fewer than `max` are in
    /// its shard.
    #[must_use]
    pub fn handover(&self, ttl: Duration, max: u64, cost: u64) -> Completion {
        let mode = Mode::Hand { ttl_ms: crate::clock::millis(ttl), max };
        self.completion(0, mode, cost, Vec::new())
    }

    /// The run of the server that gave it.
    #[must_use]
    pub fn run(&self) -> &str {
        &self.run
    }

    /// The call that ends it: `n` more events leave the queue.
    #[must_use]
    pub fn completion(
        &self,
        n: usize,
        mode: Mode,
        cost: u64,
        exceptions: Vec<Exception>,
    ) -> Completion {
        Completion {
            bot: self.bot.clone(),
            run: Arc::clone(&self.run),
            fence: self.fence,
            before: self.removed,
            n,
            mode,
            cost,
            exceptions,
            leaving: None,
        }
    }
}
