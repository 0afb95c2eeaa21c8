//! The known key that somebody who mistyped one probably meant.

use std::collections::BTreeMap;

use super::layers::{PIPELINES, Value};

/// Maximum number of keys of the same name in other tables that an error names.
const ELSEWHERE: usize = 2;

/// The known key, section or key of another section that the author probably meant.
pub(super) fn nearest<'a>(key: &str, defaults: &'a BTreeMap<String, Value>) -> Vec<&'a str> {
    let sections = defaults.keys().filter_map(|known| Some(known.split_once('.')?.0));
    let close = defaults
        .keys()
        .map(String::as_str)
        .chain(sections)
        .chain([PIPELINES])
        .map(|known| (edit_distance(key, known), known))
        .filter(|&(distance, known)| distance <= 2 && distance * 2 < known.len())
        .min();
    let last = key.rsplit('.').next();
    let elsewhere = defaults.keys().filter(|known| known.rsplit('.').next() == last);
    if let Some((_, known)) = close {
        return vec![known];
    }
    let elsewhere: Vec<_> = elsewhere.map(String::as_str).collect();
    // More of them are no help.
    if elsewhere.len() <= ELSEWHERE { elsewhere } else { Vec::new() }
}

/// The number of characters to insert, remove or replace to turn one text into the other
/// (Levenshtein distance).
fn edit_distance(from: &str, to: &str) -> usize {
    let mut row: Vec<usize> = (0..=to.chars().count()).collect();
    for (i, a) in from.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in to.chars().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[to.chars().count()]
}
