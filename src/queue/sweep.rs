//! Dead letters that fit a filter: counted, grouped by their reasons, redriven or dropped. Everything is
//! bounded, because a pipeline may have millions of large letters.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::letters::READ_BYTES;
use super::{BulkStopped, LetterOfBot, Queue};
use crate::clock::millis;
use crate::id::{BotId, LetterId, Offset, Shard};
use crate::redis::RedisError;
use crate::redis::scripts::{LetterPortion, Letters, Part, RawLetter, Redrive};

/// Maximum number of letters per read.
const PAGE: usize = 100;
/// Maximum number of letters that are redriven in one write. Redis serves others after each: in a long
/// queue, one of them takes up to 3 ms.
const REDRIVES_AT_ONCE: usize = 10;
/// Number of the newest letters that are grouped, over all shards, and their bytes.
pub(crate) const GROUPED: usize = 1_000;
const GROUPED_BYTES: usize = 8 << 20;
/// Least number of letters of a shard that are grouped.
const GROUPED_MIN: usize = 16;

/// Which dead letters.
#[derive(Clone, Copy)]
pub(crate) struct Wish<'a> {
    /// Only of this bot.
    pub(crate) bot: Option<&'a BotId>,
    /// Only of these bots.
    pub(crate) wanted: &'a (dyn Fn(&BotId) -> bool + Sync),
    /// Only with this text in their reason; empty: any.
    pub(crate) reason: &'a str,
}

impl Wish<'_> {
    pub(super) fn fits(&self, bot: &BotId, reason: &str) -> bool {
        self.bot.is_none_or(|wanted| wanted == bot)
            && (self.wanted)(bot)
            && (self.reason.is_empty() || reason.contains(self.reason))
    }
}

/// What to do with dead letters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Deed {
    Redrive,
    Drop,
}

/// The end of a search or of an action.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bound {
    pub(crate) letters: u64,
    pub(crate) deadline: Instant,
}

/// A number of letters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Swept {
    pub(crate) count: u64,
    /// Whether the bound ended it, so that there may be more.
    pub(crate) more: bool,
}

/// The newest letters by their reasons.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Reasons {
    /// The most frequent ones first.
    pub(crate) found: Vec<(String, u64)>,
    /// Whether there are older letters, which are not counted.
    pub(crate) more: bool,
}

impl Queue {
    /// The newest letters that fit, grouped by their reasons: about [`GROUPED`] letters are read.
    pub(crate) async fn reasons_of_dead(&self, wish: Wish<'_>) -> Result<Reasons, RedisError> {
        let shards: Vec<Shard> = self.dead_shards(wish.bot).collect();
        let reads: Vec<Letters<'_>> = shards
            .iter()
            .map(|&shard| Letters {
                keys: self.keys(shard),
                newest_first: true,
                from: "+",
                until: "-",
                limit: (GROUPED / shards.len()).max(GROUPED_MIN),
                bytes: GROUPED_BYTES / shards.len(),
                part: Part::Start(0),
            })
            .collect();
        let (mut counts, mut more) = (HashMap::<String, u64>::new(), false);
        for portion in self.link().call_all(&reads).await? {
            let portion = portion?;
            more |= portion.more && !portion.letters.is_empty();
            for (_, raw) in fitting(wish, portion) {
                *counts.entry(raw.reason).or_default() += 1;
            }
        }
        let mut found: Vec<(String, u64)> = counts.into_iter().collect();
        found.sort_by(|a, b| (b.1, &a.0).cmp(&(a.1, &b.0)));
        Ok(Reasons { found, more })
    }

    /// Counts the letters that fit and are not newer than `until`.
    pub(crate) async fn count_dead(
        &self,
        wish: Wish<'_>,
        until: Duration,
        bound: Bound,
    ) -> Result<Swept, RedisError> {
        let mut swept = Swept::default();
        self.walk(wish, until, bound, None, &mut swept).await?;
        Ok(swept)
    }

    /// Redrives or drops the letters that fit and are not newer than `until`, the oldest of a shard
    /// first, so that a bot gets its events in order. Events that fail again meanwhile stay dead letters.
    pub(crate) async fn sweep_dead(
        &self,
        wish: Wish<'_>,
        until: Duration,
        bound: Bound,
        deed: Deed,
    ) -> Result<Swept, BulkStopped> {
        let mut swept = Swept::default();
        let walked = self.walk(wish, until, bound, Some(deed), &mut swept).await;
        walked.map(|()| swept).map_err(|source| BulkStopped { done: swept.count, source })
    }

    /// Redrives or drops letters of one shard; adds to `done` how many of them still existed, also if
    /// others failed.
    pub(crate) async fn settle_letters(
        &self,
        shard: Shard,
        letters: &[(BotId, Offset)],
        deed: Deed,
        done: &mut u64,
    ) -> Result<(), RedisError> {
        if letters.is_empty() {
            return Ok(());
        }
        if deed == Deed::Drop {
            let ids: Vec<Offset> = letters.iter().map(|(_, id)| *id).collect();
            return self.drop_letters(shard, &ids, done).await;
        }
        if self.ledger().is_some() {
            for (bot, entry) in letters {
                *done += u64::from(self.redrive(bot, LetterId::new(shard, *entry)).await?);
            }
            return Ok(());
        }
        let keys = self.keys(shard);
        let (slice_us, renews) = (self.limits().slice_us, self.kind.renews);
        for letters in letters.chunks(REDRIVES_AT_ONCE) {
            let calls: Vec<Redrive<'_>> = letters
                .iter()
                .map(|(bot, id)| Redrive { keys, id: *id, bot, slice_us, renews })
                .collect();
            let replies = self.link().call_all(&calls).await?;
            // All were sent: those behind a failed one may have succeeded.
            *done += replies.iter().filter(|reply| matches!(reply, Ok(true))).count() as u64;
            replies.into_iter().try_for_each(|reply| reply.map(drop))?;
        }
        Ok(())
    }

    /// These letters without their payloads, as far as they still exist.
    pub(crate) async fn glimpse_letters(
        &self,
        ids: &[LetterId],
    ) -> Result<Vec<(BotId, LetterOfBot)>, RedisError> {
        let shards = usize::from(self.shard_count().get());
        let known = ids.iter().filter(|id| id.shard.index() < shards);
        let known: Vec<(LetterId, usize)> = known.map(|id| (*id, 0)).collect();
        self.glimpses(&known).await
    }

    /// Goes through the letters that fit, the oldest of each shard first. Counts them only, unless there
    /// is something to do with them. After an error, `swept` has the number before it.
    async fn walk(
        &self,
        wish: Wish<'_>,
        until: Duration,
        bound: Bound,
        deed: Option<Deed>,
        swept: &mut Swept,
    ) -> Result<(), RedisError> {
        let until = millis(until).to_string();
        for shard in self.dead_shards(wish.bot) {
            let mut from = "-".to_owned();
            loop {
                // The letters of a bot may be behind many others. Each action on a bot reaches some.
                let begins = deed.is_some() && wish.bot.is_some() && swept.count == 0;
                let is_late = Instant::now() >= bound.deadline && !begins;
                if swept.count >= bound.letters || is_late {
                    swept.more = true;
                    return Ok(());
                }
                let left = usize::try_from(bound.letters - swept.count).unwrap_or(PAGE);
                let read = Letters {
                    keys: self.keys(shard),
                    newest_first: false,
                    from: &from,
                    until: &until,
                    limit: PAGE.min(left),
                    bytes: READ_BYTES,
                    part: Part::Start(0),
                };
                let portion = self.link().call(&read).await?;
                let Some(last) = portion.letters.last() else { break };
                from = format!("({}", last.entry);
                let ends = !portion.more;
                let letters: Vec<(BotId, Offset)> =
                    fitting(wish, portion).map(|(bot, raw)| (bot, raw.entry)).collect();
                match deed {
                    Some(deed) => {
                        self.settle_letters(shard, &letters, deed, &mut swept.count).await?;
                    }
                    None => swept.count += letters.len() as u64,
                }
                if ends {
                    break;
                }
            }
        }
        Ok(())
    }
}

/// The letters of a portion that fit. One with a bot that cannot be read fits nothing.
fn fitting(wish: Wish<'_>, portion: LetterPortion) -> impl Iterator<Item = (BotId, RawLetter)> {
    portion.letters.into_iter().filter_map(move |raw| {
        let bot = BotId::parse(&raw.bot).ok()?;
        wish.fits(&bot, &raw.reason).then_some((bot, raw))
    })
}
