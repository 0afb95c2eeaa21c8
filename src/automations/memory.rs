//! The approximate size of JSON in the memory of a process.

use serde_json::Value as Json;

/// The size of a value, and of a name, with its share of the list or map that it is in, in bytes.
const PART: usize = 64;
/// The size of a map of few entries, in bytes.
const MAP: usize = 640;

/// The approximate size of a value, in bytes.
pub(super) fn of_json(value: &Json) -> usize {
    let inner = match value {
        Json::String(text) => text.len(),
        Json::Array(list) => list.iter().map(of_json).sum(),
        Json::Object(map) if !map.is_empty() => {
            let entries = map.iter().map(|(name, value)| PART + name.len() + of_json(value));
            MAP + entries.sum::<usize>()
        }
        _ => 0,
    };
    PART + inner
}
