//! `fairlane-bench pipeline --handler automation`: how much rules slow down reading the bus, and
//! how fast they are evaluated.
//!
//! The events are on the bus before the clock starts, with bots in random order. The rules concern
//! one type of event. A share of the events has this type. Each of these matches one rule of its
//! bot, and the rule emits an event. One run has three parts:
//!
//! 1. A process only reads the bus, five times without and five times with rules, in turn.
//! 2. A process only evaluates the copied events.
//! 3. One process reads and evaluates concurrently.

use std::num::NonZeroUsize;

use fairlane::app::{App, Roles};
use fairlane::automations::rule::Rule;
use fairlane::automations::store::{AUTOMATIONS, document};
use fairlane::clock::{Clock as _, SystemClock};
use fairlane::config::{PipelineConfig, Start, WorkersConfig};
use fairlane::event::{Event, EventError};
use fairlane::handler::LogHandler;
use fairlane::id::{BotId, PipelineName, RuleId};
use fairlane::metrics;
use fairlane::queue::Queue;
use fairlane::sandbox::{Rig, Running, STREAM, drained};
use mongodb::bson::Document;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;
use rand::{Rng as _, SeedableRng as _};
use serde::Serialize;
use serde_json::json;
use tokio::time::Instant;

use crate::error::BenchError;
use crate::mongo::{self, Choice, Database};
use crate::{cpu, probe};

/// The type that the rules are about.
const WANTED: &str = "tag.applied";
/// Number of times that the bus is read with rules, and without.
const ROUNDS: usize = 5;
/// Number of subscribers per bot.
const SUBSCRIBERS: usize = 50;

/// The options.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// Number of bots.
    pub(crate) bots: usize,
    /// Number of events, spread evenly.
    pub(crate) events: usize,
    /// Number of rules per bot.
    pub(crate) rules: usize,
    /// The share of events that a rule matches, 0 to 1.
    pub(crate) matching: f64,
    /// Number of workers.
    pub(crate) workers: usize,
    /// The MongoDB for rules and profiles.
    pub(crate) mongo: Choice,
}

/// The results. Rates are events per second.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    pub(crate) bots: usize,
    pub(crate) rules_per_bot: usize,
    pub(crate) events: usize,
    pub(crate) matching: u64,
    /// Reading the bus without rules: the median.
    pub(crate) bus_without_rules_per_second: f64,
    /// Reading the bus with rules: the median.
    pub(crate) bus_with_rules_per_second: f64,
    /// The rate with rules divided by the rate without them: the median of the rounds.
    pub(crate) ratio: f64,
    pub(crate) ratios: Vec<f64>,
    /// Events copied in the last round.
    pub(crate) copied: u64,
    /// Evaluation by a process that does nothing else.
    pub(crate) automations_per_second: f64,
    pub(crate) rules_per_second: f64,
    /// Processor time per evaluated event meanwhile, with reading the rules at the start, µs: of
    /// Redis, of this process, and of a private MongoDB.
    pub(crate) redis_cpu_us_per_automation: f64,
    pub(crate) own_cpu_us_per_automation: f64,
    pub(crate) mongodb_cpu_us_per_automation: Option<f64>,
    /// Reading the bus in a process that evaluates concurrently.
    pub(crate) bus_beside_automations_per_second: f64,
    /// The time until all events were evaluated.
    pub(crate) together_seconds: f64,
    pub(crate) lost: u64,
    pub(crate) repeated: u64,
}

/// Runs the bench. Calls `watch` with the stage and the progress.
///
/// # Errors
/// If a private server fails or nothing moves for a minute.
pub(crate) async fn run(
    options: Options,
    watch: impl FnMut(&'static str, u64),
) -> Result<Report, BenchError> {
    let choice = options.mongo.clone();
    mongo::with_database(&choice, async |rig, database| {
        measure(rig, database, &options, watch).await
    })
    .await
}

#[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
async fn measure(
    rig: &Rig,
    database: &Database,
    options: &Options,
    mut watch: impl FnMut(&'static str, u64),
) -> Result<Report, BenchError> {
    watch("storing rules", 0);
    store(database, options).await?;
    let (events, matching) = generate(options)?;
    let mut published = 0;
    for chunk in events.chunks(10_000) {
        rig.publish(chunk.iter()).await?;
        published += chunk.len() as u64;
        watch("publishing", published);
    }
    drop(events);
    let total = options.events as u64;
    let (mut without, mut with, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let mut copied = 0;
    for _ in 0..ROUNDS {
        probe::forget_positions(rig).await?;
        let alone = Box::pin(read(rig, database, options, false, &mut watch)).await?;
        probe::forget_positions(rig).await?;
        let beside = Box::pin(read(rig, database, options, true, &mut watch)).await?;
        without.push(alone);
        with.push(beside);
        ratios.push(beside / alone);
        copied = queue(rig, database, options).await?.view(SystemClock.now()).await?.depth;
    }

    let roles = Roles { ingest: false, work: true, http: false, schedule: false };
    let app = app(rig, database, options, true, roles).await?;
    let queue = automations(&app)?;
    let of = |pid| cpu::of_process(pid).unwrap_or_default().as_secs_f64();
    let used = || (of(std::process::id()), database.pid().map(of));
    let (redis, (own, mongodb)) = (probe::cpu(rig).await?, used());
    let started = Instant::now();
    let running = Rig::spawn(app);
    evaluated(&queue, copied, &mut watch).await?;
    let automations_per_second = copied as f64 / started.elapsed().as_secs_f64();
    let (redis_after, (own_after, mongodb_after)) = (probe::cpu(rig).await?, used());
    let each = |before: f64, after: f64| (after - before) * 1e6 / copied as f64;
    running.stop().await?;
    let emitted = probe::stored(rig).await?.saturating_sub(total);

    // The same again, now reading and evaluating concurrently. The emitted events are on the bus by
    // now, and are read too.
    probe::forget_positions(rig).await?;
    database.forget_profiles().await?;
    let (begun, app) = (Instant::now(), self::app(rig, database, options, true, ALL).await?);
    let queue = automations(&app)?;
    let before = read_so_far();
    let running = Rig::spawn(app);
    let there = total + emitted;
    let beside = rate(before, there, &mut watch).await?;
    let again = async || -> Result<u64, BenchError> {
        Ok(there.saturating_sub(read_so_far() - before)
            + queue.view(SystemClock.now()).await?.depth)
    };
    while again().await? > 0 {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let together_seconds = begun.elapsed().as_secs_f64();
    running.stop().await?;
    Ok(Report {
        bots: options.bots,
        rules_per_bot: options.rules,
        events: options.events,
        matching,
        bus_without_rules_per_second: median(&mut without),
        bus_with_rules_per_second: median(&mut with),
        ratio: median(&mut ratios.clone()),
        ratios,
        copied,
        automations_per_second,
        rules_per_second: automations_per_second * options.rules as f64,
        redis_cpu_us_per_automation: each(redis, redis_after),
        own_cpu_us_per_automation: each(own, own_after),
        mongodb_cpu_us_per_automation: mongodb
            .zip(mongodb_after)
            .map(|(before, after)| each(before, after)),
        bus_beside_automations_per_second: beside,
        together_seconds,
        lost: matching.saturating_sub(emitted),
        repeated: emitted.saturating_sub(matching),
    })
}

const ALL: Roles = Roles { ingest: true, work: true, http: false, schedule: true };

/// An instance with a pipeline that takes no event, with or without rules.
async fn app(
    rig: &Rig,
    database: &Database,
    options: &Options,
    has_rules: bool,
    roles: Roles,
) -> Result<App, BenchError> {
    let mut config = rig.config();
    config.bus.streams = vec![STREAM.to_owned()];
    config.bus.trim = false;
    config.mongodb.url = Some(database.url.clone());
    config.mongodb.database = database.name.clone();
    config.pipelines.retain(|name, _| name.is(fairlane::automations::PIPELINE) && has_rules);
    let max = NonZeroUsize::new(options.workers).unwrap_or(NonZeroUsize::MIN);
    for pipeline in config.pipelines.values_mut() {
        pipeline.start = Start::Earliest;
        pipeline.workers = WorkersConfig { min: NonZeroUsize::MIN, max };
    }
    let mut nothing = PipelineConfig::new("nothing", ["nothing"]);
    nothing.start = Start::Earliest;
    config.pipelines.insert(PipelineName::parse("nothing")?, nothing);
    let app = App::builder(config).handler("nothing", LogHandler);
    Ok(app.roles(roles).build().await?)
}

fn automations(app: &App) -> Result<Queue, BenchError> {
    let name = PipelineName::parse(fairlane::automations::PIPELINE)?;
    app.queue(&name).ok_or_else(|| {
        BenchError::stuck(std::time::Duration::ZERO, "rules are not evaluated".to_owned())
    })
}

/// The queues of the rules, without workers.
async fn queue(rig: &Rig, database: &Database, options: &Options) -> Result<Queue, BenchError> {
    let roles = Roles { ingest: false, work: false, http: false, schedule: false };
    automations(&app(rig, database, options, true, roles).await?)
}

/// Reads the whole bus. Returns the rate.
async fn read(
    rig: &Rig,
    database: &Database,
    options: &Options,
    has_rules: bool,
    watch: &mut impl FnMut(&'static str, u64),
) -> Result<f64, BenchError> {
    let roles = Roles { ingest: true, work: false, http: false, schedule: false };
    let app = app(rig, database, options, has_rules, roles).await?;
    let before = read_so_far();
    let running: Running = Rig::spawn(app);
    let rate = rate(before, probe::stored(rig).await?, watch).await?;
    // The reader needs this time to copy the last events before the stop.
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    running.stop().await?;
    Ok(rate)
}

/// The rate of reading this many events, from the first batch on.
#[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
async fn rate(
    before: u64,
    total: u64,
    watch: &mut impl FnMut(&'static str, u64),
) -> Result<f64, BenchError> {
    let so_far = || read_so_far() - before;
    drained(so_far, 1, |_| {}).await?;
    let (begun, first) = (Instant::now(), so_far());
    drained(so_far, total, |read| watch("reading the bus", read)).await?;
    Ok((total - first) as f64 / begun.elapsed().as_secs_f64())
}

/// Waits until the queues are empty.
async fn evaluated(
    queue: &Queue,
    copied: u64,
    watch: &mut impl FnMut(&'static str, u64),
) -> Result<(), BenchError> {
    const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);
    let (mut last, mut moved) = (u64::MAX, Instant::now());
    loop {
        let depth = queue.view(SystemClock.now()).await?.depth;
        watch("evaluating", copied.saturating_sub(depth));
        if depth == 0 {
            return Ok(());
        }
        if depth < last {
            (last, moved) = (depth, Instant::now());
        } else if moved.elapsed() > PATIENCE {
            return Err(BenchError::stuck(
                PATIENCE,
                format!("{depth} events wait for their rules"),
            ));
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

/// Number of events that this process has read from the bus.
fn read_so_far() -> u64 {
    let series = format!("fairlane_bus_events_total{{stream=\"{STREAM}\"}} ");
    let text = metrics::render();
    let count = text.lines().find_map(|line| line.strip_prefix(&series)?.trim().parse().ok());
    count.unwrap_or(0)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

async fn store(database: &Database, options: &Options) -> Result<(), BenchError> {
    let collection = database.documents().collection::<Document>(AUTOMATIONS);
    let mut documents = Vec::new();
    for bot in 0..options.bots {
        let bot = BotId::parse(&format!("bot-{bot}"))?;
        for n in 0..options.rules {
            let id = RuleId::parse(&format!("r{n}"))?;
            let filter = format!(
                "event.data.tag == \"t{n}\" && (!has(subscriber.age) || subscriber.age > 30)"
            );
            let rule = json!({ "name": format!("Rule {n}"), "on": [WANTED], "filter": filter,
                "actions": [{ "emit": { "type": "bench.matched", "data": { "rule": n } } }] });
            let rule: Rule = serde_json::from_value(rule).map_err(EventError::Json)?;
            documents.push(document(&bot, &id, &rule));
        }
        if documents.len() >= 5_000 || bot.as_str() == format!("bot-{}", options.bots - 1) {
            let insert = collection.insert_many(std::mem::take(&mut documents));
            insert.await.map_err(BenchError::Documents)?;
        }
    }
    Ok(())
}

/// The events, in order for each bot, with bots mixed at random. Also the number of matching
/// events.
fn generate(options: &Options) -> Result<(Vec<Vec<u8>>, u64), BenchError> {
    // A fixed seed, so that two runs do the same work.
    let mut random = SmallRng::seed_from_u64(7);
    let mut order: Vec<usize> = (0..options.events).map(|n| n % options.bots).collect();
    order.shuffle(&mut random);
    let mut matching = 0;
    let events = order.into_iter().enumerate().map(|(n, bot)| {
        let bot = BotId::parse(&format!("bot-{bot}"))?;
        let matches = random.random_bool(options.matching);
        matching += u64::from(matches);
        let kind = if matches { WANTED } else { "page.viewed" };
        let tag = format!("t{}", random.random_range(0..options.rules.max(1)));
        let data = json!({ "tag": tag, "channel": "telegram", "note": "some text that fills" });
        let event = Event::builder(kind, &bot).id(n.to_string()).source("bench");
        let subject = format!("u{}", random.random_range(0..SUBSCRIBERS));
        let event = event.subject(subject).data(&data).map_err(EventError::Json)?;
        Ok(serde_json::to_vec(&event.build()?).map_err(EventError::Json)?)
    });
    let events = events.collect::<Result<Vec<_>, BenchError>>()?;
    Ok((events, matching))
}
