//! Leases for a lane that was set aside and is due again.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tracing::debug;

use super::super::claim::SLICE_BYTES;
use super::super::settle::{Fitness, given_up};
use super::lanes::{Run, run_all};
use super::traced::{commits, ended};
use super::{Worker, throttle};
use crate::handler::Outcomes;
use crate::id::Lane;
use crate::redis::aside::{Tried, Waiting};
use crate::redis::scripts::{Mode, ReadLane, ReadSlice};
use crate::redis::{RedisError, Reply};

impl Worker {
    /// A slice of a lane that was set aside.
    pub(super) async fn run_lane(mut self, lane: Lane) {
        let Some(state) = self.lease.aside.get(lane) else { return self.give_back().await };
        let usual = self.shared.usual_events();
        let usual = self.shared.slice_events(&self.lease, usual);
        let limit = usual.min(self.shared.slice_limit(state.attempts > 0, state.alone));
        let (length, records) = match self.read_lane(lane, limit).await {
            Ok(read) => read,
            Err(error) => return debug!(%error, "cannot read a lane; its lease runs out"),
        };
        self.sizes = records.iter().map(|record| record.len() as u64).collect();
        // Attempts belong to the first event of the lane, not of the queue.
        self.lease.attempts.failed = self.lease.attempts.failed.saturating_add(state.attempts);
        let (mut fitness, events) = self.sort_out(records);
        if !self.note_tried(Tried::Lane(lane)).await {
            return self.lost();
        }
        let mut runs = Vec::new();
        if !events.is_empty() {
            let mut slice = self.slice_of(events);
            let shared = Arc::clone(&self.shared);
            let worker = match self.admit(&shared, &mut slice).await {
                Ok(worker) => worker,
                Err(ended) => return self.not_handled(ended).await,
            };
            throttle::cut(&mut fitness, slice.events.len());
            let of_lane = vec![lane; slice.events.len()];
            runs = self.runs(&fitness, slice.events, &of_lane);
            let (term, tokens) = (self.term.clone(), self.tokens.take());
            let running = run_all(&shared, (&term, tokens.as_ref()), &mut runs, 1);
            let ended = self.while_held(running).await;
            drop(worker);
            if let Err(ended) = ended {
                return self.not_handled(ended).await;
            }
        }
        if !self.lease.is_held() {
            return self.lost();
        }
        self.end_lane(state, length, &fitness, runs).await;
    }

    /// The number of events of a lane that is set aside, and its first ones.
    async fn read_lane(
        &self,
        lane: Lane,
        limit: usize,
    ) -> Result<(usize, Vec<Vec<u8>>), RedisError> {
        let (link, bot) = (self.shared.queue.link(), &self.lease.bot);
        let keys = self.shared.queue.keys(self.lease.shard);
        let slice = ReadSlice { keys, bot, limit, bytes: SLICE_BYTES };
        let records = link.call(&ReadLane { lane, slice }).await?;
        let mut length = redis::cmd("LLEN");
        length.arg(keys.lane(lane, bot));
        let length = link.command("LLEN", length).await?;
        let length = Reply::single(length).and_then(|mut reply| reply.number());
        Ok((length.map_err(|source| link.misread("LLEN", source))?, records))
    }

    /// Settles a slice of a lane and commits it.
    async fn end_lane(
        &mut self,
        state: Waiting,
        length: usize,
        fitness: &[Fitness],
        mut runs: Vec<Run>,
    ) {
        let (mut answer, mut took) = (Ok(Outcomes::done()), Duration::ZERO);
        if let Some(run) = runs.first_mut() {
            answer = std::mem::replace(&mut run.answer, Ok(Outcomes::done()));
            took = run.took;
        }
        let answer = self.within_quota(fitness, answer).await;
        let settlement = self.settle(fitness, answer);
        let (n, lane) = (settlement.n, state.lane);
        let mut aside = self.lease.aside.trying(None);
        if n >= length {
            aside.remove(lane);
        } else {
            aside.set(self.waiting(lane, &settlement, state.alone));
        }
        let exceptions = settlement.exceptions.clone();
        if let Some(reason) = &settlement.failure {
            self.log_retry(reason, settlement.mode);
        }
        if !runs.is_empty() {
            self.observe_events(fitness.len(), took);
        }
        let given_up = given_up(fitness, &exceptions);
        let cost = self.cost(n, took);
        let bytes = self.sizes[..n].iter().sum();
        let mode = self.rest_without_tokens(Mode::Release);
        let mut completion = self.lease.completion((n, bytes), mode, cost, exceptions);
        completion.aside = Some(self.change(aside, Some(lane)));
        let failure = settlement.failure.as_deref();
        let traced = commits(runs.iter().map(|run| (&run.slice, failure)));
        let committed = self.commit(completion).await;
        ended(traced, committed);
        if !self.is_committed(committed) {
            return;
        }
        self.show_rest(mode).await;
        let (now, settled) = (self.shared.now(), settlement.settled);
        self.shared.meter.settled.fetch_add(n as u64, Ordering::Relaxed);
        let events = runs.iter().flat_map(|run| &run.slice.events);
        let sequences = events.take(settled).map(|delivery| delivery.sequence);
        settlement.tally.record(&self.shared.metrics, sequences, now);
        if let Some(given_up) = given_up {
            let event = self.event_of(given_up.index, &runs);
            given_up.warn(self.shared.queue.name(), &self.lease.bot, event);
        }
        for run in &runs {
            self.tell_committed(&run.slice, settled);
            self.note(&run.slice.events, took, now, &settlement);
        }
        let first = runs.first().and_then(|run| run.slice.events.first());
        let first = first.map(|delivery| delivery.sequence);
        settlement.count(&self.shared.meter, now);
        settlement.note_failure(&self.shared.queue, self.noted_bot(), first, now).await;
    }
}
