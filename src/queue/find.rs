//! Finds one event of a bot by its id: in its queue, among its delayed events, its dead letters and its
//! attempts. Each search is bounded.

use std::ops::RangeInclusive;

use redis::{Pipeline, Value};
use tokio::time::Instant;

use super::{LetterOfBot, Queue, Wish, delayed_bot};
use crate::event::{Event, Glimpse};
use crate::history::{self, Attempt};
use crate::id::{BotId, Lane, Sequence};
use crate::redis::scripts::{Part, Peek};
use crate::redis::{RedisError, Reply, ReplyError, pages, parse_score};

/// Number of events or letters per read.
const PAGE: usize = 500;
/// Bytes of the events that a read of a queue looks at. Redis does nothing else meanwhile.
const PAGE_BYTES: usize = 4 << 20;
/// Number of delayed events per read: they are read whole, and may be large.
const DELAYED_PAGE: usize = 16;
/// Number of entries of completed slices per read, which grows: each has up to 64 attempts.
const DONE_PAGE: RangeInclusive<usize> = 64..=256;
/// Maximum number of shards whose attempts are read together, so that a distant Redis is asked less often.
const TOGETHER: usize = 16;
/// Maximum number of events of a queue, or delayed events of a shard, that a search reads.
const EVENTS_MAX: u64 = 20_000;
/// Maximum number of dead letters of a bot that a search reads.
const LETTERS_MAX: usize = 5_000;
/// Maximum number of attempts of a bot that a search reads.
const ATTEMPTS_MAX: usize = 10_000;

/// What a bounded search found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Search<T> {
    Found(T),
    /// It is not there.
    Absent,
    /// It is not among the first ones, and the others were not read.
    Unknown,
}

impl<T> Search<T> {
    pub(crate) fn found(self) -> Option<T> {
        if let Self::Found(found) = self { Some(found) } else { None }
    }

    pub(crate) fn is_complete(&self) -> bool {
        !matches!(self, Self::Unknown)
    }
}

impl Queue {
    /// The place of an event in the queue of its bot, or in a lane that is set aside, from 0.
    pub(crate) async fn place_of(
        &self,
        bot: &BotId,
        lane: Option<Lane>,
        id: &str,
        deadline: Instant,
    ) -> Result<Search<u64>, RedisError> {
        let (mut place, mut before) = (0, 0);
        while place < EVENTS_MAX && Instant::now() < deadline {
            let peek = Peek {
                keys: self.keys_of(bot),
                bot,
                lane,
                place,
                before,
                limit: PAGE,
                bytes: PAGE_BYTES,
                part: Part::Start(Glimpse::BYTES),
            };
            let peeked = self.link().call(&peek).await?;
            let is_it = |record: &Vec<u8>| Glimpse::read(record).is_some_and(|seen| seen.id == id);
            if let Some(at) = peeked.records.iter().position(is_it) {
                return Ok(Search::Found(place + at as u64));
            }
            let Some(next) = peeked.next else { return Ok(Search::Absent) };
            let last = peeked.records.last().and_then(|record| Event::sequence_of(record));
            (place, before) = (next, last.map_or(0, Sequence::get));
        }
        Ok(Search::Unknown)
    }

    /// When a delayed event of a bot is due, ms since 1970.
    pub(crate) async fn due_of(
        &self,
        bot: &BotId,
        id: &str,
        deadline: Instant,
    ) -> Result<Search<u64>, RedisError> {
        let keys = self.keys_of(bot);
        let (mut cursor, mut read) = ("0".to_owned(), 0);
        while read < EVENTS_MAX && Instant::now() < deadline {
            let mut scan = redis::cmd("HSCAN");
            scan.arg(&keys.later).arg(&cursor).arg("COUNT").arg(DELAYED_PAGE);
            let page = self.link().command("HSCAN", scan).await?;
            let mut page = self.read("HSCAN", Reply::new(page))?;
            cursor = self.read("HSCAN", page.text())?;
            let fields = page.next().unwrap_or(Value::Nil);
            let mut fields = self.read("HSCAN", Reply::new(fields))?;
            while fields.len() > 1 {
                let field = self.read("HSCAN", fields.bytes())?.unwrap_or_default();
                let stored = self.read("HSCAN", fields.bytes())?.unwrap_or_default();
                read += 1;
                if is_delayed(&stored, bot, id) {
                    let mut score = redis::cmd("ZSCORE");
                    score.arg(&keys.due).arg(field);
                    let score = self.link().command("ZSCORE", score).await?;
                    let score = self.read("ZSCORE", Reply::single(score))?.text();
                    let due = parse_score(&self.read("ZSCORE", score)?);
                    // Another process moved it meanwhile.
                    let Some(due) = due else { return Ok(Search::Absent) };
                    return Ok(Search::Found(u64::try_from(due).unwrap_or_default()));
                }
            }
            if cursor == "0" {
                return Ok(Search::Absent);
            }
        }
        Ok(Search::Unknown)
    }

    /// The dead letter of an event.
    pub(crate) async fn letter_of(
        &self,
        bot: &BotId,
        id: &str,
        deadline: Instant,
    ) -> Result<Search<LetterOfBot>, RedisError> {
        let (mut before, mut read) = (None, 0);
        while read < LETTERS_MAX {
            let wish = Wish { bot: Some(bot), wanted: &|_| true, reason: "" };
            let page = self.search_dead_letters(wish, before, PAGE, Some(deadline)).await?;
            read += page.letters.len();
            before = page.next;
            let is_it = |letter: &LetterOfBot| letter.event.as_deref() == Some(id);
            if let Some((_, letter)) = page.letters.into_iter().find(|(_, letter)| is_it(letter)) {
                return Ok(Search::Found(letter));
            }
            if page.cut {
                break;
            }
            if before.is_none() {
                return Ok(Search::Absent);
            }
        }
        Ok(Search::Unknown)
    }

    /// The attempts at an event that are kept, the newest first.
    pub(crate) async fn attempts_at(
        &self,
        bot: &BotId,
        id: &str,
    ) -> Result<Vec<Attempt>, RedisError> {
        let mut attempts = self.attempts(bot, ATTEMPTS_MAX).await?;
        attempts.retain(|attempt| attempt.concerns(id));
        Ok(attempts)
    }

    /// The bot of an attempt at an event, among the attempts of all bots that are kept.
    pub(crate) async fn bot_of_attempt(
        &self,
        id: &str,
        deadline: Instant,
    ) -> Result<Search<BotId>, RedisError> {
        let all = self.shards().iter().map(|keys| (&keys.history, Unread::all()));
        let (mut shards, mut together) = (all.collect::<Vec<_>>(), TOGETHER);
        while !shards.is_empty() {
            if Instant::now() >= deadline {
                return Ok(Search::Unknown);
            }
            let first = together.min(shards.len());
            let mut pipe = Pipeline::with_capacity(2 * first);
            for (keys, unread) in &shards[..first] {
                unread.ask(keys, &mut pipe);
            }
            let answers = self.link().run_checked("XREVRANGE", &pipe).await?;
            let bytes: u64 = answers.iter().map(pages::bytes).sum();
            let mut answers = answers.into_iter();
            for (_, unread) in &mut shards[..first] {
                if let Some(bot) = self.read("XREVRANGE", unread.search(&mut answers, id))? {
                    return Ok(Search::Found(bot));
                }
            }
            shards.retain(|(_, unread)| unread.is_left());
            together = pages::next(first, bytes).min(TOGETHER);
        }
        Ok(Search::Absent)
    }

    /// The bot of the dead letter of an event, among the newest letters of all bots.
    pub(crate) async fn bot_of_letter(
        &self,
        id: &str,
        deadline: Instant,
    ) -> Result<Search<BotId>, RedisError> {
        let (mut before, mut limit) = (None, PAGE);
        loop {
            let wish = Wish { bot: None, wanted: &|_| true, reason: "" };
            let page = self.search_dead_letters(wish, before, limit, Some(deadline)).await?;
            let is_it = |letter: &LetterOfBot| letter.event.as_deref() == Some(id);
            before = page.next;
            if let Some((bot, _)) = page.letters.into_iter().find(|(_, letter)| is_it(letter)) {
                return Ok(Search::Found(bot));
            }
            if page.cut {
                return Ok(Search::Unknown);
            }
            if before.is_none() {
                return Ok(Search::Absent);
            }
            // Each page looks at all shards again.
            limit = (2 * limit).min(LETTERS_MAX);
        }
    }
}

/// What is not read yet of the attempts of a shard. They may have many MB, and Redis does nothing else
/// during a read, so a page is read at a time.
struct Unread {
    /// The end of the next page of completed slices. `None`: all are read.
    done: Option<String>,
    /// Number of entries of completed slices that were read.
    read: usize,
    /// The cursor of the next page of failures. `None`: all are read.
    failed: Option<String>,
    /// Number of bots on that page: the failures of one may have 500 KiB.
    bots: usize,
}

impl Unread {
    fn all() -> Self {
        let (done, failed) = (Some("+".to_owned()), Some("0".to_owned()));
        Self { done, read: 0, failed, bots: pages::FIRST }
    }

    /// Whether there is a next page.
    fn is_left(&self) -> bool {
        self.done.is_some() || self.failed.is_some()
    }

    /// Number of entries of the next page of completed slices: as many as were read before.
    fn entries(&self) -> usize {
        self.read.clamp(*DONE_PAGE.start(), *DONE_PAGE.end())
    }

    /// Asks for the next page of both.
    fn ask(&self, [stream, failed, ..]: &[String; 4], pipe: &mut Pipeline) {
        if let Some(end) = &self.done {
            pipe.cmd("XREVRANGE").arg(stream).arg(end).arg("-").arg("COUNT").arg(self.entries());
        }
        if let Some(cursor) = &self.failed {
            pipe.cmd("HSCAN").arg(failed).arg(cursor).arg("COUNT").arg(self.bots);
        }
    }

    /// The bot of an attempt at the event with this id, in the answers to [`Self::ask`].
    fn search(
        &mut self,
        answers: &mut impl Iterator<Item = Value>,
        id: &str,
    ) -> Result<Option<BotId>, ReplyError> {
        let mut answer = || answers.next().unwrap_or(Value::Nil);
        if self.done.is_some() {
            let mut entries = Reply::new(answer())?;
            let (is_full, mut last) = (entries.len() == self.entries(), String::new());
            self.read += entries.len();
            while let Some(entry) = entries.next() {
                let mut entry = Reply::new(entry)?;
                last = entry.text()?;
                let mut fields = Reply::new(entry.next().unwrap_or(Value::Nil))?;
                fields.next();
                let portion = fields.bytes()?.unwrap_or_default();
                if let Some(bot) = history::bot_of(&portion, id)
                    && let Ok(bot) = BotId::parse(&bot)
                {
                    return Ok(Some(bot));
                }
            }
            self.done = is_full.then(|| format!("({last}"));
        }
        if self.failed.is_some() {
            let page = answer();
            self.bots = pages::next(self.bots, pages::bytes(&page));
            let mut page = Reply::new(page)?;
            let cursor = page.text()?;
            let mut fields = Reply::new(page.next().unwrap_or(Value::Nil))?;
            while fields.len() > 1 {
                let bot = fields.bytes()?.unwrap_or_default();
                let packed = fields.bytes()?.unwrap_or_default();
                let failures = history::read_failures(&packed);
                if failures.iter().any(|attempt| attempt.concerns(id))
                    && let Ok(bot) = BotId::parse(&String::from_utf8_lossy(&bot))
                {
                    return Ok(Some(bot));
                }
            }
            self.failed = (cursor != "0").then_some(cursor);
        }
        Ok(None)
    }
}

/// Whether a delayed event, as it is stored, is the event of the bot with this id.
fn is_delayed(stored: &[u8], bot: &BotId, id: &str) -> bool {
    if delayed_bot(stored).as_ref() != Some(bot) {
        return false;
    }
    let colon = stored.iter().position(|&byte| byte == b':').unwrap_or_default();
    let encoded = stored.get(colon + 1 + bot.as_str().len()..).unwrap_or_default();
    let record = Event::record(0, encoded);
    Glimpse::read(&record).is_some_and(|seen| seen.id == id)
}

#[cfg(test)]
mod tests {
    use redis::Arg;

    use super::*;

    /// The commands that read the next pages, as text.
    fn asked(unread: &Unread) -> Vec<String> {
        let keys = ["done", "failed", "", ""].map(str::to_owned);
        let mut pipe = Pipeline::new();
        unread.ask(&keys, &mut pipe);
        pipe.cmd_iter().map(words).collect()
    }

    fn words(command: &redis::Cmd) -> String {
        let words = command.args_iter().map(|word| match word {
            Arg::Simple(word) => String::from_utf8_lossy(word).into_owned(),
            _ => String::new(),
        });
        words.collect::<Vec<_>>().join(" ")
    }

    fn text(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    /// Entries with these numbers, the last one first, which have no attempt.
    fn entries(numbers: std::ops::Range<usize>) -> Value {
        let entry = |n: usize| {
            let fields = Value::Array(vec![text("b"), text("damaged")]);
            Value::Array(vec![text(&format!("{n}-0")), fields])
        };
        Value::Array(numbers.rev().map(entry).collect())
    }

    fn failures(cursor: &str) -> Value {
        Value::Array(vec![text(cursor), Value::Array(vec![text("a"), text("damaged")])])
    }

    #[test]
    fn the_attempts_of_a_shard_are_read_a_page_at_a_time_to_their_end() {
        let mut unread = Unread::all();
        let read = |unread: &mut Unread, answers: Vec<Value>| {
            assert_eq!(unread.search(&mut answers.into_iter(), "e"), Ok(None));
        };
        assert_eq!(asked(&unread), ["XREVRANGE done + - COUNT 64", "HSCAN failed 0 COUNT 16"]);
        read(&mut unread, vec![entries(7..71), failures("9")]);
        assert_eq!(asked(&unread), ["XREVRANGE done (7-0 - COUNT 64", "HSCAN failed 9 COUNT 32"]);
        read(&mut unread, vec![entries(0..7), failures("5")]);
        assert_eq!(asked(&unread), ["HSCAN failed 5 COUNT 64"]);
        assert!(unread.is_left());
        read(&mut unread, vec![failures("0")]);
        assert_eq!(asked(&unread), [""; 0]);
        assert!(!unread.is_left());
    }

    #[test]
    fn the_pages_of_a_shard_grow_so_that_its_end_is_soon_reached() {
        let (mut unread, mut pages, mut end) = (Unread::all(), Vec::new(), 100_000);
        for _ in 0..6 {
            let count = unread.entries();
            pages.push((count, unread.bots));
            let answers = vec![entries(end - count..end), failures("9")];
            assert_eq!(unread.search(&mut answers.into_iter(), "e"), Ok(None));
            end -= count;
        }
        assert_eq!(pages, [(64, 16), (64, 32), (128, 64), (256, 64), (256, 64), (256, 64)]);
    }
}
