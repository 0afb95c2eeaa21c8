//! The HTTP interface: its routes, and the access that each route requires.
//!
//! | routes | access |
//! |---|---|
//! | `/healthz`, `/readyz` | every client |
//! | `/docs`, `/openapi.json`, `/login`, `/theme`, `/style.css`, `/live.js`, `/icon.svg` | every client; without `auth.tokens` not the pages of other sites |
//! | `/`, `/runbook`, `/events/…`, `/pipelines/…`, `/bots/…`, `/counters`, `/notifications` | scope `read`, and `operate` for changes, for the bot; a session in a cookie suffices |
//! | `POST /v1/events`, `/publish` | scope `publish`, for the bots of the events |
//! | `POST /v1/bots/…/counters/…/views` | scope `publish` or `count`, for the bot |
//! | `GET /v1/bots/…/counters`, `…/daily`, `POST …/counters/query` | scope `read` or `count`, for the bot |
//! | `PUT /v1/bots/…/subscribers/…` | scope `publish`, for the bot |
//! | `POST /v1/bots/…/automations/test` | scope `read`, for the bot |
//! | `/send_delayed`, `/user_online`, `DELETE` and `PATCH /v1/notifications/…` | scope `publish`, for the bot |
//! | `/v1/leases/…` | the capability of the lease; without `auth.tokens` not the pages of other sites |
//! | `GET /v1/audit`, `/audit` | scope `operate`, for all bots |
//! | every other `GET` below `/v1` | scope `read`, for the bots that are shown |
//! | routes of products | the scope that the route names, for the bot in the path; for all bots if the path names none |
//! | every other route below `/v1` | scope `operate`, for the bot; for all bots if the route concerns a whole pipeline |
//!
//! A request passes these layers, from the outside in:
//!
//! 1. the limits of the connection ([`listen`]);
//! 2. the access of pages of other sites ([`cors`]);
//! 3. the identity of the sender ([`auth`]), admission control, and the body ([`admit`]);
//! 4. problems as [`pages`], for browsers;
//! 5. metrics;
//! 6. the check of the site that the request comes from, and of the scope ([`auth`]);
//! 7. the parameters ([`extract`]), and the handler.
//!
//! A layer that refuses a request answers with a [`problem`]. The OpenAPI document ([`docs`]) is
//! generated from the served routes.

mod acting;
mod admission;
mod admit;
mod audit;
mod auth;
mod automations;
mod body;
mod bots;
mod cloudevents;
mod contract;
mod cors;
mod counters;
mod dead;
mod docs;
mod events;
mod extract;
mod find;
mod forwarded;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod health;
mod large_reads;
mod leases;
mod listen;
mod metrics;
mod notifications;
mod page;
mod pages;
mod parameters;
mod partly;
mod pipelines;
mod problem;
mod problems;
mod proxy_protocol;
mod queues;
mod reload;
mod replay;
mod routes;
mod stopwatch;
pub(crate) mod taken;
mod traced;

use std::sync::Arc;

use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderValue, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::{Router, routing};
use tokio::time::Instant;
use utoipa_axum::router::OpenApiRouter;

pub(crate) use self::admit::{AdmissionGate, QuotaSettings};
use self::auth::Guard;
pub(crate) use self::auth::{Access, AuthError};
pub(crate) use self::forwarded::Proxies;
pub(crate) use self::health::Health;
pub(crate) use self::large_reads::LargeReads;
pub(crate) use self::listen::{BindError, Ending, Limits, bind, serve};
pub(crate) use self::pages::Live;
use self::problem::{Kind, PROBLEM_JSON, Problem};
pub(crate) use self::problems::Problems;
pub(crate) use self::proxy_protocol::Unusable as UnusableProxyHeader;
pub(crate) use self::queues::Queues;
pub(crate) use self::routes::ROUTES;
pub use self::routes::Row;
use self::stopwatch::{Meters, Stopwatch};
use self::taken::Taken;
use crate::bus::Source;
use crate::bus::backlog::Backlog;
use crate::clock::SharedClock;
use crate::config::Scope;
use crate::outbound::Policy;
use crate::pool::open::OpenLeases;
use crate::product::{self, Services};
use crate::reload::Reloads;
use crate::startup::Startup;
use crate::trace::Tracer;
use crate::trail::Trail;

/// The state that the routes share.
pub(crate) struct Api {
    /// How an operator asks for a reload; `None`: this process does not reload.
    pub(crate) reloads: Option<Reloads>,
    /// The queues of every pipeline.
    pub(crate) queues: Queues,
    /// Where events are published, over a link of its own, so that they do not wait behind requests
    /// of operators.
    pub(crate) bus: Arc<dyn Source>,
    /// All streams of the bus.
    pub(crate) streams: Vec<String>,
    /// The names of the buses beside Redis.
    pub(crate) buses: Vec<String>,
    /// The events on it that are not copied yet.
    pub(crate) backlog: Arc<Backlog>,
    /// The event types that the pipelines take.
    pub(crate) taken: Taken,
    /// No event is published before each pipeline has its start position on the stream.
    pub(crate) startup: Startup,
    pub(crate) clock: SharedClock,
    pub(crate) access: Arc<Access>,
    /// Decides which requests are admitted.
    pub(crate) gate: Arc<AdmissionGate>,
    /// Leases that receivers hold.
    pub(crate) leases: OpenLeases,
    /// The services of the products.
    pub(crate) services: Services,
    /// The address rules for URLs in requests.
    pub(crate) targets: Policy,
    /// The state that the live pages share.
    pub(crate) live: Live,
    /// What is wrong.
    pub(crate) problems: Arc<Problems>,
    /// Turns for large answers.
    pub(crate) large_reads: LargeReads,
    /// Turns for searches of the bus, replays, and actions on many dead letters.
    pub(crate) searches: LargeReads,
    /// Turns for checks of rules.
    pub(crate) checks: LargeReads,
    /// Turns for dry runs of rules.
    pub(crate) trials: LargeReads,
    /// Creates spans.
    pub(crate) tracer: Tracer,
    /// Notes what operators do.
    pub(crate) trail: Trail,
}

/// The routes of `http.listen`.
pub(crate) fn routes(api: Api, health: Health, products: &[product::Route]) -> Router {
    let api = Arc::new(api);
    let (access, gate) = (Arc::clone(&api.access), Arc::clone(&api.gate));
    gate.know(&access);
    let guard_or = |scope, or| {
        let (access, gate) = (Arc::clone(&access), Arc::clone(&gate));
        Guard { access, gate, scope, or }
    };
    let guard = |scope| guard_or(scope, None);
    let public = |scope, routes| guarded(guard_or(scope, Some(Scope::Count)), routes);
    let guarded = |scope, routes| guarded(guard(scope), routes);
    let origins = cors::Origins::new(access.cors_origins());
    let served = docs::begin()
        .merge(public(Scope::Publish, counters::counting()))
        .merge(public(Scope::Read, counters::telling()))
        .merge(guarded(Scope::Publish, publishing()))
        .merge(guarded(Scope::Read, reading()))
        .merge(guarded(Scope::Operate, operating()))
        .merge(capable(leases::completing()));
    let of_products = of_products(products, guard);
    let pages = pages::routes(Arc::clone(&api), &access, guard);
    let (served, mut document) = served.with_state(api).split_for_parts();
    let (health, of_health) = health::routes(health).split_for_parts();
    document.merge(of_health);
    let routes = served
        .merge(docs::routes(&document))
        .merge(pages)
        .merge(of_products)
        .layer(from_fn_with_state(access, auth::check_site))
        // Orchestrators and load balancers use any host name, so the site is not checked here.
        .merge(health);
    let routes = finish(routes).layer(from_fn(pages::explain)).layer(from_fn(pages::dress));
    admitted(routes, gate).layer(from_fn_with_state(origins, cors::share))
}

/// Puts admission control around `routes`, so that a refused request costs almost nothing.
pub(crate) fn admitted(routes: Router, gate: Arc<AdmissionGate>) -> Router {
    routes.layer(from_fn_with_state(gate, admit::admit))
}

/// The routes of products from outside the crate.
fn of_products(products: &[product::Route], guard: impl Fn(Scope) -> Guard) -> Router {
    products.iter().fold(Router::new(), |routes, route| {
        let one = Router::new().route(route.template, route.handler.clone());
        let guard = from_fn_with_state(guard(route.scope), auth::guard);
        routes.merge(one.route_layer(from_fn(auth::cover)).route_layer(guard))
    })
}

/// Requires the scope `publish`.
fn publishing() -> OpenApiRouter<Arc<Api>> {
    events::publishing().merge(notifications::publishing()).merge(automations::publishing())
}

/// Requires the scope `read`.
fn reading() -> OpenApiRouter<Arc<Api>> {
    pipelines::reading()
        .merge(admission::reading())
        .merge(bots::reading())
        .merge(dead::reading())
        .merge(problems::reading())
        .merge(find::reading())
        .merge(counters::reading())
        .merge(notifications::reading())
        .merge(automations::reading())
}

/// Requires the scope `operate`.
fn operating() -> OpenApiRouter<Arc<Api>> {
    pipelines::operating()
        .merge(audit::operating())
        .merge(reload::operating())
        .merge(replay::operating())
        .merge(bots::operating())
        .merge(dead::operating())
        .merge(counters::operating())
        .merge(automations::operating())
}

/// The document of all routes except the health routes.
#[cfg(test)]
fn documented() -> utoipa::openapi::OpenApi {
    let all = publishing()
        .merge(counters::counting())
        .merge(counters::telling())
        .merge(reading())
        .merge(operating())
        .merge(leases::completing());
    all.into_openapi()
}

/// The routes of `metrics.listen`.
pub(crate) fn metrics_routes(health: Health) -> Router {
    let routes = Router::from(health::routes(health));
    finish(routes.route("/metrics", routing::get(health::metrics)))
}

/// Requires a token with the scope of `guard`, and notes it in the document.
fn guarded(guard: Guard, routes: OpenApiRouter<Arc<Api>>) -> OpenApiRouter<Arc<Api>> {
    let (scope, or) = (guard.scope, guard.or);
    let mut routes = routes.route_layer(from_fn_with_state(guard, auth::guard));
    docs::note_access(routes.get_openapi_mut(), scope, or);
    routes
}

/// Requires no token: the path contains a capability that is secret.
fn capable(routes: OpenApiRouter<Arc<Api>>) -> OpenApiRouter<Arc<Api>> {
    let mut routes = routes.route_layer(from_fn(auth::receive));
    docs::note_capability(routes.get_openapi_mut());
    routes
}

/// Adds the layers that every listener needs, and the answers for unknown paths and methods.
fn finish(routes: Router) -> Router {
    routes
        .method_not_allowed_fallback(async || {
            Problem::new(Kind::Method, "the header Allow names the methods of this path")
        })
        .fallback(async || {
            Problem::new(Kind::NoRoute, "nothing is served here; /openapi.json lists every path")
        })
        .layer(from_fn(extract::refuse_large))
        .layer(from_fn(extract::refuse_unclear_host))
        .layer(from_fn(observe))
}

const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

/// Lets a request be counted, times its handler, and turns an error answer into a problem.
async fn observe(request: Request, next: Next) -> Response {
    let route: Option<MatchedPath> = request.extensions().get().cloned();
    let route = route.as_ref().map_or("unmatched", MatchedPath::as_str);
    let meters = metrics::http_route(route);
    if let Some(watch) = request.extensions().get::<Stopwatch>() {
        let (whole, answer) = (meters.whole, Some(meters.answer));
        watch.measure(|| Meters { route: Some(route.to_owned()), whole, answer });
    }
    // Records the time on drop, so that a handler cancelled at its deadline is timed too.
    let handling = Handling { seconds: meters.handler, began: Instant::now() };
    let response = next.run(request).await;
    drop(handling);
    let status = response.status();
    let kind = response.headers().get(header::CONTENT_TYPE);
    let told = kind.is_some_and(|kind| {
        kind == PROBLEM_JSON || kind == "application/json" || kind == "text/html; charset=utf-8"
    });
    let mut response = if told || !(status.is_client_error() || status.is_server_error()) {
        response
    } else {
        Problem::of_status(status).into_response()
    };
    // A session in a cookie opens the API too: no cache may show its answers after the session.
    if !route.starts_with("/docs") {
        response.headers_mut().entry(header::CACHE_CONTROL).or_insert(NO_STORE);
    }
    response
}

/// Records the time of a handler when it is dropped.
struct Handling {
    seconds: ::metrics::Histogram,
    began: Instant,
}

impl Drop for Handling {
    fn drop(&mut self) {
        self.seconds.record(self.began.elapsed().as_secs_f64());
    }
}
