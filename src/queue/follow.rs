//! Follows the attempts at the events of a pipeline as they end: see [`crate::history`]. Each look
//! costs one round trip if nothing is new, and each read is bounded.
//!
//! Completed slices are read from the stream of each shard, after the last entry that was seen. A
//! failure is appended to those of its bot, so a bot whose last failure is new is read whole; the
//! attempt that was seen last tells which ones are new.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use redis::{Pipeline, Value};
use serde::Serialize;

use super::Queue;
use crate::history::{Attempt, read_failures, read_whole_portion};
use crate::id::BotId;
use crate::redis::{RedisError, Reply, ReplyError, parse_score};

/// Number of entries of a stream per read.
const PAGE: usize = 32;
/// Maximum number of reads of a stream for the last attempts of single bots.
const PAGES: usize = 64;
/// Number of bots with failures per read.
const BOTS: usize = 32;
/// Maximum number of bots of a shard whose new failures are read in one look. The others are left out.
const FAILING_MAX: usize = 512;
/// Number of shards whose last attempts are read by one call.
const SHARDS: usize = 8;
/// Number of bots whose last failure is remembered, per shard.
const MARKS: usize = 4_096;
/// Failures are written with the clocks of several machines, and up to this time late, ms.
const LATE_MS: u64 = 5_000;

/// An attempt with its bot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Outcome {
    pub(crate) bot: BotId,
    #[serde(flatten)]
    pub(crate) attempt: Attempt,
}

/// What ended since the last look.
#[derive(Debug, Default)]
pub(crate) struct News {
    /// By the time of their end.
    pub(crate) outcomes: Vec<Outcome>,
    /// There is more to read immediately.
    pub(crate) more: bool,
    /// Some attempts were no longer kept when they were to be read, or were too many.
    pub(crate) gap: bool,
}

/// Which attempts are wanted.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wanted {
    /// Only of these bots; empty: of all.
    pub(crate) bots: BTreeSet<BotId>,
    /// Only those that failed.
    pub(crate) failing: bool,
}

impl Wanted {
    fn takes(&self, bot: &BotId) -> bool {
        self.bots.is_empty() || self.bots.contains(bot)
    }
}

/// The attempt of a bot that was seen last: its start, duration, first event and number.
type Mark = (u64, Option<u64>, u64, u32);

fn mark(attempt: &Attempt) -> Mark {
    (attempt.time_ms, attempt.duration_us, attempt.first_sequence, attempt.attempt)
}

/// What was seen of a shard.
#[derive(Debug, Default)]
struct Seen {
    /// The last entry of the stream; `None`: the stream was empty.
    entry: Option<String>,
    /// The time of the last failure, ms by the clock of the process that wrote it.
    failed_ms: u64,
    /// Failures that ended before are not new.
    since_ms: u64,
    /// The time of the last failure of a bot, and that failure.
    marks: HashMap<BotId, (i64, Option<Mark>)>,
}

/// Follows the attempts at the events of one pipeline.
#[derive(Debug)]
pub(crate) struct Follower {
    queue: Queue,
    wanted: Wanted,
    /// What was seen of each shard, by its place.
    shards: BTreeMap<usize, Seen>,
}

impl Follower {
    /// Starts at the end of what is kept. Returns the last attempts too, at most `last`, by the time of
    /// their end.
    pub(crate) async fn start(
        queue: Queue,
        wanted: Wanted,
        last: usize,
    ) -> Result<(Self, Vec<Outcome>), RedisError> {
        let places: BTreeSet<usize> = if wanted.bots.is_empty() {
            (0..queue.shards().len()).collect()
        } else {
            wanted.bots.iter().map(|bot| queue.shard_of(bot).index()).collect()
        };
        let places: Vec<usize> = places.into_iter().collect();
        let mut follower = Self { queue, wanted, shards: BTreeMap::new() };
        let mut outcomes = Vec::new();
        for places in places.chunks(SHARDS) {
            outcomes.extend(follower.look_back(places, last).await?);
            newest(&mut outcomes, last);
        }
        Ok((follower, outcomes))
    }

    pub(crate) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// The last attempts in these shards. Notes what was seen of them.
    async fn look_back(
        &mut self,
        places: &[usize],
        last: usize,
    ) -> Result<Vec<Outcome>, RedisError> {
        let page = if self.wanted.bots.is_empty() { last.max(1) } else { PAGE };
        let mut pipe = Pipeline::with_capacity(2 * places.len());
        for &place in places {
            let [stream, _, failing, _] = &self.queue.shards()[place].history;
            if self.wanted.bots.is_empty() {
                pipe.cmd("ZRANGE").arg(failing).arg(0).arg(FAILING_MAX.max(last) - 1);
                pipe.arg("REV").arg("WITHSCORES");
            } else {
                self.scores_of_wanted(place, &mut pipe);
            }
            pipe.cmd("XREVRANGE").arg(stream).arg("+").arg("-").arg("COUNT").arg(page);
        }
        let mut answers = self.queue.link().run_checked("XREVRANGE", &pipe).await?.into_iter();
        let mut outcomes = Vec::new();
        for &place in places {
            let mut scored = self.scored(place, answers.next())?;
            let entries = self.read(portions(answers.next()))?;
            let failed_ms = scored.iter().map(|(_, score)| score.unsigned_abs()).max();
            let failed_ms = failed_ms.unwrap_or_default();
            let mut seen = Seen {
                entry: entries.first().map(|(id, _)| id.clone()),
                failed_ms,
                since_ms: failed_ms.saturating_sub(LATE_MS),
                marks: HashMap::new(),
            };
            // Those of the last seconds too, so that the next look does not take them for new ones.
            let mut at = 0;
            scored.retain(|(_, score)| {
                at += 1;
                at <= last || !self.wanted.bots.is_empty() || score.unsigned_abs() >= seen.since_ms
            });
            self.failures(place, &mut seen, scored, true, &mut outcomes).await?;
            if last > 0 && !self.wanted.failing {
                self.completed(place, entries, last, &mut outcomes).await?;
            }
            newest(&mut outcomes, last);
            self.shards.insert(place, seen);
        }
        Ok(outcomes)
    }

    /// Adds the last completed slices of a shard. `entries` are its last ones, the newest first.
    async fn completed(
        &self,
        place: usize,
        mut entries: Vec<(String, Vec<u8>)>,
        last: usize,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<(), RedisError> {
        let before = outcomes.len();
        for _ in 0..PAGES {
            for (_, portion) in &entries {
                outcomes.extend(self.of_portion(portion));
            }
            // Without a filter, each entry has an attempt that is wanted.
            let enough = self.wanted.bots.is_empty() || outcomes.len() - before >= last;
            let Some((id, _)) = entries.last().filter(|_| !enough) else { break };
            let [stream, ..] = &self.queue.shards()[place].history;
            let mut page = redis::cmd("XREVRANGE");
            page.arg(stream).arg(format!("({id}")).arg("-").arg("COUNT").arg(PAGE);
            entries =
                self.read(portions(Some(self.queue.link().command("XREVRANGE", page).await?)))?;
        }
        Ok(())
    }

    fn wanted_of(&self, place: usize) -> impl Iterator<Item = &BotId> {
        let of_shard = move |bot: &&BotId| self.queue.shard_of(bot).index() == place;
        self.wanted.bots.iter().filter(of_shard)
    }

    /// Asks when the wanted bots of a shard failed last.
    fn scores_of_wanted(&self, place: usize, pipe: &mut Pipeline) {
        let [_, _, failing, _] = &self.queue.shards()[place].history;
        pipe.cmd("ZMSCORE").arg(failing);
        for bot in self.wanted_of(place) {
            pipe.arg(bot.as_str());
        }
    }

    /// Bots with the times of their last failures.
    fn scored(&self, place: usize, value: Option<Value>) -> Result<Vec<(BotId, i64)>, RedisError> {
        if self.wanted.bots.is_empty() {
            return self.read(scores(value));
        }
        let mut times = self.read(Reply::new(value.unwrap_or(Value::Nil)))?;
        let pairs = self.wanted_of(place).map(|bot| Some((bot.clone(), score(times.next())?)));
        Ok(pairs.collect::<Vec<_>>().into_iter().flatten().collect())
    }

    /// What ended since the last look.
    pub(crate) async fn look(&mut self) -> Result<News, RedisError> {
        let mut pipe = Pipeline::with_capacity(2 * self.shards.len());
        for (&place, seen) in &self.shards {
            let [stream, _, failing, _] = &self.queue.shards()[place].history;
            if self.wanted.bots.is_empty() {
                let since = seen.failed_ms.saturating_sub(LATE_MS);
                pipe.cmd("ZRANGE").arg(failing).arg("+inf").arg(since).arg("BYSCORE").arg("REV");
                pipe.arg("LIMIT").arg(0).arg(FAILING_MAX).arg("WITHSCORES");
            } else {
                self.scores_of_wanted(place, &mut pipe);
            }
            if !self.wanted.failing {
                // With the entry that was seen last: if it is gone, others may be gone unseen.
                let start = seen.entry.as_deref().unwrap_or("-");
                pipe.cmd("XRANGE").arg(stream).arg(start).arg("+").arg("COUNT").arg(PAGE);
            }
        }
        let mut answers = self.queue.link().run_checked("XRANGE", &pipe).await?.into_iter();
        let mut news = News::default();
        let mut shards = std::mem::take(&mut self.shards);
        let read = self.take_in(&mut shards, &mut answers, &mut news).await;
        self.shards = shards;
        match read {
            // What was read before the error is told now, and the next look meets the error again.
            Err(_) if !news.outcomes.is_empty() => news.more = true,
            read => read?,
        }
        news.outcomes.sort_by_key(|outcome| outcome.attempt.end_ms());
        Ok(news)
    }

    async fn take_in(
        &self,
        shards: &mut BTreeMap<usize, Seen>,
        answers: &mut (impl Iterator<Item = Value> + Send),
        news: &mut News,
    ) -> Result<(), RedisError> {
        for (&place, seen) in shards {
            let scored = self.scored(place, answers.next())?;
            news.gap |= scored.len() == FAILING_MAX;
            self.failures(place, seen, scored, false, &mut news.outcomes).await?;
            if self.wanted.failing {
                continue;
            }
            let entries = self.read(portions(answers.next()))?;
            news.more |= entries.len() == PAGE;
            let known = entries.first().is_some_and(|(id, _)| Some(id) == seen.entry.as_ref());
            news.gap |= !known && seen.entry.is_some() && !entries.is_empty();
            for (id, portion) in entries.into_iter().skip(usize::from(known)) {
                news.outcomes.extend(self.of_portion(&portion));
                seen.entry = Some(id);
            }
        }
        Ok(())
    }

    fn of_portion(&self, portion: &[u8]) -> impl Iterator<Item = Outcome> {
        let wanted = |(bot, _): &(BotId, Attempt)| self.wanted.takes(bot);
        let all = read_whole_portion(portion).into_iter().filter(wanted);
        all.map(|(bot, attempt)| Outcome { bot, attempt })
    }

    /// Adds the new failures of these bots of a shard; `all`: those that are kept.
    async fn failures(
        &self,
        place: usize,
        seen: &mut Seen,
        mut scored: Vec<(BotId, i64)>,
        all: bool,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<(), RedisError> {
        let is_new = |(bot, score): &(BotId, i64)| {
            self.wanted.takes(bot) && seen.marks.get(bot).is_none_or(|(known, _)| known != score)
        };
        let latest = scored.iter().map(|(_, score)| score.unsigned_abs()).max();
        scored.retain(is_new);
        for scored in scored.chunks(BOTS) {
            for ((bot, score), packed) in scored.iter().zip(self.packed(place, scored).await?) {
                let failures = read_failures(&packed);
                let last = seen.marks.get(bot).and_then(|(_, last)| *last);
                let known = last
                    .and_then(|last| failures.iter().rposition(|failure| mark(failure) == last));
                let first_look = last.is_none();
                seen.marks.insert(bot.clone(), (*score, failures.last().map(mark)));
                let is_new =
                    |failure: &Attempt| all || !first_look || failure.end_ms() >= seen.since_ms;
                let new = failures.into_iter().skip(known.map_or(0, |known| known + 1));
                let new = new.filter(is_new);
                outcomes.extend(new.map(|attempt| Outcome { bot: bot.clone(), attempt }));
            }
        }
        seen.failed_ms = seen.failed_ms.max(latest.unwrap_or_default());
        if seen.marks.len() > MARKS {
            // When a forgotten bot fails again, only what ended since then is new.
            seen.since_ms = seen.failed_ms.saturating_sub(LATE_MS);
            let since_ms = seen.since_ms;
            seen.marks.retain(|_, (score, _)| score.unsigned_abs() >= since_ms);
        }
        Ok(())
    }

    /// The stored failures of these bots of a shard.
    async fn packed(
        &self,
        place: usize,
        bots: &[(BotId, i64)],
    ) -> Result<Vec<Vec<u8>>, RedisError> {
        let [_, failed, ..] = &self.queue.shards()[place].history;
        let mut command = redis::cmd("HMGET");
        command.arg(failed);
        for (bot, _) in bots {
            command.arg(bot.as_str());
        }
        let values = self.queue.link().command("HMGET", command).await?;
        let mut reply = self.queue.read("HMGET", Reply::new(values))?;
        let mut packed = Vec::with_capacity(bots.len());
        while reply.len() > 0 {
            packed.push(self.queue.read("HMGET", reply.bytes())?.unwrap_or_default());
        }
        Ok(packed)
    }

    fn read<T>(&self, result: Result<T, ReplyError>) -> Result<T, RedisError> {
        self.queue.read("XRANGE", result)
    }
}

/// Sorts outcomes by the time of their end, and keeps the newest ones.
fn newest(outcomes: &mut Vec<Outcome>, last: usize) {
    outcomes.sort_by_key(|outcome| outcome.attempt.end_ms());
    outcomes.drain(..outcomes.len().saturating_sub(last));
}

/// Bots with their scores. A name that is no bot is left out.
fn scores(value: Option<Value>) -> Result<Vec<(BotId, i64)>, ReplyError> {
    let mut found = Vec::new();
    let mut reply = Reply::new(value.unwrap_or(Value::Nil))?;
    while let Some(next) = reply.next() {
        // RESP3 answers pairs, RESP2 a flat list.
        let (bot, score) = match next {
            pair @ Value::Array(_) => {
                let mut pair = Reply::new(pair)?;
                (pair.text()?, score(pair.next()))
            }
            name => (Reply::single(name)?.text()?, score(reply.next())),
        };
        if let (Ok(bot), Some(score)) = (BotId::parse(&bot), score) {
            found.push((bot, score));
        }
    }
    Ok(found)
}

fn score(value: Option<Value>) -> Option<i64> {
    match value? {
        #[expect(clippy::cast_possible_truncation, reason = "scores are whole and below 2^53")]
        Value::Double(score) => Some(score as i64),
        value => parse_score(&Reply::single(value).ok()?.text().ok()?),
    }
}

/// The ids of entries of a stream, with their portions.
fn portions(value: Option<Value>) -> Result<Vec<(String, Vec<u8>)>, ReplyError> {
    let mut entries = Reply::new(value.unwrap_or(Value::Nil))?;
    let mut found = Vec::with_capacity(entries.len());
    while let Some(entry) = entries.next() {
        let mut entry = Reply::new(entry)?;
        let id = entry.text()?;
        let mut fields = Reply::new(entry.next().unwrap_or(Value::Nil))?;
        fields.next();
        found.push((id, fields.bytes()?.unwrap_or_default()));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn outcome(start_ms: u64, duration_us: u64) -> Outcome {
        let attempt = serde_json::json!({
            "time_ms": start_ms, "duration_us": duration_us, "result": "done", "attempt": 1,
            "lost": 0, "slices": 1, "events": 1, "settled": 1, "first_id": "e", "last_id": "e",
            "first_sequence": 1, "last_sequence": 1, "process": "host 1",
        });
        let attempt = serde_json::from_value(attempt).unwrap();
        Outcome { bot: BotId::parse("b").unwrap(), attempt }
    }

    #[test]
    fn the_newest_outcomes_are_those_that_ended_last() {
        let mut outcomes = vec![outcome(5, 9_000), outcome(7, 0), outcome(6, 5_000)];
        newest(&mut outcomes, 2);
        let starts: Vec<u64> = outcomes.iter().map(|outcome| outcome.attempt.time_ms).collect();
        assert_eq!(starts, [6, 5]);
        newest(&mut outcomes, 9);
        assert_eq!(outcomes.len(), 2);
    }

    #[test]
    fn scores_are_read_as_pairs_and_as_a_flat_list() {
        let expected = [("a", 7), ("b", 8)].map(|(bot, score)| (BotId::parse(bot).unwrap(), score));
        let pair = |bot, score| Value::Array(vec![text(bot), Value::Double(score)]);
        let pairs = Value::Array(vec![pair("a", 7.0), pair("", 1.0), pair("b", 8.0)]);
        assert_eq!(scores(Some(pairs)).unwrap(), expected);
        let flat = ["a", "7", "", "1", "b", "8"].map(text).to_vec();
        assert_eq!(scores(Some(Value::Array(flat))).unwrap(), expected);
        assert_eq!(scores(None).unwrap(), []);
    }

    #[test]
    fn entries_of_a_stream_have_one_field() {
        let entry = Value::Array(vec![text("1-0"), Value::Array(vec![text("p"), text("xyz")])]);
        let found = portions(Some(Value::Array(vec![entry]))).unwrap();
        assert_eq!(found, [("1-0".to_owned(), b"xyz".to_vec())]);
        assert_eq!(portions(None).unwrap(), []);
    }

    #[test]
    fn without_named_bots_all_are_wanted() {
        let bot = |name| BotId::parse(name).unwrap();
        let wanted = Wanted { bots: BTreeSet::from([bot("a")]), failing: false };
        assert!(wanted.takes(&bot("a")) && !wanted.takes(&bot("b")));
        assert!(Wanted::default().takes(&bot("b")));
    }
}
