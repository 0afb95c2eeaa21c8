//! The bots with large profiles. Their reads share no query with those of other bots, because a query
//! has a maximum size.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashMap;
use tokio::time::Instant;

use crate::id::BotId;

/// How long a bot is remembered after its last large read.
const REMEMBERED: Duration = Duration::from_secs(60);
/// Maximum number of bots that are remembered.
const BOTS_MAX: usize = 1_024;

/// Clones share the bots.
#[derive(Debug, Clone, Default)]
pub(super) struct LargeBots(Arc<Mutex<FxHashMap<BotId, Instant>>>);

impl LargeBots {
    pub(super) fn contains(&self, bot: &BotId) -> bool {
        self.bots().get(bot).is_some_and(|last| last.elapsed() < REMEMBERED)
    }

    pub(super) fn insert(&self, bot: &BotId) {
        let mut bots = self.bots();
        if bots.len() >= BOTS_MAX && !bots.contains_key(bot) {
            bots.retain(|_, last| last.elapsed() < REMEMBERED);
            if bots.len() >= BOTS_MAX {
                bots.clear();
            }
        }
        bots.insert(bot.clone(), Instant::now());
    }

    fn bots(&self) -> MutexGuard<'_, FxHashMap<BotId, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bot(name: usize) -> BotId {
        BotId::parse(&format!("bot-{name}")).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_bounded_number_of_bots_is_remembered_for_a_minute() {
        let large = LargeBots::default();
        for name in 0..2 * BOTS_MAX {
            large.insert(&bot(name));
            assert!(large.contains(&bot(name)));
            assert!(large.bots().len() <= BOTS_MAX);
        }
        tokio::time::advance(REMEMBERED).await;
        assert!(!large.contains(&bot(2 * BOTS_MAX - 1)));
    }
}
