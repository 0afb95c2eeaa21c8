//! The index of bots by the event types they have rules for. The fan-out asks it for every event of
//! the bus, so it is in memory. Bots with the same types share an entry.
//!
//! The index may be stale. Then the event is copied anyway: an unnecessary copy costs a slice, a
//! missing one would lose the event. It counts as stale
//!
//! * for all bots, until all rules were read for the first time;
//! * for a bot, from the message that its rules change until they were read again;
//! * for all bots, after messages may have been missed, until the changes were read.
//!
//! While MongoDB is unavailable, the last known state is right: a rule cannot be changed without
//! it, and a process that can still reach it publishes its changes.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use rustc_hash::{FxHashMap, FxHashSet};
use tokio::sync::{Notify, watch};

use super::profile;
use super::queue::RULES;
use super::store::Subscribing;
use crate::automations::metrics::AutomationMetrics;
use crate::event::Event;
use crate::expression::Glob;
use crate::fanout::Interest;
use crate::id::{BotId, Shard};
use crate::queue::wake::{Listener, Wake};

/// The types that a bot has enabled rules for.
#[derive(Debug, Default, PartialEq, Eq, Hash)]
struct Wants {
    exact: BTreeSet<Box<str>>,
    globs: BTreeSet<Glob>,
    /// Whether the bot has too many patterns to try them for every event.
    all: bool,
}

/// Maximum number of patterns per bot that are tried.
const GLOBS_MAX: usize = 100;

impl Wants {
    fn add(&mut self, rule: &Subscribing) {
        for kind in rule.on.iter().filter(|_| rule.enabled) {
            if !kind.contains('*') {
                self.exact.insert(kind.as_str().into());
            } else if self.globs.len() < GLOBS_MAX {
                self.globs.insert(Glob::new(kind));
            } else {
                self.all |= !self.globs.contains(&Glob::new(kind));
            }
        }
    }

    fn takes(&self, kind: &str) -> bool {
        self.all || self.exact.contains(kind) || self.globs.iter().any(|glob| glob.matches(kind))
    }
}

/// The index of bots by event types.
#[derive(Debug)]
pub(crate) struct Subscriptions {
    state: RwLock<State>,
    /// Wakes the reader of changes.
    news: Notify,
    /// Whether all rules were read once.
    loaded: watch::Sender<bool>,
    metrics: AutomationMetrics,
}

#[derive(Debug, Default)]
struct State {
    bots: FxHashMap<BotId, Arc<Wants>>,
    /// The distinct sets of types of bots.
    shared: HashSet<Arc<Wants>>,
    /// All types that a bot has or had rules for. Usually few events of a bus have one of them.
    types: FxHashSet<Box<str>>,
    /// Their number when those that no bot has any more were removed.
    types_kept: usize,
    /// Whether a bot has or had a rule with a pattern.
    patterns: bool,
    /// Whether all rules were read once.
    loaded: bool,
    /// Whether a task reads the changes.
    watched: bool,
    /// The number of messages so far.
    serial: u64,
    /// The number of the last message loss, until the changes were read.
    missed: Option<u64>,
    /// Bots whose rules are changing, and the number of the last message about it.
    changing: FxHashMap<BotId, u64>,
}

/// The types of bots, as read from the store.
#[derive(Debug, Default)]
pub(crate) struct Wanted(HashMap<BotId, Wants>);

impl Wanted {
    pub(crate) fn add(&mut self, rules: Vec<Subscribing>) {
        for rule in rules {
            match self.0.get_mut(&rule.bot) {
                Some(wants) => wants.add(&rule),
                None => self.0.entry(rule.bot.clone()).or_default().add(&rule),
            }
        }
    }
}

/// The stale part of the index.
#[derive(Debug, Clone)]
pub(crate) struct Doubts {
    /// The number of the last message that it includes.
    serial: u64,
    /// Bots whose rules are changing.
    pub(crate) bots: Vec<BotId>,
}

impl Subscriptions {
    pub(crate) fn new() -> Self {
        let metrics = AutomationMetrics::new();
        let (news, loaded) = (Notify::new(), watch::Sender::new(false));
        Self { state: RwLock::default(), news, loaded, metrics }
    }
}

impl Interest for Subscriptions {
    fn wants(&self, event: &Event) -> bool {
        let (bot, kind) = (event.bot(), event.kind());
        let is_kept = profile::changes_any(event);
        let state = self.read();
        let may_be = is_kept || state.patterns || state.types.contains(kind);
        let known = if may_be { state.bots.get(bot) } else { None };
        // A bot with any rule has profiles.
        if known.is_some_and(|wants| is_kept || wants.takes(kind)) {
            return true;
        }
        let doubtful = !state.loaded || state.missed.is_some() || state.changing.contains_key(bot);
        if doubtful {
            self.metrics.doubtful.increment(1);
        }
        doubtful
    }

    fn takes(&self, bot: &BotId, kind: &str) -> bool {
        let state = self.read();
        // A bot with any rule has profiles.
        let known = state.bots.get(bot);
        known.is_some_and(|wants| profile::may_change(kind) || wants.takes(kind))
            || state.loaded && (state.missed.is_some() || state.changing.contains_key(bot))
    }

    fn known(&self) -> BoxFuture<'_, ()> {
        self.loaded().boxed()
    }
}

impl Subscriptions {
    /// Waits until all rules were read once.
    pub(crate) async fn loaded(&self) {
        let mut loaded = self.loaded.subscribe();
        // The sender is part of `self`, so it cannot be closed.
        let _ = loaded.wait_for(|loaded| *loaded).await;
    }

    /// Notes that a task reads the changes from now on.
    pub(crate) fn watched(&self) {
        self.write().watched = true;
    }

    /// Waits for messages.
    pub(crate) async fn news(&self) {
        self.news.notified().await;
    }

    /// Notes that the rules of a bot are changing, or have changed.
    pub(crate) fn changes(&self, bot: &BotId) {
        let mut state = self.write();
        // Without a reader of changes, the index is not used either.
        if state.watched {
            state.serial += 1;
            let serial = state.serial;
            state.changing.insert(bot.clone(), serial);
        }
        drop(state);
        self.news.notify_one();
    }

    /// The stale part now: the caller reads it and then settles it.
    pub(crate) fn doubts(&self) -> Doubts {
        let state = self.read();
        Doubts { serial: state.serial, bots: state.changing.keys().cloned().collect() }
    }

    /// Replaces the index after all rules were read. `doubts` is the stale part before the read.
    pub(crate) fn replace(&self, wanted: Wanted, doubts: &Doubts) {
        let mut fresh = State::default();
        for (bot, wants) in wanted.0 {
            fresh.insert(bot, wants);
        }
        let mut state = self.write();
        (fresh.watched, fresh.serial, fresh.missed) = (state.watched, state.serial, state.missed);
        fresh.changing = std::mem::take(&mut state.changing);
        fresh.loaded = true;
        fresh.settle(doubts);
        std::mem::swap(&mut *state, &mut fresh);
        // The old index is dropped outside the lock.
        drop(state);
        drop(fresh);
        self.loaded.send_replace(true);
    }

    /// Updates the index after changes were read. `doubts` is the stale part before the read; these
    /// are all rules of these bots.
    pub(crate) fn update(&self, bots: &[BotId], mut wanted: Wanted, doubts: &Doubts) {
        let mut state = self.write();
        for bot in bots {
            match wanted.0.remove(bot) {
                Some(wants) => state.insert(bot.clone(), wants),
                None => drop(state.bots.remove(bot)),
            }
        }
        state.forget_types();
        // Remove sets without a bot.
        if state.shared.len() > 1_000 && state.shared.len() > 2 * state.bots.len() {
            state.shared.retain(|wants| Arc::strong_count(wants) > 1);
        }
        state.settle(doubts);
    }

    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn insert(&mut self, bot: BotId, wants: Wants) {
        let wants = share(&mut self.shared, wants);
        self.patterns |= wants.all || !wants.globs.is_empty();
        for kind in &wants.exact {
            if !self.types.contains(kind) {
                self.types.insert(kind.clone());
            }
        }
        self.bots.insert(bot, wants);
    }

    /// Removes the types that no bot has any more, once they may be half of all: a tenant can give a
    /// rule new types again and again.
    fn forget_types(&mut self) {
        if self.types.len() > 1_000 && self.types.len() > 2 * self.types_kept {
            let of_bots = self.shared.iter().filter(|wants| Arc::strong_count(wants) > 1);
            let all = of_bots.flat_map(|wants| &wants.exact);
            let kept: FxHashSet<&str> = all.map(|kind| &**kind).collect();
            self.types.retain(|kind| kept.contains(&**kind));
            self.types_kept = self.types.len();
        }
    }

    fn settle(&mut self, doubts: &Doubts) {
        if self.missed.is_some_and(|missed| missed <= doubts.serial) {
            self.missed = None;
        }
        self.changing.retain(|_, serial| *serial > doubts.serial);
    }
}

fn share(shared: &mut HashSet<Arc<Wants>>, wants: Wants) -> Arc<Wants> {
    if let Some(known) = shared.get(&wants) {
        return Arc::clone(known);
    }
    let wants = Arc::new(wants);
    shared.insert(Arc::clone(&wants));
    wants
}

/// Receives the messages.
pub(crate) struct RulesEar(pub(crate) super::Automations);

impl Listener for RulesEar {
    fn heard(&self, _: Shard, wake: &Wake) {
        if let Wake::Told(what, bot) = wake
            && **what == *RULES
        {
            self.0.changes(bot);
        }
    }

    fn missed(&self) {
        let subscriptions = self.0.subscriptions();
        let mut state = subscriptions.write();
        state.serial += 1;
        state.missed = Some(state.serial);
        drop(state);
        subscriptions.news.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bot(id: &str) -> BotId {
        BotId::parse(id).unwrap()
    }

    fn event(id: &str, kind: &str) -> Event {
        Event::builder(kind, &bot(id)).build().unwrap()
    }

    fn rule(id: &str, on: &[&str], enabled: bool) -> Subscribing {
        Subscribing { bot: bot(id), on: on.iter().map(|&kind| kind.to_owned()).collect(), enabled }
    }

    fn wanted(rules: &[Subscribing]) -> Wanted {
        let mut wanted = Wanted::default();
        wanted.add(rules.to_vec());
        wanted
    }

    fn loaded(rules: &[Subscribing]) -> Subscriptions {
        let subscriptions = Subscriptions::new();
        subscriptions.watched();
        subscriptions.replace(wanted(rules), &subscriptions.doubts());
        subscriptions
    }

    #[test]
    fn a_bot_wants_the_events_of_its_rules_and_of_its_profiles() {
        let known = loaded(&[
            rule("a", &["sale.made", "cart.*"], true),
            rule("a", &["off"], false),
            rule("b", &["sale.made"], false),
        ]);
        for (id, kind, wanted) in [
            ("a", "sale.made", true),
            ("a", "cart.left", true),
            ("a", "off", false),
            ("a", "other", false),
            ("a", "tag.applied", true),
            ("b", "sale.made", false),
            ("b", "subscriber.updated", true),
            ("c", "tag.applied", false),
            ("c", "sale.made", false),
        ] {
            assert_eq!(known.wants(&event(id, kind)), wanted, "{id} {kind}");
        }
        let made = event("a", "tag.applied")
            .with_extension(profile::APPLIED, Some(serde_json::Value::Bool(true)));
        assert!(!known.wants(&made), "a change that a rule made is no news to the profile");
    }

    #[test]
    fn in_doubt_everything_is_wanted() {
        let fresh = Subscriptions::new();
        assert!(fresh.wants(&event("a", "x")), "nothing was read");
        fresh.watched();
        fresh.replace(Wanted::default(), &fresh.doubts());
        assert!(!fresh.wants(&event("a", "x")));
        fresh.changes(&bot("a"));
        assert!(fresh.wants(&event("a", "x")) && !fresh.wants(&event("b", "x")));
        let doubts = fresh.doubts();
        assert_eq!(doubts.bots, [bot("a")]);
        // A message that arrived after the read started.
        fresh.changes(&bot("a"));
        fresh.update(&[bot("a")], Wanted::default(), &doubts);
        assert!(fresh.wants(&event("a", "x")));
        fresh.update(&[bot("a")], wanted(&[rule("a", &["y"], true)]), &fresh.doubts());
        assert!(!fresh.wants(&event("a", "x")) && fresh.wants(&event("a", "y")));
        fresh.update(&[bot("a")], Wanted::default(), &fresh.doubts());
        assert!(!fresh.wants(&event("a", "y")));
    }

    #[test]
    fn a_bot_with_very_many_patterns_gets_everything() {
        let patterns: Vec<String> = (0..=GLOBS_MAX).map(|n| format!("x{n}*")).collect();
        let patterns: Vec<&str> = patterns.iter().map(String::as_str).collect();
        assert!(!loaded(&[rule("a", &patterns[1..], true)]).wants(&event("a", "y")));
        assert!(loaded(&[rule("a", &patterns, true)]).wants(&event("a", "y")));
    }

    #[test]
    fn bots_that_want_the_same_share_it() {
        let rules: Vec<_> = (0..100).map(|n| rule(&n.to_string(), &["a", "b*"], true)).collect();
        let known = loaded(&rules);
        assert_eq!(known.read().shared.len(), 1);
    }

    #[test]
    fn a_bot_that_changes_its_types_again_and_again_fills_no_memory() {
        let known = loaded(&[rule("a", &["kept"], true)]);
        for round in 0..1_000 {
            let kinds: Vec<String> = (0..10).map(|n| format!("type {round} {n}")).collect();
            let kinds: Vec<&str> = kinds.iter().map(String::as_str).collect();
            known.update(&[bot("b")], wanted(&[rule("b", &kinds, true)]), &known.doubts());
            assert!(known.wants(&event("b", kinds[9])));
        }
        assert!(known.wants(&event("a", "kept")) && !known.wants(&event("b", "type 0 0")));
        assert!(known.read().types.len() <= 1_010, "{}", known.read().types.len());
    }
}
