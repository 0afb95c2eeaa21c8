//! The compiled rules of the bots with recent events.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustc_hash::FxHashMap;

use super::decide::RuleSet;
use super::rule::Ready;
use crate::automations::store::{RuleStore, Stored};
use crate::expression::{Filter, FilterError, Sees};
use crate::id::BotId;
use crate::mongo::client::MongoError;

/// Number of bots per generation. There are two generations; a used entry moves to the younger one.
const BOTS: usize = 10_000;
/// Number of cached filters at which unused ones are removed.
const FILTERS_MIN: usize = 1_000;

/// The rules of bots as stored. After a change they may be outdated until its message arrives.
#[derive(Debug)]
pub(crate) struct RuleCache {
    store: RuleStore,
    state: Mutex<State>,
    filters: Arc<Filters>,
}

/// Filters by their text: many bots write the same filters.
#[derive(Debug, Default)]
struct Filters(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    filters: HashMap<String, Weak<Filter>>,
    /// The number of filters at which unused ones are removed next.
    full: usize,
}

#[derive(Debug, Default)]
struct State {
    young: FxHashMap<BotId, Arc<RuleSet>>,
    old: FxHashMap<BotId, Arc<RuleSet>>,
    /// Bots whose rules are being read: by how many readers, and whether the rules changed
    /// meanwhile. If so, the result is not cached.
    reading: FxHashMap<BotId, (usize, bool)>,
}

impl RuleCache {
    pub(crate) fn new(store: RuleStore) -> Self {
        Self { store, state: Mutex::default(), filters: Arc::default() }
    }

    /// The rules of a bot.
    ///
    /// # Errors
    /// If they are not cached and MongoDB is unavailable.
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
        // Compiling a thousand filters takes a while.
        let compiling = tokio::task::spawn_blocking(move || filters.compile(stored));
        let rules = Arc::new(compiling.await.unwrap_or_else(|failed| {
            // The task is never cancelled; the caller handles a panic.
            std::panic::resume_unwind(failed.into_panic())
        }));
        reading.end(&rules);
        Ok(rules)
    }

    /// Forgets the rules of a bot after a change.
    pub(crate) fn forget(&self, bot: &BotId) {
        let mut state = self.state();
        state.young.remove(bot);
        state.old.remove(bot);
        if let Some((_, forgotten)) = state.reading.get_mut(bot) {
            *forgotten = true;
        }
    }

    /// Forgets all rules, because any of them may have changed.
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

/// A read of the rules of a bot in progress.
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
