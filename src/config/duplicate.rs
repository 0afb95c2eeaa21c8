//! Finds what is in a TOML file twice. The parser tells only where the second one is, which does not
//! help in a file of some length.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// A table or key that is in a file twice.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Duplicate {
    /// As it stands in the file: `table [redis]`, `key redis.url`.
    pub(super) what: String,
    /// Where the first one begins, in bytes; unknown where the file is broken in other ways too.
    pub(super) first: Option<usize>,
}

/// What is twice in `text`, of which the second is at `second`: the name, as the parser found it.
pub(super) fn find(text: &str, second: Range<usize>) -> Duplicate {
    let before = &text[..second.start];
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    // Up to there the file is sound, unless it is in the middle of a value.
    let (document, _) = DeTable::parse_recoverable(&text[..line_start]);
    let document = document.get_ref();
    let line = text[line_start..second.end].trim_start();
    if line.starts_with('[') {
        let brackets = line.bytes().take_while(|&byte| byte == b'[').count();
        if let Some(path) = path_of(&format!("{line}{}", "]".repeat(brackets))) {
            let (open, close) = ("[".repeat(brackets), "]".repeat(brackets));
            let first = place_of(document, &path);
            return Duplicate { what: format!("table {open}{}{close}", written(&path)), first };
        }
    } else if let Some(key) = path_of(&format!("{line} = 0")) {
        let mut path = Vec::new();
        last_header(document, &mut Vec::new(), &mut (0, &mut path), text);
        path.extend(key);
        if let Some(first) = place_of(document, &path) {
            return Duplicate { what: format!("key {}", written(&path)), first: Some(first) };
        }
    }
    // Within an inline table.
    let name = text[second.clone()].trim_matches(['"', '\'']);
    let (document, _) = DeTable::parse_recoverable(before);
    let mut nearest = None;
    nearest_of(document.get_ref(), name, second.start, &mut nearest);
    Duplicate { what: format!("key {name}"), first: nearest }
}

/// The one key that a line of TOML sets, or the table that it opens.
fn path_of(line: &str) -> Option<Vec<String>> {
    let document = DeTable::parse(line).ok()?;
    let (mut table, mut path) = (document.get_ref(), Vec::new());
    while let Some((key, value)) = table.iter().next() {
        path.push(key.get_ref().to_string());
        table = match value.get_ref() {
            DeValue::Table(inner) => inner,
            DeValue::Array(list) => match list.iter().next().map(Spanned::get_ref) {
                Some(DeValue::Table(inner)) => inner,
                _ => break,
            },
            _ => break,
        };
    }
    (!path.is_empty()).then_some(path)
}

/// Where the key of a path is, or the last part of the path that there is.
fn place_of(document: &DeTable<'_>, path: &[String]) -> Option<usize> {
    let (mut table, mut found) = (document, None);
    for part in path {
        let Some((key, value)) = table.iter().find(|(key, _)| key.get_ref() == part) else { break };
        found = Some(key.span().start);
        table = match value.get_ref() {
            DeValue::Table(inner) => inner,
            DeValue::Array(list) => match list.iter().last().map(Spanned::get_ref) {
                Some(DeValue::Table(inner)) => inner,
                _ => break,
            },
            _ => break,
        };
    }
    found
}

/// The table that was opened last: `found` is where its header is, and its path.
fn last_header(
    table: &DeTable<'_>,
    path: &mut Vec<String>,
    found: &mut (usize, &mut Vec<String>),
    text: &str,
) {
    for (key, value) in table {
        path.push(key.get_ref().to_string());
        let tables: Vec<_> = match value.get_ref() {
            DeValue::Table(inner) => vec![(value.span(), inner)],
            DeValue::Array(list) => {
                let tables = list.iter().filter_map(|item| match item.get_ref() {
                    DeValue::Table(inner) => Some((item.span(), inner)),
                    _ => None,
                });
                tables.collect()
            }
            _ => Vec::new(),
        };
        for (span, inner) in tables {
            let is_header = text.get(span.clone()).is_some_and(|text| text.starts_with('['));
            if is_header && span.start >= found.0 {
                found.0 = span.start;
                found.1.clone_from(path);
            }
            last_header(inner, path, found, text);
        }
        path.pop();
    }
}

/// The last key of that name before `end`.
fn nearest_of(table: &DeTable<'_>, name: &str, end: usize, found: &mut Option<usize>) {
    for (key, value) in table {
        let start = key.span().start;
        if key.get_ref() == name && start < end && found.is_none_or(|found| start > found) {
            *found = Some(start);
        }
        match value.get_ref() {
            DeValue::Table(inner) => nearest_of(inner, name, end, found),
            DeValue::Array(list) => {
                for item in list {
                    if let DeValue::Table(inner) = item.get_ref() {
                        nearest_of(inner, name, end, found);
                    }
                }
            }
            _ => {}
        }
    }
}

/// A path as TOML writes it.
fn written(path: &[String]) -> String {
    let is_bare = |part: &str| {
        !part.is_empty()
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    let write = |part: &String| if is_bare(part) { part.clone() } else { format!("{part:?}") };
    path.iter().map(write).collect::<Vec<_>>().join(".")
}
