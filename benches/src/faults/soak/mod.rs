//! `fairlane-bench soak`: every product for hours, with the load of many days and restarts, and what it
//! uses meanwhile.
//!
//! Each day is shorter than a real one. Its load rises and falls twice. In the night the load ends, all
//! of the day must have had its effect, and the history of the day is judged and removed. So a soak of
//! any length needs the memory of one day.

mod chart;
mod periods;
mod state;

use std::fs;
use std::mem::take;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fairlane_testkit::process;
use futures_util::FutureExt as _;
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tracing::warn;

use super::hooks::Hooks;
use super::load::{Load, PIPELINES};
use super::replays::{self, Replays};
use super::servers::info;
use super::verdict::{self, Course, Pipeline};
use super::watch::{self, FirstDone, Resources};
use super::worker::{RECORDED, history, now_us};
use super::world::{Stores, World};
use super::{STOPS, settle, start_load, stop};
use crate::error::BenchError;

use self::periods::{Period, Sample, Used, grown, periods};
use self::state::State;

/// Interval of a new pace of the load.
const TICK: Duration = Duration::from_secs(1);
/// Interval of looking at what is used.
const SAMPLE: Duration = Duration::from_secs(10);
/// Rows of the table.
const ROWS: usize = 16;

/// The options.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) seed: u64,
    /// The whole duration, without the nights.
    pub(crate) seconds: u64,
    /// Events per second at the peak.
    pub(crate) rate: u32,
    pub(crate) processes: usize,
    pub(crate) days: u32,
    /// Where to write the chart.
    pub(crate) chart: Option<PathBuf>,
    /// Where a later run finds what it needs to go on.
    pub(crate) state: Option<PathBuf>,
}

/// The result.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) seed: u64,
    pub(crate) seconds: u64,
    pub(crate) rate: u32,
    pub(crate) days: u32,
    pub(crate) processes: usize,
    /// The number of runs that the soak is made of.
    pub(crate) runs: u32,
    /// The promises that did not hold, in words. Empty: all held.
    pub(crate) violations: Vec<String>,
    /// Sums over all days.
    pub(crate) pipelines: Vec<Pipeline>,
    pub(crate) views: u64,
    pub(crate) sales: u64,
    pub(crate) notifications: usize,
    pub(crate) notifications_repeated: u64,
    pub(crate) replays: Replays,
    pub(crate) dead_letters_redriven: u64,
    pub(crate) restarts: u32,
    pub(crate) reloads: u32,
    /// The longest night: how long it took until everything was handled.
    pub(crate) drained_ms: u64,
    pub(crate) periods: Vec<Period>,
    /// Where the histories and the logs are, if a promise did not hold.
    pub(crate) directory: Option<String>,
}

/// A soak in progress.
struct Soak {
    load: Arc<Load>,
    options: Options,
    steady: u32,
    samples: Vec<Sample>,
    /// When events were acknowledged after the start of the soak, and how long they took, both in µs.
    delays: Vec<(u64, u32)>,
    /// When this run started, see [`now_us`], and how long the ones before lasted, µs.
    started: u64,
    before_us: u64,
    /// The first day of this run.
    first_day: u32,
    /// The process that is restarted next.
    next: usize,
    /// SIGTERM ends the day early.
    terminate: Signal,
    /// The durations of all days together, also of the runs before.
    lasted: Duration,
    report: Report,
}

/// Runs the soak.
///
/// # Errors
/// If a server or a process cannot be started or controlled. Violations are no errors.
pub(crate) async fn run(
    mut options: Options,
    watch: impl Fn(&'static str, u64),
) -> Result<Report, BenchError> {
    if let Some(kept) = &mut options.state {
        // The servers have another working directory.
        *kept = std::path::absolute(&*kept)?;
    }
    if let Some(path) = &options.chart {
        // Hours later would be too late.
        fs::File::create(path).map_err(|error| {
            BenchError::Campaign(format!("--chart {}: {error}", path.display()))
        })?;
    }
    let directory = tempfile::Builder::new().prefix("fairlane-soak-").tempdir()?;
    let state = match &options.state {
        Some(kept) => State::take(kept, &options)?,
        None => State::new(&options),
    };
    let mut report = Box::pin(run_in(directory.path(), options, state, &watch)).await?;
    if !report.violations.is_empty() {
        report.directory = Some(directory.keep().display().to_string());
    }
    Ok(report)
}

async fn run_in(
    directory: &Path,
    options: Options,
    state: State,
    watch: &impl Fn(&'static str, u64),
) -> Result<Report, BenchError> {
    let terminate = signal(SignalKind::terminate())?;
    let mut background = JoinSet::new();
    let hooks = Hooks::start(directory, &mut background).await?;
    watch("processes that start", 0);
    let stores = options.state.clone().map_or(Stores::Pair, Stores::Kept);
    let world = World::start(directory, options.processes, stores, hooks.address).await?;
    hooks.know(world.nodes.iter().map(|node| node.api.clone()).collect());
    let load = Arc::new(Load::new(Arc::new(world), hooks));
    load.store_rules().await;
    let steady = load.world.nodes[0].process.lock().await.id();
    let mut soak = Soak::go_on(load, options, state, steady, terminate);
    if let Some(kept) = &soak.options.state {
        State::begin(kept)?;
    }
    while soak.lasted < Duration::from_secs(soak.options.seconds) {
        let day = soak.report.days;
        watch("days", u64::from(day) + 1);
        let known = soak.report.violations.len();
        let (loads, end) = soak.day(day).await?;
        soak.night(loads, watch).await?;
        soak.judge_day(directory).await?;
        // Those of a soak that is killed later would be lost.
        for violation in &soak.report.violations[known..] {
            warn!(day, violation, "a promise did not hold");
        }
        soak.draw()?;
        // The signal may also have come in the night.
        if end == End::Signal || soak.terminate.recv().now_or_never().is_some() {
            break;
        }
    }
    soak.judge_all(directory)?;
    stop(&soak.load.world, &mut soak.report.violations).await;
    soak.keep()?;
    Ok(soak.report)
}

/// Why a day ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Time,
    Signal,
}

/// The part of the rate at this part of the day, percent: two peaks, and little around midnight.
fn pace(of_day: f64) -> u32 {
    let wave = (of_day * std::f64::consts::TAU).sin().powi(2);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "10 to 100")]
    let percent = (10.0 + 90.0 * wave) as u32;
    percent
}

impl Soak {
    /// Begins with what the runs before have left.
    fn go_on(
        load: Arc<Load>,
        options: Options,
        state: State,
        steady: u32,
        terminate: Signal,
    ) -> Self {
        {
            let mut all = load.acknowledged();
            all.views =
                state.views.into_iter().map(|(bot, ad, views)| ((bot, ad), views)).collect();
            all.sales = state.sales;
        }
        let mut report = state.report;
        report.runs += 1;
        Self {
            load,
            options,
            steady,
            samples: state.samples,
            delays: state.delays,
            started: now_us(),
            before_us: state.elapsed_us,
            first_day: report.days,
            next: state.next,
            terminate,
            lasted: Duration::from_micros(state.lasted_us),
            report,
        }
    }

    /// Keeps what a later run needs. It has no request or event in progress to know of.
    fn keep(&mut self) -> Result<(), BenchError> {
        let Some(directory) = &self.options.state else { return Ok(()) };
        let all = self.load.acknowledged();
        let views = all.views.iter().map(|((bot, ad), &views)| (bot.clone(), ad.clone(), views));
        let state = State {
            report: self.report.clone(),
            lasted_us: u64::try_from(self.lasted.as_micros()).unwrap_or(u64::MAX),
            elapsed_us: self.since_start(now_us()),
            next: self.next,
            samples: take(&mut self.samples),
            delays: take(&mut self.delays),
            views: views.collect(),
            sales: all.sales.clone(),
        };
        state.keep(directory)
    }

    /// The time after the start of the soak at which this was, see [`now_us`], without the pauses
    /// between its runs, µs.
    fn since_start(&self, at: u64) -> u64 {
        self.before_us + at.saturating_sub(self.started)
    }

    /// Load, restarts and samples until the night. Returns the load, which goes on until then.
    async fn day(&mut self, day: u32) -> Result<(JoinSet<()>, End), BenchError> {
        let load = Arc::clone(&self.load);
        let _ = fs::remove_file(load.world.directory.join("cured"));
        load.day.store(day, Ordering::Relaxed);
        load.ending.store(false, Ordering::Relaxed);
        let loads = start_load(&load, self.options.rate, self.options.seed ^ u64::from(day));
        let whole = Duration::from_secs(self.options.seconds);
        let left = whole.saturating_sub(self.lasted);
        let lasts = (whole / self.options.days.max(1)).min(left);
        let (started, mut sampled) = (Instant::now(), None::<Instant>);
        // Each process but the first is restarted once. At noon the first one reloads.
        let actions = u32::try_from(self.options.processes).unwrap_or(u32::MAX);
        let mut acted = 0;
        let mut end = End::Time;
        while started.elapsed() < lasts {
            let of_day = started.elapsed().as_secs_f64() / lasts.as_secs_f64();
            load.pace.store(pace(of_day), Ordering::Relaxed);
            if sampled.is_none_or(|at| at.elapsed() >= SAMPLE) {
                sampled = Some(Instant::now());
                let used = self.used().await?;
                let at = self.since_start(now_us());
                self.samples.push(Sample { at, day, used });
            }
            if of_day * f64::from(actions + 1) > f64::from(acted + 1) {
                acted += 1;
                self.act(acted == actions.div_ceil(2)).await?;
            }
            if timeout(TICK, self.terminate.recv()).await.is_ok() {
                end = End::Signal;
                break;
            }
        }
        self.report.days = day + 1;
        self.lasted += started.elapsed();
        self.report.seconds = self.lasted.as_secs();
        Ok((loads, end))
    }

    /// Reloads the first process, or restarts one of the others.
    async fn act(&mut self, reloads: bool) -> Result<(), BenchError> {
        let world = &self.load.world;
        if reloads {
            world.nodes[0].configure(20 + u64::from(self.report.reloads % 50))?;
            process::signal(self.steady, "HUP");
            self.report.reloads += 1;
            return Ok(());
        }
        let place = self.next;
        self.next = if place + 1 < world.nodes.len() { place + 1 } else { 1 };
        let mut process = world.nodes[place].process.lock().await;
        if !process.stop(STOPS).await {
            self.report.violations.push(format!("process {place} did not end at SIGTERM"));
        }
        self.report.restarts += 1;
        world.restart(place, &mut process)
    }

    async fn used(&self) -> Result<Used, BenchError> {
        let ended = || BenchError::Campaign("process 0 has ended".to_owned());
        let process = Resources::of(self.steady).ok_or_else(ended)?;
        let mut primaries = self.load.world.redis.lock().await.primaries().await;
        let mut redis = primaries.swap_remove(0);
        let memory = info(&mut redis, "memory").await?;
        let used = memory.lines().find_map(|line| line.strip_prefix("used_memory:"));
        let used: u64 = used.and_then(|used| used.trim().parse().ok()).unwrap_or_default();
        // db0:keys=12,expires=3,avg_ttl=…
        let space = info(&mut redis, "keyspace").await?;
        let count = |name: &str| {
            let (_, rest) = space.split_once(name)?;
            rest.split(|other: char| !other.is_ascii_digit()).next()?.parse::<u64>().ok()
        };
        let (keys, expires) = (count("keys=").unwrap_or(0), count("expires=").unwrap_or(0));
        let lasting_keys = keys.saturating_sub(expires);
        Ok(Used { process, redis_mb: used / 1_048_576, keys, lasting_keys })
    }

    /// Waits until everything of the day has had its effect.
    async fn night(
        &mut self,
        mut loads: JoinSet<()>,
        watch: &impl Fn(&'static str, u64),
    ) -> Result<(), BenchError> {
        let started = Instant::now();
        self.load.world.ready().await?;
        let (redriven, broken) = settle(&self.load, &mut loads, watch).await?;
        self.report.dead_letters_redriven += redriven;
        self.report.violations.extend(broken);
        let took = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.report.drained_ms = self.report.drained_ms.max(took);
        Ok(())
    }

    /// Compares the history of the day with what was acknowledged, and removes it.
    async fn judge_day(&mut self, directory: &Path) -> Result<(), BenchError> {
        let (load, report) = (&self.load, &mut self.report);
        let (sent, due, replays, released, put_back) = {
            let mut all = load.acknowledged();
            let all = &mut *all;
            (
                take(&mut all.sent),
                take(&mut all.notifications),
                take(&mut all.replays),
                take(&mut all.released),
                take(&mut all.put_back),
            )
        };
        let mut done = FirstDone::default();
        let cured = load.cured.load(Ordering::Relaxed);
        let course = Course { directory, cured, released: &released, put_back: &put_back };
        let pipelines = verdict::pipelines(course, &sent, &mut done, &mut report.violations)?;
        let replays = replays::judge(course, &replays, &sent, &done, &mut report.violations)?;
        report.replays.add(&replays);
        if report.pipelines.is_empty() {
            report.pipelines = pipelines;
        } else {
            for (sum, day) in report.pipelines.iter_mut().zip(&pipelines) {
                sum.add(day);
            }
        }
        let (before, started) = (self.before_us, self.started);
        self.delays.extend(done.delays(&sent).into_iter().map(|(at, delay)| {
            (before + at.saturating_sub(started), u32::try_from(delay).unwrap_or(u32::MAX))
        }));
        let called = take(&mut *load.hooks.notified.lock().expect("no task panicked"));
        report.notifications += due.len();
        report.notifications_repeated +=
            verdict::notifications(&due, &called, false, &mut report.violations);
        super::compare_totals(load, &mut report.violations).await;
        // The processes go on writing to the same files.
        let of_hooks = PIPELINES.iter().map(|(name, ..)| history(directory, name, 0));
        let numbers =
            1..=u32::try_from(self.options.processes).unwrap_or(u32::MAX) * (report.restarts + 1);
        let of_processes = RECORDED
            .iter()
            .chain(&[replays::HISTORY])
            .flat_map(|name| numbers.clone().map(|number| history(directory, name, number)));
        for file in of_hooks.chain(of_processes).filter(|file| file.exists()) {
            fs::File::options().write(true).open(file)?.set_len(0)?;
        }
        Ok(())
    }

    /// The periods, and what has grown.
    fn judge_all(&mut self, directory: &Path) -> Result<(), BenchError> {
        let report = &mut self.report;
        {
            let all = self.load.acknowledged();
            report.views = all.views.values().sum();
            report.sales = all.sales.values().sum();
            let refused = all.refused.iter();
            report
                .violations
                .extend(refused.map(|answer| format!("a client was refused: {answer}")));
        }
        let (_, panics) = watch::log_lines(directory, self.load.world.nodes.len())?;
        report.violations.extend(panics.into_iter().map(|line| format!("a process says: {line}")));
        // The processes of this run are new, and the stores are not.
        report.violations.extend(grown(&self.samples, self.first_day));
        if self.first_day > 0 {
            report.violations.extend(grown(&self.samples, 0));
        }
        report.periods = periods(&self.delays, &self.samples, ROWS);
        Ok(())
    }

    /// Draws the chart of all days until now, so that hours are not lost if the soak is killed.
    fn draw(&mut self) -> Result<(), BenchError> {
        self.delays.sort_unstable();
        if let Some(path) = &self.options.chart {
            // One point a minute, and at least some.
            let minutes = usize::try_from(self.report.seconds / 60).unwrap_or(usize::MAX);
            let points = periods(&self.delays, &self.samples, minutes.clamp(ROWS, 480));
            fs::write(path, chart::svg(&points))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_day_has_two_peaks_and_is_quiet_around_midnight() {
        assert_eq!((pace(0.0), pace(0.25), pace(0.75)), (10, 100, 100));
        assert!(pace(0.5) <= 11 && pace(0.99) < 20, "{} {}", pace(0.5), pace(0.99));
    }
}
