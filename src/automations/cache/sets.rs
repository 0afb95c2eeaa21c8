//! Rules of bots, as many as there is memory for.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::automations::decide::RuleSet;
use crate::id::BotId;

/// The rules of bots, and their size in memory, in bytes.
#[derive(Debug, Default)]
pub(super) struct Sets {
    pub(super) bots: FxHashMap<BotId, Arc<RuleSet>>,
    pub(super) bytes: usize,
}

impl Sets {
    pub(super) fn get(&self, bot: &BotId) -> Option<Arc<RuleSet>> {
        self.bots.get(bot).map(Arc::clone)
    }

    pub(super) fn insert(&mut self, bot: BotId, rules: Arc<RuleSet>) {
        self.bytes += rules.memory();
        if let Some(former) = self.bots.insert(bot, rules) {
            self.bytes -= former.memory();
        }
    }

    pub(super) fn remove(&mut self, bot: &BotId) -> Option<Arc<RuleSet>> {
        let rules = self.bots.remove(bot)?;
        self.bytes -= rules.memory();
        Some(rules)
    }

    /// Inserts an entry. If there is no room for it, all others are returned.
    pub(super) fn insert_within(
        &mut self,
        (bots, bytes): (usize, usize),
        bot: &BotId,
        rules: Arc<RuleSet>,
    ) -> Option<Self> {
        let is_full = self.bots.len() >= bots || self.bytes + rules.memory() > bytes;
        let others = is_full.then(|| std::mem::take(self));
        self.insert(bot.clone(), rules);
        others
    }
}
