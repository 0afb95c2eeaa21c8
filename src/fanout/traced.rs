//! The spans of copies. A shard that is missing, or that other shards are read before, gets an event later
//! than the others: the span of that copy is a second one, with its own time.

use std::time::Duration;

use super::gather::{Gathered, Wanted};
use super::{Fanout, Positions};
use crate::id::{Offset, PipelineName};
use crate::trace::Copied;

/// An event whose trace is recorded.
#[derive(Debug)]
pub(super) struct Traced {
    /// Its place among the gathered events.
    pub(super) index: usize,
    pub(super) copied: Copied,
}

impl Fanout {
    /// Where the shard of an event stands in its log; `None`: it is missing.
    fn stands(&self, pipeline: usize, wanted: &Wanted, positions: &Positions) -> Option<Offset> {
        let shard = self.routes[pipeline].queue.shard_of(&wanted.bot);
        let stands = positions.pipelines[pipeline][shard.index()].as_ref()?;
        stands.get(wanted.log).copied()
    }

    /// The places of the pipelines that want an event, and whose shards lack it before the copy.
    pub(super) fn lacking(
        &self,
        gathered: &Gathered,
        index: usize,
        positions: &Positions,
    ) -> Vec<usize> {
        let wanted = &gathered.events[index];
        let lacks = |pipeline: &usize| {
            // The indexes ascend.
            gathered.wanted[*pipeline].binary_search(&index).is_ok()
                && self.stands(*pipeline, wanted, positions).is_some_and(|at| at < wanted.offset)
        };
        (0..self.routes.len()).filter(lacks).collect()
    }

    /// Those of the pipelines in `lacking` whose shard this copy moved over the event.
    pub(super) fn got<'a>(
        &'a self,
        gathered: &Gathered,
        index: usize,
        lacking: &[usize],
        positions: &Positions,
    ) -> Vec<&'a PipelineName> {
        let wanted = &gathered.events[index];
        let has = |pipeline: &&usize| {
            self.stands(**pipeline, wanted, positions).is_some_and(|at| at >= wanted.offset)
        };
        lacking.iter().filter(has).map(|pipeline| self.routes[*pipeline].queue.name()).collect()
    }

    /// Ends the spans of a copy that took this long. `lacking`: per recorded event, see [`Self::lacking`].
    pub(super) fn trace(
        &self,
        gathered: &Gathered,
        lacking: &[Vec<usize>],
        positions: &Positions,
        took: Duration,
    ) {
        for (Traced { index, copied }, lacking) in gathered.traced.iter().zip(lacking) {
            let pipelines = self.got(gathered, *index, lacking, positions);
            if !pipelines.is_empty() {
                let log = &positions.logs()[gathered.events[*index].log];
                copied.done(&self.tracer, log, &pipelines, took);
            }
        }
    }
}
