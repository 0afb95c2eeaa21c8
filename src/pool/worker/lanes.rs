//! Leases of bots with an ordering key below the bot.
//!
//! A lease is for one list: the queue, or a lane that was set aside and is due again. A slice of the
//! queue runs lane by lane, several at once. One completion ends it: events of a lane that failed, or
//! that has failed before, leave the queue for the list of the lane, and count as queued there. So a
//! failure holds only its lane.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::SemaphorePermit;
use tokio::time::Instant;
use tracing::debug;

use super::super::commit::Committed;
use super::super::lanes::{List, Situation, choose};
use super::super::retry::isolate_after_failure;
use super::super::settle::{Fitness, Settlement, Tally, given_up, leave};
use super::super::{Lanes, Shared};
use super::held::Term;
use super::room::wants_later;
use super::throttle::Tokens;
use super::traced::{commits, ended};
use super::{Ended, Worker, throttle, too_long};
use crate::event::Event;
use crate::handler::{Answer, Delivery, Failure, Outcomes, Slice};
use crate::id::{BotId, Lane};
use crate::redis::aside::{Aside, Tried, Waiting};
use crate::redis::scripts::{AsideChange, Exception, Fate, Mode};

/// Further lanes of a bot keep this part of the workers free: a quarter, rounded up.
const KEPT: usize = 4;

/// The events of one lane in a slice of the queue.
pub(super) struct Run {
    lane: Lane,
    pub(super) slice: Slice,
    /// The place of each event in the slice of the queue.
    places: Vec<usize>,
    pub(super) took: Duration,
    pub(super) answer: Result<Outcomes, Failure>,
}

impl Run {
    /// Runs the handler, if its tokens can be used now.
    async fn start(&mut self, shared: &Shared, tokens: Option<&Tokens>) {
        if let Some(tokens) = tokens
            && !tokens.use_now(shared, self.slice.events.len()).await
        {
            return;
        }
        self.handle(shared).await;
    }

    /// Runs the handler. It has its own time, as a slice of its own would have.
    async fn handle(&mut self, shared: &Shared) {
        let _busy = shared.busy();
        let started = Instant::now();
        self.slice.deadline = started + shared.settings.slice_time;
        shared.trace(&mut self.slice);
        let timeout = shared.settings.handler_timeout;
        let handling = shared.handler.handle_boxed(&shared.environment, &self.slice, "");
        let handled = tokio::time::timeout(timeout, handling).await;
        self.took = started.elapsed();
        self.answer = match handled {
            Ok(Ok(Answer::Settled(outcomes))) => Ok(outcomes),
            Ok(Ok(Answer::Accepted)) => Err(Failure::transient(
                0,
                "the receiver answered 202, but with order_by it must answer when it is done",
            )),
            Ok(Err(failure)) => Err(failure),
            Err(_) => Err(too_long(timeout)),
        };
    }
}

/// The answer of a lane that was not started: it is due again at once, and no attempt is counted.
fn not_started() -> Outcomes {
    Outcomes::first(0).rest_after(Duration::ZERO)
}

/// A worker for a further lane of a bot. A quarter of the workers stays free, because slow lanes of one
/// bot would take all of them.
fn spare_worker(shared: &Shared) -> Option<SemaphorePermit<'_>> {
    let kept = u32::try_from(shared.settings.workers.max.div_ceil(KEPT)).ok()?;
    let mut free = shared.workers.try_acquire_many(kept.saturating_add(1)).ok()?;
    free.split(1)
}

/// Runs lanes, at most `most` at once. The first one has a worker; each further one needs a spare one.
/// None is started once the process stops, or after the time that a handler may take: otherwise many
/// slow lanes would outlast a stop. None is started or goes on after `term`. `tokens`: those of the slice, if
/// the bot has a rate.
pub(super) async fn run_all(
    shared: &Shared,
    (term, tokens): (&Term, Option<&Tokens>),
    runs: &mut [Run],
    most: usize,
) {
    let mut waiting = runs.iter_mut().peekable();
    let mut running = FuturesUnordered::new();
    let mut workers = Vec::new();
    let begun = Instant::now();
    let may_start = || {
        let stops = shared.shutdown.soft.is_cancelled();
        !stops && begun.elapsed() < shared.settings.handler_timeout
    };
    loop {
        while waiting.peek().is_some() && running.len() < most && may_start() {
            if running.len() > workers.len() {
                match spare_worker(shared) {
                    Some(worker) => workers.push(worker),
                    None => break,
                }
            }
            running.extend(waiting.next().map(|run| term.run(run.start(shared, tokens))));
        }
        if running.next().await.is_none() {
            return;
        }
        // Bots that wait for a worker go before the next lane.
        workers.truncate(running.len().saturating_sub(1));
    }
}

/// The end of a slice of the queue.
#[derive(Default)]
struct Whole {
    exceptions: Vec<Exception>,
    tally: Tally,
    /// The end of each lane.
    lanes: Vec<Settlement>,
}

impl Worker {
    pub(super) async fn run_lanes(self, records: Vec<Vec<u8>>) {
        let lanes = self.shared.lanes.clone();
        let situation = Situation {
            tag: lanes.as_ref().map(|lanes| lanes.tag),
            has_queue: !records.is_empty(),
            vanished: self.lease.attempts.vanished(),
            fence: self.lease.fence,
            now_ms: self.now_ms(),
        };
        match (choose(&self.lease.aside, situation), lanes) {
            (List::Lane(lane), _) => self.run_lane(lane).await,
            (List::Queue, Some(lanes)) => self.run_queue(&lanes, records).await,
            (List::Queue, None) => self.run_in_order(records).await,
            (List::None(ms), _) => self.give_back_with(Mode::Park { ms }).await,
        }
    }

    /// The time of the server, as the lease shows it: the clocks of processes may differ. Not by its fence,
    /// which is ahead after the clock of the server was set back.
    pub(super) fn now_ms(&self) -> u64 {
        self.lease.granted_us() / 1_000 + crate::clock::millis(self.claimed_at.elapsed())
    }

    /// The bot, and whether lanes of it were set aside before this slice.
    pub(super) fn noted_bot(&self) -> (&BotId, bool) {
        (&self.lease.bot, !self.lease.aside.is_empty())
    }

    /// What changes for the lanes that are set aside.
    pub(super) fn change(&self, aside: Aside, list: Option<Lane>) -> AsideChange {
        let next_ms = aside.next_ms(self.now_ms());
        AsideChange { aside, next_ms, list }
    }

    /// After a holder vanished, notes which list is tried, before a handler touches an event that may
    /// end this process too. Returns whether the lease is still held.
    pub(super) async fn note_tried(&mut self, tried: Tried) -> bool {
        // Also without a vanished holder: a success in another lane has forgotten those that vanished.
        if !self.lease.attempts.are_noted() {
            return true;
        }
        if !self.lease.aside.is_empty() {
            let noted = self.lease.aside.trying(Some(tried));
            self.noted = Some(self.change(noted, None));
        }
        self.confirm().await
    }

    /// A slice of the queue.
    async fn run_queue(mut self, lanes: &Lanes, records: Vec<Vec<u8>>) {
        let (mut fitness, events) = self.sort_out(records);
        if fitness.is_empty() {
            return self.give_back().await;
        }
        let (fit, of_lane) = self.split(lanes, &mut fitness, events);
        if !self.note_tried(Tried::Queue).await {
            return self.lost();
        }
        let mut slice = self.slice_of(fit);
        let mut runs = Vec::new();
        let mut took = Duration::ZERO;
        if !slice.events.is_empty() {
            let shared = Arc::clone(&self.shared);
            let worker = match self.admit(&shared, &mut slice).await {
                Ok(worker) => worker,
                Err(ended) => return self.not_handled(ended).await,
            };
            throttle::cut(&mut fitness, slice.events.len());
            runs = self.runs(&fitness, slice.events, &of_lane);
            let started = Instant::now();
            let (term, tokens) = (self.term.clone(), self.tokens.take());
            let under = (&term, tokens.as_ref());
            let running = run_all(&shared, under, &mut runs, lanes.concurrency);
            let ended = self.while_held(running).await;
            took = started.elapsed();
            drop(worker);
            if let Err(ended) = ended {
                return self.not_handled(ended).await;
            }
        }
        if !self.lease.is_held() {
            return self.lost();
        }
        self.end_queue(lanes, &fitness, runs, took).await;
    }

    pub(super) fn slice_of(&self, events: Vec<Delivery>) -> Slice {
        Slice {
            bot: self.lease.bot.clone(),
            fence: self.lease.fence,
            attempt: self.lease.attempts.counted() + 1,
            deadline: self.lease.deadline(),
            events,
            granted_us: self.lease.granted_us(),
            trace: None,
        }
    }

    /// Takes the events whose lanes are set aside out of the slice. Returns the others and their lanes.
    fn split(
        &self,
        lanes: &Lanes,
        fitness: &mut [Fitness],
        events: Vec<Delivery>,
    ) -> (Vec<Delivery>, Vec<Lane>) {
        let (mut fit, mut of_lane) = (Vec::with_capacity(events.len()), Vec::new());
        let places = fitness.iter_mut().filter(|fitness| **fitness == Fitness::Fit);
        for (place, delivery) in places.zip(events) {
            let lane = lanes.of(&delivery.event);
            if self.lease.aside.get(lane).is_some() {
                *place = Fitness::Aside(lane);
            } else {
                fit.push(delivery);
                of_lane.push(lane);
            }
        }
        (fit, of_lane)
    }

    /// The events of each lane, in the order of their first events.
    pub(super) fn runs(
        &self,
        fitness: &[Fitness],
        events: Vec<Delivery>,
        of_lane: &[Lane],
    ) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let places = (0..fitness.len()).filter(|place| fitness[*place] == Fitness::Fit);
        for ((place, delivery), lane) in places.zip(events).zip(of_lane) {
            let at = runs.iter().position(|run| run.lane == *lane).unwrap_or_else(|| {
                let (slice, places, took) = (self.slice_of(Vec::new()), Vec::new(), Duration::ZERO);
                let answer = Ok(not_started());
                runs.push(Run { lane: *lane, slice, places, took, answer });
                runs.len() - 1
            });
            runs[at].slice.events.push(delivery);
            runs[at].places.push(place);
        }
        runs
    }

    pub(super) async fn not_handled(&self, ended: Ended) {
        match ended {
            Ended::Throttled(wait) => {
                let ms = crate::clock::millis(wait).max(1);
                self.give_back_with(Mode::Park { ms }).await;
            }
            Ended::LeaseLost => self.lost(),
            Ended::NotHandled | Ended::HandedOver | Ended::Answered(_) => self.give_back().await,
        }
    }

    /// Settles a slice of the queue and commits it.
    async fn end_queue(
        &mut self,
        lanes: &Lanes,
        fitness: &[Fitness],
        mut runs: Vec<Run>,
        took: Duration,
    ) {
        let is_away = |run: &Run| {
            let first = |failure: &Failure| failure.is_unavailable() && failure.at == Some(0);
            run.answer.as_ref().err().is_some_and(first)
        };
        let all_away = !runs.is_empty() && runs.iter().all(is_away);
        let is_outage = |run: &Run| run.answer.as_ref().err().is_some_and(Failure::is_outage);
        let unavailable = self.shared.unavailable_for(all_away && runs.iter().all(is_outage));
        if all_away && runs.len() > 1 {
            // The target of all lanes is away. To set them all aside would only move the queue.
            return self.wait_for_target(fitness, &runs, unavailable).await;
        }
        let mut aside = self.lease.aside.trying(None);
        if aside.is_empty() {
            aside.tag = lanes.tag;
        }
        if self.lease.aside.tried == Some(Tried::Queue) {
            // After a redrive: the event may be the first of its lane now, which counted for another.
            for fitness in fitness {
                if let Fitness::Aside(lane) = fitness
                    && let Some(waiting) = aside.get(*lane)
                {
                    let alone =
                        waiting.alone.max(isolate_after_failure(self.shared.settings.batch));
                    aside.set(Waiting { due_ms: self.now_ms(), attempts: 0, alone, ..waiting });
                }
            }
        }
        let mut whole = Whole::default();
        let mut room = self.room(runs.iter().any(|run| wants_later(&run.answer))).await;
        for run in &mut runs {
            let answer = std::mem::replace(&mut run.answer, Ok(not_started()));
            let size = |k: usize| run.places.get(k).map(|place| self.sizes[*place]);
            let answer = room.bound(answer, size);
            let fit = vec![Fitness::Fit; run.places.len()];
            let mut settlement = self.settle_after(&fit, answer, unavailable);
            let exceptions = std::mem::take(&mut settlement.exceptions).into_iter();
            whole.exceptions.extend(
                exceptions
                    .map(|exception| Exception { index: run.places[exception.index], ..exception }),
            );
            for place in &run.places[settlement.n..] {
                whole.exceptions.push(Exception { index: *place, fate: Fate::Lane(run.lane) });
            }
            if settlement.n < run.places.len() {
                aside.set(self.waiting(run.lane, &settlement, 0));
            }
            whole.tally.add(settlement.tally);
            whole.lanes.push(settlement);
        }
        let counted = self.lease.attempts.counted();
        leave(fitness, counted, &mut whole.exceptions, &mut whole.tally);
        whole.exceptions.sort_by_key(|exception| exception.index);
        let handled = runs.iter().map(|run| run.took).sum();
        self.commit_queue(fitness, &runs, whole, aside, (took, handled)).await;
    }

    /// The state of a lane after a slice of it that did not end completely; `alone`: the number of
    /// events that were to be handled until its slices are as large as usual.
    pub(super) fn waiting(&self, lane: Lane, settlement: &Settlement, alone: u32) -> Waiting {
        let before = if settlement.settled == 0 { self.lease.attempts.counted() } else { 0 };
        // A dead letter is no success after which slices grow.
        let Tally { done, later, .. } = settlement.tally;
        let alone = alone.saturating_sub(u32::try_from(done + later).unwrap_or(u32::MAX));
        let now_ms = self.now_ms();
        match settlement.mode {
            Mode::Fail { ms, isolate } => {
                let (attempts, alone) = (before.saturating_add(1), alone.max(isolate));
                Waiting { lane, due_ms: now_ms.saturating_add(ms), attempts, alone }
            }
            Mode::Park { ms } => {
                Waiting { lane, due_ms: now_ms.saturating_add(ms), attempts: before, alone }
            }
            _ => Waiting { lane, due_ms: now_ms, attempts: 0, alone },
        }
    }

    async fn commit_queue(
        &mut self,
        fitness: &[Fitness],
        runs: &[Run],
        whole: Whole,
        aside: Aside,
        (took, handled): (Duration, Duration),
    ) {
        let Whole { exceptions, tally, lanes } = whole;
        for settlement in &lanes {
            if let Some(reason) = &settlement.failure {
                self.log_retry(reason, settlement.mode);
            }
        }
        if !runs.is_empty() {
            let events = runs.iter().map(|run| run.places.len()).sum();
            self.observe_events(events, took);
        }
        let given_up = given_up(fitness, &exceptions);
        let n = fitness.len();
        let cost = self.cost(n, handled);
        let bytes = self.sizes[..n].iter().sum();
        let mode = self.rest_without_tokens(Mode::Release);
        let mut completion = self.lease.completion((n, bytes), mode, cost, exceptions);
        if !(aside.is_empty() && self.lease.aside.is_empty()) {
            completion.aside = Some(self.change(aside, None));
        }
        let ends = runs.iter().zip(&lanes);
        let traced = commits(ends.map(|(run, end)| (&run.slice, end.failure.as_deref())));
        let committed = self.commit(completion).await;
        ended(traced, committed);
        if !self.is_committed(committed) {
            return;
        }
        self.show_rest(mode).await;
        let now = self.shared.now();
        self.shared.meter.settled.fetch_add(n as u64, Ordering::Relaxed);
        let settled = runs.iter().zip(&lanes).flat_map(|(run, settlement)| {
            run.slice.events[..settlement.settled].iter().map(|delivery| delivery.sequence)
        });
        tally.record(&self.shared.metrics, settled, now);
        if let Some(given_up) = given_up {
            let event = self.event_of(given_up.index, runs);
            given_up.warn(self.shared.queue.name(), &self.lease.bot, event);
        }
        let mut last = None;
        for (run, settlement) in runs.iter().zip(&lanes) {
            self.tell_committed(&run.slice, settlement.settled);
            self.note(&run.slice.events, run.took, now, settlement);
            settlement.count(&self.shared.meter, now);
            if settlement.failure.is_some() {
                last = Some((run, settlement));
            }
        }
        // A bot has one note, however many lanes failed.
        if let Some((run, settlement)) = last {
            let first = run.slice.events.first().map(|delivery| delivery.sequence);
            settlement.note_failure(&self.shared.queue, self.noted_bot(), first, now).await;
        }
    }

    pub(super) fn event_of<'a>(&'a self, place: usize, runs: &'a [Run]) -> Option<&'a Event> {
        let at = |run: &'a Run| {
            let at = run.places.iter().position(|other| *other == place)?;
            Some(&run.slice.events[at].event)
        };
        let unfit = || self.unfit.iter().find(|(at, _)| *at == place).map(|(_, event)| event);
        runs.iter().find_map(at).or_else(unfit)
    }

    /// Parks the bot: the target of all its lanes is unavailable. The events stay in the queue, except
    /// those before the first one that was tried.
    async fn wait_for_target(&mut self, fitness: &[Fitness], runs: &[Run], unavailable: Duration) {
        let answer = runs.iter().find_map(|run| run.answer.as_ref().err()).cloned();
        let answer = answer.map_or_else(|| Ok(Outcomes::done()), Err);
        let settlement = self.settle_after(fitness, answer, unavailable);
        let Settlement { n, mode, ref exceptions, tally, .. } = settlement;
        if let Some(reason) = &settlement.failure {
            self.log_retry(reason, mode);
        }
        let cost = self.cost(n, runs.iter().map(|run| run.took).sum());
        let bytes = self.sizes[..n].iter().sum();
        let mut completion = self.lease.completion((n, bytes), mode, cost, exceptions.clone());
        if !self.lease.aside.is_empty() {
            let aside = self.lease.aside.trying(None);
            completion.aside = Some(self.change(aside, None));
        }
        let failure = settlement.failure.as_deref();
        let traced = commits(runs.iter().map(|run| (&run.slice, failure)));
        let committed = self.commit(completion).await;
        ended(traced, committed);
        if self.is_committed(committed) {
            let now = self.shared.now();
            tally.record(&self.shared.metrics, std::iter::empty(), now);
            if let Some(run) = runs.first() {
                self.note(&run.slice.events, run.took, now, &settlement);
            }
            settlement.count(&self.shared.meter, now);
            settlement.note_failure(&self.shared.queue, self.noted_bot(), None, now).await;
        }
    }

    /// Whether a completion was committed.
    pub(super) fn is_committed(&self, committed: Committed) -> bool {
        match committed {
            Committed::Done | Committed::Full => true,
            Committed::Stale => {
                self.shared.metrics.stale_completions.increment(1);
                self.lost();
                false
            }
            Committed::Unknown => {
                debug!("the completion was not answered; it may have been done");
                false
            }
        }
    }
}
