//! Leases of slices that a push receiver accepted with 202. The receiver completes, fails or
//! extends them here. The name of the lease suffices as proof, and gives access to this lease only.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Json;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Api;
use super::docs::{Body, OfLease};
use super::extract::{JsonOrNothing, Path};
use super::problem::{Flaw, Kind, Problem};
use crate::clock::millis;
use crate::pool::open::LeaseError;

/// Maximum pause that a receiver may ask for, in seconds.
const RETRY_AFTER_MAX: f64 = 86_400.0;
/// The default reason.
const NO_REASON: &str = "the receiver reported a failure";

/// Requires the capability in the path.
pub(super) fn completing() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(complete)).routes(routes!(fail)).routes(routes!(extend))
}

impl From<LeaseError> for Problem {
    fn from(error: LeaseError) -> Self {
        let detail = error.to_string();
        match error {
            LeaseError::NoSuch => Self::new(Kind::NoLease, detail),
            LeaseError::Gone => Self::new(Kind::LeaseGone, detail),
            LeaseError::Busy => Self::new(Kind::Quota, detail).retry_after(1),
            LeaseError::Ack { .. } => {
                let field = Some("ack".to_owned());
                let errors = vec![Flaw { index: None, field, detail: detail.clone() }];
                Self::new(Kind::AckTooHigh, detail).errors(errors)
            }
            LeaseError::Store(error) => error.into(),
        }
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
struct LeasePath {
    /// `lease` of the push.
    lease: String,
}

/// The progress of a receiver.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Acknowledgement {
    /// Number of handled events, counted from the start of the slice.
    ack: Option<u64>,
}

/// Where and why a receiver failed.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Stop {
    /// Number of handled events, counted from the start of the slice; the next event failed. If
    /// absent, any of the events may have failed: Fairlane retries the first one alone, and then more and
    /// more of them together.
    ack: Option<u64>,
    /// Minimum time before a retry, in seconds; at most a day.
    #[schema(minimum = 0, maximum = 86400)]
    retry_after: Option<f64>,
    /// The reason for the log and the dead letter; the first 1,000 bytes are kept.
    reason: Option<String>,
}

/// An extended lease.
#[derive(Debug, Serialize, ToSchema)]
struct Extension {
    /// Time until the lease expires, in ms (`lease_ttl`).
    expires_in_ms: u64,
    /// Number of committed events of the slice. Right after the slice was accepted it may be lower
    /// than `ack`. The next extension or completion then commits the rest.
    acked: u64,
}

/// Complete a lease
///
/// Without `ack`, all events of the slice are done. With a lower `ack`, the remaining events are
/// retried in order, with backoff, as after a 200 with `ack`.
#[utoipa::path(
    post, path = "/v1/leases/{lease}/complete", tag = "leases", operation_id = "completeLease",
    params(LeasePath), request_body(content = Option<Acknowledgement>),
    responses((status = 204, description = "The lease ended"), OfLease, Body)
)]
async fn complete(
    State(api): State<Arc<Api>>,
    Path(LeasePath { lease }): Path<LeasePath>,
    JsonOrNothing(said): JsonOrNothing<Acknowledgement>,
) -> Result<StatusCode, Problem> {
    api.leases.complete(&lease, said.ack).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Fail a lease
///
/// The event after `ack` is retried with backoff, and becomes a dead letter after `max_attempts`.
#[utoipa::path(
    post, path = "/v1/leases/{lease}/fail", tag = "leases", operation_id = "failLease",
    params(LeasePath), request_body(content = Option<Stop>),
    responses((status = 204, description = "The lease ended"), OfLease, Body)
)]
async fn fail(
    State(api): State<Arc<Api>>,
    Path(LeasePath { lease }): Path<LeasePath>,
    JsonOrNothing(said): JsonOrNothing<Stop>,
) -> Result<StatusCode, Problem> {
    let retry_after = match said.retry_after {
        Some(seconds) if seconds < 0.0 => {
            return Err(Problem::field("retry_after", "it is negative; write seconds from 0"));
        }
        seconds => seconds.map(|seconds| Duration::from_secs_f64(seconds.min(RETRY_AFTER_MAX))),
    };
    let reason = said.reason.as_deref().map(str::trim).filter(|reason| !reason.is_empty());
    let reason = reason.unwrap_or(NO_REASON).replace(char::is_control, " ");
    api.leases.fail(&lease, said.ack, retry_after, &reason).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Extend a lease
///
/// The lease expires `lease_ttl` from now. Acknowledged events are committed.
#[utoipa::path(
    post, path = "/v1/leases/{lease}/extend", tag = "leases", operation_id = "extendLease",
    params(LeasePath), request_body(content = Option<Acknowledgement>),
    responses((status = 200, description = "The lease is extended", body = Extension), OfLease, Body)
)]
async fn extend(
    State(api): State<Arc<Api>>,
    Path(LeasePath { lease }): Path<LeasePath>,
    JsonOrNothing(said): JsonOrNothing<Acknowledgement>,
) -> Result<Json<Extension>, Problem> {
    let extended = api.leases.extend(&lease, said.ack).await?;
    let (expires_in_ms, acked) = (millis(extended.ttl), extended.acked as u64);
    Ok(Json(Extension { expires_in_ms, acked }))
}
