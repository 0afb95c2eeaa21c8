//! Every pipeline at a glance: its numbers and small charts.

use maud::{Markup, html};

use super::super::pipelines::Pipeline;
use super::lines::{Combine, Line, Range, Unit, rounded, small};
use super::overview::state;
use super::shared::Overview;
use super::times::aged;
use super::{grouped, pipeline};
use crate::id::PipelineName;
use crate::presence::Pace;
use crate::trend::{Point, Sample};

/// An event that waits for longer, in ms, is highlighted.
const OLD_MS: u64 = 60_000;

/// The points that charts are drawn from.
#[derive(Clone, Copy)]
pub(super) struct Charts<'a> {
    pub(super) points: &'a [Point],
    pub(super) range: Range,
    pub(super) now_ms: u64,
}

impl Charts<'_> {
    pub(super) fn line(
        self,
        name: &PipelineName,
        combine: Combine,
        pick: impl Fn(&Sample) -> f64,
    ) -> Line {
        Line::new(self.points, name, (self.range, self.now_ms), combine, pick)
    }
}

pub(super) fn pipelines(overview: &Overview, charts: Charts<'_>) -> Markup {
    if overview.pipelines.is_empty() {
        return html! {
            p.none { "No pipeline yet. Add a section " code { "[pipelines.NAME]" } " to the configuration." }
        };
    }
    html! {
        div.wide tabindex="0" role="region" aria-label="Pipelines" {
            table.middle {
                thead {
                    tr {
                        th scope="col" { "Pipeline" }
                        th scope="col" { "State" }
                        th scope="col" colspan="2" { "Events queued" }
                        th.number scope="col" { "Oldest" }
                        th.number scope="col" { "In /s" }
                        th scope="col" colspan="2" { "Out /s" }
                        th scope="col" { "Time of a call" }
                        th scope="col" { "Failed calls /s" }
                        th.number scope="col" { "Workers" }
                        th.number scope="col" { "Bots waiting" }
                        th.number scope="col" { "Dead letters" }
                    }
                }
                tbody { @for pipeline in &overview.pipelines { (row(pipeline, charts)) } }
            }
        }
    }
}

fn row(of: &Pipeline, charts: Charts<'_>) -> Markup {
    let Pipeline { name, view, pace, .. } = of;
    let Pace { queued_per_second, settled_per_second, .. } = *pace;
    let depth = charts.line(name, Combine::Max, |sample| sample.depth);
    let out = charts.line(name, Combine::Mean, |sample| sample.settled_per_second);
    let call = charts.line(name, Combine::Mean, |sample| sample.call_ms);
    let failed = charts.line(name, Combine::Mean, |sample| sample.failed_per_second);
    let path = pipeline::path(name);
    html! {
        tr data-key=(name) {
            th scope="row" { a href=(path) { (name) } }
            td { (state(of)) }
            td.number.zero[view.depth == 0] { (grouped(view.depth)) }
            td { (small(&format!("Events queued in {name}"), &depth, Unit::Count)) }
            td.number.zero[view.oldest_age_ms == 0].old[view.oldest_age_ms > OLD_MS] {
                (aged(view.oldest_age_ms, charts.now_ms))
                @if view.oldest_age_ms > OLD_MS { span.said { " (long)" } }
            }
            td.number.zero[queued_per_second == 0.0] { (rounded(queued_per_second)) }
            td.number.zero[settled_per_second == 0.0] { (rounded(settled_per_second)) }
            td { (small(&format!("Events a second out of {name}"), &out, Unit::Count)) }
            td { (small(&format!("Mean time of a call in {name}"), &call, Unit::Milliseconds)) }
            td { (small(&format!("Failed calls a second in {name}"), &failed, Unit::Count)) }
            td.number { (pace.workers_busy) " of " (pace.workers_target) }
            td.number.zero[view.ready + view.parked == 0] { (grouped(view.ready + view.parked)) }
            td.number.zero[view.dead == 0] {
                @if view.dead > 0 { a href={ (path) "/dead" } { (grouped(view.dead)) } } @else { "0" }
            }
        }
    }
}
