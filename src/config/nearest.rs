//! The known key that somebody who mistyped one probably meant.

use std::collections::BTreeMap;

use super::layers::{PIPELINES, Value};
use crate::spelling::edit_distance;

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
