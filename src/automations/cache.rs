//! The compiled rules of the bots with recent events.

mod sets;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustc_hash::FxHashMap;
use tracing::warn;

use self::sets::Sets;
use super::decide::RuleSet;
use super::rule::{RULES_MAX_STORED_MEMORY, Ready, Rule};
use crate::automations::heavy::at_low_priority;
use crate::automations::store::{RuleStore, Stored};
use crate::expression::{Filter, FilterError, Sees};
use crate::id::BotId;
use crate::mongo::client::MongoError;
use crate::mongo::turns::{Turn, Turns};
use crate::telemetry::OncePerSubject;

/// Number of bots per generation, and size of their rules in memory, in bytes. There are two generations;
/// a used entry moves to the younger one.
const BOTS: usize = 10_000;
const BYTES: usize = 64 << 20;
/// Size of a set above which it is among the large ones, and size of these together, in bytes. The largest
/// set fits.
const LARGE: usize = 16 << 20;
const LARGE_MAX_BYTES: usize = 96 << 20;
/// Number of cached filters at which unused ones are removed.
const FILTERS_MIN: usize = 1_000;
/// The same for bots whose outdated rules are kept until they are read again.
const OUTDATED_MAX: usize = 64;
const OUTDATED_MAX_BYTES: usize = LARGE_MAX_BYTES;

static CUT: OncePerSubject = OncePerSubject::new();

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
    young: Sets,
    old: Sets,
    /// Sets that would displace many others. They displace only each other.
    large: Sets,
    /// Rules that changed. Their filters are not compiled again, except the changed ones.
    outdated: Sets,
    /// Rules from before [`RuleCache::forget_all`] that were not read again since. Most did not change.
    doubtful: Sets,
    /// Bots whose rules are being read, and whether the rules changed meanwhile. If so, the result is
    /// not cached.
    reading: FxHashMap<BotId, bool>,
    /// What had to make room. It may be large, so it is dropped without the lock.
    displaced: Vec<Sets>,
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
        let (filters, of) = (Arc::clone(&self.filters), bot.clone());
        // Compiling a thousand filters takes a while.
        let compiling =
            tokio::task::spawn_blocking(move || at_low_priority(|| filters.compile(&of, stored)));
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
        let _last = self.with(|state| state.last(bot));
        let count = stored.len();
        let rules = self.filters.compile_while(bot, stored, goes_on);
        let is_whole = rules.len() == count;
        let rules = Arc::new(RuleSet::new(rules));
        self.with(|state| {
            if state.known(bot).is_none() {
                state.outdate(bot, Arc::clone(&rules));
            }
        });
        is_whole.then_some(rules)
    }

    /// The rules of a bot, if they are cached.
    fn known(&self, bot: &BotId) -> Option<Arc<RuleSet>> {
        self.with(|state| state.known(bot))
    }

    /// Forgets the rules of a bot after a change.
    pub(crate) fn forget(&self, bot: &BotId) {
        self.with(|state| state.forget(bot));
    }

    /// Forgets all rules, because any of them may have changed.
    pub(crate) fn forget_all(&self) {
        self.with(State::forget_all);
    }

    fn with<T>(&self, run: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let done = run(&mut state);
        let displaced = std::mem::take(&mut state.displaced);
        drop(state);
        drop(displaced);
        done
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
        let outdated = cache.with(|state| {
            state.reading.insert(bot.clone(), false);
            state.take_outdated(bot)
        });
        Self { cache, bot, outdated }
    }

    fn end(mut self, rules: &Arc<RuleSet>) {
        self.outdated = None;
        self.cache.with(|state| match state.reading.get(self.bot) {
            Some(false) => state.keep(self.bot, rules),
            _ => state.outdate(self.bot, Arc::clone(rules)),
        });
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let outdated = self.outdated.take();
        self.cache.with(|state| {
            state.reading.remove(self.bot);
            if let Some(rules) = outdated {
                state.outdate(self.bot, rules);
            }
        });
    }
}

impl Filters {
    fn compile(&self, bot: &BotId, stored: Vec<Stored>) -> RuleSet {
        RuleSet::new(self.compile_while(bot, stored, || true))
    }

    /// Compiles rules of a bot while `goes_on`, and then only those with known filters. Those that do not fit
    /// into the memory for the rules of a bot are not evaluated.
    fn compile_while(
        &self,
        bot: &BotId,
        stored: Vec<Stored>,
        goes_on: impl Fn() -> bool,
    ) -> Vec<Ready> {
        let (mut room, mut refused) = (RULES_MAX_STORED_MEMORY, 0);
        let ready = |Stored { id, rule, .. }: Stored| {
            if rule.enabled {
                let Some(left) = room.checked_sub(rule.memory()) else {
                    refused += 1;
                    return Some(Ready::refused(id, rule, no_room()));
                };
                room = left;
            }
            // A disabled rule is not evaluated.
            let filter = rule.filter.filter(|_| rule.enabled);
            let is_known = filter.as_deref().is_none_or(|text| self.known(text).is_some());
            let rule = Rule { filter, ..rule };
            (is_known || goes_on()).then(|| Ready::new(id, rule, |text| self.filter(text)))
        };
        let rules = stored.into_iter().filter_map(ready).collect();
        if refused > 0 && CUT.take(bot.to_string()) {
            warn!(%bot, refused, "rules are not evaluated, and their last errors say why: the rules of the bot would take too much memory");
        }
        rules
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

/// Why a rule does not fit. Only an earlier version, or several processes together, could write it.
fn no_room() -> String {
    format!(
        "not evaluated: with this rule, the rules of the bot would take more than {RULES_MAX_STORED_MEMORY} bytes of memory; write shorter filters, and fewer values in actions, or delete rules"
    )
}

impl State {
    fn known(&mut self, bot: &BotId) -> Option<Arc<RuleSet>> {
        if let Some(rules) = self.young.get(bot).or_else(|| self.large.get(bot)) {
            return Some(rules);
        }
        let rules = self.old.remove(bot)?;
        self.keep(bot, &rules);
        Some(rules)
    }

    fn forget(&mut self, bot: &BotId) {
        let [young, old, large] =
            [&mut self.young, &mut self.old, &mut self.large].map(|sets| sets.remove(bot));
        if let Some(rules) = young.or(old).or(large) {
            self.outdate(bot, rules);
        }
        if let Some(forgotten) = self.reading.get_mut(bot) {
            *forgotten = true;
        }
    }

    /// Drops those that were not read again since the last time.
    fn forget_all(&mut self) {
        self.reading.values_mut().for_each(|forgotten| *forgotten = true);
        let mut all = std::mem::take(&mut self.old);
        let (young, large) = (std::mem::take(&mut self.young), std::mem::take(&mut self.large));
        for (bot, rules) in young.bots.into_iter().chain(large.bots) {
            all.insert(bot, rules);
        }
        self.displaced.push(std::mem::replace(&mut self.doubtful, all));
    }

    /// Takes out the last known rules of a bot, before they are read.
    fn take_outdated(&mut self, bot: &BotId) -> Option<Arc<RuleSet>> {
        let doubtful = self.doubtful.remove(bot);
        self.outdated.remove(bot).or(doubtful)
    }

    /// The last known rules of a bot.
    fn last(&self, bot: &BotId) -> Option<Arc<RuleSet>> {
        let all = [&self.young, &self.old, &self.large, &self.outdated, &self.doubtful];
        all.into_iter().find_map(|sets| sets.get(bot))
    }

    fn keep(&mut self, bot: &BotId, rules: &Arc<RuleSet>) {
        let rules = Arc::clone(rules);
        if rules.memory() > LARGE {
            self.displaced.extend(self.large.insert_within((BOTS, LARGE_MAX_BYTES), bot, rules));
        } else if let Some(young) = self.young.insert_within((BOTS, BYTES), bot, rules) {
            self.displaced.push(std::mem::replace(&mut self.old, young));
        }
    }

    fn outdate(&mut self, bot: &BotId, rules: Arc<RuleSet>) {
        let most = (OUTDATED_MAX, OUTDATED_MAX_BYTES);
        self.displaced.extend(self.outdated.insert_within(most, bot, rules));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use serde_json::json;

    use super::*;
    use crate::id::RuleId;
    use crate::telemetry::captured::Lines;

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
            let rules = Arc::new(filters.compile(&bot(number), vec![stored(number, true)]));
            state.keep(&bot(number), &rules);
        }
        state.forget_all();
        assert!(state.displaced.iter().all(|sets| sets.bots.is_empty()));
        state.forget(&bot(0));
        for number in 1..bots {
            assert!(state.known(&bot(number)).is_none(), "the rules may have changed");
            let last = state.take_outdated(&bot(number));
            assert!(last.is_some() && filters.known(&text(number)).is_some());
        }
        // What is not read again is dropped the next time.
        assert!(state.last(&bot(0)).is_some());
        state.forget_all();
        assert_eq!(state.displaced.pop().map(|sets| sets.bots.len()), Some(1));
        assert!(state.last(&bot(0)).is_none() && filters.known(&text(0)).is_none());
    }

    /// A rule that takes about a megabyte of memory.
    fn large(number: usize) -> Stored {
        let data = vec![json!(null); 16_000];
        let actions = json!([{ "emit": { "type": "t", "data": data } }]);
        let rule = serde_json::from_value(json!({ "on": ["x"], "actions": actions })).unwrap();
        Stored { rule, ..stored(number, true) }
    }

    #[test]
    fn rules_of_all_bots_take_bounded_memory_and_those_in_use_stay() {
        let (filters, mut state) = (Filters::default(), State::default());
        state.keep(&bot(0), &Arc::new(filters.compile(&bot(0), vec![stored(0, true)])));
        let large = Arc::new(filters.compile(&bot(1), (0..3).map(large).collect()));
        let sum = |sets: &Sets| sets.bots.values().map(|rules| rules.memory()).sum::<usize>();
        for number in 1..500 {
            state.keep(&bot(number), &large);
            assert!(state.known(&bot(0)).is_some(), "it is used");
            for sets in [&state.young, &state.old] {
                assert!(sets.bytes <= BYTES && sets.bytes == sum(sets), "{}", sets.bytes);
            }
            state.displaced.clear();
        }
        state.forget_all();
        assert!(state.doubtful.bytes <= 2 * BYTES);
        for number in 1..100 {
            state.keep(&bot(number), &large);
            state.forget(&bot(number));
            let bytes = state.outdated.bytes;
            assert!(bytes <= OUTDATED_MAX_BYTES && bytes == sum(&state.outdated), "{bytes}");
        }
        assert!(state.last(&bot(99)).is_some());
    }

    #[test]
    fn large_sets_displace_no_small_ones() {
        let (filters, mut state) = (Filters::default(), State::default());
        let small = Arc::new(filters.compile(&bot(0), vec![stored(0, true)]));
        for number in 0..100 {
            state.keep(&bot(number), &small);
        }
        let largest = Arc::new(filters.compile(&bot(100), (0..70).map(large).collect()));
        for number in 100..110 {
            state.keep(&bot(number), &largest);
            assert!(state.known(&bot(number)).is_some() && state.large.bytes <= LARGE_MAX_BYTES);
        }
        assert!((0..100).all(|number| state.known(&bot(number)).is_some()));
        state.forget_all();
        assert!(state.known(&bot(109)).is_none() && state.last(&bot(109)).is_some());
        state.keep(&bot(109), &largest);
        state.forget(&bot(109));
        assert!(state.known(&bot(109)).is_none());
    }

    #[test]
    fn rules_above_the_memory_of_a_bot_are_not_evaluated_and_say_why() {
        let (filters, lines, cut) = (Filters::default(), Lines::default(), bot(70_707));
        let rules = (0..70).map(large).chain([stored(70, true)]).collect();
        let rules = tracing::subscriber::with_default(lines.subscriber(), || {
            filters.compile_while(&cut, rules, || true)
        });
        let refused = rules.iter().position(|rule| rule.filter().is_err()).expect("they are 70 MB");
        assert!((60..70).contains(&refused), "{refused} fit");
        let said = format!("bot=bot-70707 refused={}", 70 - refused);
        assert!(lines.text().contains(&said), "{}", lines.text());
        for rule in &rules[refused..70] {
            let why = rule.filter().unwrap_err();
            assert!(why.contains("more than 67108864 bytes of memory"), "{why}");
            assert!(rule.rule.actions.is_empty());
        }
        assert!(rules[70].filter().is_ok_and(|filter| filter.is_some()), "a small one has room");
        assert!(RuleSet::new(rules).memory() <= RULES_MAX_STORED_MEMORY * 3 / 2);
    }

    #[test]
    fn compiling_that_is_stopped_continues_with_the_filters_that_are_not_known_yet() {
        let (filters, asked) = (Filters::default(), Cell::new(0));
        let rules = || -> Vec<_> { (0..4).map(|number| stored(number, number != 3)).collect() };
        let first = filters.compile_while(&bot(0), rules(), || {
            asked.set(asked.get() + 1);
            asked.get() < 3
        });
        assert_eq!(first.len(), 3, "two of three, and a disabled one, which is not evaluated");
        asked.set(0);
        let second = filters.compile_while(&bot(0), rules(), || {
            asked.set(asked.get() + 1);
            true
        });
        assert_eq!((second.len(), asked.get()), (4, 1), "only the third was not known");
        assert!(filters.known(&text(3)).is_none());
    }
}
