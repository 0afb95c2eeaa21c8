//! Bots whose events wait for tokens of their rate.

use redis::{Pipeline, Value};
use serde::Serialize;
use utoipa::ToSchema;

use super::Queue;
use crate::id::BotId;
use crate::redis::{RedisError, Reply};

/// The bots of a pipeline whose events wait because of their rate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct Throttled {
    /// Their number.
    pub bots: u64,
    /// The one whose events wait for the longest time.
    pub bot: BotId,
    /// Since when, ms since 1970.
    pub since_ms: u64,
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
            pipe.cmd("ZRANGE").arg(&keys.slow).arg(0).arg(0).arg("WITHSCORES");
        }
        let values = self.link().run_checked("ZRANGE", &pipe).await?;
        let mut reply = self.read("ZRANGE", Reply::new(Value::Array(values)))?;
        let (mut count, mut first) = (0, None);
        while reply.len() > 0 {
            count += self.read("ZCARD", reply.number::<u64>())?;
            let mut longest =
                self.read("ZRANGE", Reply::new(reply.next().unwrap_or(Value::Nil)))?;
            if longest.len() < 2 {
                continue;
            }
            let bot = self.read("ZRANGE", longest.text())?;
            let since = self.read("ZRANGE", longest.score())?.map_or(0, i64::unsigned_abs);
            let found = BotId::parse(&bot).ok().map(|bot| (since, bot));
            first = first.into_iter().chain(found).min();
        }
        Ok(first.map(|(since_ms, bot)| Throttled { bots: count, bot, since_ms }))
    }
}
