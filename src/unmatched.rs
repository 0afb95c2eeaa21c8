//! Detects event types that no pipeline takes, so that mistyped ones do not vanish silently.
//!
//! A pipeline takes a type if its `events` names it and the pipeline is enabled. A selective
//! pipeline names many types, but copies only events that it wants for their bot. It takes a type
//! only for such a bot. A filter that does not match has no influence.
//! wants it for that bot. A filter that does not match leaves its type taken.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

use crate::config::Config;
use crate::fanout::Interest;
use crate::filter::Glob;
use crate::id::{BotId, PipelineName};
use crate::metrics;
use crate::product::Kinds;

/// Maximum number of types with their own label in `fairlane_unmatched_total`, the first ones that
/// a process sees; later ones count as [`OTHER`].
const LABELS_MAX: usize = 50;
/// The label of all further types.
const OTHER: &str = "other";
/// Maximum number of types that are counted separately per copy.
const FOUND_MAX: usize = 1_000;
/// Minimum time between two log lines.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// The types that a pipeline takes.
#[derive(Debug)]
pub(crate) struct Taken {
    written: Vec<Glob>,
    /// The selective pipelines that run here: the types they name, and the events they want.
    selective: Vec<(Vec<Glob>, Arc<dyn Interest>)>,
}

/// The types of the enabled pipelines that are not selective.
pub(crate) fn written(config: &Config, kinds: &Kinds) -> Vec<Glob> {
    named(config, |name| !kinds.of(name).selective)
}

fn named(config: &Config, which: impl Fn(&PipelineName) -> bool) -> Vec<Glob> {
    let enabled = config.pipelines.iter().filter(|(_, pipeline)| pipeline.enabled);
    let meant = enabled.filter(|(name, _)| which(name));
    meant.flat_map(|(_, pipeline)| pipeline.events.iter().map(|glob| Glob::new(glob))).collect()
}

impl Taken {
    /// The types in a configuration, and the selective pipelines that run here.
    pub(crate) fn new(
        config: &Config,
        kinds: &Kinds,
        interests: Vec<(PipelineName, Arc<dyn Interest>)>,
    ) -> Self {
        let types = |name: PipelineName| named(config, |other| *other == name);
        let selective = interests.into_iter().map(|(name, interest)| (types(name), interest));
        Self { written: written(config, kinds), selective: selective.collect() }
    }

    /// Whether a pipeline takes events of a bot of this type.
    pub(crate) fn takes(&self, bot: &BotId, kind: &str) -> bool {
        let has = |globs: &[Glob]| globs.iter().any(|glob| glob.matches(kind));
        let wanted = |(types, interest): &(Vec<Glob>, Arc<dyn Interest>)| {
            has(types) && interest.takes(bot, kind)
        };
        has(&self.written) || self.selective.iter().any(wanted)
    }
}

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
            metrics::unmatched(state.label(kind), events);
            state.open.get_or_insert_with(|| (kind.clone(), 0)).1 += events;
        }
        drop(state);
        self.log();
    }

    /// Logs the counts, unless there was a line within the last minute.
    pub(crate) fn log(&self) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.logged.is_some_and(|logged| logged.elapsed() < LOG_EVERY) {
            return;
        }
        if let Some((kind, events)) = state.open.take() {
            state.logged = Some(Instant::now());
            warn!(events, %kind,
                "events of a type that no pipeline of this configuration takes; `events` of a pipeline names its types");
        }
    }
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
        assert!(found.0.len() <= FOUND_MAX + 1, "{} types", found.0.len());
        assert_eq!(found.0.values().sum::<u64>(), 2 * FOUND_MAX as u64);
    }

    #[test]
    fn a_type_is_taken_by_a_pipeline_and_not_by_unread_rules() {
        let text = "[pipelines.tags]\nhandler = \"log\"\nevents = [\"tag.*\"]\n\
                    [pipelines.off]\nhandler = \"log\"\nevents = [\"*\"]\nenabled = false\n";
        let config = Config::from_toml(text, "the test").unwrap();
        let kinds = Kinds::today(&config);
        let (taken, bot) = (Taken::new(&config, &kinds, Vec::new()), BotId::parse("b").unwrap());
        for (kind, expected) in [("tag.applied", true), ("tga.applied", false), ("x", false)] {
            assert_eq!(taken.takes(&bot, kind), expected, "{kind}");
        }
        // No rule is known before the rules were read.
        let name = PipelineName::parse(crate::automations::PIPELINE).unwrap();
        let rules: Arc<dyn Interest> = Arc::new(crate::automations::Subscriptions::new());
        assert!(!Taken::new(&config, &kinds, vec![(name, rules)]).takes(&bot, "tga.applied"));
    }
}
