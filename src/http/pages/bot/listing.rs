//! The list of bots over all pipelines: by the length of their queues, the age of their events, their
//! rate or their failures; with a filter.

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse as _, Redirect, Response};
use maud::{Markup, html};
use serde::{Deserialize, Serialize};

use super::super::super::Api;
use super::super::super::auth::Caller;
use super::super::super::bots::Sort;
use super::super::super::extract::Query;
use super::super::super::problem::Problem;
use super::super::overview::ranking;
use super::super::{Refusal, grouped, headline, page, pipeline, spoken};
use super::content::which;
use super::{encoded, path, short, state};
use crate::clock::millis;
use crate::id::{BotId, PipelineName};
use crate::queue::{BotCursor, BotFilter, BotState, BotView};

/// Number of bots per page.
const BOTS: usize = 50;
/// Number of bots that are looked at for one page, in steps, when only some states are wanted.
const STEP: usize = 200;
const STEPS: usize = 5;
/// The time of which the rate is shown, ms.
const RATE_MS: u64 = 60_000;

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in super::super) struct Asked {
    /// A bot to show. A form may send an empty text.
    #[serde(default)]
    bot: String,
    /// The start of the ids of the bots.
    #[serde(default)]
    prefix: String,
    #[serde(default)]
    state: Wanted,
    sort: Option<Order>,
    cursor: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Wanted {
    #[default]
    #[serde(alias = "")]
    Any,
    Ready,
    Leased,
    Parked,
    Paused,
}

impl Wanted {
    const ALL: [(Self, &'static str, &'static str); 5] = [
        (Self::Any, "any", "any"),
        (Self::Ready, "ready", "waits for a worker"),
        (Self::Leased, "leased", "being handled"),
        (Self::Parked, "parked", "parked"),
        (Self::Paused, "paused", "paused"),
    ];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(one, ..)| *one == self).map_or("any", |(_, name, _)| name)
    }

    fn only(self) -> Option<BotState> {
        match self {
            Self::Any => None,
            Self::Ready => Some(BotState::Ready),
            Self::Leased => Some(BotState::Leased),
            Self::Parked => Some(BotState::Parked),
            Self::Paused => Some(BotState::Paused),
        }
    }

    fn fits(self, look: &BotView) -> bool {
        self.only().is_none_or(|state| look.state == state)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Order {
    Depth,
    Age,
    Rate,
    Failing,
}

impl Order {
    const ALL: [(Self, &'static str, &'static str); 4] = [
        (Self::Depth, "depth", "longest queue"),
        (Self::Age, "age", "oldest event"),
        (Self::Rate, "rate", "most events in the last minute"),
        (Self::Failing, "failing", "failing for longest"),
    ];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(one, ..)| *one == self).map_or("depth", |(_, name, _)| name)
    }
}

/// A bot in a pipeline.
struct Row {
    pipeline: PipelineName,
    look: BotView,
    /// Events that left its queue in the last minute, or why it fails and since when.
    more: Option<String>,
}

#[derive(Default)]
struct Found {
    rows: Vec<Row>,
    next: Option<BotCursor>,
}

/// Asks for a bot, and lists bots.
pub(in super::super) async fn ask(
    State(api): State<Arc<Api>>,
    caller: Caller,
    headers: HeaderMap,
    asked: Result<Query<Asked>, Problem>,
) -> Result<Response, Refusal> {
    let Query(asked) = asked?;
    if !asked.bot.is_empty() {
        let bot = BotId::parse(&asked.bot);
        let bot = bot.map_err(|error| Problem::field("bot", error.to_string()))?;
        return Ok(Redirect::to(&path(&bot)).into_response());
    }
    let Some(sort) = asked.sort else {
        return overview(api, caller, headers, asked).await;
    };
    // A list reads the ids of all bots, so it is not repeated every few seconds.
    let cursors = &api.gate.cursors;
    let after: Option<(Order, BotCursor)> = cursors.read("/bots", asked.cursor.as_deref())?;
    if after.as_ref().is_some_and(|(order, _)| *order != sort) {
        return Err(Problem::field("cursor", "it belongs to a list with another sort").into());
    }
    let after = after.map(|(_, cursor)| cursor);
    let wanted = |bot: &BotId| caller.covers(bot) && bot.as_str().starts_with(&*asked.prefix);
    // It reads the places, the attempts or the failures of all bots.
    let _turn = api.large_reads.take(caller.name()).await?;
    let found = match sort {
        Order::Depth => ranked(&api, Sort::Depth, asked.state, after, &wanted).await?,
        Order::Age => ranked(&api, Sort::Age, asked.state, after, &wanted).await?,
        Order::Rate => busy(&api, asked.state, &wanted).await?,
        Order::Failing => failing(&api, asked.state, &wanted).await?,
    };
    let next = found.next.as_ref().map(|next| cursors.write("/bots", &(sort, next)));
    let content = html! {
        (headline("Bots", caller.has_token()))
        (which(None))
        (filter(&asked))
        (table(&found.rows, sort))
        @if let Some(next) = next { p { a href=(continued(&asked, sort, &next)) { "Next " (BOTS) } } }
    };
    Ok(page("Bots", &content))
}

/// The bots with the longest queues, kept up to date.
async fn overview(
    api: Arc<Api>,
    caller: Caller,
    headers: HeaderMap,
    asked: Asked,
) -> Result<Response, Refusal> {
    let looked_at = (Arc::clone(&api), caller.clone(), asked);
    let content = async |seen: Arc<(Arc<Api>, Caller, Asked)>| {
        let (api, caller, asked) = &*seen;
        let overview = api.overview().await?;
        let busiest = api.busiest(caller, &overview).await?;
        Ok(html! {
            (headline("Bots", caller.has_token()))
            p { "Queues, rules and subscribers of a bot." }
            (which(None))
            (filter(asked))
            section {
                h2 { "Bots with the longest queues" }
                (ranking(&busiest))
            }
        })
    };
    api.live.show((&caller, &headers), "Bots", looked_at, content).await
}

type Wants<'a> = &'a (dyn Fn(&BotId) -> bool + Sync);

/// The bots of all pipelines by depth or age.
async fn ranked(
    api: &Api,
    sort: Sort,
    state: Wanted,
    mut after: Option<BotCursor>,
    wanted: Wants<'_>,
) -> Result<Found, Problem> {
    let mut found = Found::default();
    let (names, step) = (api.queues.names().await?, if state == Wanted::Any { BOTS } else { STEP });
    for _ in 0..STEPS {
        let (mut merged, mut more) = (Vec::new(), false);
        for pipeline in &names {
            let (queue, now) = (api.queues.of(pipeline), api.clock.now());
            let filter = BotFilter { wanted, state: state.only(), failing: false };
            let (bots, next) =
                queue.rank_bots(sort.order(), after.as_ref(), step, filter, now).await?;
            more |= next.is_some();
            merged.extend(bots.into_iter().map(|(at, look)| (at, pipeline.clone(), look)));
        }
        merged.sort_by(|a, b| (&a.0, &a.1).cmp(&(&b.0, &b.1)));
        for (taken, (at, pipeline, look)) in merged.into_iter().enumerate() {
            // Bots at the same place are on the same page: the next one starts behind the place.
            let is_tied = after.as_ref() == Some(&at);
            if !is_tied && (taken >= step || found.rows.len() >= BOTS) {
                more = true;
                break;
            }
            after = Some(at);
            if state.fits(&look) {
                found.rows.push(Row { pipeline, look, more: None });
            }
        }
        found.next = after.clone().filter(|_| more);
        if !more || found.rows.len() >= BOTS {
            break;
        }
    }
    Ok(found)
}

/// The bots with the most events in the last minute.
async fn busy(api: &Api, state: Wanted, wanted: Wants<'_>) -> Result<Found, Problem> {
    let now = api.clock.now();
    let from_ms = millis(now).saturating_sub(RATE_MS);
    let mut all = Vec::new();
    for pipeline in api.queues.names().await? {
        let mut bots = api.queues.of(&pipeline).busy_since(from_ms, wanted).await?;
        bots.truncate(STEP);
        all.extend(bots.into_iter().map(|(bot, count)| (count, pipeline.clone(), bot)));
    }
    all.sort_by(|a, b| (b.0, &a.1, &a.2).cmp(&(a.0, &b.1, &b.2)));
    all.truncate(STEP);
    let all = all.into_iter().map(|(count, pipeline, bot)| (pipeline, bot, grouped(count)));
    looked_at(api, all.collect(), state).await
}

/// The bots that fail for longest, among those that are looked at for problems.
async fn failing(api: &Api, state: Wanted, wanted: Wants<'_>) -> Result<Found, Problem> {
    let now_ms = millis(api.clock.now());
    let mut all = Vec::new();
    for pipeline in api.queues.names().await? {
        let Some(failing) = api.queues.of(&pipeline).failing().await? else { continue };
        let each = failing.bots.into_iter().zip(failing.each);
        let each = each.filter(|(bot, _)| wanted(bot));
        all.extend(each.map(|(bot, failure)| (failure.since_ms, pipeline.clone(), bot, failure)));
    }
    all.sort_by(|a, b| (a.0, &a.1, &a.2).cmp(&(b.0, &b.1, &b.2)));
    all.truncate(STEP);
    let said = all.into_iter().map(|(since, pipeline, bot, failure)| {
        let ago = spoken(now_ms.saturating_sub(since) / 1_000 * 1_000);
        (pipeline, bot, format!("for {ago}: {}", short(&failure.reason)))
    });
    looked_at(api, said.collect(), state).await
}

/// The first of these bots that are in a wanted state.
async fn looked_at(
    api: &Api,
    all: Vec<(PipelineName, BotId, String)>,
    state: Wanted,
) -> Result<Found, Problem> {
    let mut views = std::collections::HashMap::new();
    for pipeline in api.queues.names().await? {
        let of = all.iter().filter(|(name, ..)| *name == pipeline);
        let bots: Vec<BotId> = of.map(|(_, bot, _)| bot.clone()).collect();
        if !bots.is_empty() {
            let now = api.clock.now();
            let found = api.queues.of(&pipeline).view_each(&bots, now).await?;
            views
                .extend(found.into_iter().map(|look| ((pipeline.clone(), look.bot.clone()), look)));
        }
    }
    let rows = all.into_iter().filter_map(|(pipeline, bot, more)| {
        let look = views.remove(&(pipeline.clone(), bot))?;
        state.fits(&look).then_some(Row { pipeline, look, more: Some(more) })
    });
    Ok(Found { rows: rows.take(BOTS).collect(), next: None })
}

fn continued(asked: &Asked, sort: Order, next: &str) -> String {
    format!(
        "?sort={}&state={}&prefix={}&cursor={next}",
        sort.name(),
        asked.state.name(),
        encoded(&asked.prefix)
    )
}

/// The form of the filter.
fn filter(asked: &Asked) -> Markup {
    let sort = asked.sort.unwrap_or(Order::Depth);
    html! {
        form.ask method="get" action="/bots" aria-label="List of bots" {
            label for="sort" { "Order" }
            select id="sort" name="sort" {
                @for (one, name, label) in Order::ALL { option value=(name) selected[one == sort] { (label) } }
            }
            label for="state" { "State" }
            select id="state" name="state" {
                @for (one, name, label) in Wanted::ALL { option value=(name) selected[one == asked.state] { (label) } }
            }
            label for="prefix" { "Id starts with" }
            input id="prefix" name="prefix" maxlength="256" value=(asked.prefix);
            button type="submit" { "List" }
        }
    }
}

fn table(rows: &[Row], sort: Order) -> Markup {
    let more = match sort {
        Order::Rate => Some("Out, last minute"),
        Order::Failing => Some("Fails"),
        Order::Depth | Order::Age => None,
    };
    html! {
        section {
            @if rows.is_empty() {
                p.none { "No bot fits." }
            } @else {
                div.wide tabindex="0" role="region" aria-label="Bots" {
                    table {
                        thead {
                            tr {
                                th scope="col" { "Bot" }
                                th scope="col" { "Pipeline" }
                                th scope="col" { "State" }
                                th.number scope="col" { "Events" }
                                th.number scope="col" { "Oldest" }
                                th.number scope="col" { "Attempts" }
                                @if let Some(more) = more { th.number[sort == Order::Rate] scope="col" { (more) } }
                            }
                        }
                        tbody { @for row in rows { (line(row, sort)) } }
                    }
                }
            }
            @match sort {
                Order::Rate => p.fine { "From the attempts that are kept. Under full load only the newest of them are read." },
                Order::Failing => p.fine { "Fairlane checks up to 128 bots per shard: those that wait shortest and longest, and the first ready ones." },
                Order::Depth | Order::Age => {},
            }
        }
    }
}

fn line(Row { pipeline, look, more }: &Row, sort: Order) -> Markup {
    html! {
        tr {
            th.text scope="row" { a href=(path(&look.bot)) { (look.bot) } }
            td { a href=(pipeline::path(pipeline)) { (pipeline) } }
            td { (state(look.state)) }
            td.number.zero[look.depth == 0] { (grouped(look.depth)) }
            td.number.zero[look.oldest_age_ms == 0] { (spoken(look.oldest_age_ms)) }
            td.number.zero[look.attempts == 0] { (look.attempts) }
            @if let Some(more) = more {
                td.number[sort == Order::Rate].text[sort == Order::Failing] { (more) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(prefix: &str, sort: Option<Order>) -> Asked {
        Asked {
            bot: String::new(),
            prefix: prefix.to_owned(),
            state: Wanted::Parked,
            sort,
            cursor: None,
        }
    }

    #[test]
    fn the_form_keeps_what_was_asked_and_the_next_page_too() {
        let asked = asked("\"><b>&", Some(Order::Age));
        let form = filter(&asked).into_string();
        assert!(!form.contains("<b>"), "{form}");
        for shown in ["value=\"age\" selected", "value=\"parked\" selected"] {
            assert!(form.contains(shown), "{shown} is missing in {form}");
        }
        assert_eq!(
            continued(&asked, Order::Age, "c"),
            "?sort=age&state=parked&prefix=%22%3E%3Cb%3E%26&cursor=c"
        );
    }

    #[test]
    fn ids_and_reasons_of_tenants_are_escaped() {
        let row = Row {
            pipeline: PipelineName::parse("p").unwrap(),
            look: super::super::tests::waiting("<b>"),
            more: Some("for 1 min: <em>".to_owned()),
        };
        let page = table(&[row], Order::Failing).into_string();
        assert!(!page.contains("<b>") && !page.contains("<em>"), "{page}");
        assert!(page.contains("/bots/%3Cb%3E") && page.contains("for 1 min"), "{page}");
        assert!(table(&[], Order::Rate).into_string().contains("No bot fits."));
    }
}
