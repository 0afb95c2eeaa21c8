//! The rules of a bot as a list, and the editor of a rule: its JSON, a dry run with an event, save and
//! delete. It works without scripts. What is wrong is said beside the field.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Redirect, Response};
use maud::{Markup, html};
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::Api;
use super::super::auth::Caller;
use super::super::automations::test::{self, Outcome, Trial};
use super::super::automations::{erase, shown, write, written};
use super::super::extract::{Path, Query, parse, read};
use super::super::problem::{Kind, Problem};
use super::bot::rules::{path_of_all, path_of_editor, table};
use super::{Refusal, bot, grouped, headline, page, page_for};
use crate::automations::rule::{RULE_MAX_BYTES, Rule};
use crate::automations::store::{Expected, Stored};
use crate::config::Scope;
use crate::id::{BotId, RuleId};

/// Number of rules per page.
const RULES: usize = 50;
/// Maximum number of characters of a part of a decision.
const SHOWN_MAX: usize = 2_000;

#[derive(Debug, Deserialize)]
pub(super) struct BotPath {
    bot: BotId,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    /// The last rule of the page before.
    #[serde(default)]
    after: String,
}

/// All rules, in pages.
pub(super) async fn list(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(BotPath { bot }): Path<BotPath>,
    wish: Result<Query<ListQuery>, Problem>,
) -> Result<Response, Refusal> {
    let Query(ListQuery { after }) = wish?;
    let all = shown(api.automations_of(&bot, &caller)?, &bot).await?;
    let count = all.len();
    let mut rules: Vec<_> = all.into_iter().filter(|rule| rule.id.as_str() > &*after).collect();
    let more = rules.len() > RULES;
    rules.truncate(RULES);
    let may = caller.check_scope(Scope::Operate).is_ok();
    let content = html! {
        (headline(&format!("Rules of bot {bot}"), caller.has_token()))
        p {
            (grouped(count as u64)) @if count == 1 { " rule" } @else { " rules" }
            ", in the order in which they are gone through. Back to " a href=(bot::path(&bot)) { "the bot" } "."
            @if may { " " a href=(path_of_editor(&bot, None)) { "New rule" } }
        }
        @if rules.is_empty() { p.none { "None." } } @else { (table(&bot, &rules, may)) }
        @if let Some(last) = rules.last().filter(|_| more) {
            p { a href={ (path_of_all(&bot)) "?after=" (bot::encoded(last.id.as_str())) } { "Next " (RULES) } }
        }
    };
    Ok(page("Rules", &content))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EditQuery {
    /// The rule; empty: a new one.
    #[serde(default)]
    id: String,
    #[serde(default)]
    saved: bool,
}

/// The texts of the form.
#[derive(Debug, Default)]
struct Form {
    id: String,
    /// The version that is edited; empty: there is no such rule yet.
    version: String,
    rule: String,
    event: String,
    subscriber: String,
    /// What is wrong with each field.
    wrong: BTreeMap<&'static str, String>,
    /// What is wrong with none of them, or what was done.
    message: Option<(&'static str, String)>,
    /// A problem that is none of the form: its status and headers are those of the answer.
    problem: Option<Problem>,
    outcome: Option<Outcome>,
}

impl Form {
    fn new_rule() -> Self {
        let rule = json!({ "name": "", "on": ["tag.applied"], "filter": "event.data.tag == \"vip\"",
            "actions": [{ "set_tag": { "tag": "welcomed" } }], "enabled": true });
        Self { rule: pretty(&rule), event: sample(&["tag.applied".to_owned()]), ..Self::default() }
    }

    fn of(Stored { id, rule, version }: &Stored) -> Self {
        let event = sample(&rule.on);
        // In the order in which people write its fields.
        let rule = serde_json::to_string_pretty(rule).unwrap_or_default();
        let (id, version) = (id.as_str().to_owned(), version.clone());
        Self { id, version, rule, event, ..Self::default() }
    }

    /// The fields of a form, with their line ends.
    async fn read(request: Request) -> Result<(Self, String), Problem> {
        let (parts, body) = request.into_parts();
        let body = read(&parts.headers, body).await?;
        let mut fields: BTreeMap<String, String> =
            url::form_urlencoded::parse(&body).into_owned().collect();
        let mut take = |name: &str| fields.remove(name).unwrap_or_default();
        let id = take("id").trim().to_owned();
        let (version, rule, event) = (take("version"), take("rule"), take("event"));
        let (subscriber, deed) = (take("subscriber"), take("deed"));
        Ok((Self { id, version, rule, event, subscriber, ..Self::default() }, deed))
    }

    fn refuse(&mut self, field: &'static str, problem: &Problem) {
        self.wrong.insert(field, problem.detail().to_owned());
    }

    fn rule_id(&mut self) -> Option<RuleId> {
        let id = RuleId::parse(&self.id);
        id.map_err(|error| self.wrong.insert("id", error.to_string())).ok()
    }

    /// The rule in its field.
    fn rule(&mut self, id: &RuleId) -> Option<Rule> {
        let rule = written(id, self.rule.as_bytes());
        rule.map_err(|problem| self.refuse("rule", &problem)).ok()
    }

    /// The condition of a write: the rule is as it was when the form was opened.
    fn expected(&self) -> Expected {
        match self.version.as_str() {
            "" => Expected::Nothing,
            version => Expected::Versions(vec![version.to_owned()]),
        }
    }

    async fn test(&mut self, api: &Api, caller: &Caller, bot: &BotId) {
        // The name of a new rule does not matter for a test.
        let id = RuleId::parse(if self.id.is_empty() { "rule" } else { &self.id });
        let id = match id {
            Ok(id) => Some(id),
            Err(_) => self.rule_id(),
        };
        let rule = id.and_then(|id| self.rule(&id));
        let event = parse(self.event.as_bytes());
        let event = event.map_err(|problem| self.refuse("event", &problem)).ok();
        let subscriber = match self.subscriber.trim() {
            "" => Some(None),
            text => {
                let parsed = parse(text.as_bytes());
                parsed.map_err(|problem| self.refuse("subscriber", &problem)).ok().map(Some)
            }
        };
        let (Some(rule), Some(event), Some(subscriber)) = (rule, event, subscriber) else {
            return;
        };
        let trial = Trial { event, subscriber, rule: Some(rule) };
        match test::run((api, caller), bot, trial).await {
            Ok(outcome) => self.outcome = Some(outcome),
            Err(problem) if problem.status() == StatusCode::BAD_REQUEST => {
                let detail = problem.detail();
                let field =
                    ["event", "subscriber"].into_iter().find(|name| detail.starts_with(name));
                self.refuse(field.unwrap_or("rule"), &problem);
            }
            Err(problem) => self.fail(problem),
        }
    }

    /// Returns whether the rule is written.
    async fn save(&mut self, api: &Api, caller: &Caller, bot: &BotId) -> bool {
        let Some(id) = self.rule_id() else { return false };
        let Some(rule) = self.rule(&id) else { return false };
        let written = write((api, caller), (bot, &id), &rule, &self.expected()).await;
        written.map_err(|problem| self.not_written(problem)).is_ok()
    }

    /// Returns whether the rule is gone.
    async fn delete(&mut self, api: &Api, caller: &Caller, bot: &BotId) -> bool {
        let Some(id) = self.rule_id() else { return false };
        match erase((api, caller), (bot, &id), &self.expected()).await {
            Ok(()) => true,
            // Somebody else was first.
            Err(problem) if problem.status() == StatusCode::NOT_FOUND => true,
            Err(problem) => {
                self.not_written(problem);
                false
            }
        }
    }

    /// Puts what can be mended beside its field.
    fn not_written(&mut self, problem: Problem) {
        match problem.status() {
            StatusCode::BAD_REQUEST => self.refuse("rule", &problem),
            StatusCode::PRECONDITION_FAILED if self.version.is_empty() => {
                let text = "the bot has a rule with this id already; choose another id";
                self.wrong.insert("id", text.to_owned());
            }
            StatusCode::PRECONDITION_FAILED => {
                let text = "Nothing was saved: the rule was changed or deleted meanwhile. Open it again, then repeat your change.";
                self.message = Some(("bad", text.to_owned()));
            }
            _ => self.fail(problem),
        }
    }

    /// What was typed stays.
    fn fail(&mut self, problem: Problem) {
        self.message = Some(("bad", problem.detail().to_owned()));
        self.problem = Some(problem);
    }

    fn markup(&self, bot: &BotId, has_token: bool) -> Markup {
        let is_new = self.version.is_empty();
        let title = if is_new { "New rule".to_owned() } else { format!("Rule {}", self.id) };
        let wrong = |field: &str| self.wrong.get(field);
        let invalid = |field: &str| wrong(field).map(|_| "true");
        let described = |field: &str| match wrong(field) {
            Some(_) => format!("{field}-wrong {field}-about"),
            None => format!("{field}-about"),
        };
        let why = |field: &str| {
            html! {
                @if let Some(why) = wrong(field) { p.bad id={ (field) "-wrong" } role="alert" { (why) } }
            }
        };
        let text = |field: &'static str, label: &str, about: Markup, value: &str, rows: &str| {
            html! {
                div.field {
                    label for=(field) { (label) }
                    textarea id=(field) name=(field) rows=(rows) spellcheck="false" autocapitalize="off"
                        maxlength=(RULE_MAX_BYTES) aria-invalid=[invalid(field)]
                        aria-describedby=(described(field)) { "\n" (value) }
                    (why(field))
                    p.fine id={ (field) "-about" } { (about) }
                }
            }
        };
        html! {
            (headline(&title, has_token))
            p {
                "Of bot " a href=(bot::path(bot)) { (bot) } ". " a href=(path_of_all(bot)) { "All its rules" } "."
            }
            @if let Some((kind, message)) = &self.message {
                p class={ "said " (kind) } role="status" { (message) }
            }
            form.editor method="post" action={ (bot::path(bot)) "/rule" } {
                input type="hidden" name="version" value=(self.version);
                div.field {
                    label for="id" { "Id" }
                    input id="id" name="id" required maxlength="64" value=(self.id) readonly[!is_new]
                        aria-invalid=[invalid("id")] aria-describedby=(described("id"));
                    (why("id"))
                    p.fine #id-about { "Up to 64 letters, digits, . _ or -. The rules of a bot are gone through in the order of their ids." }
                }
                (text("rule", "Rule", html! {
                    "JSON with " code { "name" } ", " code { "on" } ", " code { "filter" } ", " code { "actions" } " and " code { "enabled" } ". The actions are "
                    code { "set_tag" } ", " code { "remove_tag" } ", " code { "set_field" } ", " code { "emit" } ", " code { "notify" } ", " code { "count" } " and " code { "push" } "."
                }, &self.rule, "16"))
                (text("event", "Event for a test", html! { "JSON. What is left out has a default, except " code { "type" } "." }, &self.event, "5"))
                (text("subscriber", "Subscriber before the test", html! { "JSON with " code { "tags" } " and " code { "fields" } ". Empty: the stored profile of the subject of the event." }, &self.subscriber, "2"))
                div.actions {
                    button type="submit" name="deed" value="test" { "Test with the event" }
                    button type="submit" name="deed" value="save" { "Save the rule" }
                    @if !is_new {
                        details {
                            summary { "Delete…" }
                            p { "The rule is deleted for good. What it has delayed still happens." }
                            button.danger type="submit" name="deed" value="delete" formnovalidate { "Delete the rule " (self.id) }
                        }
                    }
                }
            }
            @if let Some(outcome) = &self.outcome { (decision(outcome)) }
        }
    }
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}

/// An event that the rule takes, to start from.
fn sample(on: &[String]) -> String {
    let kind = on.first().map_or("tag.applied", String::as_str).replace('*', "x");
    pretty(&json!({ "type": kind, "subject": "u1", "data": {} }))
}

/// What the rule decides about the event.
fn decision(outcome: &Outcome) -> Markup {
    let Outcome { matched, errors, effects, subscriber, dead } = outcome;
    html! {
        section #decision role="status" {
            h2 { "Decision" }
            p { strong {
                @if let Some(dead) = dead { "The event would become a dead letter: " (short(dead)) }
                @else if !errors.is_empty() { "It fails." }
                @else if matched.is_empty() { "The rule does not match this event." }
                @else { "The rule matches." }
            } }
            @if !errors.is_empty() {
                ul { @for error in errors { li.bad { (short(&error.reason)) } } }
            }
            @for found in matched {
                p { "Actions: " @if found.actions.is_empty() { "none" } @else { (found.actions.join(", ")) } }
            }
            @if !effects.is_empty() {
                h3 { "Effects" }
                pre tabindex="0" { @for effect in effects { (short(&pretty(&effect.what))) "\n" } }
            }
            h3 { "Subscriber afterwards" }
            pre tabindex="0" { (short(&serde_json::to_string_pretty(subscriber).unwrap_or_default())) }
            p.fine { "A test has no effects and changes nothing." }
        }
    }
}

fn short(text: &str) -> String {
    let mut shown: String = text.chars().take(SHOWN_MAX).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
}

/// The editor.
pub(super) async fn edit(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(BotPath { bot }): Path<BotPath>,
    wish: Result<Query<EditQuery>, Problem>,
) -> Result<Response, Refusal> {
    let Query(EditQuery { id, saved }) = wish?;
    let editor = api.automations_of(&bot, &caller)?;
    if id.is_empty() {
        return Ok(page("New rule", &Form::new_rule().markup(&bot, caller.has_token())));
    }
    let id = RuleId::parse(&id).map_err(|error| Problem::field("id", error.to_string()))?;
    let stored = editor.rule(&bot, &id).await?.ok_or_else(|| {
        Problem::new(Kind::NoRule, format!("bot {:?} has no rule {:?}", bot.as_str(), id.as_str()))
    })?;
    let mut form = Form::of(&stored);
    if saved {
        let text = "Saved. It takes effect within a second.";
        form.message = Some(("good", text.to_owned()));
    }
    Ok(page(&format!("Rule {id}"), &form.markup(&bot, caller.has_token())))
}

/// Tests, saves or deletes the rule. A form with something wrong is shown again.
pub(super) async fn act(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(BotPath { bot }): Path<BotPath>,
    request: Request,
) -> Result<Response, Refusal> {
    api.automations_of(&bot, &caller)?;
    let (mut form, deed) = Form::read(request).await?;
    match deed.as_str() {
        "save" => {
            if form.save(&api, &caller, &bot).await {
                let id = RuleId::parse(&form.id).ok();
                let path = path_of_editor(&bot, id.as_ref());
                return Ok(Redirect::to(&format!("{path}&saved=true")).into_response());
            }
        }
        "delete" => {
            if form.delete(&api, &caller, &bot).await {
                return Ok(Redirect::to(&path_of_all(&bot)).into_response());
            }
        }
        // Also for Enter in a field.
        _ => form.test(&api, &caller, &bot).await,
    }
    let content = form.markup(&bot, caller.has_token());
    if let Some(problem) = form.problem {
        return Ok(page_for(problem, "Rule", &content));
    }
    let is_wrong = !form.wrong.is_empty() || form.message.is_some();
    let status = if is_wrong { StatusCode::BAD_REQUEST } else { StatusCode::OK };
    Ok((status, page("Rule", &content)).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "</textarea><script>alert(1)</script>\"'";

    #[test]
    fn texts_of_tenants_are_escaped_in_every_field() {
        let mut form = Form {
            id: HOSTILE.to_owned(),
            version: HOSTILE.to_owned(),
            rule: HOSTILE.to_owned(),
            event: HOSTILE.to_owned(),
            subscriber: HOSTILE.to_owned(),
            message: Some(("bad", HOSTILE.to_owned())),
            ..Form::default()
        };
        for field in ["id", "rule", "event", "subscriber"] {
            form.wrong.insert(field, HOSTILE.to_owned());
        }
        let page = form.markup(&BotId::parse(HOSTILE).unwrap(), true).into_string();
        assert!(!page.contains("<script") && !page.contains("</textarea><s"), "{page}");
        assert_eq!(page.matches("aria-invalid=\"true\"").count(), 4, "{page}");
        assert_eq!(page.matches("</textarea>").count(), 3, "{page}");
    }

    #[test]
    fn an_error_is_shown_beside_its_field() {
        let mut form = Form { id: "a b".to_owned(), rule: "{".to_owned(), ..Form::default() };
        assert!(form.rule_id().is_none());
        assert!(form.rule(&RuleId::parse("r").unwrap()).is_none());
        assert!(form.wrong["rule"].contains("not JSON"), "{:?}", form.wrong);
        form.rule = r#"{"on":["a"],"actions":[],"speed":1}"#.to_owned();
        assert!(form.rule(&RuleId::parse("r").unwrap()).is_none());
        assert!(form.wrong["rule"].contains("speed"), "{:?}", form.wrong);
        let page = form.markup(&BotId::parse("b").unwrap(), true).into_string();
        assert!(page.contains("id=\"rule-wrong\"") && page.contains("id=\"id-wrong\""), "{page}");
    }

    #[test]
    fn a_new_rule_must_not_exist_and_another_must_be_as_it_was_opened() {
        assert_eq!(Form::new_rule().expected(), Expected::Nothing);
        let form = Form { version: "7".to_owned(), ..Form::default() };
        assert_eq!(form.expected(), Expected::Versions(vec!["7".to_owned()]));
        let mut form = Form::new_rule();
        assert!(form.rule(&RuleId::parse("r").unwrap()).is_some(), "{:?}", form.wrong);
    }
}
