//! Bots whose events wait for tokens of their rate.

use std::collections::HashSet;
use std::time::Duration;

use redis::{Pipeline, Value};
use serde::Serialize;
use utoipa::ToSchema;

use super::Queue;
use crate::id::BotId;
use crate::redis::keys::ShardKeys;
use crate::redis::{RedisError, Reply};

/// Number of bots of a shard that are named.
const LONGEST: usize = 16;
/// Workers look at a bot within this time after its next token. If none does, its rate is not what holds it
/// back.
const TAKEN_WITHIN: Duration = Duration::from_secs(5);

/// The bots of a pipeline whose events wait because of their rate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Throttled {
    /// Their number.
    pub bots: u64,
    /// The one whose events wait for the longest time.
    pub bot: BotId,
    /// Since when, ms since 1970.
    pub since_ms: u64,
    /// Those that have waited for longest, of each shard at most 16, and since when.
    #[serde(skip)]
    pub longest: Vec<(u64, BotId)>,
}

impl Throttled {
    /// The part that concerns `wanted` bots, among those that have waited for longest.
    #[must_use]
    pub fn of(&self, wanted: &dyn Fn(&BotId) -> bool) -> Option<Self> {
        let longest: Vec<_> = self.longest.iter().filter(|(_, bot)| wanted(bot)).cloned().collect();
        let (since_ms, bot) = longest.iter().min().cloned()?;
        Some(Self { bots: longest.len() as u64, bot, since_ms, longest })
    }
}

impl Queue {
    /// The bots whose events wait for tokens. `None`: there is none.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn throttled(&self) -> Result<Option<Throttled>, RedisError> {
        let mut pipe = Pipeline::with_capacity(2 * self.shards().len());
        for keys in self.shards().iter() {
            pipe.cmd("ZCARD").arg(&keys.slow);
            pipe.cmd("ZRANGE").arg(&keys.slow).arg(0).arg(LONGEST - 1).arg("WITHSCORES");
        }
        let values = self.link().run_checked("ZRANGE", &pipe).await?;
        let mut reply = self.read("ZRANGE", Reply::new(Value::Array(values)))?;
        let (mut count, mut longest) = (0, Vec::new());
        while reply.len() > 0 {
            count += self.read("ZCARD", reply.number::<u64>())?;
            let mut of_shard =
                self.read("ZRANGE", Reply::new(reply.next().unwrap_or(Value::Nil)))?;
            while of_shard.len() >= 2 {
                let bot = self.read("ZRANGE", of_shard.text())?;
                let since = self.read("ZRANGE", of_shard.score())?.map_or(0, i64::unsigned_abs);
                longest.extend(BotId::parse(&bot).ok().map(|bot| (since, bot)));
            }
        }
        let first = longest.iter().min().cloned();
        Ok(first.map(|(since_ms, bot)| Throttled { bots: count, bot, since_ms, longest }))
    }

    /// Those of these bots whose events wait for tokens. A bot that stays parked after its next token came
    /// waits for a worker instead. Each comes with the keys of its shard. `now` is the time since 1970.
    pub(super) async fn throttled_among(
        &self,
        bots: Vec<(&ShardKeys, BotId)>,
        now: Duration,
    ) -> Result<HashSet<BotId>, RedisError> {
        if bots.is_empty() {
            return Ok(HashSet::new());
        }
        let mut pipe = Pipeline::with_capacity(2 * bots.len());
        for (keys, bot) in &bots {
            pipe.cmd("ZSCORE").arg(&keys.slow).arg(bot.as_str());
            pipe.cmd("ZSCORE").arg(keys.busy()).arg(bot.as_str());
        }
        let values = self.link().run_checked("ZSCORE", &pipe).await?;
        let mut reply = self.read("ZSCORE", Reply::new(Value::Array(values)))?;
        let taken_ms = crate::clock::millis(now.saturating_sub(TAKEN_WITHIN));
        let mut throttled = HashSet::new();
        for (_, bot) in bots {
            let since = self.read("ZSCORE", reply.score())?;
            let until = self.read("ZSCORE", reply.score())?;
            if since.is_some() && until.is_none_or(|until| until.unsigned_abs() > taken_ms) {
                throttled.insert(bot);
            }
        }
        Ok(throttled)
    }
}
