//! Problems as pages, for people with a browser.

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{MatchedPath, Request};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use maud::{Markup, html};
use serde::Deserialize;

use super::super::problem::{PROBLEM_JSON, Problem};
use super::{browses, document, local, page};

/// What a problem says.
#[derive(Deserialize)]
struct Told {
    title: String,
    detail: String,
}

/// Whether a browser asks for a page, or for a path that is not served.
pub(in super::super) fn wants_page(request: &Request) -> bool {
    let template = request.extensions().get::<MatchedPath>();
    browses(request.headers()) && template.is_none_or(|path| is_for_people(path.as_str()))
}

/// Whether a route answers with pages.
fn is_for_people(template: &str) -> bool {
    local(template) == template
        || matches!(template, "/logout" | "/theme")
        || template.starts_with("/docs")
}

/// The page of a problem, to be kept.
pub(in super::super) fn page_of(problem: &Problem) -> Bytes {
    let title = problem.title();
    document(title, &explained(title, problem.detail()), false).into()
}

/// The content of the page of a problem.
pub(super) fn explained(title: &str, detail: &str) -> Markup {
    html! {
        h1 { (title) }
        p { (detail) }
    }
}

/// Answers a browser with a page instead of a problem document.
pub(in super::super) async fn explain(request: Request, next: Next) -> Response {
    if !wants_page(&request) {
        return next.run(request).await;
    }
    let is_served = request.extensions().get::<MatchedPath>().is_some();
    let path = request.uri().path().to_owned();
    let (mut parts, body) = next.run(request).await.into_parts();
    if parts.headers.get(header::CONTENT_TYPE).is_none_or(|kind| kind != PROBLEM_JSON) {
        return Response::from_parts(parts, body);
    }
    // It is in memory already.
    let body = to_bytes(body, usize::MAX).await.unwrap_or_default();
    let Ok(Told { title, detail }) = serde_json::from_slice(&body) else {
        return Response::from_parts(parts, Body::from(body));
    };
    let mut page = if is_served || parts.status != StatusCode::NOT_FOUND {
        page(&title, &explained(&title, &detail))
    } else {
        page("Page not found", &missing(&path))
    };
    *page.status_mut() = parts.status;
    for of_body in [header::CONTENT_TYPE, header::CONTENT_LENGTH] {
        parts.headers.remove(of_body);
    }
    page.headers_mut().extend(parts.headers);
    page
}

fn missing(path: &str) -> Markup {
    html! {
        h1 { "Page not found" }
        p { "Fairlane serves nothing at " code { (path) } "." }
        p { a href="/" { "Overview" } " · " a href="/bots" { "Find a bot" } " · " a href="/docs/" { "All paths of the API" } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_routes_of_pages_explain_their_problems() {
        for page in ["/", "/bots/{bot}", "/login", "/theme", "/docs/{*rest}"] {
            assert!(is_for_people(page), "{page}");
        }
        for other in ["/v1/pipelines", "/healthz", "/openapi.json", "/send_delayed", "/live.js"] {
            assert!(!is_for_people(other), "{other}");
        }
    }
}
