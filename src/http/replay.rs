//! Replay: puts events of the bus at the end of the queues of one pipeline again.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::Uri;
use axum::response::Json;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, timeout, timeout_at};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Api;
use super::auth::Caller;
use super::docs::{Body, OfPipeline};
use super::extract::{self, Path};
use super::page::Limit;
use super::partly::partly;
use super::pipelines::PipelinePath;
use super::problem::{Kind, Problem};
use crate::id::BotId;
use crate::redis::RedisError;
use crate::replay::{ID_MAX, Place, Replay, ReplayRefused, Run, Spec, Survey, read_time};
use crate::request_deadline;

/// A call ends after this time, and says how to go on.
const WITHIN: Duration = Duration::from_secs(5);
/// The same for tokens that are for certain bots.
const WITHIN_OF_BOT: Duration = Duration::from_secs(1);
/// Maximum time of a call with its last step, which ends late if Redis is slow.
const WITHIN_ALL: Duration = Duration::from_secs(60);
/// Maximum number of events that a call puts.
const LIMIT_MAX: u32 = 10_000;
/// Maximum number of held bots in an answer.
const HELD_SHOWN: usize = 10;
/// Maximum number of types.
const TYPES_MAX: usize = 64;

/// Requires the scope `operate`.
pub(super) fn operating() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(replay))
}

/// What to replay.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct ReplayRequest {
    /// Events that were published at this time or later: RFC 3339 with a zone, or how long ago, such as
    /// `2h ago`. Required, except to continue a replay.
    #[serde(default)]
    #[schema(value_type = Option<String>, example = "2h ago")]
    from: Option<String>,
    /// Events that were published before this time. Default: now.
    #[serde(default)]
    #[schema(value_type = Option<String>, example = "2026-11-24T15:00:00Z")]
    to: Option<String>,
    /// Only events of this bot. Required if the token is for certain bots.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    bot: Option<BotId>,
    /// Only events of these types, with `*` for any text; of those that the pipeline takes.
    #[serde(default)]
    #[schema(max_items = 64)]
    types: Vec<String>,
    /// Count the events and change nothing.
    #[serde(default)]
    dry_run: bool,
    /// The id of the replay, up to 64 letters, digits, `-` and `_`. A call with the id of an earlier one
    /// continues it and puts no event twice. Default: a new id, which you do not learn if the answer is
    /// lost.
    #[serde(default)]
    #[schema(min_length = 1, max_length = 64, pattern = "^[A-Za-z0-9_-]+$")]
    id: Option<String>,
    /// Maximum number of events that this call puts: 1 to 10,000; default 1,000.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 10000, default = 1000)]
    limit: Option<u32>,
    /// The `cursor` of the previous call, to go on. Of the other fields, a replay then needs none, and a
    /// dry run needs `bot`, `types` and `dry_run` again.
    #[serde(default)]
    cursor: Option<String>,
}

/// What a call did.
#[derive(Debug, Serialize, ToSchema)]
struct ReplayAnswer {
    /// The id of the replay: the value of the attribute `fairlanereplay` of its events. Absent for a dry
    /// run.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    /// What the replay would put; only for a dry run. If it is not complete, it is for the part that this
    /// call read.
    #[serde(skip_serializing_if = "Option::is_none")]
    found: Option<Survey>,
    /// Number of events that this call put.
    put: u64,
    /// Whether everything is put, or counted.
    done: bool,
    /// Number of bots whose queues are full. Continue the replay with its `id` later.
    held_bots: u64,
    /// Number of their events that were read and not put.
    waiting: u64,
    /// Some of these bots, each with the limit.
    held: Vec<Held>,
    /// The cursor of the next call; absent if there is nothing left to read.
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<String>,
}

/// A bot whose queue is full.
#[derive(Debug, Serialize, ToSchema)]
struct Held {
    /// The bot.
    bot: BotId,
    /// The limit that refuses its events: `max_queue` or `quotas.queued_bytes`.
    limit: String,
}

/// How to go on.
#[derive(Debug, Serialize, Deserialize)]
enum Cursor {
    Run(String),
    Dry { from_ms: u64, until_ms: u64, place: Place },
}

/// For [`super::fuzzing`]: reads a cursor.
#[cfg(any(test, fuzzing))]
pub(super) fn fuzz(
    cursors: &super::page::Cursors,
    path: &str,
    text: Option<&str>,
) -> Option<Problem> {
    cursors.read::<Cursor>(path, text).err()
}

/// Replay events
///
/// Puts the events of the bus that the pipeline takes at the end of the queues of their bots, in the
/// order of the bus, with the attribute `fairlanereplay`. Other pipelines get nothing. A call puts up to
/// `limit` events in up to 5 s (1 s for a token that is for certain bots), and answers a `cursor` for the
/// next call. A repeated call with the same `id` or `cursor` puts nothing twice; without one, each call
/// is a new replay. If a replay is interrupted, `detail` has its id, or says that this call put no event.
/// What is not copied to the queues yet when the replay starts is left alone: it is handled anyway. What
/// exceeds `max_queue` or a quota is not put.
/// Pipelines that count each event are refused. Dead letters are queued again by their redrive.
#[utoipa::path(
    post, path = "/v1/pipelines/{pipeline}/replay", tag = "pipelines", operation_id = "replayEvents",
    params(PipelinePath), request_body = ReplayRequest,
    responses(
        (status = 200, description = "What was put or counted", body = ReplayAnswer),
        (status = 409, description = "The pipeline cannot be replayed, or the id has other settings", body = Problem),
        OfPipeline,
        Body,
    )
)]
async fn replay(
    State(api): State<Arc<Api>>,
    caller: Caller,
    uri: Uri,
    Path(path): Path<PipelinePath>,
    extract::Json(asked): extract::Json<ReplayRequest>,
) -> Result<Json<ReplayAnswer>, Problem> {
    let limit = Limit { default: 1_000, least: 1, most: LIMIT_MAX }.of(asked.limit)?;
    let queue = api.queues.find(&path.pipeline).await?;
    let cursor = api.gate.cursors.read(uri.path(), asked.cursor.as_deref())?;
    // It reads much: one at a time, by turns over tokens.
    let turn = timeout(before(WITHIN_ALL), api.searches.take(caller.name()));
    let _turn = turn.await.unwrap_or_else(|_| Err(no_turn()))?;
    let within = if caller.covers_all() { WITHIN } else { WITHIN_OF_BOT };
    // The last step has as long as those before it, and is interrupted a little before the deadline of
    // the request: its answer names the id.
    let within = request_deadline::at_most(2 * within) / 2;
    let begun = Instant::now();
    let (stop, end) = (begun + within, begun + before(WITHIN_ALL));
    let config = api.queues.configured(&path.pipeline);
    let reserved = api.queues.reserved();
    let open = |spec: Spec| {
        let bot = spec.bot.as_ref();
        bot.map_or_else(|| of_all_bots(&caller), |bot| caller.check_bot(bot))?;
        let replay = Replay::new(queue.clone(), config, &reserved, spec);
        let replay = replay.map_err(|error| refused(&error))?;
        Ok::<_, Problem>(replay.interested(api.taken.interest(&path.pipeline)))
    };

    let id = match &cursor {
        Some(Cursor::Run(id)) => Some(id.clone()),
        _ => asked.id.clone(),
    };
    if let Some(id) = &id {
        check_id(id)?;
    }
    let again = again(id.as_deref(), asked.from.as_deref());
    let known = match &id {
        Some(id) if !asked.dry_run => begin(&api, end, &again, Run::load(queue.link(), id)).await?,
        _ => None,
    };
    // All callers share the ids: to those without access to its events, a run is unknown.
    let known = known.filter(|run| {
        run.spec.bot.as_ref().map_or_else(|| caller.covers_all(), |bot| caller.covers(bot))
    });
    if let (Some(known), None) = (&known, &asked.from) {
        // The stored settings are those of this path, or the id is of another pipeline.
        if known.spec.pipeline != path.pipeline {
            return Err(refused(&ReplayRefused::Other(known.id.clone())));
        }
        let replay = open(known.spec.clone())?;
        let run = known.clone();
        return go_on(&api, &uri, replay, run, limit, (stop, end), &again).await.map(Json);
    }
    if let (Some(Cursor::Run(id)), None) = (&cursor, &known) {
        return Err(refused(&ReplayRefused::Unknown(id.clone())));
    }

    let now = begin(&api, end, &again, api.queues.time()).await?;
    let (from_ms, until_ms, place) = if let Some(Cursor::Dry { from_ms, until_ms, place }) = cursor
    {
        (from_ms, until_ms, Some(place))
    } else {
        let (from_ms, until_ms) = range(&asked, now)?;
        (from_ms, until_ms, None)
    };
    if asked.types.len() > TYPES_MAX {
        return Err(Problem::field("types", format!("write up to {TYPES_MAX}")));
    }
    let spec = Spec {
        pipeline: path.pipeline.clone(),
        bot: asked.bot,
        types: asked.types,
        from_ms,
        until_ms,
        streams: api.streams.clone(),
    };
    let replay = open(spec)?;
    if asked.dry_run {
        let place = place.unwrap_or_else(|| replay.start());
        let (found, next) = replay.survey(place, &replay.copied().await?, Some(within)).await?;
        let next = next.map(|place| Cursor::Dry { from_ms, until_ms, place });
        let cursor = next.map(|next| api.gate.cursors.write(uri.path(), &next));
        let done = found.complete;
        let found = Some(found);
        let none = ReplayAnswer {
            id: None,
            found,
            put: 0,
            done,
            held_bots: 0,
            waiting: 0,
            held: Vec::new(),
            cursor,
        };
        return Ok(Json(none));
    }
    let id = id.unwrap_or_else(|| uuid::Uuid::now_v7().to_string());
    let run = begin(&api, end, &again, replay.run(&id, None)).await?;
    let run = run.map_err(|error| refused(&error))?;
    if known.is_none() {
        let action = replay.spec.action().target(&id);
        api.act(&caller, action, async { Ok(()) }, |()| "started".to_owned()).await?;
    }
    go_on(&api, &uri, replay, run, limit, (stop, end), &again).await.map(Json)
}

/// `time`, or what is left until a little before the deadline of the request: the answer must arrive.
fn before(time: Duration) -> Duration {
    request_deadline::at_most(time) * 7 / 8
}

/// The turn does not come in time.
fn no_turn() -> Problem {
    let detail = "nothing was done: other replays and searches run; retry later";
    Problem::new(Kind::Busy, detail).retry_after(1)
}

/// What to do after a call with this id and this start, if it put no event.
fn again(id: Option<&str>, from: Option<&str>) -> String {
    match (id, from) {
        // It may have stored the replay. Times like `2h ago` are others then.
        (Some(id), Some(_)) => {
            format!("repeat the call or, if that is refused, {}", by_id(id))
        }
        _ => "repeat the call".to_owned(),
    }
}

/// How to continue a replay that is stored.
fn by_id(id: &str) -> String {
    format!("call again with \"id\":\"{id}\" and without \"from\"")
}

/// What a call does before it puts an event, until `end`. `again`: what to do if it is interrupted.
async fn begin<T>(
    api: &Api,
    end: Instant,
    again: &str,
    work: impl Future<Output = Result<T, RedisError>>,
) -> Result<T, Problem> {
    let work = timeout_at(end, Box::pin(work)).await;
    work.unwrap_or_else(|_| Err(late(api))).map_err(|error| not_begun(error, again))
}

/// Redis did not answer by the end of the call.
fn late(api: &Api) -> RedisError {
    let late = io::Error::new(io::ErrorKind::TimedOut, "the step took too long");
    api.queues.link().target().unknown(late.into())
}

/// An error before the call puts an event.
fn not_begun(error: RedisError, again: &str) -> Problem {
    if !error.may_have_run() {
        return error.into();
    }
    partly("this call put no event", error, again)
}

/// Makes steps until `limit` or the deadline. A step that has not ended at `end` is interrupted.
async fn go_on(
    api: &Api,
    uri: &Uri,
    replay: Replay,
    mut run: Run,
    limit: usize,
    (deadline, end): (Instant, Instant),
    again: &str,
) -> Result<ReplayAnswer, Problem> {
    // At the end of a pass, or if it cannot go on without them, a further call tries the held bots again.
    if run.is_over() || run.is_crowded() {
        run.retry();
    }
    let (mut put, mut more) = (0, !run.is_done());
    // At least one step, even if the time is used up: each call makes progress, and stores the run that
    // its cursor names.
    while more {
        let left = limit - usize::try_from(put).unwrap_or(limit);
        let step = Box::pin(replay.step_until(&mut run, left, Some(deadline)));
        let step = timeout_at(end, step).await.unwrap_or_else(|_| Err(late(api)));
        let step = step.map_err(|error| interrupted(&run, put, error, again))?;
        put += step.put;
        more = step.more && put < limit as u64 && Instant::now() < deadline;
    }
    let is_left = !run.is_done();
    let cursor = is_left.then(|| api.gate.cursors.write(uri.path(), &Cursor::Run(run.id.clone())));
    let held = run.held().take(HELD_SHOWN);
    let held = held.map(|(bot, limit)| Held { bot: bot.clone(), limit: limit.to_owned() });
    Ok(ReplayAnswer {
        found: None,
        put,
        done: run.is_done(),
        held_bots: run.held().len() as u64,
        waiting: run.waiting,
        held: held.collect(),
        cursor,
        id: Some(run.id.clone()),
    })
}

/// `put`: the number of events before the failed step, which may have put some too.
fn interrupted(run: &Run, put: u64, error: RedisError, again: &str) -> Problem {
    // It is stored before the first put: a repeated call starts anew.
    if !run.is_stored() {
        return not_begun(error, again);
    }
    let id = &run.id;
    let done = match put {
        0 => format!("this call began to put events of replay {id}"),
        _ => format!("this call put at least {put} events of replay {id}"),
    };
    partly(&done, error, &format!("to continue it, {}", by_id(id)))
}

/// The range of time, ms since 1970: its start, and its end, which is not in the future.
fn range(asked: &ReplayRequest, now: Duration) -> Result<(u64, u64), Problem> {
    let read = |field: &str, text: &str| {
        read_time(text, now).map_err(|error| Problem::field(field, error.to_string()))
    };
    let missing = "write when the events were published, such as \"2h ago\"";
    let from = asked.from.as_deref().ok_or_else(|| Problem::field("from", missing))?;
    let from_ms = crate::clock::millis(read("from", from)?);
    let until = asked.to.as_deref().map_or(Ok(now), |to| read("to", to))?;
    let until_ms = crate::clock::millis(until.min(now));
    if from_ms >= until_ms {
        let error = ReplayRefused::Empty { from_ms, until_ms };
        return Err(Problem::field("from", error.to_string()));
    }
    Ok((from_ms, until_ms))
}

fn of_all_bots(caller: &Caller) -> Result<(), Problem> {
    if caller.covers_all() {
        return Ok(());
    }
    let detail = "the token is for certain bots: name the bot whose events to replay";
    Err(Problem::field("bot", detail))
}

fn check_id(id: &str) -> Result<(), Problem> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    if (1..=ID_MAX).contains(&id.len()) && id.bytes().all(is_plain) {
        return Ok(());
    }
    Err(Problem::field("id", format!("write 1 to {ID_MAX} letters, digits, - and _")))
}

fn refused(error: &ReplayRefused) -> Problem {
    let kind = match error {
        ReplayRefused::Unknown(_) => Kind::NoReplay,
        _ => Kind::ReplayRefused,
    };
    Problem::new(kind, error.to_string())
}
