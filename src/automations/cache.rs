//! The compiled rules of the bots with recent events.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustc_hash::FxHashMap;

use super::decide::RuleSet;
use super::rule::{Ready, Rule};
use crate::automations::heavy::at_low_priority;
use crate::automations::store::{RuleStore, Stored};
use crate::expression::{Filter, FilterError, Sees};
use crate::id::BotId;
use crate::mongo::client::MongoError;
use crate::mongo::turns::{Turn, Turns};

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
    /// Rules from before [`RuleCache::forget_all`] that were not read again since. Most did not change.
    doubtful: FxHashMap<BotId, Arc<RuleSet>>,
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
        let turn = self.turns.of(bot).await;
        if let Some(rules) = self.known(bot) {
            return Ok(rules);
        }
        #[expect(clippy::disallowed_methods, reason = "a stop need not wait for rules")]
        let reading = tokio::spawn(Arc::clone(self).read(bot.clone(), turn));
        match reading.await {
            Ok(rules) => rules,
            Err(failed) => match failed.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The process ends.
                Err(_) => std::future::pending().await,
            },
        }
    }

    async fn read(self: Arc<Self>, bot: BotId, _turn: Turn) -> Result<Arc<RuleSet>, MongoError> {
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

    /// See [`super::Editor::compile`]. Unlike [`Self::of`], the caller has read the rules, and the others
    /// of its bot do not wait.
    pub(crate) fn compile(
        &self,
        bot: &BotId,
        stored: Vec<Stored>,
        goes_on: impl Fn() -> bool,
    ) -> Option<Arc<RuleSet>> {
        let _last = self.state().last(bot);
        let count = stored.len();
        let rules = self.filters.compile_while(stored, goes_on);
        let is_whole = rules.len() == count;
        let rules = Arc::new(RuleSet::new(rules));
        let mut state = self.state();
        if state.known(bot).is_none() {
            state.outdate(bot, Arc::clone(&rules));
        }
        is_whole.then_some(rules)
    }

    /// The rules of a bot, if they are cached.
    fn known(&self, bot: &BotId) -> Option<Arc<RuleSet>> {
        self.state().known(bot)
    }

    /// Forgets the rules of a bot after a change.
    pub(crate) fn forget(&self, bot: &BotId) {
        self.state().forget(bot);
    }

    /// Forgets all rules, because any of them may have changed.
    pub(crate) fn forget_all(&self) {
        let dropped = self.state().forget_all();
        // They may be many, and nothing waits for the lock meanwhile.
        drop(dropped);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A read of the rules of a bot in progress.
struct Reading<'a> {
    cache: &'a RuleCache,
    bot: &'a BotId,
    /// Holds the filters that did not change, until the new rules hold them.
    outdated: Option<Arc<RuleSet>>,
}

impl<'a> Reading<'a> {
    fn begin(cache: &'a RuleCache, bot: &'a BotId) -> Self {
        let mut state = cache.state();
        state.reading.insert(bot.clone(), false);
        Self { cache, bot, outdated: state.take_outdated(bot) }
    }

    fn end(mut self, rules: &Arc<RuleSet>) {
        self.outdated = None;
        let mut state = self.cache.state();
        match state.reading.get(self.bot) {
            Some(false) => state.keep(self.bot, rules),
            _ => state.outdate(self.bot, Arc::clone(rules)),
        }
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let mut state = self.cache.state();
        state.reading.remove(self.bot);
        if let Some(rules) = self.outdated.take() {
            state.outdate(self.bot, rules);
        }
    }
}

impl Filters {
    fn compile(&self, stored: Vec<Stored>) -> RuleSet {
        RuleSet::new(self.compile_while(stored, || true))
    }

    /// Compiles rules while `goes_on`, and then only those with known filters.
    fn compile_while(&self, stored: Vec<Stored>, goes_on: impl Fn() -> bool) -> Vec<Ready> {
        let ready = |Stored { id, rule, .. }: Stored| {
            // A disabled rule is not evaluated.
            let filter = rule.filter.filter(|_| rule.enabled);
            let is_known = filter.as_deref().is_none_or(|text| self.known(text).is_some());
            let rule = Rule { filter, ..rule };
            (is_known || goes_on()).then(|| Ready::new(id, rule, |text| self.filter(text)))
        };
        stored.into_iter().filter_map(ready).collect()
    }

    fn filter(&self, text: &str) -> Result<Arc<Filter>, FilterError> {
        if let Some(filter) = self.known(text) {
            return Ok(filter);
        }
        let filter = Arc::new(Filter::compile(text, Sees::Subscriber)?);
        let mut known = self.all();
        if known.filters.len() >= known.full.max(FILTERS_MIN) {
            known.filters.retain(|_, filter| filter.strong_count() > 0);
            known.full = 2 * known.filters.len();
        }
        known.filters.insert(text.to_owned(), Arc::downgrade(&filter));
        Ok(filter)
    }

    fn known(&self, text: &str) -> Option<Arc<Filter>> {
        self.all().filters.get(text).and_then(Weak::upgrade)
    }

    fn all(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn known(&mut self, bot: &BotId) -> Option<Arc<RuleSet>> {
        if let Some(rules) = self.young.get(bot) {
            return Some(Arc::clone(rules));
        }
        let rules = self.old.remove(bot)?;
        self.keep(bot, &rules);
        Some(rules)
    }

    fn forget(&mut self, bot: &BotId) {
        let (young, old) = (self.young.remove(bot), self.old.remove(bot));
        if let Some(rules) = young.or(old) {
            self.outdate(bot, rules);
        }
        if let Some(forgotten) = self.reading.get_mut(bot) {
            *forgotten = true;
        }
    }

    /// Returns those that were not read again since the last time.
    fn forget_all(&mut self) -> FxHashMap<BotId, Arc<RuleSet>> {
        self.reading.values_mut().for_each(|forgotten| *forgotten = true);
        let mut all = std::mem::take(&mut self.old);
        all.extend(std::mem::take(&mut self.young));
        std::mem::replace(&mut self.doubtful, all)
    }

    /// Takes out the last known rules of a bot, before they are read.
    fn take_outdated(&mut self, bot: &BotId) -> Option<Arc<RuleSet>> {
        let doubtful = self.doubtful.remove(bot);
        self.outdated.remove(bot).or(doubtful)
    }

    /// The last known rules of a bot.
    fn last(&self, bot: &BotId) -> Option<Arc<RuleSet>> {
        let all = [&self.young, &self.old, &self.outdated, &self.doubtful];
        all.into_iter().find_map(|rules| rules.get(bot)).map(Arc::clone)
    }

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

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use serde_json::json;

    use super::*;
    use crate::id::RuleId;

    fn bot(number: usize) -> BotId {
        BotId::parse(&format!("bot-{number}")).unwrap()
    }

    fn text(number: usize) -> String {
        format!("event.data.n == {number}")
    }

    fn stored(number: usize, enabled: bool) -> Stored {
        let rule = json!({ "on": ["x"], "filter": text(number), "enabled": enabled,
            "actions": [{ "set_tag": { "tag": "t" } }] });
        let id = RuleId::parse(&format!("rule-{number}")).unwrap();
        Stored { id, rule: serde_json::from_value(rule).unwrap(), version: String::new() }
    }

    #[test]
    fn after_all_rules_are_forgotten_no_unchanged_filter_is_compiled_again() {
        let (filters, mut state) = (Filters::default(), State::default());
        let bots = OUTDATED_MAX + 10;
        for number in 0..bots {
            let rules = Arc::new(filters.compile(vec![stored(number, true)]));
            state.keep(&bot(number), &rules);
        }
        assert!(state.forget_all().is_empty());
        state.forget(&bot(0));
        for number in 1..bots {
            assert!(state.known(&bot(number)).is_none(), "the rules may have changed");
            let last = state.take_outdated(&bot(number));
            assert!(last.is_some() && filters.known(&text(number)).is_some());
        }
        // What is not read again is dropped the next time.
        assert!(state.last(&bot(0)).is_some());
        assert_eq!(state.forget_all().len(), 1);
        assert!(state.last(&bot(0)).is_none() && filters.known(&text(0)).is_none());
    }

    #[test]
    fn compiling_that_is_stopped_continues_with_the_filters_that_are_not_known_yet() {
        let (filters, asked) = (Filters::default(), Cell::new(0));
        let rules = || -> Vec<_> { (0..4).map(|number| stored(number, number != 3)).collect() };
        let first = filters.compile_while(rules(), || {
            asked.set(asked.get() + 1);
            asked.get() < 3
        });
        assert_eq!(first.len(), 3, "two of three, and a disabled one, which is not evaluated");
        asked.set(0);
        let second = filters.compile_while(rules(), || {
            asked.set(asked.get() + 1);
            true
        });
        assert_eq!((second.len(), asked.get()), (4, 1), "only the third was not known");
        assert!(filters.known(&text(3)).is_none());
    }
}
