//! `fairlane-bench counters`: reads totals and counts views over HTTP at steady rates, regardless
//! of how fast the service answers. Then checks every figure.
//!
//! Before that, each ad that should be cached is viewed once, and half of the others are stored in
//! MongoDB. The whole service, both stores and the clients share the machine.

mod answer;
mod documents;
mod exact;
mod load;
mod plan;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fairlane::app::App;
use fairlane::clock::{Clock, SystemClock};
use fairlane::id::PipelineName;
use fairlane::queue::Queue;
use fairlane::sandbox::{Rig, quantile_ms};
use hdrhistogram::Histogram;
use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde::Serialize;
use tokio::time::Instant;

use self::exact::{Found, Ledger};
use self::load::{Load, Outcome};
use self::plan::{Ads, Requests, Schedule};
use crate::error::BenchError;
use crate::mongo::{self, Choice};
use crate::{cpu, probe};

/// Duration of the unmeasured warm-up.
const WARM_UP: Duration = Duration::from_secs(2);
/// Number of different reads that are prepared.
const READS_PREPARED: usize = 20_000;
/// Maximum number of different views that are prepared.
const VIEWS_PREPARED: u64 = 300_000;
/// The goal: 99 % of the requests are answered within this time.
const GOAL_MS: f64 = 5.0;
/// Step of the search for the highest rate, reads per second.
const STEP: u64 = 2_500;
/// Maximum duration of each step.
const STEP_SECONDS: u64 = 10;
/// Maximum rate that is tried.
const RATE_MAX: u64 = 200_000;
/// Maximum time without a flush before the bench fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// The options.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// Reads of totals per second.
    pub(crate) rate: u64,
    /// Views per second.
    pub(crate) views: u64,
    /// Number of ads, spread evenly over the bots.
    pub(crate) ads: usize,
    /// Number of bots.
    pub(crate) bots: usize,
    /// Number of ads per read.
    pub(crate) per_read: usize,
    /// The share of them that is cached, 0 to 1.
    pub(crate) cached: f64,
    /// Duration.
    pub(crate) seconds: u64,
    /// Connections, each with one request in flight.
    pub(crate) connections: usize,
    /// Whether to search for the highest rate of reads afterwards.
    pub(crate) saturate: bool,
    /// The MongoDB for the documents.
    pub(crate) mongo: Choice,
}

/// The results.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    pub(crate) ads: usize,
    pub(crate) bots: usize,
    pub(crate) per_read: usize,
    pub(crate) cached: f64,
    pub(crate) connections: usize,
    pub(crate) seconds: u64,
    /// The planned rates of reads and of views, per second.
    pub(crate) rate: u64,
    pub(crate) rate_views: u64,
    #[serde(flatten)]
    pub(crate) answered: Answered,
    /// Whether each ad has all its views: over HTTP, stored, and by day.
    pub(crate) exact: bool,
    pub(crate) differ: u64,
    pub(crate) first_difference: Option<String>,
    pub(crate) views_counted: u64,
    /// From the last answer until no view waited for MongoDB.
    pub(crate) flushed_after_seconds: f64,
    /// The highest rate of reads that met the goal.
    pub(crate) saturation_reads_per_second: Option<u64>,
    pub(crate) steps: Vec<Step>,
}

/// The measurements of the clients.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Answered {
    pub(crate) reads_per_second: f64,
    pub(crate) views_per_second: f64,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    pub(crate) p999_ms: f64,
    pub(crate) max_ms: f64,
    pub(crate) reads_p50_ms: Option<f64>,
    pub(crate) reads_p99_ms: Option<f64>,
    pub(crate) views_p50_ms: Option<f64>,
    pub(crate) views_p99_ms: Option<f64>,
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
    /// Answers without a total.
    pub(crate) nulls: u64,
    /// Delay of the clients themselves: it is part of the times above.
    pub(crate) late_p99_ms: f64,
    /// Requests that were due while every connection was busy.
    pub(crate) waited_for_connection: u64,
    /// Average number of processor cores used.
    pub(crate) cores_service: Option<f64>,
    pub(crate) cores_clients: Option<f64>,
    pub(crate) cores_redis: Option<f64>,
    pub(crate) cores_mongodb: Option<f64>,
}

/// One step of the search for the highest rate.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Step {
    pub(crate) rate: u64,
    pub(crate) reads_per_second: f64,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    pub(crate) late_p99_ms: f64,
    /// Whether the goal was met without an error.
    pub(crate) good: bool,
}

/// Runs the bench. Calls `watch` with the stage and the progress.
///
/// # Errors
/// If a store fails, a connection breaks, or nothing is flushed for a minute.
pub(crate) async fn run(
    options: Options,
    watch: impl FnMut(&'static str, u64),
) -> Result<Report, BenchError> {
    let choice = options.mongo.clone();
    mongo::with_database(&choice, async |rig, database| {
        measure(rig, database, options, watch).await
    })
    .await
}

async fn measure(
    rig: &Rig,
    database: &mongo::Database,
    options: Options,
    mut watch: impl FnMut(&'static str, u64),
) -> Result<Report, BenchError> {
    let ads = Ads::new(options.ads, options.bots, options.cached);
    watch("storing ads in MongoDB", 0);
    documents::store(&database.documents(), ads, yesterday()).await?;
    let mut ledger = Ledger::new(ads.count);
    (0..ads.count)
        .filter(|ad| ads.place(*ad) == plan::Place::Stored)
        .for_each(|ad| ledger.put(ad, documents::STORED));

    let app = build(rig, database).await?;
    let queue = app.queue(&pipeline()).ok_or_else(|| stuck("no counters"))?;
    let address = app.http_address()?.ok_or_else(|| stuck("no HTTP"))?;
    let running = Rig::spawn(app);
    let mut bench = Bench::new(rig, database, options, ads, address, ledger);
    bench.fill(&mut watch).await?;
    flushed(&queue, &mut watch).await?;
    let seconds = bench.options.seconds;
    let (outcome, answered) = bench.go(bench.options.rate, seconds, &mut watch).await?;
    let waiting = Instant::now();
    flushed(&queue, &mut watch).await?;
    let flushed_after_seconds = waiting.elapsed().as_secs_f64();
    let steps = if bench.options.saturate {
        bench.search(&answered, &mut watch).await?
    } else {
        Vec::new()
    };
    flushed(&queue, &mut watch).await?;
    watch("checking each ad", 0);
    let (differ, first_difference) = bench.check().await?;
    running.stop().await?;
    let options = bench.options;
    let good = steps.iter().filter(|step| step.good).map(|step| step.rate).max();
    Ok(Report {
        ads: options.ads,
        bots: options.bots,
        per_read: options.per_read,
        cached: options.cached,
        connections: bench.connections,
        seconds,
        rate: options.rate,
        rate_views: options.views,
        answered,
        exact: differ == 0,
        differ,
        first_difference,
        views_counted: outcome.sent_views as u64,
        flushed_after_seconds,
        saturation_reads_per_second: good,
        steps,
    })
}

/// The complete service with only the counters.
async fn build(rig: &Rig, database: &mongo::Database) -> Result<App, BenchError> {
    let mut config = rig.config();
    config.mongodb.url = Some(database.url.clone());
    config.mongodb.database.clone_from(&database.name);
    Ok(App::builder(config).build().await?)
}

/// One instance of the service, and its load.
struct Bench<'a> {
    rig: &'a Rig,
    database: &'a mongo::Database,
    options: Options,
    connections: usize,
    ads: Ads,
    address: SocketAddr,
    reads: Arc<Requests>,
    views: Arc<Requests>,
    /// Number of views sent so far.
    sent: usize,
    ledger: Ledger,
}

impl<'a> Bench<'a> {
    fn new(
        rig: &'a Rig,
        database: &'a mongo::Database,
        options: Options,
        ads: Ads,
        address: SocketAddr,
        ledger: Ledger,
    ) -> Self {
        // A fixed seed, so that two runs send the same requests.
        let mut random = SmallRng::seed_from_u64(13);
        let (host, kinds) = (address.to_string(), (options.per_read, options.cached));
        let reads = Requests::reads(ads, &host, READS_PREPARED, kinds, &mut random);
        let views = options.views.saturating_mul(options.seconds + WARM_UP.as_secs());
        let views = usize::try_from(views.clamp(1, VIEWS_PREPARED)).unwrap_or(1);
        let views = Requests::views(ads, &host, views, options.cached, &mut random);
        // Each connection is used at least once per second.
        let often = usize::try_from(options.rate.max(options.views)).unwrap_or(usize::MAX);
        let connections = options.connections.min(often).max(1);
        let (reads, views) = (Arc::new(reads), Arc::new(views));
        Self { rig, database, options, connections, ads, address, reads, views, sent: 0, ledger }
    }

    /// Counts a view of each ad that should be cached.
    async fn fill(&mut self, watch: &mut impl FnMut(&'static str, u64)) -> Result<(), BenchError> {
        let views = Requests::first_views(self.ads, &self.address.to_string());
        if views.len() == 0 {
            return Ok(());
        }
        let load = Load {
            schedule: Schedule::at_once(views.len()),
            views: Arc::new(views),
            first_view: 0,
            warm_up: Duration::ZERO,
            ..self.load(Schedule::at_once(0))
        };
        let outcome = self.watched(load, "views of ads that shall be cached", watch).await?;
        match outcome.first_error {
            Some(error) => Err(BenchError::Http(std::io::Error::other(error))),
            None => Ok(()),
        }
    }

    /// Sends reads and views at steady rates.
    async fn go(
        &mut self,
        rate: u64,
        seconds: u64,
        watch: &mut impl FnMut(&'static str, u64),
    ) -> Result<(Outcome, Answered), BenchError> {
        let schedule = Schedule::steady(rate, self.options.views, seconds + WARM_UP.as_secs());
        let load = self.load(schedule);
        let before = self.cpu().await?;
        let outcome = self.watched(load, "reads and views", watch).await?;
        let after = self.cpu().await?;
        self.sent += outcome.sent_views;
        let answered = answered(&outcome, before.until(after));
        Ok((outcome, answered))
    }

    /// Raises the rate in steps while the goal is met. If the first rate missed the goal, lowers it
    /// until the goal is met.
    async fn search(
        &mut self,
        first: &Answered,
        watch: &mut impl FnMut(&'static str, u64),
    ) -> Result<Vec<Step>, BenchError> {
        let mut steps = vec![Step::new(self.options.rate, first)];
        let up = steps[0].good;
        loop {
            let last = steps[steps.len() - 1].rate;
            let next = if up { last + STEP } else { last.saturating_sub(STEP) };
            if next == 0 || next > RATE_MAX {
                return Ok(steps);
            }
            let (_, answered) =
                self.go(next, STEP_SECONDS.min(self.options.seconds), watch).await?;
            let step = Step::new(next, &answered);
            let turned = step.good != up;
            steps.push(step);
            if turned {
                return Ok(steps);
            }
        }
    }

    /// The number of ads with wrong figures, and the first of them.
    async fn check(&self) -> Result<(u64, Option<String>), BenchError> {
        let mut found = vec![Found::default(); self.ledger.ads().max(self.views.ads_end())];
        exact::ask(self.address, self.ads, &mut found).await?;
        let documents = self.database.documents();
        let strange = documents::read(&documents, self.ads, &mut found).await?;
        let verdict = exact::judge(&self.ledger, &found);
        let first = verdict.first.or_else(|| {
            (strange > 0).then(|| format!("{strange} documents are of ads nobody viewed"))
        });
        Ok((verdict.differ + strange, first))
    }

    fn load(&self, schedule: Schedule) -> Load {
        Load {
            address: self.address,
            connections: self.connections,
            reads: Arc::clone(&self.reads),
            views: Arc::clone(&self.views),
            schedule,
            first_view: self.sent,
            warm_up: WARM_UP,
            progress: Arc::default(),
        }
    }

    /// Runs a load and reports its progress. Acknowledged views go to the ledger.
    async fn watched(
        &mut self,
        load: Load,
        what: &'static str,
        watch: &mut impl FnMut(&'static str, u64),
    ) -> Result<Outcome, BenchError> {
        let progress: Arc<AtomicU64> = Arc::clone(&load.progress);
        let mut running = std::pin::pin!(load.run());
        let outcome = loop {
            tokio::select! {
                biased;
                outcome = &mut running => break outcome?,
                () = tokio::time::sleep(Duration::from_millis(250)) => {
                    watch(what, progress.load(Ordering::Relaxed));
                }
            }
        };
        self.ledger.add(&outcome.ledger);
        Ok(outcome)
    }

    async fn cpu(&self) -> Result<Cpu, BenchError> {
        Ok(Cpu {
            own: cpu::of_process(std::process::id()),
            redis: Duration::try_from_secs_f64(probe::cpu(self.rig).await?).ok(),
            mongodb: self.database.pid().and_then(cpu::of_process),
        })
    }
}

/// Processor time of the components.
#[derive(Debug, Clone, Copy)]
struct Cpu {
    own: Option<Duration>,
    redis: Option<Duration>,
    mongodb: Option<Duration>,
}

impl Cpu {
    fn until(self, later: Self) -> Self {
        let between = |before: Option<Duration>, after: Option<Duration>| {
            Some(after?.saturating_sub(before?))
        };
        Self {
            own: between(self.own, later.own),
            redis: between(self.redis, later.redis),
            mongodb: between(self.mongodb, later.mongodb),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
fn answered(outcome: &Outcome, cpu: Cpu) -> Answered {
    let (reads, views) = (&outcome.reads, &outcome.views);
    let mut both = reads.clone();
    both.add(views).expect("the bounds are the same");
    let per_second = |waits: &Histogram<u64>| {
        waits.len() as f64 / outcome.measured.as_secs_f64().max(f64::MIN_POSITIVE)
    };
    let quantile = |waits: &Histogram<u64>, quantile| {
        (!waits.is_empty()).then(|| quantile_ms(waits, quantile))
    };
    let cores = |time: Option<Duration>| Some(time?.as_secs_f64() / outcome.took.as_secs_f64());
    let service = cpu.own.zip(outcome.cpu).map(|(own, clients)| own.saturating_sub(clients));
    Answered {
        reads_per_second: per_second(reads),
        views_per_second: per_second(views),
        p50_ms: quantile_ms(&both, 0.5),
        p99_ms: quantile_ms(&both, 0.99),
        p999_ms: quantile_ms(&both, 0.999),
        max_ms: quantile_ms(&both, 1.0),
        reads_p50_ms: quantile(reads, 0.5),
        reads_p99_ms: quantile(reads, 0.99),
        views_p50_ms: quantile(views, 0.5),
        views_p99_ms: quantile(views, 0.99),
        errors: outcome.errors,
        first_error: outcome.first_error.clone(),
        nulls: outcome.nulls,
        late_p99_ms: quantile_ms(&outcome.late, 0.99),
        waited_for_connection: outcome.waited,
        cores_service: cores(service),
        cores_clients: cores(outcome.cpu),
        cores_redis: cores(cpu.redis),
        cores_mongodb: cores(cpu.mongodb),
    }
}

impl Step {
    fn new(rate: u64, answered: &Answered) -> Self {
        Self {
            rate,
            reads_per_second: answered.reads_per_second,
            p50_ms: answered.p50_ms,
            p99_ms: answered.p99_ms,
            late_p99_ms: answered.late_p99_ms,
            good: answered.p99_ms < GOAL_MS && answered.errors == 0 && answered.nulls == 0,
        }
    }
}

/// Waits until no view waits for MongoDB.
async fn flushed(
    queue: &Queue,
    watch: &mut impl FnMut(&'static str, u64),
) -> Result<(), BenchError> {
    let (mut last, mut moved) = (u64::MAX, Instant::now());
    loop {
        let depth = queue.view(SystemClock.now()).await?.depth;
        watch("views to be flushed", depth);
        if depth == 0 {
            return Ok(());
        }
        if depth < last {
            (last, moved) = (depth, Instant::now());
        } else if moved.elapsed() > PATIENCE {
            return Err(BenchError::stuck(PATIENCE, format!("{depth} views wait for MongoDB")));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn pipeline() -> PipelineName {
    PipelineName::parse(fairlane::counters::PIPELINE).expect("a legal name")
}

fn stuck(what: &str) -> BenchError {
    BenchError::stuck(Duration::ZERO, what.to_owned())
}

/// A day on which no view is counted any more.
fn yesterday() -> Date {
    let now = i64::try_from(SystemClock.now().as_secs()).unwrap_or(i64::MAX);
    let now = Timestamp::from_second(now).unwrap_or(Timestamp::UNIX_EPOCH);
    now.to_zoned(TimeZone::UTC).date().yesterday().unwrap_or(Date::MIN)
}
