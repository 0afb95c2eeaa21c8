//! `/healthz`, `/readyz` and `/metrics`: for orchestrators, load balancers and Prometheus.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::docs::Open;
use super::problem::Problem;
use crate::mongo::watch::Reachable;
use crate::redis::Link;
use crate::startup::Startup;

/// Timeout of a readiness check per dependency.
const READY_TIMEOUT: Duration = Duration::from_secs(1);

/// The state behind the health routes.
#[derive(Debug, Clone)]
pub(crate) struct Health {
    pub(crate) link: Arc<Link>,
    /// The last known state of MongoDB; `None` if none is configured.
    pub(crate) mongodb: Option<Arc<Reachable>>,
    /// Cancelled: the process is about to stop, and load balancers should stop sending requests.
    pub(crate) leaving: CancellationToken,
    /// Cancelled: the process is stopping and accepts no new work.
    pub(crate) stopping: CancellationToken,
    /// Whether the start is complete.
    pub(crate) startup: Startup,
}

/// `/healthz` and `/readyz`.
pub(super) fn routes<S: Clone + Send + Sync + 'static>(health: Health) -> OpenApiRouter<S> {
    OpenApiRouter::default().routes(routes!(alive)).routes(routes!(ready)).with_state(health)
}

/// Whether a dependency answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Answers {
    Up,
    Down,
}

/// The overall state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Status {
    /// Everything works.
    Ready,
    /// Everything works except what needs an unavailable dependency.
    Degraded,
    /// Starting: `reason` names the pending step. Queued events are already handled.
    Starting,
    /// Stopping: send requests elsewhere. Requests are still answered for `shutdown_delay`.
    Stopping,
    /// Redis is unavailable, so nothing works.
    Unavailable,
}

/// The answer of `/readyz`.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Readiness {
    /// The overall state.
    status: Status,
    /// Whether Redis answers.
    redis: Answers,
    /// Whether MongoDB answered the last check, seconds ago; absent if none is configured.
    #[serde(skip_serializing_if = "Option::is_none")]
    mongodb: Option<Answers>,
    /// The pending step of the start; absent after the start.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

impl Readiness {
    fn new(
        redis: Answers,
        mongodb: Option<Answers>,
        stopping: bool,
        reason: Option<String>,
    ) -> Self {
        let status = match (redis, mongodb, stopping) {
            (Answers::Down, ..) => Status::Unavailable,
            (_, _, true) => Status::Stopping,
            _ if reason.is_some() => Status::Starting,
            (_, Some(Answers::Down), _) => Status::Degraded,
            _ => Status::Ready,
        };
        Self { status, redis, mongodb, reason }
    }
}

impl IntoResponse for Readiness {
    fn into_response(self) -> Response {
        let code = match self.status {
            Status::Ready | Status::Degraded => StatusCode::OK,
            Status::Starting | Status::Stopping | Status::Unavailable => {
                StatusCode::SERVICE_UNAVAILABLE
            }
        };
        // Enumerations always serialise.
        let body = serde_json::to_string(&self).unwrap_or_default() + "\n";
        (code, [(header::CONTENT_TYPE, "application/json")], body).into_response()
    }
}

/// Liveness
///
/// The process runs and answers, regardless of its dependencies.
#[utoipa::path(
    get, path = "/healthz", tag = "health", security(()),
    responses(
        (status = 200, description = "The process runs", body = str, content_type = "text/plain"),
        (status = 503, description = "Too many concurrent health checks", body = Problem, content_type = "application/problem+json"),
        Open,
    )
)]
async fn alive() -> &'static str {
    "ok\n"
}

/// Readiness
///
/// Whether this process should get traffic, and the state of each dependency.
#[utoipa::path(
    get, path = "/readyz", tag = "health", security(()),
    responses(
        (status = 200, description = "Ready, or degraded: all but one dependency", body = Readiness),
        (status = 503, description = "Redis is unavailable, or the process is starting or stopping", body = Readiness),
        Open,
    )
)]
async fn ready(State(health): State<Health>) -> Readiness {
    // Read before the checks, because a completed start stays complete.
    let reason = health.startup.pending();
    let ping = health.link.command("PING", redis::cmd("PING"));
    let redis = match tokio::time::timeout(READY_TIMEOUT, ping).await {
        Ok(Ok(_)) => Answers::Up,
        _ => Answers::Down,
    };
    let mongodb = health
        .mongodb
        .as_ref()
        .map(|mongodb| if mongodb.now() { Answers::Up } else { Answers::Down });
    Readiness::new(redis, mongodb, health.leaving.is_cancelled(), reason)
}

/// `/metrics`.
pub(super) async fn metrics() -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, crate::metrics::render()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_redis_makes_it_unavailable_and_mongodb_only_degrades_it() {
        use Answers::{Down, Up};
        let reason = Some("the start of a pipeline");
        for (redis, mongodb, stopping, reason, status, code) in [
            (Up, None, false, None, "ready", 200),
            (Up, Some(Up), false, None, "ready", 200),
            (Up, Some(Down), false, None, "degraded", 200),
            (Up, Some(Down), false, reason, "starting", 503),
            (Up, Some(Up), true, reason, "stopping", 503),
            (Up, Some(Up), true, None, "stopping", 503),
            (Down, Some(Up), true, None, "unavailable", 503),
            (Down, None, false, reason, "unavailable", 503),
        ] {
            let readiness = Readiness::new(redis, mongodb, stopping, reason.map(str::to_owned));
            let said = serde_json::to_value(&readiness).unwrap();
            assert_eq!(said["status"], status);
            assert_eq!(said.get("reason").and_then(|said| said.as_str()), reason);
            assert_eq!(readiness.into_response().status(), code, "{status}");
        }
    }
}
