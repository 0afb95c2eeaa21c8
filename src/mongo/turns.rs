//! Lets this process run only one write per bot at a time in the server, or only some reads. A write
//! that timed out still runs there, and a repetition would make a slow server slower.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::client::MongoError;
use crate::admission::aside::in_line;
use crate::id::{BotId, Lane};

/// Minimum number of bots in the map before bots without a write are removed.
const SWEEP_MIN: usize = 64;

/// The turns of bots, for writes or reads. Clones share them.
#[derive(Clone)]
pub(crate) struct Turns {
    /// How many a bot may have at a time.
    of_each: usize,
    bots: Arc<Mutex<Bots>>,
}

#[derive(Default)]
struct Bots {
    gates: HashMap<(BotId, Option<Lane>), Arc<Semaphore>>,
    /// The number of bots at which those without a write are removed next.
    sweep_at: usize,
}

/// The turn of a bot. It ends when its last clone is dropped. Every command holds a clone until the
/// server has answered.
#[derive(Clone)]
pub(crate) struct Turn(#[expect(dead_code, reason = "held until it is dropped")] Held);

/// The semaphore is never closed. Without a permit, commands would only exceed the limit.
type Held = Arc<Option<OwnedSemaphorePermit>>;

impl Default for Turns {
    /// Each bot has one at a time.
    fn default() -> Self {
        Self::of_each(1)
    }
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Turns")
    }
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Turn")
    }
}

impl Turns {
    /// Turns of which each bot has up to `most` at a time.
    pub(crate) fn of_each(most: usize) -> Self {
        Self { of_each: most, bots: Arc::default() }
    }

    /// Waits until the bot has fewer turns than it may have: by default, until no write of it is in
    /// progress.
    ///
    /// # Cancel safety
    /// The place in the line is lost.
    pub(crate) async fn of(&self, bot: &BotId) -> Turn {
        self.of_lane(bot, None).await
    }

    /// The same for the events of one lane of the bot. In a process, either the lanes of a bot have
    /// turns, or the bot has.
    ///
    /// # Cancel safety
    /// The place in the line is lost.
    pub(crate) async fn of_lane(&self, bot: &BotId, lane: Option<Lane>) -> Turn {
        let gate = self.gate(bot, lane);
        Turn(Arc::new(gate.acquire_owned().await.ok()))
    }

    /// [`Self::of`] for a request. While it waits, it holds no place in flight. Few requests of a caller
    /// wait.
    ///
    /// # Errors
    /// [`MongoError::Crowded`].
    ///
    /// # Cancel safety
    /// The place in the line is lost.
    pub(crate) async fn of_request(&self, bot: &BotId) -> Result<Turn, MongoError> {
        Ok(in_line(self.of(bot)).await?)
    }

    fn gate(&self, bot: &BotId, lane: Option<Lane>) -> Arc<Semaphore> {
        let mut bots = self.bots.lock().unwrap_or_else(PoisonError::into_inner);
        if bots.gates.len() >= bots.sweep_at.max(SWEEP_MIN) {
            bots.gates.retain(|_, gate| Arc::strong_count(gate) > 1);
            bots.sweep_at = 2 * bots.gates.len();
        }
        let gate = bots.gates.entry((bot.clone(), lane));
        Arc::clone(gate.or_insert_with(|| Arc::new(Semaphore::new(self.of_each))))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt as _, poll};

    use super::*;

    fn bot(name: &str) -> BotId {
        BotId::parse(name).unwrap()
    }

    #[tokio::test]
    async fn a_bot_waits_for_the_last_of_its_commands_and_for_no_other_bot() {
        let turns = Turns::default();
        let first = turns.of(&bot("a")).await;
        let command = first.clone();
        let (a, b) = (bot("a"), bot("b"));
        let mut second = turns.of(&a).boxed();
        assert!(poll!(&mut second).is_pending());
        assert!(turns.of(&b).now_or_never().is_some());
        drop(first);
        assert!(poll!(&mut second).is_pending(), "a command is under way");
        drop(command);
        assert!(poll!(&mut second).is_ready());
    }

    #[tokio::test]
    async fn bots_without_a_write_are_forgotten() {
        let turns = Turns::default();
        let held = turns.of(&bot("held")).await;
        for number in 0..10 * SWEEP_MIN {
            turns.of(&bot(&format!("bot-{number}"))).await;
        }
        let known = turns.bots.lock().unwrap().gates.len();
        assert!(known <= SWEEP_MIN, "{known}");
        assert!(turns.of(&bot("held")).now_or_never().is_none());
        drop(held);
    }
}
