//! What is wrong: the findings, read once for all viewers of a process.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::Json;
use serde::Serialize;
use tokio::sync::Mutex;
use tokio::time::Instant;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Api;
use super::auth::Caller;
use super::docs::Open;
use super::problem::Problem;
use super::queues::Queues;
use crate::clock::SharedClock;
use crate::id::PipelineName;
use crate::mongo::watch::Reachable;
use crate::problems::{Facts, Finding, PipelineState, Site, Viewer, find};
use crate::queue::Queue;
use crate::redis::{Link, RedisError};

/// Maximum age of the facts, regardless of the number of viewers.
const FRESH: Duration = Duration::from_secs(1);

/// Requires the scope `read`.
pub(super) fn reading() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(list))
}

/// Where a running process reads the facts, and the last ones.
pub(crate) struct Problems {
    pub(crate) queues: Queues,
    /// A link without large answers, which measures the latency.
    pub(crate) prompt: Arc<Link>,
    pub(crate) streams: Vec<String>,
    /// The buses beside Redis.
    pub(crate) buses: Vec<String>,
    pub(crate) mongodb: Option<Arc<Reachable>>,
    pub(crate) clock: SharedClock,
    pub(crate) kept: Mutex<Option<(Instant, Arc<Facts>)>>,
}

impl Problems {
    /// The facts, at most [`FRESH`] old. Takes a few seconds if a store does not answer, and never
    /// fails.
    pub(crate) async fn facts(&self) -> Arc<Facts> {
        let mut kept = self.kept.lock().await;
        if let Some((at, facts)) = &*kept
            && at.elapsed() < FRESH
        {
            return Arc::clone(facts);
        }
        let facts = Arc::new(Box::pin(Facts::read(self)).await);
        *kept = Some((Instant::now(), Arc::clone(&facts)));
        facts
    }
}

impl Site for Problems {
    fn link(&self) -> &Link {
        self.queues.link()
    }

    fn prompt(&self) -> &Link {
        &self.prompt
    }

    fn streams(&self) -> &[String] {
        &self.streams
    }

    fn buses(&self) -> Vec<String> {
        self.buses.clone()
    }

    async fn pipelines(&self) -> Result<Vec<PipelineName>, RedisError> {
        Ok(self.queues.names().await?.into_iter().collect())
    }

    fn configured(&self, name: &PipelineName) -> PipelineState {
        PipelineState::of(self.queues.configured(name).map(|config| config.enabled))
    }

    fn takes_of_bus(&self, name: &PipelineName) -> bool {
        self.queues.takes_of_bus(name)
    }

    fn linger(&self, name: &PipelineName) -> Duration {
        self.queues.configured(name).map_or(Duration::ZERO, |config| config.linger)
    }

    fn queue(&self, name: &PipelineName) -> Queue {
        self.queues.of(name)
    }

    fn mongodb(&self) -> Option<bool> {
        self.mongodb.as_ref().and_then(|mongodb| mongodb.known())
    }

    fn now(&self) -> Duration {
        self.clock.now()
    }
}

/// What a caller may know of the findings.
pub(super) fn findings(facts: &Facts, caller: &Caller) -> Vec<Finding> {
    if caller.covers_all() {
        find(facts, Viewer::All)
    } else {
        find(facts, Viewer::Bots(&|bot| caller.covers(bot)))
    }
}

/// What is wrong.
#[derive(Debug, Serialize, ToSchema)]
struct Findings {
    /// The findings, the most urgent first. Empty: nothing is wrong.
    problems: Vec<Finding>,
}

/// List problems
///
/// What is wrong, why, and what helps: the same findings as `fairlane status`. A token for certain
/// bots gets only findings that concern its bots. The findings are at most 1 s old.
#[utoipa::path(
    get, path = "/v1/problems", tag = "health", operation_id = "listProblems",
    responses((status = 200, description = "The problems", body = Findings), Open)
)]
async fn list(State(api): State<Arc<Api>>, caller: Caller) -> Result<Json<Findings>, Problem> {
    let facts = api.problems.facts().await;
    Ok(Json(Findings { problems: findings(&facts, &caller) }))
}
