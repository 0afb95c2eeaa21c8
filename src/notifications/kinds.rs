//! The types with their own entry in the statistics.
//!
//! Tenants choose types, and the statistics are shared: so a bot has a part of the entries only, and
//! an entry that is not used ends.

use std::collections::BTreeMap;
use std::time::Duration;

use redis::Value;

use crate::clock::millis;
use crate::id::BotId;
use crate::redis::{Reply, ReplyError};

/// Maximum number of types with their own entry in the statistics; others count as `other`.
pub const KINDS_MAX: usize = 50;
/// Maximum number of them that one bot was the first to use.
pub const KINDS_OF_BOT: usize = 10;
/// A type that is not used for this long loses its entry.
pub const KIND_LASTS: Duration = Duration::from_secs(7 * 86_400);
/// How often the last use of a type is written.
pub(crate) const KIND_NOTED: Duration = Duration::from_secs(3_600);

/// By type: the last use, and the bot that was the first to use it.
pub(super) struct Kinds(BTreeMap<String, (u64, String)>);

/// What becomes of a type.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Whether it has its own entry.
    pub(super) is_own: bool,
    /// Types whose entries have ended.
    pub(super) ended: Vec<String>,
    /// The new value of its entry, if that has to be written.
    pub(super) used: Option<String>,
}

impl Kinds {
    pub(super) fn read(hash: Value) -> Result<Self, ReplyError> {
        let fields = match hash {
            Value::Map(pairs) => {
                Value::Array(pairs.into_iter().flat_map(|(kind, used)| [kind, used]).collect())
            }
            other => other,
        };
        let (mut fields, mut known) = (Reply::new(fields)?, BTreeMap::new());
        while fields.len() > 1 {
            let (kind, used) = (fields.text()?, fields.text()?);
            // A damaged value counts as one that has ended.
            let (at, bot) = used.split_once(' ').unwrap_or_default();
            known.insert(kind, (at.parse().unwrap_or(0), bot.to_owned()));
        }
        Ok(Self(known))
    }

    /// Enters a use of a type by `bot`.
    pub(super) fn enter(self, bot: &BotId, kind: &str, now_ms: u64) -> Entry {
        let oldest = now_ms.saturating_sub(millis(KIND_LASTS));
        let (known, ended): (BTreeMap<_, _>, BTreeMap<_, _>) =
            self.0.into_iter().partition(|(_, (at, _))| *at >= oldest);
        let mut ended: Vec<String> = ended.into_keys().collect();
        if let Some((at, first)) = known.get(kind) {
            let is_stale = now_ms.saturating_sub(*at) >= millis(KIND_NOTED);
            let used = is_stale.then(|| format!("{now_ms} {first}"));
            return Entry { is_own: true, ended, used };
        }
        let of_bot = known.values().filter(|(_, first)| first == bot.as_str()).count();
        if known.len() >= KINDS_MAX || of_bot >= KINDS_OF_BOT {
            return Entry { is_own: false, ended, used: None };
        }
        ended.retain(|ended| ended != kind);
        Entry { is_own: true, ended, used: Some(format!("{now_ms} {bot}")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000_000;

    fn bot(name: &str) -> BotId {
        BotId::parse(name).unwrap()
    }

    fn kinds(entries: &[(&str, u64, &str)]) -> Kinds {
        let entry = |&(kind, at, bot): &(&str, u64, &str)| (kind.to_owned(), (at, bot.to_owned()));
        Kinds(entries.iter().map(entry).collect())
    }

    fn many(bots: usize, each: usize) -> Kinds {
        let name = |at: usize| (format!("kind-{at}"), (NOW, format!("bot-{}", at % bots)));
        Kinds((0..bots * each).map(name).collect())
    }

    #[test]
    fn a_bot_has_a_part_of_the_entries_and_leaves_room_for_others() {
        let full = || many(1, KINDS_OF_BOT);
        assert!(!full().enter(&bot("bot-0"), "new", NOW).is_own);
        assert!(full().enter(&bot("bot-0"), "kind-3", NOW).is_own, "an entry of its own");
        assert!(full().enter(&bot("quiet"), "kind-3", NOW).is_own, "an entry is for all bots");
        let entry = full().enter(&bot("quiet"), "new", NOW);
        assert_eq!((entry.is_own, entry.used), (true, Some(format!("{NOW} quiet"))));
        let all = many(KINDS_MAX / KINDS_OF_BOT, KINDS_OF_BOT);
        assert!(!all.enter(&bot("quiet"), "new", NOW).is_own);
    }

    #[test]
    fn an_entry_ends_when_it_is_not_used() {
        let lasts = millis(KIND_LASTS);
        let known = || kinds(&[("old", NOW - lasts - 1, "a"), ("recent", NOW - lasts, "a b")]);
        let entry = known().enter(&bot("b"), "new", NOW);
        assert_eq!((entry.is_own, entry.ended), (true, vec!["old".to_owned()]));
        let used = known().enter(&bot("b"), "recent", NOW).used;
        assert_eq!(used, Some(format!("{NOW} a b")), "who was first stays so");
        let again = known().enter(&bot("b"), "old", NOW);
        assert_eq!((again.ended, again.used), (Vec::new(), Some(format!("{NOW} b"))));
        let fresh = kinds(&[("k", NOW - 1, "a")]).enter(&bot("b"), "k", NOW);
        assert_eq!((fresh.is_own, fresh.used), (true, None), "not written for each use");
    }
}
