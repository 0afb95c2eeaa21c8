//! Fan-out: copies a batch of bus entries into the queues of their bots, in every matching
//! pipeline.
//!
//! 1. Match: by type (globs), by the pipeline's interest in the bot, then by the pipeline's filter.
//! 2. Encode once.
//! 3. Gather: while the bus lags, combine the matches of several batches. One call for many events
//!    costs a shard much less than many calls for a few.
//! 4. Group by pipeline, shard and bot.
//! 5. Send one bounded `enqueue` call per up to 500 events of a shard, all in one write per
//!    pipeline. Each call carries the shard's chain of offsets, so the shard itself notices a
//!    repeated or lost call.

mod copy;
pub(crate) mod starts;
pub(crate) mod unmatched;

use self::starts::Starts;
use self::unmatched::{Found, Unmatched};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use rustc_hash::FxBuildHasher;
use tokio::time::Instant;
use tracing::warn;

use crate::event::Event;
use crate::event::entry::Entry;
use crate::expression::{Filter, Glob};
use crate::id::{BotId, Offset, Shard};
use crate::ledger::Posting;
use crate::metrics::{self, PipelineMetrics};
use crate::pool::Places;
use crate::presence::{self, Meter};
use crate::queue::Queue;
use crate::redis::RedisError;
use crate::telemetry::OncePerMinute;
use crate::trace::{Copied, Tracer};

/// When this number of events, bytes or batches is gathered, they are copied first.
const GATHERED_EVENTS: usize = 2_000;
const GATHERED_BYTES: usize = 4 << 20;
const GATHERED_BATCHES: usize = 8;
/// Maximum number of event types whose matches are cached.
const TYPES_MAX: usize = 10_000;

/// One pipeline as a destination of the fan-out.
#[derive(Debug)]
pub struct Route {
    /// Its queues.
    pub queue: Queue,
    /// The types that it takes.
    pub types: Vec<Glob>,
    /// The filter for these events.
    pub filter: Option<Filter>,
    /// The interest in these events by bot; `None`: all.
    pub interest: Option<Arc<dyn Interest>>,
    /// Whether it starts at the first entry of a stream that is new to it; otherwise at the next
    /// entry.
    pub from_earliest: bool,
    /// The free workers of this process, if it has any.
    pub(crate) places: Option<Places>,
    /// Its metrics.
    pub metrics: PipelineMetrics,
    /// Counts for all processes together.
    pub meter: Arc<Meter>,
    /// Limits the log line about a failing filter.
    pub warned: OncePerMinute,
    /// Limits the log line about full queues.
    pub full: OncePerMinute,
}

/// Selects events of a pipeline's types by what the pipeline knows about their bots.
pub trait Interest: std::fmt::Debug + Send + Sync + 'static {
    /// Whether it wants the event. In doubt, yes.
    fn wants(&self, event: &Event) -> bool;

    /// Whether it wants events of this type for this bot, as far as known. If its knowledge may be
    /// stale, yes.
    fn takes(&self, bot: &BotId, kind: &str) -> bool;

    /// Ends once it knows all bots.
    fn known(&self) -> BoxFuture<'_, ()>;
}

/// An event as stored in a queue with a ledger, and its ledger entry.
type Stamped = (Vec<u8>, Option<Posting>);

/// Why a batch could not be copied. In each case the reader reads the positions again and continues
/// from [`Positions::lowest`].
#[derive(Debug, thiserror::Error)]
pub enum FanoutError {
    /// A store failed.
    #[error(transparent)]
    Store(#[from] RedisError),
    /// A shard has another position than expected: it lost its last writes, or another reader was
    /// active.
    #[error("shard {shard} of pipeline {pipeline:?} stands at {stands}, not at {thought}")]
    Moved {
        /// The pipeline.
        pipeline: String,
        /// The shard.
        shard: Shard,
        /// Its position.
        stands: Offset,
        /// The expected position.
        thought: Offset,
    },
    /// Some shards have been missing for a while: it is time to check whether they are available
    /// again.
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

/// The position of each shard of each pipeline on a stream. A shard whose server is unavailable is
/// *missing*: it gets nothing and the others continue. When it is available again, it is read from
/// its own position.
#[derive(Debug, Clone)]
pub struct Positions(Vec<Vec<Option<Offset>>>);

impl Positions {
    /// The offset after which reading starts for the available shards; `None` without any.
    #[must_use]
    pub fn lowest(&self) -> Option<Offset> {
        self.0.iter().flatten().flatten().min().copied()
    }

    /// The highest position of an available shard.
    #[must_use]
    pub fn highest(&self) -> Option<Offset> {
        self.0.iter().flatten().flatten().max().copied()
    }

    /// Number of missing shards.
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
    /// Limits the log line that a pipeline of other processes holds back the trimming of the bus.
    waits_elsewhere: OncePerMinute,
    unmatched: Unmatched,
    tracer: Tracer,
}

/// The matching events of the batches since the last copy.
#[derive(Debug, Default)]
pub struct Gathered {
    events: Vec<Wanted>,
    /// Per pipeline, the indexes of its events.
    wanted: Vec<Vec<usize>>,
    /// Per pipeline with a ledger, these events as it stores them.
    stamped: Vec<Vec<Stamped>>,
    /// Events of a type that no pipeline takes.
    unmatched: Found,
    /// Events whose trace is recorded.
    traced: Vec<Copied>,
    bytes: usize,
    batches: usize,
    /// Number of entries read, and the last of them.
    entries: u64,
    end: Offset,
}

/// An event that at least one pipeline wants.
#[derive(Debug)]
struct Wanted {
    offset: Offset,
    bot: BotId,
    /// `None` if only pipelines with a ledger want it.
    encoded: Option<Vec<u8>>,
}

impl Gathered {
    /// Whether there was no batch since the last copy.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.batches == 0
    }

    /// The last entry of these batches, and the number of entries; `None` without any.
    #[must_use]
    pub fn covers(&self) -> Option<(Offset, u64)> {
        (!self.is_empty()).then_some((self.end, self.entries))
    }

    /// Whether to copy now, although more entries are available.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.events.len() >= GATHERED_EVENTS
            || self.bytes >= GATHERED_BYTES
            || self.batches >= GATHERED_BATCHES
    }
}

impl Fanout {
    /// The fan-out into `routes`, with the starts of `starts`.
    #[must_use]
    pub(crate) fn new(routes: Vec<Route>, starts: Arc<Starts>, tracer: Tracer) -> Self {
        let (waits_elsewhere, unmatched) = (OncePerMinute::default(), Unmatched::new());
        Self { routes, starts, waits_elsewhere, unmatched, tracer }
    }

    /// Waits until every pipeline knows its interests, at most `within`: after that, events in
    /// doubt are copied.
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

    /// Reads the position of every shard. A pipeline that is new to the stream gets its start as
    /// its position, see [`Starts`]; `end` is the end of the stream. Shards on an unavailable
    /// server are missing.
    ///
    /// # Errors
    /// If Redis answers for no shard, or refuses.
    pub(crate) async fn positions(
        &self,
        stream: &str,
        end: Offset,
    ) -> Result<Positions, RedisError> {
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

    /// The lowest position of the pipelines that other processes run and this one does not. A
    /// pipeline that no process runs needs nothing.
    ///
    /// # Errors
    /// If Redis does not answer for all of them.
    pub(crate) async fn needed_elsewhere(
        &self,
        stream: &str,
    ) -> Result<Option<Offset>, RedisError> {
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

    /// Adds the matches of a batch that directly follows the gathered ones.
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
                if let Some(copied) = Copied::note(&self.tracer, event) {
                    let wanted = self.routes.iter().zip(&gathered.wanted);
                    let wanted = wanted.filter(|(_, wanted)| wanted.last() == Some(&index));
                    let names = wanted.map(|(route, _)| route.queue.name());
                    gathered.traced.push(copied.into_pipelines(names));
                }
                gathered.bytes += encoded.as_ref().map_or(0, Vec::len);
                let (offset, bot) = (*offset, event.bot().clone());
                gathered.events.push(Wanted { offset, bot, encoded });
            }
        }
        gathered.batches += 1;
        gathered.entries += batch.len() as u64;
        gathered.end = last.offset;
    }

    /// Copies the gathered events, which directly follow `positions`, and moves the positions.
    /// Shards whose server does not answer are missing from then on. `behind`: how late the last of
    /// them is, if more entries are available: the same bots may get more events, which one slice
    /// should have together. `None`: free workers handle the events at once.
    ///
    /// # Errors
    /// If no server answers, or a shard has another position: the positions must be read again.
    pub async fn copy(
        &self,
        stream: &str,
        gathered: &Gathered,
        behind: Option<Duration>,
        positions: &mut Positions,
    ) -> Result<(), FanoutError> {
        if gathered.events.is_empty() {
            if behind.is_none() {
                self.rests();
            }
            self.unmatched.count(&gathered.unmatched);
            return Ok(());
        }
        let started = Instant::now();
        // All pipelines concurrently: they share only the batch.
        let wanted = gathered.wanted.iter().zip(&gathered.stamped);
        let copies = self.routes.iter().zip(wanted).zip(&mut positions.0);
        let copies = copies.map(|((route, (wanted, stamped)), positions)| {
            let size = route.call_events(behind);
            let shards = route.group(&gathered.events, wanted, (stamped, size), positions);
            route.enqueue((stream, gathered.end), behind, shards, positions)
        });
        for copied in join_all(copies).await {
            copied?;
        }
        metrics::fanout_seconds(started.elapsed());
        for copied in &gathered.traced {
            copied.done(&self.tracer, stream, started.elapsed());
        }
        self.unmatched.count(&gathered.unmatched);
        Ok(())
    }

    /// Nothing is copied now.
    pub(crate) fn rests(&self) {
        for places in self.routes.iter().filter_map(|route| route.places.as_ref()) {
            places.copied(None, 0, std::iter::empty());
        }
    }

    /// Moves shards that received nothing forward to `end`, so that they do not hold back trimming.
    /// Needs no memory in Redis.
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

    /// After a copy that found Redis full: moves the shards without matching events forward, so
    /// that the stream can be trimmed up to the positions of the others.
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

/// A cache of the pipelines that take each type.
#[derive(Debug, Default)]
pub struct Matches(HashMap<Box<str>, Vec<usize>, FxBuildHasher>);

impl Matches {
    fn of(&mut self, routes: &[Route], kind: &str) -> &[usize] {
        if !self.0.contains_key(kind) {
            if self.0.len() >= TYPES_MAX {
                self.0.clear(); // Hostile types must not fill the memory.
            }
            let takes = |route: &Route| route.types.iter().any(|glob| glob.matches(kind));
            let taking = (0..routes.len()).filter(|&index| takes(&routes[index])).collect();
            self.0.insert(kind.into(), taking);
        }
        self.0.get(kind).map_or(&[], Vec::as_slice)
    }
}

/// How long a failed fan-out waits before it starts again.
pub(crate) const RESTART: Duration = Duration::from_millis(250);
