//! `/healthz`, `/readyz` and `/metrics`: for orchestrators, load balancers and Prometheus.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::auth::{Caller, Identity};
use super::docs::Open;
use super::problem::Problem;
use super::problems::{Problems, findings};
use crate::config::Scope;
use crate::id::{BotId, PipelineName};
use crate::mongo::watch::Reachable;
use crate::problems::{Code, Facts, Finding, Severity, Viewer, find};
use crate::redis::{Link, Serving};
use crate::startup::Startup;

/// Timeout of a readiness check per dependency.
const READY_TIMEOUT: Duration = Duration::from_secs(1);

/// Timeout of reading the findings.
const FINDINGS_TIMEOUT: Duration = Duration::from_secs(3);

/// The state behind the health routes.
#[derive(Clone)]
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
    /// What is wrong. Read on the runtime that has the connections, not on that of `metrics.listen`.
    pub(crate) problems: (Arc<Problems>, Handle),
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
    /// Everything works except what needs an unavailable dependency, a part of the primaries of a Redis
    /// Cluster, or a pipeline that has no start yet.
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
    /// Whether Redis answers; of a cluster, at least one primary.
    redis: Answers,
    /// Number of primaries of a Redis Cluster that do not answer in time; absent if all do, or none.
    /// Only their bots wait. With `verbose` and a token for all bots, a problem names them.
    #[serde(skip_serializing_if = "is_zero")]
    primaries_down: usize,
    /// Whether MongoDB answered the last check, seconds ago; absent if none is configured.
    #[serde(skip_serializing_if = "Option::is_none")]
    mongodb: Option<Answers>,
    /// The pending step of the start; absent after the start.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// New pipelines whose start on a bus is not known, because the bus did not answer for 10 s. With
    /// `start = "new"` they miss the events that are published until it is known. While a primary of a
    /// Redis Cluster hides which pipelines are new: all that take events of the bus.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    without_start: Vec<String>,
    /// With `verbose`: what is wrong, the most urgent first. It changes neither `status` nor the code.
    #[serde(skip_serializing_if = "Option::is_none")]
    problems: Option<Vec<Said>>,
}

/// A finding, with as much as the client may know. The optional parts are only for a token with the
/// scope `read`.
#[derive(Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = ReadinessFinding)]
struct Said {
    /// Its kind.
    code: Code,
    /// How urgent it is.
    severity: Severity,
    /// Since when, ms since 1970; absent: unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    since_ms: Option<u64>,
    /// The pipeline that it concerns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pipeline: Option<PipelineName>,
    /// Bots that it concerns: at most three.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    bots: Vec<BotId>,
    /// Processes that it concerns: at most three.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    processes: Vec<String>,
    /// What is wrong, and why.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    /// What helps.
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
    /// The section of the runbook.
    runbook: &'static str,
}

impl Said {
    fn name(code: Code, severity: Severity) -> Self {
        Self {
            code,
            severity,
            since_ms: None,
            pipeline: None,
            bots: Vec::new(),
            processes: Vec::new(),
            problem: None,
            remedy: None,
            runbook: code.runbook(),
        }
    }

    fn whole(finding: Finding) -> Self {
        let Finding {
            code,
            severity,
            since_ms,
            pipeline,
            bots,
            processes,
            problem,
            remedy,
            runbook,
        } = finding;
        let (problem, remedy) = (Some(problem), Some(remedy));
        Self { code, severity, since_ms, pipeline, bots, processes, problem, remedy, runbook }
    }
}

/// What to answer.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct Verbosity {
    /// Also list what is wrong: `?verbose` or `?verbose=true`. Without a token: only the names.
    verbose: Option<String>,
}

impl Verbosity {
    fn is_verbose(&self) -> bool {
        self.verbose.as_deref().is_some_and(|text| matches!(text, "" | "true" | "1"))
    }
}

impl Health {
    /// What is wrong, as far as this client may know. Bounded in time.
    async fn problems(&self, serving: &Serving, caller: Option<&Caller>) -> Vec<Said> {
        // The requests of strangers must not occupy the places of probes.
        let limit = if caller.is_some() { FINDINGS_TIMEOUT } else { READY_TIMEOUT };
        let known = if serving.primaries > 0 {
            let (problems, runtime) = (Arc::clone(&self.problems.0), &self.problems.1);
            let reading = runtime.spawn(async move { problems.facts().await });
            let read = tokio::time::timeout(limit, AbortOnDropHandle::new(reading)).await;
            read.ok().and_then(Result::ok)
        } else {
            None
        };
        // A frozen primary may take longer than there is time.
        let facts = known.or_else(|| {
            let error = unanswered(serving)?;
            let (target, now) = (self.link.target().to_string(), self.problems.0.clock.now());
            let mut facts = Facts::unavailable(target, error, now);
            facts.redis.others_answer = serving.primaries > 0;
            Some(Arc::new(facts))
        });
        let Some(facts) = facts else {
            return vec![Said::name(Code::NotSeen, Code::NotSeen.severity())];
        };
        // Every program of the machine and every page of a browser can send a request without a
        // token. The names of the findings tell it nothing about bots and machines.
        let Some(caller) = caller else {
            let mut names: Vec<Said> = Vec::new();
            for Finding { code, severity, .. } in find(&facts, Viewer::All) {
                let name = Said::name(code, severity);
                if !names.contains(&name) {
                    names.push(name);
                }
            }
            return names;
        };
        findings(&facts, caller).into_iter().map(Said::whole).collect()
    }
}

/// Why Redis, or which of its primaries, did not answer; `None`: all of it did.
fn unanswered(serving: &Serving) -> Option<String> {
    if serving.primaries == 0 {
        return Some(format!("no answer within {} s", READY_TIMEOUT.as_secs()));
    }
    (!serving.silent.is_empty()).then(|| serving.silent.join(", "))
}

/// The caller whose token may read. Neither a session nor the lack of tokens suffices: the health
/// routes do not check the site of a browser's page.
fn reader(request: &Request) -> Option<&Caller> {
    let Some(Identity::Caller(caller)) = request.extensions().get::<Identity>() else {
        return None;
    };
    let may = caller.has_token() && !caller.is_public() && caller.check_scope(Scope::Read).is_ok();
    may.then_some(caller)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &usize) -> bool {
    *number == 0
}

impl Readiness {
    fn new(
        serving: &Serving,
        mongodb: Option<Answers>,
        stopping: bool,
        reason: Option<String>,
        without_start: Vec<String>,
    ) -> Self {
        // A process that left its load balancer would serve the bots of no primary.
        let redis = if serving.primaries > 0 { Answers::Up } else { Answers::Down };
        let primaries_down = if serving.primaries > 0 { serving.silent.len() } else { 0 };
        let status = match (redis, mongodb, stopping) {
            (Answers::Down, ..) => Status::Unavailable,
            (_, _, true) => Status::Stopping,
            _ if reason.is_some() => Status::Starting,
            (_, Some(Answers::Down), _) => Status::Degraded,
            _ if primaries_down > 0 || !without_start.is_empty() => Status::Degraded,
            _ => Status::Ready,
        };
        Self { status, redis, primaries_down, mongodb, reason, without_start, problems: None }
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
/// Whether this process should get traffic, and the state of each dependency. With `verbose` also
/// what is wrong in the installation. This does not change the status.
#[utoipa::path(
    get, path = "/readyz", tag = "health", security(()), params(Verbosity),
    responses(
        (status = 200, description = "Ready, or degraded: something is missing that not everything needs", body = Readiness),
        (status = 503, description = "Redis is unavailable, or the process is starting or stopping", body = Readiness),
        Open,
    )
)]
async fn ready(
    State(health): State<Health>,
    verbosity: Result<Query<Verbosity>, QueryRejection>,
    request: Request,
) -> Readiness {
    // Read before the checks, because a completed start stays complete.
    let (reason, without) = (health.startup.pending(), health.startup.without());
    let serving = health.link.serving(READY_TIMEOUT).await;
    let mongodb = health
        .mongodb
        .as_ref()
        .map(|mongodb| if mongodb.now() { Answers::Up } else { Answers::Down });
    let leaving = health.leaving.is_cancelled();
    let readiness = Readiness::new(&serving, mongodb, leaving, reason, without);
    // A query that cannot be read does not make the process unready.
    if !verbosity.is_ok_and(|Query(verbosity)| verbosity.is_verbose()) {
        return readiness;
    }
    let problems = Some(health.problems(&serving, reader(&request)).await);
    Readiness { problems, ..readiness }
}

/// `/metrics`.
pub(super) async fn metrics() -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, crate::metrics::render()).into_response()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn primaries(serving: usize, silent: &[&str]) -> Serving {
        let silent = silent.iter().map(|at| (*at).to_owned()).collect();
        Serving { primaries: serving, silent }
    }

    #[test]
    fn only_redis_makes_it_unavailable_and_mongodb_only_degrades_it() {
        use Answers::{Down, Up};
        let reason = Some("the start of a pipeline");
        let one = |redis| match redis {
            Up => primaries(1, &[]),
            Down => primaries(0, &["a:1"]),
        };
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
            let reason = reason.map(str::to_owned);
            let readiness =
                Readiness::new(&one(redis), mongodb, stopping, reason.clone(), Vec::new());
            let said = serde_json::to_value(&readiness).unwrap();
            assert_eq!(said["status"], status);
            assert_eq!((said.get("primaries_down"), readiness.redis), (None, redis));
            assert_eq!(said.get("reason").and_then(|said| said.as_str()), reason.as_deref());
            assert_eq!(readiness.into_response().status(), code, "{status}");
        }
    }

    #[test]
    fn one_primary_of_a_cluster_suffices_and_the_others_are_counted_and_named_to_operators() {
        for (serving, silent, code, said, told) in [
            (3, &[][..], 200, json!({ "status": "ready", "redis": "up" }), None),
            (
                2,
                &["a:1"][..],
                200,
                json!({ "status": "degraded", "redis": "up", "primaries_down": 1 }),
                Some("a:1"),
            ),
            (
                1,
                &["a:1", "b:2"][..],
                200,
                json!({ "status": "degraded", "redis": "up", "primaries_down": 2 }),
                Some("a:1, b:2"),
            ),
            (
                0,
                &["a:1", "b:2"][..],
                503,
                json!({ "status": "unavailable", "redis": "down" }),
                Some("no answer within 1 s"),
            ),
        ] {
            let serving = primaries(serving, silent);
            let readiness = Readiness::new(&serving, None, false, None, Vec::new());
            assert_eq!(serde_json::to_value(&readiness).unwrap(), said);
            assert_eq!(readiness.into_response().status(), code, "{said}");
            let error = unanswered(&serving);
            assert_eq!(error.as_deref(), told);
        }
        let stopping = Readiness::new(&primaries(1, &["a:1"]), None, true, None, Vec::new());
        assert_eq!(stopping.status, Status::Stopping);
    }

    #[test]
    fn a_process_that_is_ready_without_the_start_of_a_pipeline_is_degraded_and_names_it() {
        let without = vec!["pipeline p on bus \"kafka:k\"".to_owned()];
        let readiness = Readiness::new(&primaries(1, &[]), None, false, None, without.clone());
        let said = serde_json::to_value(&readiness).unwrap();
        assert_eq!(
            (&said["status"], &said["without_start"]),
            (&"degraded".into(), &without.into())
        );
        assert_eq!(readiness.into_response().status(), 200);
    }
}
