//! The rate of a bot: takes tokens before the handler starts, and parks a bot that has none.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::{debug, warn};

use super::super::Shared;
use super::super::settle::Fitness;
use super::{Ended, Worker};
use crate::handler::Slice;
use crate::id::{BotId, Shard};
use crate::queue::Lease;
use crate::rate::Bucket;
use crate::redis::scripts::{Mode, Permit, Permitted};
use crate::telemetry::OncePerMinute;

/// A bot whose tokens cannot be asked for is parked for this long.
const FAILED: Duration = Duration::from_secs(1);
/// Interval between attempts to use tokens late.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// A bot that rests for a shorter time gets its next permit soon, which shows that its events wait.
const REST_MS: u64 = 1_000;

static UNANSWERED: OncePerMinute = OncePerMinute::new();

/// The tokens of a slice whose lanes do not all start together. A lane may start when others have ended,
/// and meanwhile the bucket fills again.
#[derive(Debug)]
pub(super) struct Tokens {
    shard: Shard,
    bot: BotId,
    bucket: Bucket,
    left: Mutex<Left>,
}

/// The tokens that no lane has used.
#[derive(Debug, Clone, Copy)]
struct Left {
    events: usize,
    /// When the bucket was told of them last.
    told: Instant,
}

impl Tokens {
    /// Uses the tokens of a lane that starts now. Returns whether it may start: otherwise the bucket
    /// cannot be told that they are used so late. That is tried again for as long as a handler may take,
    /// because each lane that does not start is set aside.
    pub(super) async fn use_now(&self, shared: &Shared, events: usize) -> bool {
        let (keys, begun) = (shared.queue.keys(self.shard), Instant::now());
        loop {
            let Left { events: held, told } = *self.left();
            if told.elapsed() <= shared.late(keys) {
                break;
            }
            let stops = shared.shutdown.soft.is_cancelled();
            if stops || begun.elapsed() >= shared.settings.handler_timeout {
                return false;
            }
            let sent = Instant::now();
            let permit = Permit { keys, bot: &self.bot, want: 0, held, bucket: self.bucket };
            match shared.queue.link().call(&permit).await {
                Ok(_) => {
                    let mut left = self.left();
                    left.told = left.told.max(sent);
                }
                Err(error) => {
                    debug!(bot = %self.bot, %error, "cannot use tokens late; asking again");
                    tokio::time::sleep(ASK_AGAIN).await;
                }
            }
        }
        let mut left = self.left();
        left.events = left.events.saturating_sub(events);
        true
    }

    fn left(&self) -> MutexGuard<'_, Left> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Worker {
    fn bucket(&self) -> Option<Bucket> {
        self.shared.bucket_of(&self.lease)
    }

    /// Cuts the slice to the tokens that its bot has. A worker is free, so the handler starts now, or that of
    /// the first lane.
    pub(super) async fn take_tokens(&mut self, slice: &mut Slice) -> Result<(), Ended> {
        let shared = std::sync::Arc::clone(&self.shared);
        let keys = shared.queue.keys(self.lease.shard);
        if shared.total.as_ref().is_some_and(|total| total.has_rate())
            && self.claimed_at.elapsed() > shared.late(keys)
        {
            // The process was frozen: events that it hands out now would count for another time.
            return Err(Ended::NotHandled);
        }
        let Some(bucket) = self.bucket() else { return Ok(()) };
        let bot = self.lease.bot.clone();
        let permit = Permit { keys, bot: &bot, want: slice.events.len(), held: 0, bucket };
        let sent = Instant::now();
        match self.while_held(shared.queue.link().call(&permit)).await? {
            Ok(Permitted { granted, wait_ms }) => {
                let wait = Duration::from_millis(wait_ms);
                self.next_token = (wait_ms > 0).then(|| Instant::now() + wait);
                if granted == 0 {
                    return Err(Ended::Throttled(wait));
                }
                if sent.elapsed() > shared.late(keys) {
                    return Err(Ended::NotHandled);
                }
                shared.metrics.tokens.increment(granted as u64);
                self.waits_shown = slice.events.len() > granted;
                slice.events.truncate(granted);
                let left = Mutex::new(Left { events: granted, told: sent });
                self.tokens = Some(Tokens { shard: self.lease.shard, bot, bucket, left });
                Ok(())
            }
            Err(error) => {
                if let Some(suppressed) = UNANSWERED.take() {
                    let pipeline = shared.queue.name();
                    warn!(%pipeline, %bot, %error, suppressed,
                        "cannot ask for the tokens of a bot; retrying");
                }
                Err(Ended::Throttled(FAILED))
            }
        }
    }

    /// A bot without tokens stays parked until its next one: it needs no worker before.
    pub(super) fn rest_without_tokens(&self, mode: Mode) -> Mode {
        let left = self.next_token.map(|at| at.saturating_duration_since(Instant::now()));
        match left {
            Some(left) if mode == Mode::Release && !left.is_zero() => {
                Mode::Park { ms: crate::clock::millis(left).max(1) }
            }
            _ => mode,
        }
    }

    /// Shows that the events of a bot that rests now wait for tokens. The permit of the slice could not
    /// know it if they came later. The lease has ended in this way.
    pub(super) async fn show_rest(&self, mode: Mode) {
        let Mode::Park { ms: REST_MS.. } = mode else { return };
        let (Some(bucket), Some(_), false) = (self.bucket(), self.next_token, self.waits_shown)
        else {
            return;
        };
        let (queue, bot) = (&self.shared.queue, &self.lease.bot);
        // It takes no token.
        let keys = queue.keys(self.lease.shard);
        let permit = Permit { keys, bot, want: 0, held: 0, bucket };
        if let Err(error) = queue.link().call(&permit).await {
            debug!(%bot, %error, "cannot show that the events of a bot wait for tokens");
        }
    }
}

impl Shared {
    /// The bucket of a bot, if it has a rate.
    pub(in super::super) fn bucket_of(&self, lease: &Lease) -> Option<Bucket> {
        let limits = &self.limits;
        let configured = limits.bots.get(&lease.bot).copied().unwrap_or_default();
        lease.own.or(configured).or(limits.general).bucket()
    }

    /// The share of a bot.
    pub(in super::super) fn weight_of(&self, lease: &Lease) -> crate::rate::Weight {
        let configured = self.limits.bots.get(&lease.bot).and_then(|own| own.weight);
        lease.own.weight.or(configured).unwrap_or_default()
    }
}

/// Cuts a slice to its first `fit` fit events, and the others before them.
pub(super) fn cut(slice: &mut Vec<Fitness>, fit: usize) {
    let mut seen = 0;
    let end = slice.iter().position(|fitness| {
        seen += usize::from(*fitness == Fitness::Fit);
        seen > fit
    });
    slice.truncate(end.unwrap_or(slice.len()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_is_cut_before_the_first_event_without_a_token() {
        let (fit, old) = (|| Fitness::Fit, || Fitness::Expired(String::new()));
        for (tokens, left) in [(0, 1), (1, 3), (2, 4), (3, 5), (9, 5)] {
            let mut slice = vec![old(), fit(), old(), fit(), fit()];
            cut(&mut slice, tokens);
            assert_eq!(slice.len(), left, "{tokens}");
        }
    }
}
