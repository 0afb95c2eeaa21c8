//! Survivors that need no test, each with the reason.

use crate::mutate::Mutant;

const LIST: &str = include_str!("accepted.txt");

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    file: String,
    before: String,
    after: String,
}

/// The entries that no survivor has used yet.
pub(crate) struct Accepted(Vec<Entry>);

impl Accepted {
    pub(crate) fn load() -> Self {
        Self(entries(LIST))
    }

    /// Whether the list has this change. The same change may be at several places, with an entry each.
    pub(crate) fn take(&mut self, mutant: &Mutant) -> bool {
        let place = self.0.iter().position(|entry| {
            entry.file == mutant.file
                && entry.before == mutant.before
                && entry.after == mutant.after
        });
        place.map(|place| self.0.remove(place)).is_some()
    }
}

/// An entry is a block of lines: `file: reason`, then pairs of what is there and what replaces it. The
/// reason may go on in further lines.
fn entries(list: &str) -> Vec<Entry> {
    let (mut entries, mut file, mut before) = (Vec::new(), "", "");
    for line in list.lines() {
        if let Some(text) = line.strip_prefix("- ") {
            before = text;
        } else if let Some(text) = line.strip_prefix('+') {
            let (before, after) = (before.to_owned(), text.trim().to_owned());
            entries.push(Entry { file: file.to_owned(), before, after });
        } else if !line.starts_with([' ', '#'])
            && let Some((name, reason)) = line.split_once(": ")
        {
            assert!(!reason.is_empty(), "no reason: {line}");
            file = name;
        }
    }
    entries
}

#[test]
fn an_entry_has_a_file_a_reason_and_changes() {
    let list =
        "# About\n\nsrc/a.rs: it is the same,\n  and why\n- a < b\n+ (a) <= (b)\n- call();\n+\n";
    let entry = |before: &str, after: &str| Entry {
        file: "src/a.rs".to_owned(),
        before: before.to_owned(),
        after: after.to_owned(),
    };
    assert_eq!(entries(list), [entry("a < b", "(a) <= (b)"), entry("call();", "")]);
}
