//! The attempts of a bot that are kept for operators: see [`crate::history`].

use std::ops::RangeInclusive;

use redis::{Pipeline, Value};

use super::Queue;
use crate::history::{Attempt, read_failures, read_portion};
use crate::id::BotId;
use crate::redis::{RedisError, Reply};

/// Number of entries of the stream in one read: few for a bot whose attempts are the last, and more and more for
/// others, so that a distant Redis is asked a few times only.
const PAGE: RangeInclusive<usize> = 16..=256;
/// Maximum number of entries that are read: enough for the default bounds of a shard.
const ENTRIES: usize = 1_024;
/// More entries than this are many: each has up to 64 attempts.
const MANY: u64 = 128;

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

        let (mut last, mut done, mut read) = ("+".to_owned(), 0, 0);
        while read < ENTRIES {
            let count = next_page(read);
            let mut page = redis::cmd("XREVRANGE");
            page.arg(stream).arg(&last).arg("-").arg("COUNT").arg(count);
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
            read += entries;
            if entries < count || done >= limit {
                break;
            }
        }
        found.sort_by_key(|attempt| std::cmp::Reverse((attempt.time_ms, attempt.last_sequence)));
        found.truncate(limit);
        Ok(found)
    }

    /// Whether so many attempts of all bots of its shard are kept that those of a bot may take long to find.
    pub(crate) async fn keeps_many_attempts(&self, bot: &BotId) -> Result<bool, RedisError> {
        let [done, ..] = &self.keys_of(bot).history;
        let length = self.link().command("XLEN", redis::Cmd::xlen(done)).await?;
        let length = Reply::single(length).and_then(|mut reply| reply.number::<u64>());
        Ok(self.read("XLEN", length)? > MANY)
    }
}

/// The number of entries to read next: as many as were read before.
fn next_page(read: usize) -> usize {
    read.clamp(*PAGE.start(), *PAGE.end())
}

#[test]
fn a_shard_with_many_attempts_is_read_in_eight_pages() {
    let (mut read, mut pages) = (0, Vec::new());
    while read < ENTRIES {
        pages.push(next_page(read));
        read += next_page(read);
    }
    assert_eq!(pages, [16, 16, 32, 64, 128, 256, 256, 256]);
}
