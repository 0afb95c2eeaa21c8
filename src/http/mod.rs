//! HTTP, the second entrance: which routes there are, and who may use them.
//!
//! | routes | access |
//! |---|---|
//! | `/healthz`, `/readyz` | everybody |
//! | `/docs`, `/openapi.json`, `/login`, `/style.css`, `/live.js`, `/icon.svg` | everybody, but no other site's page |
//! | `/`, `/pipelines/…`, `/bots/…`, `/counters`, `/notifications` | scope `read`, for the bot, by a browser that keeps its token; what they change: `operate` |
//! | `POST /v1/events` | scope `publish`, for the bots of the events |
//! | `POST /v1/bots/…/counters/…/views` | scope `publish` or `count`, for the bot |
//! | `GET /v1/bots/…/counters`, `…/daily`, `POST …/counters/query` | scope `read` or `count`, for the bot |
//! | `PUT /v1/bots/…/subscribers/…` | scope `publish`, for the bot |
//! | `POST /v1/bots/…/automations/test` | scope `read`, for the bot |
//! | `/send_delayed`, `/user_online`, `DELETE` and `PATCH /v1/notifications/…` | scope `publish`, for the bot |
//! | `/v1/leases/…` | who has the lease's capability; no other site's page |
//! | every other `GET` below `/v1` | scope `read`, for the bots that are shown |
//! | routes of products | the scope that the route asks for, for the bot of the path, or else for all bots |
//! | everything else below `/v1` | scope `operate`, for the bot, or for all of a pipeline |
//!
//! A request passes, from the outside in: limits of the connection ([`listen`]), what pages of other
//! sites need ([`cors`]), admission and the
//! body ([`admit`]), metrics, the site it comes from, the token ([`auth`]), the parameters ([`extract`]), the
//! handler. Whatever refuses it answers a [`problem`]. The document ([`docs`]) is made of the very
//! routes that are served.

mod admission;
mod admit;
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
mod forwarded;
mod health;
mod leases;
mod listen;
mod metrics;
mod notifications;
mod page;
mod pages;
mod parameters;
mod pipelines;
mod problem;
mod proxy_protocol;
mod queues;
mod routes;
mod stopwatch;
pub(crate) mod taken;

use std::sync::Arc;

use axum::extract::{MatchedPath, Request};
use axum::http::header;
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
pub(crate) use self::listen::{BindError, Ending, Limits, bind, serve};
pub(crate) use self::pages::Live;
use self::problem::{Kind, PROBLEM_JSON, Problem};
pub(crate) use self::proxy_protocol::Unusable as UnusableProxyHeader;
pub(crate) use self::queues::Queues;
pub(crate) use self::routes::ROUTES;
pub use self::routes::Row;
use self::stopwatch::{Meters, Stopwatch};
use self::taken::Taken;
use crate::clock::SharedClock;
use crate::config::Scope;
use crate::outbound::Policy;
use crate::pool::open::OpenLeases;
use crate::product::{self, Services};
use crate::redis::Link;
use crate::startup::Startup;

/// What the routes work with.
pub(crate) struct Api {
    /// The queues of every pipeline.
    pub(crate) queues: Queues,
    /// For events, so that they do not wait behind operators' questions.
    pub(crate) bus: Arc<Link>,
    /// The bus stream that events are put on.
    pub(crate) stream: String,
    /// The types of events that somebody takes.
    pub(crate) taken: Taken,
    /// Nothing is put on it before the pipelines have their places there.
    pub(crate) startup: Startup,
    pub(crate) clock: SharedClock,
    pub(crate) access: Arc<Access>,
    /// Who is let in.
    pub(crate) gate: Arc<AdmissionGate>,
    /// Leases that receivers hold.
    pub(crate) leases: OpenLeases,
    /// What the products offer.
    pub(crate) services: Services,
    /// Where URLs that come in by requests may lead to.
    pub(crate) targets: Policy,
    /// What the pages share.
    pub(crate) live: Live,
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
        // Orchestrators and load balancers call by any name.
        .merge(health);
    admitted(finish(routes), gate).layer(from_fn_with_state(origins, cors::share))
}

/// Routes behind admission: whoever is refused there has cost nothing yet.
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

/// What asks for the scope `publish`.
fn publishing() -> OpenApiRouter<Arc<Api>> {
    events::publishing().merge(notifications::publishing()).merge(automations::publishing())
}

/// What asks for the scope `read`.
fn reading() -> OpenApiRouter<Arc<Api>> {
    pipelines::reading()
        .merge(admission::reading())
        .merge(bots::reading())
        .merge(dead::reading())
        .merge(counters::reading())
        .merge(notifications::reading())
        .merge(automations::reading())
}

/// What asks for the scope `operate`.
fn operating() -> OpenApiRouter<Arc<Api>> {
    pipelines::operating()
        .merge(bots::operating())
        .merge(dead::operating())
        .merge(counters::operating())
        .merge(automations::operating())
}

/// Everything that needs no health, as it is described.
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

/// Asks for a token with `scope`, and says so in the document.
fn guarded(guard: Guard, routes: OpenApiRouter<Arc<Api>>) -> OpenApiRouter<Arc<Api>> {
    let (scope, or) = (guard.scope, guard.or);
    let mut routes = routes.route_layer(from_fn_with_state(guard, auth::guard));
    docs::note_access(routes.get_openapi_mut(), scope, or);
    routes
}

/// Asks for no token: what names the resource is itself what only the right one knows.
fn capable(routes: OpenApiRouter<Arc<Api>>) -> OpenApiRouter<Arc<Api>> {
    let mut routes = routes.route_layer(from_fn(auth::receive));
    docs::note_capability(routes.get_openapi_mut());
    routes
}

/// What every listener does for every route, and for what is no route.
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

/// Counts a request and times its handler, and makes every refusal a problem.
async fn observe(request: Request, next: Next) -> Response {
    let route: Option<MatchedPath> = request.extensions().get().cloned();
    let route = route.as_ref().map_or("unmatched", MatchedPath::as_str);
    let meters = metrics::http_route(route);
    if let Some(watch) = request.extensions().get::<Stopwatch>() {
        watch.measure(|| Meters { whole: meters.whole, answer: Some(meters.answer) });
    }
    // One that is cut by its deadline took its time too.
    let handling = Handling { seconds: meters.handler, began: Instant::now() };
    let response = next.run(request).await;
    drop(handling);
    let status = response.status();
    metrics::http_answered(route, status.as_u16());
    let kind = response.headers().get(header::CONTENT_TYPE);
    let told = kind.is_some_and(|kind| {
        kind == PROBLEM_JSON || kind == "application/json" || kind == "text/html; charset=utf-8"
    });
    if told || !(status.is_client_error() || status.is_server_error()) {
        return response;
    }
    Problem::of_status(status).into_response()
}

/// The time of a handler, until it is dropped.
struct Handling {
    seconds: ::metrics::Histogram,
    began: Instant,
}

impl Drop for Handling {
    fn drop(&mut self) {
        self.seconds.record(self.began.elapsed().as_secs_f64());
    }
}
