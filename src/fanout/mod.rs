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

mod call;
mod copy;
mod interest;
mod positions;
mod read;
pub(crate) mod starts;
pub(crate) mod unmatched;

use self::copy::Copying;
pub use self::interest::Interest;
pub(crate) use self::interest::guarded;
pub use self::positions::Positions;
pub use self::read::{Range, Read, is_in};
pub use self::starts::NewStart;
use self::starts::{LogEnd, Starts};
use self::unmatched::{Found, Unmatched};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use rustc_hash::FxBuildHasher;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;
use tracing::warn;

use crate::event::Event;
use crate::event::entry::Entry;
use crate::expression::{Filter, Glob};
use crate::id::{BotId, Offset, Shard};
use crate::ledger::Posting;
use crate::metrics::{self, PipelineMetrics};
use crate::pool::Places;
use crate::presence::Meter;
use crate::queue::Queue;
use crate::redis::RedisError;
use crate::redis::scripts::EventName;
use crate::telemetry::OncePerMinute;
use crate::trace::{Copied, Tracer};

/// When this number of events, bytes or batches is gathered, they are copied first.
const GATHERED_EVENTS: usize = 2_000;
const GATHERED_BYTES: usize = 4 << 20;
const GATHERED_BATCHES: usize = 8;
/// Number of logs whose positions are read concurrently.
const LOGS_AT_ONCE: usize = 16;
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
    /// Whether it starts at the first entry of a log that is new to it; otherwise at the next entry.
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
    #[error("shard {shard} of pipeline {pipeline:?} stands at {stands} in {log}, not at {thought}")]
    Moved {
        /// The pipeline.
        pipeline: String,
        /// The log.
        log: String,
        /// The shard.
        shard: Shard,
        /// Its position.
        stands: Offset,
        /// The expected position.
        thought: Offset,
    },
    /// The bus cannot say where a pipeline starts that is new to a log.
    #[error("it is not known where the new pipeline {pipeline:?} starts in {log}: {cause}")]
    NoStart {
        /// The pipeline.
        pipeline: String,
        /// The log.
        log: String,
        /// Why not, and what to do.
        cause: Arc<str>,
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

/// All pipelines of a process.
#[derive(Debug)]
pub struct Fanout {
    routes: Vec<Route>,
    starts: Arc<Starts>,
    /// Limits the log line that a pipeline of other processes holds back the trimming of the bus.
    waits_elsewhere: OncePerMinute,
    /// Limits the log line about a new pipeline whose start is not known.
    waits_for_start: OncePerMinute,
    unmatched: Unmatched,
    tracer: Tracer,
    /// How long repetitions are dropped; zero: they are not.
    window: Duration,
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
    /// Events whose trace is recorded, with the places of their logs.
    traced: Vec<(usize, Copied)>,
    bytes: usize,
    batches: usize,
    /// What was read of each log.
    covered: Vec<Covered>,
    /// The names of the wanted events, if repetitions are dropped.
    names: HashSet<EventName>,
}

/// What was read of a log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Covered {
    /// Up to where.
    pub end: Offset,
    /// Number of entries.
    pub entries: u64,
    /// Number of those that were not read for other shards before.
    pub new: u64,
    /// Whether anything was read.
    is_read: bool,
}

/// An event that at least one pipeline wants.
#[derive(Debug)]
struct Wanted {
    log: usize,
    offset: Offset,
    bot: BotId,
    /// `None` if only pipelines with a ledger want it.
    encoded: Option<Vec<u8>>,
    /// Zero if repetitions are not dropped.
    name: EventName,
}

impl Gathered {
    /// Whether there was no batch since the last copy.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.batches == 0
    }

    /// The places of the logs of these batches, and what was read of each.
    pub fn covers(&self) -> impl Iterator<Item = (usize, Covered)> {
        self.covered.iter().copied().enumerate().filter(|(_, covered)| covered.is_read)
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
    /// The fan-out into `routes`, with the starts of `starts`. Drops repetitions of events for
    /// `window`; zero: copies them too.
    #[must_use]
    pub(crate) fn new(
        routes: Vec<Route>,
        starts: Arc<Starts>,
        tracer: Tracer,
        window: Duration,
    ) -> Self {
        let (waits_elsewhere, waits_for_start) = <_>::default();
        let unmatched = Unmatched::new();
        Self { routes, starts, waits_elsewhere, waits_for_start, unmatched, tracer, window }
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

    /// Reads the position of every shard in these logs. A pipeline that is new to a log gets its
    /// start as its position, see [`Starts`]. Shards on an unavailable server are missing.
    ///
    /// # Errors
    /// If Redis answers for no shard, or refuses, or if a start is not known.
    pub(crate) async fn positions(&self, logs: &[LogEnd]) -> Result<Positions, FanoutError> {
        let of_route = async |route: &Route| {
            let mut standing = Vec::with_capacity(logs.len());
            for logs in logs.chunks(LOGS_AT_ONCE) {
                let earliest = route.from_earliest;
                let positions =
                    logs.iter().map(|log| self.starts.positions(&route.queue, log, earliest));
                standing.extend(try_join_all(positions).await?);
            }
            let shards = route.queue.shards().len();
            // A shard whose position in one of the logs is not known is missing.
            let of = |shard: usize| standing.iter().map(|log| log.shards[shard]).collect();
            let positions: Vec<Option<Box<[Offset]>>> = (0..shards).map(of).collect();
            Ok::<_, FanoutError>((positions, standing.into_iter().find_map(|log| log.unavailable)))
        };
        let found = join_all(self.routes.iter().map(of_route)).await;
        let (mut pipelines, mut away, mut no_start) = (Vec::with_capacity(found.len()), None, None);
        for (route, found) in self.routes.iter().zip(found) {
            match found {
                Ok((positions, unavailable)) => {
                    pipelines.push(positions);
                    away = unavailable.map(FanoutError::from).or(away);
                }
                // The others are read meanwhile, and it is asked again.
                Err(error @ FanoutError::NoStart { .. }) => {
                    if let Some(suppressed) = self.waits_for_start.take() {
                        warn!(pipeline = %route.queue.name(), %error, suppressed,
                            "a new pipeline waits for its start; the others are read");
                    }
                    pipelines.push(vec![None; route.queue.shards().len()]);
                    no_start = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        let away = no_start.or(away);
        let names = logs.iter().map(|log| Arc::clone(&log.name)).collect();
        let positions = Positions::new(names, pipelines);
        match away {
            Some(error) if positions.lowest(0).is_none() => Err(error),
            _ => Ok(positions),
        }
    }

    /// Adds the matches of entries that directly follow the gathered ones of their log.
    pub fn gather(
        &self,
        Read { log, end, known }: Read<'_>,
        entries: &[Entry],
        matches: &mut Matches,
        gathered: &mut Gathered,
    ) {
        gathered.wanted.resize_with(self.routes.len(), Vec::new);
        gathered.stamped.resize_with(self.routes.len(), Vec::new);
        for Entry { offset, event } in entries {
            let Ok(event) = event else { continue };
            let name = if self.window.is_zero() { EventName::default() } else { name(event) };
            if !self.window.is_zero() && gathered.names.contains(&name) {
                let wants = |route: &&Route| route.concerns(event) && route.passes(event);
                let taking = matches.of(&self.routes, event.kind()).iter();
                let taking = taking.map(|&number| &self.routes[number]).filter(wants);
                taking.for_each(|route| route.metrics.repeated.increment(1));
                continue;
            }
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
            if !is_taken && !is_in(known, *offset) {
                gathered.unmatched.add(event.kind());
            }
            if is_wanted {
                if !self.window.is_zero() {
                    gathered.names.insert(name);
                }
                if !is_in(known, *offset)
                    && let Some(copied) = Copied::note(&self.tracer, event)
                {
                    let wanted = self.routes.iter().zip(&gathered.wanted);
                    let wanted = wanted.filter(|(_, wanted)| wanted.last() == Some(&index));
                    let names = wanted.map(|(route, _)| route.queue.name());
                    gathered.traced.push((log, copied.into_pipelines(names)));
                }
                gathered.bytes += encoded.as_ref().map_or(0, Vec::len);
                let (offset, bot) = (*offset, event.bot().clone());
                gathered.events.push(Wanted { log, offset, bot, encoded, name });
            }
        }
        gathered.batches += 1;
        if gathered.covered.len() <= log {
            gathered.covered.resize_with(log + 1, Covered::default);
        }
        let covered = &mut gathered.covered[log];
        covered.entries += entries.len() as u64;
        covered.new += entries.iter().filter(|entry| !is_in(known, entry.offset)).count() as u64;
        (covered.end, covered.is_read) = (end, true);
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
        let logs = Arc::clone(positions.logs());
        let copying = Copying { logs: &logs, gathered, behind, window: self.window };
        // All pipelines concurrently: they share only the batch.
        let wanted = gathered.wanted.iter().zip(&gathered.stamped);
        let copies = self.routes.iter().zip(wanted).zip(&mut positions.pipelines);
        let copies = copies.map(|((route, (wanted, stamped)), positions)| {
            let shards = route.group(copying, wanted, stamped, positions);
            route.enqueue(copying, shards, positions)
        });
        for copied in join_all(copies).await {
            copied?;
        }
        metrics::fanout_seconds(started.elapsed());
        for (log, copied) in &gathered.traced {
            copied.done(&self.tracer, &logs[*log], started.elapsed());
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

    /// Moves shards that received nothing forward to these ends of the logs, so that they do not hold
    /// back trimming. Needs no memory in Redis.
    ///
    /// # Errors
    /// As [`Self::copy`].
    pub async fn checkpoint(
        &self,
        ends: &[(usize, Offset)],
        positions: &mut Positions,
    ) -> Result<(), FanoutError> {
        self.unmatched.log();
        let logs = Arc::clone(positions.logs());
        let all = self.routes.iter().zip(&mut positions.pipelines);
        let advances = all.map(|(route, positions)| route.advance((&logs, ends), &[], positions));
        // Each to its end: their positions are used later.
        join_all(advances).await.into_iter().collect()
    }

    /// After a copy that found Redis full: moves the shards without matching events forward, so
    /// that the logs can be trimmed up to the positions of the others.
    ///
    /// # Errors
    /// As [`Self::copy`].
    pub async fn pass_over(
        &self,
        gathered: &Gathered,
        positions: &mut Positions,
    ) -> Result<(), FanoutError> {
        let logs = Arc::clone(positions.logs());
        let ends: Vec<_> = gathered.covers().map(|(log, covered)| (log, covered.end)).collect();
        let all = self.routes.iter().zip(&gathered.wanted).zip(&mut positions.pipelines);
        for ((route, wanted), positions) in all {
            let mut concerned = vec![false; positions.len()];
            for &index in wanted {
                concerned[route.queue.shard_of(&gathered.events[index].bot).index()] = true;
            }
            route.advance((&logs, &ends), &concerned, positions).await?;
        }
        Ok(())
    }
}

/// The name of an event among all: of its bot, its source and its id. It is cryptographic, so that no
/// tenant finds an event that counts as a repetition of another tenant's.
fn name(event: &Event) -> EventName {
    let mut hash = Sha256::new();
    for part in [event.bot().as_str(), event.source(), event.id()] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let mut name = EventName::default();
    name.copy_from_slice(&hash.finalize()[..16]);
    name
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

#[cfg(test)]
mod tests;
