//! Where the shards of the pipelines stand in the logs of the bus.

use std::sync::Arc;

use super::FanoutError;
use crate::id::{Offset, PipelineName, Shard};
use crate::redis::scripts::Span;

/// The position of each shard of each pipeline in some logs. A shard whose server is unavailable is
/// *missing*: it gets nothing and the others continue. When it is available again, it is read from
/// its own positions.
#[derive(Debug, Clone)]
pub struct Positions {
    /// The names of the logs.
    logs: Arc<[Arc<str>]>,
    /// Per pipeline, per shard.
    pub(super) pipelines: Vec<Vec<Position>>,
}

/// The position of a shard in each log; `None`: it is missing.
pub(super) type Position = Option<Box<[Offset]>>;

impl Positions {
    pub(super) fn new(logs: Arc<[Arc<str>]>, pipelines: Vec<Vec<Position>>) -> Self {
        Self { logs, pipelines }
    }

    /// The names of the logs.
    #[must_use]
    pub fn logs(&self) -> &Arc<[Arc<str>]> {
        &self.logs
    }

    /// The offset in a log after which reading starts for the available shards; `None` without any.
    #[must_use]
    pub fn lowest(&self, log: usize) -> Option<Offset> {
        self.of(log).min()
    }

    /// The highest position of an available shard in a log.
    #[must_use]
    pub fn highest(&self, log: usize) -> Option<Offset> {
        self.of(log).max()
    }

    fn of(&self, log: usize) -> impl Iterator<Item = Offset> {
        let shards = self.pipelines.iter().flatten().flatten();
        shards.filter_map(move |stands| stands.get(log).copied())
    }

    /// Number of missing shards.
    #[must_use]
    pub fn missing(&self) -> usize {
        self.pipelines.iter().flatten().filter(|position| position.is_none()).count()
    }
}

/// The shard has the positions that a call told, at the places of its spans.
pub(super) fn stand(position: &mut Position, places: &[usize], stands: &[Offset]) {
    let Some(position) = position else { return };
    for (&log, &at) in places.iter().zip(stands) {
        if let Some(old) = position.get_mut(log) {
            *old = at;
        }
    }
}

/// The error of a call whose shard stands elsewhere: the first log in which it does.
pub(super) fn moved(
    pipeline: &PipelineName,
    shard: Shard,
    spans: &[Span<'_>],
    stands: &[Offset],
) -> FanoutError {
    let pairs = || spans.iter().zip(stands);
    let elsewhere = pairs().find(|(span, stands)| span.prev != **stands).or_else(|| pairs().next());
    let (log, thought, stands) = elsewhere
        .map_or_else(Default::default, |(span, stands)| (span.log.to_owned(), span.prev, *stands));
    FanoutError::Moved { pipeline: pipeline.to_string(), log, shard, stands, thought }
}
