//! The rules of a bot, and the profiles that rules use.

mod checking;
mod profiles;
pub(super) mod test;

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Json, Response};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Api;
use super::acting;
use super::auth::Caller;
use super::docs::{Bodiless, Body, OfAutomations, OfVersion};
use super::extract::{self, NoBody, Path, Query};
use super::page::fitting;
use super::problem::{Kind, Problem};
use crate::automations::queue::RuleStats;
use crate::automations::rule::{Action, Rule, Unusable};
use crate::automations::store::{Expected, Stored, WriteError};
use crate::automations::{EditError, Editor};
use crate::clock::rfc3339;
use crate::counters::{self, Counters};
use crate::id::{BotId, RuleId};
use crate::notifications::Notifications;
use crate::trail::Action as Act;

/// Requires the scope `publish`.
pub(super) fn publishing() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(profiles::put))
}

/// Requires the scope `read`.
pub(super) fn reading() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default()
        .routes(routes!(list))
        .routes(routes!(get))
        .routes(routes!(test::test))
        .routes(routes!(profiles::get))
}

/// Requires the scope `operate`.
pub(super) fn operating() -> OpenApiRouter<Arc<Api>> {
    OpenApiRouter::default().routes(routes!(put, delete))
}

impl Api {
    /// The rules, if automations run.
    pub(super) fn automations(&self) -> Result<&Editor, Problem> {
        self.services.of(crate::automations::PIPELINE).map_err(|why| {
            Problem::new(Kind::NoAutomations, format!("rules are not evaluated here: {why}"))
        })
    }

    /// The rules of a bot that the caller has access to.
    pub(super) fn automations_of(&self, bot: &BotId, caller: &Caller) -> Result<&Editor, Problem> {
        caller.check_bot(bot)?;
        self.automations()
    }
}

impl From<Unusable> for Problem {
    fn from(unusable: Unusable) -> Self {
        Self::field(&unusable.field, unusable.problem)
    }
}

impl From<EditError> for Problem {
    fn from(error: EditError) -> Self {
        match error {
            EditError::Redis(error) => error.into(),
            EditError::Write(WriteError::Mongo(error)) => error.into(),
            EditError::Write(error @ (WriteError::TooMany | WriteError::TooLarge(_))) => {
                let detail = format!("{error}; delete a rule, or combine several into one");
                Self::new(Kind::TooManyRules, detail)
            }
            EditError::Write(error @ WriteError::TooMuchMemory(_)) => {
                let detail = format!(
                    "{error}; write shorter filters, and fewer values in actions, or delete a rule"
                );
                Self::new(Kind::TooManyRules, detail)
            }
            EditError::Write(WriteError::Contended) => {
                let detail = "nothing was changed: other clients change rules of this bot at the same time; retry";
                Self::new(Kind::Busy, detail).retry_after(1)
            }
            EditError::Write(WriteError::Unexpected(version)) => {
                let detail = match &version {
                    Some(version) => format!("the rule has the version \"{version}\""),
                    None => "there is no such rule".to_owned(),
                };
                let detail =
                    format!("nothing was changed: {detail}; read the current version, then retry");
                let problem = Self::new(Kind::RuleChanged, detail);
                match version.and_then(|version| etag(&version)) {
                    Some(etag) => problem.header(header::ETAG, etag),
                    None => problem,
                }
            }
        }
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub(super) struct BotPath {
    /// The bot.
    bot: BotId,
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
struct RulePath {
    /// The bot.
    bot: BotId,
    /// The rule. The rules of a bot are evaluated in the order of their ids.
    rule: RuleId,
}

/// The JSON form of a rule in a request. The answer of `GET` is accepted too.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    #[serde(default)]
    name: String,
    on: Vec<String>,
    #[serde(default)]
    filter: Option<String>,
    actions: Vec<Action>,
    enabled: Option<bool>,
    /// Read-only fields, which the answer of `GET` contains.
    id: Option<RuleId>,
    #[serde(rename = "stats", default)]
    _stats: IgnoredAny,
}

impl Written {
    fn rule(self, id: &RuleId) -> Result<Rule, Problem> {
        if let Some(other) = self.id.filter(|other| other != id) {
            let detail = format!("it is {:?}, and the path says {:?}", other.as_str(), id.as_str());
            return Err(Problem::field("id", detail));
        }
        let Self { name, on, filter, actions, enabled, .. } = self;
        Ok(Rule { name, on, filter, actions, enabled: enabled.unwrap_or(true) })
    }
}

/// The rule in a text.
pub(super) fn written(id: &RuleId, text: &[u8]) -> Result<Rule, Problem> {
    extract::parse::<Written>(text)?.rule(id)
}

/// Checks a rule and writes it. Returns its version, and whether it is new.
pub(super) async fn write(
    (api, caller): (&Api, &Caller),
    (bot, id): (&BotId, &RuleId),
    rule: &Rule,
    expected: &Expected,
) -> Result<(String, bool), Problem> {
    let editor = api.automations_of(bot, caller)?;
    checking::check((api, caller), rule).await?;
    let counts = |action: &Action| matches!(action, Action::Count(_));
    let calls = |action: &Action| matches!(action, Action::Notify(_) | Action::Push(_));
    for (at, action) in rule.actions.iter().enumerate() {
        let field = || format!("actions[{at}].{}", action.name());
        if let (true, Err(why)) = (counts(action), api.services.of::<Counters>(counters::PIPELINE))
        {
            return Err(Problem::field(&field(), format!("views are not counted here: {why}")));
        }
        if calls(action) && api.services.get::<Notifications>().is_none() {
            let why = "notifications do not run here: pipelines.notifications.enabled is false";
            return Err(Problem::field(&field(), why));
        }
    }
    let work = async { Ok(editor.put(bot, id, rule, expected).await?) };
    let told =
        |(_, is_new): &(String, bool)| if *is_new { "created" } else { "changed" }.to_owned();
    let details = if rule.enabled { "enabled" } else { "disabled" };
    api.act(caller, on_rule("put rule", bot, id).details(details), work, told).await
}

/// Deletes a rule.
pub(super) async fn erase(
    (api, caller): (&Api, &Caller),
    (bot, id): (&BotId, &RuleId),
    expected: &Expected,
) -> Result<(), Problem> {
    let editor = api.automations_of(bot, caller)?;
    let work = async {
        let deleted = editor.delete(bot, id, expected).await?;
        deleted.then_some(()).ok_or_else(|| none(bot, id))
    };
    api.act(caller, on_rule("delete rule", bot, id), work, acting::done).await
}

/// A rule and its statistics.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Automation)]
pub(super) struct Shown {
    /// Its id.
    pub(super) id: RuleId,
    /// The rule itself.
    #[serde(flatten)]
    pub(super) rule: Rule,
    /// Statistics since the rule was created.
    pub(super) stats: Happened,
}

/// Statistics of a rule.
#[derive(Debug, Default, Serialize, ToSchema)]
#[schema(as = AutomationStats)]
pub(super) struct Happened {
    /// Number of matching events.
    pub(super) matched: u64,
    /// Number of actions it caused.
    pub(super) actions: u64,
    /// Number of failures to evaluate the filter or to run an action.
    pub(super) errors: u64,
    /// The last failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) last_error: Option<LastError>,
}

/// The last failure of a rule.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AutomationError)]
pub(super) struct LastError {
    /// The time of the failure.
    #[schema(format = DateTime)]
    pub(super) at: String,
    /// The id of the event.
    pub(super) event: String,
    /// The error.
    pub(super) reason: String,
}

impl From<RuleStats> for Happened {
    fn from(stats: RuleStats) -> Self {
        let RuleStats { matched, actions, errors, last } = stats;
        let last_error = last.map(|last| LastError {
            at: rfc3339(last.at_ms),
            event: last.event,
            reason: last.why,
        });
        Self { matched, actions, errors, last_error }
    }
}

/// The rules of a bot, in the order of their evaluation.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Automations)]
struct Listed {
    /// The rules.
    automations: Vec<Shown>,
    /// The cursor of the next page; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// The `cursor` of the previous page.
    cursor: Option<String>,
}

/// The rules of a bot and their statistics.
pub(super) async fn shown(editor: &Editor, bot: &BotId) -> Result<Vec<Shown>, Problem> {
    let stored = editor.rules(bot).await?;
    let mut stats = editor.queue().rule_stats(bot).await?;
    Ok(stored.into_iter().map(|stored| show(stored, &mut stats)).collect())
}

fn show(stored: Stored, stats: &mut BTreeMap<String, RuleStats>) -> Shown {
    let happened = stats.remove(stored.id.as_str()).unwrap_or_default();
    Shown { id: stored.id, rule: stored.rule, stats: happened.into() }
}

fn etag(version: &str) -> Option<HeaderValue> {
    HeaderValue::from_str(&format!("\"{version}\"")).ok()
}

fn tagged(status: StatusCode, version: &str, body: impl serde::Serialize) -> Response {
    let mut response = (status, Json(body)).into_response();
    if let Some(etag) = etag(version) {
        response.headers_mut().insert(header::ETAG, etag);
    }
    response
}

/// The conditions in `If-Match` and `If-None-Match`.
fn expected(headers: &HeaderMap) -> Result<Expected, Problem> {
    let all = |name: &header::HeaderName| -> Result<Option<String>, Problem> {
        let values: Result<Vec<&str>, _> =
            headers.get_all(name).iter().map(HeaderValue::to_str).collect();
        let values = values.map_err(|_| Problem::field(name.as_str(), "it is not readable"))?;
        Ok((!values.is_empty()).then(|| values.join(",")))
    };
    match (all(&header::IF_MATCH)?, all(&header::IF_NONE_MATCH)?) {
        (None, None) => Ok(Expected::Anything),
        (Some(_), Some(_)) => Err(Problem::field(
            "if-match",
            "it cannot be combined with if-none-match; leave out one",
        )),
        (None, Some(text)) if text.trim() == "*" => Ok(Expected::Nothing),
        (None, Some(_)) => {
            Err(Problem::field("if-none-match", "write *: the rule is written if there is none"))
        }
        (Some(text), None) if text.trim() == "*" => Ok(Expected::Something),
        (Some(text), None) => {
            let version = |tag: &str| {
                let version = tag.trim().strip_prefix('"')?.strip_suffix('"')?;
                Some(version.to_owned())
            };
            let versions: Option<Vec<String>> = text.split(',').map(version).collect();
            let versions = versions.ok_or_else(|| {
                let detail =
                    "it holds no version; send the ETag header of an answer, with its quotes, or *";
                Problem::field("if-match", detail)
            })?;
            Ok(Expected::Versions(versions))
        }
    }
}

/// Rules of a bot
///
/// In the order of their evaluation, with their statistics. A page has up to 4 MiB.
#[utoipa::path(
    get, path = "/v1/bots/{bot}/automations", tag = "automations", operation_id = "listAutomations",
    params(BotPath, ListQuery),
    responses((status = 200, description = "A page of the rules", body = Listed), OfAutomations)
)]
async fn list(
    State(api): State<Arc<Api>>,
    caller: Caller,
    uri: Uri,
    Path(BotPath { bot }): Path<BotPath>,
    Query(query): Query<ListQuery>,
) -> Result<Json<Listed>, Problem> {
    let editor = api.automations_of(&bot, &caller)?;
    let cursors = &api.gate.cursors;
    let after: Option<RuleId> = cursors.read(uri.path(), query.cursor.as_deref())?;
    let rules = shown(editor, &bot).await?.into_iter();
    let is_next = |rule: &Shown| after.as_ref().is_none_or(|after| rule.id > *after);
    let (automations, more) = fitting(rules.filter(is_next));
    let last = automations.last().filter(|_| more);
    let cursor = last.map(|last| cursors.write(uri.path(), &last.id));
    Ok(Json(Listed { automations, cursor }))
}

/// A rule
///
/// With its statistics. The header `ETag` has its version.
#[utoipa::path(
    get, path = "/v1/bots/{bot}/automations/{rule}", tag = "automations",
    operation_id = "getAutomation", params(RulePath),
    responses(
        (status = 200, description = "The rule", body = Shown,
            headers(("ETag" = String, description = "Its version"))),
        OfAutomations,
    )
)]
async fn get(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(RulePath { bot, rule }): Path<RulePath>,
) -> Result<Response, Problem> {
    let editor = api.automations_of(&bot, &caller)?;
    let stored = editor.rule(&bot, &rule).await?;
    let stored = stored.ok_or_else(|| none(&bot, &rule))?;
    let mut stats = editor.queue().rule_stats(&bot).await?;
    let version = stored.version.clone();
    Ok(tagged(StatusCode::OK, &version, show(stored, &mut stats)))
}

fn none(bot: &BotId, rule: &RuleId) -> Problem {
    let detail = format!("bot {:?} has no rule {:?}", bot.as_str(), rule.as_str());
    Problem::new(Kind::NoRule, detail)
}

/// Write a rule
///
/// Takes effect within a second, in every process. With `If-Match`, the rule is replaced only if it
/// has this version. With `If-None-Match: *`, a rule is only created, never replaced.
#[utoipa::path(
    put, path = "/v1/bots/{bot}/automations/{rule}", tag = "automations",
    operation_id = "putAutomation",
    params(
        RulePath,
        ("If-Match" = Option<String>, Header, description = "A version, or `*`: any existing rule"),
        ("If-None-Match" = Option<String>, Header, description = "`*`: no existing rule"),
    ),
    request_body = Rule,
    responses(
        (status = 201, description = "Created", body = Rule,
            headers(("ETag" = String, description = "Its version"))),
        (status = 200, description = "Changed", body = Rule,
            headers(("ETag" = String, description = "Its version"))),
        (status = 409, description = "The bot has 1,000 rules, 4 MiB of them, or too large filters",
            body = Problem, content_type = "application/problem+json"),
        OfAutomations, OfVersion, Body,
    )
)]
async fn put(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(RulePath { bot, rule: id }): Path<RulePath>,
    headers: HeaderMap,
    extract::Json(written): extract::Json<Written>,
) -> Result<Response, Problem> {
    api.automations_of(&bot, &caller)?;
    let expected = expected(&headers)?;
    let rule = written.rule(&id)?;
    let (version, is_new) = write((&api, &caller), (&bot, &id), &rule, &expected).await?;
    let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
    Ok(tagged(status, &version, rule))
}

/// Delete a rule
///
/// Takes effect within a second. Effects that it has already delayed (`emit` with a `delay`,
/// notifications) still happen.
#[utoipa::path(
    delete, path = "/v1/bots/{bot}/automations/{rule}", tag = "automations",
    operation_id = "deleteAutomation",
    params(
        RulePath,
        ("If-Match" = Option<String>, Header, description = "A version, or `*`"),
    ),
    responses((status = 204, description = "Deleted"), OfAutomations, OfVersion, Bodiless)
)]
async fn delete(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(RulePath { bot, rule }): Path<RulePath>,
    headers: HeaderMap,
    NoBody: NoBody,
) -> Result<StatusCode, Problem> {
    api.automations_of(&bot, &caller)?;
    erase((&api, &caller), (&bot, &rule), &expected(&headers)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// An action on a rule.
fn on_rule(name: &str, bot: &BotId, rule: &RuleId) -> Act {
    Act::new(name).in_built_in(crate::automations::PIPELINE).of_bot(Some(bot)).target(rule).often()
}
