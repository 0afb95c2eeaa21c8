//! The page of a pipeline: recent throughput, and its bots.

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{Redirect, Response};
use maud::{Markup, html};
use serde::Deserialize;

use super::super::Api;
use super::super::auth::Caller;
use super::super::bots::Sort;
use super::super::extract::{Path, Query};
use super::super::parameters::Parameters;
use super::super::pipelines::{Pipeline, PipelinePath};
use super::super::problem::{Kind, Problem};
use super::glance::Charts;
use super::lines::{Combine, Range, Unit, large, ranges, rounded};
use super::overview::{may_stop, state};
use super::times::aged;
use super::{Refusal, bot, grouped, headline, reason, reason_field, spoken};
use crate::config::{PUSH, PipelineConfig};
use crate::id::{BotId, PipelineName};
use crate::queue::{BotCursor, BotPage};
use crate::trend::Sample;

/// Number of bots per page.
const BOTS: usize = 50;

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PageQuery {
    #[serde(default)]
    sort: Sort,
    #[serde(default)]
    range: Range,
    cursor: Option<String>,
}

impl PageQuery {
    /// The query of the same page with another order of the bots.
    fn sorted(&self, sort: Sort) -> String {
        format!("?sort={}&range={}", sort.as_str(), self.range.as_str())
    }
}

/// The path of a pipeline's page. A name needs no encoding.
pub(super) fn path(name: &PipelineName) -> String {
    format!("/pipelines/{name}")
}

pub(super) async fn show(
    State(api): State<Arc<Api>>,
    caller: Caller,
    headers: HeaderMap,
    Path(PipelinePath { pipeline }): Path<PipelinePath>,
    wish: Result<Query<PageQuery>, Problem>,
) -> Result<Response, Refusal> {
    let Query(wish) = wish?;
    api.queues.find(&pipeline).await?;
    let title = format!("Pipeline {pipeline}");
    let looked_at = (Arc::clone(&api), caller.clone(), pipeline, wish);
    let content = async |seen: Arc<(Arc<Api>, Caller, PipelineName, PageQuery)>| {
        let (api, caller, pipeline, wish) = &*seen;
        let overview = api.overview().await?;
        let gone = || Problem::new(Kind::NoPipeline, format!("pipeline {pipeline} is not known"));
        let look =
            overview.pipelines.iter().find(|look| look.name == *pipeline).ok_or_else(gone)?;
        let (cursors, path) = (&api.gate.cursors, path(pipeline));
        let after: Option<BotCursor> = cursors.read(&path, wish.cursor.as_deref())?;
        let wanted = |bot: &BotId| caller.covers(bot);
        // It reads the places of all bots.
        let turn = api.large_reads.once(caller);
        turn.take_of_certain().await?;
        let (queue, now) = (api.queues.of(pipeline), api.clock.now());
        let bots = queue.list_bots(wish.sort.order(), after.as_ref(), BOTS, &wanted, now).await?;
        let next = bots.next.as_ref().map(|next| cursors.write(&path, next));
        // The target of a pipeline is not shown to tenants.
        let config = api.queues.configured(pipeline).filter(|_| caller.check_all_bots().is_ok());
        let about = config.map(about);
        let points = api.trend(&overview, wish.range).await?;
        let charts = Charts { points: &points, range: wish.range, now_ms: overview.now_ms };
        Ok(body(charts, look, about.as_deref(), (&bots, next.as_deref()), wish, caller))
    };
    api.live.show((&caller, &headers), &title, looked_at, content).await
}

pub(super) async fn pause(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(of): Path<PipelinePath>,
    fields: Parameters,
) -> Result<Redirect, Refusal> {
    of.pause(&api, &caller, reason(fields)?.as_ref()).await?;
    Ok(Redirect::to(&path(&of.pipeline)))
}

pub(super) async fn resume(
    State(api): State<Arc<Api>>,
    caller: Caller,
    Path(of): Path<PipelinePath>,
) -> Result<Redirect, Refusal> {
    of.resume(&api, &caller).await?;
    Ok(Redirect::to(&path(&of.pipeline)))
}

/// A description of the handler and the events.
fn about(config: &PipelineConfig) -> String {
    let handler = &config.handler;
    let does = match &config.url {
        Some(url) if handler == PUSH => format!("pushes to {url}"),
        _ => format!("handler {handler}"),
    };
    let filter = config.filter.as_ref().map_or_else(String::new, |text| format!(", if {text}"));
    match config.events.as_slice() {
        [] => does,
        events => format!("{does}; takes {}{filter}", events.join(", ")),
    }
}

fn body(
    charts: Charts<'_>,
    look: &Pipeline,
    about: Option<&str>,
    bots: (&BotPage, Option<&str>),
    wish: &PageQuery,
    caller: &Caller,
) -> Markup {
    let Pipeline { name, view, .. } = look;
    html! {
        (headline(&format!("Pipeline {name}"), caller.has_token()))
        div.title {
            p {
                @match view.pause.as_ref().filter(|_| may_stop(caller)) {
                    Some(note) => span.off { (note.words(charts.now_ms, spoken)) },
                    None => (state(look)),
                }
                @if let Some(about) = about { "; " (about) }
            }
            @if may_stop(caller) { (switch(name, view.stopped)) }
        }
        @if caller.covers_all() { (numbers(charts, look, wish)) } @else {
            p { a href={ (path(name)) "/dead" } { "Dead letters" } }
        }
        section #bots {
            div.title {
                h2 { "Bots" }
                nav.choice aria-label="Order of the bots" {
                    (choice(wish.sort == Sort::Depth, &format!("{}#bots", wish.sorted(Sort::Depth)), "Longest queue"))
                    (choice(wish.sort == Sort::Age, &format!("{}#bots", wish.sorted(Sort::Age)), "Oldest event"))
                }
            }
            @if caller.covers_all() {
                p {
                    (grouped(view.ready)) " ready, " (grouped(view.leased)) " being handled, "
                    (grouped(view.parked)) " parked (retrying, waiting to batch, or held back by their rate), " (grouped(view.paused)) " paused."
                }
            }
            (table(bots, wish, charts.now_ms))
        }
    }
}

/// The numbers of all bots together.
fn numbers(charts: Charts<'_>, look: &Pipeline, wish: &PageQuery) -> Markup {
    let Pipeline { name, view, pace, .. } = look;
    html! {
        dl.cards {
            (card("Events", &grouped(view.depth), "in the queues"))
            div {
                dt { "Oldest" }
                dd { (aged(view.oldest_age_ms, charts.now_ms)) }
                dd.about { "age of the oldest event of the bots that are neither paused nor throttled" }
            }
            (card("In", &format!("{}/s", rounded(pace.queued_per_second)), "copied from the bus"))
            (card("Out", &format!("{}/s", rounded(pace.settled_per_second)), "done, dead or delayed"))
            (card("Workers", &format!("{} of {}", pace.workers_busy, pace.workers_target), &format!("busy of the current target; maximum {}", pace.workers_max)))
            (card("Delayed", &grouped(view.delayed), "queued when they are due"))
            div {
                dt { "Dead letters" }
                dd { a href={ (path(name)) "/dead" } { (grouped(view.dead)) } }
                dd.about { "failed for good; can be redriven" }
            }
        }
        section #charts {
            div.title {
                h2 { "Charts" }
                (ranges(wish.range, &format!("&sort={}#charts", wish.sort.as_str())))
            }
            div.charts { (pictures(charts, name)) }
        }
    }
}

fn pictures(charts: Charts<'_>, name: &PipelineName) -> Markup {
    let mean = |pick: fn(&Sample) -> f64| charts.line(name, Combine::Mean, pick);
    let max = |pick: fn(&Sample) -> f64| charts.line(name, Combine::Max, pick);
    let events = [("Events", max(|sample| sample.depth))];
    let rates = [
        ("in", mean(|sample| sample.queued_per_second)),
        ("out", mean(|sample| sample.settled_per_second)),
    ];
    let times =
        [("mean", mean(|sample| sample.call_ms)), ("slowest", max(|sample| sample.call_max_ms))];
    let calls = [
        ("all", mean(|sample| sample.calls_per_second)),
        ("failed", mean(|sample| sample.failed_per_second)),
    ];
    let oldest = [("Oldest", max(|sample| sample.oldest_age_ms))];
    html! {
        div {
            h3 { "Events in the queues" }
            (large(&format!("Events in the queues of {name}"), &events, Unit::Count, "Of all bots together; the largest number of each moment."))
        }
        div {
            h3 { "Events a second" }
            (large(&format!("Events a second in and out of {name}"), &rates, Unit::Count, "The sum of all processes."))
        }
        div {
            h3 { "Time of a call" }
            (large(&format!("Time of a call in {name}"), &times, Unit::Milliseconds, "How long the handler takes for a slice: the mean over the calls of all processes, and the slowest call."))
        }
        div {
            h3 { "Calls a second" }
            (large(&format!("Calls a second in {name}, all and failed"), &calls, Unit::Count, "The sum of all processes. A call fails if it completes no event."))
        }
        div {
            h3 { "Age of the oldest event" }
            (large(&format!("Age of the oldest event in {name}"), &oldest, Unit::Milliseconds, "Of the bots that are neither paused nor throttled; the largest age of each moment."))
        }
    }
}

fn card(name: &str, value: &str, about: &str) -> Markup {
    html! { div { dt { (name) } dd { (value) } dd.about { (about) } } }
}

fn choice(is_on: bool, href: &str, text: &str) -> Markup {
    html! { a href=(href) aria-current=[is_on.then_some("page")] { (text) } }
}

fn switch(name: &PipelineName, stopped: bool) -> Markup {
    html! {
        @if stopped {
            form method="post" action={ (path(name)) "/resume" } { button type="submit" { "Resume the pipeline" } }
        } @else {
            form method="post" action={ (path(name)) "/pause" } {
                (reason_field())
                " "
                button type="submit" { "Pause the pipeline" }
            }
        }
    }
}

fn table((bots, next): (&BotPage, Option<&str>), wish: &PageQuery, now_ms: u64) -> Markup {
    html! {
        @if bots.bots.is_empty() {
            p.none { "No bot has queued events, is parked or is paused." }
        } @else {
            div.wide tabindex="0" role="region" aria-label="Bots" {
                table {
                    thead {
                        tr {
                            th scope="col" { "Bot" }
                            th scope="col" { "State" }
                            th.number scope="col" { "Events" }
                            th.number scope="col" { "Oldest" }
                            th.number scope="col" { "Attempts" }
                            th.number scope="col" { "Weight" }
                        }
                    }
                    tbody {
                        @for look in &bots.bots {
                            tr data-key=(look.bot) {
                                th.text scope="row" { a href=(bot::path(&look.bot)) { (look.bot) } }
                                td { (bot::state(look.state)) }
                                td.number { (grouped(look.depth)) }
                                td.number { (aged(look.oldest_age_ms, now_ms)) }
                                td.number.zero[look.attempts == 0] { (look.attempts) }
                                td.number { (look.weight) }
                            }
                        }
                    }
                }
            }
            @if let Some(next) = next {
                p { a href={ (wish.sorted(wish.sort)) "&cursor=" (next) "#bots" } { "Next " (BOTS) } }
            }
        }
    }
}
