//! Dead letters one by one and all at once.

use std::time::Duration;

use redis::Value;

use super::Queue;
use super::inspect::{DeadLetter, dead_letter};
use crate::clock::millis;
use crate::id::{BotId, Offset, Shard};
use crate::keyspace::scripts::Redrive;
use crate::keyspace::{Reply, StoreError};

/// Dead letters handled by one write.
const PAGE: usize = 100;

impl Queue {
    /// One dead letter; `None` when there is no such one of this bot.
    ///
    /// # Errors
    /// When Redis does not answer or refuses.
    pub async fn dead_letter(
        &self,
        bot: &BotId,
        id: Offset,
    ) -> Result<Option<DeadLetter>, StoreError> {
        let (id, shard) = (id.to_string(), self.shard_of(bot));
        let page = self.dead_from(shard, &id, &id).await?;
        Ok(page.into_iter().find(|letter| letter.bot == *bot))
    }

    /// Puts back the dead letters of `bot`, or of all bots, that died up to `until` on the server's
    /// clock: those that die again meanwhile stay. The oldest go first, so that a bot whose events
    /// are handled meanwhile gets them in order. Answers how many those were.
    ///
    /// # Errors
    /// When Redis does not answer or refuses. What was put back stays so; it can be repeated.
    pub async fn redrive_all(
        &self,
        bot: Option<&BotId>,
        until: Duration,
    ) -> Result<u64, StoreError> {
        let slice_us = self.limits().slice_us;
        let mut count = 0;
        for shard in self.dead_shards(bot) {
            let keys = self.keys(shard);
            let mut pages = Pages::until(until);
            while let Some(letters) = pages.next(self, shard, bot).await? {
                let calls: Vec<_> = letters
                    .iter()
                    .map(|(bot, id)| Redrive { keys, id: *id, bot, slice_us })
                    .collect();
                for reply in self.link().call_all(&calls).await? {
                    count += u64::from(reply?);
                }
            }
        }
        Ok(count)
    }

    /// Deletes the dead letters of `bot`, or of all bots, that died up to `until` on the server's
    /// clock. Answers how many those were.
    ///
    /// # Errors
    /// When Redis does not answer or refuses. What was deleted stays so; it can be repeated.
    pub async fn drop_dead_letters(
        &self,
        bot: Option<&BotId>,
        until: Duration,
    ) -> Result<u64, StoreError> {
        let mut count = 0;
        for shard in self.dead_shards(bot) {
            let mut pages = Pages::until(until);
            while let Some(letters) = pages.next(self, shard, bot).await? {
                let ids: Vec<_> = letters.iter().map(|(_, id)| id.to_string()).collect();
                if ids.is_empty() {
                    continue;
                }
                let command = redis::Cmd::xdel(&self.keys(shard).dlq, &ids);
                if let Value::Int(deleted) = self.link().command("XDEL", command).await? {
                    count += deleted.unsigned_abs();
                }
            }
        }
        Ok(count)
    }

    fn dead_shards(&self, bot: Option<&BotId>) -> impl Iterator<Item = Shard> + use<> {
        let only = bot.map(|bot| self.shard_of(bot));
        self.shard_count().shards().filter(move |shard| only.is_none_or(|only| only == *shard))
    }

    async fn dead_from(
        &self,
        shard: Shard,
        from: &str,
        until: &str,
    ) -> Result<Vec<DeadLetter>, StoreError> {
        let mut command = redis::cmd("XRANGE");
        command.arg(&self.keys(shard).dlq).arg(from).arg(until).arg("COUNT").arg(PAGE);
        let value = self.link().command("XRANGE", command).await?;
        let misread = |source| self.link().misread("XRANGE", source);
        let mut entries = Reply::new(value).map_err(misread)?;
        let mut page = Vec::with_capacity(entries.len());
        while let Some(entry) = entries.next() {
            page.push(dead_letter(entry).map_err(misread)?);
        }
        Ok(page)
    }
}

/// Walks through the dead letters of a shard, the oldest first.
struct Pages {
    from: String,
    until: String,
}

impl Pages {
    fn until(until: Duration) -> Self {
        Self { from: "-".to_owned(), until: millis(until).to_string() }
    }

    /// Those of `bot` on the next page, which may be none; `None` at the end.
    async fn next(
        &mut self,
        queue: &Queue,
        shard: Shard,
        bot: Option<&BotId>,
    ) -> Result<Option<Vec<(BotId, Offset)>>, StoreError> {
        let page = queue.dead_from(shard, &self.from, &self.until).await?;
        let Some(last) = page.last() else { return Ok(None) };
        self.from = format!("({}", last.id);
        let letters = page.into_iter().filter(|letter| bot.is_none_or(|bot| *bot == letter.bot));
        Ok(Some(letters.filter_map(|letter| Some((letter.bot, letter.id.parse().ok()?))).collect()))
    }
}
