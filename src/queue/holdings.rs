//! What bots hold: what counts for their quotas.

use std::collections::BTreeSet;

use redis::Value;
use serde::Serialize;
use utoipa::ToSchema;

use super::Queue;
use crate::id::{BotId, Shard};
use crate::quotas::Quota;
use crate::redis::scripts::{Audit, Audited, ReadSlice};
use crate::redis::{RedisError, Reply};

/// Maximum number of entries that one call of the audit reads, and of their bytes: Redis waits.
const ENTRIES_MAX: u64 = 50_000;
const BYTES_MAX: u64 = 16 << 20;
/// The scripts count the bytes of a queue with this number of events, or with a large one.
const FEW: usize = 32;
/// More bytes than a queue has that is not counted.
const FEW_BYTES: usize = 4 << 20;
/// Number of queues that one call of the audit reads, unless they are long or large.
const QUEUES: usize = 50;

/// What a bot holds in a pipeline, or may hold: then 0 means no quota.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct Holdings {
    /// Bytes of its queued events.
    pub queued_bytes: u64,
    /// Number of its delayed events.
    pub delayed_events: u64,
    /// Bytes of its delayed events.
    pub delayed_bytes: u64,
    /// Number of its pending records of a product.
    pub pending: u64,
    /// Bytes of its pending records of a product.
    pub pending_bytes: u64,
    /// Number of its dead letters.
    pub dead_letters: u64,
    /// Bytes of its dead letters.
    pub dead_bytes: u64,
}

impl From<Quota> for Holdings {
    fn from(quota: Quota) -> Self {
        let Quota { queued_bytes, delayed_events, delayed_bytes, .. } = quota;
        let Quota { pending, pending_bytes, dead_letters, dead_bytes, .. } = quota;
        Self {
            queued_bytes,
            delayed_events,
            delayed_bytes,
            pending,
            pending_bytes,
            dead_letters,
            dead_bytes,
        }
    }
}

impl Queue {
    /// What a bot holds.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn holdings(&self, bot: &BotId) -> Result<Holdings, RedisError> {
        let [queued, others @ ..] = self.held(bot, ["q", "l", "L", "n", "N", "d", "D"]).await?;
        let queued_bytes = match queued {
            Some(bytes) => bytes,
            None => self.bytes_of_few(bot).await?,
        };
        let others = others.map(Option::unwrap_or_default);
        let [delayed_events, delayed_bytes, pending, pending_bytes, dead_letters, dead_bytes] =
            others;
        Ok(Holdings {
            queued_bytes,
            delayed_events,
            delayed_bytes,
            pending,
            pending_bytes,
            dead_letters,
            dead_bytes,
        })
    }

    /// The number of the delayed events of a bot, and their bytes.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub(crate) async fn delayed_of(&self, bot: &BotId) -> Result<[u64; 2], RedisError> {
        Ok(self.held(bot, ["l", "L"]).await?.map(Option::unwrap_or_default))
    }

    /// What the scripts count of a bot, of each of these kinds.
    async fn held<const N: usize>(
        &self,
        bot: &BotId,
        kinds: [&str; N],
    ) -> Result<[Option<u64>; N], RedisError> {
        let fields = kinds.map(|kind| format!("{kind}{bot}"));
        let command = redis::Cmd::hmget(self.keys_of(bot).held(), &fields);
        let value = self.link().command("HMGET", command).await?;
        let misread = |source| self.link().misread("HMGET", source);
        let mut reply = Reply::new(value).map_err(misread)?;
        let mut held = [None; N];
        for number in &mut held {
            *number = reply.optional().map_err(misread)?;
        }
        Ok(held)
    }

    /// The bytes of a queue that the scripts do not count, because it has few and small events.
    async fn bytes_of_few(&self, bot: &BotId) -> Result<u64, RedisError> {
        let few = ReadSlice { keys: self.keys_of(bot), bot, limit: FEW, bytes: FEW_BYTES };
        let records = self.link().call(&few).await?;
        Ok(records.iter().map(|record| record.len() as u64).sum())
    }

    /// Compares what the bots of a shard hold with their queues, delayed events and dead letters,
    /// and corrects it, during any traffic. Returns the number of wrong values, and whether
    /// everything was compared: what has too many entries or bytes for one script is skipped.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn reconcile_holdings(&self, shard: Shard) -> Result<(u64, bool), RedisError> {
        let keys = self.keys(shard);
        let audit = |bots| Audit { keys, bots, entries_max: ENTRIES_MAX, bytes_max: BYTES_MAX };
        let (mut wrong, mut all) = match self.link().call(&audit(&[])).await? {
            Audited::Set(wrong) => (wrong, true),
            Audited::Many => (0, false),
        };
        let bots = self.bots_with_queues(shard).await?;
        for some in bots.chunks(QUEUES) {
            if let Audited::Set(more) = self.link().call(&audit(some)).await? {
                wrong += more;
                continue;
            }
            for bot in some {
                match self.link().call(&audit(std::slice::from_ref(bot))).await? {
                    Audited::Set(more) => wrong += more,
                    Audited::Many => all = false,
                }
            }
        }
        Ok((wrong, all))
    }

    /// The bots of a shard that have a queue, or hold one according to the count.
    async fn bots_with_queues(&self, shard: Shard) -> Result<Vec<BotId>, RedisError> {
        let keys = self.keys(shard);
        let mut pipe = redis::Pipeline::with_capacity(4);
        pipe.zrange(keys.ready(), 0, -1).zrange(keys.busy(), 0, -1);
        pipe.smembers(keys.paused()).hkeys(keys.held());
        let values = self.link().run_checked("HKEYS", &pipe).await?;
        let mut bots = BTreeSet::new();
        for (at, value) in values.into_iter().enumerate() {
            let misread = |source| self.link().misread("HKEYS", source);
            let value = match value {
                Value::Set(members) => Value::Array(members),
                value => value,
            };
            let mut names = Reply::new(value).map_err(misread)?;
            while names.len() > 0 {
                let name = names.text().map_err(misread)?;
                let bot = if at == 3 { name.strip_prefix(['q', 'n']) } else { Some(&*name) };
                bots.extend(bot.and_then(|bot| BotId::parse(bot).ok()));
            }
        }
        Ok(bots.into_iter().collect())
    }
}
