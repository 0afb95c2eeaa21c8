//! Small charts of the last 15 minutes.

use maud::{Markup, html};

use super::grouped;
use crate::clock::millis;
use crate::id::PipelineName;
use crate::trend::{EVERY, Point, SPAN, Sample};

/// A longer time without samples, in ms, is drawn as a gap.
const GAP_MS: u64 = 4_000 * EVERY.as_secs();

/// Size of a small chart, in its own units.
const SMALL: (f64, f64) = (150.0, 32.0);
/// Size of a large chart, and the space for its scale.
const LARGE: (f64, f64) = (960.0, 180.0);
const LEFT: f64 = 72.0;
const BELOW: f64 = 22.0;
const ABOVE: f64 = 10.0;

/// A value over time.
pub(super) struct Line {
    /// The age in ms, and the value then; `None`: unknown from then on.
    points: Vec<(u64, Option<f64>)>,
}

impl Line {
    /// The samples that `pick` selects from `pipeline`.
    pub(super) fn new(
        trend: &[Point],
        pipeline: &PipelineName,
        now_ms: u64,
        pick: impl Fn(&Sample) -> f64,
    ) -> Self {
        let span = millis(SPAN);
        let mut points: Vec<(u64, Option<f64>)> = Vec::with_capacity(trend.len() + 2);
        let mut last: Option<(u64, &Sample)> = None;
        for point in trend {
            let Some(sample) = point.pipelines.get(pipeline) else { continue };
            let ago = now_ms.saturating_sub(point.at_ms);
            if ago > span {
                continue;
            }
            rest(&mut points, last, ago);
            points.push((ago, Some(pick(sample))));
            last = Some((ago, sample));
        }
        rest(&mut points, last, 0);
        Self { points }
    }

    /// These values, each with its age in ms, the oldest first.
    pub(super) fn of(points: Vec<(u64, Option<f64>)>) -> Self {
        Self { points }
    }

    fn known(&self) -> impl Iterator<Item = f64> {
        self.points.iter().filter_map(|(_, value)| *value)
    }

    fn most(&self) -> f64 {
        self.known().fold(0.0, f64::max)
    }

    /// The path in a box of `width` and `height` whose upper edge is `top`, and the same path
    /// closed along the lower edge.
    #[expect(clippy::cast_precision_loss, reason = "a picture")]
    fn path(&self, (width, height): (f64, f64), top: f64) -> (String, String) {
        use std::fmt::Write as _;
        let span = millis(SPAN) as f64;
        let (mut line, mut area) = (String::new(), String::new());
        let mut begun: Option<f64> = None;
        let mut x = 0.0;
        // Writing to a `String` cannot fail.
        for &(ago, value) in &self.points {
            let Some(value) = value else {
                if begun.take().is_some() {
                    let _ = write!(area, "L{x:.1} {height:.1}Z");
                }
                continue;
            };
            x = width - ago as f64 / span * width;
            let y = height - (value / top).min(1.0) * height;
            let letter = if begun.is_none() { 'M' } else { 'L' };
            if begun.is_none() {
                let _ = write!(area, "M{x:.1} {height:.1}");
                begun = Some(x);
            }
            let _ = write!(line, "{letter}{x:.1} {y:.1}");
            let _ = write!(area, "L{x:.1} {y:.1}");
        }
        if begun.is_some() {
            let _ = write!(area, "L{x:.1} {height:.1}Z");
        }
        (line, area)
    }
}

/// Fills a long time without samples, from `last` to `ago` ms before now. An empty pipeline is not
/// sampled, so its value stays 0. Otherwise the value is unknown.
fn rest(points: &mut Vec<(u64, Option<f64>)>, last: Option<(u64, &Sample)>, ago: u64) {
    let Some((then, sample)) = last else { return };
    if then.saturating_sub(ago) <= GAP_MS {
        return;
    }
    let step = millis(EVERY);
    if sample.depth == 0 {
        points.push((then.saturating_sub(step), Some(0.0)));
        points.push((ago + if ago > 0 { step } else { 0 }, Some(0.0)));
    } else {
        points.push((then, None));
    }
}

/// A small chart of one value, for a table.
pub(super) fn small(about: &str, line: &Line) -> Markup {
    let most = line.most();
    let (path, area) = line.path(SMALL, most.max(1.0));
    html! {
        svg.small viewBox={"0 -2 " (SMALL.0) " " (SMALL.1 + 4.0)} role="img" preserveAspectRatio="none"
            aria-label={ (about) ", last 15 minutes: at most " (rounded(most)) } {
            title { (about) ", last 15 minutes: at most " (rounded(most)) }
            line.grid x1="0" x2=(SMALL.0) y1=(SMALL.1) y2=(SMALL.1) {}
            path.area d=(area) {}
            path.line0 d=(path) {}
        }
    }
}

/// A large chart of one or two values with a scale.
pub(super) fn large(about: &str, lines: &[(&str, Line)]) -> Markup {
    let most = lines.iter().map(|(_, line)| line.most()).fold(0.0, f64::max);
    let top = ceiling(most);
    let (width, height) = (LARGE.0 - LEFT, LARGE.1 - BELOW - ABOVE);
    html! {
        figure {
            svg viewBox={"0 0 " (LARGE.0) " " (LARGE.1)} role="img" aria-label={ (about) ", last 15 minutes: at most " (rounded(most)) } {
                @for quarter in [0.0, 0.5, 1.0] {
                    @let y = ABOVE + height * (1.0 - quarter);
                    line.grid x1=(LEFT) x2=(LARGE.0) y1=(y) y2=(y) {}
                    text.axis x=(LEFT - 8.0) y=(y + 4.0) text-anchor="end" { (rounded(top * quarter)) }
                }
                @for minutes in [15_u32, 10, 5] {
                    text.axis x=(LEFT + width * (1.0 - f64::from(minutes) / 15.0)) y=(LARGE.1 - 4.0) { "−" (minutes) " min" }
                }
                text.axis x=(LARGE.0) y=(LARGE.1 - 4.0) text-anchor="end" { "now" }
                g transform={"translate(" (LEFT) " " (ABOVE) ")"} {
                    @for (at, (_, line)) in lines.iter().enumerate() {
                        @let (path, area) = line.path((width, height), top);
                        @if lines.len() == 1 { path.area d=(area) {} }
                        path class={"line" (at)} d=(path) {}
                    }
                }
            }
            @if lines.len() > 1 {
                figcaption {
                    ul.legend {
                        @for (at, (name, _)) in lines.iter().enumerate() { li { span class={"swatch type" (at)} {} (name) } }
                    }
                }
            }
        }
    }
}

/// The smallest of 1, 2, 5, 10, 20 … that is not below `most`.
fn ceiling(most: f64) -> f64 {
    let mut unit = 1.0;
    loop {
        for step in [1.0, 2.0, 5.0] {
            if unit * step >= most {
                return unit * step;
            }
        }
        unit *= 10.0;
    }
}

/// Rounds a number for people.
pub(super) fn rounded(value: f64) -> String {
    if value > 0.0 && value < 10.0 && value.fract() != 0.0 {
        return format!("{value:.1}");
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts and rates")]
    let whole = value.round().max(0.0) as u64;
    grouped(whole)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn name() -> PipelineName {
        PipelineName::parse("p").unwrap()
    }

    fn point(at_ms: u64, depth: u64) -> Point {
        let sample = Sample { depth, ..Sample::default() };
        Point { at_ms, pipelines: BTreeMap::from([(name(), sample)]) }
    }

    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    fn line(points: &[Point], now_ms: u64) -> Vec<(u64, Option<f64>)> {
        Line::new(points, &name(), now_ms, |sample| sample.depth as f64).points
    }

    #[test]
    fn an_unobserved_pipeline_stays_empty_if_it_was_empty_and_is_unknown_otherwise() {
        let now = 1_000_000;
        let shown = line(&[point(now - 100_000, 5), point(now - 95_000, 0)], now);
        let quiet =
            [(100_000, Some(5.0)), (95_000, Some(0.0)), (90_000, Some(0.0)), (0, Some(0.0))];
        assert_eq!(shown, quiet);
        let shown = line(&[point(now - 100_000, 5), point(now - 10_000, 7)], now);
        assert_eq!(shown, [(100_000, Some(5.0)), (100_000, None), (10_000, Some(7.0))]);
        assert_eq!(line(&[point(0, 5)], now), [], "older than what is shown");
    }

    #[test]
    fn a_picture_has_a_description_in_words_and_no_invalid_number() {
        let lines = || Line::new(&[point(1_000, 1_234)], &name(), 2_000, |_| 1_234.0);
        for picture in
            [small("Depth", &lines()), large("Depth", &[("in", lines()), ("out", lines())])]
        {
            let text = picture.into_string();
            assert!(text.contains("Depth, last 15 minutes: at most 1,234"), "{text}");
            assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        }
        let empty = large("Depth", &[("in", Line { points: Vec::new() })]).into_string();
        assert!(empty.contains("at most 0") && !empty.contains("NaN"), "{empty}");
    }

    #[test]
    fn figures_are_short() {
        assert_eq!(
            [0.0, 0.04, 3.26, 12.5, 1_234_567.0].map(rounded),
            ["0", "0.0", "3.3", "13", "1,234,567"]
        );
        let tops = [0.0, 1.1, 3.0, 11.0, 501.0].map(|most| rounded(ceiling(most)));
        assert_eq!(tops, ["1", "2", "5", "20", "1,000"]);
    }
}
