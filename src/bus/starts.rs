//! Where a pipeline starts on a stream of the bus, and how far each of its shards is.
//!
//! 1. A shard that copied from the stream before, or was placed on it, says where it stands.
//! 2. For the others, the start of the pipeline is fixed once, in one hash beside the stream: the
//!    first process that has the pipeline writes the end of the stream there, or its beginning for
//!    `start = "earliest"`. Whoever comes later reads it.
//! 3. The shards without a position get that one. A shard whose server is unavailable gets it
//!    when it is back, from whichever process looks then: nothing published in between is lost.
//!
//! Everything is read before it is written. A Redis that is full refuses writes that would change
//! nothing too.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use redis::{Pipeline, Value};
use tracing::info;

use crate::id::{Offset, PipelineName};
use crate::keyspace::{Link, Reply, StoreError, keys};
use crate::queue::Queue;

/// Fixes starts. Remembers those it wrote or read: a Redis that lost its tail may have lost one,
/// and what was published since belongs to the pipeline all the same.
#[derive(Debug, Default)]
pub(crate) struct Starts(Mutex<HashMap<(String, PipelineName), Offset>>);

/// How far the shards of a pipeline are.
#[derive(Debug)]
pub(crate) struct Standing {
    /// Per shard; `None`: its server is unavailable.
    pub(crate) shards: Vec<Option<Offset>>,
    /// What such a server answered.
    pub(crate) unavailable: Option<StoreError>,
}

/// What one shard says.
enum Position {
    At(Offset),
    Absent,
    Unavailable(StoreError),
}

impl Starts {
    /// How far each shard of `queue` has `stream`, whose last offset is `end`. Places those that
    /// never had any of it.
    ///
    /// # Errors
    /// When where the pipeline starts can neither be read nor written, or Redis refuses for
    /// another reason than that it is unavailable. It can be repeated.
    ///
    /// # Cancel safety
    /// What is fixed stays fixed.
    pub(crate) async fn positions(
        &self,
        queue: &Queue,
        stream: &str,
        from_earliest: bool,
        end: Offset,
    ) -> Result<Standing, StoreError> {
        let link = queue.link();
        let mut found = look(queue, stream).await?;
        if found.iter().any(|position| !matches!(position, Position::At(_))) {
            // Also for shards that do not answer: nobody knows whether they have a position.
            let start = if from_earliest { Offset::default() } else { end };
            let start = self.start(link, stream, queue.name(), start, end).await?;
            let mut pipe = Pipeline::new();
            for (keys, position) in queue.shards().iter().zip(&found) {
                if matches!(position, Position::Absent) {
                    pipe.cmd("HSETNX").arg(&keys.hwm).arg(stream).arg(start.to_string());
                    pipe.cmd("HGET").arg(&keys.hwm).arg(stream);
                }
            }
            let mut answers = answers(link, &pipe).await?.into_iter();
            for position in &mut found {
                if matches!(position, Position::Absent)
                    && let (Some(placed), Some(stands)) = (answers.next(), answers.next())
                {
                    *position = placed.and(stands).map_or_else(passing, |value| {
                        offset(link, value).map(|at| at.map_or(Position::Absent, Position::At))
                    })?;
                }
            }
        }
        let mut standing = Standing { shards: Vec::with_capacity(found.len()), unavailable: None };
        for position in found {
            standing.shards.push(match position {
                Position::At(at) => Some(at),
                // Somebody dropped the pipeline meanwhile.
                Position::Absent => None,
                Position::Unavailable(error) => {
                    standing.unavailable = Some(error);
                    None
                }
            });
        }
        Ok(standing)
    }

    /// Where `pipeline` starts on `stream`; at `new` if that was not fixed before.
    async fn start(
        &self,
        link: &Link,
        stream: &str,
        pipeline: &PipelineName,
        new: Offset,
        end: Offset,
    ) -> Result<Offset, StoreError> {
        let key = keys::starts(link.prefix(), stream);
        let read = redis::Cmd::hget(&key, pipeline.as_str());
        let known = offset(link, link.command("HGET", read.clone()).await?)?;
        let place = (stream.to_owned(), pipeline.clone());
        let start = if let Some(known) = known {
            known
        } else {
            let before = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&place).copied();
            // Not one that a stream which begins anew has yet to come to.
            let start = before.filter(|before| *before <= end).unwrap_or(new);
            let mut pipe = Pipeline::new();
            pipe.cmd("HSETNX").arg(&key).arg(pipeline.as_str()).arg(start.to_string());
            pipe.add_command(read);
            let mut values = link.run_checked("HSETNX", &pipe).await?;
            let fixed = offset(link, values.pop().unwrap_or(Value::Nil))?.unwrap_or(start);
            if matches!(values.first(), Some(Value::Int(1))) && fixed > Offset::default() {
                info!(%pipeline, stream, end = %fixed,
                    "new pipeline: starting at the end of the stream; set start = \"earliest\" to include existing events");
            }
            fixed
        };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(place, start);
        Ok(start)
    }
}

/// The lowest position of a pipeline that another process runs; `None` when it has none on the
/// stream.
///
/// # Errors
/// When a shard does not answer.
pub(crate) async fn lowest(queue: &Queue, stream: &str) -> Result<Option<Offset>, StoreError> {
    let mut lowest: Option<Offset> = None;
    for position in look(queue, stream).await? {
        match position {
            Position::At(at) => lowest = Some(lowest.map_or(at, |lowest| lowest.min(at))),
            Position::Absent => {}
            Position::Unavailable(error) => return Err(error),
        }
    }
    Ok(lowest)
}

/// What each shard says.
async fn look(queue: &Queue, stream: &str) -> Result<Vec<Position>, StoreError> {
    let link = queue.link();
    let mut pipe = Pipeline::with_capacity(queue.shards().len());
    for keys in queue.shards().iter() {
        pipe.cmd("HGET").arg(&keys.hwm).arg(stream);
    }
    let read = |answer: Result<Value, StoreError>| {
        answer.map_or_else(passing, |value| {
            offset(link, value).map(|at| at.map_or(Position::Absent, Position::At))
        })
    };
    answers(link, &pipe).await?.into_iter().map(read).collect()
}

/// One answer for each command, also when no server answers.
async fn answers(
    link: &Link,
    pipe: &Pipeline,
) -> Result<Vec<Result<Value, StoreError>>, StoreError> {
    if pipe.is_empty() {
        return Ok(Vec::new());
    }
    let refused = |answer: Result<Value, StoreError>| match answer? {
        Value::ServerError(error) => Err(link.refused("HSETNX", &error)),
        value => Ok(value),
    };
    match link.run_each(pipe).await {
        Ok(answers) => Ok(answers.into_iter().map(refused).collect()),
        Err(error) => Ok(vec![Err(error); pipe.len()]),
    }
}

/// A shard whose server is unavailable. One that is full answers what it is asked.
fn passing(error: StoreError) -> Result<Position, StoreError> {
    if error.is_passing() && !error.is_full() {
        Ok(Position::Unavailable(error))
    } else {
        Err(error)
    }
}

fn offset(link: &Link, value: Value) -> Result<Option<Offset>, StoreError> {
    let text = Reply::single(value).and_then(|mut reply| reply.bytes());
    let text = text.map_err(|source| link.misread("HGET", source))?;
    Ok(text.map(|text| String::from_utf8_lossy(&text).parse().unwrap_or_default()))
}
