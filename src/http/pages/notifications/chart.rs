//! Sent notifications as stacked bars: a bar per day or hour, a colour per type.

use std::collections::BTreeMap;

use maud::{Markup, html};

use super::super::super::notifications::stats::By;
use super::super::grouped;
use super::short;
use crate::notifications::queue::Stats;

/// Number of types with their own colour; the others share one more.
const TYPES: usize = 5;
const REST: &str = "all others";

/// The size of the picture, in its own units.
const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 64.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 28.0;

/// The chart, from the oldest time to the newest.
pub(super) fn sent(by: By, times: &[(String, Stats)]) -> Markup {
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    for (kind, tally) in times.iter().flat_map(|(_, stats)| stats) {
        *sums.entry(kind).or_default() += tally.count("sent");
    }
    let mut kinds: Vec<(&str, u64)> = sums.into_iter().filter(|(_, n)| *n > 0).collect();
    kinds.sort_by_key(|(kind, n)| (std::cmp::Reverse(*n), *kind));
    if kinds.is_empty() {
        return html! { p.none { "No notifications in this period." } };
    }
    let named: Vec<&str> = kinds.iter().take(TYPES).map(|(kind, _)| *kind).collect();
    let rest = kinds.len() > TYPES;
    let bars: Vec<Vec<u64>> = times.iter().map(|(_, stats)| heights(&named, stats)).collect();
    let most = bars.iter().map(|bar| bar.iter().sum::<u64>()).max().unwrap_or_default();
    let top = ceiling(most);
    let total: u64 = kinds.iter().map(|(_, n)| n).sum();
    let about = format!(
        "Sent notifications by type: {} in all; the table below has the numbers",
        grouped(total)
    );
    html! {
        figure {
            svg viewBox={"0 0 " (WIDTH) " " (HEIGHT)} role="img" aria-label=(about) {
                @for line in 0..=4_u64 { (grid(top, line)) }
                @for (at, ((begins, _), bar)) in times.iter().zip(&bars).enumerate() {
                    (column(&Column { at, of: times.len(), name: &short(by, begins), named: &named, bar, top }))
                }
            }
            figcaption {
                ul.legend {
                    @for (at, kind) in named.iter().enumerate() { li { span class={"swatch type" (at)} {} (kind) } }
                    @if rest { li { span class={"swatch type" (TYPES)} {} (REST) } }
                }
            }
        }
    }
}

/// The counts of each named type, and of the rest.
fn heights(named: &[&str], stats: &Stats) -> Vec<u64> {
    let mut heights = vec![0; named.len() + 1];
    for (kind, tally) in stats {
        let at = named.iter().position(|known| known == kind).unwrap_or(named.len());
        heights[at] += tally.count("sent");
    }
    heights
}

/// The smallest of 4, 8, 20, 40, 80, 200 … that is not below `most`. Its quarters are whole
/// numbers.
fn ceiling(most: u64) -> u64 {
    let mut unit = 1_u64;
    loop {
        for step in [4, 8, 20] {
            let top = unit.saturating_mul(step);
            if top >= most || top == u64::MAX {
                return top;
            }
        }
        unit = unit.saturating_mul(10);
    }
}

#[expect(clippy::cast_precision_loss, reason = "a picture")]
fn height(n: u64, top: u64) -> f64 {
    n as f64 / top.max(1) as f64 * (HEIGHT - TOP - BOTTOM)
}

fn grid(top: u64, line: u64) -> Markup {
    let n = top / 4 * line;
    let y = HEIGHT - BOTTOM - height(n, top);
    html! {
        line.grid x1=(LEFT) x2=(WIDTH) y1=(y) y2=(y) {}
        text.axis x=(LEFT - 8.0) y=(y + 4.0) text-anchor="end" { (grouped(n)) }
    }
}

struct Column<'a> {
    at: usize,
    of: usize,
    name: &'a str,
    named: &'a [&'a str],
    bar: &'a [u64],
    top: u64,
}

#[expect(clippy::cast_precision_loss, reason = "a picture")]
fn column(column: &Column<'_>) -> Markup {
    let Column { at, of, name, named, bar, top } = *column;
    let step = (WIDTH - LEFT) / of.max(1) as f64;
    let x = LEFT + step * at as f64;
    let mut below = 0;
    let parts = bar.iter().enumerate().filter(|(_, n)| **n > 0).map(|(kind, &n)| {
        below += n;
        let (y, tall) = (HEIGHT - BOTTOM - height(below, top), height(n, top));
        let word = named.get(kind).copied().unwrap_or(REST);
        let class = if kind < named.len() { kind } else { TYPES };
        html! {
            rect class={"type" (class)} x=(x + step * 0.15) y=(y) width=(step * 0.7) height=(tall) {
                title { (name) ": " (word) " " (grouped(n)) }
            }
        }
    });
    let parts: Vec<Markup> = parts.collect();
    // Labels of more than 14 bars would touch, so only every third one is shown.
    let named_here = of <= 14 || (of - 1 - at).is_multiple_of(3);
    html! {
        @for part in &parts { (part) }
        @if named_here {
            text.axis x=(x + step / 2.0) y=(HEIGHT - 8.0) text-anchor="middle" { (name.get(5..).unwrap_or(name)) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::notifications::queue::Tally;

    #[test]
    fn the_scale_ends_at_a_round_number() {
        let tops = [0, 1, 4, 5, 8, 9, 20, 21, 40, 41, 999, 1_000_001].map(ceiling);
        assert_eq!(tops, [4, 4, 4, 8, 8, 20, 20, 40, 40, 80, 2_000, 2_000_000]);
        assert_eq!(ceiling(u64::MAX), u64::MAX);
    }

    #[test]
    fn bars_are_stacked_and_types_without_a_colour_share_one_part() {
        let of = |n: u64| Tally { outcomes: [("sent".to_owned(), n)].into(), ..Tally::default() };
        let stats: Stats = (0..8_u64).map(|n| (format!("t{n}"), of(10 - n))).collect();
        let picture = sent(By::Day, &[("2026-11-20T00:00:00Z".to_owned(), stats)]).into_string();
        assert_eq!(picture.matches("<rect").count(), 6, "{picture}");
        assert!(picture.contains("11-20: t0 10") && picture.contains("all others 12"), "{picture}");
        assert!(picture.contains("Sent notifications by type: 52 in all"), "{picture}");
    }
}
