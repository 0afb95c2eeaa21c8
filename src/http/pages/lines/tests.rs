//! Tests of the charts.

use std::collections::BTreeMap;

use super::*;
use crate::trend::MINUTE;

fn name() -> PipelineName {
    PipelineName::parse("p").unwrap()
}

fn point(at_ms: u64, depth: f64) -> Point {
    let sample = Sample { depth, ..Sample::default() };
    Point { at_ms, pipelines: BTreeMap::from([(name(), sample)]) }
}

fn line(points: &[Point], range: Range, now_ms: u64) -> Vec<(u64, Option<f64>)> {
    let at = (range, now_ms);
    Line::new(points, &name(), at, Combine::Max, |sample| sample.depth).points
}

#[test]
fn an_empty_pipeline_stays_empty_until_its_points_are_missing() {
    let now = 10_000_000;
    let recent = |points: &[Point]| line(points, Range::Recent, now);
    let shown = recent(&[point(now - 100_000, 5.0), point(now - 95_000, 0.0)]);
    let quiet = [(100_000, Some(5.0)), (95_000, Some(0.0)), (90_000, Some(0.0)), (0, Some(0.0))];
    assert_eq!(shown, quiet);
    let shown = recent(&[point(now - 100_000, 5.0), point(now - 10_000, 7.0)]);
    assert_eq!(shown, [(100_000, Some(5.0)), (100_000, None), (10_000, Some(7.0))]);
    // An idle process adds a point every minute; one that ended does not.
    let shown = recent(&[point(now - 400_000, 0.0)]);
    assert_eq!(shown, [(400_000, Some(0.0)), (400_000, None)]);
    assert_eq!(recent(&[point(0, 5.0)]), [], "older than what is shown");
}

#[test]
fn a_restart_is_a_gap_in_every_range_and_a_minute_is_none() {
    let now = 100 * 3_600_000;
    let minutes = |ages: &[u64]| -> Vec<Point> {
        ages.iter().map(|minutes| point(now - minutes * 60_000, 3.0)).collect()
    };
    for range in [Range::Hour, Range::SixHours, Range::Day] {
        let shown = line(&minutes(&[50, 20, 10]), range, now);
        let unknown = shown.iter().filter(|(_, value)| value.is_none()).count();
        assert_eq!(unknown, 3, "{range:?}: {shown:?}");
    }
    let shown = line(&minutes(&[3, 2, 1]), Range::Hour, now);
    let value = Some(3.0);
    assert_eq!(shown, [(180_000, value), (120_000, value), (60_000, value), (0, value)]);
}

#[test]
fn a_day_is_combined_to_what_can_be_seen() {
    let now = 100 * 3_600_000;
    let depth = |minute: u64| if minute == 700 { 9.0 } else { 1.0 };
    let points: Vec<Point> =
        (0..1_440).rev().map(|minute| point(now - minute * 60_000, depth(minute))).collect();
    for (combine, most) in [(Combine::Max, 9.0), (Combine::Mean, 14.0 / 6.0)] {
        let line = Line::new(&points, &name(), (Range::Day, now), combine, |of| of.depth);
        assert!(line.points.len() <= 242, "{}", line.points.len());
        assert!((line.most() - most).abs() < 0.01, "{}", line.most());
    }
}

#[test]
fn a_picture_has_a_description_in_words_and_no_invalid_number() {
    for range in Range::ALL {
        let trend = [point(1_000, 1_234.0)];
        let lines = || Line::new(&trend, &name(), (range, 2_000), Combine::Max, |of| of.depth);
        for picture in [
            small("Depth", &lines(), Unit::Count),
            large("Depth", &[("in", lines()), ("out", lines())], Unit::Count, "Events."),
        ] {
            let text = picture.into_string();
            let about = format!("Depth, {}: at most 1,234", range.words());
            assert!(text.contains(&about), "{text}");
            assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        }
    }
    let empty = Line { range: Range::Day, points: Vec::new() };
    let empty = large("Time", &[("in", empty)], Unit::Milliseconds, "").into_string();
    assert!(empty.contains("at most 0") && !empty.contains("NaN"), "{empty}");
    assert!(empty.contains("Nothing was measured yet.") && empty.contains("−24 h"), "{empty}");
}

#[test]
fn a_range_is_written_as_it_is_read() {
    for range in Range::ALL {
        let text = serde_json::to_string(range.as_str()).unwrap();
        assert_eq!(serde_json::from_str::<Range>(&text).unwrap(), range);
        assert_eq!(range.series() == Series::Recent, range == Range::Recent);
        assert!(range.span() <= range.series().span());
        assert!(MINUTE < GAP);
    }
    let links = ranges(Range::SixHours, "&sort=age").into_string();
    assert!(links.contains("href=\"?range=24h&amp;sort=age\""), "{links}");
    assert_eq!(links.matches("aria-current=\"page\"").count(), 1, "{links}");
}

#[test]
fn figures_are_short() {
    assert_eq!(
        [0.0, 0.04, 3.26, 12.5, 1_234_567.0].map(rounded),
        ["0", "0.0", "3.3", "13", "1,234,567"]
    );
    let tops = [0.0, 1.1, 3.0, 11.0, 501.0].map(|most| rounded(ceiling(most)));
    assert_eq!(tops, ["1", "2", "5", "20", "1,000"]);
    let times = [0.0, 0.5, 2.0, 250.0, 1_500.0, 50_000.0];
    let written = times.map(|ms| Unit::Milliseconds.write(ms));
    assert_eq!(written, ["0", "0.5 ms", "2 ms", "250 ms", "1.5 s", "50 s"]);
}
