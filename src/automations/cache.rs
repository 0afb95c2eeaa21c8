//! The rules of the bots that have events just now, compiled.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustc_hash::FxHashMap;

use super::decide::RuleSet;
use super::rule::Ready;
use crate::automations::store::{RuleStore, Stored};
use crate::filter::{Filter, FilterError, Sees};
use crate::id::BotId;
use crate::store::mongo::MongoError;

/// Bots of a generation. Two are kept: what is used moves to the younger one.
const BOTS: usize = 10_000;
/// Filters that are remembered before those that nobody has are looked for.
const FILTERS_MIN: usize = 1_000;

/// The rules of bots, as they are stored or, for the time that news takes, were.
#[derive(Debug)]
pub(crate) struct RuleCache {
    store: RuleStore,
    state: Mutex<State>,
    filters: Arc<Filters>,
}

/// Bots write the same filters.
#[derive(Debug, Default)]
struct Filters(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    filters: HashMap<String, Weak<Filter>>,
    /// Those that nobody has are looked for when there are so many.
    full: usize,
}

#[derive(Debug, Default)]
struct State {
    young: FxHashMap<BotId, Arc<RuleSet>>,
    old: FxHashMap<BotId, Arc<RuleSet>>,
    /// Bots whose rules are being read, by how many, and whether they were forgotten meanwhile: then
    /// what was read is not remembered.
    reading: FxHashMap<BotId, (usize, bool)>,
}

impl RuleCache {
    pub(crate) fn new(store: RuleStore) -> Self {
        Self { store, state: Mutex::default(), filters: Arc::default() }
    }

    /// The rules of a bot.
    ///
    /// # Errors
    /// When they have to be read and MongoDB does not answer.
    pub(crate) async fn of(&self, bot: &BotId) -> Result<Arc<RuleSet>, MongoError> {
        {
            let mut state = self.state();
            if let Some(rules) = state.young.get(bot) {
                return Ok(Arc::clone(rules));
            }
            if let Some(rules) = state.old.remove(bot) {
                state.keep(bot, &rules);
                return Ok(rules);
            }
            state.reading.entry(bot.clone()).or_insert((0, false)).0 += 1;
        }
        let reading = Reading { cache: self, bot };
        let stored = self.store.list(bot).await?;
        let filters = Arc::clone(&self.filters);
        // A thousand filters take their time.
        let compiling = tokio::task::spawn_blocking(move || filters.compile(stored));
        let rules = Arc::new(compiling.await.unwrap_or_else(|failed| {
            // It is never cancelled, and a panic is the caller's to catch.
            std::panic::resume_unwind(failed.into_panic())
        }));
        reading.end(&rules);
        Ok(rules)
    }

    /// The rules of a bot have changed.
    pub(crate) fn forget(&self, bot: &BotId) {
        let mut state = self.state();
        state.young.remove(bot);
        state.old.remove(bot);
        if let Some((_, forgotten)) = state.reading.get_mut(bot) {
            *forgotten = true;
        }
    }

    /// The rules of any bot may have changed.
    pub(crate) fn forget_all(&self) {
        let mut state = self.state();
        state.young.clear();
        state.old.clear();
        state.reading.values_mut().for_each(|(_, forgotten)| *forgotten = true);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody reads the rules of a bot.
struct Reading<'a> {
    cache: &'a RuleCache,
    bot: &'a BotId,
}

impl Reading<'_> {
    fn end(self, rules: &Arc<RuleSet>) {
        let mut state = self.cache.state();
        if state.reading.get(self.bot).is_some_and(|(_, forgotten)| !forgotten) {
            state.keep(self.bot, rules);
        }
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let mut state = self.cache.state();
        if let Some((readers, _)) = state.reading.get_mut(self.bot) {
            *readers -= 1;
            if *readers == 0 {
                state.reading.remove(self.bot);
            }
        }
    }
}

impl Filters {
    fn compile(&self, stored: Vec<Stored>) -> RuleSet {
        let rules = stored
            .into_iter()
            .map(|Stored { id, rule, .. }| Ready::new(id, rule, |text| self.filter(text)));
        RuleSet::new(rules.collect())
    }

    fn filter(&self, text: &str) -> Result<Arc<Filter>, FilterError> {
        let known = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(filter) = known().filters.get(text).and_then(Weak::upgrade) {
            return Ok(filter);
        }
        let filter = Arc::new(Filter::compile(text, Sees::Subscriber)?);
        let mut known = known();
        if known.filters.len() >= known.full.max(FILTERS_MIN) {
            known.filters.retain(|_, filter| filter.strong_count() > 0);
            known.full = 2 * known.filters.len();
        }
        known.filters.insert(text.to_owned(), Arc::downgrade(&filter));
        Ok(filter)
    }
}

impl State {
    fn keep(&mut self, bot: &BotId, rules: &Arc<RuleSet>) {
        if self.young.len() >= BOTS {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(bot.clone(), Arc::clone(rules));
    }
}
