//! The routes of whole pipelines.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Json;
use futures_util::future::try_join_all;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Api;
use super::acting;
use super::auth::Caller;
use super::docs::{Bodiless, Body, OfPipeline};
use super::extract::{JsonOrNothing, NoBody, Path};
use super::problem::Problem;
use crate::id::PipelineName;
use crate::presence::{self, Pace, Process};
use crate::queue::{PauseNote, PipelineView};
use crate::trail::{Action, Reason};

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
    pub(super) async fn pause(
        &self,
        api: &Api,
        caller: &Caller,
        reason: Option<&Reason>,
    ) -> Result<(), Problem> {
        caller.check_all_bots()?;
        let queue = api.queues.find(&self.pipeline).await?;
        let note = PauseNote::new(caller.name(), reason);
        let work = async { Ok(queue.pause_noting(None, &note).await?) };
        let action = Action::new("pause").in_pipeline(&self.pipeline).reason(reason);
        api.act(caller, action, work, acting::changed).await.map(drop)
    }

    pub(super) async fn resume(&self, api: &Api, caller: &Caller) -> Result<(), Problem> {
        caller.check_all_bots()?;
        let queue = api.queues.find(&self.pipeline).await?;
        let work = async { Ok(queue.resume(None).await?) };
        let action = Action::new("resume").in_pipeline(&self.pipeline);
        api.act(caller, action, work, acting::changed).await.map(drop)
    }
}

/// How to pause.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Pausing {
    /// Why: one line of up to 200 characters, for operators and for readers of the bot.
    #[serde(default)]
    #[schema(max_length = 200, example = "the shop asked for it")]
    reason: Option<String>,
}

impl Pausing {
    pub(super) fn reason(&self) -> Result<Option<Reason>, Problem> {
        let given = self.reason.as_deref().filter(|text| !text.trim().is_empty());
        let reason = given.map(Reason::parse).transpose();
        reason.map_err(|error| Problem::field("reason", error.to_string()))
    }
}

/// Pipelines.
#[derive(Debug, Serialize, ToSchema)]
struct Pipelines {
    /// The pipelines, ordered by name.
    pipelines: Vec<Summary>,
}

/// A pipeline and its numbers, which are of all bots together.
#[derive(Debug)]
pub(super) struct Pipeline {
    pub(super) name: PipelineName,
    /// Whether this process runs it: its configuration has an enabled section.
    pub(super) enabled: bool,
    pub(super) view: PipelineView,
    /// Rates and workers, summed over all processes.
    pub(super) pace: Pace,
}

/// The summary of a pipeline. Its numbers are of all bots together, so they are `null` for a token
/// that is not for all bots (`bots = ["*"]`).
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Pipeline)]
struct Summary {
    /// Its name.
    name: PipelineName,
    /// Whether this process runs it: its configuration has an enabled section.
    enabled: bool,
    /// Whether the whole pipeline is paused.
    stopped: bool,
    /// Since when it is paused, by whom, and why; null: it is not paused, unknown, or the token is not for
    /// all bots.
    pause: Option<PauseNote>,
    /// Events queued.
    depth: Option<u64>,
    /// Bots waiting for a worker.
    ready: Option<u64>,
    /// Bots leased by a worker or a receiver.
    leased: Option<u64>,
    /// Bots leased by a receiver: it answered 202 and has not completed the lease yet.
    open: Option<u64>,
    /// Parked bots: in backoff, waiting to batch, or without tokens.
    parked: Option<u64>,
    /// Paused bots.
    paused: Option<u64>,
    /// Events that are not due yet.
    delayed: Option<u64>,
    /// Dead letters kept.
    dead: Option<u64>,
    /// Age of the oldest event in a sample of up to 64 ready, leased or parked bots per shard, ms.
    /// Bots whose events wait because of their rate do not count.
    oldest_age_ms: Option<u64>,
    /// Events per second copied from the bus into queues, in all processes.
    queued_per_second: Option<f64>,
    /// Events per second that left the queues: done, dead or delayed.
    settled_per_second: Option<f64>,
    /// Busy workers.
    workers_busy: Option<usize>,
    /// The target number of workers.
    workers_target: Option<usize>,
    /// The maximum number of workers (`workers.max`).
    workers_max: Option<usize>,
}

impl Summary {
    /// What the caller may see of a pipeline.
    fn new(pipeline: Pipeline, caller: &Caller) -> Self {
        let Pipeline { name, enabled, view, pace } = pipeline;
        let sees_all = caller.covers_all();
        let count = |count: u64| sees_all.then_some(count);
        let rate = |rate: f64| sees_all.then_some(rate);
        let workers = |workers: usize| sees_all.then_some(workers);
        Self {
            name,
            enabled,
            stopped: view.stopped,
            pause: view.pause.filter(|_| sees_all),
            depth: count(view.depth),
            ready: count(view.ready),
            leased: count(view.leased),
            open: count(view.open),
            parked: count(view.parked),
            paused: count(view.paused),
            delayed: count(view.delayed),
            dead: count(view.dead),
            oldest_age_ms: count(view.oldest_age_ms),
            queued_per_second: rate(pace.queued_per_second),
            settled_per_second: rate(pace.settled_per_second),
            workers_busy: workers(pace.workers_busy),
            workers_target: workers(pace.workers_target),
            workers_max: workers(pace.workers_max),
        }
    }
}

/// Every pipeline, ordered by name.
pub(super) async fn all(api: &Api, processes: &[Process]) -> Result<Vec<Pipeline>, Problem> {
    let names = api.queues.names().await?;
    try_join_all(names.into_iter().map(|name| Pipeline::look(api, name, processes))).await
}

impl Pipeline {
    async fn look(api: &Api, name: PipelineName, processes: &[Process]) -> Result<Self, Problem> {
        let view = api.queues.of(&name).view(api.clock.now()).await?;
        let (enabled, pace) = (api.queues.is_enabled(&name), presence::pace(processes, &name));
        Ok(Self { name, enabled, view, pace })
    }

    /// What a token for certain bots sees of it: its numbers are not read.
    async fn glimpse(api: &Api, name: PipelineName) -> Result<Self, Problem> {
        let stopped = api.queues.of(&name).is_paused().await?;
        let view = PipelineView { stopped, ..PipelineView::default() };
        Ok(Self { enabled: api.queues.is_enabled(&name), name, view, pace: Pace::default() })
    }
}

/// List pipelines
///
/// The pipelines of the configuration, and those that have run before.
#[utoipa::path(
    get, path = "/v1/pipelines", tag = "pipelines", operation_id = "listPipelines",
    responses((status = 200, description = "Every pipeline", body = Pipelines))
)]
async fn list(State(api): State<Arc<Api>>, caller: Caller) -> Result<Json<Pipelines>, Problem> {
    let pipelines = if caller.covers_all() {
        all(&api, &presence::processes(api.queues.link()).await?).await?
    } else {
        let names = api.queues.names().await?;
        try_join_all(names.into_iter().map(|name| Pipeline::glimpse(&api, name))).await?
    };
    let pipelines = pipelines.into_iter().map(|pipeline| Summary::new(pipeline, &caller));
    Ok(Json(Pipelines { pipelines: pipelines.collect() }))
}

/// Show a pipeline
#[utoipa::path(
    get, path = "/v1/pipelines/{pipeline}", tag = "pipelines", operation_id = "showPipeline",
    params(PipelinePath),
    responses((status = 200, description = "The pipeline", body = Summary), OfPipeline)
)]
async fn show(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<PipelinePath>,
) -> Result<Json<Summary>, Problem> {
    api.queues.find(&path.pipeline).await?;
    let pipeline = if caller.covers_all() {
        let processes = presence::processes(api.queues.link()).await?;
        Pipeline::look(&api, path.pipeline, &processes).await?
    } else {
        Pipeline::glimpse(&api, path.pipeline).await?
    };
    Ok(Json(Summary::new(pipeline, &caller)))
}

/// Pause a pipeline
///
/// Stops handing out its bots. Running slices end normally; new events are still queued. A reason for a
/// paused pipeline replaces its note.
#[utoipa::path(
    post, path = "/v1/pipelines/{pipeline}/pause", tag = "pipelines",
    operation_id = "pausePipeline", params(PipelinePath), request_body = Option<Pausing>,
    responses((status = 204, description = "The pipeline is paused"), OfPipeline, Body)
)]
async fn pause(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(path): Path<PipelinePath>,
    JsonOrNothing(pausing): JsonOrNothing<Pausing>,
) -> Result<StatusCode, Problem> {
    path.pause(&api, &caller, pausing.reason()?.as_ref()).await?;
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
