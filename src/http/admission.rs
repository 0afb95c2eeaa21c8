//! How admission stands in the process that answers.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Json;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Api;
use super::auth::Caller;
use super::problem::Problem;
use crate::admission::{Class, Reason};

/// Tenants that are shown.
const TENANTS: usize = 10;

/// What asks for the scope `read`.
pub(super) fn reading() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(show))
}

/// How admission stands.
#[derive(Debug, Serialize, ToSchema)]
struct AdmissionState {
    /// Requests in flight, critical ones aside.
    in_flight: usize,
    /// Most of them, as the latency allows.
    limit: usize,
    /// Requests of the critical class in flight.
    critical: usize,
    /// Requests that wait to be begun, by class.
    waiting: Vec<Waiting>,
    /// Refusals since the process started, by class and reason; those that never happened are left
    /// out.
    shed: Vec<ShedCount>,
    /// Bots with the most refusals, as paths and queries name them.
    top_bots: Vec<TopBot>,
}

/// Requests of a class that wait.
#[derive(Debug, Serialize, ToSchema)]
struct Waiting {
    #[schema(example = "p2")]
    class: &'static str,
    requests: usize,
}

/// Refusals of a class for a reason.
#[derive(Debug, Serialize, ToSchema)]
struct ShedCount {
    #[schema(example = "p3")]
    class: &'static str,
    /// capacity, wait, displaced, share, deadline, critical, quota or switch.
    #[schema(example = "capacity")]
    reason: &'static str,
    requests: u64,
}

/// A bot whose requests were refused.
#[derive(Debug, Serialize, ToSchema)]
struct TopBot {
    bot: String,
    /// Refusals, at most; and by how much that may be too high, where there are many bots.
    requests: u64,
    over: u64,
}

/// How admission stands
///
/// Which requests this process begins and which it refuses. Each process decides for itself; the
/// metrics tell of all.
#[utoipa::path(
    get, path = "/v1/admission", tag = "admission", operation_id = "getAdmission",
    responses((status = 200, description = "How it stands", body = AdmissionState))
)]
async fn show(
    State(api): State<Arc<Api>>,
    caller: Caller,
) -> Result<Json<AdmissionState>, Problem> {
    caller.check_all_bots()?;
    let admission = &api.door.admission;
    let (state, counts) = (admission.state(), admission.counts());
    let shed = Class::ALL.into_iter().flat_map(|class| {
        Reason::ALL.into_iter().map(move |reason| ShedCount {
            class: class.as_str(),
            reason: reason.as_str(),
            requests: counts.of(class, reason),
        })
    });
    let waiting = Class::ALL.into_iter().zip(state.waiting);
    let top = counts.top(TENANTS).into_iter();
    Ok(Json(AdmissionState {
        in_flight: state.in_flight,
        limit: state.limit,
        critical: state.critical,
        waiting: waiting
            .map(|(class, requests)| Waiting { class: class.as_str(), requests })
            .collect(),
        shed: shed.filter(|shed| shed.requests > 0).collect(),
        top_bots: top
            .map(|tenant| TopBot {
                bot: tenant.name.into(),
                requests: tenant.shed,
                over: tenant.over,
            })
            .collect(),
    }))
}
