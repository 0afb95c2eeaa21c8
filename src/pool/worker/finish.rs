//! The end of a slice: its settlement, its cost, its commit.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tracing::{debug, warn};

use super::super::commit::{CALL_EXCEPTIONS, Committed};
use super::super::note::{Of, Tried};
use super::super::retry::RetryBudget;
use super::super::settle::{Fitness, Policy, Settlement, given_up, settle};
use super::super::shelf::WAIT;
use super::Worker;
use super::traced::{commits, ended};
use crate::caught::caught;
use crate::event::Event;
use crate::handler::{Delivery, Failure, Outcomes, Slice};
use crate::history::AttemptResult;
use crate::ledger::{Leaving, LedgerEntry};
use crate::redis::scripts::{Completion, Exception, Mode};

/// Maximum cost of one slice in virtual time: an unlimited cost would starve its bot.
const COST_MAX: Duration = Duration::from_secs(60);
/// Maximum number of events in a part of a completion that is committed in parts.
const PART: usize = 250;

impl Worker {
    pub(super) fn settle(
        &self,
        slice: &[Fitness],
        answer: Result<Outcomes, Failure>,
    ) -> Settlement {
        let shared = &self.shared;
        let unavailable = matches!(&answer, Err(failure) if failure.is_outage());
        let unavailable = shared.unavailable_for(unavailable);
        self.settle_after(slice, answer, unavailable)
    }

    /// Settles a slice. `unavailable`: how long its target has been unavailable.
    pub(super) fn settle_after(
        &self,
        slice: &[Fitness],
        answer: Result<Outcomes, Failure>,
        unavailable: Duration,
    ) -> Settlement {
        let shared = &self.shared;
        if self.lease.attempts.counted() == 0 {
            shared.retries.earn(slice.len());
        }
        let mut settlement = settle(
            slice,
            answer,
            Policy {
                max_attempts: shared.settings.max_attempts,
                backoff: shared.settings.backoff,
                batch: shared.settings.batch,
                attempts: self.lease.attempts,
                unavailable,
                random: rand::random(),
                now: Duration::from_millis(self.now_ms()),
            },
        );
        if let Mode::Fail { ms, .. } = &mut settlement.mode
            && !shared.retries.take()
        {
            let slowed = RetryBudget::slowed(Duration::from_millis(*ms), &shared.settings.backoff);
            *ms = crate::clock::millis(slowed);
        }
        settlement
    }

    pub(super) async fn finish(
        &mut self,
        fitness: &[Fitness],
        slice: &Slice,
        mut settlement: Settlement,
        entries: Option<Vec<LedgerEntry>>,
        took: Duration,
    ) {
        let exceptions = std::mem::take(&mut settlement.exceptions);
        let Settlement { n, settled, mode, tally, ref failure, .. } = settlement;
        if let Some(reason) = failure {
            self.log_retry(reason, mode);
        }
        let mode = self.rest_without_tokens(mode);
        let given_up = given_up(fitness, &exceptions);
        if took > Duration::ZERO {
            self.observe(slice, took);
        }
        let cost = self.cost(n, took);
        let mut now = None;
        let traced = commits(std::iter::once((slice, failure.as_deref())));
        let committed = if self.may_wait(n, mode, &exceptions, took) {
            now = Some(self.shared.now());
            // The next lease need not wait for this completion.
            self.place = None;
            let bytes = self.sizes.iter().sum();
            let completion = self.lease.completion((n, bytes), mode, cost, exceptions);
            let deadline = self.lease.deadline();
            self.shared.commits.commit_soon(self.lease.shard, completion, deadline).await
        } else if self.shared.queue.ledger().is_some() || exceptions.len() > CALL_EXCEPTIONS {
            let slice = (fitness, slice, entries);
            self.commit_in_parts(slice, n, mode, cost, exceptions).await
        } else {
            let bytes = self.sizes[..n].iter().sum();
            self.commit(self.lease.completion((n, bytes), mode, cost, exceptions)).await
        };
        ended(traced, committed);
        match committed {
            Committed::Done | Committed::Full => {
                self.show_rest(mode).await;
                self.shared.meter.settled.fetch_add(n as u64, Ordering::Relaxed);
                let sequences = slice.events[..settled].iter().map(|delivery| delivery.sequence);
                let now = now.unwrap_or_else(|| self.shared.now());
                tally.record(&self.shared.metrics, sequences, now);
                if let Some(given_up) = given_up {
                    let event = self.event_at(given_up.index, fitness, slice);
                    given_up.warn(self.shared.queue.name(), &self.lease.bot, event);
                }
                self.tell_committed(slice, settled);
                self.note(&slice.events, took, now, &settlement);
                let first = slice.events.first().map(|delivery| delivery.sequence);
                settlement.count(&self.shared.meter, now);
                settlement.note_failure(&self.shared.queue, self.noted_bot(), first, now).await;
            }
            Committed::Stale => {
                if !self.ended_outside() {
                    self.shared.metrics.stale_completions.increment(1);
                }
                self.lost();
            }
            Committed::Unknown => debug!("the completion was not answered; it may have been done"),
        }
    }

    /// Logs why a slice is tried again, if it is.
    pub(super) fn log_retry(&self, reason: &str, mode: Mode) {
        if mode == Mode::Release {
            return;
        }
        let (pipeline, bot) = (self.shared.queue.name(), &self.lease.bot);
        if let Some(suppressed) = self.shared.warned.take() {
            warn!(%pipeline, %bot, reason, suppressed,
                "the handler failed, and is tried again; more such within a minute are only counted");
        } else {
            debug!(reason, ?mode, "the slice is tried again");
        }
    }

    /// Whether the completion may wait for others: see [`super::super::shelf`]. A slice that took long
    /// is worth a call of its own.
    fn may_wait(&self, n: usize, mode: Mode, exceptions: &[Exception], took: Duration) -> bool {
        let simple = self.whole.is_some() && mode == Mode::Release && exceptions.is_empty();
        simple
            && n == self.sizes.len()
            && took < WAIT
            && self.shared.queue.ledger().is_none()
            && !self.shared.shutdown.soft.is_cancelled()
            && self.shared.commits.may_wait(self.lease.deadline())
    }

    /// The event at a position of the slice; `None` if its record cannot be read.
    fn event_at<'a>(
        &'a self,
        index: usize,
        fitness: &[Fitness],
        slice: &'a Slice,
    ) -> Option<&'a Event> {
        if fitness.get(index) == Some(&Fitness::Fit) {
            let k = fitness[..index].iter().filter(|fitness| **fitness == Fitness::Fit).count();
            return slice.events.get(k).map(|delivery| &delivery.event);
        }
        self.unfit.iter().find(|(place, _)| *place == index).map(|(_, event)| event)
    }

    pub(super) async fn commit(&self, completion: Completion) -> Committed {
        let deadline = self.lease.deadline();
        self.shared.commits.commit(self.lease.shard, completion, deadline).await
    }

    /// Commits in parts, to keep each script short: each part removes its own ledger entries.
    async fn commit_in_parts(
        &mut self,
        (fitness, slice, entries): (&[Fitness], &Slice, Option<Vec<LedgerEntry>>),
        n: usize,
        mode: Mode,
        cost: u64,
        exceptions: Vec<Exception>,
    ) -> Committed {
        let shared = Arc::clone(&self.shared);
        let ttl_ms = crate::clock::millis(shared.settings.lease_ttl);
        let mut deliveries = slice.events.iter().enumerate();
        let mut entries = entries.map(|entries| entries.into_iter().peekable());
        let mut exceptions = exceptions;
        exceptions.sort_by_key(|exception| exception.index);
        let mut exceptions = exceptions.into_iter().peekable();
        let mut from = 0;
        loop {
            let to = n.min(from + PART);
            let fit = fitness[from..to].iter().filter(|fitness| **fitness == Fitness::Fit).count();
            let mut leaving = Leaving::default();
            for (at, delivery) in deliveries.by_ref().take(fit) {
                if let Some(entries) = &mut entries {
                    while let Some(entry) = entries.next_if(|entry| entry.index <= at) {
                        leaving.add(delivery.sequence, entry.account, entry.change);
                    }
                } else if let Some((account, change)) =
                    shared.queue.ledger().and_then(|ledger| ledger.entry(&delivery.event))
                {
                    leaving.add(delivery.sequence, account, change);
                }
            }
            let mut here = Vec::new();
            while let Some(exception) = exceptions.next_if(|exception| exception.index < to) {
                here.push(Exception { index: exception.index - from, ..exception });
            }
            let last = to == n;
            let (mode, cost) = if last { (mode, cost) } else { (Mode::Keep { ttl_ms }, 0) };
            let bytes = self.sizes[from..to].iter().sum();
            let mut completion = self.lease.completion((to - from, bytes), mode, cost, here);
            completion.leaving = (!leaving.accounts.is_empty()).then_some(leaving);
            let sent = self.shared.sending(self.lease.shard);
            let committed = self.commit(completion).await;
            if last || committed != Committed::Done {
                return committed;
            }
            self.lease.removed(to - from);
            self.extend(sent, self.shared.settings.lease_ttl);
            from = to;
        }
    }

    /// The cost of a slice in virtual time, µs.
    pub(super) fn cost(&self, n: usize, took: Duration) -> u64 {
        let tokens_us = self.shared.total.as_ref().map_or(0, |total| total.cost_us(n));
        // A bot of a weight below 1 pays more for each event, even if its handler takes no time.
        let used = took.as_micros().max(n as u128).max(tokens_us);
        let weighted = self.shared.weight_of(&self.lease).divide(used);
        let cost = weighted.max(n as u128).min(COST_MAX.as_micros());
        u64::try_from(cost).unwrap_or(u64::MAX)
    }

    /// Tells the handler that a completion is confirmed.
    pub(super) fn tell_committed(&self, slice: &Slice, settled: usize) {
        let shared = &self.shared;
        // All events of the slice were unfit: the handler did not get it.
        if !slice.events.is_empty() {
            let told = || shared.handler.committed(slice, settled);
            caught(shared.queue.name(), "Handler::committed", told);
        }
    }

    /// Notes an attempt that is committed.
    pub(super) fn note(
        &self,
        events: &[Delivery],
        took: Duration,
        now: Duration,
        settlement: &Settlement,
    ) {
        let Some((recorder, tried)) = self.shared.recorder.as_ref().zip(Tried::of(events)) else {
            return;
        };
        self.attempt(took, now).settled(recorder, tried, settlement);
    }

    /// Notes an attempt without a settlement, if its handler was started.
    pub(super) fn note_end(&self, events: &[Delivery], took: Duration, result: AttemptResult) {
        let Some((recorder, tried)) = self.shared.recorder.as_ref().zip(Tried::of(events)) else {
            return;
        };
        if took > Duration::ZERO {
            self.attempt(took, self.shared.now()).ended(recorder, tried, result);
        }
    }

    fn attempt(&self, took: Duration, now: Duration) -> Of<'_> {
        Of { bot: &self.lease.bot, attempts: self.lease.attempts, took: Some(took), now }
    }

    /// Records the duration of the handler.
    pub(super) fn observe(&self, slice: &Slice, took: Duration) {
        self.observe_events(slice.events.len(), took);
    }

    /// Records the duration of a handler that got this number of events.
    pub(super) fn observe_events(&self, events: usize, took: Duration) {
        self.shared.metrics.handle_seconds.record(took.as_secs_f64());
        self.shared.meter.calls.took(took);
        #[expect(clippy::cast_precision_loss, reason = "a slice has at most 5,000 events")]
        self.shared.metrics.slice_events.record(events as f64);
        self.shared.estimate.observe(took, events);
        if self.shared.mostly_waits() {
            let time = self.shared.settings.slice_time;
            self.shared.estimate.observe_wait(took, events, time);
        }
    }
}

impl super::Shared {
    /// Whether most of the time of a slice is a wait.
    pub(in super::super) fn mostly_waits(&self) -> bool {
        let asked = || self.handler.mostly_waits();
        caught(self.queue.name(), "Handler::shares_calls", asked).unwrap_or(false)
    }
}
