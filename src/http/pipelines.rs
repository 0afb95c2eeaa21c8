//! Whole pipelines.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Json;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Api;
use super::problem::Problem;
use crate::id::PipelineName;
use crate::queue::PipelineView;

/// What asks for the scope `read`.
pub(super) fn reading() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(list))
}

/// Pipelines.
#[derive(Debug, Serialize, ToSchema)]
struct Pipelines {
    /// By name.
    pipelines: Vec<Pipeline>,
}

/// A pipeline at a glance.
#[derive(Debug, Serialize, ToSchema)]
struct Pipeline {
    /// Its name.
    name: PipelineName,
    /// Whether this process runs it: an enabled section of the configuration.
    enabled: bool,
    #[serde(flatten)]
    view: PipelineView,
}

/// List pipelines
///
/// Those of the configuration and those that ever ran.
#[utoipa::path(
    get, path = "/v1/pipelines", tag = "pipelines", operation_id = "listPipelines",
    responses((status = 200, description = "Every pipeline", body = Pipelines))
)]
async fn list(State(api): State<Arc<Api>>) -> Result<Json<Pipelines>, Problem> {
    let now = api.clock.now();
    let mut pipelines = Vec::new();
    for name in api.queues.names().await? {
        let view = api.queues.of(&name).view(now).await?;
        pipelines.push(Pipeline { enabled: api.queues.is_enabled(&name), name, view });
    }
    Ok(Json(Pipelines { pipelines }))
}
