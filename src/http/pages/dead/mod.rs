//! The dead letters of a pipeline: list and filter, inspect, redrive, drop.

mod bulk;
mod filter;
mod one;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use maud::{Markup, html};
use tokio::time::Instant;

pub(super) use self::bulk::{
    ask_drop_all, ask_redrive_all, ask_redrive_notifications, chosen, drop_all, redrive_all,
    redrive_notifications,
};
use self::filter::{PageQuery, path};
pub(super) use self::one::{drop_one, redrive, show};
use super::super::Api;
use super::super::auth::Caller;
use super::super::extract::{Path, Query};
use super::super::pipelines::PipelinePath;
use super::super::problem::Problem;
use super::{Refusal, bot, grouped, headline, pipeline, spoken};
use crate::clock::{millis, rfc3339};
use crate::config::Scope;
use crate::id::{BotId, LetterId, PipelineName};
use crate::queue::{DeadGlimpses, GROUPED, LetterOfBot, Reasons, Wish};

/// Number of dead letters per page.
const LETTERS: usize = 50;
/// Number of reasons shown.
const REASONS: usize = 10;
/// Maximum number of characters of a reason or an id in the table.
const TEXT_MAX: usize = 300;
/// Time for a search for a text in the reasons.
const SEARCH_TIME: Duration = Duration::from_secs(2);

/// The path of the list of one bot; an empty bot means all bots.
pub(super) fn path_of(pipeline: &PipelineName, bot: &str) -> String {
    PageQuery::of_bot(bot).list(pipeline)
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
    if !wish.reason.is_empty() {
        // A search may read all letters, so it is not repeated every few seconds.
        let content = content(&api, &caller, &pipeline, &wish, (bot.as_ref(), before)).await?;
        return Ok(super::page(&title, &content));
    }
    let looked_at = (Arc::clone(&api), caller.clone(), pipeline, wish, (bot, before));
    let content = async |seen: Arc<(Arc<Api>, Caller, PipelineName, PageQuery, Selection)>| {
        let (api, caller, pipeline, wish, (bot, before)) = &*seen;
        content(api, caller, pipeline, wish, (bot.as_ref(), *before)).await
    };
    api.live.show((&caller, &headers), &title, looked_at, content).await
}

/// The filter by bot, and the cursor.
type Selection = (Option<BotId>, Option<LetterId>);

async fn content(
    api: &Api,
    caller: &Caller,
    pipeline: &PipelineName,
    wish: &PageQuery,
    (bot, before): (Option<&BotId>, Option<LetterId>),
) -> Result<Markup, Refusal> {
    let queue = api.queues.of(pipeline);
    let wanted = |bot: &BotId| caller.covers(bot);
    let fits = Wish { bot, wanted: &wanted, reason: &wish.reason };
    // A search for some of them may read all.
    let searches = !wish.reason.is_empty() || bot.is_some() || !caller.covers_all();
    let _turn = if searches { Some(api.large_reads.take(caller.name()).await?) } else { None };
    let deadline = searches.then(|| Instant::now() + SEARCH_TIME);
    let DeadGlimpses { letters, next, cut } =
        queue.search_dead_letters(fits, before, LETTERS, deadline).await?;
    // The groups of the whole list, whatever its page and its reason are.
    let reasons = queue.reasons_of_dead(Wish { reason: "", ..fits }).await?;
    let now_ms = millis(api.clock.now());
    let next = next.map(|next| api.gate.cursors.write(&path(pipeline), &next));
    Ok(listed(&Listed { pipeline, letters, reasons, next, cut, wish, now_ms }, caller))
}

struct Listed<'a> {
    pipeline: &'a PipelineName,
    letters: Vec<(BotId, LetterOfBot)>,
    reasons: Reasons,
    next: Option<String>,
    /// Whether the search ended early.
    cut: bool,
    wish: &'a PageQuery,
    now_ms: u64,
}

fn listed(view: &Listed<'_>, caller: &Caller) -> Markup {
    let Listed { pipeline, letters, next, wish, .. } = view;
    let may = caller.check_scope(Scope::Operate).is_ok();
    let may_all = may && (!wish.bot.is_empty() || caller.check_all_bots().is_ok());
    html! {
        (headline(&format!("Dead letters of {pipeline}"), caller.has_token()))
        p { "Events that failed for good, newest first. A redriven event is handled again at its place in the order of its bot. Back to " a href=(pipeline::path(pipeline)) { "the pipeline" } "." }
        (wish.message())
        form.ask method="get" action=(path(pipeline)) role="search" {
            label for="bot" { "Only of bot" }
            input id="bot" name="bot" maxlength="256" value=(wish.bot);
            label for="reason" { "Reason contains" }
            input id="reason" name="reason" maxlength="1024" value=(wish.reason);
            button type="submit" { "Show" }
            @if !wish.is_empty() { a href=(path(pipeline)) { "All of them" } }
        }
        (by_reason(view))
        @if view.cut {
            p.bad { "The search ended after " (SEARCH_TIME.as_secs()) " seconds, and older dead letters were not read. Name a bot to search less." }
        }
        @if letters.is_empty() {
            p.none { "None." }
        } @else {
            @if may {
                (actions(view, may_all))
            }
            div.wide tabindex="0" role="region" aria-label="Dead letters" {
                table.letters {
                    thead {
                        tr {
                            @if may { th scope="col" { "Select" } }
                            th scope="col" { "Died" }
                            th scope="col" { "Bot" }
                            th scope="col" { "Event" }
                            th.number scope="col" { "Attempts" }
                            th scope="col" { "Reason" }
                            @if may { th scope="col" { "Action" } }
                        }
                    }
                    tbody { @for (of, letter) in letters { (row(view, of, letter, may)) } }
                }
            }
            @if let Some(next) = next {
                p { a href=(wish.next(next)) { "Next " (LETTERS) } }
            }
        }
    }
}

/// The buttons for the selected letters, and for all that the filter finds.
fn actions(view: &Listed<'_>, may_all: bool) -> Markup {
    let Listed { pipeline, wish, .. } = view;
    let of = match (wish.bot.as_str(), wish.reason.as_str()) {
        ("", "") => String::new(),
        (bot, "") => format!(" of {}", short(bot)),
        _ => " that the filter finds".to_owned(),
    };
    let all = |deed: &str, text: &str| {
        html! {
            form method="get" action={ (path(pipeline)) "/" (deed) } {
                @if !wish.bot.is_empty() { input type="hidden" name="bot" value=(wish.bot); }
                @if !wish.reason.is_empty() { input type="hidden" name="reason" value=(wish.reason); }
                button type="submit" { (text) " all" (of) "…" }
            }
        }
    };
    html! {
        div.actions {
            form #chosen method="post" action={ (path(pipeline)) "/chosen" } {
                (wish.hidden())
                button type="submit" name="deed" value="redrive" { "Redrive selected…" }
                " "
                button type="submit" name="deed" value="drop" { "Drop selected…" }
            }
            @if may_all {
                (all("redrive", "Redrive"))
                (all("drop", "Drop"))
            }
        }
    }
}

/// The most frequent reasons.
fn by_reason(view: &Listed<'_>) -> Markup {
    let Listed { pipeline, reasons: Reasons { found, more }, wish, .. } = view;
    let others: u64 = found.iter().skip(REASONS).map(|(_, count)| count).sum();
    html! {
        @if !found.is_empty() {
            section #reasons {
                h2 { "By reason" }
                @if *more { p.fine { "Of the newest dead letters only: about " (grouped(GROUPED as u64)) " of them." } }
                div.wide tabindex="0" role="region" aria-label="By reason" {
                    table {
                        thead { tr { th.number scope="col" { "Dead letters" } th scope="col" { "Reason" } } }
                        tbody {
                            @for (reason, count) in found.iter().take(REASONS) {
                                tr data-key=(reason) {
                                    td.number { (grouped(*count)) }
                                    td.text {
                                        a href=(wish.with_reason(pipeline, searched(reason))) aria-current=[(wish.reason == *reason).then_some("true")] {
                                            @if reason.is_empty() { "(none)" } @else { (short(reason)) }
                                        }
                                    }
                                }
                            }
                            @if others > 0 {
                                tr { td.number { (grouped(others)) } td.none { "with " (grouped((found.len() - REASONS) as u64)) " other reasons" } }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The part of a reason that a link searches for.
fn searched(reason: &str) -> &str {
    let end = (0..=reason.len().min(512)).rev().find(|&at| reason.is_char_boundary(at));
    &reason[..end.unwrap_or_default()]
}

/// The start of a long text.
fn short(text: &str) -> String {
    let mut shown: String = text.chars().take(TEXT_MAX).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
}

fn row(view: &Listed<'_>, of: &BotId, letter: &LetterOfBot, may: bool) -> Markup {
    let Listed { pipeline, wish, now_ms, .. } = view;
    html! {
        tr data-key=(letter.id) {
            @if may {
                td { input type="checkbox" form="chosen" name={ (bulk::CHOSEN) (letter.id) } aria-label={ "Select " (letter.id) }; }
            }
            td.when { time datetime=(rfc3339(letter.time_ms)) title=(rfc3339(letter.time_ms)) { (spoken(now_ms.saturating_sub(letter.time_ms) / 1_000 * 1_000)) " ago" } }
            th.text scope="row" { a href=(bot::path(of)) { (of) } }
            td.text {
                a href=(wish.one(pipeline, letter.id)) {
                    @match (&letter.kind, &letter.event) {
                        (Some(kind), Some(event)) => { (short(kind)) " " (short(event)) }
                        _ => "cannot be read"
                    }
                }
            }
            td.number { (letter.attempts) }
            td.text { (short(&letter.reason)) }
            @if may {
                td {
                    form method="post" action={ (path(pipeline)) "/" (letter.id) "/redrive" } {
                        (wish.hidden())
                        button type="submit" aria-label={ "Redrive " (letter.id) } { "Redrive" }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue::DeadLetter;

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
        let wish = PageQuery::of_bot("<b>&");
        let one = one::shown(&pipeline, &letter, &wish, &caller).into_string();
        let wish = PageQuery { reason: "<em>\"><i>".to_owned(), ..PageQuery::of_bot("\"><b>") };
        let seen = LetterOfBot {
            id: letter.id,
            event: Some("<i>".to_owned()),
            kind: Some("<u>".to_owned()),
            reason: letter.reason,
            attempts: 3,
            time_ms: 1_000,
        };
        let found = (0..12).map(|n| (format!("<em>{n}"), 20 - n)).collect();
        let view = Listed {
            pipeline: &pipeline,
            letters: vec![(letter.bot, seen)],
            reasons: Reasons { found, more: true },
            next: Some("place".to_owned()),
            cut: true,
            wish: &wish,
            now_ms: 61_000,
        };
        let all = listed(&view, &caller).into_string();
        for page in [&one, &all] {
            for tag in ["<i>", "<b>", "<s>", "<u>", "<em>", "<script"] {
                assert!(!page.contains(tag), "{tag}: {page}");
            }
        }
        for shown in [
            "&lt;/pre&gt;&lt;script&gt;",
            "Drop this dead letter",
            "/pipelines/p/dead?bot=%3Cb%3E%26\"",
            "name=\"bot\" value=\"&lt;b&gt;&amp;\"",
        ] {
            assert!(one.contains(shown), "{shown} is missing in {one}");
        }
        for shown in [
            "1 min ago",
            "Redrive all that the filter finds…",
            "Next 50",
            "with 2 other reasons",
            "The search ended after 2 seconds",
            "name=\"letter-0.1-0\"",
        ] {
            assert!(all.contains(shown), "{shown} is missing in {all}");
        }
    }

    #[test]
    fn letters_with_long_texts_make_a_short_page() {
        let long = "é".repeat(2_000);
        let letter = |n: usize| {
            let letter = LetterOfBot {
                id: format!("0.{n}-0").parse().unwrap(),
                event: Some(long.clone()),
                kind: Some(long.clone()),
                reason: long.clone(),
                attempts: 1,
                time_ms: 1,
            };
            (BotId::parse("b").unwrap(), letter)
        };
        let pipeline = PipelineName::parse("p").unwrap();
        let found = (0..1_000).map(|n| (format!("{n}{long}"), 1)).collect();
        let view = Listed {
            pipeline: &pipeline,
            letters: (0..LETTERS).map(letter).collect(),
            reasons: Reasons { found, more: false },
            next: None,
            cut: false,
            wish: &PageQuery::default(),
            now_ms: 1,
        };
        let page = listed(&view, &Caller::of_tests()).into_string();
        assert!(page.len() < 200_000, "{} bytes", page.len());
        assert!(page.contains("with 990 other reasons"));
    }
}
