//! One lease, from the claimed events to the result of its completion.
//!
//! 1. Sort out expired and unreadable events.
//! 2. Wait for a free worker.
//! 3. Run the handler, and renew the lease after each third of the ttl.
//! 4. Settle and commit; or hand the lease over to a receiver, which will complete it.
//!
//! When a renewal is refused, or none is confirmed before the local deadline, the handler is
//! cancelled and nothing is committed: another worker may have the lease.

mod aside;
mod finish;
mod held;
mod lanes;
mod room;
mod throttle;
mod traced;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::SemaphorePermit;
use tokio::time::Instant;
use tracing::{Instrument as _, debug, debug_span};

use self::held::Term;
use self::throttle::Tokens;
use super::Shared;
use super::claim::Release;
use super::commit::{CALL_EXCEPTIONS, Committed};
use super::settle::Fitness;
use super::shelf::Watch;
use crate::event::Event;
use crate::handler::{Answer, Delivery, Failure, Outcomes, Slice};
use crate::history::AttemptResult;
use crate::queue::capability::Capability;
use crate::queue::{self, Lease};
use crate::redis::scripts::{AsideChange, Mode};

/// A claimed bot that finds no free worker for this long is given back: another process may have
/// one.
const PATIENCE: Duration = Duration::from_secs(1);
/// Interval between attempts to hand a lease over.
const HAND_AGAIN: Duration = Duration::from_millis(250);

/// Handles the records claimed under `lease`. Never fails: whatever happens to the slice, the queue
/// learns it, at the latest when the lease expires.
///
/// `whole`: a copy took the lease, and these are all events of the bot, until the copier has more.
pub(super) async fn run(
    shared: Arc<Shared>,
    lease: Lease,
    records: Vec<Vec<u8>>,
    whole: Option<Watch>,
    place: Release,
) {
    let span = debug_span!("slice", pipeline = %shared.queue.name(), bot = %lease.bot,
        fence = %lease.fence, events = records.len());
    let sizes = records.iter().map(|record| record.len() as u64).collect();
    let claimed_at = lease.confirmed_at();
    let term = Term::new(lease.deadline(), shared.total.clone());
    let worker = Worker {
        shared,
        lease,
        term,
        sizes,
        unfit: Vec::new(),
        whole,
        place: Some(place),
        claimed_at,
        tokens: None,
        next_token: None,
        waits_shown: false,
        noted: None,
        unanswered: false,
    };
    worker.run(records).instrument(span).await;
}

struct Worker {
    shared: Arc<Shared>,
    lease: Lease,
    term: Term,
    /// The bytes of each record of the slice.
    sizes: Vec<u64>,
    /// The events of the slice that the handler does not get, with their positions.
    unfit: Vec<(usize, Event)>,
    /// If a copy took the lease, and the slice has all events of the bot: notes further ones.
    whole: Option<Watch>,
    /// The place of the lease in the pool.
    place: Option<Release>,
    /// When the lease was asked for.
    claimed_at: Instant,
    /// The tokens of the slice, if its bot has a rate.
    tokens: Option<Tokens>,
    /// When the bot has its next token, if it has none.
    next_token: Option<Instant>,
    /// Whether the permit of the slice found that events wait for tokens, and showed it.
    waits_shown: bool,
    /// What each renewal notes for the lanes that are set aside.
    noted: Option<AsideChange>,
    /// Whether a renewal may have been sent and got no answer: Redis may run it later.
    unanswered: bool,
}

/// How the handling ended.
enum Ended {
    Answered(Result<Outcomes, Failure>),
    LeaseLost,
    /// An external receiver took the slice over.
    HandedOver,
    /// The handler did not start, or the process stops immediately.
    NotHandled,
    /// The bot has no token for this long.
    Throttled(Duration),
}

impl Worker {
    async fn run(self, records: Vec<Vec<u8>>) {
        if self.has_lanes() {
            self.run_lanes(records).await;
        } else {
            self.run_in_order(records).await;
        }
    }

    fn has_lanes(&self) -> bool {
        self.shared.has_lanes(&self.lease)
    }

    /// Handles all events one after the other.
    async fn run_in_order(mut self, records: Vec<Vec<u8>>) {
        let (mut slice, mut events) = self.sort_out(records);
        if self.shared.handler.is_remote() {
            without_gaps(&mut slice, &mut events);
        }
        if slice.is_empty() {
            return self.give_back().await;
        }
        if self.lease.attempts.vanished() && !self.confirm().await {
            // Confirms the lease before the handler touches an event that may kill the process. A
            // lease that was never confirmed is only a suspicion, so the attempts at that event
            // would never count.
            return self.lost();
        }
        let mut slice_events = Slice {
            bot: self.lease.bot.clone(),
            fence: self.lease.fence,
            attempt: self.lease.attempts.counted() + 1,
            deadline: self.lease.deadline(),
            events,
            granted_us: self.lease.granted_us(),
            trace: None,
        };
        let mut took = Duration::ZERO;
        let answer = if slice_events.events.is_empty() {
            Ok(Outcomes::done())
        } else {
            match self.handle(&mut slice_events, &mut took).await {
                Ended::Answered(answer) => answer,
                Ended::LeaseLost => {
                    if !self.ended_outside() {
                        slice_events
                            .trace
                            .iter()
                            .for_each(|trace| trace.fail("the lease was lost"));
                        self.note_end(&slice_events.events, took, AttemptResult::LeaseLost);
                    }
                    return self.lost();
                }
                Ended::HandedOver => return,
                Ended::NotHandled => return self.give_back().await,
                Ended::Throttled(wait) => {
                    let ms = crate::clock::millis(wait).max(1);
                    return self.give_back_with(Mode::Park { ms }).await;
                }
            }
        };
        throttle::cut(&mut slice, slice_events.events.len());
        if !self.lease.is_held() {
            return self.lost();
        }
        let mut answer = answer;
        let entries = answer.as_mut().ok().and_then(|outcomes| outcomes.ledger.take());
        let answer = self.within_quota(&slice, answer).await;
        let settlement = self.settle(&slice, answer);
        self.finish(&slice, &slice_events, settlement, entries, took).await;
    }

    /// Decodes the records and decides which events the handler gets.
    fn sort_out(&mut self, records: Vec<Vec<u8>>) -> (Vec<Fitness>, Vec<Delivery>) {
        let shared = Arc::clone(&self.shared);
        let settings = &shared.settings;
        let now = jiff::SignedDuration::try_from(self.expires()).unwrap_or_default();
        let mut slice = Vec::with_capacity(records.len());
        let mut events = Vec::with_capacity(records.len());
        for record in records {
            // A slice by lanes ends with one call, which must stay short. The others stay queued.
            if self.has_lanes() && slice.len() >= CALL_EXCEPTIONS {
                break;
            }
            let (sequence, event) = match Event::decode(&record, &self.lease.bot) {
                Ok(decoded) => decoded,
                Err(error) => {
                    slice.push(Fitness::Spent(error.to_string()));
                    continue;
                }
            };
            let attempts = self.lease.attempts;
            // An event becomes a dead letter here only after an attempt alone: the first attempt
            // may have included other events.
            if slice.is_empty() && attempts.counted() >= settings.max_attempts.max(2) {
                let reason = format!(
                    "{} workers vanished and {} attempts failed while they handled the event",
                    attempts.lost, attempts.failed
                );
                self.unfit.push((slice.len(), event));
                slice.push(Fitness::Spent(reason));
                continue;
            }
            // Both are times of the server: the clock of this process may be wrong.
            let age = Duration::from_micros(self.lease.fence.get().saturating_sub(sequence.get()));
            let expired = event.expirytime().is_some_and(|at| at.as_duration() <= now);
            if expired {
                slice.push(Fitness::Expired("its expirytime has passed".to_owned()));
            } else if settings.max_age.is_some_and(|max| age > max) {
                slice.push(Fitness::Expired("it is older than max_age".to_owned()));
            } else {
                slice.push(Fitness::Fit);
                events.push(Delivery { sequence, event });
            }
        }
        (slice, events)
    }

    /// Events have expired up to this time since 1970: that of the server when it granted the lease. If
    /// the lease knows only its fence, which may be ahead of it, no event expires before the time of this
    /// process either.
    fn expires(&self) -> Duration {
        let server = Duration::from_micros(self.lease.granted_us());
        if self.lease.knows_time() { server } else { server.min(self.shared.now()) }
    }

    /// Waits until the handler may start: for a free worker, which is returned, and for tokens.
    async fn admit<'a>(
        &mut self,
        shared: &'a Shared,
        slice: &mut Slice,
    ) -> Result<SemaphorePermit<'a>, Ended> {
        let free = tokio::time::timeout(PATIENCE, shared.workers.acquire());
        // No worker became free, or the semaphore is closed, which never happens.
        let Ok(Ok(worker)) = self.while_held(free).await? else { return Err(Ended::NotHandled) };
        if shared.shutdown.soft.is_cancelled() {
            return Err(Ended::NotHandled);
        }
        if !self.lease.is_held() {
            // A process that was frozen reaches this point before its timers fire.
            return Err(Ended::LeaseLost);
        }
        let connection = shared.queue.link().connection(shared.queue.keys(self.lease.shard));
        if !self.lease.is_fresh(connection) {
            let confirmed = tokio::select! {
                biased;
                () = shared.shutdown.hard.cancelled() => return Err(Ended::NotHandled),
                confirmed = self.confirm() => confirmed,
            };
            if !confirmed {
                return Err(Ended::LeaseLost);
            }
        }
        self.take_tokens(slice).await?;
        Ok(worker)
    }

    /// Waits for a free worker and runs the handler, renewing the lease meanwhile.
    async fn handle(&mut self, slice: &mut Slice, took: &mut Duration) -> Ended {
        let shared = Arc::clone(&self.shared);
        let _worker = match self.admit(&shared, slice).await {
            Ok(worker) => worker,
            Err(ended) => return ended,
        };
        let _busy = shared.busy();
        let started = Instant::now();
        slice.deadline = started + shared.settings.slice_time;
        shared.trace(slice);
        let timeout = shared.settings.handler_timeout;
        let capability = self.capability(slice.events.len());
        let handling = shared.handler.handle_boxed(&shared.environment, slice, &capability);
        let handled = self.while_held(tokio::time::timeout(timeout, handling)).await;
        *took = started.elapsed();
        match handled {
            Ok(Ok(Ok(Answer::Settled(outcomes)))) => Ended::Answered(Ok(outcomes)),
            Ok(Ok(Ok(Answer::Accepted))) => {
                self.observe(slice, *took);
                self.note_end(&slice.events, *took, AttemptResult::Accepted);
                self.hand_over(*took).await;
                Ended::HandedOver
            }
            Ok(Ok(Err(failure))) => Ended::Answered(Err(failure)),
            Ok(Err(_)) => Ended::Answered(Err(too_long(timeout))),
            Err(ended) => ended,
        }
    }

    /// The capability by which an external receiver names the lease.
    fn capability(&self, n: usize) -> String {
        let shared = &self.shared;
        if !shared.handler.is_remote() {
            return String::new();
        }
        let capability = Capability {
            pipeline: shared.queue.name().clone(),
            bot: self.lease.bot.clone(),
            run: self.lease.run().to_owned(),
            fence: self.lease.fence.get(),
            n,
            ttl_ms: crate::clock::millis(shared.settings.lease_ttl),
        };
        capability.issue(&shared.signing_key)
    }

    /// Hands the lease over to the receiver, for the ttl from now. If receivers hold too many
    /// leases already, this worker keeps it and stays busy, which holds back the receiver's next
    /// slices.
    async fn hand_over(&mut self, took: Duration) {
        let shared = Arc::clone(&self.shared);
        shared.unavailable_for(false);
        let until = Instant::now() + shared.settings.lease_ttl;
        let max = queue::open_max(shared.queue.shard_count());
        let mut cost = self.cost(0, took);
        loop {
            let sent = shared.sending(self.lease.shard);
            let left = until.saturating_duration_since(sent.at);
            let handover = self.lease.handover(left, max, cost);
            let deadline = self.lease.deadline();
            match shared.commits.commit(self.lease.shard, handover, deadline).await {
                Committed::Done => return,
                Committed::Full => {
                    cost = 0;
                    self.extend(sent, left);
                }
                // Stale: the receiver completed the lease before its own answer arrived, or the
                // lease was revoked.
                Committed::Stale | Committed::Unknown => {
                    return debug!("there was nothing left to hand over");
                }
            }
            tokio::select! {
                biased;
                // The receiver's lease is confirmed, and continues.
                () = shared.shutdown.soft.cancelled() => return,
                () = tokio::time::sleep(HAND_AGAIN) => {}
            }
            if !self.lease.is_held() {
                return debug!("too many leases are handed over; this one runs out");
            }
        }
    }
}

fn too_long(timeout: Duration) -> Failure {
    let limit = humantime::format_duration(timeout);
    Failure::timed_out(format!("the handler took longer than {limit} (handler_timeout)"))
}

/// Cuts a slice so that the events to handle are consecutive: either the unfit events at its head,
/// which are settled alone, or the fit events before the first unfit one.
fn without_gaps(slice: &mut Vec<Fitness>, events: &mut Vec<Delivery>) {
    let fit = |fitness: &Fitness| *fitness == Fitness::Fit;
    let Some(first) = slice.first().map(fit) else { return };
    let same = slice.iter().position(|fitness| fit(fitness) != first).unwrap_or(slice.len());
    slice.truncate(same);
    events.truncate(if first { same } else { 0 });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{BotId, Sequence};

    #[test]
    fn a_receiver_gets_events_that_lie_side_by_side() {
        let expired = || Fitness::Expired(String::new());
        let spent = || Fitness::Spent(String::new());
        let fit = || Fitness::Fit;
        let cases = [
            (vec![], (0, 0)),
            (vec![fit(), fit(), fit()], (3, 3)),
            (vec![fit(), expired(), fit()], (1, 1)),
            (vec![expired(), spent(), fit(), fit()], (2, 0)),
            (vec![spent(), expired()], (2, 0)),
        ];
        let bot = BotId::parse("b").unwrap();
        let event = Event::builder("t", &bot).build().unwrap();
        for (mut slice, (kept, handled)) in cases {
            let fit = slice.iter().filter(|fitness| **fitness == Fitness::Fit).count();
            let sequence = Sequence::new(1);
            let mut events = vec![Delivery { sequence, event: event.clone() }; fit];
            without_gaps(&mut slice, &mut events);
            assert_eq!((slice.len(), events.len()), (kept, handled), "{slice:?}");
        }
    }
}
