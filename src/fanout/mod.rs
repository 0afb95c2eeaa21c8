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
mod gather;
mod interest;
mod positions;
mod read;
pub(crate) mod starts;
mod traced;
pub(crate) mod unmatched;

use self::copy::Copying;
pub use self::gather::{Covered, Gathered};
pub use self::interest::Interest;
pub(crate) use self::interest::guarded;
pub use self::positions::Positions;
use self::positions::Unseen;
pub(crate) use self::positions::Waiting;
pub use self::read::{Range, Read, is_in};
pub use self::starts::NewStart;
use self::starts::{LogEnd, Starts};
use self::unmatched::Unmatched;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use rustc_hash::FxBuildHasher;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;
use tracing::warn;

use crate::event::Event;
use crate::expression::{Filter, Glob};
use crate::id::{Offset, Shard};
use crate::metrics::{self, PipelineMetrics};
use crate::pool::Places;
use crate::presence::Meter;
use crate::queue::Queue;
use crate::redis::RedisError;
use crate::redis::scripts::EventName;
use crate::telemetry::OncePerMinute;
use crate::trace::Tracer;

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
    unseen: Unseen,
    unmatched: Unmatched,
    tracer: Tracer,
    /// How long repetitions are dropped; zero: they are not.
    window: Duration,
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
        let (waits_elsewhere, waits_for_start, unseen) = <_>::default();
        let unmatched = Unmatched::new();
        Self { routes, starts, waits_elsewhere, waits_for_start, unseen, unmatched, tracer, window }
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
        let mut waiting = Vec::new();
        for (place, (route, found)) in self.routes.iter().zip(found).enumerate() {
            match found {
                Ok((positions, unavailable)) => {
                    pipelines.push(positions);
                    away = unavailable.map(FanoutError::from).or(away);
                }
                Err(error) => {
                    let FanoutError::NoStart { log, .. } = &error else { return Err(error) };
                    // The others are read meanwhile, and it is asked again.
                    let (pipeline, log) = (route.queue.name().clone(), Arc::from(&**log));
                    waiting.push(Waiting { place, pipeline, log });
                    if let Some(suppressed) = self.waits_for_start.take() {
                        warn!(pipeline = %route.queue.name(), %error, suppressed,
                            "a new pipeline waits for its start; the others are read");
                    }
                    pipelines.push(vec![None; route.queue.shards().len()]);
                    no_start = Some(error);
                }
            }
        }
        let away = no_start.or(away);
        let names = logs.iter().map(|log| Arc::clone(&log.name)).collect();
        let positions = Positions::new(names, pipelines).without_starts(waiting);
        match away {
            Some(error) if positions.lowest(0).is_none() => Err(error),
            _ => Ok(positions),
        }
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
            self.count(gathered);
            return Ok(());
        }
        let started = Instant::now();
        let logs = Arc::clone(positions.logs());
        let traced = gathered.traced.iter();
        let lacking: Vec<_> =
            traced.map(|traced| self.lacking(gathered, traced.index, positions)).collect();
        let copying = Copying { logs: &logs, gathered, behind, window: self.window };
        // All pipelines concurrently: they share only the batch.
        let wanted = gathered.wanted.iter().zip(&gathered.stamped);
        let copies = self.routes.iter().zip(wanted).zip(&mut positions.pipelines);
        let copies = copies.map(|((route, (wanted, stamped)), positions)| {
            let shards = route.group(copying, wanted, stamped, positions);
            route.enqueue(copying, shards, positions)
        });
        let done: Result<(), FanoutError> = join_all(copies).await.into_iter().collect();
        // After an error too: the next session finds that these shards have the events.
        self.trace(gathered, &lacking, positions, started.elapsed());
        done?;
        metrics::fanout_seconds(started.elapsed());
        self.count(gathered);
        Ok(())
    }

    /// Counts what was found in these batches: they are copied.
    fn count(&self, gathered: &Gathered) {
        self.unmatched.count(&gathered.unmatched);
        for (Route { metrics, .. }, counts) in self.routes.iter().zip(&gathered.counts) {
            metrics.repeated.increment(counts.repeated);
            metrics.filter_errors.increment(counts.filter_errors);
        }
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
