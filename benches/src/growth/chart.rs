//! The chart: throughput, and the processor time of Redis per event, over each size.

use std::fmt::Write as _;

use super::{Axis, Figures, Report, Row};
use crate::axis::{label, nice};

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 190.0;
/// The space for the axes: left, top, right, bottom.
const EDGE: (f64, f64, f64, f64) = (52.0, 34.0, 18.0, 34.0);

/// A row per size.
pub(crate) fn svg(report: &Report) -> String {
    let mut axes: Vec<Axis> = report.rows.iter().map(|row| row.axis).collect();
    axes.dedup();
    #[expect(clippy::cast_precision_loss, reason = "seven at most")]
    let (width, height) = (WIDTH * 2.0, HEIGHT * axes.len() as f64);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"Throughput, and processor time of Redis per event, over each size\" font-family=\"system-ui, sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    let mut top = 0.0;
    for axis in axes {
        let rows: Vec<&Row> = report.rows.iter().filter(|row| row.axis == axis).collect();
        let name = axis.title();
        let title = format!("events/s, by {name}");
        panel(&mut svg, (0.0, top), &title, "#0a7d4f", &rows, |row| row.events_per_second);
        let title = format!("µs of Redis per event, by {name}");
        panel(&mut svg, (WIDTH, top), &title, "#b26a00", &rows, |row| row.redis_us_per_event);
        top += HEIGHT;
    }
    svg.push_str("</svg>\n");
    svg
}

#[expect(clippy::cast_precision_loss, reason = "a few rows")]
fn panel(
    svg: &mut String,
    (left, top): (f64, f64),
    title: &str,
    colour: &str,
    rows: &[&Row],
    value: impl Fn(&Figures) -> f64,
) {
    let (edge_left, edge_top, edge_right, edge_bottom) = EDGE;
    let highest = nice(rows.iter().map(|row| value(&row.figures)).fold(0.0, f64::max));
    let steps = rows.len().saturating_sub(1).max(1) as f64;
    let x =
        |place: usize| left + edge_left + place as f64 / steps * (WIDTH - edge_left - edge_right);
    let bottom = top + HEIGHT - edge_bottom;
    let y = |value: f64| bottom - value / highest * (HEIGHT - edge_top - edge_bottom);
    let _ = writeln!(
        svg,
        "<text x=\"{}\" y=\"{}\" fill=\"#222\" font-weight=\"600\">{title}</text>",
        left + edge_left,
        top + edge_top - 12.0
    );
    for step in 0..=4 {
        let value = highest * f64::from(step) / 4.0;
        let (from, to, at) = (x(0), left + WIDTH - edge_right, y(value));
        let _ = writeln!(
            svg,
            "<line x1=\"{from:.1}\" y1=\"{at:.1}\" x2=\"{to:.1}\" y2=\"{at:.1}\" stroke=\"#e3e3e3\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#555\">{}</text>",
            from - 6.0,
            at + 4.0,
            label(value)
        );
    }
    let mut points = Vec::new();
    for (place, row) in rows.iter().enumerate() {
        let (x, y) = (x(place), y(value(&row.figures)));
        points.push(format!("{x:.1},{y:.1}"));
        let _ = writeln!(
            svg,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/><text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555\">{}</text>",
            bottom + 16.0,
            thousands(row.value)
        );
    }
    let _ = writeln!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2.5\" stroke-linejoin=\"round\"/>",
        points.join(" ")
    );
}

/// With a comma after every third digit.
pub(crate) fn thousands(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_separated() {
        let shown = [0, 999, 1_000, 1_000_000].map(thousands);
        assert_eq!(shown, ["0", "999", "1,000", "1,000,000"]);
    }
}
