//! The first page: every pipeline at a glance, the busiest bots, and the state of Redis, MongoDB
//! and the processes.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use maud::{Markup, html};
use serde::Deserialize;
use tokio::time::{Instant, timeout_at};

use super::super::Api;
use super::super::auth::Caller;
use super::super::extract::Query;
use super::super::pipelines::Pipeline;
use super::super::problem::Problem;
use super::super::problems::findings;
use super::glance::{Charts, pipelines};
use super::lines::{Range, ranges};
use super::shared::{Busiest, Overview};
use super::times::{aged, since};
use super::{Refusal, bot, grouped, headline, pipeline, problems};
use crate::config::Scope;
use crate::presence::BusView;
use crate::trend::Point;

/// Time limit of the tables.
const WITHIN: Duration = Duration::from_secs(3);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PageQuery {
    #[serde(default)]
    range: Range,
}

pub(super) async fn show(
    State(api): State<Arc<Api>>,
    caller: Caller,
    headers: HeaderMap,
    wish: Result<Query<PageQuery>, Problem>,
) -> Result<Response, Refusal> {
    let Query(PageQuery { range }) = wish?;
    let looked_at = (Arc::clone(&api), caller.clone(), range);
    let content = async |seen: Arc<(Arc<Api>, Caller, Range)>| {
        let (api, caller, range) = (&seen.0, &seen.1, seen.2);
        // The panel is shown even if the tables would take too long.
        let (facts, tables) = tokio::join!(api.problems.facts(), tables(api, caller, range));
        let panel = problems::panel(&findings(&facts, caller), facts.now_ms);
        let Some((overview, busiest, points)) = tables else {
            return Ok(without_redis(caller, &panel, facts.redis.others_answer));
        };
        if facts.only_error().is_some() {
            return Ok(without_redis(caller, &panel, false));
        }
        let mongodb = api.live.health.mongodb.as_ref().map(|mongodb| mongodb.now());
        let is_unused = caller.covers_all() && problems::is_unused(&facts);
        let panel = html! {
            (panel)
            @if is_unused { (problems::first_event(api, caller)) }
        };
        let charts = Charts { points: &points, range, now_ms: overview.now_ms };
        Ok(body((&overview, busiest.as_deref()), charts, mongodb, caller, &panel))
    };
    api.live.show((&caller, &headers), "Overview", looked_at, content).await
}

/// What the tables show. The ranking takes longest, so the others do not wait for it.
type Tables = (Arc<Overview>, Option<Arc<Busiest>>, Arc<Vec<Point>>);

/// `None`: Redis does not answer in time.
async fn tables(api: &Arc<Api>, caller: &Caller, range: Range) -> Option<Tables> {
    let until = Instant::now() + WITHIN;
    let overview = timeout_at(until, api.overview()).await.ok()?.ok()?;
    let (busiest, points) = tokio::join!(
        timeout_at(until, api.busiest(caller, &overview)),
        timeout_at(until, api.trend(&overview, range)),
    );
    let busiest = busiest.ok().transpose().ok()?;
    Some((overview, busiest, points.ok()?.ok()?))
}

/// Whether the caller may pause and resume a whole pipeline.
pub(super) fn may_stop(caller: &Caller) -> bool {
    caller.check_scope(Scope::Operate).is_ok() && caller.check_all_bots().is_ok()
}

/// The page while Redis, or a part of its primaries, does not answer.
fn without_redis(caller: &Caller, panel: &Markup, others_answer: bool) -> Markup {
    let what = if others_answer { "A part of Redis" } else { "Redis" };
    html! {
        (headline("Overview", caller.has_token()))
        @if caller.covers_all() { (panel) }
        p.bad { (what) " does not answer in time. The pipelines and bots cannot be shown. Nothing is lost. This page tries again." }
    }
}

fn body(
    (overview, busiest): (&Overview, Option<&Busiest>),
    charts: Charts<'_>,
    mongodb: Option<bool>,
    caller: &Caller,
    panel: &Markup,
) -> Markup {
    // The numbers of all bots together, and the machines, are no tenant's business.
    let sees_all = caller.covers_all();
    html! {
        (headline("Overview", caller.has_token()))
        (panel)
        @if sees_all { (health(overview, mongodb)) }
        section {
            div.title {
                h2 { "Pipelines" }
                @if sees_all { (ranges(charts.range, "")) }
            }
            @if sees_all { (pipelines(overview, charts)) } @else { (names(overview)) }
        }
        section {
            h2 { "Bots with the longest queues" }
            @match busiest {
                Some(busiest) => (ranking(busiest)),
                None => { p.none { "The ranking takes longer than usual. This page tries again." } }
            }
        }
        @if sees_all {
            section {
                h2 { "Processes" }
                (processes(overview))
            }
        }
    }
}

/// The pipelines without their numbers.
fn names(overview: &Overview) -> Markup {
    html! {
        table {
            thead { tr { th scope="col" { "Pipeline" } th scope="col" { "State" } } }
            tbody {
                @for of in &overview.pipelines {
                    tr data-key=(of.name) {
                        th scope="row" { a href=(pipeline::path(&of.name)) { (of.name) } }
                        td { (state(of)) }
                    }
                }
            }
        }
    }
}

fn health(overview: &Overview, mongodb: Option<bool>) -> Markup {
    let Overview { redis, bus, .. } = overview;
    let used = bytes(redis.memory_used);
    let memory = match redis.memory_max {
        0 => format!("{used} used, no limit"),
        max => format!("{used} of {} used", bytes(max)),
    };
    let full = redis.memory_max > 0 && redis.memory_used >= redis.memory_max / 10 * 8;
    html! {
        dl.cards {
            (card("Redis", if full { "nearly full" } else { "up" }, full, &format!("{memory}; version {}", redis.version)))
            @match mongodb {
                Some(true) => (card("MongoDB", "up", false, "answers")),
                Some(false) => (card("MongoDB", "unavailable", true, "counters and automations wait; nothing is lost")),
                None => (card("MongoDB", "–", false, "not in use by this process")),
            }
            @if let Some(bus) = bus {
                @let unread = bus.unread.unwrap_or(0);
                (card("Bus", &grouped(unread), !bus.reader, match (bus.reader, unread) {
                    (true, 0) => "unread: every event is in its queues",
                    (true, _) => "unread: being copied into the queues",
                    (false, _) => "unread: no process reads the bus",
                }))
            }
            @for view in &overview.buses {
                (card(&view.bus, &grouped(view.unread), view.failing.is_some() || view.processes == 0, match view {
                    BusView { failing: Some(_), .. } => "unread: the bus cannot be read now",
                    BusView { processes: 0, .. } => "unread: no process reads the bus",
                    BusView { unread: 0, .. } => "unread: every event is in its queues",
                    _ => "unread: being copied into the queues",
                }))
            }
            (card("Processes", &grouped(overview.processes.len() as u64), overview.processes.is_empty(), "seen in the last 16 seconds"))
        }
    }
}

fn card(name: &str, value: &str, bad: bool, about: &str) -> Markup {
    html! { div.bad[bad] { dt { (name) } dd { (value) } dd.about { (about) } } }
}

/// The state of a pipeline by configuration and operator.
pub(super) fn state(pipeline: &Pipeline) -> Markup {
    html! {
        @if pipeline.view.stopped { span.off { "paused" } }
        @else if !pipeline.enabled { span.none { "not run here" } }
        @else if pipeline.pace.workers_max == 0 { span.off { "no workers" } }
        @else { "runs" }
    }
}

pub(super) fn ranking(busiest: &Busiest) -> Markup {
    html! {
        @if busiest.bots.is_empty() && busiest.left_out.is_empty() {
            p.none { "No queued events." }
        }
        @if !busiest.bots.is_empty() {
            div.wide tabindex="0" role="region" aria-label="Bots with the longest queues" {
                table {
                    thead {
                        tr {
                            th scope="col" { "Bot" }
                            th scope="col" { "Pipeline" }
                            th.number scope="col" { "Events" }
                            th.number scope="col" { "Oldest" }
                            th scope="col" { "State" }
                        }
                    }
                    tbody {
                        @for (pipeline, look) in &busiest.bots {
                            tr data-key={ (pipeline) "/" (look.bot) } {
                                th.text scope="row" { a href=(bot::path(&look.bot)) { (look.bot) } }
                                td { a href=(super::pipeline::path(pipeline)) { (pipeline) } }
                                td.number { (grouped(look.depth)) }
                                td.number { (aged(look.oldest_age_ms, busiest.now_ms)) }
                                td { (bot::state(look.state)) }
                            }
                        }
                    }
                }
            }
        }
        @for name in &busiest.left_out {
            p.none { a href=(pipeline::path(name)) { (name) } " has too many bots to rank them here. Its page ranks them." }
        }
    }
}

fn processes(overview: &Overview) -> Markup {
    html! {
        @if overview.processes.is_empty() {
            p.none { "No process was seen in the last 16 seconds." }
        } @else {
            div.wide tabindex="0" role="region" aria-label="Processes" {
                table {
                    thead {
                        tr {
                            th scope="col" { "Machine" }
                            th.number scope="col" { "Process" }
                            th scope="col" { "Roles" }
                            th scope="col" { "Version" }
                            th.number scope="col" { "Runs for" }
                        }
                    }
                    tbody {
                        @for process in &overview.processes {
                            tr data-key=(process.id) {
                                th scope="row" { (process.host) }
                                td.number { (process.pid) }
                                td { (process.roles.join(", ")) }
                                td { (process.version) }
                                td.number { (since(process.started_ms, overview.now_ms)) }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Formats bytes for people.
pub(super) fn bytes(n: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "two digits are shown")]
    let size = n as f64;
    match n {
        0..1_048_576 => format!("{:.0} KiB", size / 1_024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", size / 1_048_576.0),
        _ => format!("{:.1} GiB", size / 1_073_741_824.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{BotId, PipelineName};
    use crate::presence::Pace;
    use crate::queue::{BotState, BotView, PipelineView};
    use crate::redis::ServerInfo;

    fn overview() -> Overview {
        let view = PipelineView { depth: 1_234, dead: 2, ready: 3, ..PipelineView::default() };
        let pace = Pace { settled_per_second: 12.5, workers_max: 4, ..Pace::default() };
        let name = PipelineName::parse("shop").unwrap();
        Overview {
            pipelines: vec![Pipeline { name, enabled: true, view, pace }],
            trend: Arc::default(),
            processes: Vec::new(),
            redis: ServerInfo { memory_used: 95, memory_max: 100, ..ServerInfo::default() },
            bus: None,
            buses: Vec::new(),
            now_ms: 0,
        }
    }

    fn charts() -> Charts<'static> {
        Charts { points: &[], range: Range::Recent, now_ms: 0 }
    }

    #[test]
    fn a_pipeline_a_bot_and_the_problems_are_seen_at_a_glance() {
        let caller = Caller::of_tests();
        let look = BotView {
            bot: BotId::parse("<b>\"&'").unwrap(),
            state: BotState::Paused,
            depth: 777,
            set_aside: 0,
            oldest_age_ms: 1_000,
            fence: None,
            until_ms: None,
            attempts: 0,
            weight: crate::rate::Weight::ONE,
            rate: None,
            burst: None,
            throttled_since_ms: None,
            pause: None,
        };
        let bots = vec![(PipelineName::parse("shop").unwrap(), look)];
        let left_out = vec![PipelineName::parse("crowd").unwrap()];
        let page = body(
            (&overview(), Some(&Busiest { bots, left_out, now_ms: 0 })),
            charts(),
            Some(false),
            &caller,
            &problems::panel(&[], 0),
        );
        let page = page.into_string();
        for shown in [
            "1,234",
            "777",
            ">paused<",
            "/pipelines/shop/dead",
            "nearly full",
            "unavailable",
            "crowd",
            "/bots/%3Cb%3E%22%26'",
        ] {
            assert!(page.contains(shown), "{shown} is missing in {page}");
        }
        assert!(!page.contains("<b>"), "{page}");
    }

    #[test]
    fn a_token_of_certain_bots_sees_no_numbers_of_all_bots_and_no_machines() {
        let caller = Caller::new("shop", vec![Scope::Read], &["shop-*".to_owned()]);
        let busiest = Busiest { bots: Vec::new(), left_out: Vec::new(), now_ms: 0 };
        let page = body((&overview(), Some(&busiest)), charts(), Some(true), &caller, &html! {})
            .into_string();
        assert!(page.contains("/pipelines/shop"), "{page}");
        for hidden in ["1,234", "12.5", "Redis", "Processes", "MongoDB"] {
            assert!(!page.contains(hidden), "{hidden} is in {page}");
        }
    }

    #[test]
    fn the_pipelines_do_not_wait_for_the_ranking() {
        let caller = Caller::of_tests();
        let page = body((&overview(), None), charts(), None, &caller, &html! {}).into_string();
        assert!(page.contains("1,234") && page.contains("The ranking takes longer"), "{page}");
    }

    #[test]
    fn sizes_are_written_for_people() {
        assert_eq!([512, 3 << 20, 5 << 30].map(bytes), ["0 KiB", "3.0 MiB", "5.0 GiB"]);
    }
}
