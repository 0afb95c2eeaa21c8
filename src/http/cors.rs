//! Pages of other sites that count views and read totals directly (CORS).
//!
//! A browser lets a page of another site read an answer only if the answer names that site.
//! Fairlane names the sites of `http.cors_origins`, only on the routes that such pages need:
//! [`TEMPLATES`]. Cookies are not accepted there (no `Access-Control-Allow-Credentials`), so a page
//! can do only what its token permits.
//!
//! This is the outermost layer, so that a page can also read a refusal by admission control.

use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use super::problem::{Kind, Problem};
use super::stopwatch::{Meters, Stopwatch};

/// The routes that pages of other sites may call.
const TEMPLATES: [&str; 4] = [
    "/v1/bots/{bot}/counters/{ad}/views",
    "/v1/bots/{bot}/counters/{ad}/daily",
    "/v1/bots/{bot}/counters/query",
    "/v1/bots/{bot}/counters",
];
/// The request headers that a page may send in addition to the standard ones.
const HEADERS: &str = "authorization, content-type, idempotency-key, x-deadline-ms, x-priority";
/// The answer headers that a page may read in addition to the standard ones.
const EXPOSED: &str = "retry-after, x-shed-reason";
/// Lifetime of a browser's preflight result, in seconds.
const MAX_AGE: &str = "7200";

/// Whether pages of other sites may call the route.
pub(super) fn is_shared(template: &str) -> bool {
    TEMPLATES.contains(&template)
}

/// The sites whose pages may call.
#[derive(Debug)]
pub(super) struct Origins(Vec<HeaderValue>);

impl Origins {
    /// The sites in the configuration, which is already checked.
    pub(super) fn new(origins: &[String]) -> Arc<Self> {
        Arc::new(Self(origins.iter().filter_map(|one| HeaderValue::from_str(one).ok()).collect()))
    }
}

/// Marks a request from an allowed site.
#[derive(Debug, Clone, Copy)]
pub(super) struct AllowedOrigin;

/// Answers preflight requests, and names the site in every other answer.
pub(super) async fn share(
    State(origins): State<Arc<Origins>>,
    mut request: Request,
    next: Next,
) -> Response {
    let template = request.extensions().get::<MatchedPath>();
    let shared = TEMPLATES.into_iter().find(|of| template.is_some_and(|path| path.as_str() == *of));
    let Some(template) = shared.filter(|_| !origins.0.is_empty()) else {
        return next.run(request).await;
    };
    let headers = request.headers();
    let origin = headers.get(header::ORIGIN).filter(|origin| origins.0.contains(origin)).cloned();
    let asks = request.method() == Method::OPTIONS
        && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = if asks {
        preflight(template, origin.is_some(), request.extensions().get())
    } else {
        if origin.is_some() {
            request.extensions_mut().insert(AllowedOrigin);
        }
        next.run(request).await
    };
    let headers = response.headers_mut();
    // Without `Vary`, a cache could give one site's answer to another site.
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        let exposed = HeaderValue::from_static(EXPOSED);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
    }
    response
}

/// The answer to a preflight request.
fn preflight(template: &'static str, is_allowed: bool, watch: Option<&Stopwatch>) -> Response {
    let response = if is_allowed {
        let method = if template.ends_with("/views") || template.ends_with("/query") {
            "POST"
        } else {
            "GET"
        };
        let headers = [
            (header::ACCESS_CONTROL_ALLOW_METHODS, method),
            (header::ACCESS_CONTROL_ALLOW_HEADERS, HEADERS),
            (header::ACCESS_CONTROL_MAX_AGE, MAX_AGE),
        ];
        (StatusCode::NO_CONTENT, headers).into_response()
    } else {
        let detail =
            "pages of this origin may not call here; http.cors_origins names those that may";
        Problem::new(Kind::CrossSite, detail).into_response()
    };
    if let Some(watch) = watch {
        watch.measure(|| Meters::of(template));
    }
    response
}
