//! The compiled rules of the bots with recent events.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustc_hash::FxHashMap;

use super::decide::RuleSet;
use super::rule::Ready;
use crate::automations::heavy::at_low_priority;
use crate::automations::store::{RuleStore, Stored};
use crate::expression::{Filter, FilterError, Sees};
use crate::id::BotId;
use crate::mongo::client::MongoError;
use crate::mongo::turns::Turns;

/// Number of bots per generation. There are two generations; a used entry moves to the younger one.
const BOTS: usize = 10_000;
/// Number of cached filters at which unused ones are removed.
const FILTERS_MIN: usize = 1_000;
/// Number of bots whose outdated rules are kept until they are read again. They may have megabytes each.
const OUTDATED_MAX: usize = 64;

/// The rules of bots as stored. After a change they may be outdated until its message arrives.
#[derive(Debug)]
pub(crate) struct RuleCache {
    store: RuleStore,
    state: Mutex<State>,
    filters: Arc<Filters>,
    /// A bot's rules are read once at a time.
    turns: Turns,
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
    /// Rules that changed. Their filters are not compiled again, except the changed ones.
    outdated: FxHashMap<BotId, Arc<RuleSet>>,
    /// Bots whose rules are being read, and whether the rules changed meanwhile. If so, the result is
    /// not cached.
    reading: FxHashMap<BotId, bool>,
}

impl RuleCache {
    pub(crate) fn new(store: RuleStore) -> Self {
        let (state, filters, turns) = (Mutex::default(), Arc::default(), Turns::default());
        Self { store, state, filters, turns }
    }

    /// The rules of a bot. If the caller stops waiting, the rules are still read and compiled, and its
    /// next call finds them.
    ///
    /// # Errors
    /// If they are not cached and MongoDB is unavailable.
    pub(crate) async fn of(self: &Arc<Self>, bot: &BotId) -> Result<Arc<RuleSet>, MongoError> {
        if let Some(rules) = self.known(bot) {
            return Ok(rules);
        }
        #[expect(clippy::disallowed_methods, reason = "a stop need not wait for rules")]
        let reading = tokio::spawn(Arc::clone(self).read(bot.clone()));
        match reading.await {
            Ok(rules) => rules,
            Err(failed) => match failed.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The process ends.
                Err(_) => std::future::pending().await,
            },
        }
    }

    async fn read(self: Arc<Self>, bot: BotId) -> Result<Arc<RuleSet>, MongoError> {
        let _turn = self.turns.of(&bot).await;
        if let Some(rules) = self.known(&bot) {
            return Ok(rules);
        }
        let reading = Reading::begin(&self, &bot);
        let stored = self.store.list(&bot).await?;
        let filters = Arc::clone(&self.filters);
        // Compiling a thousand filters takes a while.
        let compiling =
            tokio::task::spawn_blocking(move || at_low_priority(|| filters.compile(stored)));
        let rules = Arc::new(compiling.await.unwrap_or_else(|failed| {
            // The task is never cancelled; the caller handles a panic.
            std::panic::resume_unwind(failed.into_panic())
        }));
        reading.end(&rules);
        Ok(rules)
    }

    /// The rules of a bot, if they are cached.
    fn known(&self, bot: &BotId) -> Option<Arc<RuleSet>> {
        let mut state = self.state();
        if let Some(rules) = state.young.get(bot) {
            return Some(Arc::clone(rules));
        }
        let rules = state.old.remove(bot)?;
        state.keep(bot, &rules);
        Some(rules)
    }

    /// Forgets the rules of a bot after a change.
    pub(crate) fn forget(&self, bot: &BotId) {
        let mut state = self.state();
        let (young, old) = (state.young.remove(bot), state.old.remove(bot));
        if let Some(rules) = young.or(old) {
            state.outdate(bot, rules);
        }
        if let Some(forgotten) = state.reading.get_mut(bot) {
            *forgotten = true;
        }
    }

    /// Forgets all rules, because any of them may have changed.
    pub(crate) fn forget_all(&self) {
        let mut state = self.state();
        state.young.clear();
        state.old.clear();
        state.outdated.clear();
        state.reading.values_mut().for_each(|forgotten| *forgotten = true);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A read of the rules of a bot in progress.
struct Reading<'a> {
    cache: &'a RuleCache,
    bot: &'a BotId,
    /// Holds the filters that did not change.
    _outdated: Option<Arc<RuleSet>>,
}

impl<'a> Reading<'a> {
    fn begin(cache: &'a RuleCache, bot: &'a BotId) -> Self {
        let mut state = cache.state();
        state.reading.insert(bot.clone(), false);
        Self { cache, bot, _outdated: state.outdated.remove(bot) }
    }

    fn end(self, rules: &Arc<RuleSet>) {
        let mut state = self.cache.state();
        match state.reading.get(self.bot) {
            Some(false) => state.keep(self.bot, rules),
            _ => state.outdate(self.bot, Arc::clone(rules)),
        }
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.cache.state().reading.remove(self.bot);
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

    fn outdate(&mut self, bot: &BotId, rules: Arc<RuleSet>) {
        if self.outdated.len() >= OUTDATED_MAX {
            self.outdated.clear();
        }
        self.outdated.insert(bot.clone(), rules);
    }
}
