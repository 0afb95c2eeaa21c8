//! Corrects the stored depth of a shard.

use std::collections::BTreeSet;

use super::Queue;
use crate::id::{BotId, Shard};
use crate::redis::RedisError;
use crate::redis::scripts::{Reconcile, Reconciled};

/// Maximum number of bots with events for a comparison: the script reads all of them.
const BOTS_MAX: usize = 20_000;
/// Number of attempts while new bots keep getting events.
const TRIES: usize = 50;

/// The result of comparing the depth of one shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Depth {
    /// The depth is correct.
    Right,
    /// The depth was `before`, and is now set to the length of the queues.
    SetRight {
        /// The stored value.
        before: String,
        /// Number of events in the queues.
        depth: u64,
    },
    /// Not compared: the shard has too many bots with events, or new ones in every attempt.
    NotCompared,
}

impl Queue {
    /// Compares the depth of a shard with its queues, and corrects it. Works during any traffic.
    /// This blocks Redis for about 20 ms per 10,000 bots with events. A shard with more than 20,000
    /// such bots is skipped.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn reconcile_depth(&self, shard: Shard) -> Result<Depth, RedisError> {
        let (keys, mut named) = (self.keys(shard), BTreeSet::<BotId>::new());
        for _ in 0..TRIES {
            let bots: Vec<BotId> = named.iter().cloned().collect();
            let reconcile = Reconcile { keys, bots: &bots, bots_max: BOTS_MAX };
            match self.link().call(&reconcile).await? {
                Reconciled::Set { before, depth } if before == depth.to_string() => {
                    return Ok(Depth::Right);
                }
                Reconciled::Set { before, depth } => return Ok(Depth::SetRight { before, depth }),
                Reconciled::More(bots) if named.len() + bots.len() <= 2 * BOTS_MAX => {
                    named.extend(bots);
                }
                Reconciled::More(_) | Reconciled::Many(_) => break,
            }
        }
        Ok(Depth::NotCompared)
    }
}
