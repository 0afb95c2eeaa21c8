//! The copy for one pipeline: its events by shard and bot, in bounded calls.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join;
use rustc_hash::FxHashMap;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::{FanoutError, Route, Stamped, Wanted};
use crate::event::Event;
use crate::expression::Facts;
use crate::id::{BotId, Offset, Shard};
use crate::ledger::{Account, Posting};
use crate::metrics;
use crate::pool::{Places, Reserved};
use crate::quotas::QUEUED_BYTES;
use crate::redis::RedisError;
use crate::redis::scripts::{Advance, Advanced, Enqueue, Enqueued, Postings, Queued, Take};
use crate::telemetry::{Outage, Recovered};

/// Maximum number of events in one enqueue call.
const CALL_EVENTS: usize = 500;
/// The same in a sparse backlog.
const WAVE_EVENTS: usize = 32;
/// Maximum number of bytes in one enqueue call; a single larger event is sent alone.
const CALL_BYTES: usize = 256 * 1_024;

/// In a sparse backlog, a copy waits for places at most this long: other pipelines wait for it.
const HOLD: Duration = Duration::from_millis(100);

/// The log about unreachable shards of a cluster, shared by all pipelines.
static UNREACHED: Outage = Outage::shared();

/// The events of one shard, in calls of bounded size.
pub(super) struct ShardBatch<'a> {
    shard: Shard,
    calls: Vec<CallBatch<'a>>,
}

#[derive(Default)]
struct CallBatch<'a> {
    bots: Vec<(BotId, Vec<&'a [u8]>)>,
    /// Ledger entries per bot, if the queues have a ledger.
    postings: Vec<BTreeMap<Account, u64>>,
    places: FxHashMap<BotId, usize>,
    events: usize,
    bytes: usize,
    last: Offset,
}

impl<'a> CallBatch<'a> {
    fn add(&mut self, bot: &BotId, event: &'a [u8], offset: Offset) -> usize {
        let bots = &mut self.bots;
        let place = *self.places.entry(bot.clone()).or_insert_with(|| {
            bots.push((bot.clone(), Vec::with_capacity(1)));
            bots.len() - 1
        });
        bots[place].1.push(event);
        self.events += 1;
        self.bytes += event.len();
        self.last = offset;
        place
    }

    /// Adds the ledger entry of an event of the bot at `place`.
    fn post(&mut self, place: usize, posting: Option<&Posting>) {
        self.postings.resize_with(self.bots.len(), BTreeMap::new);
        if let Some(Posting { account, amount }) = posting {
            *self.postings[place].entry(account.clone()).or_default() += amount;
        }
    }

    fn is_full_for(&self, event: &[u8], size: usize) -> bool {
        self.events >= size || (self.events > 0 && self.bytes + event.len() > CALL_BYTES)
    }
}

impl Route {
    /// Whether the pipeline names the type of the event.
    pub(super) fn concerns(&self, event: &Event) -> bool {
        self.interest.as_ref().is_none_or(|interest| interest.wants(event))
    }

    /// Whether the event passes the pipeline's filter.
    pub(super) fn passes(&self, event: &Event) -> bool {
        let Some(filter) = &self.filter else { return true };
        let matches = Facts::of(event).and_then(|facts| filter.matches(&facts));
        matches.unwrap_or_else(|error| {
            self.metrics.filter_errors.increment(1);
            if let Some(suppressed) = self.warned.take() {
                warn!(pipeline = %self.queue.name(), id = event.id(), %error, suppressed,
                    "the filter failed on an event: no match; more such within a minute are only counted");
            } else {
                debug!(pipeline = %self.queue.name(), id = event.id(), %error, "no match");
            }
            false
        })
    }

    /// Maximum number of events in one call. In a sparse backlog, each call leases its bots, so the
    /// calls are sent in waves, as places become free.
    pub(super) fn call_events(&self, behind: Option<Duration>) -> usize {
        if self.leases_sparse(behind) { WAVE_EVENTS } else { CALL_EVENTS }
    }

    fn leases_sparse(&self, behind: Option<Duration>) -> bool {
        behind.is_some() && self.places.as_ref().is_some_and(Places::is_sparse)
    }

    /// Events of a shard, in calls of at most `size` events.
    pub(super) fn group<'a>(
        &self,
        events: &'a [Wanted],
        wanted: &[usize],
        (stamped, size): (&'a [Stamped], usize),
        positions: &[Option<Offset>],
    ) -> Vec<ShardBatch<'a>> {
        let mut shards: Vec<Option<ShardBatch<'a>>> = Vec::new();
        shards.resize_with(positions.len(), || None);
        for (nth, &index) in wanted.iter().enumerate() {
            let Wanted { offset, bot, encoded } = &events[index];
            let stamped = stamped.get(nth);
            let bytes = stamped.map(|(bytes, _)| bytes).or(encoded.as_ref());
            let Some(bytes) = bytes else { continue };
            let shard = self.queue.shard_of(bot);
            if positions[shard.index()].is_none_or(|position| *offset <= position) {
                continue; // The shard has it already, or is missing.
            }
            let entry = shards[shard.index()]
                .get_or_insert_with(|| ShardBatch { shard, calls: vec![CallBatch::default()] });
            if entry.calls.last().is_none_or(|call| call.is_full_for(bytes, size)) {
                entry.calls.push(CallBatch::default());
            }
            if let Some(call) = entry.calls.last_mut() {
                let place = call.add(bot, bytes, *offset);
                if let Some((_, posting)) = stamped {
                    call.post(place, posting.as_ref());
                }
            }
        }
        shards.into_iter().flatten().collect()
    }

    /// Moves shards forward to `end` unless they are `concerned` by the events before it.
    pub(super) async fn advance(
        &self,
        stream: &str,
        end: Offset,
        concerned: &[bool],
        positions: &mut [Option<Offset>],
    ) -> Result<(), FanoutError> {
        let mut behind = Vec::new();
        for shard in self.queue.shard_count().shards() {
            let passes = !concerned.get(shard.index()).is_some_and(|concerned| *concerned);
            if let Some(prev) = positions[shard.index()].filter(|at| passes && *at < end) {
                let keys = self.queue.keys(shard);
                behind.push((shard, Advance { keys, stream, prev, last: end }));
            }
        }
        if behind.is_empty() {
            return Ok(());
        }
        let (shards, calls): (Vec<Shard>, Vec<Advance<'_>>) = behind.into_iter().unzip();
        let replies = self.queue.link().call_all(&calls).await?;
        let (mut lost, mut answered) = (None, false);
        for ((shard, call), reply) in shards.into_iter().zip(&calls).zip(replies) {
            let position = &mut positions[shard.index()];
            match reply {
                Ok(Advanced::To(stands)) => {
                    *position = Some(stands);
                    answered = true;
                }
                Ok(Advanced::Gap(stands)) => return Err(self.moved(shard, stands, call.prev)),
                Err(error) if error.is_passing() => {
                    *position = None;
                    lost = Some(error);
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.go_on(lost, answered)
    }

    fn moved(&self, shard: Shard, stands: Offset, thought: Offset) -> FanoutError {
        FanoutError::Moved { pipeline: self.queue.name().to_string(), shard, stands, thought }
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

    /// Sends the calls in one write, chained per shard; the last call of each shard covers the
    /// entries up to `end`. In a sparse backlog there are several writes, with a call per shard each.
    pub(super) async fn enqueue(
        &self,
        (stream, end): (&str, Offset),
        behind: Option<Duration>,
        shards: Vec<ShardBatch<'_>>,
        positions: &mut [Option<Offset>],
    ) -> Result<(), FanoutError> {
        if let Some(places) = &self.places {
            let calls = || shards.iter().flat_map(|shard| &shard.calls);
            let bots = calls().flat_map(|call| &call.bots);
            let bots = bots.flat_map(|(bot, events)| std::iter::repeat_n(bot, events.len()));
            places.copied(behind, calls().map(|call| call.bytes).sum(), bots);
        }
        let sparse = self.leases_sparse(behind);
        let lease = (behind.is_none() || sparse) && self.queue.limits().linger_ms == 0;
        let until = Instant::now() + HOLD;
        let mut shards: Vec<_> = shards
            .into_iter()
            .map(|ShardBatch { shard, calls }| (shard, calls.into_iter().peekable()))
            .collect();
        let (mut lost, mut answered) = (None, false);
        loop {
            let mut wave = Vec::with_capacity(shards.len());
            for (shard, calls) in &mut shards {
                let size = if sparse { 1 } else { usize::MAX };
                let mut prev = positions[shard.index()];
                for _ in 0..size {
                    let Some(batch) = calls.next() else { break };
                    let covers = if calls.peek().is_none() { end } else { batch.last };
                    wave.extend(prev.map(|prev| (*shard, prev, covers, batch)));
                    prev = prev.and(Some(covers));
                }
            }
            if wave.is_empty() {
                let sent = answered || lost.is_some();
                return if sent { self.go_on(lost, answered) } else { Ok(()) };
            }
            let bots = wave.iter().map(|(.., batch)| batch.bots.len()).sum();
            let places = self.places.as_ref().filter(|_| lease);
            if sparse && let Some(places) = places {
                places.room(bots, until).await;
            }
            let reserved = places.and_then(|places| places.reserve(bots));
            let sent = self.send(stream, wave, reserved, positions).await?;
            lost = sent.0.or(lost);
            answered |= sent.1;
        }
    }

    /// Sends calls in one write: for each its shard, the offset before it, the last one, the events.
    /// Returns why a shard gave no answer, and whether one did.
    async fn send(
        &self,
        stream: &str,
        wave: Vec<(Shard, Offset, Offset, CallBatch<'_>)>,
        mut reserved: Option<Reserved>,
        positions: &mut [Option<Offset>],
    ) -> Result<(Option<RedisError>, bool), FanoutError> {
        let (limits, quotas) = (self.queue.limits(), self.queue.quotas());
        let calls = wave.into_iter().map(|(shard, prev, last, batch)| {
            let (keys, bots) = (self.queue.keys(shard), batch.bots);
            let postings = self.queue.ledger().map(|ledger| Postings {
                cached_accounts: ledger.cached_accounts(),
                bots: batch.postings,
            });
            let take = reserved.as_mut().map_or_else(Take::default, |it| it.ask(bots.len()));
            let sent = reserved.as_ref().map(|reserved| reserved.sending(shard));
            let call = Enqueue { keys, stream, prev, last, limits, quotas, bots, postings, take };
            ((shard, sent), call)
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
        let (mut lost, mut answered, mut failed) = (None, false, None);
        for (((shard, sent), call), reply) in shards.into_iter().zip(&calls).zip(replies) {
            let position = &mut positions[shard.index()];
            match reply {
                Ok(Enqueued::Ok(more, taken)) => {
                    if let (Some(reserved), Some(sent)) = (&mut reserved, sent) {
                        reserved.start((shard, sent), taken, &call.bots);
                    }
                    *position = position.and(Some(call.last));
                    if let (Some(ledger), Some(postings)) = (self.queue.ledger(), &call.postings) {
                        ledger.posted(postings.sum());
                    }
                    queued.appended += more.appended;
                    queued.dead += more.dead;
                    queued.dropped += more.dropped;
                    queued.letters_removed += more.letters_removed;
                    queued.over_quota += more.over_quota;
                    queued.letters_over_quota += more.letters_over_quota;
                    answered = true;
                }
                Ok(Enqueued::Duplicate(stands)) => {
                    *position = position.and(Some(stands));
                    answered = true;
                }
                // The chain broke at the previous call, whose outcome is unknown.
                Ok(Enqueued::Gap(_)) if position.is_none() => {}
                // The other replies count all the same: with them came leases.
                Ok(Enqueued::Gap(stands)) => {
                    failed = Some(self.moved(shard, stands, call.prev));
                }
                Err(error) if error.is_passing() => {
                    *position = None;
                    lost = Some(error);
                }
                Err(error) => failed = Some(error.into()),
            }
        }
        drop(reserved);
        self.note(queued);
        failed.map_or(Ok((lost, answered)), Err)
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
