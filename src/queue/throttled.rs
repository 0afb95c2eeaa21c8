//! Bots whose events wait for tokens of their rate.

use std::collections::HashSet;
use std::time::Duration;

use redis::{Pipeline, Value};
use serde::Serialize;
use utoipa::ToSchema;

use super::Queue;
use super::inspect::counted;
use crate::clock::{micros, millis};
use crate::id::BotId;
use crate::redis::keys::ShardKeys;
use crate::redis::{RedisError, Reply, ReplyError};

/// Number of bots of a shard that are named.
const LONGEST: usize = 16;
/// Workers look at a bot within this time after its next token. If none does, its rate is not what holds it
/// back.
const TAKEN_WITHIN: Duration = Duration::from_secs(5);
/// From this number of failed attempts in a row on, the handler holds the bot back, not the rate. Fewer do not
/// make a bot late that has waited long for tokens. With `order_by`, a lane that fails does not count.
const FAILING: u64 = 3;

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

    /// Those of these bots whose events wait for tokens only. Each comes with the keys of its shard. `now` is
    /// the time since 1970.
    pub(super) async fn throttled_among(
        &self,
        bots: Vec<(&ShardKeys, BotId)>,
        now: Duration,
    ) -> Result<HashSet<BotId>, RedisError> {
        if bots.is_empty() {
            return Ok(HashSet::new());
        }
        let mut pipe = Pipeline::with_capacity(4 * bots.len());
        for (keys, bot) in &bots {
            pipe.cmd("ZSCORE").arg(&keys.slow).arg(bot.as_str());
            pipe.cmd("ZSCORE").arg(keys.busy()).arg(bot.as_str());
            pipe.cmd("ZSCORE").arg(&keys.rate).arg(bot.as_str());
            pipe.cmd("HGET").arg(keys.attempts()).arg(bot.as_str());
        }
        let values = self.link().run_checked("ZSCORE", &pipe).await?;
        let mut reply = self.read("ZSCORE", Reply::new(Value::Array(values)))?;
        let mut throttled = HashSet::new();
        for (_, bot) in bots {
            let wait = self.read("ZSCORE", Wait::read(&mut reply))?;
            if wait.is_for_tokens(now) {
                throttled.insert(bot);
            }
        }
        Ok(throttled)
    }
}

/// What a shard tells about the wait of a bot.
#[derive(Debug, Clone, Copy)]
struct Wait {
    /// Whether events of it waited for tokens when it last asked for some.
    is_slow: bool,
    /// When it is taken next, if it is parked, or its lease ends, ms since 1970.
    until_ms: Option<u64>,
    /// When its bucket is full again, µs since 1970.
    full_us: Option<u64>,
    /// Failures and lost leases since its last progress.
    attempts: u64,
}

impl Wait {
    fn read(reply: &mut Reply) -> Result<Self, ReplyError> {
        Ok(Self {
            is_slow: reply.score()?.is_some(),
            until_ms: reply.score()?.map(i64::unsigned_abs),
            full_us: reply.score()?.map(i64::unsigned_abs),
            attempts: counted(&reply.text()?),
        })
    }

    /// Whether its rate explains the wait. A bot that stays parked after its next token came, or that has a
    /// full bucket, waits for a worker or for its handler instead. Redis does not know when the next token
    /// of a ready bot came: that depends on its rate and burst, which may be those of the configuration.
    fn is_for_tokens(self, now: Duration) -> bool {
        let taken = now.saturating_sub(TAKEN_WITHIN);
        self.is_slow
            && self.until_ms.is_none_or(|until| until > millis(taken))
            && self.full_us.is_some_and(|full| full > micros(taken))
            && self.attempts < FAILING
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bot_waits_for_tokens_until_they_come_and_unless_its_handler_fails() {
        let now = Duration::from_secs(1_000);
        let ms = |seconds: u64| Some(seconds * 1_000);
        let us = |seconds: u64| Some(seconds * 1_000_000);
        let parked = Wait { is_slow: true, until_ms: ms(1_010), full_us: us(1_020), attempts: 0 };
        let taken = Wait { until_ms: ms(996), ..parked };
        let (ready, failed) = (Wait { until_ms: None, ..parked }, Wait { attempts: 2, ..parked });
        for wait in [parked, taken, ready, failed, Wait { full_us: us(996), ..ready }] {
            assert!(wait.is_for_tokens(now), "{wait:?}");
        }
        for wait in [
            Wait { is_slow: false, ..parked },
            Wait { until_ms: ms(995), ..parked },
            Wait { full_us: us(995), ..ready },
            // A handler that does not end.
            Wait { full_us: us(995), ..parked },
            Wait { full_us: None, ..ready },
            Wait { attempts: 3, ..parked },
        ] {
            assert!(!wait.is_for_tokens(now), "{wait:?}");
        }
    }
}
