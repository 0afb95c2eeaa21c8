//! The state of admission control in the answering process.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Json;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Api;
use super::admit::{AdmissionGate, QuotaSettings};
use super::auth::Caller;
use crate::admission::quota::Quota;
use crate::admission::{Class, Reason, Refused};
use crate::id::BotId;

/// Maximum number of names of each kind.
const NAMES: usize = 10;

/// Requires the scope `read`.
pub(super) fn reading() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(show))
}

/// The state of admission control. Values of the whole process are present only for a token of all
/// bots (`bots = ["*"]`).
#[derive(Debug, Default, Serialize, ToSchema)]
struct AdmissionState {
    /// Requests in flight, without critical ones. A large request counts more than once.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    in_flight: Option<usize>,
    /// The current limit of requests in flight, which follows the latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    limit: Option<usize>,
    /// Critical requests (p0) in flight.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    critical: Option<usize>,
    /// Requests waiting for admission, by class.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    waiting: Option<Vec<Waiting>>,
    /// Refusals since the process started, by class and reason. Counts of 0 are left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    shed: Option<Vec<ShedCount>>,
    /// Deadlines of requests that bring none, by class. A class without a deadline is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    deadlines: Option<Vec<DeadlineShown>>,
    /// Guaranteed rates and requests in flight of each bot and each token.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    quotas: Option<QuotasShown>,
    /// The bots with the largest numbers of refusals, as paths, queries and bodies name them. Only
    /// bots that the token gives access to.
    top_bots: Vec<TopBot>,
    /// The tokens with the largest numbers of refusals. Only the caller's own, unless it is for all
    /// bots.
    top_tokens: Vec<TopToken>,
    /// The client addresses (IPv6: /64 networks) with the largest numbers of refusals. Only for a
    /// token of all bots.
    top_addresses: Vec<TopAddress>,
}

/// Waiting requests of a class.
#[derive(Debug, Serialize, ToSchema)]
struct Waiting {
    #[schema(example = "p2")]
    class: &'static str,
    requests: usize,
}

/// The deadline of requests of a class that bring none.
#[derive(Debug, Serialize, ToSchema)]
struct DeadlineShown {
    #[schema(example = "p2")]
    class: &'static str,
    ms: u64,
}

/// Refusals of a class for one reason.
#[derive(Debug, Serialize, ToSchema)]
struct ShedCount {
    #[schema(example = "p3")]
    class: &'static str,
    #[serde(flatten)]
    because: Because,
}

/// Refusals for one reason.
#[derive(Debug, Serialize, ToSchema)]
struct Because {
    /// The reason: capacity, wait, displaced, share, deadline, critical, quota,
    /// switch, bus or unread.
    #[schema(example = "capacity")]
    reason: &'static str,
    requests: u64,
}

/// The quotas in the configuration.
#[derive(Debug, Serialize, ToSchema)]
struct QuotasShown {
    bot: QuotaShown,
    token: QuotaShown,
}

/// A quota.
#[derive(Debug, Serialize, ToSchema)]
struct QuotaShown {
    /// Requests per second; 0: no bound.
    rate: u32,
    /// Requests in flight; 0: no bound.
    in_flight: u32,
}

/// A bot with refused requests.
#[derive(Debug, Serialize, ToSchema)]
struct TopBot {
    bot: String,
    #[serde(flatten)]
    refusals: Refusals,
}

/// A token with refused requests, by its name in the configuration.
#[derive(Debug, Serialize, ToSchema)]
struct TopToken {
    token: String,
    #[serde(flatten)]
    refusals: Refusals,
}

/// A client address with refused requests.
#[derive(Debug, Serialize, ToSchema)]
struct TopAddress {
    #[schema(example = "203.0.113.7")]
    address: String,
    #[serde(flatten)]
    refusals: Refusals,
}

/// Number of refused requests.
#[derive(Debug, Serialize, ToSchema)]
struct Refusals {
    /// Upper bound of the number. With many names it may be too high, by at most `over`.
    requests: u64,
    over: u64,
    /// The numbers by reason, without the uncertain part.
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

/// State of admission control
///
/// Which requests this process admits and refuses, with their bots, tokens and addresses. Each
/// process decides for itself. The metrics cover all processes. A token that is not for all bots
/// sees only itself and its own bots.
#[utoipa::path(
    get, path = "/v1/admission", tag = "admission", operation_id = "getAdmission",
    responses((status = 200, description = "The state", body = AdmissionState))
)]
async fn show(State(api): State<Arc<Api>>, caller: Caller) -> Json<AdmissionState> {
    let counts = api.gate.admission.counts();
    let sees_all = caller.covers_all();
    let is_own_bot = |bot: &str| BotId::parse(bot).is_ok_and(|bot| caller.covers(&bot));
    let bots = counts.bots.most(NAMES, |bot| sees_all || is_own_bot(bot));
    let tokens = counts.tokens.most(NAMES, |token| sees_all || **token == *caller.name());
    let addresses = counts.addresses.most(NAMES, |_| sees_all);
    let whole = if sees_all { of_all(&api.gate) } else { AdmissionState::default() };
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

/// The values of the whole process.
fn of_all(gate: &AdmissionGate) -> AdmissionState {
    let (state, counts) = (gate.admission.state(), gate.admission.counts());
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
    let QuotaSettings { bot, token } = gate.quotas();
    let deadlines = Class::ALL.into_iter().filter_map(|class| {
        let ms = u64::try_from(gate.deadline(class)?.as_millis()).unwrap_or(u64::MAX);
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
