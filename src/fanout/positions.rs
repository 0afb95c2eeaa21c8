//! Where the shards of the pipelines stand in the logs of the bus.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::try_join_all;
use tokio::time::Instant;
use tracing::warn;

use super::{Fanout, FanoutError, LOGS_AT_ONCE, starts};
use crate::id::{Offset, PipelineName, Shard};
use crate::presence::{self, HEARD, SILENT};
use crate::queue::Queue;
use crate::redis::scripts::Span;
use crate::redis::{RedisError, keys};

/// The position of each shard of each pipeline in some logs. A shard whose server is unavailable is
/// *missing*: it gets nothing and the others continue. When it is available again, it is read from
/// its own positions.
#[derive(Debug, Clone)]
pub struct Positions {
    /// The names of the logs.
    logs: Arc<[Arc<str>]>,
    /// Per pipeline, per shard.
    pub(super) pipelines: Vec<Vec<Position>>,
    /// The pipelines that wait for their start: all their shards are missing.
    waiting: Vec<Waiting>,
}

/// A new pipeline of which the bus cannot tell where it starts in a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Waiting {
    /// Its place among the pipelines.
    pub(super) place: usize,
    pub(crate) pipeline: PipelineName,
    pub(crate) log: Arc<str>,
}

#[cfg(test)]
impl Waiting {
    /// The first pipeline waits.
    pub(crate) fn of(pipeline: PipelineName, log: &str) -> Self {
        Self { place: 0, pipeline, log: log.into() }
    }
}

/// The position of a shard in each log; `None`: it is missing.
pub(crate) type Position = Option<Box<[Offset]>>;

impl Positions {
    pub(crate) fn new(logs: Arc<[Arc<str>]>, pipelines: Vec<Vec<Position>>) -> Self {
        Self { logs, pipelines, waiting: Vec::new() }
    }

    /// These pipelines wait for their starts.
    pub(super) fn without_starts(self, waiting: Vec<Waiting>) -> Self {
        Self { waiting, ..self }
    }

    /// The pipelines that wait for their starts.
    pub(crate) fn waiting(&self) -> &[Waiting] {
        &self.waiting
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

    /// Without the shards that stand at one of these offsets in its log or before: they are as if they
    /// were missing. `None`: no shard is left.
    #[must_use]
    pub(crate) fn above(&self, floors: &[Option<Offset>]) -> Option<Self> {
        let is_above = |stands: &[Offset]| {
            stands.iter().zip(floors).all(|(stands, floor)| floor.is_none_or(|at| *stands > at))
        };
        let mut others = self.clone();
        for position in others.pipelines.iter_mut().flatten() {
            *position = position.take().filter(|stands| is_above(stands));
        }
        let is_left = others.pipelines.iter().flatten().any(Option::is_some);
        is_left.then_some(others)
    }

    /// Number of missing shards.
    #[must_use]
    pub fn missing(&self) -> usize {
        self.pipelines.iter().flatten().filter(|position| position.is_none()).count()
    }

    /// The same without those that only wait for the start of their pipeline: no server of theirs can come
    /// back.
    #[must_use]
    pub(crate) fn away(&self) -> usize {
        let waits = |place: usize| self.waiting.iter().any(|waiting| waiting.place == place);
        let started = self.pipelines.iter().enumerate().filter(|(place, _)| !waits(*place));
        started.flat_map(|(_, shards)| shards).filter(|position| position.is_none()).count()
    }
}

/// The pipelines that no process was seen to run. After an outage of Redis, and after a start, this process
/// may look before the others have made their next update. So a pipeline counts as one that is run until it
/// was unseen for [`HEARD`].
#[derive(Debug, Default)]
pub(super) struct Unseen(Mutex<Looks>);

#[derive(Debug, Default)]
struct Looks {
    last: Option<Instant>,
    /// Since when each of the pipelines is unseen.
    since: HashMap<PipelineName, Instant>,
}

impl Unseen {
    /// Notes a look that did not see these. Returns those of them that may be run even so.
    fn note(&self, names: BTreeSet<PipelineName>, now: Instant) -> BTreeSet<PipelineName> {
        let mut looks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Looks { last, since } = &mut *looks;
        // Between two looks that are further apart, a process may have come and gone silent unseen: Redis
        // may have been unavailable.
        let is_first = last.is_none_or(|last| now.duration_since(last) > SILENT);
        since.retain(|name, _| !is_first && names.contains(name));
        *last = Some(now);
        let may_run = |name: &PipelineName| {
            let since = since.entry(name.clone()).or_insert(now);
            now.duration_since(*since) < HEARD
        };
        names.into_iter().filter(may_run).collect()
    }
}

impl Fanout {
    /// The pipelines that processes run, and others that they may run. If the look before was more than
    /// [`SILENT`] ago, these are all others.
    ///
    /// # Errors
    /// If Redis does not answer.
    pub(crate) async fn look(
        &self,
    ) -> Result<(BTreeSet<PipelineName>, BTreeSet<PipelineName>), RedisError> {
        let Some(route) = self.routes.first() else { return Ok(<_>::default()) };
        let (link, now) = (route.queue.link(), Instant::now());
        let mut run = BTreeSet::new();
        for process in presence::processes(link).await? {
            run.extend(process.pipelines.into_keys());
        }
        let known = redis::Cmd::hkeys(keys::pipelines(link.prefix()));
        let known: Vec<String> = link.read("HKEYS", link.command("HKEYS", known).await?)?;
        let known = known.iter().filter_map(|name| PipelineName::parse(name).ok());
        let unseen = self.unseen.note(known.filter(|name| !run.contains(name)).collect(), now);
        Ok((run, unseen))
    }

    /// The lowest position in each log of the pipelines that other processes run, or may run, and this
    /// one does not. A pipeline that no process runs needs nothing. `confirm`: waits until the replicas
    /// have it.
    ///
    /// # Errors
    /// If Redis does not answer for all of them.
    pub(crate) async fn needed_elsewhere(
        &self,
        logs: &[Arc<str>],
        confirm: bool,
    ) -> Result<Vec<Option<Offset>>, RedisError> {
        let mut needed: Vec<Option<Offset>> = vec![None; logs.len()];
        let Some(queue) = self.routes.first().map(|route| &route.queue) else { return Ok(needed) };
        let (run, unseen) = self.look().await?;
        for name in run.union(&unseen).cloned() {
            if self.routes.iter().any(|route| *route.queue.name() == name) {
                continue;
            }
            let is_run = run.contains(&name);
            let (count, limits) = (queue.shard_count(), queue.limits());
            let other = Queue::new(name, count, limits, Arc::clone(queue.link()));
            for (place, lowest) in stored(&other, logs, confirm).await?.into_iter().enumerate() {
                let Some(lowest) = lowest else { continue };
                if is_run && let Some(suppressed) = self.waits_elsewhere.take() {
                    warn!(pipeline = %other.name(), stream = &*logs[place], from = %lowest, suppressed,
                        "another process runs a pipeline that this one does not have: its events stay on the bus until a process with it reads the bus; give all processes one configuration");
                }
                needed[place] = Some(needed[place].map_or(lowest, |needed| needed.min(lowest)));
            }
        }
        Ok(needed)
    }

    /// The lowest position in each log that Redis has now of the pipelines of this process. The
    /// replicas have it too. Redis may have lost what this process knows.
    ///
    /// # Errors
    /// If Redis does not answer for all of them, or too few replicas confirm.
    pub(crate) async fn stored(
        &self,
        logs: &[Arc<str>],
    ) -> Result<Vec<Option<Offset>>, RedisError> {
        let mut all = vec![None; logs.len()];
        let routes = self.routes.iter().map(|route| stored(&route.queue, logs, true));
        for of_route in try_join_all(routes).await? {
            for (lowest, of_route) in all.iter_mut().zip(of_route) {
                *lowest = lowest.iter().copied().chain(of_route).min();
            }
        }
        Ok(all)
    }
}

/// The lowest position of a pipeline in each log.
async fn stored(
    queue: &Queue,
    logs: &[Arc<str>],
    confirm: bool,
) -> Result<Vec<Option<Offset>>, RedisError> {
    let mut all = Vec::with_capacity(logs.len());
    for logs in logs.chunks(LOGS_AT_ONCE) {
        all.extend(try_join_all(logs.iter().map(|log| starts::lowest(queue, log))).await?);
    }
    if confirm {
        starts::confirmed(queue).await?;
    }
    Ok(all)
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(ms: u64) -> Offset {
        Offset { ms, seq: 0 }
    }

    #[test]
    fn reading_starts_at_the_lowest_position_of_the_shards_that_are_available() {
        let logs: Arc<[Arc<str>]> = ["x", "y"].map(Arc::from).into();
        let shard = |x, y| Some(Box::from([at(x), at(y)]));
        let pipelines = vec![vec![shard(5, 9), None, shard(7, 2)], vec![shard(6, 4)]];
        let positions = Positions::new(Arc::clone(&logs), pipelines);
        assert_eq!([0, 1].map(|log| positions.lowest(log)), [Some(at(5)), Some(at(2))]);
        assert_eq!([0, 1].map(|log| positions.highest(log)), [Some(at(7)), Some(at(9))]);
        assert_eq!((positions.lowest(2), positions.missing()), (None, 1));
        let others = positions.above(&[Some(at(4)), Some(at(2))]).unwrap();
        assert_eq!([0, 1].map(|log| others.lowest(log)), [Some(at(5)), Some(at(4))]);
        assert_eq!(others.missing(), 2);
        assert!(positions.above(&[Some(at(7)), None]).is_none());
        let none = Positions::new(logs, vec![vec![None, None]]);
        assert_eq!((none.lowest(0), none.missing()), (None, 2));
    }

    #[test]
    fn a_pipeline_that_waits_for_its_start_has_no_shard_whose_server_can_come_back() {
        let shard = || Some(Box::from([at(5)]));
        let pipelines = vec![vec![shard(), shard()], vec![None, None], vec![shard(), None]];
        let (log, pipeline) = (Arc::from("x"), PipelineName::parse("new").unwrap());
        let waiting = vec![Waiting { place: 1, pipeline, log: Arc::clone(&log) }];
        let positions = Positions::new([log].into(), pipelines).without_starts(waiting.clone());
        assert_eq!((positions.missing(), positions.away()), (3, 1));
        let others = positions.above(&[None]).unwrap();
        assert_eq!((others.waiting(), others.away()), (&*waiting, 1));
    }

    #[test]
    fn a_pipeline_is_needed_until_every_process_had_the_time_to_say_that_it_runs_it() {
        let (unseen, start) = (Unseen::default(), Instant::now());
        let of = |seconds: u64, names: &[&str]| {
            let names = names.iter().map(|name| PipelineName::parse(name).unwrap()).collect();
            let needed = unseen.note(names, start + Duration::from_secs(seconds));
            needed.iter().map(PipelineName::as_str).collect::<Vec<_>>().join(" ")
        };
        assert_eq!([of(0, &["x", "y"]), of(5, &["x"])], ["x y", "x"]);
        assert_eq!(of(9, &["x", "y"]), "x y");
        assert_eq!(of(10, &["x", "y"]), "y", "it was seen in between");
        assert_eq!(of(19, &["x", "y"]), "");
        assert_eq!(of(35, &["x", "y"]), "", "a process that was heard of would still be seen");
        assert_eq!(of(52, &["x", "y"]), "x y", "Redis may have been unavailable");
        assert_eq!([of(61, &["x", "y"]), of(62, &["x", "y"])], ["x y", ""]);
    }

    #[test]
    fn the_error_names_the_log_in_which_a_shard_stands_elsewhere() {
        let (pipeline, shard) =
            (PipelineName::parse("p").unwrap(), Shard::from_digits("3").unwrap());
        let span = |log, prev| Span { log, prev: at(prev), last: at(9) };
        let spans = [span("x", 1), span("y", 2)];
        let found = moved(&pipeline, shard, &spans, &[at(1), at(5)]).to_string();
        assert_eq!(found, "shard 3 of pipeline \"p\" stands at 5-0 in y, not at 2-0");
    }

    #[test]
    fn a_shard_stands_where_its_answer_says_unless_it_is_missing() {
        let mut position: Position = Some(Box::from([at(1), at(2), at(3)]));
        stand(&mut position, &[2, 0], &[at(30), at(10)]);
        assert_eq!(position.as_deref(), Some(&[at(10), at(2), at(30)][..]));
        let mut missing: Position = None;
        stand(&mut missing, &[0], &[at(1)]);
        assert_eq!(missing, None);
    }
}
