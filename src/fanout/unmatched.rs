//! Counts and logs events of a type that no pipeline takes, so that mistyped ones do not vanish
//! silently.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

use crate::metrics;

/// Maximum number of types with their own label in `fairlane_unmatched_total`, the first ones that
/// a process sees; later ones count as [`OTHER`].
const LABELS_MAX: usize = 50;
/// The label of all further types.
const OTHER: &str = "other";
/// Maximum number of types that are counted separately per copy.
const FOUND_MAX: usize = 1_000;
/// Minimum time between two log lines about further types. Each type with its own label is logged once.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// The events of such types in some batches of the bus.
#[derive(Debug, Default)]
pub(crate) struct Found(BTreeMap<Box<str>, u64>);

impl Found {
    pub(crate) fn add(&mut self, kind: &str) {
        let is_told_apart = self.0.len() < FOUND_MAX || self.0.contains_key(kind);
        let place = if is_told_apart { kind } else { OTHER };
        *self.0.entry(place.into()).or_default() += 1;
    }
}

/// Counts and logs them for one process.
#[derive(Debug)]
pub(crate) struct Unmatched(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    labels: BTreeSet<Box<str>>,
    /// Not yet logged: a type, and the number of events.
    open: Option<(Box<str>, u64)>,
    logged: Option<Instant>,
}

impl Unmatched {
    pub(crate) fn new() -> Self {
        metrics::unmatched(OTHER, 0);
        Self(Mutex::default())
    }

    /// Adds the counts of a batch after it was copied.
    pub(crate) fn count(&self, found: &Found) {
        if found.0.is_empty() {
            return;
        }
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (kind, &events) in &found.0 {
            let is_new = !state.labels.contains(kind);
            let label = state.label(kind);
            metrics::unmatched(label, events);
            if label == OTHER {
                state.open.get_or_insert_with(|| (kind.clone(), 0)).1 += events;
            } else if is_new {
                warn(kind, events);
            }
        }
        drop(state);
        self.log();
    }

    /// Logs the counts of further types, unless there was a line within the last minute.
    pub(crate) fn log(&self) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.logged.is_some_and(|logged| logged.elapsed() < LOG_EVERY) {
            return;
        }
        if let Some((kind, events)) = state.open.take() {
            state.logged = Some(Instant::now());
            warn(&kind, events);
        }
    }
}

fn warn(kind: &str, events: u64) {
    warn!(
        events,
        kind,
        "events of a type that no pipeline of this configuration takes; `events` of a pipeline names its types"
    );
}

impl State {
    fn label<'a>(&mut self, kind: &'a str) -> &'a str {
        if self.labels.contains(kind) {
            return kind;
        }
        if self.labels.len() >= LABELS_MAX {
            return OTHER;
        }
        self.labels.insert(kind.into());
        kind
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_so_many_types_have_a_label_of_their_own() {
        let mut state = State::default();
        for number in 0..LABELS_MAX {
            let kind = format!("type-{number}");
            assert_eq!(state.label(&kind), kind);
        }
        assert_eq!(state.label("one-more"), OTHER);
        assert_eq!(state.label("type-7"), "type-7", "it keeps its label");
    }

    #[test]
    fn of_very_many_types_the_events_are_still_counted() {
        let mut found = Found::default();
        for number in 0..2 * FOUND_MAX {
            found.add(&format!("type-{number}"));
        }
        assert_eq!(found.0.len(), FOUND_MAX + 1);
        assert_eq!(found.0.values().sum::<u64>(), 2 * FOUND_MAX as u64);
        found.add("type-7");
        assert_eq!(found.0["type-7"], 2, "a known type is counted as itself");
    }
}
