//! Fan-out: from a batch of bus entries to a copy in the queue of its bot, in every pipeline that
//! matches.
//!
//! 1. Match: by type (globs), by what the pipeline wants of the bot, then by the pipeline's filter.
//! 2. Encode once.
//! 3. Gather: while the bus is behind, what is wanted of several batches, since a call for many
//!    events costs a shard much less than many calls for a few.
//! 4. Group by pipeline, shard and bot.
//! 5. One bounded `enqueue` call per up to 500 events of a shard, all in one write per pipeline.
//!    Each carries the shard's chain of offsets, so the shard itself notices a repeated or lost
//!    call.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use rustc_hash::{FxBuildHasher, FxHashMap};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use crate::bus::Entry;
use crate::bus::starts::{self, Starts};
use crate::event::Event;
use crate::filter::{Facts, Filter, Glob};
use crate::id::{BotId, Offset, Shard};
use crate::keyspace::StoreError;
use crate::keyspace::scripts::{Advance, Advanced, Enqueue, Enqueued, Postings, Queued};
use crate::ledger::{Account, Posting};
use crate::metrics::{self, PipelineMetrics};
use crate::presence::{self, Meter};
use crate::queue::Queue;
use crate::telemetry::{OncePerMinute, Outage, Recovered};
use crate::unmatched::{Found, Unmatched};

/// Most events of one enqueue call.
const CALL_EVENTS: usize = 500;
/// Most bytes of one enqueue call; a single larger event goes alone.
const CALL_BYTES: usize = 256 * 1_024;
/// So many events, bytes or batches are copied before more is gathered.
const GATHERED_EVENTS: usize = 2_000;
const GATHERED_BYTES: usize = 4 << 20;
const GATHERED_BATCHES: usize = 8;
/// Event types whose matches are remembered.
const TYPES_MAX: usize = 10_000;

/// One pipeline as the fan-out sees it.
#[derive(Debug)]
pub struct Route {
    /// Its queues.
    pub queue: Queue,
    /// The types it takes.
    pub types: Vec<Glob>,
    /// What it takes of them.
    pub filter: Option<Filter>,
    /// What it takes of these for the bot of an event; `None`: all.
    pub interest: Option<Arc<dyn Interest>>,
    /// Whether it begins at the first entry of a stream that it never read; else at the next.
    pub from_earliest: bool,
    /// Its metrics.
    pub metrics: PipelineMetrics,
    /// Counts for the fleet.
    pub meter: Arc<Meter>,
    /// When a failing filter was last logged.
    pub warned: OncePerMinute,
    /// When full queues were last logged.
    pub full: OncePerMinute,
}

/// Shards of a cluster that take nothing, of every pipeline.
static UNREACHED: Outage = Outage::shared();

/// What a pipeline wants of the events of its types, by what it knows of their bots.
pub trait Interest: std::fmt::Debug + Send + Sync + 'static {
    /// Whether it wants the event. In doubt, yes.
    fn wants(&self, event: &Event) -> bool;

    /// Whether it wants events of the type of the bot, as far as is known. In doubt, once all bots
    /// were known, yes.
    fn takes(&self, bot: &BotId, kind: &str) -> bool;

    /// Ends once it knows all bots.
    fn known(&self) -> BoxFuture<'_, ()>;
}

/// An event as it goes into a queue with a ledger, and what it posts.
type Stamped = (Vec<u8>, Option<Posting>);

/// Why a batch could not be copied. Reading again from [`Positions::lowest`] after
/// the positions were read anew mends both.
#[derive(Debug, thiserror::Error)]
pub enum FanoutError {
    /// A store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A shard stands elsewhere than thought: it lost its tail, or another reader was at work.
    #[error("shard {shard} of pipeline {pipeline:?} stands at {stands}, not at {thought}")]
    Moved {
        /// The pipeline.
        pipeline: String,
        /// The shard.
        shard: Shard,
        /// Where it stands.
        stands: Offset,
        /// Where it was thought to be.
        thought: Offset,
    },
    /// Some shards were missing for a while: it is time to see whether they are back.
    #[error("{0} shards are missing")]
    Missing(usize),
}

impl FanoutError {
    /// Whether Redis has no memory left.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Store(error) if error.is_full())
    }
}

/// How far each shard of each pipeline has a stream. A shard whose server is away is *missing*: it
/// gets nothing, the others go on, and it is read again from where it stands once it is back.
#[derive(Debug, Clone)]
pub struct Positions(Vec<Vec<Option<Offset>>>);

impl Positions {
    /// Where reading has to begin for those that are not missing; `None` without any.
    #[must_use]
    pub fn lowest(&self) -> Option<Offset> {
        self.0.iter().flatten().flatten().min().copied()
    }

    /// The highest of those that are not missing.
    #[must_use]
    pub fn highest(&self) -> Option<Offset> {
        self.0.iter().flatten().flatten().max().copied()
    }

    /// How many shards are missing.
    #[must_use]
    pub fn missing(&self) -> usize {
        self.0.iter().flatten().filter(|position| position.is_none()).count()
    }
}

/// All pipelines of a process.
#[derive(Debug)]
pub struct Fanout {
    routes: Vec<Route>,
    starts: Arc<Starts>,
    /// When it was last logged that a pipeline of other processes holds the bus.
    waits_elsewhere: OncePerMinute,
    unmatched: Unmatched,
}

/// What is wanted of the batches since the last copy.
#[derive(Debug, Default)]
pub struct Gathered {
    events: Vec<Wanted>,
    /// Per pipeline, which of these it wants.
    wanted: Vec<Vec<usize>>,
    /// Per pipeline with a ledger, these events as it stores them.
    stamped: Vec<Vec<Stamped>>,
    /// What no pipeline takes by its type.
    unmatched: Found,
    bytes: usize,
    batches: usize,
    /// Entries read, and the last of them.
    entries: u64,
    end: Offset,
}

/// An event that some pipeline wants.
#[derive(Debug)]
struct Wanted {
    offset: Offset,
    bot: BotId,
    /// Unless only pipelines with a ledger want it.
    encoded: Option<Vec<u8>>,
}

impl Gathered {
    /// Whether there was no batch since the last copy.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.batches == 0
    }

    /// The last entry of these batches, and how many they had; `None` without any.
    #[must_use]
    pub fn covers(&self) -> Option<(Offset, u64)> {
        (!self.is_empty()).then_some((self.end, self.entries))
    }

    /// Whether it is time to copy, although more is there.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.events.len() >= GATHERED_EVENTS
            || self.bytes >= GATHERED_BYTES
            || self.batches >= GATHERED_BATCHES
    }
}

/// The events of one shard, in calls of bounded size.
struct ShardBatch<'a> {
    shard: Shard,
    calls: Vec<CallBatch<'a>>,
}

#[derive(Default)]
struct CallBatch<'a> {
    bots: Vec<(BotId, Vec<&'a [u8]>)>,
    /// Per bot, where the queues have a ledger.
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

    /// Notes what an event of the bot at `place` posts.
    fn post(&mut self, place: usize, posting: Option<&Posting>) {
        self.postings.resize_with(self.bots.len(), BTreeMap::new);
        if let Some(Posting { account, amount }) = posting {
            *self.postings[place].entry(account.clone()).or_default() += amount;
        }
    }

    fn is_full_for(&self, event: &[u8]) -> bool {
        self.events >= CALL_EVENTS || (self.events > 0 && self.bytes + event.len() > CALL_BYTES)
    }
}

impl Fanout {
    /// The fan-out into `routes`, which start where `starts` says.
    #[must_use]
    pub(crate) fn new(routes: Vec<Route>, starts: Arc<Starts>) -> Self {
        let (waits_elsewhere, unmatched) = (OncePerMinute::default(), Unmatched::new());
        Self { routes, starts, waits_elsewhere, unmatched }
    }

    /// Waits until every pipeline knows what it wants, but not longer than `within`: then everything
    /// in doubt is copied.
    pub(crate) async fn ready(&self, within: Duration) {
        let interests = self.routes.iter().filter_map(|route| route.interest.as_ref());
        let known = join_all(interests.map(|interest| interest.known()));
        let _ = tokio::time::timeout(within, known).await;
    }

    /// Whether there is any pipeline.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.routes.is_empty()
    }

    /// Reads how far every shard is. A pipeline that never read the stream is placed where it
    /// starts, see [`Starts`]; `end` is the end of the stream. Shards whose server is away are
    /// missing.
    ///
    /// # Errors
    /// When Redis does not answer for any shard, or refuses.
    pub(crate) async fn positions(
        &self,
        stream: &str,
        end: Offset,
    ) -> Result<Positions, StoreError> {
        let mut positions = Vec::with_capacity(self.routes.len());
        let mut away = None;
        for route in &self.routes {
            let placing = self.starts.positions(&route.queue, stream, route.from_earliest, end);
            let standing = placing.await?;
            away = away.or(standing.unavailable);
            positions.push(standing.shards);
        }
        let positions = Positions(positions);
        match away {
            Some(error) if positions.lowest().is_none() => Err(error),
            _ => Ok(positions),
        }
    }

    /// What pipelines still need that other processes run and this one does not: the lowest of
    /// their positions. A pipeline that no process runs needs nothing.
    ///
    /// # Errors
    /// When Redis does not answer for all of them.
    pub(crate) async fn needed_elsewhere(
        &self,
        stream: &str,
    ) -> Result<Option<Offset>, StoreError> {
        let Some(queue) = self.routes.first().map(|route| &route.queue) else { return Ok(None) };
        let mut others = BTreeSet::new();
        for process in presence::processes(queue.link()).await? {
            others.extend(process.pipelines.into_keys());
        }
        let mut needed: Option<Offset> = None;
        for name in others {
            if self.routes.iter().any(|route| *route.queue.name() == name) {
                continue;
            }
            let (count, limits) = (queue.shard_count(), queue.limits());
            let other = Queue::new(name, count, limits, Arc::clone(queue.link()));
            let Some(lowest) = starts::lowest(&other, stream).await? else { continue };
            if let Some(suppressed) = self.waits_elsewhere.take() {
                warn!(pipeline = %other.name(), stream, from = %lowest, suppressed,
                    "another process runs a pipeline that this one does not have: its events stay on the bus until a process with it reads the bus; give all processes one configuration");
            }
            needed = Some(needed.map_or(lowest, |needed| needed.min(lowest)));
        }
        Ok(needed)
    }

    /// Adds what is wanted of a batch that follows what is gathered.
    pub fn gather(&self, batch: &[Entry], matches: &mut Matches, gathered: &mut Gathered) {
        let Some(last) = batch.last() else { return };
        gathered.wanted.resize_with(self.routes.len(), Vec::new);
        gathered.stamped.resize_with(self.routes.len(), Vec::new);
        for Entry { offset, event } in batch {
            let Ok(event) = event else { continue };
            let (index, mut is_wanted, mut encoded) = (gathered.events.len(), false, None);
            let mut is_taken = false;
            for &number in matches.of(&self.routes, event.kind()) {
                let route = &self.routes[number];
                if !route.concerns(event) {
                    continue;
                }
                is_taken = true;
                if !route.passes(event) {
                    continue;
                }
                is_wanted = true;
                gathered.wanted[number].push(index);
                if let Some(ledger) = route.queue.ledger() {
                    let (event, posting) = ledger.enter(event);
                    let bytes = event.encode();
                    gathered.bytes += bytes.len();
                    gathered.stamped[number].push((bytes, posting));
                } else {
                    encoded.get_or_insert_with(|| event.encode());
                }
            }
            if !is_taken {
                gathered.unmatched.add(event.kind());
            }
            if is_wanted {
                gathered.bytes += encoded.as_ref().map_or(0, Vec::len);
                let (offset, bot) = (*offset, event.bot().clone());
                gathered.events.push(Wanted { offset, bot, encoded });
            }
        }
        gathered.batches += 1;
        gathered.entries += batch.len() as u64;
        gathered.end = last.offset;
    }

    /// Copies what was gathered, which follows what `positions` cover, and moves them. Shards whose
    /// server does not take theirs are missing from then on.
    ///
    /// # Errors
    /// When no server took anything, or a shard stands elsewhere: positions are to be read again.
    pub async fn copy(
        &self,
        stream: &str,
        gathered: &Gathered,
        positions: &mut Positions,
    ) -> Result<(), FanoutError> {
        if gathered.events.is_empty() {
            self.unmatched.count(&gathered.unmatched);
            return Ok(());
        }
        let started = Instant::now();
        // All pipelines at once: they share nothing but the batch.
        let wanted = gathered.wanted.iter().zip(&gathered.stamped);
        let copies = self.routes.iter().zip(wanted).zip(&mut positions.0);
        let copies = copies.map(|((route, (wanted, stamped)), positions)| {
            let shards = route.group(&gathered.events, wanted, stamped, positions);
            route.enqueue(stream, gathered.end, shards, positions)
        });
        for copied in join_all(copies).await {
            copied?;
        }
        metrics::fanout_seconds(started.elapsed());
        self.unmatched.count(&gathered.unmatched);
        Ok(())
    }

    /// Moves shards that got nothing forward to `end`, so that they hold nothing back. Needs no
    /// memory of Redis.
    ///
    /// # Errors
    /// As [`Self::copy`].
    pub async fn checkpoint(
        &self,
        stream: &str,
        end: Offset,
        positions: &mut Positions,
    ) -> Result<(), FanoutError> {
        self.unmatched.log();
        for (route, positions) in self.routes.iter().zip(&mut positions.0) {
            route.advance(stream, end, &[], positions).await?;
        }
        Ok(())
    }

    /// After a copy that found Redis full: moves the shards that wanted nothing of it behind it, so
    /// that the stream can be trimmed up to where the others stand.
    ///
    /// # Errors
    /// As [`Self::copy`].
    pub async fn pass_over(
        &self,
        stream: &str,
        gathered: &Gathered,
        positions: &mut Positions,
    ) -> Result<(), FanoutError> {
        let all = self.routes.iter().zip(&gathered.wanted).zip(&mut positions.0);
        for ((route, wanted), positions) in all {
            let mut concerned = vec![false; positions.len()];
            for &index in wanted {
                concerned[route.queue.shard_of(&gathered.events[index].bot).index()] = true;
            }
            route.advance(stream, gathered.end, &concerned, positions).await?;
        }
        Ok(())
    }
}

impl Route {
    /// Whether it takes an event of a type that it names.
    fn concerns(&self, event: &Event) -> bool {
        self.interest.as_ref().is_none_or(|interest| interest.wants(event))
    }

    /// Whether its filter lets the event through.
    fn passes(&self, event: &Event) -> bool {
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

    fn group<'a>(
        &self,
        events: &'a [Wanted],
        wanted: &[usize],
        stamped: &'a [Stamped],
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
                continue; // the shard has it already, or is missing
            }
            let entry = shards[shard.index()]
                .get_or_insert_with(|| ShardBatch { shard, calls: vec![CallBatch::default()] });
            if entry.calls.last().is_none_or(|call| call.is_full_for(bytes)) {
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

    /// Moves shards forward to `end` that are not `concerned` by what comes before it.
    async fn advance(
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

    /// What it means that some shards gave no answer.
    fn go_on(&self, lost: Option<StoreError>, answered: bool) -> Result<(), FanoutError> {
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

    /// Sends the calls in one write, chained per shard; the last of each shard covers up to `end`.
    async fn enqueue(
        &self,
        stream: &str,
        end: Offset,
        shards: Vec<ShardBatch<'_>>,
        positions: &mut [Option<Offset>],
    ) -> Result<(), FanoutError> {
        let limits = self.queue.limits();
        let mut calls = Vec::with_capacity(shards.len());
        for ShardBatch { shard, calls: batches } in shards {
            let Some(mut prev) = positions[shard.index()] else { continue };
            let count = batches.len();
            for (index, batch) in batches.into_iter().enumerate() {
                let last = if index + 1 == count { end } else { batch.last };
                let keys = self.queue.keys(shard);
                let bots = batch.bots;
                let postings = self.queue.ledger().map(|ledger| Postings {
                    cached_accounts: ledger.cached_accounts(),
                    bots: batch.postings,
                });
                calls.push((shard, Enqueue { keys, stream, prev, last, limits, bots, postings }));
                prev = last;
            }
        }
        if calls.is_empty() {
            return Ok(());
        }
        let (shards, calls): (Vec<Shard>, Vec<Enqueue<'_>>) = calls.into_iter().unzip();
        let replies = self.queue.link().call_all(&calls).await?;
        let mut queued = Queued::default();
        let (mut lost, mut answered) = (None, false);
        for ((shard, call), reply) in shards.into_iter().zip(&calls).zip(replies) {
            let position = &mut positions[shard.index()];
            match reply {
                Ok(Enqueued::Ok(more)) => {
                    *position = position.and(Some(call.last));
                    if let (Some(ledger), Some(postings)) = (self.queue.ledger(), &call.postings) {
                        ledger.posted(postings.sum());
                    }
                    queued.appended += more.appended;
                    queued.dead += more.dead;
                    queued.dropped += more.dropped;
                    queued.letters_removed += more.letters_removed;
                    answered = true;
                }
                Ok(Enqueued::Duplicate(stands)) => {
                    *position = position.and(Some(stands));
                    answered = true;
                }
                // The chain broke at the call before, of which nothing is known.
                Ok(Enqueued::Gap(_)) if position.is_none() => {}
                Ok(Enqueued::Gap(stands)) => return Err(self.moved(shard, stands, call.prev)),
                Err(error) if error.is_passing() => {
                    *position = None;
                    lost = Some(error);
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.go_on(lost, answered)?;
        self.metrics.copies.increment(queued.appended);
        self.meter.queued.fetch_add(queued.appended, Ordering::Relaxed);
        self.metrics.dead.increment(queued.dead);
        self.metrics.dropped.increment(queued.dropped);
        self.metrics.letters_removed.increment(queued.letters_removed);
        if queued.dead + queued.dropped > 0
            && let Some(suppressed) = self.full.take()
        {
            warn!(pipeline = %self.queue.name(), dead = queued.dead, dropped = queued.dropped, suppressed,
                "queues of bots are full (max_queue)");
        }
        Ok(())
    }
}

/// Which pipelines take which type, remembered.
#[derive(Debug, Default)]
pub struct Matches(HashMap<Box<str>, Vec<usize>, FxBuildHasher>);

impl Matches {
    fn of(&mut self, routes: &[Route], kind: &str) -> &[usize] {
        if !self.0.contains_key(kind) {
            if self.0.len() >= TYPES_MAX {
                self.0.clear(); // hostile types must not fill the memory
            }
            let takes = |route: &Route| route.types.iter().any(|glob| glob.matches(kind));
            let taking = (0..routes.len()).filter(|&index| takes(&routes[index])).collect();
            self.0.insert(kind.into(), taking);
        }
        self.0.get(kind).map_or(&[], Vec::as_slice)
    }
}

/// How long a failed fan-out waits before it begins anew.
pub(crate) const RESTART: Duration = Duration::from_millis(250);
