//! View counters for clients: counted in Redis immediately, in MongoDB within seconds.
//!
//! # Guarantees
//!
//! 1. A confirmed view is counted once in the total and once in its day, despite crashes, hangs and
//!    repetitions. Known limit: if Redis loses its last writes, their views are lost. An
//!    append-only file that is synced every second can lose about a second, `appendfsync always`
//!    nothing. No view is ever counted twice, and totals and days agree.
//! 2. The total in the answer to a view is exact at that moment, or `None` if Redis does not know it
//!    and MongoDB does not answer, or a replacement of the ad is queued. The view counts in any case.
//!    Totals that are read are exact, with one exception: for an uncached ad whose views are being
//!    written, those views may be missing. The answer then says that it is stale.
//! 3. A replacement takes effect in the order of the calls: it replaces everything counted before,
//!    and later views are added. Totals show it immediately, or within seconds if the cache of the
//!    bot is full; days within seconds.
//!
//! # The path of a view
//!
//! 1. `lua/increment_if_exists.lua`: if the total is cached, it is raised and the view is queued.
//! 2. Otherwise the total is read from MongoDB, and `lua/upsert.lua` caches it and queues the view.
//!    If a flush may have run in between, this step is repeated. The last attempt queues the view
//!    without a total.
//! 3. The view waits in its bot's queue; `handler` writes it.
//!
//! # Stores that hang
//!
//! A reader waits at most `counters.read_timeout`, and not at all for a store that is known to hang
//! (`Breaker`). Each server of a cluster has its own breaker, so one that hangs makes no totals of the
//! others stale. Redis gets half of the time, so that MongoDB can return totals in the other half. A
//! view has no such timeout for Redis, because only Redis can count it; views fail immediately once
//! Redis has been silent for a second. For MongoDB a view waits only like a reader, because it also
//! counts without a total.
//!
//! Reads of many documents are slow without a store that hangs. So they open no breaker, and take turns
//! unless they share queries (`large`).

mod breakers;
mod days;
pub(crate) mod exports;
pub(crate) mod gauges;
pub(crate) mod handler;
pub(crate) mod import;
mod large;
pub(crate) mod metrics;
pub(crate) mod part;
pub mod queue;
pub mod scripts;
pub mod store;
pub(crate) mod upkeep;
pub mod view;
mod waiting;

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use jiff::civil::Date;
use tokio::time::Instant;
use tracing::warn;

use self::breakers::Breakers;
pub(crate) use self::days::Days;
use self::exports::{Exports, Turn};
use self::import::{ImportError, Progress};
use self::large::{Large, Size};
use self::part::CounterPart;
use self::queue::{AdLedger, Known, NewViews, ViewLedger};
use self::scripts::Viewed;
use self::store::{CounterStore, Stored};
use self::view::{AdId, Calendar, Line, Replacement};
use crate::breaker::{Breaker, Unanswered};
use crate::clock::SharedClock;
use crate::config::Config;
use crate::counters::metrics::CounterMetrics;
use crate::formats::Format;
use crate::id::BotId;
use crate::mongo::client::MongoError;
use crate::pipeline::{Kind, Protected};
use crate::product::{self, OpenError, Opening, Part};
use crate::queue::Queue;
use crate::redis::RedisError;
use crate::redis::scripts::Table;
use crate::telemetry::OncePerMinute;

/// The pipeline that counts views.
pub const PIPELINE: &str = crate::config::COUNTERS;

/// Why its records are not purged.
const PROTECTED: Protected = Protected {
    code: "keeps-views",
    title: "Views are not purged",
    reason: "views are not purged: some may already be in MongoDB's totals but not in its days; to clear an ad, reset it (POST /v1/bots/BOT/counters/AD/reset)",
};

/// The product.
pub(crate) struct Product;

/// The formats of its data.
static FORMATS: [Format; 1] = [Format::first_documents("counters", "totals and days")];

impl product::Product for Product {
    fn pipeline(&self) -> &'static str {
        PIPELINE
    }

    fn kind(&self, config: &Config, clock: &SharedClock) -> Kind {
        let calendar = Calendar::new(Arc::clone(clock), config.counters.time_zone.clone());
        let ledger = ViewLedger::new(calendar, config.counters.cached_ads);
        Kind { ledger: Some(Arc::new(ledger)), protected: Some(PROTECTED), ..Kind::default() }
    }

    fn needs_mongo(&self) -> bool {
        true
    }

    fn formats(&self) -> &'static [Format] {
        &FORMATS
    }

    fn scripts(&self) -> Option<&'static Table> {
        Some(&scripts::SCRIPTS)
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Arc<dyn Part>, OpenError> {
        Ok(Arc::new(CounterPart::new(opening.mongo()?, opening.pipeline.handler_timeout)))
    }
}

/// Pauses before a document that a flush may have changed is read again. A flush takes some
/// milliseconds from its first write to its completion.
const AGAIN: [Duration; 3] =
    [Duration::from_millis(2), Duration::from_millis(10), Duration::from_millis(40)];

/// Why the counters cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CountersError {
    /// Redis failed.
    #[error(transparent)]
    Redis(#[from] RedisError),
    /// MongoDB failed.
    #[error(transparent)]
    Mongo(#[from] MongoError),
    /// Redis did not answer in time.
    #[error("Redis does not answer in time (counters.read_timeout)")]
    RedisHangs,
    /// MongoDB did not answer in time.
    #[error("MongoDB does not answer in time (counters.read_timeout)")]
    MongoHangs,
}

impl CountersError {
    /// Whether too many requests of the caller wait for MongoDB. It says nothing about a store.
    fn is_crowded(&self) -> bool {
        matches!(self, Self::Mongo(MongoError::Crowded(_)))
    }
}

impl From<Unanswered<RedisError>> for CountersError {
    fn from(unanswered: Unanswered<RedisError>) -> Self {
        match unanswered {
            Unanswered::Failed(error) => error.into(),
            Unanswered::Open | Unanswered::Late(_) => Self::RedisHangs,
        }
    }
}

impl From<Unanswered<MongoError>> for CountersError {
    fn from(unanswered: Unanswered<MongoError>) -> Self {
        match unanswered {
            Unanswered::Failed(error) => error.into(),
            Unanswered::Open | Unanswered::Late(_) => Self::MongoHangs,
        }
    }
}

/// Totals of several ads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Totals {
    /// In the requested order; `None` if no store can return it now.
    pub(crate) totals: Vec<Option<u64>>,
    /// Whether views may be missing: those of the last seconds, because Redis is unavailable or
    /// hangs; or queued ones of uncached ads, because they are just being written to MongoDB.
    pub(crate) stale: bool,
}

/// The counters. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Counters {
    queue: Queue,
    store: CounterStore,
    /// The calendar of the daily figures.
    calendar: Calendar,
    metrics: CounterMetrics,
    /// The timeout of readers.
    read_timeout: Duration,
    redis: Arc<Breakers>,
    mongo: Arc<Breaker>,
    exports: Exports,
    large: Large,
}

impl Counters {
    /// The counters in the queues of the counters pipeline, and in `store`.
    pub(crate) fn new(
        queue: Queue,
        store: CounterStore,
        calendar: Calendar,
        read_timeout: Duration,
    ) -> Self {
        let (redis, mongo) = (Breakers::new(), Breaker::new("mongodb"));
        let (redis, mongo) = (Arc::new(redis), Arc::new(mongo));
        let metrics = CounterMetrics::new();
        let (exports, large) = (Exports::default(), Large::default());
        Self { queue, store, calendar, metrics, read_timeout, redis, mongo, exports, large }
    }

    /// Counts `n` views (1 to [`view::VIEWS_MAX`]) and returns the new total. `None`: the views
    /// count, but no store can return the total. A second call with the same `key` within an hour
    /// counts nothing and returns the result of the first.
    ///
    /// # Errors
    /// If Redis is unavailable. The views may or may not be counted: repeat the call with the same
    /// key.
    pub(crate) async fn view(
        &self,
        bot: &BotId,
        ad: &AdId,
        n: u64,
        key: Option<&str>,
    ) -> Result<Option<u64>, CountersError> {
        let event = view::on_day(view::view(bot, ad, n), Some(self.today())).encode();
        let views = NewViews { bot, ad, n, event: &event, key };
        let counted = self.redis(bot).write(self.queue.increment_if_exists(views)).await?;
        let mut acked = match counted {
            Viewed::Counted(total) => {
                self.metrics.cache_hits.increment(1);
                return Ok(self.counted(n, total));
            }
            Viewed::Ask(acked) => acked,
        };
        self.metrics.cache_misses.increment(1);
        for pause in AGAIN {
            let stored = self.stored(bot, ad).await;
            match self.queue.upsert(views, &acked, stored).await? {
                Viewed::Counted(total) => return Ok(self.counted(n, total)),
                Viewed::Ask(now) => acked = now,
            }
            tokio::time::sleep(pause).await;
        }
        // A missing total must not lose the view.
        match self.queue.upsert(views, &acked, None).await? {
            Viewed::Counted(total) => Ok(self.counted(n, total)),
            Viewed::Ask(_) => unreachable!("without a stored total, the script always counts"),
        }
    }

    /// The breaker of the server of Redis that has the keys of a bot.
    fn redis(&self, bot: &BotId) -> Arc<Breaker> {
        self.redis.of(self.queue.link().holder(self.queue.keys_of(bot)))
    }

    fn counted(&self, n: u64, total: Option<u64>) -> Option<u64> {
        self.metrics.views.increment(n);
        total
    }

    /// Total and sequence of one ad in MongoDB; `None` if it does not answer.
    async fn stored(&self, bot: &BotId, ad: &AdId) -> Option<(u64, crate::id::Sequence)> {
        let until = Instant::now() + self.read_timeout;
        let stored = self.ask(bot, std::slice::from_ref(ad), until).await.ok()?;
        Some(stored.first().map_or_else(Default::default, |stored| (stored.total, stored.sequence)))
    }

    /// The stored totals, in the order of `ads`, if MongoDB answers before the deadline.
    async fn ask(
        &self,
        bot: &BotId,
        ads: &[AdId],
        until: Instant,
    ) -> Result<Vec<Stored>, CountersError> {
        static AWAY: OncePerMinute = OncePerMinute::new();
        let left = until.saturating_duration_since(Instant::now()).max(self.read_timeout / 4);
        let asked = match Size::of(ads.len()) {
            Size::Small => self.mongo.read(left, self.store.totals(bot, ads)).await,
            Size::Medium => self.mongo.read_much(left, self.store.totals(bot, ads)).await,
            Size::Large => {
                let totals = async {
                    let _place = self.large.totals.take(bot).await?;
                    self.store.totals_apart(bot, ads).await
                };
                self.mongo.read_much(left, totals).await
            }
        };
        let stored = asked.map_err(CountersError::from).inspect_err(|error| {
            if !error.is_crowded()
                && let Some(suppressed) = AWAY.take()
            {
                warn!(%error, suppressed, "MongoDB does not return totals; uncached totals are unknown");
            }
        })?;
        Ok(ads.iter().map(|ad| stored.get(ad).copied().unwrap_or_default()).collect())
    }

    /// The totals of up to 1,000 ads; 0 for an ad without views.
    ///
    /// # Errors
    /// If neither store answers in time, or too many requests of the caller wait for MongoDB.
    pub(crate) async fn totals(&self, bot: &BotId, ads: &[AdId]) -> Result<Totals, CountersError> {
        let until = Instant::now() + self.read_timeout;
        let book = self.redis(bot).read(self.read_timeout / 2, self.queue.book(bot, ads)).await;
        let book = match book {
            Ok(book) => book,
            Err(redis) => {
                let Ok(stored) = self.ask(bot, ads, until).await else { return Err(redis.into()) };
                let totals = stored.into_iter().map(|stored| Some(stored.total)).collect();
                return Ok(Totals { totals, stale: true });
            }
        };
        let mut missing = Vec::new();
        let mut totals: Vec<Option<u64>> = Vec::with_capacity(ads.len());
        for (at, known) in book.known.iter().enumerate() {
            totals.push(match *known {
                Known::Total(total) => Some(total),
                Known::Replaced => None,
                Known::Queued(_) => {
                    missing.push(at);
                    None
                }
            });
        }
        self.metrics.cache_hits.increment((ads.len() - missing.len()) as u64);
        let mut stale = false;
        if !missing.is_empty() {
            self.metrics.cache_misses.increment(missing.len() as u64);
            let filled = self.fill(bot, ads, book, &missing, &mut totals, until).await;
            stale = match filled {
                Err(error) if error.is_crowded() => return Err(error),
                filled => filled.unwrap_or(true),
            };
        }
        Ok(Totals { totals, stale })
    }

    /// Adds the totals of the ads at `missing`: the stored views and the queued ones. If a flush
    /// ran meanwhile, some views may be in both; then both are read again. Returns whether queued
    /// views may be missing: a flush ran until the end.
    ///
    /// # Errors
    /// If Redis stops answering, because queued views may then be missing, or too many requests of the
    /// caller wait for MongoDB.
    async fn fill(
        &self,
        bot: &BotId,
        ads: &[AdId],
        mut book: AdLedger,
        missing: &[usize],
        totals: &mut [Option<u64>],
        until: Instant,
    ) -> Result<bool, CountersError> {
        let mut doubt = false;
        let left = || until.saturating_duration_since(Instant::now()).max(self.read_timeout / 4);
        let asked: Vec<AdId> = missing.iter().map(|&at| ads[at].clone()).collect();
        for pause in AGAIN {
            let stored = match self.ask(bot, &asked, until).await {
                Ok(stored) => stored,
                Err(error) if error.is_crowded() && !doubt => return Err(error),
                Err(_) => return Ok(doubt),
            };
            doubt = false;
            // If an ad has no queued views, MongoDB contained all its views before it was asked.
            let progress = if missing.iter().any(|&at| is_queued(book.known[at])) {
                Some(self.redis(bot).read(left(), self.queue.progress(bot)).await)
            } else {
                None
            };
            for (&at, stored) in missing.iter().zip(&stored) {
                totals[at] = match book.known[at] {
                    Known::Total(total) => Some(total),
                    Known::Replaced => None,
                    Known::Queued(0) => Some(stored.total),
                    Known::Queued(queued) => match &progress {
                        Some(Ok((completed, head)))
                            if *completed == book.acked
                                && head.is_none_or(|head| head > stored.sequence) =>
                        {
                            Some(stored.total + queued)
                        }
                        _ => {
                            doubt = true;
                            // The exact total is between the stored total and the sum of it and the
                            // queued views.
                            Some(stored.total)
                        }
                    },
                };
            }
            if let Some(Err(redis)) = progress {
                return Err(redis.into());
            }
            if !doubt || Instant::now() >= until {
                return Ok(doubt);
            }
            tokio::time::sleep(pause).await;
            book = self.redis(bot).read(left(), self.queue.book(bot, ads)).await?;
        }
        Ok(doubt)
    }

    /// Replaces the counters of an ad.
    ///
    /// # Errors
    /// If Redis is unavailable. The change may or may not be made; the call can be repeated.
    pub(crate) async fn replace(
        &self,
        bot: &BotId,
        ad: &AdId,
        with: &Replacement,
    ) -> Result<(), CountersError> {
        let event = view::replacement(bot, ad, with);
        self.redis(bot).write(self.queue.replace_counter(bot, ad, with.total, &event)).await?;
        Ok(())
    }

    /// Applies consecutive lines of an import.
    ///
    /// # Errors
    /// Those of [`import::import`].
    pub(crate) async fn import(
        &self,
        bot: &BotId,
        key: &str,
        lines: &[Line],
    ) -> Result<Progress, ImportError> {
        import::import(&self.queue, bot, key, lines).await
    }

    /// Today in the configured time zone.
    pub(crate) fn today(&self) -> Date {
        self.calendar.today()
    }

    /// The days that a replacement may have: [`Calendar::days`].
    pub(crate) fn days(&self) -> RangeInclusive<Date> {
        self.calendar.days()
    }

    /// A turn to export for a token that may have `max`, if there is one: see [`Exports::begin`].
    pub(crate) fn begin_export(&self, token: &str, max: usize, bot: &BotId) -> Option<Turn> {
        self.exports.begin(token, max, bot)
    }

    /// A turn for a page: see [`Exports::begin_if_free`].
    pub(crate) fn begin_page(&self, token: &str, max: usize, bot: &BotId) -> Option<Turn> {
        self.exports.begin_if_free(token, max, bot)
    }
}

fn is_queued(known: Known) -> bool {
    matches!(known, Known::Queued(queued) if queued > 0)
}
