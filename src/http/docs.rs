//! The OpenAPI document, generated from the routes, and a page to browse it.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::http::{HeaderValue, header};
use axum::middleware::map_response;
use axum::{Router, response as answer};
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Content, OpenApi, Ref, RefOr, Response, ResponseBuilder};
use utoipa::{IntoResponses, PartialSchema as _, ToSchema as _};
use utoipa_axum::router::OpenApiRouter;
use utoipa_swagger_ui::{Config, SwaggerUi};

use super::problem::{PROBLEM_JSON, Problem};
use super::{Api, contract};
use crate::config::Scope;

/// The name of the bearer token scheme in the document.
const SCHEME: &str = "token";

#[derive(utoipa::OpenApi)]
#[openapi(
    info(title = "Fairlane", description = "Publish events, and inspect and control the queues."),
    tags(
        (name = "events", description = "Publish events to the bus"),
        (name = "pipelines", description = "Whole pipelines"),
        (name = "bots", description = "One bot of a pipeline: its queue, its lease, its weight"),
        (name = "dead letters", description = "Events that failed for good"),
        (name = "counters", description = "Views of ads: totals immediately, days within seconds"),
        (name = "automations", description = "Rules of a bot: actions on events of subscribers; and the profiles that rules use"),
        (name = "notifications", description = "Scheduled HTTP callbacks: never early, rechecked before sending"),
        (name = "admission", description = "Admission control: which requests to accept under overload"),
        (name = "leases", description = "For receivers of push handlers that answered 202"),
        (name = "health", description = "For orchestrators and load balancers"),
    )
)]
struct Document;

/// The document without routes.
pub(super) fn begin() -> OpenApiRouter<Arc<Api>> {
    let mut document = <Document as utoipa::OpenApi>::openapi();
    let mut components = document.components.take().unwrap_or_default();
    let mut bearer = Http::new(HttpAuthScheme::Bearer);
    bearer.description =
        Some("A token of auth.tokens; not required if auth.tokens is empty".into());
    components.add_security_scheme(SCHEME, SecurityScheme::Http(bearer));
    let mut schemas = vec![(Problem::name().into_owned(), Problem::schema())];
    Problem::schemas(&mut schemas);
    components.schemas.extend(schemas);
    document.components = Some(components);
    OpenApiRouter::with_openapi(document)
}

/// `/openapi.json` and `/docs`. The page is part of the binary and loads nothing from other
/// servers.
pub(super) fn routes(document: &OpenApi) -> Router {
    let config = Config::default().validator_url("none").try_it_out_enabled(true);
    let document = contract::complete(document);
    let page = SwaggerUi::new("/docs").external_url_unchecked("/openapi.json", document);
    Router::from(page.config(config)).layer(map_response(protect))
}

/// The page loads only resources of this server. Its styles and pictures are in its scripts.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self'; connect-src 'self'; img-src 'self' data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
);

async fn protect(mut response: answer::Response) -> answer::Response {
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, POLICY);
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("same-origin"));
    response
}

/// Adds to every guarded operation its required scope, or the alternatives, and the common answers.
pub(super) fn note_access(document: &mut OpenApi, scope: Scope, or: Option<Scope>) {
    for operation in document.paths.paths.values_mut().flat_map(operations) {
        let scopes = [Some(scope), or].into_iter().flatten();
        let ways = scopes.map(|scope| SecurityRequirement::new(SCHEME, [scope.as_str()]));
        operation.security = Some(ways.collect());
        for (code, response) in GuardedProblems::responses() {
            // The operation's own description has priority.
            operation.responses.responses.entry(code).or_insert(response);
        }
    }
}

/// Marks public operations as such, and adds their common answers.
pub(super) fn note_capability(document: &mut OpenApi) {
    for operation in document.paths.paths.values_mut().flat_map(operations) {
        operation.security = Some(vec![SecurityRequirement::default()]);
        let mut responses = GuardedProblems::responses();
        responses.remove("401");
        for (code, response) in responses {
            operation.responses.responses.entry(code).or_insert(response);
        }
    }
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    let PathItem { get, put, post, delete, patch, .. } = item;
    [get, put, post, delete, patch].into_iter().filter_map(Option::as_mut)
}

type Responses = BTreeMap<String, RefOr<Response>>;

fn problems(all: &[(u16, &str)]) -> Responses {
    let response = |text: &str| {
        let content = Content::new(Some(Ref::from_schema_name(Problem::name())));
        ResponseBuilder::new().description(text).content(PROBLEM_JSON, content).build()
    };
    all.iter().map(|(code, text)| (code.to_string(), response(text).into())).collect()
}

/// The common answers of guarded routes.
struct GuardedProblems;

impl IntoResponses for GuardedProblems {
    fn responses() -> Responses {
        problems(&[
            (400, "A parameter, a header or the body is not valid; `errors` names it"),
            (401, "No token, or an unknown one"),
            (403, "The token lacks the scope or the bot, or another site's page sent this"),
            (408, "The body did not arrive within 10 s"),
            (413, "The body has more bytes than the route takes, 1 MiB at most"),
            (421, "Without tokens: the host name is not in http.hosts"),
            (
                429,
                "The token or bot exceeded its quota, or its fair share under overload, or the bot holds as much as its quota; Retry-After says when to retry",
            ),
            (500, "An internal error; the log of the server has details"),
            (
                503,
                "Redis is unavailable or full, or the request was shed under overload (x-shed-reason); Retry-After says when to retry",
            ),
            (504, "The deadline (x-deadline-ms) passed, or is shorter than the request takes"),
        ])
    }
}

/// Further answers of public routes.
pub(super) struct Open;

impl IntoResponses for Open {
    fn responses() -> Responses {
        problems(&[
            (400, "A header is not valid; `errors` names it"),
            (408, "The body did not arrive within 10 s"),
            (413, "The body has more bytes than the route takes"),
            (504, "The deadline (x-deadline-ms) passed, or is shorter than the request takes"),
        ])
    }
}

/// Further answers of routes with parameters.
pub(super) struct Parameters;

impl IntoResponses for Parameters {
    fn responses() -> Responses {
        problems(&[(400, "A parameter cannot be used; `errors` names it")])
    }
}

/// Further answers of routes of one pipeline.
pub(super) struct OfPipeline;

impl IntoResponses for OfPipeline {
    fn responses() -> Responses {
        problems(&[
            (400, "A parameter cannot be used; `errors` names it"),
            (404, "The pipeline does not exist; `detail` lists the existing ones"),
        ])
    }
}

/// Further answers of the search for an event.
pub(super) struct OfEvent;

impl IntoResponses for OfEvent {
    fn responses() -> Responses {
        problems(&[(404, "Nothing is known of the event; `detail` says what was searched")])
    }
}

/// Further answers of routes that delete events.
pub(super) struct Deleting;

impl IntoResponses for Deleting {
    fn responses() -> Responses {
        problems(&[(409, "The pipeline keeps views or notifications, which are not deleted")])
    }
}

/// Further answers of routes that set something for a bot.
pub(super) struct Marking;

impl IntoResponses for Marking {
    fn responses() -> Responses {
        problems(&[(409, "The token has set this for the maximum number of bots")])
    }
}

/// Further answers of routes of the counters.
pub(super) struct OfCounters;

impl IntoResponses for OfCounters {
    fn responses() -> Responses {
        problems(&[
            (400, "A parameter cannot be used; `errors` names it"),
            (404, "The counters do not run here; `detail` says why"),
            (
                503,
                "Redis is unavailable or full, or both stores are unavailable; Retry-After says when to retry",
            ),
        ])
    }
}

/// Further answers of an import.
pub(super) struct OfImports;

impl IntoResponses for OfImports {
    fn responses() -> Responses {
        let mut responses = OfCounters::responses();
        responses.extend(problems(&[
            (400, "A parameter or a line cannot be used; `errors` names each"),
            (409, "Lines before these were not imported; `detail` says where to continue"),
            (
                503,
                "Redis is unavailable or nearly full, or many replacements of the bot wait to be written; Retry-After says when to retry",
            ),
        ]));
        responses
    }
}

/// Further answers of counter routes that read only MongoDB.
pub(super) struct OfStoredCounters;

impl IntoResponses for OfStoredCounters {
    fn responses() -> Responses {
        let mut responses = OfCounters::responses();
        responses.extend(problems(&[(
            503,
            "MongoDB is unavailable, or other exports run; Retry-After says when to retry",
        )]));
        responses
    }
}

/// Further answers of routes of the automations.
pub(super) struct OfAutomations;

impl IntoResponses for OfAutomations {
    fn responses() -> Responses {
        problems(&[
            (400, "A parameter cannot be used; `errors` names it"),
            (404, "The object does not exist, or automations do not run; `detail` says which"),
            (
                503,
                "Redis or MongoDB is unavailable, or MongoDB does not answer a reader in time; Retry-After says when to retry",
            ),
        ])
    }
}

/// Further answers of routes that change a rule.
pub(super) struct OfVersion;

impl IntoResponses for OfVersion {
    fn responses() -> Responses {
        problems(&[(412, "The rule does not match If-Match or If-None-Match; nothing changed")])
    }
}

/// Further answers of routes of the notifications.
pub(super) struct OfNotifications;

impl IntoResponses for OfNotifications {
    fn responses() -> Responses {
        problems(&[
            (400, "A parameter cannot be used; `errors` names it"),
            (404, "Notifications do not run; `detail` says why"),
        ])
    }
}

/// Further answers of routes of one notification.
pub(super) struct OfNotification;

impl IntoResponses for OfNotification {
    fn responses() -> Responses {
        problems(&[
            (400, "A parameter cannot be used; `errors` names it"),
            (
                404,
                "The notification does not exist, or notifications do not run; `detail` says which",
            ),
        ])
    }
}

/// Further answers of routes that change a notification.
pub(super) struct Amending;

impl IntoResponses for Amending {
    fn responses() -> Responses {
        problems(&[(409, "The notification is in flight or has ended; nothing changed")])
    }
}

/// Further answers of routes with a body.
pub(super) struct Body;

impl IntoResponses for Body {
    fn responses() -> Responses {
        problems(&[
            (400, "The body cannot be used; `errors` names the field or the event"),
            (408, "The body did not arrive within 10 s"),
            (415, "The media type of the body is not supported"),
        ])
    }
}

/// Further answers of routes of a lease.
pub(super) struct OfLease;

impl IntoResponses for OfLease {
    fn responses() -> Responses {
        problems(&[
            (
                404,
                "The lease does not exist: the token was altered, or belongs to another deployment",
            ),
            (409, "The lease has ended: completed, expired or revoked. Nothing changed"),
            (422, "`ack` is more than the slice has"),
            (
                429,
                "Too many calls for leases of this bot, or for large slices, wait. Nothing changed; Retry-After says when to retry",
            ),
        ])
    }
}

/// Further answers of a reload.
pub(super) struct OfReload;

impl IntoResponses for OfReload {
    fn responses() -> Responses {
        problems(&[
            (400, "The configuration cannot be used, or the request has a body: nothing changed"),
            (404, "This process does not reload: a program with handlers of its own"),
            (408, "The body did not arrive within 10 s"),
            (
                503,
                "An instance with it does not start, or this process stops: nothing changed. Or the request was shed under overload (x-shed-reason). Retry-After says when to retry",
            ),
            (
                504,
                "The deadline passed. The reload may go on: the log and /v1/audit tell its end. Send a longer x-deadline-ms",
            ),
        ])
    }
}

/// Further answers of routes without a body.
pub(super) struct Bodiless;

impl IntoResponses for Bodiless {
    fn responses() -> Responses {
        problems(&[
            (
                400,
                "A parameter is not valid, or the request has a body, which this route does not accept",
            ),
            (408, "The body did not arrive within 10 s"),
        ])
    }
}
