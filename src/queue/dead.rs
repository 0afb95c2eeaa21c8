//! Dead letters: list, inspect, redrive, drop.

use std::collections::BTreeSet;
use std::time::Duration;

use redis::Value;
use serde::Serialize;
use tracing::warn;
use utoipa::ToSchema;

use super::Queue;
use super::letters::{READ_BYTES, decode};
use crate::clock::millis;
use crate::event::Event;
use crate::id::{BotId, LetterId, Offset, Shard};
use crate::ledger::Ledger;
use crate::metrics;
use crate::quotas::DEAD_LETTERS;
use crate::redis::keys::ShardKeys;
use crate::redis::scripts::{DropLetters, Dropping, Letters, Part, Recount, Redrive};
use crate::redis::{RedisError, ReplyError};
use crate::telemetry::OncePerMinute;

/// Maximum number of dead letters per page and per write.
const PAGE: usize = 100;

/// Maximum number of dead letters that a search for those of one bot reads: the newest of its
/// shard.
const LOOKED_AT: usize = 1_000;
/// Maximum bytes of that search, approximately.
const LOOKED_AT_BYTES: usize = 8 << 20;
/// Number of letters per portion of that search. It is small because events may be large.
const LOOK: usize = 50;
/// Maximum number of a bot's dead letters in the result.
const NEWEST: usize = 3;

/// The dead letters of one bot, found by a bounded search.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct DeadOfBot {
    /// Number of letters found among the newest 1,000 (or 8 MiB) of its shard.
    pub count: u64,
    /// Whether older letters were not searched, so that there may be more.
    pub at_least: bool,
    /// The newest three.
    pub newest: Vec<LetterOfBot>,
}

/// The summary of a bot's dead letter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct LetterOfBot {
    /// Its id within the pipeline.
    pub id: LetterId,
    /// The id of the event; `None` if the record cannot be read.
    pub event: Option<String>,
    /// The type of the event.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// The reason.
    pub reason: String,
    /// The number of attempts.
    pub attempts: u32,
    /// The time, ms since 1970.
    pub time_ms: u64,
}

/// A dead letter: an event that failed for good.
#[derive(Debug, Serialize, ToSchema)]
pub struct DeadLetter {
    /// Its id within the pipeline.
    pub id: LetterId,
    /// The bot of the event.
    pub bot: BotId,
    /// The reason.
    pub reason: String,
    /// The number of attempts.
    pub attempts: u32,
    /// The time, ms since 1970.
    pub time_ms: u64,
    /// The event; `None` if the record cannot be read.
    pub event: Option<Event>,
}

/// An action on many dead letters stopped early. What was done stays done, and the call can be
/// repeated.
#[derive(Debug, thiserror::Error)]
#[error("{source}")]
pub struct BulkStopped {
    /// The number of letters before that. Those of the last step may be done too.
    pub done: u64,
    /// The cause.
    pub source: RedisError,
}

impl Queue {
    /// The number of dead letters of `bot`, and the newest of them. Only the newest letters of its
    /// shard are searched, so the cost is bounded.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn dead_of(&self, bot: &BotId) -> Result<DeadOfBot, RedisError> {
        let shard = self.shard_of(bot);
        let (mut found, mut from) = (DeadOfBot::default(), "+".to_owned());
        let (mut looked_at, mut bytes, mut newest) = (0, 0, Vec::new());
        loop {
            let read = Letters {
                keys: self.keys(shard),
                newest_first: true,
                from: &from,
                until: "-",
                limit: LOOK,
                bytes: LOOKED_AT_BYTES / 2,
                part: Part::Start(0),
            };
            let portion = self.link().call(&read).await?;
            looked_at += portion.letters.len();
            for raw in &portion.letters {
                bytes += raw.bytes;
                if raw.bot == bot.as_str() {
                    found.count += 1;
                    if newest.len() < NEWEST {
                        newest.push((LetterId::new(shard, raw.entry), raw.bytes));
                    }
                }
            }
            if let Some(last) = portion.letters.last() {
                from = format!("({}", last.entry);
            }
            let ends = !portion.more || portion.letters.is_empty();
            if ends || looked_at >= LOOKED_AT || bytes >= LOOKED_AT_BYTES {
                found.at_least = !ends && self.dead_in(shard).await? > looked_at as u64;
                break;
            }
        }
        let glimpses = self.glimpses(&newest).await?;
        found.newest = glimpses.into_iter().map(|(_, letter)| letter).collect();
        Ok(found)
    }

    /// The bots of the newest dead letters of a shard.
    pub(super) async fn bots_of_newest_letters(
        &self,
        shard: Shard,
    ) -> Result<BTreeSet<BotId>, RedisError> {
        let (mut found, mut from) = (BTreeSet::new(), "+".to_owned());
        let (mut looked_at, mut bytes) = (0, 0);
        loop {
            let read = Letters {
                keys: self.keys(shard),
                newest_first: true,
                from: &from,
                until: "-",
                limit: LOOK,
                bytes: LOOKED_AT_BYTES / 2,
                part: Part::Start(0),
            };
            let portion = self.link().call(&read).await?;
            looked_at += portion.letters.len();
            bytes += portion.letters.iter().map(|raw| raw.bytes).sum::<usize>();
            found.extend(portion.letters.iter().filter_map(|raw| BotId::parse(&raw.bot).ok()));
            let Some(last) = portion.letters.last() else { return Ok(found) };
            from = format!("({}", last.entry);
            if !portion.more || looked_at >= LOOKED_AT || bytes >= LOOKED_AT_BYTES {
                return Ok(found);
            }
        }
    }

    /// The number of dead letters of `bot`, or of all bots. For a bot, this reads all letters of
    /// its shard up to `until`.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn count_dead_letters(
        &self,
        bot: Option<&BotId>,
        until: Duration,
    ) -> Result<u64, RedisError> {
        let mut count = 0;
        for shard in self.dead_shards(bot) {
            if bot.is_none() {
                count += self.dead_in(shard).await?;
                continue;
            }
            let mut pages = Pages::until(until);
            while let Some(letters) = pages.next(self, shard, bot).await? {
                count += letters.len() as u64;
            }
        }
        Ok(count)
    }

    /// A dead letter; `None` if it does not exist.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn dead_letter(&self, id: LetterId) -> Result<Option<DeadLetter>, RedisError> {
        if id.shard.index() >= usize::from(self.shard_count().get()) {
            return Ok(None);
        }
        let found = self.letters_by_id(&[(id, 0)], Part::Whole).await?.pop();
        found.map(|(id, raw)| self.read("letters", decode(id, raw))).transpose()
    }

    /// Redrives a dead letter of `bot`, in order. If the queue has a ledger or renews sequences,
    /// the event goes to the tail. Returns whether the letter existed.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn redrive(&self, bot: &BotId, id: LetterId) -> Result<bool, RedisError> {
        if id.shard != self.shard_of(bot) {
            return Ok(false);
        }
        if let Some(ledger) = self.ledger() {
            return self.recount(ledger, bot, id).await;
        }
        let (keys, slice_us) = (self.keys(id.shard), self.limits().slice_us);
        let renews = self.kind.renews;
        self.link().call(&Redrive { keys, id: id.entry, bot, slice_us, renews }).await
    }

    /// Redrives a dead letter at the tail with a new sequence, and posts its entry. The durable
    /// store would ignore the old sequence if it has later records of the account.
    async fn recount(
        &self,
        ledger: &dyn Ledger,
        bot: &BotId,
        id: LetterId,
    ) -> Result<bool, RedisError> {
        let Some(letter) = self.dead_letter(id).await?.filter(|letter| letter.bot == *bot) else {
            return Ok(false);
        };
        let Some(event) = letter.event else { return Ok(false) };
        let (event, posting) = ledger.enter_again(&event);
        let recount = Recount {
            keys: self.keys_of(bot),
            limits: self.limits(),
            cached_accounts: ledger.cached_accounts(),
            id: id.entry,
            bot,
            posting: posting.as_ref(),
            event: &event.encode(),
        };
        self.link().call(&recount).await
    }

    /// Deletes a dead letter. Returns whether it existed.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn drop_dead_letter(&self, id: LetterId) -> Result<bool, RedisError> {
        if id.shard.index() >= usize::from(self.shard_count().get()) {
            return Ok(false);
        }
        let mut done = 0;
        self.drop_letters(id.shard, &[id.entry], &mut done).await?;
        Ok(done == 1)
    }

    /// Redrives the dead letters of `bot`, or of all bots, whose time is at most `until` on the
    /// server's clock. Events that fail again meanwhile stay dead letters. The oldest letters go
    /// first, so that a bot gets them in order even if it is handled meanwhile. Returns their
    /// number.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses. Redriven letters stay redriven; the call can be
    /// repeated.
    pub async fn redrive_all(
        &self,
        bot: Option<&BotId>,
        until: Duration,
    ) -> Result<u64, BulkStopped> {
        let mut done = 0;
        let redriven = self.redrive_counting(bot, until, &mut done).await;
        redriven.map(|()| done).map_err(|source| BulkStopped { done, source })
    }

    async fn redrive_counting(
        &self,
        bot: Option<&BotId>,
        until: Duration,
        done: &mut u64,
    ) -> Result<(), RedisError> {
        let (slice_us, renews) = (self.limits().slice_us, self.kind.renews);
        for shard in self.dead_shards(bot) {
            let keys = self.keys(shard);
            let mut pages = Pages::until(until);
            while let Some(letters) = pages.next(self, shard, bot).await? {
                if let Some(ledger) = self.ledger() {
                    for (bot, entry) in &letters {
                        let id = LetterId::new(shard, *entry);
                        *done += u64::from(self.recount(ledger, bot, id).await?);
                    }
                    continue;
                }
                let calls: Vec<_> = letters
                    .iter()
                    .map(|(bot, id)| Redrive { keys, id: *id, bot, slice_us, renews })
                    .collect();
                let replies = self.link().call_all(&calls).await?;
                // All were sent: those behind a failed one may have succeeded.
                *done += replies.iter().filter(|reply| matches!(reply, Ok(true))).count() as u64;
                for reply in replies {
                    reply?;
                }
            }
        }
        Ok(())
    }

    /// Deletes the dead letters of `bot`, or of all bots, whose time is at most `until` on the
    /// server's clock. Returns their number.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses. Deleted letters stay deleted; the call can be repeated.
    pub async fn drop_dead_letters(
        &self,
        bot: Option<&BotId>,
        until: Duration,
    ) -> Result<u64, BulkStopped> {
        let mut done = 0;
        let dropped = self.drop_counting(bot, until, &mut done).await;
        dropped.map(|()| done).map_err(|source| BulkStopped { done, source })
    }

    async fn drop_counting(
        &self,
        bot: Option<&BotId>,
        until: Duration,
        done: &mut u64,
    ) -> Result<(), RedisError> {
        for shard in self.dead_shards(bot) {
            let mut pages = Pages::until(until);
            while let Some(letters) = pages.next(self, shard, bot).await? {
                let ids: Vec<_> = letters.into_iter().map(|(_, id)| id).collect();
                if !ids.is_empty() {
                    self.drop_letters(shard, &ids, done).await?;
                }
            }
        }
        Ok(())
    }

    /// Deletes letters of a shard, at least one, with a call per [`READ_BYTES`]. Adds to `done` how many
    /// of them existed, also if a later call failed.
    pub(super) async fn drop_letters(
        &self,
        shard: Shard,
        ids: &[Offset],
        done: &mut u64,
    ) -> Result<(), RedisError> {
        let (keys, letters) = (self.keys(shard), Dropping::Ids(ids));
        let call = DropLetters { keys, letters, bytes: READ_BYTES };
        loop {
            let dropped = self.link().call(&call).await?;
            *done += dropped.count;
            if !dropped.more {
                return Ok(());
            }
        }
    }

    /// Notes that events were lost because their bots have as many dead letters as they may.
    pub(crate) fn letters_over_quota(&self, count: u64) {
        static LOST: OncePerMinute = OncePerMinute::new();
        metrics::quota_refused(DEAD_LETTERS, count);
        if count > 0
            && let Some(suppressed) = LOST.take()
        {
            warn!(pipeline = %self.name(), count, suppressed,
                "bots have as many dead letters as their quotas permit (quotas.dead_letters, dead_bytes, result_bytes); further events that fail are lost");
        }
    }

    /// Deletes dead letters older than `keep` by the clock of their server. Returns their number.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn expire_dead_letters(&self, keep: Duration) -> Result<u64, RedisError> {
        let letters = Dropping::Older(keep);
        let mut shards: Vec<&ShardKeys> = self.shards().iter().collect();
        let mut count = 0;
        while !shards.is_empty() {
            // All are in one write, and Redis serves others only after it.
            let bytes = (READ_BYTES / shards.len()).max(1);
            let calls: Vec<_> =
                shards.iter().map(|&keys| DropLetters { keys, letters, bytes }).collect();
            let mut more = Vec::new();
            for (keys, dropped) in shards.iter().zip(self.link().call_all(&calls).await?) {
                let dropped = dropped?;
                count += dropped.count;
                if dropped.more {
                    more.push(*keys);
                }
            }
            shards = more;
        }
        Ok(count)
    }

    /// The number of dead letters of a shard.
    async fn dead_in(&self, shard: Shard) -> Result<u64, RedisError> {
        let length = redis::Cmd::xlen(&self.keys(shard).dlq);
        match self.link().command("XLEN", length).await? {
            Value::Int(length) => Ok(length.unsigned_abs()),
            other => {
                let source = ReplyError::unexpected("a length", &format!("{other:?}"));
                Err(self.link().misread("XLEN", source))
            }
        }
    }

    pub(super) fn dead_shards(&self, bot: Option<&BotId>) -> impl Iterator<Item = Shard> + use<> {
        let only = bot.map(|bot| self.shard_of(bot));
        self.shard_count().shards().filter(move |shard| only.is_none_or(|only| only == *shard))
    }
}

/// Iterates over the dead letters of a shard, oldest first.
struct Pages {
    from: String,
    until: String,
}

impl Pages {
    fn until(until: Duration) -> Self {
        Self { from: "-".to_owned(), until: millis(until).to_string() }
    }

    /// The letters of `bot` on the next page, possibly none; `None` at the end.
    async fn next(
        &mut self,
        queue: &Queue,
        shard: Shard,
        bot: Option<&BotId>,
    ) -> Result<Option<Vec<(BotId, Offset)>>, RedisError> {
        let page = queue.oldest_letters(shard, &self.from, &self.until, PAGE).await?;
        let Some(page) = page else { return Ok(None) };
        if let Some((_, last)) = page.last() {
            self.from = format!("({}", last.entry);
        }
        let letters = page.into_iter().filter(|(of, _)| bot.is_none_or(|bot| bot == of));
        Ok(Some(letters.map(|(bot, id)| (bot, id.entry)).collect()))
    }
}
