//! The dead letters of a pipeline: list, inspect, redrive, drop.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{Redirect, Response};
use maud::{Markup, html};
use serde::Deserialize;

use super::super::Api;
use super::super::auth::Caller;
use super::super::dead::{LetterPath, redrive_until};
use super::super::extract::{Path, Query};
use super::super::parameters::Parameters;
use super::super::pipelines::PipelinePath;
use super::super::problem::Problem;
use super::{Refusal, bot, grouped, headline, pipeline, spoken};
use crate::clock::{millis, rfc3339};
use crate::config::Scope;
use crate::id::{BotId, LetterId, PipelineName};
use crate::queue::{DeadGlimpses, DeadLetter, LetterOfBot};

/// Number of dead letters per page.
const LETTERS: usize = 50;

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PageQuery {
    /// The bot. A form sends an empty one for all bots.
    #[serde(default)]
    bot: String,
    cursor: Option<String>,
}

impl PageQuery {
    fn bot(&self) -> Result<Option<BotId>, Problem> {
        let parsed = (!self.bot.is_empty()).then(|| BotId::parse(&self.bot)).transpose();
        parsed.map_err(|error| Problem::field("bot", error.to_string()))
    }
}

/// The path of the list.
fn path(pipeline: &PipelineName) -> String {
    format!("{}/dead", pipeline::path(pipeline))
}

/// The path of the list of one bot; an empty bot means all bots.
pub(super) fn path_of(pipeline: &PipelineName, bot: &str) -> String {
    match bot {
        "" => path(pipeline),
        bot => format!("{}?bot={}", path(pipeline), bot::encoded(bot)),
    }
}

/// The path of one dead letter, opened from the list of a bot or of all bots.
fn path_of_one(pipeline: &PipelineName, id: LetterId, bot: &str) -> String {
    match bot {
        "" => format!("{}/{id}", path(pipeline)),
        bot => format!("{}/{id}?bot={}", path(pipeline), bot::encoded(bot)),
    }
}

pub(super) async fn list(
    State(api): State<Arc<Api>>,
    caller: Caller,
    headers: HeaderMap,
    Path(PipelinePath { pipeline }): Path<PipelinePath>,
    wish: Result<Query<PageQuery>, Problem>,
) -> Result<Response, Refusal> {
    let Query(wish) = wish?;
    let bot = wish.bot()?;
    bot.as_ref().map_or(Ok(()), |bot| caller.check_bot(bot))?;
    let before: Option<LetterId> =
        api.gate.cursors.read(&path(&pipeline), wish.cursor.as_deref())?;
    api.queues.find(&pipeline).await?;
    let title = format!("Dead letters of {pipeline}");
    let looked_at = (Arc::clone(&api), caller.clone(), pipeline, wish, (bot, before));
    let content = async |seen: Arc<(Arc<Api>, Caller, PipelineName, PageQuery, Selection)>| {
        let (api, caller, pipeline, wish, (bot, before)) = &*seen;
        let queue = api.queues.of(pipeline);
        let wanted = |bot: &BotId| caller.covers(bot);
        let DeadGlimpses { letters, more } =
            queue.glimpse_dead_letters(bot.as_ref(), &wanted, *before, LETTERS).await?;
        let now_ms = millis(api.clock.now());
        let last = letters.last().filter(|_| more);
        let next = last.map(|(_, last)| api.gate.cursors.write(&path(pipeline), &last.id));
        Ok(listed(&Listed { pipeline, letters, next, wish, now_ms }, caller))
    };
    api.live.show((&caller, &headers), &title, looked_at, content).await
}

/// The filter by bot, and the cursor.
type Selection = (Option<BotId>, Option<LetterId>);

struct Listed<'a> {
    pipeline: &'a PipelineName,
    letters: Vec<(BotId, LetterOfBot)>,
    next: Option<String>,
    wish: &'a PageQuery,
    now_ms: u64,
}

fn listed(view: &Listed<'_>, caller: &Caller) -> Markup {
    let Listed { pipeline, letters, next, wish, .. } = view;
    let may = caller.check_scope(Scope::Operate).is_ok();
    html! {
        (headline(&format!("Dead letters of {pipeline}"), caller.has_token()))
        p { "Events that failed for good, newest first. A redriven event is handled again at its place in the order of its bot. Back to " a href=(pipeline::path(pipeline)) { "the pipeline" } "." }
        div.title {
            form.ask method="get" action=(path(pipeline)) role="search" {
                label for="bot" { "Only of bot" }
                input id="bot" name="bot" maxlength="256" value=(wish.bot);
                button type="submit" { "Show" }
            }
            @if may && !letters.is_empty() && (!wish.bot.is_empty() || caller.check_all_bots().is_ok()) {
                form method="get" action={ (path(pipeline)) "/redrive" } {
                    @if !wish.bot.is_empty() { input type="hidden" name="bot" value=(wish.bot); }
                    button type="submit" { @if wish.bot.is_empty() { "Redrive all…" } @else { "Redrive all of " (wish.bot) "…" } }
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
                            th scope="col" { "Action" }
                        }
                    }
                    tbody { @for (of, letter) in letters { (row(view, of, letter, may)) } }
                }
            }
            @if let Some(next) = next {
                p { a href={ "?bot=" (bot::encoded(&wish.bot)) "&cursor=" (next) } { "Next " (LETTERS) } }
            }
        }
    }
}

fn row(view: &Listed<'_>, of: &BotId, letter: &LetterOfBot, may: bool) -> Markup {
    let Listed { pipeline, wish, now_ms, .. } = view;
    let one = path_of_one(pipeline, letter.id, &wish.bot);
    html! {
        tr data-key=(letter.id) {
            td.when { time datetime=(rfc3339(letter.time_ms)) title=(rfc3339(letter.time_ms)) { (spoken(now_ms.saturating_sub(letter.time_ms) / 1_000 * 1_000)) " ago" } }
            th.text scope="row" { a href=(bot::path(of)) { (of) } }
            td.text {
                a href=(one) {
                    @match (&letter.kind, &letter.event) {
                        (Some(kind), Some(event)) => { (kind) " " (event) }
                        _ => "cannot be read"
                    }
                }
            }
            td.number { (letter.attempts) }
            td.text { (letter.reason) }
            td {
                @if may {
                    form method="post" action={ (path(pipeline)) "/" (letter.id) "/redrive" } {
                        (seen_of(&wish.bot))
                        button type="submit" aria-label={ "Redrive " (letter.id) } { "Redrive" }
                    }
                }
            }
        }
    }
}

/// A hidden form field that names the list in which the caller saw the letter.
fn seen_of(bot: &str) -> Markup {
    html! { @if !bot.is_empty() { input type="hidden" name="bot" value=(bot); } }
}

/// The list in which the caller saw the letter.
fn back(pipeline: &PipelineName, mut fields: Parameters) -> Redirect {
    let bot = fields.take("bot").unwrap_or_default();
    Redirect::to(&path_of(pipeline, &bot))
}

pub(super) async fn show(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(at): Path<LetterPath>,
    wish: Result<Query<PageQuery>, Problem>,
) -> Result<Response, Refusal> {
    let Query(wish) = wish?;
    let (_, letter) = at.find(&api, &caller).await?;
    let title = format!("Dead letter {}", letter.id);
    Ok(super::page(&title, &shown(&at.pipeline, &letter, &wish.bot, &caller)))
}

/// `bot` names the list in which the caller saw the letter; empty: the list of all bots.
fn shown(pipeline: &PipelineName, letter: &DeadLetter, bot: &str, caller: &Caller) -> Markup {
    let one = format!("{}/{}", path(pipeline), letter.id);
    // An event always serialises.
    let event = letter.event.as_ref().map(serde_json::to_string_pretty);
    html! {
        (headline(&format!("Dead letter {}", letter.id), caller.has_token()))
        p {
            "Of pipeline " a href=(pipeline::path(pipeline)) { (pipeline) } ", bot " a href=(bot::path(&letter.bot)) { (letter.bot) } ". "
            "Back to " a href=(path_of(pipeline, bot)) { @if bot.is_empty() { "all dead letters of the pipeline" } @else { "the dead letters of " (bot) } } "."
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
                form method="post" action={ (one) "/redrive" } { (seen_of(bot)) button type="submit" { "Redrive" } }
                details {
                    summary { "Drop…" }
                    form method="post" action={ (one) "/drop" } {
                        (seen_of(bot))
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
    fields: Parameters,
) -> Result<Redirect, Refusal> {
    at.redrive(&api, &caller).await?;
    Ok(back(&at.pipeline, fields))
}

pub(super) async fn drop_one(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(at): Path<LetterPath>,
    fields: Parameters,
) -> Result<Redirect, Refusal> {
    at.discard(&api, &caller).await?;
    Ok(back(&at.pipeline, fields))
}

/// Whether the caller may act on all dead letters of a bot, or of all bots.
fn check(caller: &Caller, bot: Option<&BotId>) -> Result<(), Problem> {
    bot.map_or_else(|| caller.check_all_bots(), |bot| caller.check_bot(bot))
}

/// Asks before a bulk redrive.
pub(super) async fn ask_redrive_all(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(PipelinePath { pipeline }): Path<PipelinePath>,
    wish: Result<Query<PageQuery>, Problem>,
) -> Result<Response, Refusal> {
    let Query(wish) = wish?;
    let bot = wish.bot()?;
    check(&caller, bot.as_ref())?;
    caller.check_scope(Scope::Operate)?;
    let queue = api.queues.find(&pipeline).await?;
    let until = api.queues.time().await?;
    let (count, at_least) = match &bot {
        Some(bot) => {
            let of = queue.dead_of(bot).await?;
            (of.count, of.at_least)
        }
        None => (queue.count_dead_letters(None, until).await?, false),
    };
    let scope = match &bot {
        Some(bot) => format!("of bot {bot} in pipeline {pipeline}"),
        None => format!("of all bots in pipeline {pipeline}"),
    };
    let question = Question {
        what: question_text(count, at_least, &scope),
        action: format!("{}/redrive", path(&pipeline)),
        back: path_of(&pipeline, &wish.bot),
        bot: wish.bot,
        until_ms: millis(until),
    };
    Ok(super::page("Redrive all dead letters?", &question.page(&caller)))
}

fn question_text(count: u64, at_least: bool, scope: &str) -> String {
    let letters = if count == 1 { "dead letter" } else { "dead letters" };
    let about = if at_least { "at least " } else { "" };
    format!("Redrive {about}{} {letters} {scope}?", grouped(count))
}

/// The question before a bulk redrive.
struct Question {
    what: String,
    action: String,
    back: String,
    bot: String,
    /// Dead letters that are newer, in ms since 1970, are not included.
    until_ms: u64,
}

impl Question {
    fn page(&self, caller: &Caller) -> Markup {
        html! {
            (headline("Redrive all dead letters?", caller.has_token()))
            p { strong { (self.what) } }
            p { "Each event is handled again at its place in the order of its bot. Events that fail from now on stay dead letters." }
            div.actions {
                form method="post" action=(self.action) {
                    (seen_of(&self.bot))
                    input type="hidden" name="until" value=(self.until_ms);
                    button.danger type="submit" { "Redrive them" }
                }
                a href=(self.back) { "Cancel" }
            }
        }
    }
}

/// The time limit that the form of the question sends. Without it, the page asks the question
/// first.
fn confirmed(fields: &mut Parameters) -> Result<Option<Duration>, Problem> {
    let until = fields.read("until", |text| {
        text.parse()
            .map_err(|_| "it is not a time in ms since 1970; open the question again".to_owned())
    });
    Ok(until?.map(Duration::from_millis))
}

pub(super) async fn redrive_all(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(PipelinePath { pipeline }): Path<PipelinePath>,
    mut fields: Parameters,
) -> Result<Redirect, Refusal> {
    let wish = PageQuery { bot: fields.take("bot").unwrap_or_default(), cursor: None };
    let bot = wish.bot()?;
    check(&caller, bot.as_ref())?;
    let Some(until) = confirmed(&mut fields)? else {
        let query = match wish.bot.as_str() {
            "" => String::new(),
            bot => format!("?bot={}", bot::encoded(bot)),
        };
        return Ok(Redirect::to(&format!("{}/redrive{query}", path(&pipeline))));
    };
    let queue = api.queues.find(&pipeline).await?;
    let until = until.min(api.queues.time().await?);
    redrive_until(&api, &caller, &queue, bot.as_ref(), until).await?;
    Ok(Redirect::to(&path_of(&pipeline, &wish.bot)))
}

/// The bulk redrive on the page of the notifications.
pub(super) async fn ask_redrive_notifications(
    State(api): State<Arc<Api>>,
    caller: Caller,
) -> Result<Response, Refusal> {
    caller.check_all_bots()?;
    caller.check_scope(Scope::Operate)?;
    let queue = api.notifications()?.queue().clone();
    let until = api.queues.time().await?;
    let count = queue.count_dead_letters(None, until).await?;
    let question = Question {
        what: question_text(count, false, "of all bots: their notifications are sent immediately"),
        action: "/notifications/dead/redrive".to_owned(),
        back: "/notifications#dead".to_owned(),
        bot: String::new(),
        until_ms: millis(until),
    };
    Ok(super::page("Redrive all dead letters?", &question.page(&caller)))
}

pub(super) async fn redrive_notifications(
    State(api): State<Arc<Api>>,
    caller: Caller,
    mut fields: Parameters,
) -> Result<Redirect, Refusal> {
    caller.check_all_bots()?;
    let Some(until) = confirmed(&mut fields)? else {
        return Ok(Redirect::to("/notifications/dead/redrive"));
    };
    let queue = api.notifications()?.queue().clone();
    let until = until.min(api.queues.time().await?);
    redrive_until(&api, &caller, &queue, None, until).await?;
    Ok(Redirect::to("/notifications#dead"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_tenants_is_escaped() {
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
        let one = shown(&pipeline, &letter, "<b>&", &caller).into_string();
        let wish = PageQuery { bot: "\"><b>".to_owned(), cursor: None };
        let seen = LetterOfBot {
            id: letter.id,
            event: Some("<i>".to_owned()),
            kind: Some("<u>".to_owned()),
            reason: letter.reason,
            attempts: 3,
            time_ms: 1_000,
        };
        let view = Listed {
            pipeline: &pipeline,
            letters: vec![(letter.bot, seen)],
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
            one.contains("&lt;/pre&gt;&lt;script&gt;")
                && one.contains("Drop this dead letter")
                && one.contains("/pipelines/p/dead?bot=%3Cb%3E%26\"")
                && one.contains("name=\"bot\" value=\"&lt;b&gt;&amp;\"")
        );
        assert!(
            all.contains("1 min ago") && all.contains("Redrive all of") && all.contains("Next 50")
        );
    }
}
