//! The names of copied events. By them, the copy finds an event that it has copied before.

use std::collections::BTreeSet;

/// The bot, source and id of an event. The model does not look inside.
pub(crate) type Name = u16;

/// The names of the events of one call, and how long they are remembered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Repeats<'a> {
    pub(crate) window_ms: i64,
    /// Each once.
    pub(crate) names: &'a [Name],
    /// Those of repetitions that were left out.
    pub(crate) left_out: &'a [Name],
}

/// Names that are forgotten together, after this time in ms.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Noted {
    pub(crate) names: BTreeSet<Name>,
    pub(crate) until_ms: i64,
}

/// All names that are remembered.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Names {
    pub(crate) now: Option<Noted>,
    pub(crate) before: Option<Noted>,
}

impl Names {
    /// Forgets what is too old. Redis does so without a command.
    pub(crate) fn expire(&mut self, now_us: i64) {
        for noted in [&mut self.now, &mut self.before] {
            noted.take_if(|noted| now_us / 1_000 > noted.until_ms);
        }
    }

    pub(super) fn knows(&self, name: Name) -> bool {
        [&self.now, &self.before].into_iter().flatten().any(|noted| noted.names.contains(&name))
    }

    /// Forgets a name that was just noted.
    pub(super) fn forget(&mut self, name: Name) {
        if let Some(noted) = &mut self.now {
            noted.names.remove(&name);
        }
        self.now.take_if(|noted| noted.names.is_empty());
    }

    /// The places of the names that are remembered. If there are none, notes all.
    pub(crate) fn repeated(&mut self, now_us: i64, repeats: Repeats<'_>) -> Vec<usize> {
        let Repeats { window_ms, names, .. } = repeats;
        if names.is_empty() {
            return Vec::new();
        }
        let at_ms = now_us / 1_000;
        if let Some(noted) = &mut self.now {
            // After a change to a shorter window.
            noted.until_ms = noted.until_ms.min(at_ms + 2 * window_ms);
        }
        if self.now.as_ref().is_some_and(|noted| noted.until_ms - at_ms < window_ms) {
            self.before = self.now.take();
        }
        let places = (0..).zip(names).filter(|(_, name)| self.knows(**name));
        let places = places.map(|(place, _)| place);
        let places: Vec<usize> = places.collect();
        if places.is_empty() {
            let until_ms = at_ms + 2 * window_ms;
            let fresh = || Noted { names: BTreeSet::new(), until_ms };
            self.now.get_or_insert_with(fresh).names.extend(names);
        }
        places
    }
}
