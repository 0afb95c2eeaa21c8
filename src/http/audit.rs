//! The audit trail: what operators did.

use std::sync::Arc;

use axum::extract::State;
use axum::http::Uri;
use axum::response::Json;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Api;
use super::auth::Caller;
use super::docs::Parameters;
use super::extract::Query;
use super::page::Limit;
use super::problem::Problem;
use crate::id::{BotId, PipelineName};
use crate::trail::{Filter, Noted, Page, Position, read};

/// Maximum number of actions per page.
const LIMIT_MAX: u32 = 1_000;

/// Requires the scope `operate`.
pub(super) fn operating() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(list))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AuditQuery {
    /// Only actions on this bot.
    bot: Option<BotId>,
    /// Only actions on this pipeline and its bots.
    pipeline: Option<PipelineName>,
    /// Only actions since this time, ms since 1970.
    since_ms: Option<u64>,
    /// Page size: 1 to 1,000; default 100.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u32>,
    /// The `cursor` of the previous page.
    cursor: Option<String>,
}

/// A page of the audit trail.
#[derive(Debug, Serialize, ToSchema)]
struct Actions {
    /// The actions, the newest first.
    actions: Vec<Noted>,
    /// The cursor of the next page; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<String>,
}

/// Show the audit trail
///
/// What operators did: the last 1,000 actions on pipelines, bots and dead letters by the command line
/// and by tokens for all bots; and the last 1,000 by tokens for certain bots, and on rules, notifications
/// and counters. Only for tokens with the scope `operate` for all bots.
#[utoipa::path(
    get, path = "/v1/audit", tag = "audit", operation_id = "listActions", params(AuditQuery),
    responses((status = 200, description = "A page of the actions", body = Actions), Parameters)
)]
async fn list(
    State(api): State<Arc<Api>>,
    caller: Caller,
    uri: Uri,
    Query(query): Query<AuditQuery>,
) -> Result<Json<Actions>, Problem> {
    let limit = Limit { default: 100, least: 1, most: LIMIT_MAX }.of(query.limit)?;
    let cursors = &api.gate.cursors;
    let before: Option<Position> = cursors.read(uri.path(), query.cursor.as_deref())?;
    let since_ms = query.since_ms.unwrap_or_default();
    let filter = Filter { bot: query.bot, pipeline: query.pipeline, since_ms };
    let page = actions(&api, &caller, &filter, before, limit).await?;
    let cursor = page.next.map(|next| cursors.write(uri.path(), &next));
    Ok(Json(Actions { actions: page.actions, cursor }))
}

/// A page of the trail for a caller, who must be an operator of all bots.
pub(super) async fn actions(
    api: &Api,
    caller: &Caller,
    filter: &Filter,
    before: Option<Position>,
    limit: usize,
) -> Result<Page, Problem> {
    caller.check_all_bots()?;
    // A page may be large: one at a time, by turns over tokens.
    let _turn = api.large_reads.take(caller.name()).await?;
    Ok(read(api.queues.link(), filter, before, limit).await?)
}
