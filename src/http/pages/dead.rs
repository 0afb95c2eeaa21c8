//! The dead letters of a pipeline: found, looked into, put back, dropped.

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{Redirect, Response};
use maud::{Markup, html};
use serde::Deserialize;

use super::super::Api;
use super::super::auth::Caller;
use super::super::dead::LetterPath;
use super::super::extract::{Path, Query};
use super::super::parameters::Parameters;
use super::super::pipelines::PipelinePath;
use super::super::problem::Problem;
use super::{Refusal, bot, grouped, headline, pipeline, spoken};
use crate::clock::{millis, rfc3339};
use crate::config::Scope;
use crate::id::{BotId, LetterId, PipelineName};
use crate::queue::DeadLetter;

/// Dead letters on a page.
const LETTERS: usize = 50;

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wish {
    /// A form sends an empty one.
    #[serde(default)]
    bot: String,
    cursor: Option<String>,
}

impl Wish {
    fn bot(&self) -> Result<Option<BotId>, Problem> {
        let parsed = (!self.bot.is_empty()).then(|| BotId::parse(&self.bot)).transpose();
        parsed.map_err(|error| Problem::field("bot", error.to_string()))
    }
}

/// Where they are.
fn path(pipeline: &PipelineName) -> String {
    format!("{}/dead", pipeline::path(pipeline))
}

pub(super) async fn list(
    State(api): State<Arc<Api>>,
    caller: Caller,
    headers: HeaderMap,
    Path(PipelinePath { pipeline }): Path<PipelinePath>,
    wish: Result<Query<Wish>, Problem>,
) -> Result<Response, Refusal> {
    let Query(wish) = wish?;
    let bot = wish.bot()?;
    bot.as_ref().map_or(Ok(()), |bot| caller.check_bot(bot))?;
    let before: Option<LetterId> =
        api.door.cursors.read(&path(&pipeline), wish.cursor.as_deref())?;
    api.queues.find(&pipeline).await?;
    let title = format!("Dead letters of {pipeline}");
    let looked_at = (Arc::clone(&api), caller, pipeline, wish, (bot, before));
    let content = async |seen: Arc<(Arc<Api>, Caller, PipelineName, Wish, Place)>| {
        let (api, caller, pipeline, wish, (bot, before)) = &*seen;
        let queue = api.queues.of(pipeline);
        let wanted = |bot: &BotId| caller.covers(bot);
        let mut letters =
            queue.list_dead_letters(bot.as_ref(), &wanted, *before, LETTERS + 1).await?;
        let more = letters.len() > LETTERS;
        letters.truncate(LETTERS);
        let now_ms = millis(api.clock.now());
        let last = letters.last().filter(|_| more);
        let next = last.map(|last| api.door.cursors.write(&path(pipeline), &last.id));
        Ok(listed(&Listed { pipeline, letters, next, wish, now_ms }, caller))
    };
    api.live.show(&headers, &title, looked_at, content).await
}

/// Of which bot, and before which letter.
type Place = (Option<BotId>, Option<LetterId>);

struct Listed<'a> {
    pipeline: &'a PipelineName,
    letters: Vec<DeadLetter>,
    next: Option<String>,
    wish: &'a Wish,
    now_ms: u64,
}

fn listed(view: &Listed<'_>, caller: &Caller) -> Markup {
    let Listed { pipeline, letters, next, wish, now_ms } = view;
    let may = caller.check_scope(Scope::Operate).is_ok();
    html! {
        (headline(&format!("Dead letters of {pipeline}"), caller.has_token()))
        p { "Events that were given up, the newest first. Redriven, one is handled at its place in the order of its bot. Back to " a href=(pipeline::path(pipeline)) { "the pipeline" } "." }
        div.title {
            form.ask method="get" action=(path(pipeline)) role="search" {
                label for="bot" { "Only of bot" }
                input id="bot" name="bot" maxlength="256" value=(wish.bot);
                button type="submit" { "Show" }
            }
            @if may && !letters.is_empty() && (!wish.bot.is_empty() || caller.check_all_bots().is_ok()) {
                form method="post" action={ (path(pipeline)) "/redrive" } {
                    input type="hidden" name="bot" value=(wish.bot);
                    button type="submit" { @if wish.bot.is_empty() { "Redrive all" } @else { "Redrive all of " (wish.bot) } }
                }
            }
        }
        @if letters.is_empty() {
            p.none { "None." }
        } @else {
            div.wide tabindex="0" role="region" aria-label="Dead letters" {
                table {
                    thead {
                        tr {
                            th scope="col" { "Died" }
                            th scope="col" { "Bot" }
                            th scope="col" { "Event" }
                            th.number scope="col" { "Attempts" }
                            th scope="col" { "Reason" }
                            th scope="col" { "" }
                        }
                    }
                    tbody { @for letter in letters { (row(pipeline, letter, *now_ms, may)) } }
                }
            }
            @if let Some(next) = next {
                p { a href={ "?bot=" (bot::encoded(&wish.bot)) "&cursor=" (next) } { "Next " (LETTERS) } }
            }
        }
    }
}

fn row(pipeline: &PipelineName, letter: &DeadLetter, now_ms: u64, may: bool) -> Markup {
    let one = format!("{}/{}", path(pipeline), letter.id);
    html! {
        tr data-key=(letter.id) {
            td.when { time datetime=(rfc3339(letter.time_ms)) title=(rfc3339(letter.time_ms)) { (spoken(now_ms.saturating_sub(letter.time_ms) / 1_000 * 1_000)) " ago" } }
            th.text scope="row" { a href=(bot::path(&letter.bot)) { (letter.bot) } }
            td.text {
                a href=(one) {
                    @match &letter.event {
                        Some(event) => { (event.kind()) " " (event.id()) }
                        None => "cannot be read"
                    }
                }
            }
            td.number { (letter.attempts) }
            td.text { (letter.reason) }
            td {
                @if may {
                    form method="post" action={ (one) "/redrive" } {
                        button type="submit" aria-label={ "Redrive " (letter.id) } { "Redrive" }
                    }
                }
            }
        }
    }
}

pub(super) async fn show(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(at): Path<LetterPath>,
) -> Result<Response, Refusal> {
    let (_, letter) = at.find(&api, &caller).await?;
    let title = format!("Dead letter {}", letter.id);
    Ok(super::page(&title, &shown(&at.pipeline, &letter, &caller)))
}

fn shown(pipeline: &PipelineName, letter: &DeadLetter, caller: &Caller) -> Markup {
    let one = format!("{}/{}", path(pipeline), letter.id);
    // An event always encodes.
    let event = letter.event.as_ref().map(serde_json::to_string_pretty);
    html! {
        (headline(&format!("Dead letter {}", letter.id), caller.has_token()))
        p {
            "Of pipeline " a href=(pipeline::path(pipeline)) { (pipeline) } ", bot " a href=(bot::path(&letter.bot)) { (letter.bot) } ". "
            "Back to " a href=(path(pipeline)) { "all dead letters of the pipeline" } "."
        }
        table {
            tbody {
                tr { th scope="row" { "Died" } td { time datetime=(rfc3339(letter.time_ms)) { (rfc3339(letter.time_ms)) } } }
                tr { th scope="row" { "Reason" } td.text { (letter.reason) } }
                tr { th scope="row" { "Attempts" } td { (grouped(letter.attempts.into())) } }
            }
        }
        section {
            h2 { "Event" }
            @match event {
                Some(Ok(text)) => pre tabindex="0" { (text) },
                _ => p.none { "Its record cannot be read." }
            }
        }
        @if caller.check_scope(Scope::Operate).is_ok() {
            div.actions {
                form method="post" action={ (one) "/redrive" } { button type="submit" { "Redrive" } }
                details {
                    summary { "Drop…" }
                    form method="post" action={ (one) "/drop" } {
                        p { "It is deleted for good: the event is not handled." }
                        button.danger type="submit" { "Drop this dead letter" }
                    }
                }
            }
        }
    }
}

pub(super) async fn redrive(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(at): Path<LetterPath>,
) -> Result<Redirect, Refusal> {
    at.redrive(&api, &caller).await?;
    Ok(Redirect::to(&path(&at.pipeline)))
}

pub(super) async fn drop_one(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(at): Path<LetterPath>,
) -> Result<Redirect, Refusal> {
    at.discard(&api, &caller).await?;
    Ok(Redirect::to(&path(&at.pipeline)))
}

pub(super) async fn redrive_all(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(PipelinePath { pipeline }): Path<PipelinePath>,
    mut fields: Parameters,
) -> Result<Redirect, Refusal> {
    let wish = Wish { bot: fields.take("bot").unwrap_or_default(), cursor: None };
    let bot = wish.bot()?;
    match &bot {
        Some(bot) => caller.check_bot(bot)?,
        None => caller.check_all_bots()?,
    }
    let queue = api.queues.find(&pipeline).await?;
    queue.redrive_all(bot.as_ref(), api.queues.time().await?).await?;
    caller.did("redrive all", &pipeline, bot.as_ref());
    Ok(Redirect::to(&path(&pipeline)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_tenants_wrote_is_text() {
        let bot = BotId::parse("<b>").unwrap();
        let event = crate::event::Event::builder("<u>", &bot).id("<i>").source("<s>");
        let event = event.data(&"</pre><script>alert(1)</script>").unwrap().build().unwrap();
        let letter = DeadLetter {
            id: "0.1-0".parse().unwrap(),
            bot,
            reason: "<em>".to_owned(),
            attempts: 3,
            time_ms: 1_000,
            event: Some(event),
        };
        let (pipeline, caller) = (PipelineName::parse("p").unwrap(), Caller::of_tests());
        let one = shown(&pipeline, &letter, &caller).into_string();
        let wish = Wish { bot: "\"><b>".to_owned(), cursor: None };
        let view = Listed {
            pipeline: &pipeline,
            letters: vec![letter],
            next: Some("place".to_owned()),
            wish: &wish,
            now_ms: 61_000,
        };
        let all = listed(&view, &caller).into_string();
        for page in [&one, &all] {
            for tag in ["<i>", "<b>", "<s>", "<u>", "<em>", "<script", "\"><"] {
                assert!(!page.replace("\"><a", "").contains(tag) || tag == "\"><", "{tag}: {page}");
            }
        }
        assert!(
            one.contains("&lt;/pre&gt;&lt;script&gt;") && one.contains("Drop this dead letter")
        );
        assert!(
            all.contains("1 min ago") && all.contains("Redrive all of") && all.contains("Next 50")
        );
    }
}
