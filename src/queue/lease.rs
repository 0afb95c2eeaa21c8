//! A lease from the view of its holder.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::id::{BotId, Fence, Shard};
use crate::rate::BotLimits;
use crate::redis::aside::Aside;
use crate::redis::scripts::{Attempts, Completion, Exception, Grant, Mode};

/// Maximum duration of a lease before its holder confirms it, regardless of `lease_ttl`. It is
/// short because a claim whose reply was lost blocks its bots for this long. If a slice takes
/// longer than a third of this time, its lease is renewed for `lease_ttl`. A process that stalls
/// before the renewal loses the lease after nine tenths of this time, and its events are handled
/// again.
pub const CLAIM_TTL: Duration = Duration::from_millis(1_800);

/// A lease granted or confirmed longer ago than this is confirmed again before a handler starts.
/// Redis may have restarted since, which revokes every lease, and another process may have started
/// its handler. The value is above the usual time from a claim to its handler, and below the
/// duration of a restart.
const FRESH: Duration = Duration::from_millis(50);

/// The holder stops this part of the ttl (a tenth) before the lease ends, at most one second
/// before.
pub const MARGIN: u32 = 10;

/// When, and over which connection, a call that grants or renews leases was sent.
#[derive(Debug, Clone, Copy)]
pub struct Sent {
    /// When it was sent.
    pub at: Instant,
    /// The number of the connection it uses, or of an earlier one.
    pub connection: Option<u64>,
}

/// The lock on one bot, with a time to live.
#[derive(Debug, Clone)]
pub struct Lease {
    /// The bot.
    pub bot: BotId,
    /// Its shard.
    pub shard: Shard,
    /// The fence.
    pub fence: Fence,
    /// The run id of the server that granted it.
    run: Arc<str>,
    /// The time of that server then, µs since 1970, if it told it.
    granted_us: Option<u64>,
    /// Failures and lost leases since the bot's last progress.
    pub attempts: Attempts,
    /// The bot's lanes that are set aside.
    pub aside: Aside,
    /// What is set for the bot: its share, its rate.
    pub own: BotLimits,
    /// Bytes of the bot's queued events when the lease was granted; 0 if they are few and small.
    pub queued_bytes: u64,
    /// Number of events already removed under this lease.
    removed: usize,
    /// The holder must not act after this moment: sent + ttl − margin, by the monotonic clock.
    deadline: Instant,
    /// When to renew: a third of the ttl after the last grant or renewal.
    renew_at: Instant,
    /// The call that granted or last renewed it.
    confirmed: Sent,
}

impl Lease {
    /// The lease that the call `sent` requested for `ttl`. Its fence counts as the time when it was
    /// granted.
    #[must_use]
    pub fn new(grant: Grant, run: Arc<str>, shard: Shard, sent: Sent, ttl: Duration) -> Self {
        let Grant { bot, fence, attempts, aside, own, queued_bytes, .. } = grant;
        let mut lease = Self {
            bot,
            shard,
            fence,
            run,
            granted_us: None,
            attempts,
            aside,
            own,
            queued_bytes,
            removed: 0,
            deadline: sent.at,
            renew_at: sent.at,
            confirmed: sent,
        };
        lease.extend(sent, ttl);
        lease
    }

    /// Notes the time of the server when it was granted, µs since 1970. The fence may be ahead of it.
    #[must_use]
    pub fn granted_at(self, now_us: u64) -> Self {
        Self { granted_us: Some(now_us), ..self }
    }

    /// The time of the server when it was granted, µs since 1970. A lease that came with a copy has its
    /// fence here, because that call does not tell the time.
    #[must_use]
    pub fn granted_us(&self) -> u64 {
        self.granted_us.unwrap_or(self.fence.get())
    }

    /// Whether the server told its time when it granted the lease. The fence may be ahead of that.
    #[must_use]
    pub fn knows_time(&self) -> bool {
        self.granted_us.is_some()
    }

    /// Applies the renewal by the call `sent`.
    pub fn extend(&mut self, sent: Sent, ttl: Duration) {
        let margin = (ttl / MARGIN).min(Duration::from_secs(1));
        self.deadline = sent.at + ttl.saturating_sub(margin);
        self.renew_at = sent.at + ttl / 3;
        self.confirmed = sent;
    }

    /// Whether a handler may start without confirming the lease: it was granted or confirmed a
    /// moment ago, over the connection in use now. Before a reconnection, Redis may have restarted
    /// and revoked the lease.
    #[must_use]
    pub fn is_fresh(&self, connection: Option<u64>) -> bool {
        let Sent { at, connection: over } = self.confirmed;
        over.is_some() && over == connection && at.elapsed() < FRESH
    }

    /// When the call that granted or last renewed it was sent.
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

    /// Whether the holder may still act. To be checked before every effect: a process that was
    /// suspended continues before its timers fire.
    #[must_use]
    pub fn is_held(&self) -> bool {
        Instant::now() < self.deadline
    }

    /// Notes that `n` events were removed under this lease.
    pub fn removed(&mut self, n: usize) {
        self.removed += n;
    }

    /// The call that renews and confirms it.
    #[must_use]
    pub fn renewal(&self, ttl: Duration) -> Completion {
        let mode = Mode::Keep { ttl_ms: crate::clock::millis(ttl) };
        self.completion((0, 0), mode, 0, Vec::new())
    }

    /// The call that hands it over to a receiver for `ttl`, if receivers hold fewer than `max`
    /// leases in its shard.
    #[must_use]
    pub fn handover(&self, ttl: Duration, max: u64, cost: u64) -> Completion {
        let mode = Mode::Hand { ttl_ms: crate::clock::millis(ttl), max };
        self.completion((0, 0), mode, cost, Vec::new())
    }

    /// The run id of the server that granted it.
    #[must_use]
    pub fn run(&self) -> &str {
        &self.run
    }

    /// The call that ends it and removes `n` more events from the queue, with records of `bytes`.
    #[must_use]
    pub fn completion(
        &self,
        (n, bytes): (usize, u64),
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
            bytes,
            mode,
            cost,
            exceptions,
            leaving: None,
            aside: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const TTL: Duration = Duration::from_secs(6);
    const MOMENT: Duration = Duration::from_millis(1);

    fn granted(connection: Option<u64>) -> Lease {
        let bot = BotId::parse("a").unwrap();
        let shard = bot.shard(crate::id::ShardCount::new(1).unwrap());
        let grant = Grant {
            bot,
            fence: Fence::new(7),
            start: 0,
            attempts: Attempts::default(),
            own: BotLimits::default(),
            aside: Aside::default(),
            queued_bytes: 0,
        };
        Lease::new(grant, "run".into(), shard, Sent { at: Instant::now(), connection }, TTL)
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_held_until_a_tenth_before_its_end_and_longer_after_a_renewal() {
        let mut lease = granted(Some(1));
        assert_eq!(lease.renew_at(), Instant::now() + TTL / 3);
        advance(TTL.mul_f64(0.9).saturating_sub(MOMENT)).await;
        assert!(lease.is_held());
        advance(MOMENT).await;
        assert!(!lease.is_held());
        lease.extend(Sent { at: Instant::now(), connection: Some(1) }, TTL);
        assert!(lease.is_held());
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_fresh_for_a_moment_and_over_the_connection_that_granted_it() {
        let lease = granted(Some(1));
        assert!(lease.is_fresh(Some(1)));
        assert!(!lease.is_fresh(Some(2)) && !lease.is_fresh(None));
        assert!(!granted(None).is_fresh(None), "the connection was not known");
        advance(FRESH.saturating_sub(MOMENT)).await;
        assert!(lease.is_fresh(Some(1)));
        advance(MOMENT).await;
        assert!(!lease.is_fresh(Some(1)));
    }

    #[test]
    fn what_only_keeps_it_or_hands_it_over_does_not_wait_for_replicas() {
        let lease = granted(Some(1));
        let keep = Mode::Keep { ttl_ms: 1 };
        let ends = |n, mode| lease.completion((n, 0), mode, 0, Vec::new()).is_lasting();
        assert!(!lease.renewal(TTL).is_lasting() && !lease.handover(TTL, 1, 5).is_lasting());
        assert!(ends(1, keep) && ends(0, Mode::Release) && ends(0, Mode::Park { ms: 1 }));
    }

    #[test]
    fn it_was_granted_at_the_time_of_the_server_although_its_fence_is_ahead() {
        let lease = granted(Some(1));
        assert_eq!((lease.granted_us(), lease.knows_time()), (7, false), "its fence");
        let lease = lease.granted_at(5);
        assert_eq!((lease.granted_us(), lease.knows_time()), (5, true));
    }

    #[test]
    fn its_completion_tells_its_run_and_what_was_removed_before() {
        let mut lease = granted(Some(1));
        lease.removed(2);
        lease.removed(3);
        let completion = lease.renewal(TTL);
        assert_eq!((lease.run(), &*completion.run), ("run", "run"));
        assert_eq!((completion.before, completion.n, completion.fence), (5, 0, Fence::new(7)));
    }
}
