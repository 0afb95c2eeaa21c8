//! The attempts of a bot that are kept for operators: see [`crate::history`].

use redis::{Pipeline, Value};

use super::Queue;
use crate::history::{Attempt, read_failures, read_portion};
use crate::id::BotId;
use crate::redis::{RedisError, Reply};

/// Number of entries of the stream per read.
const PAGE: usize = 16;
/// Maximum number of reads of the stream: enough for the default bounds of a shard.
const PAGES: usize = 64;

impl Queue {
    /// The last attempts of a bot, the newest first, at most `limit`. What ended in the last second may
    /// be missing.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn attempts(&self, bot: &BotId, limit: usize) -> Result<Vec<Attempt>, RedisError> {
        let keys = self.keys_of(bot);
        let [stream, failed, ..] = &keys.history;
        let mut pipe = Pipeline::with_capacity(1);
        pipe.cmd("HGET").arg(failed).arg(bot.as_str());
        let values = self.link().run_checked("HGET", &pipe).await?;
        let mut reply = self.read("HGET", Reply::new(Value::Array(values)))?;
        let failures = self.read("HGET", reply.bytes())?.unwrap_or_default();
        let mut found = read_failures(&failures);

        let (mut last, mut done) = ("+".to_owned(), 0);
        for _ in 0..PAGES {
            let mut page = redis::cmd("XREVRANGE");
            page.arg(stream).arg(&last).arg("-").arg("COUNT").arg(PAGE);
            let page = self.link().command("XREVRANGE", page).await?;
            let mut page = self.read("XREVRANGE", Reply::new(page))?;
            let entries = page.len();
            for _ in 0..entries {
                let entry = page.next().unwrap_or(Value::Nil);
                let mut entry = self.read("XREVRANGE", Reply::new(entry))?;
                last = format!("({}", self.read("XREVRANGE", entry.text())?);
                let fields = entry.next().unwrap_or(Value::Nil);
                let mut fields = self.read("XREVRANGE", Reply::new(fields))?;
                let _name = fields.next();
                let portion = self.read("XREVRANGE", fields.bytes())?.unwrap_or_default();
                let attempts = read_portion(&portion, bot);
                done += attempts.len();
                found.extend(attempts);
            }
            if entries < PAGE || done >= limit {
                break;
            }
        }
        found.sort_by_key(|attempt| std::cmp::Reverse((attempt.time_ms, attempt.last_sequence)));
        found.truncate(limit);
        Ok(found)
    }
}
