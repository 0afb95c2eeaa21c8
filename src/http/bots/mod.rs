//! The routes of one bot of a pipeline: its queue, its lease, its weight.

mod list;

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse as _, Json, Response};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) use self::list::Sort;
use super::Api;
use super::acting;
use super::auth::Caller;
use super::docs::{Bodiless, Body, Deleting, Marking, OfPipeline};
use super::extract::{self, JsonOrNothing, NoBody, Path, Query};
use super::page::Limit;
use super::pipelines::Pausing;
use super::problem::{Kind, Problem};
use crate::id::{BotId, PipelineName};
use crate::queue::{
    BotChange, BotView, DeadOfBot, EventCursor, EventPage, Holdings, LaneAside, LastFailure, Mark,
    PauseNote, Queue, QueuedEvent, SET_MAX,
};
use crate::rate::{BURST_MAX, Change, LimitError, Weight};
use crate::redis::RedisError;
use crate::trail::{Action, Reason};

/// Maximum number of bots per page, and of events per bot.
const LIMIT_MAX: u32 = 1_000;
/// Pages with more events than this are read one at a time, by turns over tokens.
const LARGE_PAGE: usize = 100;
/// So are queues of more bytes for tokens that are for certain bots.
const LARGE_QUEUE: u64 = 256 << 10;
/// Maximum number of bots of a pipeline that a token for certain bots may have paused, and of those
/// whose weight it may have set.
const MARKED_MAX: usize = 1_000;

/// Requires the scope `read`.
pub(super) fn reading() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(list::list)).routes(routes!(show))
}

/// Requires the scope `operate`.
pub(super) fn operating() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default()
        .routes(routes!(set))
        .routes(routes!(pause))
        .routes(routes!(resume))
        .routes(routes!(release))
        .routes(routes!(purge))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct BotPath {
    /// The pipeline.
    pub(super) pipeline: PipelineName,
    /// The bot, percent-encoded.
    pub(super) bot: BotId,
}

impl BotPath {
    /// The queues of the pipeline, if the caller has access to the bot.
    pub(super) async fn queue(&self, api: &Api, caller: &Caller) -> Result<Queue, Problem> {
        caller.check_bot(&self.bot)?;
        api.queues.find(&self.pipeline).await
    }

    /// A pause and a weight stay although the bot has no events, and no bot is unknown: so a token
    /// for certain bots sets them for [`MARKED_MAX`] bots of a pipeline.
    async fn check_marks(&self, queue: &Queue, caller: &Caller, mark: Mark) -> Result<(), Problem> {
        if caller.check_all_bots().is_ok() {
            return Ok(());
        }
        let others = |bot: &BotId| *bot != self.bot && caller.covers(bot);
        if queue.count_marked(mark, &others).await? < MARKED_MAX {
            return Ok(());
        }
        let (what, undo) = match mark {
            Mark::Paused => ("paused", "resume one first"),
            Mark::Weight => ("with a weight other than 1", "set the weight of one to 1 first"),
        };
        let detail = format!(
            "the token has {MARKED_MAX} bots {what} in pipeline {}, the maximum; {undo}",
            self.pipeline
        );
        Err(Problem::new(Kind::TooManyBots, detail))
    }

    fn action(&self, name: &str) -> Action {
        Action::new(name).in_pipeline(&self.pipeline).of_bot(Some(&self.bot))
    }

    pub(super) async fn pause(
        &self,
        api: &Api,
        caller: &Caller,
        reason: Option<&Reason>,
    ) -> Result<(), Problem> {
        let queue = self.queue(api, caller).await?;
        self.check_marks(&queue, caller, Mark::Paused).await?;
        let note = PauseNote::new(caller.name(), reason);
        let work = async { Ok(queue.pause_noting(Some(&self.bot), &note).await?) };
        let action = self.action("pause").reason(reason);
        api.act(caller, action, work, acting::changed).await.map(drop)
    }

    pub(super) async fn resume(&self, api: &Api, caller: &Caller) -> Result<(), Problem> {
        let queue = self.queue(api, caller).await?;
        let work = async { Ok(queue.resume(Some(&self.bot)).await?) };
        api.act(caller, self.action("resume"), work, acting::changed).await.map(drop)
    }

    pub(super) async fn release(&self, api: &Api, caller: &Caller) -> Result<(), Problem> {
        let queue = self.queue(api, caller).await?;
        let work = async { Ok(queue.revoke(&self.bot).await?) };
        api.act(caller, self.action("release"), work, acting::changed).await.map(drop)
    }

    /// Changes what is set for the bot.
    pub(super) async fn set(
        &self,
        api: &Api,
        caller: &Caller,
        queue: &Queue,
        change: BotChange,
    ) -> Result<(), Problem> {
        let work = async {
            if queue.set(&self.bot, change).await? {
                return Ok(());
            }
            let detail = format!(
                "the shard of this bot has settings for {SET_MAX} bots, the maximum; set those of another bot back first (weight 1, rate null, burst null)"
            );
            Err(Problem::new(Kind::TooManyBots, detail))
        };
        let action = self.action("set").details(&change.to_string());
        api.act(caller, action, work, acting::done).await
    }

    /// Returns the number of deleted events.
    pub(super) async fn purge(&self, api: &Api, caller: &Caller) -> Result<u64, Problem> {
        let queue = self.queue(api, caller).await?;
        if let Some(kept) = queue.protected() {
            return Err(Problem::protected(kept));
        }
        let work = async { Ok(queue.purge(&self.bot).await?) };
        api.act(caller, self.action("purge"), work, acting::number).await
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ShowQuery {
    /// Maximum number of its next events: up to 1,000; default 10.
    #[param(minimum = 0, maximum = 1000, default = 10)]
    limit: Option<u32>,
    /// The `cursor` of the previous page of its next events.
    cursor: Option<String>,
}

/// One bot and its next events.
#[derive(Debug, Serialize, ToSchema)]
struct Bot {
    #[serde(flatten)]
    view: BotView,
    /// The last failure, if the bot is retried and its handler gave a reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_failure: Option<LastFailure>,
    /// What it holds.
    holds: Holdings,
    /// What it may hold at present; 0: no quota.
    quotas: Holdings,
    /// Its dead letters.
    dead_letters: DeadOfBot,
    /// Its next events, oldest first. Those in lanes that are set aside are in `lanes_aside`.
    next: Vec<QueuedEvent>,
    /// Its lanes that are set aside, the first to be tried again first; only on the first page.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    lanes_aside: Vec<LaneAside>,
    /// The cursor of the next page of its next events; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<String>,
    /// That the bot was never seen, or left nothing, and names like that of bots of the token; absent for
    /// other bots. A token that is for certain bots may miss it while the process reads large lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<String>,
}

/// Show a bot
///
/// A bot without any events is idle; `detail` says so of one that was never seen. A page of its next events has up to `limit` events and 4 MiB. If
/// the queue moves meanwhile, an event may be listed twice or not at all. With `order_by`, lanes that failed
/// are set aside. The first page has all of them, with up to `limit` of their events, spread over the lanes.
#[utoipa::path(
    get, path = "/v1/pipelines/{pipeline}/bots/{bot}", tag = "bots", operation_id = "showBot",
    params(BotPath, ShowQuery),
    responses((status = 200, description = "The bot", body = Bot), OfPipeline)
)]
async fn show(
    State(api): State<Arc<Api>>,
    caller: Caller,
    uri: Uri,
    Path(path): Path<BotPath>,
    Query(query): Query<ShowQuery>,
) -> Result<Response, Problem> {
    let limit = Limit { default: 10, least: 0, most: LIMIT_MAX }.of(query.limit)?;
    let cursors = &api.gate.cursors;
    let after: Option<EventCursor> = cursors.read(uri.path(), query.cursor.as_deref())?;
    let queue = path.queue(&api, &caller).await?;
    let mut view = queue.view_bot(&path.bot, api.clock.now()).await?;
    veil(&caller, &mut view);
    let holds = queue.holdings(&path.bot).await?;
    // Until the answer is encoded, too.
    let turn = api.large_reads.once(&caller);
    if limit > LARGE_PAGE {
        turn.take().await?;
    } else if reads_much(&holds) {
        turn.take_of_certain().await?;
    }
    let lanes_aside = if view.set_aside > 0 && after.is_none() {
        queue.lanes_aside(&path.bot, limit, Queue::ASIDE_BYTES).await?
    } else {
        Vec::new()
    };
    let EventPage { events: next, next: more } =
        queue.page_of_events(&path.bot, after, limit).await?;
    let cursor = more.filter(|_| limit > 0).map(|more| cursors.write(uri.path(), &more));
    let last_failure = queue.last_failure(&view).await?;
    let dead_letters = dead_of(&queue, &path.bot, &holds).await?;
    let quotas = queue.quotas().of(&path.bot).into();
    // Attempts are looked for among those of all bots of the shard: for a hint, no request waits.
    let may_look = view.has_nothing(&dead_letters, &holds)
        && (turn.take_now_of_certain() || !queue.keeps_many_attempts(&path.bot).await?);
    let detail = if may_look && queue.attempts(&path.bot, 1).await?.is_empty() {
        // A hint reads names of all shards: only one request at a time looks for them, none waits.
        let near = match api.searches.take_now() {
            Some(_turn) => queue.bots_like(&path.bot, &|bot| caller.covers(bot)).await?,
            None => Vec::new(),
        };
        Some(unknown(&path, &near))
    } else {
        None
    };
    let bot =
        Bot { view, last_failure, holds, quotas, dead_letters, next, lanes_aside, cursor, detail };
    Ok(Json(bot).into_response())
}

/// Whether to read what a bot holds takes long: its queue is large, or its dead letters are found among those
/// of all bots of the shard.
pub(super) fn reads_much(holds: &Holdings) -> bool {
    holds.queued_bytes > LARGE_QUEUE || holds.dead_letters > 0
}

/// The dead letters of a bot that holds this.
pub(super) async fn dead_of(
    queue: &Queue,
    bot: &BotId,
    holds: &Holdings,
) -> Result<DeadOfBot, RedisError> {
    match holds.dead_letters {
        0 => Ok(DeadOfBot::default()),
        _ => queue.dead_of(bot).await,
    }
}

/// Who paused a bot is shown in full to tokens for all bots only.
pub(super) fn veil(caller: &Caller, view: &mut BotView) {
    if let Some(note) = view.pause.as_mut().filter(|_| !caller.covers_all()) {
        note.veil();
    }
}

/// What is said of a bot that a pipeline does not know.
fn unknown(BotPath { pipeline, bot }: &BotPath, near: &[BotId]) -> String {
    let near: Vec<String> = near.iter().map(|bot| format!("{:?}", bot.as_str())).collect();
    let hint = match near.as_slice() {
        [] => String::new(),
        near => format!("; bots with a name like that: {}", near.join(", ")),
    };
    let bot = bot.as_str();
    format!("bot {bot:?} was never seen in pipeline {pipeline}, or left nothing there{hint}")
}

/// The settings of a bot. What is left out stays as it is.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Settings {
    /// Its share of the service, relative to the default 1; up to three decimals.
    #[schema(minimum = 0.01, maximum = 1000)]
    weight: Option<f64>,
    /// Maximum rate of its events, such as `10/s`, `30/m` or `100/h`; `unlimited`: none; null: that of the
    /// pipeline.
    #[serde(default, deserialize_with = "change")]
    #[schema(value_type = Option<String>, pattern = "^(unlimited|[0-9]{1,6}(\\.[0-9]{1,3})?/[smh])$")]
    rate: Change<String>,
    /// Maximum number of its events at once after a pause; null: that of the pipeline.
    #[serde(default, deserialize_with = "change")]
    #[schema(value_type = Option<u32>, minimum = 1, maximum = 1_000_000)]
    burst: Change<u32>,
}

/// The change of a field that is there: null resets it.
fn change<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Change<T>, D::Error> {
    Option::deserialize(from).map(Change::from)
}

impl Settings {
    fn change(self) -> Result<BotChange, Problem> {
        let Self { weight, rate, burst } = self;
        let weight = weight.map(|weight| {
            Weight::try_from(weight)
                .map_err(|error| Problem::field("weight", format!("it is {weight}; {error}")))
        });
        let rate = rate.try_map(|rate| {
            rate.parse().map_err(|error| Problem::field("rate", format!("it is {rate:?}; {error}")))
        })?;
        if let Change::To(burst) = burst
            && !(1..=BURST_MAX).contains(&burst)
        {
            let detail = format!("it is {burst}; {}", LimitError::Burst);
            return Err(Problem::field("burst", detail));
        }
        Ok(BotChange { weight: weight.transpose()?, rate, burst })
    }
}

/// Set the weight and the rate of a bot
///
/// Takes effect at its next slice. A token sets weights up to its `max_weight`: 1 by default, 1,000
/// for a token of all bots. Only a token of all bots sets rates and bursts.
#[utoipa::path(
    put, path = "/v1/pipelines/{pipeline}/bots/{bot}", tag = "bots", operation_id = "setBot",
    params(BotPath), request_body = Settings,
    responses((status = 204, description = "The settings are changed"), OfPipeline, Body, Marking)
)]
async fn set(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<BotPath>,
    extract::Json(settings): extract::Json<Settings>,
) -> Result<StatusCode, Problem> {
    let change = settings.change()?;
    let queue = path.queue(&api, &caller).await?;
    if change.rate != Change::Keep || change.burst != Change::Keep {
        // A tenant must not lift the limit of its own bot.
        caller.check_all_bots()?;
    }
    if let Some(weight) = change.weight {
        caller.check_weight(weight)?;
        if weight != Weight::ONE {
            path.check_marks(&queue, &caller, Mark::Weight).await?;
        }
    }
    path.set(&api, &caller, &queue, change).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Pause a bot
///
/// Stops handing out its events. A running slice ends normally; new events are still queued. Readers of
/// the bot see since when, who paused it, and the reason. A reason for a paused bot replaces its note.
#[utoipa::path(
    post, path = "/v1/pipelines/{pipeline}/bots/{bot}/pause", tag = "bots",
    operation_id = "pauseBot", params(BotPath), request_body = Option<Pausing>,
    responses((status = 204, description = "The bot is paused"), OfPipeline, Body, Marking)
)]
async fn pause(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<BotPath>,
    JsonOrNothing(pausing): JsonOrNothing<Pausing>,
) -> Result<StatusCode, Problem> {
    path.pause(&api, &caller, pausing.reason()?.as_ref()).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Resume a bot
///
/// Undoes pause.
#[utoipa::path(
    post, path = "/v1/pipelines/{pipeline}/bots/{bot}/resume", tag = "bots",
    operation_id = "resumeBot", params(BotPath),
    responses((status = 204, description = "The bot is resumed"), OfPipeline, Bodiless)
)]
async fn resume(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<BotPath>,
    NoBody: NoBody,
) -> Result<StatusCode, Problem> {
    path.resume(&api, &caller).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Release a bot
///
/// Breaks its lease, or ends its backoff: workers get its events again. A worker that still handles
/// the bot cannot commit its results.
#[utoipa::path(
    post, path = "/v1/pipelines/{pipeline}/bots/{bot}/release", tag = "bots",
    operation_id = "releaseBot", params(BotPath),
    responses((status = 204, description = "The bot is neither leased nor parked"), OfPipeline, Bodiless)
)]
async fn release(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<BotPath>,
    NoBody: NoBody,
) -> Result<StatusCode, Problem> {
    path.release(&api, &caller).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The result of a purge.
#[derive(Debug, Serialize, ToSchema)]
struct Purged {
    /// Number of deleted events.
    purged: u64,
}

/// Purge a bot
///
/// Deletes its queued events and breaks its lease. Keeps its delayed events and dead letters.
#[utoipa::path(
    delete, path = "/v1/pipelines/{pipeline}/bots/{bot}/queue", tag = "bots",
    operation_id = "purgeBot", params(BotPath),
    responses((status = 200, description = "The events are deleted", body = Purged), OfPipeline, Bodiless, Deleting)
)]
async fn purge(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<BotPath>,
    NoBody: NoBody,
) -> Result<Json<Purged>, Problem> {
    let purged = path.purge(&api, &caller).await?;
    Ok(Json(Purged { purged }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_queue_and_any_dead_letter_are_much() {
        let holds = |queued_bytes, dead_letters| Holdings {
            queued_bytes,
            dead_letters,
            ..Holdings::default()
        };
        assert!(!reads_much(&holds(LARGE_QUEUE, 0)));
        assert!(reads_much(&holds(LARGE_QUEUE + 1, 0)) && reads_much(&holds(0, 1)));
    }
}
