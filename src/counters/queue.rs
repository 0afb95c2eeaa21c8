//! Calls the scripts that count views, for one bot.

use std::time::Duration;

use redis::{Pipeline, Value};

use super::scripts::{Counting, Import, IncrementIfExists, Replace, Taken, Upsert, Viewed, Views};
use super::view::{self, AdId, Calendar, Line};
use crate::clock::millis;
use crate::counters::metrics::CounterMetrics;
use crate::event::Event;
use crate::id::{BotId, Sequence};
use crate::ledger::{Account, Change, Ledger, Posting};
use crate::queue::Queue;
use crate::redis::{RedisError, Reply, ReplyError, ServerInfo};

/// A second view with the same idempotency key within this time counts nothing.
pub const IDEMPOTENCY_WINDOW: Duration = Duration::from_secs(3_600);

/// How long an import is remembered after its last line.
pub const IMPORT_WINDOW: Duration = Duration::from_secs(7 * 86_400);

/// The ledger of views: per ad, the number of queued views.
#[derive(Debug)]
pub struct ViewLedger {
    /// The calendar that decides on which day a view counts.
    calendar: Calendar,
    /// Maximum number of ads of a bot whose totals one generation caches.
    cached_ads: u64,
    metrics: CounterMetrics,
}

impl ViewLedger {
    /// A ledger that counts on the days of `calendar`.
    pub(crate) fn new(calendar: Calendar, cached_ads: u64) -> Self {
        Self { calendar, cached_ads, metrics: CounterMetrics::new() }
    }
}

impl Ledger for ViewLedger {
    fn enter(&self, event: &Event) -> (Event, Option<Posting>) {
        let (event, counts) = view::arrived(event, &self.calendar);
        (event, counts.map(|(ad, amount)| Posting { account: ad.account(), amount }))
    }

    fn enter_again(&self, event: &Event) -> (Event, Option<Posting>) {
        let (event, counts) = view::returned(event, &self.calendar);
        (event, counts.map(|(ad, amount)| Posting { account: ad.account(), amount }))
    }

    fn entry(&self, event: &Event) -> Option<(Account, Change)> {
        let record = view::read(event).ok()?;
        Some((record.ad.account(), record.deed.change()))
    }

    fn cached_accounts(&self) -> u64 {
        self.cached_ads
    }

    fn posted(&self, amount: u64) {
        self.metrics.views.increment(amount);
    }
}

/// Views of one ad to count.
#[derive(Debug, Clone, Copy)]
pub struct NewViews<'a> {
    /// The bot.
    pub bot: &'a BotId,
    /// The ad.
    pub ad: &'a AdId,
    /// The number of views: 1 to [`crate::counters::view::VIEWS_MAX`].
    pub n: u64,
    /// Their event, stamped with the day and serialised.
    pub event: &'a [u8],
    /// A second call with the same key for the bot and the ad counts nothing.
    pub key: Option<&'a str>,
}

/// The state of an ad's total in Redis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known {
    /// The total.
    Total(u64),
    /// The total is not cached. This number of views is queued, in addition to those in MongoDB;
    /// during a flush, some may be in both.
    Queued(u64),
    /// The total is being replaced and is not cached.
    Replaced,
}

/// The state of the totals of some ads of a bot in Redis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdLedger {
    /// In the requested order.
    pub known: Vec<Known>,
    /// The last completion. When it changes, the content of MongoDB has changed too.
    pub acked: String,
}

impl Queue {
    /// Counts views of an ad whose total is cached. For other ads it counts nothing, and returns
    /// that MongoDB must be asked.
    ///
    /// # Errors
    /// After [`RedisError::Unknown`] they may or may not be counted: only a call with the same key
    /// is safe.
    pub async fn increment_if_exists(&self, views: NewViews<'_>) -> Result<Viewed, RedisError> {
        let key = idempotency(&views);
        self.link().call(&IncrementIfExists(self.new_views(&views, key.as_deref()))).await
    }

    /// Counts views of an ad whose total was not cached. `stored` was read from MongoDB after
    /// [`Self::increment_if_exists`] returned `acked`; `None`: MongoDB cannot return it.
    ///
    /// # Errors
    /// Those of [`Self::increment_if_exists`].
    pub async fn upsert(
        &self,
        views: NewViews<'_>,
        acked: &str,
        stored: Option<(u64, Sequence)>,
    ) -> Result<Viewed, RedisError> {
        let key = idempotency(&views);
        let views = self.new_views(&views, key.as_deref());
        self.link().call(&Upsert { views, acked, stored }).await
    }

    /// Queues a replacement of the counters of an ad, and caches the new total if there is room.
    ///
    /// # Errors
    /// After [`RedisError::Unknown`] it may or may not be queued; the call can be repeated.
    pub async fn replace_counter(
        &self,
        bot: &BotId,
        ad: &AdId,
        total: u64,
        event: &Event,
    ) -> Result<Sequence, RedisError> {
        let event = event.encode();
        let replace = Replace { counting: self.counting(bot, ad), total, event: &event };
        self.link().call(&replace).await
    }

    /// Queues the replacements of consecutive lines of an import. Each line is accepted once and in
    /// order: a line that does not follow the last accepted one is refused.
    ///
    /// # Errors
    /// An outer error means that no line has an answer. An inner error concerns its line; the lines
    /// after it are not accepted. They can be sent again.
    pub async fn import_lines(
        &self,
        bot: &BotId,
        key: &str,
        lines: &[Line],
    ) -> Result<Vec<Result<Taken, RedisError>>, RedisError> {
        let key = import_key(bot, key);
        let event = |line: &Line| view::replacement(bot, &line.ad, &line.with).encode();
        let events: Vec<Vec<u8>> = lines.iter().map(event).collect();
        let calls: Vec<Import<'_>> = lines
            .iter()
            .zip(&events)
            .map(|(line, event)| Import {
                counting: self.counting(bot, &line.ad),
                total: line.with.total,
                event,
                key: &key,
                before: line.before,
                line: line.number,
                upto: line.upto,
                keep_ms: millis(IMPORT_WINDOW),
            })
            .collect();
        self.link().call_all(&calls).await
    }

    /// The last accepted line of an import; 0 for an unknown import.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn imported(&self, bot: &BotId, key: &str) -> Result<u64, RedisError> {
        let mut command = redis::cmd("GET");
        command.arg(self.keys_of(bot).idempotency(&import_key(bot, key)));
        let value = self.link().command("GET", command).await?;
        let line = Reply::single(value).and_then(|mut line| line.optional());
        line.map(|line| line.unwrap_or(0)).map_err(|error| self.link().misread("GET", error))
    }

    /// The number of queued replacements of a bot, and the highest share of its memory that a server
    /// uses, in percent.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn room(&self, bot: &BotId) -> Result<(u64, u64), RedisError> {
        let [unflushed, ..] = self.keys_of(bot).ledger(bot);
        let mut count = redis::cmd("HGET");
        count.arg(unflushed).arg("r");
        let waiting = self.link().command("HGET", count).await?;
        let waiting = Reply::single(waiting).and_then(|mut waiting| waiting.optional());
        let waiting = waiting.map_err(|error| self.link().misread("HGET", error))?.unwrap_or(0);
        let mut memory = redis::cmd("INFO");
        memory.arg("memory");
        let answers = self.link().ask_every("INFO", &memory).await?;
        let full = answers.into_iter().filter_map(|answer| {
            let info = ServerInfo::parse(&redis::from_redis_value::<String>(answer).ok()?);
            info.memory_used.saturating_mul(100).checked_div(info.memory_max)
        });
        Ok((waiting, full.max().unwrap_or(0)))
    }

    /// The state of the totals of some ads in Redis.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn book(&self, bot: &BotId, ads: &[AdId]) -> Result<AdLedger, RedisError> {
        let keys = self.keys_of(bot);
        let [unflushed, first, second, acked] = keys.ledger(bot);
        let mut pipe = Pipeline::with_capacity(5);
        // Other clients' scripts may run between these commands. The last completion comes first: if
        // one follows before the counts are read, `acked` no longer agrees with the queue, and the
        // caller reads again. Counts come before totals, so that the total of a replacement that is
        // queued in between is found.
        pipe.cmd("GET").arg(acked);
        pipe.cmd("HMGET").arg(unflushed);
        for ad in ads {
            pipe.arg(format!("v{ad}")).arg(format!("r{ad}"));
        }
        for total in [first, second] {
            pipe.cmd("HMGET").arg(total);
            for ad in ads {
                pipe.arg(ad.as_str());
            }
        }
        pipe.cmd("HGET").arg(keys.meta()).arg("run");
        let values = self.link().run_checked("HMGET", &pipe).await?;
        book(values, ads.len()).map_err(|source| self.link().misread("HMGET", source))
    }

    /// The last completion, and the sequence of the first queued event.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn progress(&self, bot: &BotId) -> Result<(String, Option<Sequence>), RedisError> {
        let keys = self.keys_of(bot);
        let [.., acked] = keys.ledger(bot);
        let mut pipe = Pipeline::with_capacity(2);
        pipe.cmd("LINDEX").arg(keys.queue(bot)).arg(0);
        pipe.cmd("GET").arg(acked);
        let mut values = self.link().run_checked("LINDEX", &pipe).await?.into_iter();
        let mut next = || Reply::single(values.next().unwrap_or(Value::Nil));
        let read = |mut next: Reply| next.bytes();
        let head = next().and_then(read).map_err(|error| self.link().misread("LINDEX", error))?;
        let acked = next().and_then(read).map_err(|error| self.link().misread("GET", error))?;
        let acked = String::from_utf8(acked.unwrap_or_default()).unwrap_or_default();
        Ok((acked, head.as_deref().and_then(Event::sequence_of)))
    }

    /// How long the first queued event of a bot has waited, by the clock of its Redis; zero if none is
    /// queued.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub async fn waited(&self, bot: &BotId) -> Result<Duration, RedisError> {
        let mut pipe = Pipeline::with_capacity(4);
        // A transaction goes to one server. Alone, TIME would ask every server of a cluster.
        pipe.cmd("MULTI");
        pipe.cmd("LINDEX").arg(self.keys_of(bot).queue(bot)).arg(0);
        pipe.cmd("TIME");
        pipe.cmd("EXEC");
        let done = self.link().run_checked("LINDEX", &pipe).await?.pop();
        waited(done.unwrap_or(Value::Nil)).map_err(|error| self.link().misread("LINDEX", error))
    }

    fn counting<'a>(&'a self, bot: &'a BotId, ad: &'a AdId) -> Counting<'a> {
        let cached_ads = self.ledger().map_or(0, Ledger::cached_accounts);
        let limits = self.limits_of(bot);
        Counting { keys: self.keys_of(bot), limits, cached_ads, bot, ad }
    }

    fn new_views<'a>(&'a self, views: &NewViews<'a>, key: Option<&'a str>) -> Views<'a> {
        Views {
            counting: self.counting(views.bot, views.ad),
            n: views.n,
            event: views.event,
            idempotency: key.map(|key| (key, millis(IDEMPOTENCY_WINDOW))),
        }
    }
}

/// The idempotency key of an import. It is unambiguous, because no bot id can contain a line feed.
fn import_key(bot: &BotId, key: &str) -> String {
    format!("import\n{bot}\n{key}")
}

/// The idempotency key of counted views. It is unambiguous, because neither a bot id nor an ad id
/// can contain a line feed.
fn idempotency(views: &NewViews<'_>) -> Option<String> {
    views.key.map(|key| format!("view\n{}\n{}\n{key}", views.bot, views.ad))
}

/// `done`: the first record of a queue, and the time of the server.
fn waited(done: Value) -> Result<Duration, ReplyError> {
    let mut done = Reply::new(done)?;
    let first = done.bytes()?.as_deref().and_then(Event::sequence_of);
    let mut time = Reply::new(done.next().unwrap_or(Value::Nil))?;
    let now = Duration::from_secs(time.number()?) + Duration::from_micros(time.number()?);
    Ok(first.map_or(Duration::ZERO, |first| now.saturating_sub(Duration::from_micros(first.get()))))
}

fn book(values: Vec<Value>, count: usize) -> Result<AdLedger, ReplyError> {
    let mut values = values.into_iter();
    let mut next = || values.next().unwrap_or(Value::Nil);
    let acked = Reply::single(next())?.bytes()?.unwrap_or_default();
    let (mut queued, mut first, mut second) =
        (Reply::new(next())?, Reply::new(next())?, Reply::new(next())?);
    let mut run = Reply::single(next())?.bytes()?.unwrap_or_default();
    run.truncate(RUN_BYTES);
    let mut known = Vec::with_capacity(count);
    for _ in 0..count {
        let (views, replacements): (Option<u64>, Option<u64>) =
            (queued.optional()?, queued.optional()?);
        let (first, second) = (first.bytes()?, second.bytes()?);
        let total = total(&run, first.as_deref()).or_else(|| total(&run, second.as_deref()));
        known.push(match (total, replacements) {
            (Some(total), _) => Known::Total(total),
            (None, Some(_)) => Known::Replaced,
            (None, None) => Known::Queued(views.unwrap_or(0)),
        });
    }
    Ok(AdLedger { known, acked: String::from_utf8(acked).unwrap_or_default() })
}

/// Number of bytes of the run id that a cached total contains.
const RUN_BYTES: usize = 8;

/// The total in a cache field `run|total`, if it belongs to this run.
fn total(run: &[u8], field: Option<&[u8]>) -> Option<u64> {
    let total = field?.strip_prefix(run)?.strip_prefix(b"|")?;
    std::str::from_utf8(total).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_has_waited_since_its_first_event_arrived() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let done =
            |first| Value::Array(vec![first, Value::Array(vec![text("12"), text("500000")])]);
        let record = |sequence| Value::BulkString(Event::record(sequence, b"{}"));
        assert_eq!(waited(done(record(2_000_000))), Ok(Duration::from_millis(10_500)));
        assert_eq!(waited(done(record(13_000_000))), Ok(Duration::ZERO), "the clock was set back");
        assert_eq!(waited(done(Value::Nil)), Ok(Duration::ZERO), "none is queued");
        assert!(waited(Value::Nil).is_err());
    }

    #[test]
    fn a_cached_total_counts_under_its_own_run_only() {
        assert_eq!(total(b"abc", Some(b"abc|12")), Some(12));
        for other in [None, Some(&b"abd|12"[..]), Some(b"ab|12"), Some(b"abc12"), Some(b"abc|x")] {
            assert_eq!(total(b"abc", other), None, "{other:?}");
        }
    }
}
