//! What a bot received and completed lately, for charts. Nothing is counted for it: arrivals are the
//! sequences of its events, which are times, and completions are the attempts that are kept.

use std::collections::HashMap;

use redis::{Pipeline, Value};

use super::Queue;
use super::letters::READ_BYTES;
use crate::history::{Attempt, read_failures, read_portion, settled_in};
use crate::id::BotId;
use crate::redis::scripts::Arrived;
use crate::redis::{RedisError, Reply};

/// Number of entries of the stream per read, and maximum number of reads.
const PAGE: usize = 64;
const PAGES: usize = 16;
/// Maximum number of entries of each shard that are read for the busiest bots.
const BUSY_ENTRIES: usize = 32;

/// Sequences are times in µs.
const MICROS_PER_MS: u64 = 1_000;

/// The attempts of a bot since some time.
#[derive(Debug, Clone, Default)]
pub(crate) struct Recent {
    /// The newest first.
    pub(crate) attempts: Vec<Attempt>,
    /// All attempts since then are here, ms since 1970. Later than asked for if they are many.
    pub(crate) since_ms: u64,
}

impl Queue {
    /// The attempts of a bot that ended since `from_ms`, as far as they are kept: about the newest
    /// 1,000 entries of its shard are read. What ended in the last second may be missing.
    pub(crate) async fn recent(&self, bot: &BotId, from_ms: u64) -> Result<Recent, RedisError> {
        let [stream, failed, ..] = &self.keys_of(bot).history;
        let failures = self.link().command("HGET", redis::Cmd::hget(failed, bot.as_str())).await?;
        let failures = self.read("HGET", Reply::single(failures))?.bytes();
        let failures = self.read("HGET", failures)?.unwrap_or_default();
        let mut attempts = read_failures(&failures);
        attempts.retain(|attempt| attempt.time_ms >= from_ms);

        let (mut last, mut since_ms, mut ended) = ("+".to_owned(), from_ms, false);
        for _ in 0..PAGES {
            let mut page = redis::cmd("XREVRANGE");
            page.arg(stream).arg(&last).arg(from_ms).arg("COUNT").arg(PAGE);
            let page = self.link().command("XREVRANGE", page).await?;
            let mut page = self.read("XREVRANGE", Reply::new(page))?;
            let entries = page.len();
            for _ in 0..entries {
                let entry = page.next().unwrap_or(Value::Nil);
                let mut entry = self.read("XREVRANGE", Reply::new(entry))?;
                let id = self.read("XREVRANGE", entry.text())?;
                since_ms = id.split('-').next().and_then(|ms| ms.parse().ok()).unwrap_or(from_ms);
                last = format!("({id}");
                let fields = entry.next().unwrap_or(Value::Nil);
                let mut fields = self.read("XREVRANGE", Reply::new(fields))?;
                let _name = fields.next();
                let portion = self.read("XREVRANGE", fields.bytes())?.unwrap_or_default();
                attempts.extend(read_portion(&portion, bot));
            }
            ended = entries < PAGE;
            if ended {
                break;
            }
        }
        if ended {
            // Older entries than these may be gone, because all bots of a shard share its bytes.
            since_ms =
                self.oldest_entry(stream).await?.map_or(from_ms, |oldest| oldest.max(from_ms));
        }
        attempts.sort_by_key(|attempt| std::cmp::Reverse((attempt.time_ms, attempt.last_sequence)));
        Ok(Recent { attempts, since_ms })
    }

    /// The time of the first entry of a stream, ms since 1970.
    async fn oldest_entry(&self, stream: &str) -> Result<Option<u64>, RedisError> {
        let mut first = redis::cmd("XRANGE");
        first.arg(stream).arg("-").arg("+").arg("COUNT").arg(1);
        let first = self.link().command("XRANGE", first).await?;
        let mut first = self.read("XRANGE", Reply::new(first))?;
        let Some(entry) = first.next() else { return Ok(None) };
        let mut entry = self.read("XRANGE", Reply::new(entry))?;
        let id = self.read("XRANGE", entry.text())?;
        Ok(id.split('-').next().and_then(|ms| ms.parse().ok()))
    }

    /// The number of events of each wanted bot that left the queues since `from_ms`, the most first.
    /// At most the newest entries of each shard are read, so under full load the counts are of a part of
    /// that time only, the same part for all bots of a shard.
    pub(crate) async fn busy_since(
        &self,
        from_ms: u64,
        wanted: &(dyn Fn(&BotId) -> bool + Sync),
    ) -> Result<Vec<(BotId, u64)>, RedisError> {
        let mut pipe = Pipeline::with_capacity(self.shards().len());
        for keys in self.shards().iter() {
            let [stream, ..] = &keys.history;
            pipe.cmd("XREVRANGE").arg(stream).arg("+").arg(from_ms);
            pipe.arg("COUNT").arg(BUSY_ENTRIES);
        }
        let mut counts: HashMap<String, u64> = HashMap::new();
        for page in self.link().run_checked("XREVRANGE", &pipe).await? {
            let mut page = self.read("XREVRANGE", Reply::new(page))?;
            while let Some(entry) = page.next() {
                let mut entry = self.read("XREVRANGE", Reply::new(entry))?;
                let _id = entry.next();
                let fields = entry.next().unwrap_or(Value::Nil);
                let mut fields = self.read("XREVRANGE", Reply::new(fields))?;
                let _name = fields.next();
                let portion = self.read("XREVRANGE", fields.bytes())?.unwrap_or_default();
                for (bot, settled) in settled_in(&portion) {
                    *counts.entry(bot).or_default() += u64::from(settled);
                }
            }
        }
        let bots = counts.into_iter().filter_map(|(bot, n)| Some((BotId::parse(&bot).ok()?, n)));
        let mut bots: Vec<_> = bots.filter(|(bot, n)| *n > 0 && wanted(bot)).collect();
        bots.sort_by(|a, b| (b.1, &a.0).cmp(&(a.1, &b.0)));
        Ok(bots)
    }

    /// How many of the `length` events of a bot's queue arrived until each of these times, ms since
    /// 1970. A queue is in the order of arrival, so each costs a binary search. Redis reads whole events
    /// for it: of large ones it reads a few, and the numbers are near.
    pub(crate) async fn arrived_until(
        &self,
        bot: &BotId,
        times: &[u64],
        length: u64,
    ) -> Result<Vec<u64>, RedisError> {
        if length == 0 {
            return Ok(vec![0; times.len()]);
        }
        let until: Vec<u64> = times.iter().map(|time| time.saturating_mul(MICROS_PER_MS)).collect();
        let (keys, bytes) = (self.keys_of(bot), READ_BYTES);
        self.link().call(&Arrived { keys, bot, until: &until, bytes }).await
    }

    /// Whether the whole pipeline is paused, in the shard of a bot.
    pub(crate) async fn is_stopped(&self, bot: &BotId) -> Result<bool, RedisError> {
        let paused = redis::Cmd::hexists(self.keys_of(bot).meta(), "paused");
        let paused = self.link().command("HEXISTS", paused).await?;
        Ok(matches!(paused, Value::Int(1) | Value::Boolean(true)))
    }
}
