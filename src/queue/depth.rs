//! Setting right how many events a shard says it has.

use std::collections::BTreeSet;

use super::Queue;
use crate::id::{BotId, Shard};
use crate::keyspace::StoreError;
use crate::keyspace::scripts::{Reconcile, Reconciled};

/// Most bots with events of a shard whose depth is compared: the script looks at all of them.
const BOTS_MAX: usize = 20_000;
/// While bots with events keep joining, the comparison is tried so often.
const TRIES: usize = 50;

/// What comparing the depth of one shard led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Depth {
    /// It is right.
    Right,
    /// It was `before`, and is set to what the queues hold.
    SetRight {
        /// As it stood there.
        before: String,
        /// Events in the queues.
        depth: u64,
    },
    /// It was not compared: the shard has too many bots with events, or new ones all the time.
    NotCompared,
}

impl Queue {
    /// Compares the depth of a shard with what its queues hold, and sets it right, beside any
    /// traffic. Redis is busy with it for some 20 ms per 10,000 bots with events; a shard with
    /// more than 20,000 is left out.
    ///
    /// # Errors
    /// When Redis does not answer or refuses.
    pub async fn reconcile_depth(&self, shard: Shard) -> Result<Depth, StoreError> {
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
