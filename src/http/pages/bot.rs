//! The page of a bot: its rules and what happened to them, its queues, one of its subscribers.

use std::sync::Arc;

use axum::extract::State;
use axum::http::Uri;
use axum::response::{IntoResponse as _, Redirect, Response};
use maud::{Markup, html};
use reqwest::Url;
use serde::Deserialize;

use super::super::Api;
use super::super::auth::Caller;
use super::super::automations::{Shown, shown};
use super::super::extract::{Path, Query};
use super::super::problem::Problem;
use super::{Refusal, grouped, page, place};
use crate::automation::profile::Profile;
use crate::clock::rfc3339;
use crate::id::{BotId, PipelineName};
use crate::queue::{BotState, BotView};
use crate::store::subscribers::Kept;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Asked {
    /// A form sends an empty one.
    #[serde(default)]
    bot: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wish {
    #[serde(default)]
    subscriber: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct BotPath {
    bot: BotId,
}

/// What is shown.
struct View {
    bot: BotId,
    /// Or why none is evaluated.
    rules: Result<Vec<Shown>, String>,
    /// Those that are not idle.
    queues: Vec<(PipelineName, BotView)>,
    /// Who was asked for, and what is known.
    subscriber: Option<(String, Option<Kept>)>,
}

/// Asks which bot.
pub(super) async fn ask(
    caller: Caller,
    asked: Result<Query<Asked>, Problem>,
) -> Result<Response, Refusal> {
    let Query(Asked { bot }) = asked?;
    if !bot.is_empty() {
        let bot = BotId::parse(&bot).map_err(|error| Problem::field("bot", error.to_string()))?;
        return Ok(Redirect::to(&path(&bot)).into_response());
    }
    let body = html! {
        (title("Bots", caller.has_token()))
        p { "Rules, queues and subscribers of a bot." }
        (which(None))
    };
    Ok(page("Bots", &body))
}

/// Where the page of a bot is.
fn path(bot: &BotId) -> String {
    let Ok(mut url) = Url::parse("http://fairlane/bots") else { return "/bots".to_owned() };
    if let Ok(mut segments) = url.path_segments_mut() {
        segments.push(bot.as_str());
    }
    url.path().to_owned()
}

pub(super) async fn show(
    State(api): State<Arc<Api>>,
    caller: Caller,
    uri: Uri,
    Path(BotPath { bot }): Path<BotPath>,
    wish: Result<Query<Wish>, Problem>,
) -> Result<Response, Refusal> {
    caller.check_bot(&bot)?;
    let Query(Wish { subscriber }) = wish?;
    let (mut rules, mut known) = (Err("rules are not evaluated here".to_owned()), None);
    match api.automations() {
        Ok(editor) => {
            rules = shown(editor, &bot).await.map_err(|problem| problem.detail().to_owned());
            if !subscriber.is_empty() {
                let kept = editor.automations().subscribers().read(&bot, &[&subscriber]).await?;
                known = Some((subscriber, kept.into_iter().next()));
            }
        }
        Err(problem) => rules = rules.map_err(|_| problem.detail().to_owned()),
    }
    let mut queues = Vec::new();
    let now = api.clock.now();
    for name in api.queues.names().await? {
        let look = api.queues.of(&name).view_bot(&bot, now).await?;
        if look.depth > 0 || look.state != BotState::Idle {
            queues.push((name, look));
        }
    }
    let view = View { bot, rules, queues, subscriber: known };
    let name = format!("Bot {}", view.bot);
    Ok(page(&name, &body(&view, place(&uri), caller.has_token())))
}

fn title(text: &str, has_token: bool) -> Markup {
    html! {
        div.title {
            h1 { (text) }
            @if has_token {
                form method="post" action="/logout" { button type="submit" { "Log out" } }
            }
        }
    }
}

/// The form that asks for a bot.
fn which(bot: Option<&BotId>) -> Markup {
    html! {
        form.ask method="get" action="/bots" role="search" {
            label for="bot" { "Bot" }
            input id="bot" name="bot" required maxlength="256" value=[bot.map(BotId::as_str)];
            button type="submit" { "Show" }
        }
    }
}

fn body(view: &View, place: &str, has_token: bool) -> Markup {
    html! {
        (title(&format!("Bot {}", view.bot), has_token))
        div.title { (which(Some(&view.bot))) a href=(place) { "Refresh" } }
        section {
            h2 { "Rules" }
            (rules(&view.rules))
        }
        section {
            h2 { "Queues" }
            (queues(&view.queues))
        }
        @if view.rules.is_ok() {
            section #subscriber {
                h2 { "Subscriber" }
                form.ask method="get" action="#subscriber" {
                    label for="of" { "Subscriber" }
                    input id="of" name="subscriber" required maxlength="1024"
                        value=[view.subscriber.as_ref().map(|(id, _)| id)];
                    button type="submit" { "Show" }
                }
                @if let Some((id, kept)) = &view.subscriber { (known(id, kept.as_ref())) }
            }
        }
    }
}

fn rules(rules: &Result<Vec<Shown>, String>) -> Markup {
    let rules = match rules {
        Ok(rules) => rules,
        Err(why) => return html! { p.none { (why) } },
    };
    html! {
        @if rules.is_empty() {
            p.none { "None. A rule is written by " code { "PUT /v1/bots/BOT/automations/RULE" } "." }
        } @else {
            p { "In the order in which they are gone through. What happened to them is counted since they were made." }
            div.wide tabindex="0" role="region" aria-label="Rules" {
                table {
                    thead {
                        tr {
                            th scope="col" { "Rule" }
                            th scope="col" { "On" }
                            th scope="col" { "Filter" }
                            th scope="col" { "Actions" }
                            th.number scope="col" { "Matched" }
                            th.number scope="col" { "Actions decided" }
                            th.number scope="col" { "Errors" }
                            th scope="col" { "Last error" }
                        }
                    }
                    tbody { @for rule in rules { (row(rule)) } }
                }
            }
        }
    }
}

fn row(Shown { id, rule, stats }: &Shown) -> Markup {
    html! {
        tr {
            th scope="row" {
                (id)
                @if !rule.name.is_empty() { br; span.none { (rule.name) } }
                @if !rule.enabled { br; span.off { "off" } }
            }
            td { @for kind in &rule.on { code { (kind) } br; } }
            td.text { @if let Some(filter) = &rule.filter { code { (filter) } } @else { span.none { "all" } } }
            td.text { @for action in &rule.actions { code { (spoken_action(action)) } br; } }
            @for n in [stats.matched, stats.actions, stats.errors] {
                td.number.zero[n == 0] { (grouped(n)) }
            }
            td.text {
                @if let Some(last) = &stats.last_error {
                    time datetime=(last.at) { (last.at) } br;
                    (last.reason) br;
                    span.none { "event " (last.event) }
                }
            }
        }
    }
}

/// An action as a rule writes it, without what is noise to the eye.
fn spoken_action(action: &crate::automation::rule::Action) -> String {
    let Ok(serde_json::Value::Object(map)) = serde_json::to_value(action) else {
        return action.name().to_owned();
    };
    let parts = map.values().next().and_then(serde_json::Value::as_object);
    let parts = parts.into_iter().flatten().map(|(key, value)| match value {
        serde_json::Value::String(text) => format!("{key}={text}"),
        other => format!("{key}={other}"),
    });
    let parts: Vec<String> = parts.collect();
    format!("{} {}", action.name(), parts.join(" "))
}

fn queues(queues: &[(PipelineName, BotView)]) -> Markup {
    html! {
        @if queues.is_empty() {
            p.none { "Nothing waits." }
        } @else {
            table {
                thead { tr { th scope="col" { "Pipeline" } th scope="col" { "State" } th.number scope="col" { "Events" } th.number scope="col" { "Oldest" } } }
                tbody {
                    @for (pipeline, look) in queues {
                        tr {
                            th scope="row" { (pipeline) }
                            td { (state(look.state)) }
                            td.number { (grouped(look.depth)) }
                            td.number { (super::spoken(look.oldest_age_ms)) }
                        }
                    }
                }
            }
        }
    }
}

fn state(state: BotState) -> &'static str {
    match state {
        BotState::Ready => "waits for a worker",
        BotState::Leased => "is handled",
        BotState::Parked => "waits to be tried again, or for more",
        BotState::Paused => "paused",
        BotState::Idle => "idle",
    }
}

fn known(id: &str, kept: Option<&Kept>) -> Markup {
    let Some((sequence, Profile { tags, fields })) =
        kept.and_then(|kept| Some((kept.sequence?, &kept.profile)))
    else {
        return html! { p.none { "Nothing is known of " (id) ": profiles are kept from the first rule of a bot on." } };
    };
    html! {
        table {
            tbody {
                tr { th scope="row" { "Tags" } td.text { @if tags.is_empty() { span.none { "none" } } @for tag in tags { code { (tag) } " " } } }
                @for (field, value) in fields {
                    tr { th scope="row" { (field) } td.text { code { (value) } } }
                }
                tr { th scope="row" { "Changed" } td { (rfc3339(sequence.get() / 1_000)) } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::automations::Happened;
    use super::*;
    use crate::id::{RuleId, Sequence};

    fn waiting() -> BotView {
        BotView {
            bot: BotId::parse("b").unwrap(),
            state: BotState::Ready,
            depth: 1_234,
            oldest_age_ms: 61_000,
            fence: None,
            until_ms: None,
            attempts: 0,
            weight: 1,
        }
    }

    fn view(rules: Result<Vec<Shown>, String>) -> View {
        let mut kept = Kept { sequence: Some(Sequence::new(1)), ..Kept::default() };
        kept.profile.fields.insert("name".to_owned(), json!("<script>"));
        View {
            bot: BotId::parse("<b>&\"").unwrap(),
            rules,
            queues: vec![(PipelineName::parse("automations").unwrap(), waiting())],
            subscriber: Some(("<i>".to_owned(), Some(kept))),
        }
    }

    #[test]
    fn what_tenants_wrote_is_text_and_figures_are_shown() {
        let rule = json!({ "name": "<u>", "on": ["<s>"], "filter": "event.type == '<em>'", "enabled": false,
            "actions": [{ "emit": { "type": "<a>", "delay": 600 } }] });
        let stats = Happened { matched: 12_345, actions: 7, errors: 1, last_error: None };
        let id = RuleId::parse("10-x").unwrap();
        let rules = vec![Shown { id, rule: serde_json::from_value(rule).unwrap(), stats }];
        let page = body(&view(Ok(rules)), "/bots/x?\"", true).into_string();
        for tag in ["<b>", "<u>", "<s>", "<em>", "<a>", "<i>", "<script"] {
            assert!(!page.contains(tag), "{tag}: {page}");
        }
        for shown in
            ["12,345", "1,234", "1 min", "emit delay=600 type=&lt;a&gt;", ">off<", "Log out"]
        {
            assert!(page.contains(shown), "{shown} is missing in {page}");
        }
    }

    #[test]
    fn without_rules_the_page_says_what_helps_or_why() {
        let page = body(&view(Ok(Vec::new())), "/", false).into_string();
        assert!(page.contains("PUT /v1/bots/BOT/automations/RULE"), "{page}");
        let page = body(&view(Err("MongoDB is away".to_owned())), "/", false).into_string();
        assert!(page.contains("MongoDB is away") && !page.contains("subscriber"), "{page}");
    }

    #[test]
    fn the_path_of_a_bot_leads_back_to_it_whatever_its_id_holds() {
        for (id, expected) in [
            ("shop-7", "/bots/shop-7"),
            ("a/b ?#%", "/bots/a%2Fb%20%3F%23%25"),
            ("日", "/bots/%E6%97%A5"),
        ] {
            assert_eq!(path(&BotId::parse(id).unwrap()), expected);
        }
    }
}
