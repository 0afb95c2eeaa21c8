//! Survivors that need no test, each with the reason.

use super::changes::Change;

const LIST: &str = include_str!("accepted.txt");

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    script: String,
    before: String,
    after: String,
}

/// The entries that no survivor has used yet.
pub(super) struct Accepted(Vec<Entry>);

impl Accepted {
    pub(super) fn load() -> Self {
        Self(entries(LIST))
    }

    /// Whether the list has this change. The same change may be at several places, with an entry each.
    pub(super) fn take(&mut self, change: &Change) -> bool {
        let is_it = |entry: &Entry| {
            entry.script == change.script
                && entry.before == change.before
                && entry.after == change.after
        };
        let place = self.0.iter().position(is_it);
        place.map(|place| self.0.remove(place)).is_some()
    }

    /// What to say about the entries of a script that are left.
    pub(super) fn rest(&self, script: &str) -> Vec<String> {
        let of_script = self.0.iter().filter(|entry| entry.script == script);
        of_script
            .map(|Entry { before, after, .. }| {
                format!("accepted, but found or gone: {script}\n  - {before}\n  + {after}")
            })
            .collect()
    }
}

/// An entry is a block of lines: `script: reason`, then pairs of the line before and after the change. The
/// reason may go on in further lines.
fn entries(list: &str) -> Vec<Entry> {
    let (mut entries, mut script, mut before) = (Vec::new(), "", "");
    for line in list.lines() {
        if let Some(text) = line.strip_prefix("- ") {
            before = text;
        } else if let Some(text) = line.strip_prefix('+') {
            let (before, after) = (before.to_owned(), text.trim().to_owned());
            entries.push(Entry { script: script.to_owned(), before, after });
        } else if !line.starts_with([' ', '#'])
            && let Some((name, reason)) = line.split_once(": ")
        {
            assert!(!reason.is_empty(), "no reason: {line}");
            script = name;
        }
    }
    entries
}

#[test]
fn an_entry_has_a_script_a_reason_and_changes() {
    let list = "# About\n\nclaim: it is the same,\n  and why\n- a < b\n+ a <= b\n- call()\n+\n";
    let entry = |before: &str, after: &str| Entry {
        script: "claim".to_owned(),
        before: before.to_owned(),
        after: after.to_owned(),
    };
    assert_eq!(entries(list), [entry("a < b", "a <= b"), entry("call()", "")]);
    assert!(!entries(LIST).is_empty());
}
