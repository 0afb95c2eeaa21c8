//! The chart: goodput and p99 over the offered load, as SVG.

use std::fmt::Write as _;

use super::runs::same;
use super::{Figures, Protection, Report, Workload};
use crate::axis::{label, nice};

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 230.0;
/// The space for the axes: left, top, right, bottom.
const EDGE: (f64, f64, f64, f64) = (52.0, 34.0, 12.0, 38.0);
const SERIES: [(Protection, &str, &str); 3] = [
    (Protection::Admission, "Fairlane's admission", "#0a7d4f"),
    (Protection::Tower, "tower, 64 at once", "#b26a00"),
    (Protection::None, "nothing", "#c62f3b"),
];

/// A row per workload: goodput on the left, the p99 of good answers on the right.
pub(crate) fn svg(report: &Report) -> String {
    let rows = report.workloads.len();
    #[expect(clippy::cast_precision_loss, reason = "three at most")]
    let height = rows as f64 * HEIGHT + 28.0;
    let width = WIDTH * 2.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"Goodput and p99 over offered load\" font-family=\"system-ui, sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    for (place, (_, name, colour)) in SERIES.iter().enumerate() {
        #[expect(clippy::cast_precision_loss, reason = "three")]
        let x = 56.0 + place as f64 * 170.0;
        let _ = writeln!(
            svg,
            "<line x1=\"{x}\" y1=\"14\" x2=\"{}\" y2=\"14\" stroke=\"{colour}\" stroke-width=\"2.5\"/><text x=\"{}\" y=\"18\" fill=\"#222\">{name}</text>",
            x + 22.0,
            x + 28.0
        );
    }
    for (row, figures) in report.workloads.iter().enumerate() {
        #[expect(clippy::cast_precision_loss, reason = "three at most")]
        let top = 28.0 + row as f64 * HEIGHT;
        let name = match figures.workload {
            Workload::Cpu => "2 ms on the processor",
            Workload::Dependency => "a dependency with 8 slots of 4 ms",
            Workload::Reads => "totals of the real service",
        };
        let goodput = |load: f64, protection| {
            point(figures, load, protection).map(|point| point.goodput_per_second)
        };
        let p99 =
            |load: f64, protection| point(figures, load, protection).map(|point| point.p99_ms);
        let title = format!("{name}: answered in time per second");
        panel(&mut svg, (0.0, top), &title, figures, &goodput);
        #[expect(clippy::cast_precision_loss, reason = "milliseconds")]
        let deadline = figures.deadline_ms as f64;
        let title = format!("p99 of these, ms (deadline {deadline})");
        panel(&mut svg, (WIDTH, top), &title, figures, &p99);
    }
    svg.push_str("</svg>\n");
    svg
}

fn point(figures: &Figures, load: f64, protection: Protection) -> Option<&super::Point> {
    figures.curve.iter().find(|point| same(point.load, load) && point.protection == protection)
}

fn panel(
    svg: &mut String,
    (left, top): (f64, f64),
    title: &str,
    figures: &Figures,
    value: &dyn Fn(f64, Protection) -> Option<f64>,
) {
    let (edge_left, edge_top, edge_right, edge_bottom) = EDGE;
    let mut loads: Vec<f64> = figures.curve.iter().map(|point| point.load).collect();
    loads.sort_by(f64::total_cmp);
    loads.dedup();
    let values = loads.iter().flat_map(|load| SERIES.map(|(series, ..)| value(*load, series)));
    let highest = nice(values.flatten().fold(0.0, f64::max));
    let (Some(first), Some(last)) = (loads.first(), loads.last()) else { return };
    // A logarithmic axis, because half and twice the capacity are equally far from it.
    let x = |load: f64| {
        let share = (load / first).ln() / (last / first).ln().max(1e-9);
        left + edge_left + share * (WIDTH - edge_left - edge_right)
    };
    let y = |value: f64| {
        let bottom = top + HEIGHT - edge_bottom;
        bottom - value / highest * (HEIGHT - edge_top - edge_bottom)
    };
    let _ = writeln!(
        svg,
        "<text x=\"{}\" y=\"{}\" fill=\"#222\" font-weight=\"600\">{title}</text>",
        left + edge_left,
        top + edge_top - 12.0
    );
    for step in 0..=4 {
        let value = highest * f64::from(step) / 4.0;
        let (from, to, at) = (x(*first), x(*last), y(value));
        let _ = writeln!(
            svg,
            "<line x1=\"{from:.1}\" y1=\"{at:.1}\" x2=\"{to:.1}\" y2=\"{at:.1}\" stroke=\"#e3e3e3\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#555\">{}</text>",
            from - 6.0,
            at + 4.0,
            label(value)
        );
    }
    for load in &loads {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555\">{load}x</text>",
            x(*load),
            y(0.0) + 16.0
        );
    }
    // Fairlane last, so that it is on top.
    for (protection, _, colour) in SERIES.iter().rev() {
        let points: Vec<String> = loads
            .iter()
            .filter_map(|load| {
                Some(format!("{:.1},{:.1}", x(*load), y(value(*load, *protection)?)))
            })
            .collect();
        if points.is_empty() {
            continue;
        }
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2.5\" stroke-linejoin=\"round\"/>",
            points.join(" ")
        );
    }
}
