//! The page of a bot: its queues and who holds them, its rules and what happened to them, one of its
//! subscribers.

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse as _, Redirect, Response};
use maud::{Markup, html};
use reqwest::Url;
use serde::Deserialize;

use super::super::Api;
use super::super::auth::Caller;
use super::super::automations::{Shown, shown};
use super::super::bots;
use super::super::extract::{Path, Query};
use super::super::problem::Problem;
use super::overview::ranking;
use super::{Refusal, grouped, headline, pipeline, spoken};
use crate::automations::profile::Profile;
use crate::automations::subscribers::Kept;
use crate::clock::{millis, rfc3339};
use crate::config::Scope;
use crate::id::{BotId, PipelineName};
use crate::pipeline::Protected;
use crate::queue::{BotState, BotView, DeadOfBot, LastFailure, QueuedEvent};

/// Next events that are shown of each queue.
const NEXT: usize = 5;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Asked {
    /// A form sends an empty one.
    #[serde(default)]
    bot: String,
}

#[derive(Debug, Clone, Deserialize)]
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
    /// Those that are not idle, or have dead letters.
    queues: Vec<OfBot>,
    now_ms: u64,
    may_operate: bool,
    /// Who was asked for, and what is known.
    subscriber: Option<(String, Option<Kept>)>,
}

/// Its queue in one pipeline.
struct OfBot {
    pipeline: PipelineName,
    look: BotView,
    failure: Option<LastFailure>,
    dead: DeadOfBot,
    next: Vec<QueuedEvent>,
    kept: Option<Protected>,
}

/// Asks which bot, and names those with most events.
pub(super) async fn ask(
    State(api): State<Arc<Api>>,
    caller: Caller,
    headers: HeaderMap,
    asked: Result<Query<Asked>, Problem>,
) -> Result<Response, Refusal> {
    let Query(Asked { bot }) = asked?;
    if !bot.is_empty() {
        let bot = BotId::parse(&bot).map_err(|error| Problem::field("bot", error.to_string()))?;
        return Ok(Redirect::to(&path(&bot)).into_response());
    }
    let looked_at = (Arc::clone(&api), caller);
    let content = async |seen: Arc<(Arc<Api>, Caller)>| {
        let (api, caller) = &*seen;
        let overview = api.overview().await?;
        let busiest = api.busiest(caller, &overview).await?;
        Ok(html! {
            (headline("Bots", caller.has_token()))
            p { "Queues, rules and subscribers of a bot." }
            (which(None))
            section {
                h2 { "Bots with most events" }
                (ranking(&busiest))
            }
        })
    };
    api.live.show(&headers, "Bots", looked_at, content).await
}

/// Where the page of a bot is.
pub(super) fn path(bot: &BotId) -> String {
    format!("/bots/{}", encoded(bot.as_str()))
}

/// A text as a part of a path or query.
pub(super) fn encoded(text: &str) -> String {
    let mut url = Url::parse("http://fairlane/").ok();
    if let Some(mut segments) = url.as_mut().and_then(|url| url.path_segments_mut().ok()) {
        segments.push(text);
    }
    let path = url.as_ref().map(|url| url.path().trim_start_matches('/')).unwrap_or_default();
    path.replace('&', "%26").replace('+', "%2B")
}

pub(super) async fn show(
    State(api): State<Arc<Api>>,
    caller: Caller,
    headers: HeaderMap,
    Path(BotPath { bot }): Path<BotPath>,
    wish: Result<Query<Wish>, Problem>,
) -> Result<Response, Refusal> {
    caller.check_bot(&bot)?;
    let Query(Wish { subscriber }) = wish?;
    let title = format!("Bot {bot}");
    let looked_at = (Arc::clone(&api), caller, bot, subscriber);
    let content = async |seen: Arc<(Arc<Api>, Caller, BotId, String)>| {
        let (api, caller, bot, subscriber) = &*seen;
        let view = look(api, caller, bot, subscriber).await?;
        Ok(body(&view, caller.has_token()))
    };
    api.live.show(&headers, &title, looked_at, content).await
}

async fn look(api: &Api, caller: &Caller, bot: &BotId, subscriber: &str) -> Result<View, Problem> {
    let (mut rules, mut known) = (Err("rules are not evaluated here".to_owned()), None);
    match api.automations() {
        Ok(editor) => {
            rules = shown(editor, bot).await.map_err(|problem| problem.detail().to_owned());
            if !subscriber.is_empty() {
                let kept = editor.subscriber(bot, subscriber).await?;
                known = Some((subscriber.to_owned(), Some(kept)));
            }
        }
        Err(problem) => rules = rules.map_err(|_| problem.detail().to_owned()),
    }
    let mut queues = Vec::new();
    let now = api.clock.now();
    for pipeline in api.queues.names().await? {
        let queue = api.queues.of(&pipeline);
        let look = queue.view_bot(bot, now).await?;
        let dead = queue.dead_of(bot).await?;
        if look.depth > 0 || look.state != BotState::Idle || dead.count > 0 {
            let next = queue.next_events(bot, NEXT).await?;
            let failure = queue.last_failure(&look).await?;
            let kept = queue.protected();
            queues.push(OfBot { pipeline, look, failure, dead, next, kept });
        }
    }
    Ok(View {
        bot: bot.clone(),
        rules,
        queues,
        now_ms: millis(now),
        may_operate: caller.check_scope(Scope::Operate).is_ok(),
        subscriber: known,
    })
}

pub(super) async fn pause(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(of): Path<bots::BotPath>,
) -> Result<Redirect, Refusal> {
    of.pause(&api, &caller).await?;
    Ok(Redirect::to(&path(&of.bot)))
}

pub(super) async fn resume(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(of): Path<bots::BotPath>,
) -> Result<Redirect, Refusal> {
    of.resume(&api, &caller).await?;
    Ok(Redirect::to(&path(&of.bot)))
}

pub(super) async fn release(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(of): Path<bots::BotPath>,
) -> Result<Redirect, Refusal> {
    of.release(&api, &caller).await?;
    Ok(Redirect::to(&path(&of.bot)))
}

pub(super) async fn purge(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(of): Path<bots::BotPath>,
) -> Result<Redirect, Refusal> {
    of.purge(&api, &caller).await?;
    Ok(Redirect::to(&path(&of.bot)))
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

fn body(view: &View, has_token: bool) -> Markup {
    html! {
        (headline(&format!("Bot {}", view.bot), has_token))
        (which(Some(&view.bot)))
        section {
            h2 { "Queues" }
            @if view.queues.is_empty() {
                p.none { "Nothing waits. A bot that was never heard of looks the same." }
            }
            @for of in &view.queues { (queue(view, of)) }
        }
        section {
            h2 { "Rules" }
            (rules(&view.rules))
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

fn queue(view: &View, of: &OfBot) -> Markup {
    let OfBot { pipeline, look, .. } = of;
    html! {
        div.panel data-key=(pipeline) {
            div.title {
                h3 { a href=(pipeline::path(pipeline)) { (pipeline) } }
                span.off[look.state == BotState::Paused] { (state(look.state)) }
            }
            dl.facts {
                div { dt { "Events" } dd { (grouped(look.depth)) } }
                div { dt { "Oldest" } dd { (spoken(look.oldest_age_ms)) } }
                div { dt { "Attempts" } dd { (look.attempts) } }
                div { dt { "Weight" } dd { (look.weight) } }
                @if let Some(fence) = look.fence { div { dt { "Fence of the lease" } dd { (fence) } } }
                @if let Some(until) = look.until_ms {
                    div {
                        dt { @if look.fence.is_some() { "Lease ends in" } @else { "Tried again in" } }
                        dd { (spoken(until.saturating_sub(view.now_ms) / 1_000 * 1_000)) }
                    }
                }
            }
            @if let Some(LastFailure { reason, time_ms, since_ms }) = &of.failure {
                @let ago = |ms: u64| spoken(view.now_ms.saturating_sub(ms) / 1_000 * 1_000);
                p { "Every call fails since " (ago(*since_ms)) " ago. Failed " (ago(*time_ms)) " ago: " (reason) }
            }
            (dead(view, of))
            @if !of.next.is_empty() {
                div.wide tabindex="0" role="region" aria-label="Next events" {
                    table {
                        caption { "Next events" }
                        thead { tr { th.number scope="col" { "Sequence" } th scope="col" { "Type" } th scope="col" { "Id" } th scope="col" { "Data" } } }
                        tbody {
                            @for next in &of.next {
                                tr data-key=(next.sequence) {
                                    td.number { (next.sequence) }
                                    @match &next.event {
                                        Some(event) => {
                                            td { code { (event.kind()) } }
                                            td.text { (event.id()) }
                                            td.text { code { (event.data().map_or_else(String::new, short)) } }
                                        }
                                        None => { td.none colspan="3" { "its record cannot be read" } }
                                    }
                                }
                            }
                        }
                    }
                }
            }
            @if view.may_operate { (actions(view, of)) }
        }
    }
}

/// What gave up, and where the rest of it is.
fn dead(view: &View, OfBot { pipeline, dead, .. }: &OfBot) -> Markup {
    html! {
        @if dead.count > 0 {
            p {
                a href=(super::dead::path_of(pipeline, view.bot.as_str())) {
                    @if dead.at_least { "At least " }
                    (grouped(dead.count)) @if dead.count == 1 { " dead letter" } @else { " dead letters" }
                }
                ", the newest:"
            }
            ul {
                @for letter in &dead.newest {
                    li data-key=(letter.id) {
                        (spoken(view.now_ms.saturating_sub(letter.time_ms) / 1_000 * 1_000)) " ago, "
                        @if let Some(kind) = &letter.kind { code { (kind) } " " }
                        (letter.event.as_deref().unwrap_or("its record cannot be read")) ": " (letter.reason)
                    }
                }
            }
        }
    }
}

/// The beginning of a long text.
fn short(text: &str) -> String {
    const CHARACTERS: usize = 120;
    let mut shown: String = text.chars().take(CHARACTERS).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
}

fn actions(view: &View, of: &OfBot) -> Markup {
    let OfBot { pipeline, look, kept, .. } = of;
    let action = |name: &str| format!("{}/{pipeline}/{name}", path(&view.bot));
    let button = |name: &str, text: &str| {
        html! {
            form method="post" action=(action(name)) {
                button type="submit" aria-label={ (text) " in " (pipeline) } { (text) }
            }
        }
    };
    html! {
        div.actions {
            @if look.state == BotState::Paused { (button("resume", "Resume")) } @else { (button("pause", "Pause")) }
            @match look.state {
                BotState::Leased => (button("release", "Break the lease")),
                BotState::Parked => (button("release", "Try now")),
                _ => {}
            }
            @if kept.is_none() && look.depth > 0 {
                details {
                    summary { "Purge…" }
                    form method="post" action=(action("purge")) {
                        p { "Its " (grouped(look.depth)) " queued events are deleted for good. Delayed events and dead letters stay." }
                        button.danger type="submit" { "Delete the queued events of " (view.bot) }
                    }
                }
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
fn spoken_action(action: &crate::automations::rule::Action) -> String {
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

/// In words.
pub(super) fn state(state: BotState) -> &'static str {
    match state {
        BotState::Ready => "waits for a worker",
        BotState::Leased => "being handled",
        BotState::Parked => "rests: to be tried again, or for more",
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
    use crate::queue::LetterOfBot;

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
            queues: vec![OfBot {
                pipeline: PipelineName::parse("automations").unwrap(),
                look: waiting(),
                failure: Some(LastFailure {
                    reason: "<b>no</b>".to_owned(),
                    time_ms: 0,
                    since_ms: 0,
                }),
                dead: DeadOfBot {
                    count: 1_002,
                    at_least: true,
                    newest: vec![LetterOfBot {
                        id: "0.1-0".parse().unwrap(),
                        event: Some("<i>".to_owned()),
                        kind: Some("<s>".to_owned()),
                        reason: "<em>never</em>".to_owned(),
                        attempts: 3,
                        time_ms: 0,
                    }],
                },
                next: Vec::new(),
                kept: None,
            }],
            now_ms: 0,
            may_operate: true,
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
        let page = body(&view(Ok(rules)), true).into_string();
        for tag in ["<b>", "<u>", "<s>", "<em>", "<a>", "<i>", "<script"] {
            assert!(!page.contains(tag), "{tag}: {page}");
        }
        for shown in [
            "12,345",
            "1,234",
            "1 min",
            "Delete the queued events of &lt;b&gt;",
            "/pipelines/automations/dead?bot=%3Cb%3E%26%22\">At least 1,002 dead letters",
            "&lt;em&gt;never",
            "emit delay=600 type=&lt;a&gt;",
            ">off<",
            "Log out",
        ] {
            assert!(page.contains(shown), "{shown} is missing in {page}");
        }
    }

    #[test]
    fn without_rules_the_page_says_what_helps_or_why() {
        let page = body(&view(Ok(Vec::new())), false).into_string();
        assert!(page.contains("PUT /v1/bots/BOT/automations/RULE"), "{page}");
        let page = body(&view(Err("MongoDB is unavailable".to_owned())), false).into_string();
        assert!(page.contains("MongoDB is unavailable") && !page.contains("subscriber"), "{page}");
    }

    #[test]
    fn the_path_of_a_bot_leads_back_to_it_whatever_its_id_holds() {
        for (id, expected) in [
            ("shop-7", "/bots/shop-7"),
            ("a/b ?#%", "/bots/a%2Fb%20%3F%23%25"),
            ("日", "/bots/%E6%97%A5"),
            ("a&b+c", "/bots/a%26b%2Bc"),
        ] {
            assert_eq!(path(&BotId::parse(id).unwrap()), expected);
        }
    }
}
