//! Reads of many documents. While their documents are not in the memory of MongoDB, they may take
//! longer than the timeout of a read although MongoDB works. So each bot has one at a time, and a
//! process has few. A timeout does not open the circuit breaker that all tenants share.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::turns::{Turn, Turns};
use crate::id::BotId;

/// Maximum number of large reads of one kind in a process: one bot alone cannot use all.
const PLACES: usize = 2;

/// Lets large reads of one kind take turns.
#[derive(Debug, Clone)]
pub(crate) struct LargeReads {
    bots: Turns,
    places: Arc<Semaphore>,
}

/// The place of a large read, until it is dropped.
pub(crate) struct Place {
    _bot: Turn,
    /// The semaphore is never closed. Without a permit, reads would only exceed the limit.
    _place: Option<OwnedSemaphorePermit>,
}

impl Default for LargeReads {
    fn default() -> Self {
        Self { bots: Turns::default(), places: Arc::new(Semaphore::new(PLACES)) }
    }
}

impl LargeReads {
    /// Waits for the turn of a bot, and then for a place. So each bot has one read in the line for
    /// places.
    ///
    /// # Cancel safety
    /// The place in the line is lost.
    pub(crate) async fn take(&self, bot: &BotId) -> Place {
        let turn = self.bots.of(bot).await;
        let place = Arc::clone(&self.places).acquire_owned().await.ok();
        Place { _bot: turn, _place: place }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn a_bot_has_one_large_read_at_a_time_and_leaves_a_place_to_others() {
        let reads = LargeReads::default();
        let bot = |name: &str| BotId::parse(name).unwrap();
        let [greedy, quiet, third] = ["greedy", "quiet", "third"].map(bot);
        let first = reads.take(&greedy).now_or_never().unwrap();
        assert!(reads.take(&greedy).now_or_never().is_none());
        let other = reads.take(&quiet).now_or_never().expect("the second place");
        assert!(reads.take(&third).now_or_never().is_none());
        drop(other);
        assert!(reads.take(&third).now_or_never().is_some());
        drop(first);
        assert!(reads.take(&greedy).now_or_never().is_some());
    }
}
