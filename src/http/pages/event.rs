//! Where an event is.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};
use serde::Deserialize;

use super::super::Api;
use super::super::auth::Caller;
use super::super::extract::{Path, Query};
use super::super::find::search;
use super::super::problem::Problem;
use super::times::ago;
use super::{Refusal, attempts, bot, grouped, headline, page, pipeline, spoken};
use crate::clock::{millis, rfc3339};
use crate::config::Scope;
use crate::find::{EventState, Found, InPipeline, Wanted};
use crate::id::BotId;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Asked {
    #[serde(default)]
    id: String,
    /// A form sends an empty one for any bot.
    #[serde(default)]
    bot: String,
}

pub(super) async fn show(
    State(api): State<Arc<Api>>,
    caller: Caller,
    asked: Result<Query<Asked>, Problem>,
) -> Result<Response, Refusal> {
    let Query(asked) = asked?;
    answer(&api, &caller, &asked).await
}

#[derive(Debug, Deserialize)]
pub(super) struct EventPath {
    event: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OfBot {
    #[serde(default)]
    bot: String,
}

pub(super) async fn show_one(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(EventPath { event }): Path<EventPath>,
    of: Result<Query<OfBot>, Problem>,
) -> Result<Response, Refusal> {
    let Query(OfBot { bot }) = of?;
    answer(&api, &caller, &Asked { id: event, bot }).await
}

/// The path of the page of an event.
pub(super) fn path(id: &str) -> String {
    format!("/events/{}", bot::encoded(id))
}

async fn answer(api: &Api, caller: &Caller, asked: &Asked) -> Result<Response, Refusal> {
    let (id, bot) = (asked.id.trim(), asked.bot.trim());
    let mut result = None;
    if !id.is_empty() {
        let bot = (!bot.is_empty()).then(|| BotId::parse(bot)).transpose();
        let bot = bot.map_err(|error| Problem::field("bot", error.to_string()))?;
        let wanted = Wanted { id: id.to_owned(), source: None, bot, since: None };
        result = Some(search(api, caller, &wanted).await?);
    }
    let now_ms = millis(api.clock.now());
    let content = html! {
        (headline("Find an event", caller.has_token()))
        p { "Shows where an event is: on the bus, in a queue, done, dead, or why no pipeline has it." }
        form.ask method="get" action="/events" {
            label for="id" { "Id" }
            input id="id" name="id" required maxlength="1024" size="40" value=(asked.id);
            label for="of" { "Bot" }
            input id="of" name="bot" maxlength="256" placeholder="if known" value=(asked.bot);
            button type="submit" { "Find" }
        }
        @if let Some(found) = &result { (shown(found, now_ms)) }
        @else if caller.check_scope(Scope::Publish).is_ok() {
            p { a href="/publish" { "Publish an event" } }
        }
    };
    let title = if id.is_empty() { "Find an event".to_owned() } else { format!("Event {id}") };
    Ok(page(&title, &content))
}

fn shown(found: &Found, now_ms: u64) -> Markup {
    html! {
        section {
            h2 { "Event " (found.id) }
            @if !found.known {
                p.none {
                    "Nothing is known of this event."
                    @if found.bot.is_none() { " Name its bot to search its queues, too." }
                }
            }
            dl.facts {
                @if let Some(of) = &found.bot { div { dt { "Bot" } dd { a href=(bot::path(of)) { (of) } } } }
                @if let Some(event) = &found.event {
                    div { dt { "Type" } dd { code { (event.kind()) } } }
                    div { dt { "Source" } dd { (event.source()) } }
                    @if let Some(subject) = event.subject() { div { dt { "Subject" } dd { (subject) } } }
                }
                @if let Some(bus) = &found.bus {
                    div {
                        dt { "Published" }
                        dd { (ago(bus.time_ms, now_ms)) }
                    }
                    div { dt { "On the bus" } dd { (bus.stream) " " (bus.offset) } }
                }
            }
            @if let Some(bad) = &found.unreadable {
                p { "Not an event: " (bad.reason) " (" (bad.stream) " " (bad.offset) ")." }
            }
            @if found.event.is_some() && !taken(found) {
                p { "No pipeline takes an event of this type." }
            }
            @for one in found.pipelines.iter().filter(|one| one.state != EventState::OtherType) {
                (in_pipeline(one, now_ms))
            }
            p { a href={ (path(&found.id)) @if let Some(of) = &found.bot { "?bot=" (bot::encoded(of.as_str())) } } { "Look again" } }
            p.none { "Searched " (found.searched_words(now_ms, spoken)) "." }
        }
    }
}

/// Whether any pipeline takes its type.
fn taken(found: &Found) -> bool {
    found.pipelines.iter().any(|one| one.state != EventState::OtherType)
}

fn in_pipeline(one: &InPipeline, now_ms: u64) -> Markup {
    let words = one.words(now_ms, spoken);
    html! {
        div.panel data-key=(one.pipeline) {
            div.title {
                h3 { a href=(pipeline::path(&one.pipeline)) { (one.pipeline) } }
            }
            p.words title=[one.time_ms.map(rfc3339)] { (words) "." }
            @if let Some(letter) = one.letter {
                p { a href={ (pipeline::path(&one.pipeline)) "/dead/" (letter) } { "Dead letter " (letter) } }
            }
            @if !one.attempts.is_empty() {
                p {
                    @match one.attempts.len() {
                        1 => "One attempt is kept:",
                        many => { (grouped(many as u64)) " attempts are kept:" }
                    }
                }
                (attempts::table(&one.attempts, now_ms, &format!("Attempts in {}", one.pipeline)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::find::Searched;
    use crate::id::PipelineName;

    #[test]
    fn text_of_tenants_is_escaped() {
        let found = Found {
            id: "<i>".to_owned(),
            known: true,
            bot: BotId::parse("<b>").ok(),
            bus: None,
            event: None,
            unreadable: None,
            pipelines: vec![InPipeline {
                pipeline: PipelineName::parse("p").unwrap(),
                bot: BotId::parse("<b>").unwrap(),
                state: EventState::Dead,
                place: None,
                depth: None,
                time_ms: Some(1_000),
                reason: Some("<em>".to_owned()),
                letter: "0.1-0".parse().ok(),
                attempts: Vec::new(),
            }],
            searched: Searched::default(),
        };
        let text = shown(&found, 61_000).into_string();
        for tag in ["<i>", "<b>", "<em>"] {
            assert!(!text.contains(tag), "{tag}: {text}");
        }
        assert!(text.contains("dead letter 1 min ago") && text.contains("/pipelines/p/dead/0.1-0"));
    }
}
