//! Charts of the pipelines over time.

#[cfg(test)]
mod tests;

use std::time::Duration;

use maud::{Markup, html};
use serde::{Deserialize, Serialize};

use super::{grouped, spoken};
use crate::clock::millis;
use crate::id::PipelineName;
use crate::trend::{EVERY, Point, Sample, Series};

/// A longer time without points is drawn as a gap. An idle process adds a point every minute, and
/// a busy one much sooner.
const GAP: Duration = Duration::from_secs(150);
/// The same in the recent series after a point with queued events.
const BUSY_GAP: Duration = Duration::from_secs(4 * EVERY.as_secs());
/// Maximum number of points in a chart. More are combined.
const DRAWN: u64 = 240;

/// Size of a small chart, in its own units.
const SMALL: (f64, f64) = (150.0, 32.0);
/// Size of a large chart, and the space for its scale.
const LARGE: (f64, f64) = (560.0, 180.0);
const LEFT: f64 = 76.0;
const BELOW: f64 = 24.0;
const ABOVE: f64 = 10.0;

/// The time span of the charts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Range {
    #[default]
    #[serde(rename = "15m")]
    Recent,
    #[serde(rename = "1h")]
    Hour,
    #[serde(rename = "6h")]
    SixHours,
    #[serde(rename = "24h")]
    Day,
}

impl Range {
    const ALL: [Self; 4] = [Self::Recent, Self::Hour, Self::SixHours, Self::Day];

    /// Its value in a query.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Recent => "15m",
            Self::Hour => "1h",
            Self::SixHours => "6h",
            Self::Day => "24h",
        }
    }

    /// In words.
    pub(super) const fn words(self) -> &'static str {
        match self {
            Self::Recent => "last 15 minutes",
            Self::Hour => "last hour",
            Self::SixHours => "last 6 hours",
            Self::Day => "last 24 hours",
        }
    }

    const fn short(self) -> &'static str {
        match self {
            Self::Recent => "15 min",
            Self::Hour => "1 h",
            Self::SixHours => "6 h",
            Self::Day => "24 h",
        }
    }

    /// The points that it is drawn from.
    pub(super) const fn series(self) -> Series {
        match self {
            Self::Recent => Series::Recent,
            Self::Hour | Self::SixHours | Self::Day => Series::Minutes,
        }
    }

    const fn span(self) -> Duration {
        match self {
            Self::Recent => Series::Recent.span(),
            Self::Hour => Duration::from_secs(3_600),
            Self::SixHours => Duration::from_secs(6 * 3_600),
            Self::Day => Duration::from_secs(24 * 3_600),
        }
    }

    /// The number of parts that the axis divides it into.
    const fn parts(self) -> u32 {
        match self {
            Self::Recent => 3,
            Self::Hour | Self::Day => 4,
            Self::SixHours => 6,
        }
    }

    /// Maximum time between two points that are connected.
    fn gap_ms(self, is_empty: bool) -> u64 {
        millis(if self == Self::Recent && !is_empty { BUSY_GAP } else { GAP })
    }
}

/// Links to the same page with another time span. `more` is the rest of the query, as `&a=b`.
pub(super) fn ranges(of: Range, more: &str) -> Markup {
    html! {
        nav.choice aria-label="Time span of the charts" {
            @for range in Range::ALL {
                a href={ "?range=" (range.as_str()) (more) } aria-current=[(range == of).then_some("page")] { (range.short()) }
            }
        }
    }
}

/// How points are combined if a chart has not enough space for all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Combine {
    Mean,
    Max,
}

/// A value over time.
pub(super) struct Line {
    range: Range,
    /// The age in ms, and the value then; `None`: unknown from then on.
    points: Vec<(u64, Option<f64>)>,
}

impl Line {
    /// The values that `pick` selects from the samples of `pipeline`.
    pub(super) fn new(
        trend: &[Point],
        pipeline: &PipelineName,
        (range, now_ms): (Range, u64),
        combine: Combine,
        pick: impl Fn(&Sample) -> f64,
    ) -> Self {
        let span = millis(range.span());
        let mut points: Vec<(u64, Option<f64>)> = Vec::with_capacity(trend.len().min(512) + 2);
        let mut last: Option<(u64, &Sample)> = None;
        let mut combined = Combined { part: u64::MAX, sum: 0.0, count: 0.0 };
        for point in trend {
            let Some(sample) = point.pipelines.get(pipeline) else { continue };
            let ago = now_ms.saturating_sub(point.at_ms);
            if ago > span {
                continue;
            }
            let is_gap = rest(range, &mut points, last, ago);
            let part = ago * DRAWN / span;
            let value = combined.add(part, pick(sample), combine, is_gap);
            // A value replaces the one before in the same part of the chart.
            if let Some(value) = value {
                points.push((ago, Some(value)));
            } else if let Some((then, known)) = points.last_mut() {
                (*then, *known) = (ago, Some(combined.value(combine)));
            }
            last = Some((ago, sample));
        }
        if let Some((ago, value)) = points.last().copied()
            && !rest(range, &mut points, last, 0)
            && range != Range::Recent
            && ago > 0
        {
            // The current minute is not over yet.
            points.push((0, value));
        }
        Self { range, points }
    }

    /// These values of the last 15 minutes, each with its age in ms, the oldest first.
    pub(super) fn recent(points: Vec<(u64, Option<f64>)>) -> Self {
        Self { range: Range::Recent, points }
    }

    fn known(&self) -> impl Iterator<Item = f64> {
        self.points.iter().filter_map(|(_, value)| *value)
    }

    fn most(&self) -> f64 {
        self.known().fold(0.0, f64::max)
    }

    /// Whether something is unknown between two known values, or after the last.
    fn has_gap(&self) -> bool {
        self.points.iter().any(|(_, value)| value.is_none())
    }

    /// The path in a box of `width` and `height` whose upper edge is `top`, and the same path
    /// closed along the lower edge.
    #[expect(clippy::cast_precision_loss, reason = "a picture")]
    fn path(&self, (width, height): (f64, f64), top: f64) -> (String, String) {
        use std::fmt::Write as _;
        let span = millis(self.range.span()) as f64;
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

/// The values in one part of a chart.
struct Combined {
    part: u64,
    sum: f64,
    count: f64,
}

impl Combined {
    /// Adds a value. Returns it if it is the first one of its part.
    fn add(&mut self, part: u64, value: f64, combine: Combine, is_gap: bool) -> Option<f64> {
        if self.part != part || is_gap {
            *self = Self { part, sum: value, count: 1.0 };
            return Some(value);
        }
        self.sum = match combine {
            Combine::Mean => self.sum + value,
            Combine::Max => self.sum.max(value),
        };
        self.count += 1.0;
        None
    }

    fn value(&self, combine: Combine) -> f64 {
        match combine {
            Combine::Mean => self.sum / self.count,
            Combine::Max => self.sum,
        }
    }
}

/// Fills a long time without points, from `last` to `ago` ms before now, and returns whether there
/// is one. An empty pipeline is sampled less often, so its values stay 0. After a longer time the
/// values are unknown.
fn rest(
    range: Range,
    points: &mut Vec<(u64, Option<f64>)>,
    last: Option<(u64, &Sample)>,
    ago: u64,
) -> bool {
    let Some((then, sample)) = last else { return false };
    let (is_empty, silence) = (sample.depth == 0.0, then.saturating_sub(ago));
    if silence > range.gap_ms(is_empty) {
        points.push((then, None));
        return true;
    }
    let step = millis(EVERY);
    if range == Range::Recent && is_empty && silence > 4 * step {
        points.push((then.saturating_sub(step), Some(0.0)));
        points.push((ago + if ago > 0 { step } else { 0 }, Some(0.0)));
        return true;
    }
    false
}

/// A small chart of one value, for a table.
pub(super) fn small(about: &str, line: &Line, unit: Unit) -> Markup {
    let most = line.most();
    let (path, area) = line.path(SMALL, if most > 0.0 { most } else { 1.0 });
    let label = format!("{about}, {}: at most {}", line.range.words(), unit.write(most));
    html! {
        svg.small viewBox={"0 -2 " (SMALL.0) " " (SMALL.1 + 4.0)} role="img" preserveAspectRatio="none" aria-label=(label) {
            title { (label) }
            line.grid x1="0" x2=(SMALL.0) y1=(SMALL.1) y2=(SMALL.1) {}
            path.area d=(area) {}
            path.line0 d=(path) {}
        }
    }
}

/// The unit of a chart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    /// Events or calls, or these per second.
    Count,
    Milliseconds,
}

impl Unit {
    pub(super) fn write(self, value: f64) -> String {
        match self {
            Self::Milliseconds if value >= 10.0 => {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "above 10"
                )]
                let ms = value.round() as u64;
                spoken(if ms >= 10_000 { ms / 1_000 * 1_000 } else { ms })
            }
            Self::Milliseconds if value > 0.0 => format!("{} ms", rounded(value)),
            Self::Milliseconds | Self::Count => rounded(value),
        }
    }
}

/// A large chart of one or two values with a scale, and a line below that says what is drawn.
pub(super) fn large(about: &str, lines: &[(&str, Line)], unit: Unit, note: &str) -> Markup {
    let most = lines.iter().map(|(_, line)| line.most()).fold(0.0, f64::max);
    let range = lines.first().map_or_else(Range::default, |(_, line)| line.range);
    let is_known = lines.iter().any(|(_, line)| line.known().next().is_some());
    let has_gap = lines.iter().any(|(_, line)| line.has_gap());
    let top = ceiling(most);
    let (width, height) = (LARGE.0 - LEFT - 8.0, LARGE.1 - BELOW - ABOVE);
    let label = format!("{about}, {}: at most {}", range.words(), unit.write(most));
    let parts = range.parts();
    html! {
        figure {
            svg viewBox={"0 0 " (LARGE.0) " " (LARGE.1)} role="img" aria-label=(label) {
                title { (label) }
                @for quarter in [0.0, 0.5, 1.0] {
                    @let y = ABOVE + height * (1.0 - quarter);
                    line.grid x1=(LEFT) x2=(LEFT + width) y1=(y) y2=(y) {}
                    text.axis x=(LEFT - 8.0) y=(y + 4.0) text-anchor="end" { (unit.write(top * quarter)) }
                }
                @for part in 0..=parts {
                    @let x = LEFT + width * f64::from(part) / f64::from(parts);
                    @let anchor = if part == 0 { "start" } else if part == parts { "end" } else { "middle" };
                    text.axis x=(x) y=(LARGE.1 - 4.0) text-anchor=(anchor) {
                        @if part == 0 { "−" (range.short()) } @else if part == parts { "now" } @else { "−" (spoken(millis(range.span()) / u64::from(parts) * u64::from(parts - part))) }
                    }
                }
                g transform={"translate(" (LEFT) " " (ABOVE) ")"} {
                    @for (at, (_, line)) in lines.iter().enumerate() {
                        @let (path, area) = line.path((width, height), top);
                        @if lines.len() == 1 { path.area d=(area) {} }
                        path class={"line" (at)} d=(path) {}
                    }
                }
            }
            figcaption {
                @if lines.len() > 1 {
                    ul.legend {
                        @for (at, (name, _)) in lines.iter().enumerate() { li { span class={"swatch type" (at)} {} (name) } }
                    }
                }
                p.none {
                    (note)
                    @if !is_known { " Nothing was measured yet." }
                    @else if has_gap { " Where the line is interrupted, nothing was measured." }
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
