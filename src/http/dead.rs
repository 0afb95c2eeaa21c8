//! Dead letters: events that failed for good.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse as _, Json, Response};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Api;
use super::acting;
use super::auth::Caller;
use super::docs::{Bodiless, OfPipeline};
use super::extract::{NoBody, Path, Query};
use super::page::Limit;
use super::partly::stopped;
use super::pipelines::PipelinePath;
use super::problem::{Kind, Problem};
use crate::id::{BotId, LetterId, PipelineName};
use crate::queue::{Bound, DeadLetter, DeadPage, Deed, Queue, Swept, Wish};
use crate::trail::Action;

/// Maximum number of dead letters per page.
const LIMIT_MAX: u32 = 1_000;
/// An action on many dead letters ends after this time, if the token is for certain bots.
pub(super) const WITHIN_OF_BOT: Duration = Duration::from_secs(1);

/// Requires the scope `read`.
pub(super) fn reading() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(list)).routes(routes!(show))
}

/// Requires the scope `operate`.
pub(super) fn operating() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default()
        .routes(routes!(redrive))
        .routes(routes!(redrive_all))
        .routes(routes!(discard))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct LetterPath {
    /// The pipeline.
    pub(super) pipeline: PipelineName,
    /// The dead letter.
    pub(super) id: LetterId,
}

impl LetterPath {
    /// The letter and the queues of its pipeline. One of another bot does not exist for the caller.
    pub(super) async fn find(
        &self,
        api: &Api,
        caller: &Caller,
    ) -> Result<(Queue, DeadLetter), Problem> {
        let queue = api.queues.find(&self.pipeline).await?;
        let letter = queue.dead_letter(self.id).await?.filter(|letter| caller.covers(&letter.bot));
        Ok((queue, letter.ok_or_else(|| self.none())?))
    }

    /// Queues the event again.
    pub(super) async fn redrive(&self, api: &Api, caller: &Caller) -> Result<(), Problem> {
        let (queue, letter) = self.find(api, caller).await?;
        let work = async {
            if queue.redrive(&letter.bot, self.id).await? {
                return Ok(());
            }
            let stays = queue.dead_letter(self.id).await?.is_some_and(|left| left.event.is_some());
            Err(if stays { self.no_notification() } else { self.none() })
        };
        api.act(caller, self.action("redrive", &letter), work, acting::done).await
    }

    /// Deletes the dead letter.
    pub(super) async fn discard(&self, api: &Api, caller: &Caller) -> Result<(), Problem> {
        let (queue, letter) = self.find(api, caller).await?;
        let work = async {
            let dropped = queue.drop_dead_letter(self.id).await?;
            dropped.then_some(()).ok_or_else(|| self.none())
        };
        api.act(caller, self.action("drop", &letter), work, acting::done).await
    }

    fn action(&self, name: &str, letter: &DeadLetter) -> Action {
        Action::new(name).in_pipeline(&self.pipeline).of_bot(Some(&letter.bot)).target(self.id)
    }

    fn none(&self) -> Problem {
        let Self { pipeline, id } = self;
        let detail = format!(
            "pipeline {pipeline} has no dead letter {id}; /v1/pipelines/{pipeline}/dead lists the existing ones"
        );
        Problem::new(Kind::NoDeadLetter, detail)
    }

    /// Its event names a notification without a record: nothing would be sent.
    fn no_notification(&self) -> Problem {
        let detail = format!(
            "dead letter {} cannot be redriven, because its notification is gone; drop the letter",
            self.id
        );
        Problem::new(Kind::NoNotification, detail)
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// Only dead letters of this bot.
    bot: Option<BotId>,
    /// Page size: 1 to 1,000; default 100.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
    /// The `cursor` of the previous page.
    cursor: Option<String>,
}

/// A page of dead letters.
#[derive(Debug, Serialize, ToSchema)]
struct DeadLetters {
    /// Newest first; only dead letters of the token's bots.
    dead_letters: Vec<DeadLetter>,
    /// The cursor of the next page; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<String>,
}

/// List dead letters
///
/// A page has up to `limit` letters and 4 MiB. Large events therefore make it shorter.
#[utoipa::path(
    get, path = "/v1/pipelines/{pipeline}/dead", tag = "dead letters",
    operation_id = "listDeadLetters", params(PipelinePath, ListQuery),
    responses((status = 200, description = "A page, newest first", body = DeadLetters), OfPipeline)
)]
async fn list(
    State(api): State<Arc<Api>>,
    caller: Caller,
    uri: Uri,
    Path(path): Path<PipelinePath>,
    Query(query): Query<ListQuery>,
) -> Result<Response, Problem> {
    let limit = Limit { default: 100, least: 1, most: LIMIT_MAX }.of(query.limit)?;
    let cursors = &api.gate.cursors;
    let before: Option<LetterId> = cursors.read(uri.path(), query.cursor.as_deref())?;
    let bot = query.bot.as_ref();
    bot.map_or(Ok(()), |bot| caller.check_bot(bot))?;
    let queue = api.queues.find(&path.pipeline).await?;
    let wanted = |bot: &BotId| caller.covers(bot);
    // Until the answer is encoded, too.
    let _turn = api.large_reads.take(caller.name()).await?;
    let page = queue.list_dead_letters(bot, &wanted, before, limit).await?;
    let DeadPage { letters: dead_letters, next } = page;
    let cursor = next.map(|next| cursors.write(uri.path(), &next));
    Ok(Json(DeadLetters { dead_letters, cursor }).into_response())
}

/// Show a dead letter
#[utoipa::path(
    get, path = "/v1/pipelines/{pipeline}/dead/{id}", tag = "dead letters",
    operation_id = "showDeadLetter", params(LetterPath),
    responses((status = 200, description = "The dead letter", body = DeadLetter), OfPipeline)
)]
async fn show(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<LetterPath>,
) -> Result<Json<DeadLetter>, Problem> {
    path.find(&api, &caller).await.map(|(_, letter)| Json(letter))
}

/// The result of a redrive.
#[derive(Debug, Serialize, ToSchema)]
struct Redriven {
    /// Number of redriven dead letters.
    redriven: u64,
    /// Whether the call ended before all were redriven: repeat it. Only for a token that is for certain
    /// bots.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    more: bool,
}

/// Redrive a dead letter
///
/// Queues its event again, in the order of its bot (`counters`, `automations`: at the end of the queue).
#[utoipa::path(
    post, path = "/v1/pipelines/{pipeline}/dead/{id}/redrive", tag = "dead letters",
    operation_id = "redriveDeadLetter", params(LetterPath),
    responses((status = 200, description = "The event is queued again", body = Redriven), OfPipeline, Bodiless)
)]
async fn redrive(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<LetterPath>,
    NoBody: NoBody,
) -> Result<Json<Redriven>, Problem> {
    path.redrive(&api, &caller).await?;
    Ok(Json(Redriven { redriven: 1, more: false }))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct RedriveQuery {
    /// Only dead letters of this bot.
    bot: Option<BotId>,
}

/// Redrive all dead letters
///
/// All dead letters of the pipeline, or of one bot, each as the redrive of one. Events that fail again
/// meanwhile stay dead letters. For a token that is for certain bots, a call ends after about 1 s, and
/// `more` says that some may be left.
#[utoipa::path(
    post, path = "/v1/pipelines/{pipeline}/dead/redrive", tag = "dead letters",
    operation_id = "redriveDeadLetters", params(PipelinePath, RedriveQuery),
    responses((status = 200, description = "The events are queued again", body = Redriven), OfPipeline, Bodiless)
)]
async fn redrive_all(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<PipelinePath>,
    Query(query): Query<RedriveQuery>,
    NoBody: NoBody,
) -> Result<Json<Redriven>, Problem> {
    let bot = query.bot.as_ref();
    bot.map_or_else(|| caller.check_all_bots(), |bot| caller.check_bot(bot))?;
    let queue = api.queues.find(&path.pipeline).await?;
    // That of an operator may take minutes: others must not wait for its turn.
    let all = caller.covers_all();
    let _turn = if all { None } else { Some(api.searches.take(caller.name()).await?) };
    // Dead letters carry the time of Redis, so its clock decides which ones existed before.
    let until: Duration = api.queues.time().await?;
    let wanted = Wish { bot, wanted: &|_| true, reason: "" };
    let bound = Bound { letters: u64::MAX, deadline: Instant::now() + WITHIN_OF_BOT };
    let work = async {
        let swept = if all {
            let redriven = queue.redrive_all(bot, until).await;
            redriven.map(|count| Swept { count, more: false })
        } else {
            queue.sweep_dead(wanted, until, bound, Deed::Redrive).await
        };
        swept.map_err(|error| stopped(Deed::Redrive, error))
    };
    let action = Action::new("redrive all").in_pipeline(queue.name()).of_bot(bot);
    let swept = api.act(&caller, action, work, |swept| acting::number(&swept.count)).await?;
    Ok(Json(Redriven { redriven: swept.count, more: swept.more }))
}

/// Drop a dead letter
#[utoipa::path(
    delete, path = "/v1/pipelines/{pipeline}/dead/{id}", tag = "dead letters",
    operation_id = "dropDeadLetter", params(LetterPath),
    responses((status = 204, description = "Deleted"), OfPipeline, Bodiless)
)]
async fn discard(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<LetterPath>,
    NoBody: NoBody,
) -> Result<StatusCode, Problem> {
    path.discard(&api, &caller).await?;
    Ok(StatusCode::NO_CONTENT)
}
