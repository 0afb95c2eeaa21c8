//! The OpenAPI document, made of the routes that are served, and a page to browse it.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Router;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Content, OpenApi, Ref, RefOr, Response, ResponseBuilder};
use utoipa::{IntoResponses, PartialSchema as _, ToSchema as _};
use utoipa_axum::router::OpenApiRouter;
use utoipa_swagger_ui::{Config, SwaggerUi};

use super::problem::{PROBLEM_JSON, Problem};
use super::{Api, contract};
use crate::config::Scope;

/// How the document calls the bearer tokens.
const SCHEME: &str = "token";

#[derive(utoipa::OpenApi)]
#[openapi(
    info(title = "Fairlane", description = "Events in, operators' view and control of the queues."),
    tags(
        (name = "events", description = "Events onto the bus"),
        (name = "pipelines", description = "Whole pipelines"),
        (name = "bots", description = "One bot of a pipeline: its queue, its lease, its share"),
        (name = "dead letters", description = "Events that gave up"),
        (name = "counters", description = "Views of ads: totals at once, days within seconds"),
        (name = "automations", description = "Rules of a bot: what is done on which events, for whom; and the profiles that they see"),
        (name = "notifications", description = "A URL is called later: at its time, once, if it is still wanted"),
        (name = "admission", description = "Which requests are begun while more come than can be answered in time"),
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
        Some("A token of auth.tokens; none is asked for where there are none".into());
    components.add_security_scheme(SCHEME, SecurityScheme::Http(bearer));
    let mut schemas = vec![(Problem::name().into_owned(), Problem::schema())];
    Problem::schemas(&mut schemas);
    components.schemas.extend(schemas);
    document.components = Some(components);
    OpenApiRouter::with_openapi(document)
}

/// `/openapi.json` and `/docs`. The page is in the binary and asks nobody else for anything.
pub(super) fn routes(document: &OpenApi) -> Router {
    let config = Config::default().validator_url("none").try_it_out_enabled(true);
    let document = contract::complete(document);
    SwaggerUi::new("/docs").external_url_unchecked("/openapi.json", document).config(config).into()
}

/// Notes in every operation which scope it asks for, or which other that is as good, and what everything guarded may answer.
pub(super) fn note_access(document: &mut OpenApi, scope: Scope, or: Option<Scope>) {
    for operation in document.paths.paths.values_mut().flat_map(operations) {
        let scopes = [Some(scope), or].into_iter().flatten();
        let ways = scopes.map(|scope| SecurityRequirement::new(SCHEME, [scope.as_str()]));
        operation.security = Some(ways.collect());
        for (code, response) in GuardedProblems::responses() {
            // The operation's own words tell more.
            operation.responses.responses.entry(code).or_insert(response);
        }
    }
}

/// Notes in every operation that it asks for no token, and what it may answer.
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

/// What every guarded route may answer.
struct GuardedProblems;

impl IntoResponses for GuardedProblems {
    fn responses() -> Responses {
        problems(&[
            (400, "A parameter, a header or the body cannot be used; `errors` names it"),
            (401, "No token, or an unknown one"),
            (403, "The token lacks the scope or the bot, or another site's page sent this"),
            (408, "The body did not arrive within 10 s"),
            (413, "The body has more bytes than the route takes, 1 MiB at most"),
            (421, "Without tokens: called by a name that is not in http.hosts"),
            (
                429,
                "The quota of the token or bot is used up, or it asks for much more than others do while there is not room for all; Retry-After tells when to come again",
            ),
            (500, "A fault of the server; its log tells more"),
            (
                503,
                "Redis is unavailable or full, or more requests come than can be answered in time (x-shed-reason); Retry-After tells when to come again",
            ),
            (504, "The time of x-deadline-ms is over, or less than the request takes"),
        ])
    }
}

/// What a route that nobody has to have a token for may answer besides.
pub(super) struct Open;

impl IntoResponses for Open {
    fn responses() -> Responses {
        problems(&[
            (400, "A header cannot be used; `errors` names it"),
            (408, "The body did not arrive within 10 s"),
            (413, "The body has more bytes than the route takes"),
            (504, "The time of x-deadline-ms is over, or less than the request takes"),
        ])
    }
}

/// What a route with parameters may answer besides.
pub(super) struct Parameters;

impl IntoResponses for Parameters {
    fn responses() -> Responses {
        problems(&[(400, "A parameter cannot be used; `errors` names it")])
    }
}

/// What a route below one pipeline may answer besides.
pub(super) struct OfPipeline;

impl IntoResponses for OfPipeline {
    fn responses() -> Responses {
        problems(&[
            (400, "A parameter cannot be used; `errors` names it"),
            (404, "There is no such pipeline; `detail` names those there are"),
        ])
    }
}

/// What a route that deletes events may answer besides.
pub(super) struct Deleting;

impl IntoResponses for Deleting {
    fn responses() -> Responses {
        problems(&[(409, "The pipeline keeps views or notifications, which are not deleted")])
    }
}

/// What a route of the counters may answer besides.
pub(super) struct OfCounters;

impl IntoResponses for OfCounters {
    fn responses() -> Responses {
        problems(&[
            (400, "A parameter cannot be used; `errors` names it"),
            (404, "The counters do not run here; `detail` says why"),
            (
                503,
                "Redis is unavailable or full, or both stores are unavailable; Retry-After tells when to come again",
            ),
        ])
    }
}

/// What an import may answer besides.
pub(super) struct OfImports;

impl IntoResponses for OfImports {
    fn responses() -> Responses {
        let mut responses = OfCounters::responses();
        responses.extend(problems(&[
            (400, "A parameter or a line cannot be used; `errors` names each"),
            (409, "Lines before these were not imported; `detail` says where to go on"),
            (
                503,
                "Redis is unavailable or nearly full, or many records of the bot wait to be written; Retry-After tells when to come again",
            ),
        ]));
        responses
    }
}

/// What a route of the counters may answer besides that asks MongoDB alone.
pub(super) struct OfStoredCounters;

impl IntoResponses for OfStoredCounters {
    fn responses() -> Responses {
        let mut responses = OfCounters::responses();
        responses.extend(problems(&[(
            503,
            "MongoDB is unavailable, or another export runs; Retry-After tells when to come again",
        )]));
        responses
    }
}

/// What a route of the automations may answer besides.
pub(super) struct OfAutomations;

impl IntoResponses for OfAutomations {
    fn responses() -> Responses {
        problems(&[
            (400, "A parameter cannot be used; `errors` names it"),
            (404, "There is no such thing, or rules are not evaluated here; `detail` says which"),
            (
                503,
                "Redis or MongoDB is unavailable, or MongoDB does not answer a reader in time; Retry-After tells when to come again",
            ),
        ])
    }
}

/// What a route that changes a rule may answer besides.
pub(super) struct OfVersion;

impl IntoResponses for OfVersion {
    fn responses() -> Responses {
        problems(&[(412, "The rule is not the one of If-Match, or there is one: nothing changed")])
    }
}

/// What a route of the notifications may answer besides.
pub(super) struct OfNotifications;

impl IntoResponses for OfNotifications {
    fn responses() -> Responses {
        problems(&[
            (400, "A parameter cannot be used; `errors` names it"),
            (404, "Notifications do not run here; `detail` says why"),
        ])
    }
}

/// What a route of one notification may answer besides.
pub(super) struct OfNotification;

impl IntoResponses for OfNotification {
    fn responses() -> Responses {
        problems(&[
            (400, "A parameter cannot be used; `errors` names it"),
            (404, "There is no such notification, or they do not run here; `detail` says which"),
        ])
    }
}

/// What a route that changes a notification may answer besides.
pub(super) struct Amending;

impl IntoResponses for Amending {
    fn responses() -> Responses {
        problems(&[(409, "It is being sent or has ended. Nothing was changed")])
    }
}

/// What a route with a body may answer besides.
pub(super) struct Body;

impl IntoResponses for Body {
    fn responses() -> Responses {
        problems(&[
            (400, "The body cannot be used; `errors` names the field or the event"),
            (408, "The body did not arrive within 10 s"),
            (415, "The body is of a kind that is not read here"),
        ])
    }
}

/// What a route of a lease may answer besides.
pub(super) struct OfLease;

impl IntoResponses for OfLease {
    fn responses() -> Responses {
        problems(&[
            (404, "There is no such lease: the text was changed, or is of another deployment"),
            (409, "The lease is gone: completed before, run out or revoked. Nothing was changed"),
            (422, "`ack` is more than the slice has"),
        ])
    }
}

/// What a route without a body may answer besides, should there be one.
pub(super) struct Bodiless;

impl IntoResponses for Bodiless {
    fn responses() -> Responses {
        problems(&[
            (
                400,
                "A parameter cannot be used, or there is a body, which this request does not take",
            ),
            (408, "The body did not arrive within 10 s"),
        ])
    }
}
