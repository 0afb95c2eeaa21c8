//! Parses the lines of an import of counters.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use jiff::civil::Date;
use serde::Deserialize;

use super::{AdId, Day, Replacement};

/// Number of invalid lines after which no further line is parsed.
pub const BAD_MAX: usize = 1_000;

/// A line of an import: it replaces the counters of an ad.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// Its number, from 1.
    pub number: u64,
    /// The number of the previous line that is not empty.
    pub before: u64,
    /// The number of the last empty line after it; its own number if there is none.
    pub upto: u64,
    /// The ad.
    pub ad: AdId,
    /// The new counters.
    pub with: Replacement,
}

/// Why a line of an import is invalid. Its text is made only where it is told.
#[derive(Debug, thiserror::Error)]
pub enum BadLine {
    /// It is a list. The deserializer would accept it as the fields in their order.
    #[error("it is a list; write a JSON object")]
    List,
    /// It is not JSON with the fields of a line.
    #[error("{}", of_single_line(.0))]
    Json(#[source] serde_json::Error),
    /// A field is out of bounds.
    #[error("{field}: {detail}")]
    Field {
        /// The field.
        field: &'static str,
        /// The problem.
        detail: String,
    },
    /// It is longer than the reader accepts.
    #[error("longer than {max} bytes")]
    TooLong {
        /// The maximum length, in bytes.
        max: usize,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    ad: AdId,
    total: u64,
    #[serde(default)]
    days: BTreeMap<Day, u64>,
}

/// Parses the lines of an import. The first line has the number `first`. Each line is empty or like
/// `{"ad": "x", "total": 9, "days": {"2026-11-01": 3}}`. `days`: the days that a line may have
/// ([`super::Calendar::days`]).
///
/// # Errors
/// The numbers of the invalid lines, and their problems: all of them, or the first [`BAD_MAX`].
pub fn lines(
    text: &[u8],
    first: u64,
    days: &RangeInclusive<Date>,
) -> Result<Vec<Line>, Vec<(u64, BadLine)>> {
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    let (mut lines, mut bad) = (Vec::<Line>::new(), Vec::new());
    let mut before = first.saturating_sub(1);
    for (number, text) in (first..).zip(text.split(|byte| *byte == b'\n')) {
        let text = text.trim_ascii();
        if !text.is_empty() {
            match row(text, days) {
                Ok((ad, with)) => lines.push(Line { number, before, upto: number, ad, with }),
                Err(reason) => bad.push((number, reason)),
            }
            if bad.len() == BAD_MAX {
                break;
            }
        }
        if let Some(last) = lines.last_mut() {
            last.upto = number;
            before = number;
        }
    }
    if bad.is_empty() { Ok(lines) } else { Err(bad) }
}

/// The parser gets a single line, so its line number says nothing.
fn of_single_line(error: &serde_json::Error) -> String {
    error.to_string().replace(" at line 1 column ", " at column ")
}

fn row(text: &[u8], days: &RangeInclusive<Date>) -> Result<(AdId, Replacement), BadLine> {
    if text.starts_with(b"[") {
        return Err(BadLine::List);
    }
    let row: Row = serde_json::from_slice(text).map_err(BadLine::Json)?;
    let with = Replacement::checked(row.total, row.days, days);
    Ok((row.ad, with.map_err(|(field, detail)| BadLine::Field { field, detail })?))
}

#[cfg(test)]
mod tests {
    use jiff::civil::date;

    use super::*;
    use crate::counters::view::FIRST_DAY;

    fn lines(text: &[u8], first: u64) -> Result<Vec<Line>, Vec<(u64, BadLine)>> {
        super::lines(text, first, &(FIRST_DAY..=date(2026, 11, 21)))
    }

    #[test]
    fn the_lines_of_an_import_follow_each_other_over_empty_ones() {
        let text = b"\n{\"ad\":\"a\",\"total\":9,\"days\":{\"2026-11-01\":3,\"2026-11-02\":0}}\r\n\n  \n{\"total\":0,\"ad\":\"b\"}\n";
        let read = lines(text, 11).unwrap();
        let places: Vec<_> =
            read.iter().map(|line| (line.before, line.number, line.upto)).collect();
        assert_eq!(places, [(10, 12, 14), (14, 15, 15)]);
        assert_eq!(read[0].ad.as_str(), "a");
        let days = [(date(2026, 11, 1), 3)].into();
        assert_eq!(read[0].with, Replacement { total: 9, days, forget: false });
        assert_eq!(read[1].with, Replacement::default());
        assert_eq!(lines(b"", 1).unwrap(), []);
        assert_eq!(lines(b"\n\n", 1).unwrap(), []);
    }

    #[test]
    fn blank_lines_are_not_parsed_and_parsing_ends_after_so_many_bad_ones() {
        assert_eq!(lines(&b" \n".repeat(1 << 19), 1).unwrap(), []);
        let bad = |count: usize| lines(&b"x\n\n{}\n".repeat(count), 1).unwrap_err();
        assert_eq!(bad(BAD_MAX / 2 - 1).len(), BAD_MAX - 2, "all of them");
        let most = bad(BAD_MAX);
        assert_eq!(most.len(), BAD_MAX);
        assert_eq!(most.last().map(|(number, _)| *number), Some(1_500), "the first ones");
    }

    #[test]
    fn every_bad_line_of_an_import_is_told_with_its_number() {
        let text = br#"{"ad":"a","total":1}
nonsense
{"ad":"","total":1}
{"ad":"b"}
{"ad":"b","total":-1}
{"ad":"b","total":1,"days":{"2026-11-01":2}}
{"ad":"b","total":1,"days":{"1.11.2026":1}}
{"ad":"b","total":1,"days":{"1999-12-31":1}}
{"ad":"b","total":1,"days":{"2026-11-22":0}}
{"ad":"b","total":1,"views":1}
{"ad":"b","total":1000000000000001}
["b",1]"#;
        let bad = lines(text, 1).unwrap_err();
        let parts = [
            "at column 2",
            "empty",
            "missing field `total`",
            "invalid value",
            "days: they have 2 views",
            "it is no day",
            "days: they have 1999-12-31; write days from 2000-01-01 to 2026-11-21, the day after today",
            "days: they have 2026-11-22; write days from 2000-01-01 to 2026-11-21, the day after today",
            "unknown field `views`",
            "total: it is 1000000000000001",
            "it is a list",
        ];
        assert_eq!(bad.len(), parts.len(), "{bad:?}");
        for ((number, reason), (expected, part)) in bad.iter().zip((2..).zip(parts)) {
            assert!(*number == expected && reason.to_string().contains(part), "{number}: {reason}");
        }
    }
}
