//! The formats of stored data, as numbers per kind of data.
//!
//! Each process marks its data at its start: under the key [`keys::formats`] in Redis, and for
//! documents also in the collection [`FORMATS`] of `MongoDB`. A process that finds a mark of a later
//! format does not start, so it cannot misread the data. Data without a mark has format 1.
//!
//! A change that an earlier version would misread raises the number of its kind, and describes itself
//! in [`Format::changes`]. A change that earlier versions read correctly does not raise it: a further
//! field of a hash, a document or a JSON text.
//!
//! | file | content |
//! |---|---|
//! | `mod.rs` | the formats of the core, marks, and the comparison of both |
//! | `marks.rs` | reads and writes marks |
//!
//! [`keys::formats`]: crate::redis::keys::formats

mod marks;

use std::collections::BTreeMap;

use crate::id::Prefix;
use crate::redis::keys;

pub(crate) use self::marks::{keep, look, look_mongo, mark, mark_mongo};

/// The collection of the marks in `MongoDB`.
pub const FORMATS: &str = "fairlane_formats";
/// The version of this program.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The field of the marks in Redis that names the version of the process that started last.
const LAST: &str = "last";

/// A kind of stored data, and the format that this program writes.
#[derive(Debug)]
pub struct Format {
    /// Its name in the marks.
    pub kind: &'static str,
    /// What it is, for people: follows "the format of".
    pub what: &'static str,
    /// Whether it consists of documents in `MongoDB`. Otherwise it is in Redis.
    pub documents: bool,
    /// The number of the format, from 1. The program reads all formats up to it.
    pub number: u16,
    /// The earliest format whose programs read the data that this program writes.
    pub oldest_reader: u16,
    /// What changed with each format after the first, in order.
    pub changes: &'static [Change],
}

/// What changed with a format.
#[derive(Debug)]
pub struct Change {
    /// The number of the format.
    pub number: u16,
    /// What this version writes in another way: a sentence without a full stop.
    pub rewritten: &'static str,
    /// What an earlier version does not understand: a sentence without a full stop.
    pub misread: &'static str,
}

impl Format {
    /// The first format of data in Redis.
    #[must_use]
    pub const fn first(kind: &'static str, what: &'static str) -> Self {
        Self { kind, what, documents: false, number: 1, oldest_reader: 1, changes: &[] }
    }

    /// The first format of documents in `MongoDB`.
    #[must_use]
    pub const fn first_documents(kind: &'static str, what: &'static str) -> Self {
        Self { documents: true, ..Self::first(kind, what) }
    }

    /// The name of its mark.
    fn name(&self) -> String {
        format!("{}:{}", self.kind, self.number)
    }
}

/// The formats of the core.
pub(crate) static CORE: [Format; 4] = [
    Format::first("queues", "queues, leases, delayed events and dead letters"),
    Format::first("bus", "positions on the bus"),
    Format::first("ledger", "queued amounts and cached totals"),
    Format::first("operators", "attempts, charts, replays, the audit trail and running processes"),
];

/// A format that is in the data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) kind: String,
    pub(crate) number: u16,
    /// The earliest format whose programs read it.
    pub(crate) oldest_reader: u16,
    /// The version that wrote it first.
    pub(crate) version: String,
}

impl Mark {
    /// Reads a mark. `None` if the name is not that of a mark. A value that cannot be read counts as
    /// one that no earlier format reads.
    fn parse(name: &str, value: &str) -> Option<Self> {
        let (kind, number) = name.rsplit_once(':')?;
        let number = number.parse().ok()?;
        let mut words = value.split(' ');
        let oldest_reader = words.next().and_then(|word| word.parse().ok()).unwrap_or(number);
        let version = words.next().unwrap_or("of an unknown version").to_owned();
        Some(Self { kind: kind.to_owned(), number, oldest_reader, version })
    }
}

/// The formats that are in the data.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Marks {
    /// The version of the process that started last.
    pub(crate) last: Option<String>,
    all: Vec<Mark>,
}

impl Marks {
    fn parse(fields: &BTreeMap<String, String>) -> Self {
        let read = |(name, value): (&String, &String)| Mark::parse(name, value);
        Self { last: fields.get(LAST).cloned(), all: fields.iter().filter_map(read).collect() }
    }

    /// Whether there is no mark: the data is new, or of a version that made none.
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty() && self.last.is_none()
    }

    /// Whether the data has this format.
    fn has(&self, format: &Format) -> bool {
        self.all.iter().any(|mark| mark.kind == format.kind && mark.number == format.number)
    }

    /// The latest format of a kind in the data.
    fn latest(&self, kind: &str) -> u16 {
        let of_kind = self.all.iter().filter(|mark| mark.kind == kind);
        of_kind.map(|mark| mark.number).max().unwrap_or(1)
    }

    /// Refuses data that a program with these formats would misread. `place` names the marks.
    pub(crate) fn accept<'a>(
        &self,
        formats: impl IntoIterator<Item = &'a Format>,
        place: &str,
    ) -> Result<(), TooNew> {
        for format in formats {
            let of_kind = self.all.iter().filter(|mark| mark.kind == format.kind);
            let unknown = of_kind.filter(|mark| mark.oldest_reader > format.number);
            if let Some(mark) = unknown.max_by_key(|mark| mark.number) {
                return Err(TooNew {
                    place: place.to_owned(),
                    what: format.what,
                    mark: mark.clone(),
                    known: format.number,
                });
            }
        }
        Ok(())
    }

    /// What a start of a program with these formats changes.
    pub(crate) fn upgrade<'a>(&self, formats: impl IntoIterator<Item = &'a Format>) -> Upgrade {
        let mut upgrade = Upgrade::default();
        for format in formats {
            let now = self.latest(format.kind);
            for change in format.changes.iter().filter(|change| change.number > now) {
                let Change { number, rewritten, misread } = change;
                upgrade
                    .rewritten
                    .push(format!("{} {number} (now {now}): {rewritten}", format.kind));
                if format.oldest_reader > now {
                    upgrade.misread.push((*misread).to_owned());
                }
            }
        }
        upgrade
    }
}

/// What the start of a later version changes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Upgrade {
    /// What it writes in another way.
    pub(crate) rewritten: Vec<String>,
    /// What earlier versions do not understand from then on.
    pub(crate) misread: Vec<String>,
}

/// The place of the marks in Redis, for people.
pub(crate) fn place(prefix: &Prefix) -> String {
    format!("the key {} in Redis", keys::formats(prefix))
}

/// The data has a later format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{place} has the mark {}:{}: Fairlane {} writes format {} of {}, and this Fairlane {VERSION} reads formats up to {known}; start Fairlane {} or later, or restore a backup from before its first start",
    mark.kind, mark.number, mark.version, mark.number, what, mark.version
)]
pub struct TooNew {
    /// The key or collection with the mark.
    place: String,
    /// The data, for people.
    what: &'static str,
    mark: Mark,
    /// The latest format that this program reads.
    known: u16,
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATER: Format = Format {
        number: 3,
        oldest_reader: 2,
        changes: &[
            Change { number: 2, rewritten: "leases have two fences", misread: "leases end early" },
            Change { number: 3, rewritten: "letters have a name", misread: "names are left out" },
        ],
        ..Format::first("queues", "queues")
    };

    fn marks(fields: &[(&str, &str)]) -> Marks {
        let fields = fields.iter().map(|&(name, value)| (name.to_owned(), value.to_owned()));
        Marks::parse(&fields.collect())
    }

    #[test]
    fn data_of_a_later_format_is_refused_with_the_place_the_versions_and_the_remedy() {
        let found =
            marks(&[("queues:1", "1 0.1.0 5"), ("queues:2", "2 0.2.0 9"), ("last", "0.2.0")]);
        let refused = found.accept(&CORE, "the key fl:formats in Redis").unwrap_err();
        let expected = format!(
            "the key fl:formats in Redis has the mark queues:2: Fairlane 0.2.0 writes format 2 of queues, \
             leases, delayed events and dead letters, and this Fairlane {VERSION} reads formats up to 1; \
             start Fairlane 0.2.0 or later, or restore a backup from before its first start"
        );
        assert_eq!(refused.to_string(), expected);
    }

    #[test]
    fn a_later_format_that_earlier_programs_read_is_accepted() {
        assert_eq!(marks(&[("queues:2", "1 0.2.0 9")]).accept(&CORE, ""), Ok(()));
        assert_eq!(marks(&[("other:2", "2 0.2.0 9")]).accept(&CORE, ""), Ok(()));
        assert_eq!(Marks::default().accept(&CORE, ""), Ok(()));
    }

    #[test]
    fn a_damaged_mark_of_a_later_format_is_refused() {
        for value in ["", "x", "x 0.2.0"] {
            assert!(marks(&[("queues:2", value)]).accept(&CORE, "").is_err(), "{value}");
        }
        assert_eq!(marks(&[("queues:x", "9"), ("queues", "9")]).accept(&CORE, ""), Ok(()));
    }

    #[test]
    fn an_upgrade_tells_each_change_since_the_format_of_the_data() {
        let all = marks(&[("queues:1", "1 0.1.0 5")]).upgrade([&LATER]);
        let expected =
            ["queues 2 (now 1): leases have two fences", "queues 3 (now 1): letters have a name"];
        assert_eq!(all.rewritten, expected);
        assert_eq!(all.misread, ["leases end early", "names are left out"]);
        // Data without a mark is that of the first version.
        assert_eq!(Marks::default().upgrade([&LATER]), all);
        let last = marks(&[("queues:2", "2 0.2.0 9")]).upgrade([&LATER]);
        assert_eq!(last.rewritten, ["queues 3 (now 2): letters have a name"]);
        assert_eq!(last.misread, [""; 0]);
        assert_eq!(Marks::default().upgrade(&CORE), Upgrade::default());
    }
}
