//! The list of the bots of a pipeline.

use std::sync::Arc;

use axum::extract::State;
use axum::http::Uri;
use axum::response::Json;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::super::Api;
use super::super::auth::Caller;
use super::super::docs::OfPipeline;
use super::super::extract::{Path, Query};
use super::super::page::Limit;
use super::super::pipelines::PipelinePath;
use super::super::problem::Problem;
use super::LIMIT_MAX;
use crate::id::BotId;
use crate::problems::text::duration;
use crate::queue::{BotCursor, BotFilter, BotOrder, BotState, ListedBot};

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ListQuery {
    /// The order of the list.
    #[serde(default)]
    #[param(inline)]
    sort: Sort,
    /// Only bots in this state.
    #[param(inline)]
    state: Option<OnlyState>,
    /// Only bots whose ids start with this text.
    prefix: Option<String>,
    /// Only failing bots: the last attempt failed, or lanes are set aside, or there are dead letters. Also
    /// those without queued events, if they have one of the newest 1,000 dead letters of their shard.
    #[serde(default)]
    failing: bool,
    /// Page size: 1 to 1,000; default 100.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
    /// The `cursor` of the previous page.
    cursor: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(in super::super) enum Sort {
    /// Bots with the longest queue first.
    #[default]
    Depth,
    /// Bots with the oldest next event first.
    Age,
}

/// The state of the bots to list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum OnlyState {
    /// Waiting for a worker.
    Ready,
    /// Leased by a worker or a receiver.
    Leased,
    /// In backoff, waiting to batch, or without tokens.
    Parked,
    /// Paused by an operator.
    Paused,
}

impl OnlyState {
    fn state(self) -> BotState {
        match self {
            Self::Ready => BotState::Ready,
            Self::Leased => BotState::Leased,
            Self::Parked => BotState::Parked,
            Self::Paused => BotState::Paused,
        }
    }
}

impl Sort {
    pub(in super::super) const fn as_str(self) -> &'static str {
        match self {
            Self::Depth => "depth",
            Self::Age => "age",
        }
    }

    pub(in super::super) const fn order(self) -> BotOrder {
        match self {
            Self::Depth => BotOrder::Depth,
            Self::Age => BotOrder::Age,
        }
    }
}

/// A page of bots.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Bots {
    /// Bots with queued events, parked bots and paused bots; only bots of the token.
    bots: Vec<ListedBot>,
    /// The cursor of the next page; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<String>,
}

/// List bots
///
/// A bot whose position changes meanwhile may be listed twice or not at all.
#[utoipa::path(
    get, path = "/v1/pipelines/{pipeline}/bots", tag = "bots", operation_id = "listBots",
    params(PipelinePath, ListQuery),
    responses((status = 200, description = "A page of bots", body = Bots), OfPipeline)
)]
pub(super) async fn list(
    State(api): State<Arc<Api>>,
    caller: Caller,
    uri: Uri,
    Path(path): Path<PipelinePath>,
    Query(query): Query<ListQuery>,
) -> Result<Json<Bots>, Problem> {
    let limit = Limit { default: 100, least: 1, most: LIMIT_MAX }.of(query.limit)?;
    // A cursor is valid for one order only.
    let cursors = &api.gate.cursors;
    let after: Option<(Sort, BotCursor)> = cursors.read(uri.path(), query.cursor.as_deref())?;
    if after.as_ref().is_some_and(|(sort, _)| *sort != query.sort) {
        return Err(Problem::field("cursor", "it belongs to a list with another sort"));
    }
    let after = after.map(|(_, cursor)| cursor);
    let queue = api.queues.find(&path.pipeline).await?;
    let prefix = query.prefix.as_deref().unwrap_or_default();
    let wanted = |bot: &BotId| bot.as_str().starts_with(prefix) && caller.covers(bot);
    let state = query.state.map(OnlyState::state);
    let filter = BotFilter { wanted: &wanted, state, failing: query.failing };
    // It reads the places of all bots.
    let turn = api.large_reads.once(&caller);
    turn.take_of_certain().await?;
    let now = api.clock.now();
    let mut page = queue.list_some(query.sort.order(), after.as_ref(), limit, filter, now).await?;
    let cursor = page.next.map(|next| cursors.write(uri.path(), &(query.sort, next)));
    for view in &mut page.bots {
        super::veil(&caller, view);
    }
    let bots = queue.explain(page.bots, now, duration).await?;
    Ok(Json(Bots { bots, cursor }))
}
