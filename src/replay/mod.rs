//! Puts events of the bus at the end of the queues of one pipeline again.
//!
//! A replay reads the streams of the bus between two times, one stream after the other, a page at a
//! time. It appends the events that the pipeline takes to the queues of their bots (`lua/replay.lua`).
//!
//! 1. Exactness: the script stores, with the events, the position of their bot in the replay. A call
//!    that is repeated puts nothing twice.
//! 2. Progress: the [`Run`] is stored before its first put, and after each step with the place up to
//!    which everything is put. A run that was interrupted continues there. Several processes may
//!    continue the same run. A run that finds nothing to put leaves nothing in Redis.
//! 3. First handling: an event that the fan-out has not copied when the replay starts is left alone.
//! 4. Limits: what does not fit into the queue of a bot is refused. The bot is *held*: the run puts no
//!    later event of it, so that its order stays. The run can be continued when the queue has room.

mod copied;
mod put;
mod run;
mod survey;
mod time;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub(crate) use self::copied::Copied;
pub(crate) use self::run::{ID_MAX, Run};
pub(crate) use self::survey::Survey;
pub(crate) use self::time::TimeError;
pub(crate) use self::time::read_time;
use crate::bus::redis_stream::RedisStream;
use crate::clock::rfc3339;
use crate::config::PipelineConfig;
use crate::event::Event;
use crate::expression::{Facts, Filter, FilterError, Glob, Sees};
use crate::fanout::Interest;
use crate::id::{BotId, Offset, PipelineName};
use crate::queue::Queue;
use crate::redis::{RedisError, pages};
use crate::trail::Action;

/// The extension attribute of a replayed event: the id of the replay.
pub(crate) const MARK: &str = "fairlanereplay";

/// What to replay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Spec {
    /// The pipeline that gets the events.
    pub(crate) pipeline: PipelineName,
    /// Only events of this bot.
    pub(crate) bot: Option<BotId>,
    /// Only events of these types; empty: of all types that the pipeline takes.
    pub(crate) types: Vec<String>,
    /// Only events that were published at this time or later, ms since 1970.
    pub(crate) from_ms: u64,
    /// Only events that were published before this time, ms since 1970.
    pub(crate) until_ms: u64,
    /// The streams of the bus.
    pub(crate) streams: Vec<String>,
}

impl Spec {
    /// The action of the operator who starts it.
    pub(crate) fn action(&self) -> Action {
        let types = if self.types.is_empty() { "all" } else { &self.types.join(", ") };
        let (from, until) = (rfc3339(self.from_ms), rfc3339(self.until_ms));
        let action = Action::new("replay").in_pipeline(&self.pipeline).of_bot(self.bot.as_ref());
        action.details(&format!("from {from} to {until}, types {types}"))
    }
}

/// Why a replay is refused. Each text names the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ReplayRefused {
    /// The types of the pipeline are unknown.
    #[error(
        "pipeline {0} is not in this configuration, which would say what it takes; use the configuration of the servers (--config FILE)"
    )]
    Unconfigured(PipelineName),
    /// No worker would handle the events.
    #[error(
        "pipeline {0} is disabled, so no worker would handle the events; set pipelines.{0}.enabled = true first"
    )]
    Disabled(PipelineName),
    /// The pipeline has its own entry points.
    #[error(
        "pipeline {0} takes nothing from the bus, so the bus has none of its events; its dead letters can be queued again: fairlane dead redrive --pipeline {0}"
    )]
    OffBus(PipelineName),
    /// A second handling would have a second effect.
    #[error(
        "pipeline {0} counts each event once, and a replay would count it twice; its dead letters can be queued again: fairlane dead redrive --pipeline {0}"
    )]
    Counted(PipelineName),
    /// Only Redis streams can be replayed.
    #[error(
        "no Redis stream is configured (bus.streams), and a replay reads only those; publish the events to the source again instead"
    )]
    NoStream,
    /// The filter of the pipeline cannot be used.
    #[error("pipelines.{0}.filter: {1}")]
    Filter(PipelineName, #[source] FilterError),
    /// A time cannot be read.
    #[error("{place}: {source}")]
    Time {
        /// The option or the field.
        place: &'static str,
        /// The error.
        #[source]
        source: TimeError,
    },
    /// The range of time is empty.
    #[error(
        "the range of time is empty: it starts at {} and ends at {}; the start must be earlier, and in the past",
        crate::clock::rfc3339(*from_ms), crate::clock::rfc3339(*until_ms)
    )]
    Empty {
        /// Its start.
        from_ms: u64,
        /// Its end.
        until_ms: u64,
    },
    /// No run has the id.
    #[error(
        "there is no replay {0:?}: a replay is remembered for 7 days after its last step, or for 10 minutes if it is done or put nothing; start a new one"
    )]
    Unknown(String),
    /// Another run has the id.
    #[error(
        "replay {0:?} exists with other settings; leave them out to continue it, or choose another id"
    )]
    Other(String),
}

/// A place in the streams of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Place {
    /// The number of the stream; the number of streams at the end.
    stream: usize,
    /// The offset of the last entry that was read there: its two parts.
    after: (u64, u64),
}

/// The events of a bus that a replay puts.
pub(crate) struct Replay {
    queue: Queue,
    streams: Vec<RedisStream>,
    taken: Vec<Glob>,
    types: Vec<Glob>,
    filter: Option<Filter>,
    /// What the pipeline knows about its bots, where this process knows it.
    interest: Option<Arc<dyn Interest>>,
    pub(crate) spec: Spec,
}

/// Entries that were read, as far as they match.
struct Page {
    events: Vec<(Offset, Event)>,
    entries: u64,
    /// The place behind them.
    next: Place,
    /// The number of entries of the next page.
    size: usize,
}

impl Replay {
    /// A replay into the queues of a pipeline with this configuration. Removes the attributes
    /// `reserved` from the events, as the fan-out does.
    ///
    /// # Errors
    /// If the pipeline or the range of time does not permit it.
    pub(crate) fn new(
        queue: Queue,
        config: Option<&PipelineConfig>,
        reserved: &[&'static str],
        spec: Spec,
    ) -> Result<Self, ReplayRefused> {
        let name = queue.name();
        if queue.ledger().is_some() || queue.protected().is_some() && !queue.is_off_bus() {
            return Err(ReplayRefused::Counted(name.clone()));
        }
        if queue.is_off_bus() {
            return Err(ReplayRefused::OffBus(name.clone()));
        }
        let config = config.ok_or_else(|| ReplayRefused::Unconfigured(name.clone()))?;
        if !config.enabled {
            return Err(ReplayRefused::Disabled(name.clone()));
        }
        if spec.streams.is_empty() {
            return Err(ReplayRefused::NoStream);
        }
        let Spec { from_ms, until_ms, .. } = spec;
        if from_ms >= until_ms {
            return Err(ReplayRefused::Empty { from_ms, until_ms });
        }
        let filter = config.filter.as_deref().map(|text| Filter::compile(text, Sees::Event));
        let filter =
            filter.transpose().map_err(|error| ReplayRefused::Filter(name.clone(), error))?;
        let link = queue.link();
        let stream = |name: &String| {
            let stream = RedisStream::new(name, Arc::clone(link), Arc::clone(link));
            stream.reserving([reserved, &[MARK]].concat())
        };
        let globs = |texts: &[String]| texts.iter().map(|text| Glob::new(text)).collect();
        Ok(Self {
            streams: spec.streams.iter().map(stream).collect(),
            taken: globs(&config.events),
            types: globs(&spec.types),
            filter,
            interest: None,
            queue,
            spec,
        })
    }

    /// Puts only events that the pipeline wants for their bot, as the fan-out does.
    pub(crate) fn interested(self, interest: Option<Arc<dyn Interest>>) -> Self {
        Self { interest, ..self }
    }

    /// What the fan-out has copied by now.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub(crate) async fn copied(&self) -> Result<Copied, RedisError> {
        Copied::read(&self.queue, &self.spec.streams).await
    }

    /// Whether the fan-out has copied an event of a stream.
    fn is_copied(&self, copied: &Copied, stream: usize, (at, event): &(Offset, Event)) -> bool {
        copied.has(stream, self.queue.shard_of(event.bot()), *at)
    }

    /// The start of the range.
    pub(crate) fn start(&self) -> Place {
        self.start_of(0)
    }

    fn start_of(&self, stream: usize) -> Place {
        let before = self.spec.from_ms.checked_sub(1).map_or((0, 0), |ms| (ms, u64::MAX));
        Place { stream, after: before }
    }

    /// Whether nothing follows this place.
    fn is_over(&self, place: Place) -> bool {
        place.stream >= self.streams.len()
    }

    /// Reads up to `size` entries behind a place.
    async fn read(&self, place: Place, size: usize) -> Result<Page, RedisError> {
        let after = Offset { ms: place.after.0, seq: place.after.1 };
        let until_ms = self.spec.until_ms - 1;
        let (found, bytes) = self.streams[place.stream].between(after, until_ms, size).await?;
        let entries = found.len();
        let next = match found.last() {
            Some(last) if entries == size => {
                Place { after: (last.offset.ms, last.offset.seq), ..place }
            }
            _ => self.start_of(place.stream + 1),
        };
        let mut events = Vec::new();
        for entry in found {
            let Ok(event) = entry.event else { continue };
            if self.wants(&event) {
                events.push((entry.offset, event));
            }
        }
        let size = pages::next(entries, bytes);
        Ok(Page { events, entries: entries as u64, next, size })
    }

    /// Whether the pipeline takes the event, and the replay is for it.
    fn wants(&self, event: &Event) -> bool {
        let is_of = |globs: &[Glob]| globs.iter().any(|glob| glob.matches(event.kind()));
        self.spec.bot.as_ref().is_none_or(|bot| event.bot() == bot)
            && is_of(&self.taken)
            && (self.types.is_empty() || is_of(&self.types))
            && self.interest.as_ref().is_none_or(|interest| interest.wants(event))
            && self.filter.as_ref().is_none_or(|filter| {
                // As in the fan-out: a filter that cannot be evaluated matches nothing.
                Facts::of(event).and_then(|facts| filter.matches(&facts)).unwrap_or(false)
            })
    }
}
