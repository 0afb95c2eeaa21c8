//! Locates duplicate tables and keys in a TOML file. The parser reports only the position of the
//! second one, which is not enough in a long file.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// A table or key that occurs twice in a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Duplicate {
    /// The notation of the file: `table [redis]`, `key redis.url`.
    pub(super) what: String,
    /// The byte offset of the first one. Unknown if the file has other syntax errors.
    pub(super) first: Option<usize>,
}

/// Finds the duplicate in `text` whose second occurrence is at `second`. `name` comes from the
/// parser.
pub(super) fn find(text: &str, second: Range<usize>) -> Duplicate {
    let before = &text[..second.start];
    let line_start = before.rfind('\n').map_or(0, |at| at + 1);
    // The text before `second` is valid, unless `second` is inside a value.
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
    // The duplicate is inside an inline table.
    let name = text[second.clone()].trim_matches(['"', '\'']);
    let (document, _) = DeTable::parse_recoverable(before);
    let mut nearest = None;
    nearest_of(document.get_ref(), name, second.start, &mut nearest);
    Duplicate { what: format!("key {name}"), first: nearest }
}

/// The path that a line of TOML sets or opens, if it is exactly one.
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

/// The position of the key of a path, or of the last part of the path that exists.
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

/// The last opened table: `found` holds the position of its header, and its path.
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

/// A path in TOML notation.
fn written(path: &[String]) -> String {
    let is_bare = |part: &str| {
        !part.is_empty()
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    let write = |part: &String| if is_bare(part) { part.clone() } else { format!("{part:?}") };
    path.iter().map(write).collect::<Vec<_>>().join(".")
}
