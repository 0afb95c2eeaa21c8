//! `fairlane-bench faults`: a long, random campaign against the whole system, and a verdict.
//!
//! Several processes run every product at the same time, on a durable Redis with a replica, or on a
//! Redis Cluster, and on MongoDB. Faults of many kinds are drawn from a seed. At the end, all faults are over, and what was
//! acknowledged must have had its effect: everything once, in order, and in time.
//!
//! A seed gives the same faults at the same times again. What meets them differs from run to run,
//! because processes are not deterministic.

mod api;
mod clock;
mod cluster;
mod drain;
mod hooks;
mod inject;
mod letters;
mod load;
pub(crate) mod plan;
mod replays;
mod servers;
pub(crate) mod soak;
mod verdict;
mod watch;
pub(crate) mod worker;
mod world;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use clap::ValueEnum as _;
use serde::Serialize;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use self::clock::FakeClock;
use self::hooks::Hooks;
use self::inject::Injected;
use self::load::{Acknowledged, Load, PIPELINES};
pub(crate) use self::plan::Fault;
use self::plan::Planned;
pub(crate) use self::replays::Replays;
use self::verdict::Course;
pub(crate) use self::verdict::Pipeline;
use self::watch::{FirstDone, Recovery, Resources};
use self::worker::now_us;
use self::world::{Stores, World};
use crate::error::BenchError;

/// Interval of looking at what the first process has in use.
const LOOK: Duration = Duration::from_secs(1);
/// How long the load may take to get its last acknowledgements after all faults.
const ENDS: Duration = Duration::from_secs(60);
/// How long a process may take to end at SIGTERM: its grace period, 5 s, and time of a busy machine.
const STOPS: Duration = Duration::from_secs(30);
/// What the first process may have more at the end than at the start.
const DESCRIPTORS_MORE: u64 = 40;
const THREADS_MORE: u64 = 8;
/// Memory may grow by this much, because caches and histories of attempts fill, MB.
const MEMORY_MORE_MB: u64 = 150;
/// Maximum number of campaigns of a search for the smallest failing plan.
const SHRINKS: usize = 40;

/// The options.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) seed: u64,
    /// Duration of the faults.
    pub(crate) seconds: u64,
    /// Events per second.
    pub(crate) rate: u32,
    pub(crate) processes: usize,
    /// Whether Redis is a cluster.
    pub(crate) cluster: bool,
    /// The kinds of faults; all if empty.
    pub(crate) only: Vec<Fault>,
    /// Whether to search for the smallest plan that still fails.
    pub(crate) shrinks: bool,
}

/// The result.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    pub(crate) seed: u64,
    pub(crate) seconds: u64,
    pub(crate) processes: usize,
    pub(crate) cluster: bool,
    /// The promises that did not hold, in words. Empty: all held.
    pub(crate) violations: Vec<String>,
    pub(crate) pipelines: Vec<Pipeline>,
    /// Number of faults by kind.
    pub(crate) faults: BTreeMap<String, usize>,
    pub(crate) recoveries: Vec<Recovery>,
    pub(crate) views: u64,
    pub(crate) sales: u64,
    pub(crate) notifications: usize,
    pub(crate) notifications_repeated: u64,
    pub(crate) leases_completed: u32,
    pub(crate) leases_failed: u32,
    pub(crate) leases_left: u32,
    pub(crate) operations: u64,
    pub(crate) replays: Replays,
    pub(crate) dead_letters_redriven: u64,
    /// By pipeline and reason, as found when they were put back. Those of rules are not among them.
    pub(crate) dead_letters: BTreeMap<String, u64>,
    pub(crate) requests_repeated: u64,
    /// Processes that ended by themselves, because a store was unavailable at their start, and were
    /// started again.
    pub(crate) restarts: usize,
    /// How long it took until everything was handled after the last fault.
    pub(crate) drained_ms: u64,
    /// The first process at the start, its maximum, and at the end.
    pub(crate) resources: [Resources; 3],
    pub(crate) log_lines_per_minute: BTreeMap<String, f64>,
    /// Keys in Redis at the end, by kind.
    pub(crate) keys: BTreeMap<String, u64>,
    /// The smallest plan that still fails, if it was searched for.
    pub(crate) smallest: Option<Vec<Planned>>,
    /// Where the histories and the logs are, if a promise did not hold.
    pub(crate) directory: Option<String>,
}

/// Runs the campaign.
///
/// # Errors
/// If a server or a process cannot be started or controlled. Violations are no errors.
pub(crate) async fn run(
    options: Options,
    watch: impl Fn(&'static str, u64),
) -> Result<Report, BenchError> {
    let length = Duration::from_secs(options.seconds);
    let possible = Fault::value_variants().iter().filter(|kind| kind.happens_with(options.cluster));
    let possible: Vec<_> = possible.copied().collect();
    if let Some(kind) = options.only.iter().find(|kind| !possible.contains(kind)) {
        return Err(BenchError::Fault { kind: kind.name(), cluster: options.cluster });
    }
    let all = if options.only.is_empty() { &possible } else { &options.only };
    let kinds: Vec<_> = all
        .iter()
        .copied()
        .filter(|kind| *kind != Fault::ClockStepped || FakeClock::library().is_some())
        .collect();
    // The memory of the first process is watched, so it must live on.
    let plan = plan::plan(options.seed, length, options.processes, 1, &kinds);
    let mut report = campaign(&options, &plan, &watch).await?;
    if options.shrinks && !report.violations.is_empty() {
        report.smallest = Some(shrink(&options, plan, &watch).await?);
    }
    Ok(report)
}

/// Leaves out faults as long as the campaign still fails.
async fn shrink(
    options: &Options,
    mut plan: Vec<Planned>,
    watch: &impl Fn(&'static str, u64),
) -> Result<Vec<Planned>, BenchError> {
    let (mut parts, mut runs) = (2, 0);
    'smaller: while plan.len() > 1 && runs < SHRINKS {
        for smaller in plan::without_parts(&plan, parts) {
            runs += 1;
            if runs > SHRINKS {
                break 'smaller;
            }
            if !campaign(options, &smaller, watch).await?.violations.is_empty() {
                plan = smaller;
                parts = parts.saturating_sub(1).max(2);
                continue 'smaller;
            }
        }
        if parts >= plan.len() {
            break;
        }
        parts = (parts * 2).min(plan.len());
    }
    Ok(plan)
}

/// One campaign with these faults.
async fn campaign(
    options: &Options,
    plan: &[Planned],
    watch: &impl Fn(&'static str, u64),
) -> Result<Report, BenchError> {
    let directory = tempfile::Builder::new().prefix("fairlane-faults-").tempdir()?;
    let ended = Box::pin(campaign_in(directory.path(), options, plan, watch)).await;
    if ended.as_ref().is_ok_and(|report| report.violations.is_empty()) {
        return ended;
    }
    let directory = directory.keep().display().to_string();
    match ended {
        Ok(report) => Ok(Report { directory: Some(directory), ..report }),
        Err(BenchError::Campaign(why)) => {
            Err(BenchError::Campaign(format!("{why}; histories and logs: {directory}")))
        }
        Err(error) => {
            Err(BenchError::Campaign(format!("{error}; histories and logs: {directory}")))
        }
    }
}

async fn campaign_in(
    directory: &Path,
    options: &Options,
    plan: &[Planned],
    watch: &impl Fn(&'static str, u64),
) -> Result<Report, BenchError> {
    let mut background = JoinSet::new();
    let hooks = Hooks::start(directory, &mut background).await?;
    watch("processes that start", 0);
    let stores = if options.cluster { Stores::Cluster } else { Stores::Pair };
    let world = World::start(directory, options.processes, stores, hooks.address).await?;
    hooks.know(world.nodes.iter().map(|node| node.api.clone()).collect());
    let load = Arc::new(Load::new(Arc::new(world), hooks));
    let of = Arc::clone(&load.world);
    let supervisor = background.spawn(async move { of.supervise().await });
    load.store_rules().await;
    let mut report = Report {
        seed: options.seed,
        seconds: options.seconds,
        processes: options.processes,
        cluster: options.cluster,
        ..Report::default()
    };
    let loads = start_load(&load, options.rate, options.seed);
    let started = Instant::now();
    let steady = load.world.nodes[0].process.lock().await.id();
    // After the first requests, so that what is made once is there.
    sleep(LOOK).await;
    report.resources = [Resources::of(steady).unwrap_or_default(); 3];
    let faults =
        inject_all(&load.world, plan, options, started, steady, &mut report, watch).await?;
    load.world.ready().await?;
    end(&load, loads, &mut report, watch).await?;
    let lasted = started.elapsed();
    judge(&load, directory, &faults, lasted, steady, &mut report).await?;
    supervisor.abort();
    stop(&load.world, &mut report.violations).await;
    Ok(report)
}

/// Starts all kinds of load.
fn start_load(load: &Arc<Load>, rate: u32, seed: u64) -> JoinSet<()> {
    load.since.store(now_us(), Ordering::Relaxed);
    let mut loads = JoinSet::new();
    for (place, (.., percent)) in PIPELINES.into_iter().enumerate() {
        let (load, rate) = (Arc::clone(load), rate * percent / 100);
        loads.spawn(async move { load.publish(place, rate, seed).await });
    }
    let of = Arc::clone(load);
    loads.spawn(async move { of.sell().await });
    let of = Arc::clone(load);
    loads.spawn(async move { of.count_views().await });
    let of = Arc::clone(load);
    loads.spawn(async move { of.notify().await });
    let of = Arc::clone(load);
    loads.spawn(async move { of.operate().await });
    loads
}

/// Carries out the plan. Returns when the time is over and all faults have ended.
async fn inject_all(
    world: &Arc<World>,
    plan: &[Planned],
    options: &Options,
    started: Instant,
    steady: u32,
    report: &mut Report,
    watch: &impl Fn(&'static str, u64),
) -> Result<Vec<Injected>, BenchError> {
    let (mut running, mut faults) = (JoinSet::new(), Vec::new());
    for planned in plan.iter().copied() {
        sleep_until(started + Duration::from_millis(planned.at_ms)).await;
        watch("faults", u64::try_from(planned.number + 1).unwrap_or_default());
        let world = Arc::clone(world);
        running.spawn(async move { world.inject(planned).await });
        while let Some(ended) = running.try_join_next() {
            faults.push(ended.map_err(panicked)??);
        }
        let now = Resources::of(steady);
        let now = now.ok_or_else(|| BenchError::Campaign("process 0 has ended".to_owned()))?;
        report.resources[1] = report.resources[1].max(now);
    }
    sleep_until(started + Duration::from_secs(options.seconds)).await;
    while let Some(ended) = running.join_next().await {
        faults.push(ended.map_err(panicked)??);
    }
    for fault in &faults {
        *report.faults.entry(fault.planned.fault.name()).or_default() += 1;
    }
    Ok(faults)
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn panicked(error: tokio::task::JoinError) -> BenchError {
    BenchError::Campaign(format!("a task of the campaign failed: {error}"))
}

/// Ends the load, and waits until everything has had its effect.
async fn end(
    load: &Load,
    mut loads: JoinSet<()>,
    report: &mut Report,
    watch: &impl Fn(&'static str, u64),
) -> Result<(), BenchError> {
    let ended = Instant::now();
    let (redriven, broken) = settle(load, &mut loads, watch).await?;
    report.dead_letters_redriven += redriven;
    report.violations.extend(broken);
    report.drained_ms = u64::try_from(ended.elapsed().as_millis()).unwrap_or(u64::MAX);
    Ok(())
}

/// Stops the load, cures what fails on purpose, and waits until everything has had its effect. Returns
/// the number of dead letters that it put back, and what did not hold.
async fn settle(
    load: &Load,
    loads: &mut JoinSet<()>,
    watch: &impl Fn(&'static str, u64),
) -> Result<(u64, Vec<String>), BenchError> {
    let mut broken = Vec::new();
    load.ending.store(true, Ordering::Relaxed);
    let ending = timeout(ENDS, async { while loads.join_next().await.is_some() {} });
    if ending.await.is_err() {
        broken.push(format!("a request gets no acknowledgement for {ENDS:?}"));
    }
    load.cured.store(now_us(), Ordering::Relaxed);
    fs::write(load.world.directory.join("cured"), "")?;
    let (redriven, drained) = drain::drain(load, watch).await?;
    if let Err(left) = drained {
        load.world.redis.lock().await.keep_data(&load.world.directory.join("redis")).await;
        broken.push(format!("not everything is handled after the load: {left}"));
    }
    Ok((redriven, broken))
}

/// Compares what was acknowledged with what happened.
async fn judge(
    load: &Load,
    directory: &Path,
    faults: &[Injected],
    lasted: Duration,
    steady: u32,
    report: &mut Report,
) -> Result<(), BenchError> {
    let acknowledged = std::mem::take(&mut *load.acknowledged());
    fs::write(directory.join("sent.tsv"), watch::sent_lines(&acknowledged.sent))?;
    fs::write(directory.join("faults.tsv"), watch::fault_lines(faults))?;
    let mut first_done = FirstDone::default();
    let cured = load.cured.load(Ordering::Relaxed);
    let Acknowledged { released, put_back, .. } = &acknowledged;
    let course = Course { directory, cured, released, put_back };
    report.pipelines =
        verdict::pipelines(course, &acknowledged.sent, &mut first_done, &mut report.violations)?;
    let replays = &acknowledged.replays;
    report.replays =
        replays::judge(course, replays, &acknowledged.sent, &first_done, &mut report.violations)?;
    for (pipeline, letters) in put_back {
        for letter in letters {
            let reason = format!("{pipeline}: {}", letter.reason);
            *report.dead_letters.entry(reason).or_default() += 1;
        }
    }
    report.recoveries = first_done.recoveries(&acknowledged.sent, faults);
    let clocks = faults.iter().any(|fault| fault.planned.fault == Fault::ClockStepped);
    let called = std::mem::take(&mut *load.hooks.notified.lock().expect("no task panicked"));
    report.notifications = acknowledged.notifications.len();
    report.notifications_repeated = verdict::notifications(
        &acknowledged.notifications,
        &called,
        clocks,
        &mut report.violations,
    );
    compare(load, &verdict::totals(&acknowledged), &mut report.violations).await;
    report.views = acknowledged.views.values().sum();
    report.sales = acknowledged.sales.values().sum();
    report.operations = acknowledged.operations;
    report.requests_repeated = load.repeated.load(Ordering::Relaxed);
    report.restarts = load.world.restarted.load(Ordering::Relaxed);
    let leases = load.hooks.leases.each_ref().map(|count| count.load(Ordering::Relaxed));
    [report.leases_completed, report.leases_failed, report.leases_left] = leases;
    let refused = acknowledged.refused.iter();
    report.violations.extend(refused.map(|answer| format!("a client was refused: {answer}")));
    let (levels, panics) = watch::log_lines(directory, load.world.nodes.len())?;
    let minutes = lasted.as_secs_f64() / 60.0;
    #[expect(clippy::cast_precision_loss, reason = "a count of lines")]
    let rate = |count: u64| count as f64 / minutes;
    report.log_lines_per_minute =
        levels.into_iter().map(|(level, count)| (level, rate(count))).collect();
    report.violations.extend(panics.into_iter().map(|line| format!("a process says: {line}")));
    let mut primaries = load.world.redis.lock().await.primaries().await;
    report.keys = watch::keys(&mut primaries).await?;
    report.resources[2] = Resources::of(steady).unwrap_or_default();
    report.resources[1] = report.resources[1].max(report.resources[2]);
    grown(report);
    Ok(())
}

/// Compares the totals of counters with what was acknowledged so far.
async fn compare_totals(load: &Load, violations: &mut Vec<String>) {
    let expected = verdict::totals(&load.acknowledged());
    compare(load, &expected, violations).await;
}

async fn compare(
    load: &Load,
    expected: &BTreeMap<String, BTreeMap<String, u64>>,
    violations: &mut Vec<String>,
) {
    for (bot, expected) in expected {
        let ads: Vec<&str> = expected.keys().map(String::as_str).collect();
        let found = load.totals(bot, &ads).await;
        if found != *expected {
            violations.push(format!("counters of {bot}: {found:?} instead of {expected:?}"));
        }
    }
}

/// Whether the first process has kept what it needed for the faults.
fn grown(report: &mut Report) {
    let [start, _, end] = report.resources;
    for (what, start, end, more) in [
        ("descriptors", start.descriptors, end.descriptors, DESCRIPTORS_MORE),
        ("threads", start.threads, end.threads, THREADS_MORE),
        ("MB of memory", start.memory_mb, end.memory_mb, MEMORY_MORE_MB),
    ] {
        if end > start + more {
            let found = format!("process 0 has {end} {what} at the end, and had {start}");
            report.violations.push(found);
        }
    }
}

/// Stops all processes as an operator does.
async fn stop(world: &World, violations: &mut Vec<String>) {
    for (place, node) in world.nodes.iter().enumerate() {
        if !node.process.lock().await.stop(STOPS).await {
            violations.push(format!("process {place} did not end at SIGTERM"));
        }
    }
}
