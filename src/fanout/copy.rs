//! The copy for one pipeline: its events by shard and bot, in bounded calls.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::call::CallBatch;
use super::gather::{Gathered, Stamped};
use super::positions::{Position, moved, stand};
use super::{FanoutError, Route};
use crate::clock::millis;
use crate::event::Event;
use crate::expression::Facts;
use crate::id::{Offset, Shard};
use crate::metrics;
use crate::pool::{Places, Reserved};
use crate::quotas::QUEUED_BYTES;
use crate::redis::RedisError;
use crate::redis::scripts::{
    Advance, Advanced, Enqueue, Enqueued, Postings, Queued, Repeats, Span, Take,
};
use crate::telemetry::{Outage, Recovered};

/// Maximum number of events in one enqueue call.
const CALL_EVENTS: usize = 500;
/// The same in a sparse backlog.
const WAVE_EVENTS: usize = 32;

/// In a sparse backlog, a copy waits for places at most this long: other pipelines wait for it.
const HOLD: Duration = Duration::from_millis(100);

/// The log about unreachable shards of a cluster, shared by all pipelines.
static UNREACHED: Outage = Outage::shared();

/// What all pipelines share in a copy.
#[derive(Debug, Clone, Copy)]
pub(super) struct Copying<'a> {
    /// The names of the logs.
    pub(super) logs: &'a [Arc<str>],
    pub(super) gathered: &'a Gathered,
    /// How late the last event is, if more are available.
    pub(super) behind: Option<Duration>,
    /// How long repetitions are dropped; zero: they are not.
    pub(super) window: Duration,
}

/// The events of one shard, in calls of bounded size.
pub(super) struct ShardBatch<'a> {
    shard: Shard,
    calls: VecDeque<CallBatch<'a>>,
    /// The places of the logs of its events.
    logs: Vec<usize>,
}

/// A call that is sent: its shard, and the places of the logs of its spans.
struct Sent<'a> {
    shard: Shard,
    spans: Vec<Span<'a>>,
    logs: Vec<usize>,
    batch: CallBatch<'a>,
}

/// The result of some calls.
#[derive(Default)]
struct Answers<'a> {
    /// Why a shard gave no answer.
    lost: Option<RedisError>,
    /// Whether one did.
    answered: bool,
    /// The calls to send again, in the order of each shard: repetitions were found in the first of
    /// them.
    again: Vec<(Shard, CallBatch<'a>)>,
}

impl Route {
    /// Whether the pipeline names the type of the event.
    pub(super) fn concerns(&self, event: &Event) -> bool {
        self.interest.as_ref().is_none_or(|interest| interest.wants(event))
    }

    /// Whether the event passes the pipeline's filter. `None`: the filter failed on it, and it is no match.
    pub(super) fn passes(&self, event: &Event) -> Option<bool> {
        let Some(filter) = &self.filter else { return Some(true) };
        match Facts::of(event).and_then(|facts| filter.matches(&facts)) {
            Ok(passes) => Some(passes),
            Err(error) => {
                if let Some(suppressed) = self.warned.take() {
                    warn!(pipeline = %self.queue.name(), id = event.id(), %error, suppressed,
                        "the filter failed on an event: no match; more such within a minute are only counted");
                } else {
                    debug!(pipeline = %self.queue.name(), id = event.id(), %error, "no match");
                }
                None
            }
        }
    }

    /// Maximum number of events in one call. In a sparse backlog, each call leases its bots, so the
    /// calls are sent in waves, as places become free.
    pub(super) fn call_events(&self, behind: Option<Duration>) -> usize {
        if self.leases_sparse(behind) { WAVE_EVENTS } else { CALL_EVENTS }
    }

    fn leases_sparse(&self, behind: Option<Duration>) -> bool {
        behind.is_some() && self.places.as_ref().is_some_and(Places::is_sparse)
    }

    /// The events of each shard, in calls of bounded size.
    pub(super) fn group<'a>(
        &self,
        copying: Copying<'a>,
        wanted: &[usize],
        stamped: &'a [Stamped],
        positions: &[Position],
    ) -> Vec<ShardBatch<'a>> {
        let size = self.call_events(copying.behind);
        let mut shards: Vec<Option<ShardBatch<'a>>> = Vec::new();
        shards.resize_with(positions.len(), || None);
        for (nth, &index) in wanted.iter().enumerate() {
            let wanted = &copying.gathered.events[index];
            let stamped = stamped.get(nth);
            let bytes = stamped.map(|(bytes, _)| bytes).or(wanted.encoded.as_ref());
            let Some(bytes) = bytes else { continue };
            let shard = self.queue.shard_of(&wanted.bot);
            let position = positions[shard.index()].as_ref();
            if position.is_none_or(|position| wanted.offset <= position[wanted.log]) {
                continue; // The shard has it already, or is missing.
            }
            let entry = shards[shard.index()].get_or_insert_with(|| ShardBatch {
                shard,
                calls: VecDeque::from([CallBatch::default()]),
                logs: Vec::with_capacity(1),
            });
            if entry.calls.back().is_none_or(|call| call.is_full_for(bytes, size)) {
                entry.calls.push_back(CallBatch::default());
            }
            if !entry.logs.contains(&wanted.log) {
                entry.logs.push(wanted.log);
            }
            if let Some(call) = entry.calls.back_mut() {
                let place = call.add(wanted, bytes);
                let posting = stamped.and_then(|(_, posting)| posting.as_ref());
                if stamped.is_some() {
                    call.post(place, posting);
                }
                if !copying.window.is_zero() {
                    call.name(place, wanted.name);
                }
            }
        }
        shards.into_iter().flatten().collect()
    }

    /// Moves shards forward to `ends` of the logs unless they are `concerned` by the events before.
    pub(super) async fn advance(
        &self,
        (logs, ends): (&[Arc<str>], &[(usize, Offset)]),
        concerned: &[bool],
        positions: &mut [Position],
    ) -> Result<(), FanoutError> {
        let mut behind = Vec::new();
        for shard in self.queue.shard_count().shards() {
            let passes = !concerned.get(shard.index()).is_some_and(|concerned| *concerned);
            let Some(position) = positions[shard.index()].as_ref().filter(|_| passes) else {
                continue;
            };
            let ahead = ends.iter().filter(|(log, end)| position[*log] < *end);
            let (places, spans): (Vec<usize>, Vec<Span<'_>>) = ahead
                .map(|&(log, last)| (log, Span { log: &logs[log], prev: position[log], last }))
                .unzip();
            if !spans.is_empty() {
                let keys = self.queue.keys(shard);
                behind.push(((shard, places), Advance { keys, spans }));
            }
        }
        if behind.is_empty() {
            return Ok(());
        }
        let (shards, calls): (Vec<_>, Vec<Advance<'_>>) = behind.into_iter().unzip();
        let replies = self.queue.link().call_all(&calls).await?;
        let (mut lost, mut answered) = (None, false);
        for (((shard, places), call), reply) in shards.into_iter().zip(&calls).zip(replies) {
            let position = &mut positions[shard.index()];
            match reply {
                Ok(Advanced::To(stands)) => {
                    stand(position, &places, &stands);
                    answered = true;
                }
                Ok(Advanced::Gap(stands)) => {
                    return Err(moved(self.queue.name(), shard, &call.spans, &stands));
                }
                Err(error) if error.is_passing() => {
                    *position = None;
                    lost = Some(error);
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.go_on(lost, answered)
    }

    /// The result if some shards gave no answer.
    fn go_on(&self, lost: Option<RedisError>, answered: bool) -> Result<(), FanoutError> {
        match lost {
            Some(error) if !answered => return Err(error.into()),
            Some(error) => {
                if let Some(suppressed) = UNREACHED.failed() {
                    warn!(pipeline = %self.queue.name(), %error, suppressed,
                        "some shards cannot be reached; the others go on");
                }
            }
            None => {
                if let Some(Recovered { lasted, failures }) = UNREACHED.succeeded() {
                    info!(?lasted, failures, "all shards can be reached again");
                }
            }
        }
        Ok(())
    }

    /// Sends the calls in one write, chained per shard; the last call of each shard covers its logs up
    /// to what was read of them. In a sparse backlog there are several writes, with a call per shard
    /// each.
    pub(super) async fn enqueue<'a>(
        &'a self,
        copying: Copying<'a>,
        mut shards: Vec<ShardBatch<'a>>,
        positions: &mut [Position],
    ) -> Result<(), FanoutError> {
        let Copying { logs, gathered, behind, .. } = copying;
        if let Some(places) = &self.places {
            let calls = || shards.iter().flat_map(|shard| &shard.calls);
            let bots = calls().flat_map(|call| &call.bots);
            let bots = bots.flat_map(|(bot, events)| std::iter::repeat_n(bot, events.len()));
            places.copied(behind, calls().map(|call| call.bytes).sum(), bots);
        }
        let sparse = self.leases_sparse(behind);
        let lease = (behind.is_none() || sparse) && self.queue.limits().linger_ms == 0;
        let until = Instant::now() + HOLD;
        let (mut lost, mut answered) = (None, false);
        loop {
            let mut wave = Vec::with_capacity(shards.len());
            for ShardBatch { shard, calls, logs: of_shard } in &mut shards {
                let size = if sparse { 1 } else { usize::MAX };
                let mut stands = positions[shard.index()].clone();
                let mut taken = 0;
                while taken < size {
                    let Some(batch) = calls.pop_front() else { break };
                    let Some(stands) = &mut stands else { continue };
                    let lasts: Vec<_> = if calls.is_empty() {
                        of_shard.iter().map(|&log| (log, gathered.end(log))).collect()
                    } else {
                        batch.lasts.clone()
                    };
                    let (mut places, mut spans) = (Vec::new(), Vec::new());
                    for (log, last) in lasts {
                        if last <= stands[log] {
                            continue;
                        }
                        let prev = std::mem::replace(&mut stands[log], last);
                        places.push(log);
                        spans.push(Span { log: &logs[log], prev, last });
                    }
                    // Another reader has copied it.
                    if !spans.is_empty() {
                        taken += 1;
                        wave.push(Sent { shard: *shard, spans, logs: places, batch });
                    }
                }
            }
            if wave.is_empty() {
                let sent = answered || lost.is_some();
                return if sent { self.go_on(lost, answered) } else { Ok(()) };
            }
            let bots = wave.iter().map(|sent| sent.batch.bots.len()).sum();
            let places = self.places.as_ref().filter(|_| lease);
            if sparse && let Some(places) = places {
                places.room(bots, until).await;
            }
            let reserved = places.and_then(|places| places.reserve(bots));
            let answers = self.send(wave, copying.window, reserved, positions).await?;
            lost = answers.lost.or(lost);
            answered |= answers.answered;
            for (shard, batch) in answers.again.into_iter().rev() {
                if let Some(of_shard) = shards.iter_mut().find(|batch| batch.shard == shard) {
                    of_shard.calls.push_front(batch);
                }
            }
        }
    }

    /// Sends calls in one write.
    async fn send<'a>(
        &'a self,
        wave: Vec<Sent<'a>>,
        window: Duration,
        mut reserved: Option<Reserved>,
        positions: &mut [Position],
    ) -> Result<Answers<'a>, FanoutError> {
        let (limits, quotas) = (self.queue.limits(), self.queue.quotas());
        let calls = wave.into_iter().map(|Sent { shard, spans, logs, batch }| {
            let (keys, bots) = (self.queue.keys(shard), batch.bots);
            let postings = self.queue.ledger().map(|ledger| Postings {
                cached_accounts: ledger.cached_accounts(),
                bots: batch.postings,
            });
            let repeats = (!window.is_zero()).then(|| Repeats {
                window_ms: millis(window),
                names: batch.named.iter().flatten().copied().collect(),
                left_out: batch.left_out,
            });
            let take = reserved.as_mut().map_or_else(Take::default, |it| it.ask(bots.len()));
            let sent = reserved.as_ref().map(|reserved| reserved.sending(shard));
            let call = Enqueue { keys, spans, repeats, limits, quotas, bots, postings, take };
            ((shard, sent, logs, batch.named, batch.lasts), call)
        });
        let (shards, calls): (Vec<_>, Vec<Enqueue<'_>>) = calls.unzip();
        // Completions that travel along come first: their bots may get new leases.
        let along = async {
            if let Some(places) = &self.places {
                let bots = calls.iter().flat_map(|call| &call.bots).map(|(bot, _)| bot);
                places.commit_along(&self.queue, bots).await;
            }
        };
        let ((), replies) = join(along, self.queue.link().call_all(&calls)).await;
        let replies = replies?;
        let mut queued = Queued::default();
        let (mut answers, mut failed) = (Answers::default(), None);
        for (((shard, sent, logs, named, lasts), call), reply) in
            shards.into_iter().zip(calls).zip(replies)
        {
            let position = &mut positions[shard.index()];
            let again = |call: Enqueue<'a>, named| {
                let postings = call.postings.map(|postings| postings.bots).unwrap_or_default();
                let left_out = call.repeats.map(|repeats| repeats.left_out).unwrap_or_default();
                CallBatch::of(call.bots, postings, named, left_out, lasts)
            };
            match reply {
                Ok(Enqueued::Ok(more, taken)) => {
                    if let (Some(reserved), Some(sent)) = (&mut reserved, sent) {
                        reserved.start((shard, sent), taken, &call.bots);
                    }
                    for (&log, span) in logs.iter().zip(&call.spans) {
                        stand(position, &[log], &[span.last]);
                    }
                    if let Some(ledger) = self.queue.ledger().filter(|_| more.posted > 0) {
                        ledger.posted(more.posted);
                    }
                    queued.appended += more.appended;
                    queued.dead += more.dead;
                    queued.dropped += more.dropped;
                    queued.letters_removed += more.letters_removed;
                    queued.over_quota += more.over_quota;
                    queued.letters_over_quota += more.letters_over_quota;
                    answers.answered = true;
                }
                Ok(Enqueued::Duplicate(stands)) => {
                    stand(position, &logs, &stands);
                    answers.answered = true;
                }
                Ok(Enqueued::Repeated(places)) => {
                    self.metrics.repeated.increment(places.len() as u64);
                    answers.again.push((shard, again(call, named).without(&places)));
                    answers.answered = true;
                }
                // The chain broke at the previous call, whose outcome is unknown.
                Ok(Enqueued::Gap(_)) if position.is_none() => {}
                // The chain broke at a call with repetitions, which is sent again.
                Ok(Enqueued::Gap(_)) if answers.again.iter().any(|(of, _)| *of == shard) => {
                    answers.again.push((shard, again(call, named)));
                }
                // The other replies count all the same: with them came leases.
                Ok(Enqueued::Gap(stands)) => {
                    failed = Some(moved(self.queue.name(), shard, &call.spans, &stands));
                }
                Err(error) if error.is_passing() => {
                    *position = None;
                    answers.lost = Some(error);
                }
                Err(error) => failed = Some(error.into()),
            }
        }
        drop(reserved);
        self.note(queued);
        failed.map_or(Ok(answers), Err)
    }

    /// Counts and logs the result of a copy.
    fn note(&self, queued: Queued) {
        self.metrics.copies.increment(queued.appended);
        self.meter.queued.fetch_add(queued.appended, Ordering::Relaxed);
        self.metrics.dead.increment(queued.dead);
        self.metrics.dropped.increment(queued.dropped);
        self.metrics.letters_removed.increment(queued.letters_removed);
        metrics::quota_refused(QUEUED_BYTES, queued.over_quota);
        self.queue.letters_over_quota(queued.letters_over_quota);
        if queued.dead + queued.dropped > 0
            && let Some(suppressed) = self.full.take()
        {
            warn!(pipeline = %self.queue.name(), dead = queued.dead, dropped = queued.dropped,
                over_quota = queued.over_quota, suppressed,
                "queues of bots are full (max_queue, or quotas.queued_bytes)");
        }
    }
}
