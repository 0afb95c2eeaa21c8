//! The start of a pipeline on a stream of the bus, and the position of each of its shards.
//!
//! 1. A shard that has copied from the stream, or was placed on it, knows its position.
//! 2. For other shards, the start of the pipeline is fixed once, in a hash beside the stream. The
//!    first process that has the pipeline writes the end of the stream there, or its oldest entry
//!    for `start = "earliest"`. Later processes read it.
//! 3. If a stream or topic does not exist yet, its first entry is fixed, for a topic under what the names
//!    of its logs begin with: all entries will be published later.
//! 4. Shards without a position start there. If the server of a shard is unavailable, the process
//!    that sees it come back places the shard. So no event published in between is lost.
//!
//! Everything is read before it is written, because a full Redis also refuses writes that would
//! change nothing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use redis::{Pipeline, Value};
use tracing::info;

use super::FanoutError;
use crate::id::{Offset, PipelineName};
use crate::queue::Queue;
use crate::redis::{Link, RedisError, Reply, keys};

/// Fixes starts, and remembers those it wrote or read. Redis may lose a start with its last writes,
/// and events published since then still belong to the pipeline.
#[derive(Debug, Default)]
pub(crate) struct Starts(Mutex<HashMap<(String, PipelineName), Offset>>);

/// Where pipelines start that are new to a log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum NewStart {
    /// As each of them says.
    #[default]
    Own,
    /// All of them here.
    At(Offset),
    /// It cannot be found out. Pipelines that have started are not concerned.
    Unknown(Arc<str>),
}

/// A log of the bus, and where pipelines that are new to it start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LogEnd {
    /// Its name.
    pub(crate) name: Arc<str>,
    /// Its last offset.
    pub(crate) last: Offset,
    /// Where pipelines start that are new to it.
    pub(crate) start: NewStart,
    /// The position before its first entry now, and before any entry that it ever had.
    pub(crate) before: (Offset, Offset),
}

/// The positions of the shards of a pipeline in a log.
#[derive(Debug)]
pub(crate) struct Standing {
    /// The position per shard; `None`: its server is unavailable.
    pub(crate) shards: Vec<Option<Offset>>,
    /// The error of such a server.
    pub(crate) unavailable: Option<RedisError>,
}

/// The state of one shard.
enum Position {
    At(Offset),
    Absent,
    Unavailable(RedisError),
}

impl Starts {
    /// The position of each shard of `queue` in `log`. Places shards without a position.
    ///
    /// # Errors
    /// If the start of the pipeline can neither be read nor written, or if Redis refuses for a
    /// reason other than being unavailable. [`FanoutError::NoStart`] if the pipeline is new, and the bus
    /// cannot say where it starts. The call can be repeated.
    ///
    /// # Cancel safety
    /// A fixed start stays fixed.
    pub(crate) async fn positions(
        &self,
        queue: &Queue,
        log: &LogEnd,
        from_earliest: bool,
    ) -> Result<Standing, FanoutError> {
        let (link, stream, end) = (queue.link(), &*log.name, log.last);
        let mut found = look(queue, stream).await?;
        if found.iter().any(|position| !matches!(position, Position::At(_))) {
            // Also needed for shards that do not answer, because they may have no position.
            let new = match &log.start {
                NewStart::At(start) => Ok(*start),
                NewStart::Own => Ok(if from_earliest { log.before.0 } else { end }),
                NewStart::Unknown(cause) => Err(Arc::clone(cause)),
            };
            let is_placed = found.iter().any(|position| matches!(position, Position::At(_)))
                && !found.iter().any(|position| matches!(position, Position::Absent));
            match self.start(link, log, queue.name(), new).await {
                // The start was fixed before a shard got its position. In a cluster, the server that
                // has it may be the one that does not answer.
                Err(FanoutError::Store(error)) if is_placed && error.is_passing() => {}
                start => place(queue, stream, start?, &mut found).await?,
            }
        }
        let mut standing = Standing { shards: Vec::with_capacity(found.len()), unavailable: None };
        for position in found {
            standing.shards.push(match position {
                Position::At(at) => Some(at),
                // The pipeline was dropped meanwhile.
                Position::Absent => None,
                Position::Unavailable(error) => {
                    standing.unavailable = Some(error);
                    None
                }
            });
        }
        Ok(standing)
    }

    /// Notes that `topic` of [`Source::topics`] does not exist when `pipeline` starts.
    ///
    /// [`Source::topics`]: crate::bus::Source::topics
    pub(crate) async fn absent(
        &self,
        link: &Link,
        topic: &str,
        pipeline: &PipelineName,
    ) -> Result<(), RedisError> {
        if fixed(link, topic, pipeline).await?.is_none() {
            let mut pipe = Pipeline::new();
            pipe.cmd("HSETNX").arg(keys::starts(link.prefix(), topic));
            pipe.arg(pipeline.as_str()).arg(Offset::default().to_string());
            if link.run_checked("HSETNX", &pipe).await?.first() == Some(&Value::Int(1)) {
                info!(%pipeline, stream = topic,
                    "this stream or topic does not exist yet: the new pipeline will start at its first entry");
            }
        }
        Ok(())
    }

    /// The start of `pipeline` on `log`. Fixes it at `new` if it was not fixed before.
    async fn start(
        &self,
        link: &Link,
        log: &LogEnd,
        pipeline: &PipelineName,
        new: Result<Offset, Arc<str>>,
    ) -> Result<Offset, FanoutError> {
        let (stream, end) = (&*log.name, log.last);
        let key = keys::starts(link.prefix(), stream);
        let place = (stream.to_owned(), pipeline.clone());
        let start = if let Some(fixed) = fixed(link, stream, pipeline).await? {
            fixed
        } else {
            let before = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&place).copied();
            let topic = stream.rfind('/').map(|slash| &stream[..=slash]);
            let new = match topic {
                Some(topic) if fixed(link, topic, pipeline).await?.is_some() => Ok(log.before.1),
                _ => new,
            };
            // Not a position ahead of a stream that was deleted and created again.
            let before = before.filter(|before| *before <= end).map(Ok);
            let start = before.unwrap_or(new).map_err(|cause| FanoutError::NoStart {
                pipeline: pipeline.to_string(),
                log: stream.to_owned(),
                cause,
            })?;
            let mut pipe = Pipeline::new();
            pipe.cmd("HSETNX").arg(&key).arg(pipeline.as_str()).arg(start.to_string());
            pipe.add_command(redis::Cmd::hget(&key, pipeline.as_str()));
            let mut values = link.run_checked("HSETNX", &pipe).await?;
            let fixed = offset(link, values.pop().unwrap_or(Value::Nil))?.unwrap_or(start);
            if matches!(values.first(), Some(Value::Int(1))) && fixed > log.before.0 {
                info!(%pipeline, stream, start = %fixed,
                    "a new pipeline starts at this offset of the stream; to include earlier events, add another one with start = \"earliest\"");
            }
            fixed
        };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(place, start);
        Ok(start)
    }
}

/// Gives the shards without a position this one.
async fn place(
    queue: &Queue,
    stream: &str,
    start: Offset,
    found: &mut [Position],
) -> Result<(), FanoutError> {
    let link = queue.link();
    let mut pipe = Pipeline::new();
    for (keys, position) in queue.shards().iter().zip(&*found) {
        if matches!(position, Position::Absent) {
            pipe.cmd("HSETNX").arg(&keys.offsets).arg(stream).arg(start.to_string());
            pipe.cmd("HGET").arg(&keys.offsets).arg(stream);
        }
    }
    let mut answers = answers(link, &pipe).await?.into_iter();
    for position in found {
        if matches!(position, Position::Absent)
            && let (Some(placed), Some(stands)) = (answers.next(), answers.next())
        {
            *position = placed.and(stands).map_or_else(passing, |value| {
                offset(link, value).map(|at| at.map_or(Position::Absent, Position::At))
            })?;
        }
    }
    Ok(())
}

/// Waits until the replicas have the positions of a pipeline, if the target asks for that.
///
/// # Errors
/// If a shard does not answer, or too few replicas confirm.
pub(crate) async fn confirmed(queue: &Queue) -> Result<(), RedisError> {
    if queue.link().target().wait_replicas() == 0 {
        return Ok(());
    }
    let mut pipe = Pipeline::with_capacity(queue.shards().len());
    for keys in queue.shards().iter() {
        pipe.cmd("EXISTS").arg(&keys.offsets);
    }
    queue.link().run_lasting("EXISTS", &pipe).await.map(drop)
}

/// The lowest position of a pipeline; `None` if it has none on the stream.
///
/// # Errors
/// If a shard does not answer.
pub(crate) async fn lowest(queue: &Queue, stream: &str) -> Result<Option<Offset>, RedisError> {
    let (mut lowest, mut is_placed) = (None::<Offset>, true);
    for position in look(queue, stream).await? {
        match position {
            Position::At(at) => lowest = Some(lowest.map_or(at, |lowest| lowest.min(at))),
            Position::Absent => is_placed = false,
            Position::Unavailable(error) => return Err(error),
        }
    }
    if is_placed {
        return Ok(lowest);
    }
    // A shard whose server was unavailable when the pipeline started is placed there later.
    let start = fixed(queue.link(), stream, queue.name()).await?;
    Ok(lowest.into_iter().chain(start).min())
}

/// Where a pipeline starts on a stream, if a process has fixed that.
pub(crate) async fn fixed(
    link: &Link,
    stream: &str,
    pipeline: &PipelineName,
) -> Result<Option<Offset>, RedisError> {
    let read = redis::Cmd::hget(keys::starts(link.prefix(), stream), pipeline.as_str());
    offset(link, link.command("HGET", read).await?)
}

/// The position of each shard of a pipeline on a stream; zero without one.
///
/// # Errors
/// If a shard does not answer.
pub(crate) async fn standing(queue: &Queue, stream: &str) -> Result<Vec<Offset>, RedisError> {
    let at = |position| match position {
        Position::At(at) => Ok(at),
        Position::Absent => Ok(Offset::default()),
        Position::Unavailable(error) => Err(error),
    };
    look(queue, stream).await?.into_iter().map(at).collect()
}

/// The state of each shard.
async fn look(queue: &Queue, stream: &str) -> Result<Vec<Position>, RedisError> {
    let link = queue.link();
    let mut pipe = Pipeline::with_capacity(queue.shards().len());
    for keys in queue.shards().iter() {
        pipe.cmd("HGET").arg(&keys.offsets).arg(stream);
    }
    let read = |answer: Result<Value, RedisError>| {
        answer.map_or_else(passing, |value| {
            offset(link, value).map(|at| at.map_or(Position::Absent, Position::At))
        })
    };
    answers(link, &pipe).await?.into_iter().map(read).collect()
}

/// One answer per command, also if no server answers.
async fn answers(
    link: &Link,
    pipe: &Pipeline,
) -> Result<Vec<Result<Value, RedisError>>, RedisError> {
    if pipe.is_empty() {
        return Ok(Vec::new());
    }
    let refused = |answer: Result<Value, RedisError>| match answer? {
        Value::ServerError(error) => Err(link.refused("HSETNX", &error)),
        value => Ok(value),
    };
    match link.run_each(pipe).await {
        Ok(answers) => Ok(answers.into_iter().map(refused).collect()),
        Err(error) => Ok(vec![Err(error); pipe.len()]),
    }
}

/// Whether the server of a shard is unavailable. A full server still answers reads.
fn passing(error: RedisError) -> Result<Position, RedisError> {
    if error.is_passing() && !error.is_full() {
        Ok(Position::Unavailable(error))
    } else {
        Err(error)
    }
}

fn offset(link: &Link, value: Value) -> Result<Option<Offset>, RedisError> {
    let text = Reply::single(value).and_then(|mut reply| reply.bytes());
    let text = text.map_err(|source| link.misread("HGET", source))?;
    Ok(text.map(|text| String::from_utf8_lossy(&text).parse().unwrap_or_default()))
}
