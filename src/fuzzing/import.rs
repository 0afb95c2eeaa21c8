//! Imports of counters.

use jiff::civil::Date;
use serde_json::json;

use crate::counters::view::{self, BadLine, Deed, FIRST_DAY, Line};
use crate::id::BotId;

/// The lines of an import. Of the first line, the number is 1; the same lines are read from a high number
/// on too.
///
/// # Panics
/// If lines are left out, numbered wrong, or read otherwise in two parts or from what they were written
/// to.
pub fn import(data: &[u8]) {
    const HIGH: u64 = 1_000_000_000_000;
    let count =
        data.strip_suffix(b"\n").unwrap_or(data).split(|byte| *byte == b'\n').count() as u64;
    let (read, high) = (lines(data, 1), lines(data, HIGH));
    match (&read, &high) {
        (Ok(read), Ok(high)) => {
            check_numbers(read, 1, count);
            check_numbers(high, HIGH, count);
            for (line, high) in read.iter().zip(high) {
                assert_eq!((&line.ad, &line.with), (&high.ad, &high.with));
                comes_back(line);
            }
            check_objects(data, read);
            in_two_parts(data, read);
        }
        (Err(bad), Err(_)) => {
            assert!(!bad.is_empty() && bad.is_sorted_by(|one, next| one.0 < next.0));
            assert!(
                bad.iter().all(
                    |(number, why)| (1..=count).contains(number) && !why.to_string().is_empty()
                )
            );
        }
        _ => panic!("numbers decide whether lines are read"),
    }
}

fn lines(data: &[u8], first: u64) -> Result<Vec<Line>, Vec<(u64, BadLine)>> {
    view::lines(data, first, &(FIRST_DAY..=Date::constant(2026, 11, 21)))
}

/// Each line is an object, as documented.
fn check_objects(data: &[u8], read: &[Line]) {
    let texts: Vec<&[u8]> = data.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii).collect();
    for line in read {
        let text = usize::try_from(line.number - 1).ok().and_then(|at| texts.get(at));
        assert!(text.is_some_and(|text| text.starts_with(b"{")), "{line:?}");
    }
}

fn check_numbers(read: &[Line], first: u64, count: u64) {
    let mut before = first - 1;
    for line in read {
        assert_eq!(line.before, before);
        assert!(line.before < line.number && line.number <= line.upto, "{line:?}");
        before = line.upto;
    }
    assert!(read.is_empty() || before == first + count - 1, "{before} is not the last of {count}");
}

/// As it is written to the queue of the counters, and as a line.
fn comes_back(line: &Line) {
    let days: serde_json::Map<_, _> =
        line.with.days.iter().map(|(day, views)| (day.to_string(), json!(views))).collect();
    let text = json!({ "ad": line.ad, "total": line.with.total, "days": days }).to_string();
    let again = lines(text.as_bytes(), 1).expect("a line that was written is read");
    assert_eq!((&again[0].ad, &again[0].with), (&line.ad, &line.with));
    let bot = BotId::parse("shop").expect("an id");
    let record = view::read(&view::replacement(&bot, &line.ad, &line.with)).expect("a record");
    assert_eq!((record.ad, record.deed), (line.ad.clone(), Deed::Replace(line.with.clone())));
}

fn in_two_parts(data: &[u8], whole: &[Line]) {
    let ends: Vec<usize> =
        (1..).zip(data).filter(|(_, byte)| **byte == b'\n').map(|(end, _)| end).collect();
    let Some(&end) = ends.get(ends.len() / 2) else { return };
    let (one, other) = data.split_at(end);
    let next = one.split(|byte| *byte == b'\n').count() as u64;
    let mut parts = lines(one, 1).expect("a part is read like the whole");
    parts.extend(lines(other, next).expect("a part is read like the whole"));
    let places = |all: &[Line]| -> Vec<_> {
        all.iter().map(|line| (line.number, line.ad.clone(), line.with.clone())).collect()
    };
    assert_eq!(places(&parts), places(whole));
}
