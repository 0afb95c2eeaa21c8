//! Web pages: rendered on the server, readable without scripts, protected by the same tokens and
//! scopes as the other routes. A browser keeps a session in a cookie that no script can read and
//! that no other site's page can send.

mod attempts;
mod audit;
mod bot;
mod counters;
mod dead;
mod event;
mod explain;
mod glance;
mod lines;
mod live;
mod login;
mod notifications;
mod overview;
mod pipeline;
mod problems;
mod publish;
mod rule;
mod runbook;
mod scheduled;
mod shared;
mod streams;
mod theme;
mod times;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Redirect, Response};
use axum::{Router, routing};
use maud::{DOCTYPE, Markup, html};

use self::explain::explained;
pub(super) use self::explain::{explain, page_of, wants_page};
pub(crate) use self::live::Live;
pub(super) use self::theme::dress;
use super::Api;
use super::auth::{Access, Guard};
use super::parameters::Parameters;
use super::problem::Problem;
use crate::config::Scope;
use crate::trail::{REASON_MAX, Reason};

const STYLE: &str = concat!(include_str!("style.css"), include_str!("bot/bot.css"));
const SCRIPT: &str = include_str!("live.js");
const ICON: &str = include_str!("icon.svg");
/// The pages load only resources of this server, and contain no inline script or style.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
);

/// The routes of all pages.
pub(super) fn routes(
    api: Arc<Api>,
    access: &Arc<Access>,
    guarding: impl Fn(Scope) -> Guard,
) -> Router {
    let guarded = |scope, routes: Router<Arc<Api>>| {
        routes.route_layer(from_fn_with_state(guarding(scope), guard))
    };
    let reading = Router::new()
        .route("/", routing::get(overview::show))
        .route("/pipelines/{pipeline}", routing::get(pipeline::show))
        .route("/pipelines/{pipeline}/dead", routing::get(dead::list))
        .route("/pipelines/{pipeline}/dead/{id}", routing::get(dead::show))
        .route("/counters", routing::get(counters::show))
        .route("/runbook", routing::get(runbook::show))
        .route("/events", routing::get(event::show))
        .route("/events/{event}", routing::get(event::show_one))
        .route("/bots", routing::get(bot::ask))
        .route("/bots/{bot}", routing::get(bot::show))
        .route("/bots/{bot}/rules", routing::get(rule::list))
        .route("/bots/{bot}/scheduled", routing::get(scheduled::list))
        .route("/notifications", routing::get(notifications::show));
    let operating = Router::new()
        .route("/audit", routing::get(audit::show))
        .route("/pipelines/{pipeline}/pause", routing::post(pipeline::pause))
        .route("/pipelines/{pipeline}/resume", routing::post(pipeline::resume))
        .route(
            "/pipelines/{pipeline}/dead/redrive",
            routing::get(dead::ask_redrive_all).post(dead::redrive_all),
        )
        .route(
            "/pipelines/{pipeline}/dead/drop",
            routing::get(dead::ask_drop_all).post(dead::drop_all),
        )
        .route("/pipelines/{pipeline}/dead/chosen", routing::post(dead::chosen))
        .route("/pipelines/{pipeline}/dead/{id}/redrive", routing::post(dead::redrive))
        .route("/pipelines/{pipeline}/dead/{id}/drop", routing::post(dead::drop_one))
        .route("/bots/{bot}/{pipeline}/pause", routing::post(bot::pause))
        .route("/bots/{bot}/{pipeline}/resume", routing::post(bot::resume))
        .route("/bots/{bot}/{pipeline}/release", routing::post(bot::release))
        .route("/bots/{bot}/{pipeline}/purge", routing::post(bot::purge))
        .route("/bots/{bot}/{pipeline}/set", routing::post(bot::set))
        .route("/bots/{bot}/rule", routing::get(rule::edit).post(rule::act))
        .route("/notifications/{notification}/cancel", routing::post(scheduled::cancel))
        .route("/notifications/{notification}/send", routing::post(scheduled::send))
        .route("/notifications/dead/{id}/redrive", routing::post(notifications::redrive))
        .route(
            "/notifications/dead/redrive",
            routing::get(dead::ask_redrive_notifications).post(dead::redrive_notifications),
        );
    let publishing =
        Router::new().route("/publish", routing::get(publish::ask).post(publish::publish));
    guarded(Scope::Read, reading)
        .merge(guarded(Scope::Publish, publishing))
        .merge(guarded(Scope::Operate, operating))
        .with_state(api)
        .merge(login::routes(Arc::clone(access)))
        .route("/theme", routing::post(theme::choose))
        .route("/style.css", routing::get(async || asset("text/css", STYLE)))
        .route("/live.js", routing::get(async || asset("text/javascript", SCRIPT)))
        .route("/icon.svg", routing::get(async || asset("image/svg+xml", ICON)))
}

fn asset(kind: &'static str, text: &'static str) -> impl IntoResponse {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "max-age=300"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (headers, text)
}

/// Admits requests whose token has the scope. Others are sent to the login page.
async fn guard(State(guard): State<Guard>, mut request: Request, next: Next) -> Response {
    match guard.admit(&mut request, true) {
        Ok(_taken) => next.run(request).await,
        Err(problem) if problem.status() == StatusCode::UNAUTHORIZED => {
            // The browser does not send a form again after the login.
            let is_page = request.method() == Method::GET;
            let path = if is_page { login::path(request.uri()) } else { "/login".to_owned() };
            Redirect::to(&path).into_response()
        }
        Err(problem) => Refusal(problem).into_response(),
    }
}

/// A problem, rendered as a page.
#[derive(Debug)]
pub(super) struct Refusal(Problem);

impl<E: Into<Problem>> From<E> for Refusal {
    fn from(problem: E) -> Self {
        Self(problem.into())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self(problem) = self;
        let title = problem.title();
        let body = explained(title, problem.detail());
        page_for(problem, title, &body)
    }
}

/// Whether the request is that of a browser for a page.
fn browses(headers: &HeaderMap) -> bool {
    let kinds = headers.get(header::ACCEPT).and_then(|kinds| kinds.to_str().ok());
    kinds.is_some_and(|kinds| kinds.contains("text/html"))
}

/// A complete page.
fn page(title: &str, body: &Markup) -> Response {
    page_with(title, body, false)
}

/// A complete page that tells of a problem, with its status and headers.
fn page_for(problem: Problem, title: &str, body: &Markup) -> Response {
    let mut response = (problem.status(), page(title, body)).into_response();
    response.headers_mut().extend(problem.headers);
    response
}

/// The heading of a page.
fn headline(text: &str, has_token: bool) -> Markup {
    html! {
        div.title {
            h1 { (text) }
            @if has_token {
                form method="post" action="/logout" { button type="submit" { "Log out" } }
            }
        }
    }
}

/// A complete page. A live page updates itself.
fn page_with(title: &str, body: &Markup, live: bool) -> Response {
    framed(document(title, body, live))
}

/// The text of a complete page.
fn document(title: &str, body: &Markup, live: bool) -> String {
    let look = theme::Look::now();
    let page = html! {
        (DOCTYPE)
        html lang="en" data-theme=[look.forced()] {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content=(look.schemes());
                title { (title) " – Fairlane" }
                link rel="stylesheet" href="/style.css";
                link rel="icon" href="/icon.svg" type="image/svg+xml";
                @if live { script src="/live.js" defer {} }
            }
            body {
                header {
                    a.brand href="/" { "Fairlane" }
                    nav aria-label="Pages" {
                        a href="/" { "Overview" }
                        a href="/events" { "Events" }
                        a href="/bots" { "Bots" }
                        a href="/notifications" { "Notifications" }
                        a href="/counters" { "Counters" }
                        a href="/audit" { "Audit" }
                        a href="/docs/" { "API" }
                    }
                    form.find method="get" action="/events" role="search" aria-label="Events" {
                        input name="id" required maxlength="1024" placeholder="Find an event" aria-label="Id of an event";
                    }
                    @if live { p #live role="status" { a href="" { "Refresh" } } }
                }
                main data-live[live] { (body) }
                footer { (look.switch()) }
            }
        }
    };
    page.into_string()
}

/// The answer with the text of a page.
pub(super) fn framed(page: impl Into<Body>) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        // With `no-referrer` browsers send forms with `Origin: null`, which Fairlane refuses.
        (header::REFERRER_POLICY, HeaderValue::from_static("same-origin")),
        // The page shows only what this token may see.
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    ];
    (headers, page.into()).into_response()
}

/// The reason in the form of a pause; an empty field is none.
fn reason(mut fields: Parameters) -> Result<Option<Reason>, Problem> {
    let text = fields.take("reason").unwrap_or_default();
    fields.done(&["reason"])?;
    let reason = (!text.trim().is_empty()).then(|| Reason::parse(&text)).transpose();
    reason.map_err(|error| Problem::field("reason", error.to_string()))
}

/// The field of the reason in the form of a pause.
fn reason_field() -> Markup {
    html! {
        input name="reason" maxlength=(REASON_MAX) size="24" placeholder="Reason" aria-label="Reason of the pause";
    }
}

/// The path and query of a request, for the way back after the login.
fn place(uri: &Uri) -> &str {
    uri.path_and_query().map_or("/", axum::http::uri::PathAndQuery::as_str)
}

/// The first parts of the paths of pages.
const PAGES: [&str; 10] = [
    "/notifications",
    "/bots",
    "/pipelines",
    "/counters",
    "/events",
    "/publish",
    "/runbook",
    "/login",
    "/",
    "/audit",
];

/// A path that a form or a query names, if it is a page of this server; otherwise the first page.
/// Other routes may change data.
fn local(to: &str) -> &str {
    let is_ours = PAGES.iter().any(|page| {
        to.strip_prefix(page).is_some_and(|rest| {
            let begins: &[char] = if *page == "/" { &['?'] } else { &['?', '/'] };
            let is_page = rest.is_empty() || rest.starts_with(begins);
            is_page && rest.bytes().all(|byte| byte.is_ascii_graphic())
        })
    });
    if is_ours { to } else { "/" }
}

/// Groups digits: 1,234,567.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a time in ms for people.
fn spoken(ms: u64) -> String {
    match ms {
        1..1_000 => format!("{ms} ms"),
        0 => "0 s".to_owned(),
        1_000..60_000 => match (ms + 50) / 100 {
            tenths if tenths.is_multiple_of(10) => format!("{} s", tenths / 10),
            tenths => format!("{}.{} s", tenths / 10, tenths % 10),
        },
        60_000..3_600_000 => format!("{} min", ms / 60_000),
        3_600_000..86_400_000 => format!("{} h", ms / 3_600_000),
        _ => format!("{} d", ms / 86_400_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_times_are_written_for_people() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        let times = [0, 999, 1_000, 1_500, 1_960, 2_049, 61_000, 7_200_000];
        let written = ["0 s", "999 ms", "1 s", "1.5 s", "2 s", "2 s", "1 min", "2 h"];
        assert_eq!(times.map(spoken), written);
        assert_eq!(spoken(90_000_000), "1 d");
    }
}
