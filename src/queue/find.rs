//! Finds one event of a bot by its id: in its queue, among its delayed events, its dead letters and its
//! attempts. Each search is bounded.

use redis::{Pipeline, Value};
use tokio::time::Instant;

use super::{LetterOfBot, Queue, Wish, delayed_bot};
use crate::event::{Event, Glimpse};
use crate::history::{self, Attempt};
use crate::id::{BotId, Lane, Sequence};
use crate::redis::scripts::{Part, Peek};
use crate::redis::{RedisError, Reply, ReplyError, parse_score};

/// Number of events or letters per read.
const PAGE: usize = 500;
/// Bytes of the events that a read of a queue looks at. Redis does nothing else meanwhile.
const PAGE_BYTES: usize = 4 << 20;
/// Number of delayed events per read: they are read whole, and may be large.
const DELAYED_PAGE: usize = 16;
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
    ) -> Result<Option<BotId>, RedisError> {
        for keys in self.shards().iter() {
            if Instant::now() > deadline {
                break;
            }
            let [stream, failed, ..] = &keys.history;
            let mut pipe = Pipeline::with_capacity(2);
            pipe.cmd("XRANGE").arg(stream).arg("-").arg("+");
            pipe.cmd("HGETALL").arg(failed);
            let mut answers = self.link().run_checked("XRANGE", &pipe).await?.into_iter();
            let (portions, failures) = (answers.next(), answers.next());
            let portions = self.read("XRANGE", Reply::new(portions.unwrap_or(Value::Nil)))?;
            if let Some(bot) = self.read("XRANGE", in_portions(portions, id))? {
                return Ok(Some(bot));
            }
            let failures = self.read("HGETALL", pairs(failures.unwrap_or(Value::Nil)))?;
            let concerns = |packed: &[u8]| {
                history::read_failures(packed).iter().any(|attempt| attempt.concerns(id))
            };
            if let Some((bot, _)) = failures.iter().find(|(_, packed)| concerns(packed)) {
                return Ok(BotId::parse(&String::from_utf8_lossy(bot)).ok());
            }
        }
        Ok(None)
    }

    /// The bot of the dead letter of an event, among the newest letters of all bots.
    pub(crate) async fn bot_of_letter(
        &self,
        id: &str,
        deadline: Instant,
    ) -> Result<Option<BotId>, RedisError> {
        let mut before = None;
        while Instant::now() < deadline {
            let page = self.glimpse_dead_letters(None, &|_| true, before, PAGE).await?;
            let is_it = |letter: &LetterOfBot| letter.event.as_deref() == Some(id);
            before = page.next;
            if let Some((bot, _)) = page.letters.into_iter().find(|(_, letter)| is_it(letter)) {
                return Ok(Some(bot));
            }
            if before.is_none() {
                break;
            }
        }
        Ok(None)
    }
}

/// The bot of an attempt at an event in entries of completed slices.
fn in_portions(mut entries: Reply, id: &str) -> Result<Option<BotId>, ReplyError> {
    while let Some(entry) = entries.next() {
        let mut entry = Reply::new(entry)?;
        entry.next();
        let mut fields = Reply::new(entry.next().unwrap_or(Value::Nil))?;
        fields.next();
        let portion = fields.bytes()?.unwrap_or_default();
        if let Some(bot) = history::bot_of(&portion, id) {
            return Ok(BotId::parse(&bot).ok());
        }
    }
    Ok(None)
}

/// The name and the value of a field of a hash.
type Field = (Vec<u8>, Vec<u8>);

/// The fields of a hash.
fn pairs(hash: Value) -> Result<Vec<Field>, ReplyError> {
    let flat = match hash {
        Value::Map(pairs) => pairs.into_iter().flat_map(|(field, value)| [field, value]).collect(),
        Value::Array(flat) => flat,
        _ => Vec::new(),
    };
    let mut reply = Reply::new(Value::Array(flat))?;
    let mut found = Vec::new();
    while reply.len() > 1 {
        found.push((reply.bytes()?.unwrap_or_default(), reply.bytes()?.unwrap_or_default()));
    }
    Ok(found)
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
