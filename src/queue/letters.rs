//! Pages of dead letters, bounded in number and bytes.
//!
//! 1. The newest letters of each shard are read in portions, without their records, and merged.
//! 2. Only the letters of the page are read completely, as long as their records fit into
//!    [`PAGE_BYTES`]; a list for a web page reads the start of each record only.
//!
//! So a page costs about the same memory, whatever the events contain.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::Queue;
use super::dead::{DeadLetter, LetterOfBot};
use super::sweep::Wish;
use crate::event::{Event, Glimpse};
use crate::id::{BotId, LetterId, Shard};
use crate::redis::scripts::{Letters, Part, RawLetter};
use crate::redis::{RedisError, ReplyError};

/// Maximum number of bytes of the records of a page: with their names and reasons, an answer has at
/// most 4 MiB. A page has at least one record.
pub const PAGE_BYTES: usize = 3 << 20;
/// Maximum number of bytes that one read returns, but at least one record.
pub(super) const PORTION_BYTES: usize = 1 << 20;
/// Maximum number of letters that one read looks at.
const PORTION: usize = 50;
/// Maximum number of bytes that a script reads in one call, without returning them.
pub(super) const READ_BYTES: usize = 4 << 20;

/// A page of dead letters.
#[derive(Debug)]
pub struct DeadPage {
    /// The newest first.
    pub letters: Vec<DeadLetter>,
    /// Older ones are behind this one, which may be gone meanwhile. `None`: there are none.
    pub next: Option<LetterId>,
}

/// A page of dead letters without their payloads.
#[derive(Debug)]
pub struct DeadGlimpses {
    /// The newest first, each with its bot.
    pub letters: Vec<(BotId, LetterOfBot)>,
    /// Older ones are behind this one, which may be gone meanwhile. `None`: there are none.
    pub next: Option<LetterId>,
    /// Whether the search ended before its time was over, so that some may be missing.
    pub cut: bool,
}

/// The wanted letters of one shard that are not on the page yet.
struct Stack {
    shard: Shard,
    from: String,
    more: bool,
    letters: VecDeque<(LetterId, usize)>,
}

/// The letters of a page: their ids and the bytes of their records.
struct Chosen {
    letters: Vec<(LetterId, usize)>,
    more: bool,
    cut: bool,
}

impl Chosen {
    fn next(&self) -> Option<LetterId> {
        self.letters.last().filter(|_| self.more).map(|(id, _)| *id)
    }
}

type Wanted<'a> = &'a (dyn Fn(&BotId) -> bool + Sync);

impl Queue {
    /// The newest dead letters of one bot, or of all bots that are `wanted`: at most `limit` and
    /// about [`PAGE_BYTES`], older than `before` (the id of the last one of the previous page).
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn list_dead_letters(
        &self,
        bot: Option<&BotId>,
        wanted: Wanted<'_>,
        before: Option<LetterId>,
        limit: usize,
    ) -> Result<DeadPage, RedisError> {
        let wish = Wish { bot, wanted, reason: "" };
        let chosen = self.choose(wish, before, (limit, PAGE_BYTES), None).await?;
        let mut letters = Vec::with_capacity(chosen.letters.len());
        for portion in portions(&chosen.letters) {
            for (id, raw) in self.letters_by_id(portion, Part::Whole).await? {
                letters.push(self.read("letters", decode(id, raw))?);
            }
        }
        Ok(DeadPage { letters, next: chosen.next() })
    }

    /// The same without payloads, for web pages.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn glimpse_dead_letters(
        &self,
        bot: Option<&BotId>,
        wanted: Wanted<'_>,
        before: Option<LetterId>,
        limit: usize,
    ) -> Result<DeadGlimpses, RedisError> {
        let wish = Wish { bot, wanted, reason: "" };
        self.search_dead_letters(wish, before, limit, None).await
    }

    /// The newest letters that fit, without payloads. Ends at the deadline with what was found.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub(crate) async fn search_dead_letters(
        &self,
        wish: Wish<'_>,
        before: Option<LetterId>,
        limit: usize,
        deadline: Option<Instant>,
    ) -> Result<DeadGlimpses, RedisError> {
        let chosen = self.choose(wish, before, (limit, usize::MAX), deadline).await?;
        let letters = self.glimpses(&chosen.letters).await?;
        Ok(DeadGlimpses { letters, next: chosen.next(), cut: chosen.cut })
    }

    pub(super) async fn glimpses(
        &self,
        letters: &[(LetterId, usize)],
    ) -> Result<Vec<(BotId, LetterOfBot)>, RedisError> {
        let found = self.letters_by_id(letters, Part::Start(Glimpse::BYTES)).await?;
        let read = |(id, raw): (LetterId, RawLetter)| -> Result<_, RedisError> {
            let bot = self.read("letters", bot_of(&raw))?;
            let seen = Glimpse::read(&raw.record);
            let (event, kind) = seen.map(|seen| (seen.id, seen.kind)).unzip();
            let RawLetter { reason, attempts, time_ms, .. } = raw;
            Ok((bot, LetterOfBot { id, event, kind, reason, attempts, time_ms }))
        };
        found.into_iter().map(read).collect()
    }

    /// The newest dead letters, of one bot or of all, at most `limit`, of any size: for tools that
    /// run on a machine of their own.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn dead_letters(
        &self,
        bot: Option<&BotId>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>, RedisError> {
        let (mut letters, mut before) = (Vec::<DeadLetter>::new(), None);
        loop {
            let left = limit - letters.len();
            let page = self.list_dead_letters(bot, &|_| true, before, left).await?;
            letters.extend(page.letters);
            before = page.next;
            if before.is_none() || letters.len() >= limit {
                return Ok(letters);
            }
        }
    }

    /// Chooses the letters of a page by their ids, and without their records.
    async fn choose(
        &self,
        wish: Wish<'_>,
        before: Option<LetterId>,
        (limit, bytes_max): (usize, usize),
        deadline: Option<Instant>,
    ) -> Result<Chosen, RedisError> {
        let is_late = || deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let stack = |shard| {
            let from = match before {
                None => "+".to_owned(),
                Some(id) if shard < id.shard => id.entry.to_string(),
                Some(id) => format!("({}", id.entry),
            };
            Stack { shard, from, more: true, letters: VecDeque::new() }
        };
        let mut stacks: Vec<Stack> = self.dead_shards(wish.bot).map(stack).collect();
        let (mut letters, mut bytes) = (Vec::new(), 0_usize);
        let mut cut = false;
        loop {
            for stack in &mut stacks {
                self.refill(stack, wish, &is_late).await?;
                cut |= stack.letters.is_empty() && stack.more;
            }
            let newest = stacks.iter_mut().max_by_key(|stack| stack.letters.front().copied());
            let Some(stack) = newest else { break };
            let Some(letter) = stack.letters.front().copied() else { break };
            bytes = bytes.saturating_add(letter.1);
            if letters.len() == limit || (!letters.is_empty() && bytes > bytes_max) {
                return Ok(Chosen { letters, more: true, cut });
            }
            letters.push(letter);
            stack.letters.pop_front();
        }
        Ok(Chosen { letters, more: false, cut })
    }

    /// Puts at least one letter on an empty stack, if its shard has one and it is not late.
    async fn refill(
        &self,
        stack: &mut Stack,
        wish: Wish<'_>,
        is_late: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), RedisError> {
        while stack.letters.is_empty() && stack.more && !is_late() {
            let read = Letters {
                keys: self.keys(stack.shard),
                newest_first: true,
                from: &stack.from,
                until: "-",
                limit: PORTION,
                bytes: READ_BYTES,
                part: Part::Start(0),
            };
            let portion = self.link().call(&read).await?;
            if let Some(last) = portion.letters.last() {
                stack.from = format!("({}", last.entry);
            }
            stack.more = portion.more && !portion.letters.is_empty();
            for raw in portion.letters {
                if wish.fits(&self.read("letters", bot_of(&raw))?, &raw.reason) {
                    let id = LetterId::new(stack.shard, raw.entry);
                    stack.letters.push_back((id, raw.bytes));
                }
            }
        }
        Ok(())
    }

    /// These letters, as far as they still exist.
    pub(super) async fn letters_by_id(
        &self,
        letters: &[(LetterId, usize)],
        part: Part,
    ) -> Result<Vec<(LetterId, RawLetter)>, RedisError> {
        if letters.is_empty() {
            return Ok(Vec::new());
        }
        let entries: Vec<String> = letters.iter().map(|(id, _)| id.entry.to_string()).collect();
        let reads: Vec<Letters<'_>> = letters
            .iter()
            .zip(&entries)
            .map(|((id, _), entry)| Letters {
                keys: self.keys(id.shard),
                newest_first: true,
                from: entry,
                until: entry,
                limit: 1,
                bytes: READ_BYTES,
                part,
            })
            .collect();
        let mut found = Vec::with_capacity(letters.len());
        for ((id, _), portion) in letters.iter().zip(self.link().call_all(&reads).await?) {
            found.extend(portion?.letters.pop().map(|raw| (*id, raw)));
        }
        Ok(found)
    }

    /// The ids and bots of letters of a shard, oldest first: the next portion after `from`, or
    /// `None` at the end.
    pub(super) async fn oldest_letters(
        &self,
        shard: Shard,
        from: &str,
        until: &str,
        limit: usize,
    ) -> Result<Option<Vec<(BotId, LetterId)>>, RedisError> {
        let read = Letters {
            keys: self.keys(shard),
            newest_first: false,
            from,
            until,
            limit,
            bytes: READ_BYTES,
            part: Part::Start(0),
        };
        let portion = self.link().call(&read).await?;
        if portion.letters.is_empty() {
            return Ok(None);
        }
        let of = |raw: RawLetter| -> Result<_, RedisError> {
            let bot = self.read("letters", bot_of(&raw))?;
            Ok((bot, LetterId::new(shard, raw.entry)))
        };
        portion.letters.into_iter().map(of).collect::<Result<_, _>>().map(Some)
    }
}

/// Letters that are read with one command: about [`PORTION_BYTES`].
fn portions(letters: &[(LetterId, usize)]) -> impl Iterator<Item = &[(LetterId, usize)]> {
    let mut rest = letters;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fit = rest.iter().take_while(|(_, more)| {
            bytes += more;
            bytes <= PORTION_BYTES
        });
        let (portion, left) = rest.split_at(fit.count().clamp(1, PORTION).min(rest.len()));
        rest = left;
        (!portion.is_empty()).then_some(portion)
    })
}

fn bot_of(raw: &RawLetter) -> Result<BotId, ReplyError> {
    BotId::parse(&raw.bot).map_err(|_| ReplyError::unexpected("a bot id", &raw.bot))
}

pub(super) fn decode(id: LetterId, raw: RawLetter) -> Result<DeadLetter, ReplyError> {
    let bot = bot_of(&raw)?;
    let event = Event::decode(&raw.record, &bot).ok().map(|(_, event)| event);
    let RawLetter { reason, attempts, time_ms, .. } = raw;
    Ok(DeadLetter { id, bot, reason, attempts, time_ms, event })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_portion_has_about_a_mebibyte_or_one_letter() {
        let of = |sizes: &[usize]| {
            let id: LetterId = "0.1-0".parse().unwrap();
            let letters: Vec<_> = sizes.iter().map(|bytes| (id, *bytes)).collect();
            portions(&letters).map(<[_]>::len).collect::<Vec<_>>()
        };
        assert_eq!(of(&[]), [0; 0]);
        assert_eq!(of(&[5 << 20, 1, 1 << 20, 1 << 19, 1 << 19]), [1, 1, 1, 2]);
        assert_eq!(of(&[1; 120]), [50, 50, 20]);
    }
}
