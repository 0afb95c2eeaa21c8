//! The routes of whole pipelines.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Json;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Api;
use super::auth::Caller;
use super::docs::{Bodiless, OfPipeline};
use super::extract::{NoBody, Path};
use super::problem::Problem;
use crate::id::PipelineName;
use crate::presence::{self, Pace, Process};
use crate::queue::PipelineView;

/// Requires the scope `read`.
pub(super) fn reading() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(list)).routes(routes!(show))
}

/// Requires the scope `operate`.
pub(super) fn operating() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(pause)).routes(routes!(resume))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct PipelinePath {
    /// The pipeline.
    pub(super) pipeline: PipelineName,
}

impl PipelinePath {
    pub(super) async fn pause(&self, api: &Api, caller: &Caller) -> Result<(), Problem> {
        caller.check_all_bots()?;
        api.queues.find(&self.pipeline).await?.pause(None).await?;
        caller.did("pause", &self.pipeline, None);
        Ok(())
    }

    pub(super) async fn resume(&self, api: &Api, caller: &Caller) -> Result<(), Problem> {
        caller.check_all_bots()?;
        api.queues.find(&self.pipeline).await?.resume(None).await?;
        caller.did("resume", &self.pipeline, None);
        Ok(())
    }
}

/// Pipelines.
#[derive(Debug, Serialize, ToSchema)]
struct Pipelines {
    /// The pipelines, ordered by name.
    pipelines: Vec<Pipeline>,
}

/// The summary of a pipeline.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Pipeline {
    /// Its name.
    pub(super) name: PipelineName,
    /// Whether this process runs it: its configuration has an enabled section.
    pub(super) enabled: bool,
    #[serde(flatten)]
    pub(super) view: PipelineView,
    /// Rates and workers, summed over all processes.
    #[serde(flatten)]
    pub(super) pace: Pace,
}

/// Every pipeline, ordered by name.
pub(super) async fn all(api: &Api, processes: &[Process]) -> Result<Vec<Pipeline>, Problem> {
    let mut pipelines = Vec::new();
    for name in api.queues.names().await? {
        pipelines.push(Pipeline::look(api, name, processes).await?);
    }
    Ok(pipelines)
}

impl Pipeline {
    async fn look(api: &Api, name: PipelineName, processes: &[Process]) -> Result<Self, Problem> {
        let view = api.queues.of(&name).view(api.clock.now()).await?;
        let (enabled, pace) = (api.queues.is_enabled(&name), presence::pace(processes, &name));
        Ok(Self { name, enabled, view, pace })
    }
}

/// List pipelines
///
/// The pipelines of the configuration, and those that have run before.
#[utoipa::path(
    get, path = "/v1/pipelines", tag = "pipelines", operation_id = "listPipelines",
    responses((status = 200, description = "Every pipeline", body = Pipelines))
)]
async fn list(State(api): State<Arc<Api>>) -> Result<Json<Pipelines>, Problem> {
    let processes = presence::processes(api.queues.link()).await?;
    Ok(Json(Pipelines { pipelines: all(&api, &processes).await? }))
}

/// Show a pipeline
#[utoipa::path(
    get, path = "/v1/pipelines/{pipeline}", tag = "pipelines", operation_id = "showPipeline",
    params(PipelinePath),
    responses((status = 200, description = "The pipeline", body = Pipeline), OfPipeline)
)]
async fn show(
    State(api): State<Arc<Api>>,
    Path(path): Path<PipelinePath>,
) -> Result<Json<Pipeline>, Problem> {
    api.queues.find(&path.pipeline).await?;
    let processes = presence::processes(api.queues.link()).await?;
    Ok(Json(Pipeline::look(&api, path.pipeline, &processes).await?))
}

/// Pause a pipeline
///
/// Stops handing out its bots. Running slices end normally; new events are still queued.
#[utoipa::path(
    post, path = "/v1/pipelines/{pipeline}/pause", tag = "pipelines",
    operation_id = "pausePipeline", params(PipelinePath),
    responses((status = 204, description = "The pipeline is paused"), OfPipeline, Bodiless)
)]
async fn pause(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<PipelinePath>,
    NoBody: NoBody,
) -> Result<StatusCode, Problem> {
    path.pause(&api, &caller).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Resume a pipeline
///
/// Undoes pause. Bots that are paused themselves stay paused.
#[utoipa::path(
    post, path = "/v1/pipelines/{pipeline}/resume", tag = "pipelines",
    operation_id = "resumePipeline", params(PipelinePath),
    responses((status = 204, description = "The pipeline is resumed"), OfPipeline, Bodiless)
)]
async fn resume(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<PipelinePath>,
    NoBody: NoBody,
) -> Result<StatusCode, Problem> {
    path.resume(&api, &caller).await?;
    Ok(StatusCode::NO_CONTENT)
}
