//! How admission stands in the process that answers.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Json;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Api;
use super::admit::{Door, QuotaSettings};
use super::auth::Caller;
use crate::admission::quota::Quota;
use crate::admission::{Class, Reason, Refused};
use crate::id::BotId;

/// Names of each kind that are shown.
const NAMES: usize = 10;

/// What asks for the scope `read`.
pub(super) fn reading() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(show))
}

/// How admission stands. What tells of the whole process is there for a token of all bots (`bots =
/// ["*"]`) alone.
#[derive(Debug, Default, Serialize, ToSchema)]
struct AdmissionState {
    /// Requests in flight, critical ones aside; a large one counts as several.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    in_flight: Option<usize>,
    /// Most of them, as the latency allows.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    limit: Option<usize>,
    /// Requests of the critical class in flight.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    critical: Option<usize>,
    /// Requests that wait to be begun, by class.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    waiting: Option<Vec<Waiting>>,
    /// Refusals since the process started, by class and reason; those that never happened are left
    /// out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    shed: Option<Vec<ShedCount>>,
    /// How long requests may take that bring no deadline, by class; left out: any time.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    deadlines: Option<Vec<DeadlineShown>>,
    /// What each bot and each token has for sure.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    quotas: Option<QuotasShown>,
    /// Bots with the most refusals, as paths, queries and bodies name them: those that the token is
    /// for.
    top_bots: Vec<TopBot>,
    /// Tokens with the most refusals; the token's own alone, unless it is for all bots.
    top_tokens: Vec<TopToken>,
    /// Addresses with the most refusals, of IPv6 the network of 64 bits; for a token of all bots.
    top_addresses: Vec<TopAddress>,
}

/// Requests of a class that wait.
#[derive(Debug, Serialize, ToSchema)]
struct Waiting {
    #[schema(example = "p2")]
    class: &'static str,
    requests: usize,
}

/// How long a request of a class may take that brings no deadline.
#[derive(Debug, Serialize, ToSchema)]
struct DeadlineShown {
    #[schema(example = "p2")]
    class: &'static str,
    ms: u64,
}

/// Refusals of a class for a reason.
#[derive(Debug, Serialize, ToSchema)]
struct ShedCount {
    #[schema(example = "p3")]
    class: &'static str,
    #[serde(flatten)]
    because: Because,
}

/// Refusals for a reason.
#[derive(Debug, Serialize, ToSchema)]
struct Because {
    /// capacity, wait, displaced, share, deadline, critical, quota or switch.
    #[schema(example = "capacity")]
    reason: &'static str,
    requests: u64,
}

/// The quotas of the configuration.
#[derive(Debug, Serialize, ToSchema)]
struct QuotasShown {
    bot: QuotaShown,
    token: QuotaShown,
}

/// A quota.
#[derive(Debug, Serialize, ToSchema)]
struct QuotaShown {
    /// Requests a second; 0: no bound.
    rate: u32,
    /// Requests in flight; 0: no bound.
    in_flight: u32,
}

/// A bot whose requests were refused.
#[derive(Debug, Serialize, ToSchema)]
struct TopBot {
    bot: String,
    #[serde(flatten)]
    refusals: Refusals,
}

/// A token whose requests were refused, by its name in the configuration.
#[derive(Debug, Serialize, ToSchema)]
struct TopToken {
    token: String,
    #[serde(flatten)]
    refusals: Refusals,
}

/// An address whose requests were refused.
#[derive(Debug, Serialize, ToSchema)]
struct TopAddress {
    #[schema(example = "203.0.113.7")]
    address: String,
    #[serde(flatten)]
    refusals: Refusals,
}

/// How often requests were refused.
#[derive(Debug, Serialize, ToSchema)]
struct Refusals {
    /// At most; and by how much that may be too high, where there are many names.
    requests: u64,
    over: u64,
    /// By reason, those that are certain.
    reasons: Vec<Because>,
}

impl<K> From<&Refused<K>> for Refusals {
    fn from(refused: &Refused<K>) -> Self {
        let reasons = Reason::ALL.into_iter().zip(refused.reasons);
        let reasons = reasons.filter(|(_, requests)| *requests > 0);
        let reasons =
            reasons.map(|(reason, requests)| Because { reason: reason.as_str(), requests });
        Self { requests: refused.shed, over: refused.over, reasons: reasons.collect() }
    }
}

/// How admission stands
///
/// Which requests this process begins and which it refuses, and whose they were. Each process decides
/// for itself; the metrics tell of all. A token that is not for all bots sees itself and its own bots.
#[utoipa::path(
    get, path = "/v1/admission", tag = "admission", operation_id = "getAdmission",
    responses((status = 200, description = "How it stands", body = AdmissionState))
)]
async fn show(State(api): State<Arc<Api>>, caller: Caller) -> Json<AdmissionState> {
    let counts = api.door.admission.counts();
    let sees_all = caller.covers_all();
    let is_own_bot = |bot: &str| BotId::parse(bot).is_ok_and(|bot| caller.covers(&bot));
    let bots = counts.bots.most(NAMES, |bot| sees_all || is_own_bot(bot));
    let tokens = counts.tokens.most(NAMES, |token| sees_all || **token == *caller.name());
    let addresses = counts.addresses.most(NAMES, |_| sees_all);
    let whole = if sees_all { of_all(&api.door) } else { AdmissionState::default() };
    Json(AdmissionState {
        top_bots: (bots.iter())
            .map(|bot| TopBot { bot: bot.name.to_string(), refusals: bot.into() })
            .collect(),
        top_tokens: (tokens.iter())
            .map(|token| TopToken { token: token.name.to_string(), refusals: token.into() })
            .collect(),
        top_addresses: (addresses.iter())
            .map(|one| TopAddress { address: one.name.to_string(), refusals: one.into() })
            .collect(),
        ..whole
    })
}

/// What tells of the whole process.
fn of_all(door: &Door) -> AdmissionState {
    let (state, counts) = (door.admission.state(), door.admission.counts());
    let shed = Class::ALL.into_iter().flat_map(|class| {
        Reason::ALL.into_iter().map(move |reason| {
            let requests = counts.of(class, reason);
            let because = Because { reason: reason.as_str(), requests };
            ShedCount { class: class.as_str(), because }
        })
    });
    let waiting = Class::ALL.into_iter().zip(state.waiting);
    let waiting = waiting.map(|(class, requests)| Waiting { class: class.as_str(), requests });
    let quota = |quota: Quota| QuotaShown { rate: quota.rate, in_flight: quota.in_flight };
    let QuotaSettings { bot, token } = door.quotas();
    let deadlines = Class::ALL.into_iter().filter_map(|class| {
        let ms = u64::try_from(door.deadline(class)?.as_millis()).unwrap_or(u64::MAX);
        Some(DeadlineShown { class: class.as_str(), ms })
    });
    AdmissionState {
        deadlines: Some(deadlines.collect()),
        in_flight: Some(state.in_flight),
        limit: Some(state.limit),
        critical: Some(state.critical),
        waiting: Some(waiting.collect()),
        shed: Some(shed.filter(|shed| shed.because.requests > 0).collect()),
        quotas: Some(QuotasShown { bot: quota(bot), token: quota(token) }),
        ..AdmissionState::default()
    }
}
