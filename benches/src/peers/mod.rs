//! `fairlane-bench peers`: Fairlane and other queues on Redis, with the same work in the same run.
//!
//! The systems take turns within each round, each with a new private Redis, so that load from
//! elsewhere affects all of them. All get the same events: the same bytes in the same order. The
//! programs of Node.js are in `benches/peers`. The side that adds events and the side that handles
//! them are separate processes there, and separate tasks here.
//!
//! Every worker logs the start and the end of each handling. One judge counts lost, repeated and
//! reordered events in these logs, for all systems alike.

pub(crate) mod campaign;
mod figures;
mod floor;
mod judge;
mod node;
mod system;
mod tally;
mod work;
mod workers;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use fairlane::sandbox::{Rig, raise_open_files};

use self::campaign::Survived;
use self::figures::{Fairness, Runs, Throughput, lines};
pub(crate) use self::figures::{Figure, Report};
use self::judge::{Verdict, backlog_seconds, quiet_waits};
use self::node::{About, Programs};
use self::system::HANDLING;
pub(crate) use self::system::{Measure, System};
use self::work::{BYTES, Work};
use self::workers::{Adder, Plan, Worker};
use crate::error::BenchError;
use crate::probe;

/// Quiet events start this long after the workers, so that their waits contain no start.
const HEAD_START: Duration = Duration::from_secs(1);
/// The backlog lasts for at least this much longer than quiet events are sent.
const BACKLOG_MARGIN: Duration = Duration::from_secs(1);
/// Open files of a process beside a connection per tenant.
const OPEN_FILES: u64 = 1_024;

/// The options.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) systems: Vec<System>,
    pub(crate) measures: Vec<Measure>,
    /// Number of tenants.
    pub(crate) tenants: usize,
    /// Number of events of each tenant.
    pub(crate) events: usize,
    pub(crate) rounds: usize,
    /// Number of tenants with a backlog.
    pub(crate) busy: usize,
    /// Time for which quiet events are sent, seconds.
    pub(crate) seconds: u64,
    /// Draws the faults and the events beside them. Each further round has the next seed.
    pub(crate) seed: u64,
    /// Duration of the faults, seconds.
    pub(crate) fault_seconds: u64,
    /// Quiet events per second.
    pub(crate) rate: u32,
    /// The directory of the programs of Node.js.
    pub(crate) programs: PathBuf,
}

/// Runs the bench.
///
/// # Errors
/// If a private Redis or a system fails, or if Node.js or its packages are missing.
pub(crate) async fn run(
    options: Options,
    mut watch: impl FnMut(&'static str, u64),
) -> Result<Report, BenchError> {
    let needs_node = options.systems.iter().any(|system| system.is_node());
    let programs = needs_node.then(|| Programs::find(&options.programs)).transpose()?;
    // Redis lowers its number of clients to what the limit of open files permits.
    let _ = raise_open_files(2 * options.tenants as u64 + OPEN_FILES);
    let mut bench = Bench {
        runs: options.systems.iter().map(|system| options.given(*system)).collect(),
        versions: BTreeMap::new(),
        options,
        programs,
    };
    bench.versions.insert("fairlane".to_owned(), env!("CARGO_PKG_VERSION").to_owned());
    for round in 0..bench.options.rounds {
        for turn in 0..bench.runs.len() {
            // Another system starts each round.
            let index = (turn + round) % bench.runs.len();
            let name = bench.runs[index].system.name();
            for measure in bench.options.measures.clone() {
                watch(name, 0);
                bench.measure(index, measure, round, |done| watch(name, done)).await?;
            }
        }
    }
    let Bench { options, runs, versions, .. } = bench;
    Ok(Report {
        tenants: options.tenants,
        rounds: options.rounds,
        event_bytes: BYTES,
        busy_tenants: options.busy,
        quiet_seconds: options.seconds,
        head_start_seconds: HEAD_START.as_secs(),
        quiet_per_second: options.rate,
        handling_ms: HANDLING.as_secs_f64() * 1_000.0,
        seed: options.seed,
        fault_seconds: options.fault_seconds,
        versions,
        systems: lines(&runs),
    })
}

impl Options {
    /// What a system is given.
    fn given(&self, system: System) -> Runs {
        let time = HEAD_START + Duration::from_secs(self.seconds) + BACKLOG_MARGIN;
        Runs {
            system,
            events: system.events_per_tenant(self.events) * self.tenants,
            backlog: system.backlog_per_tenant(self.busy, time) * self.busy,
            settings: BTreeMap::new(),
            throughput: Vec::new(),
            fairness: Vec::new(),
            faults: Vec::new(),
        }
    }
}

/// The runs so far.
struct Bench {
    options: Options,
    programs: Option<Programs>,
    runs: Vec<Runs>,
    versions: BTreeMap<String, String>,
}

impl Bench {
    async fn measure(
        &mut self,
        index: usize,
        measure: Measure,
        round: usize,
        watch: impl FnMut(u64),
    ) -> Result<(), BenchError> {
        match measure {
            Measure::Throughput => {
                let run = Box::pin(self.throughput(index, watch)).await?;
                self.runs[index].throughput.push(run);
            }
            Measure::Fairness => {
                let run = Box::pin(self.fairness(index, watch)).await?;
                self.runs[index].fairness.push(run);
            }
            Measure::Faults => {
                let run = Box::pin(self.faults(index, round, watch)).await?;
                self.runs[index].faults.push(run);
            }
        }
        Ok(())
    }

    /// Adds all events and then handles them. Then both concurrently, on another Redis.
    #[expect(clippy::cast_precision_loss, reason = "counts of events")]
    async fn throughput(
        &mut self,
        index: usize,
        mut watch: impl FnMut(u64),
    ) -> Result<Throughput, BenchError> {
        let system = self.runs[index].system;
        let tenants = self.options.tenants;
        let work = Work::mixed(tenants, system.events_per_tenant(self.options.events))?;
        let per_tenant = work.per_tenant.clone();
        let plan = Plan { system, measure: Measure::Throughput, per_tenant, rate: 0 };
        let programs = self.programs.clone().filter(|_| system.is_node());
        let programs = programs.as_ref();

        let (enqueue, drained, cpu) = Box::pin(Rig::with(async |rig| {
            self.note_redis(rig).await?;
            let adder = Adder::prepare(rig, programs, &plan, &work, false).await?;
            self.note(index, "adds", adder.about());
            let before = probe::cpu(rig).await?;
            let enqueue = adder.run().await?;
            let adding = probe::cpu(rig).await? - before;
            let worker = Worker::prepare(rig, programs, &plan).await?;
            self.note(index, "handles", worker.about(&plan));
            let before = probe::cpu(rig).await?;
            let drained = worker.run(&plan, &mut watch).await?;
            let handling = probe::cpu(rig).await? - before;
            Ok::<_, BenchError>((enqueue, drained, adding + handling))
        }))
        .await?;
        let both = Box::pin(Rig::with(async |rig| {
            let adder = Adder::prepare(rig, programs, &plan, &work, false).await?;
            let worker = Worker::prepare(rig, programs, &plan).await?;
            let (_, handled) = tokio::try_join!(adder.run(), worker.run(&plan, &mut watch))?;
            Ok::<_, BenchError>(handled)
        }))
        .await?;
        let verdict = |log| Verdict::of(log, &plan.per_tenant);
        Ok(Throughput {
            enqueue,
            drain: drained.per_second(),
            end_to_end: both.per_second(),
            redis_us: cpu * 1e6 / work.len() as f64,
            verdict: verdict(&drained.log).plus(verdict(&both.log)),
        })
    }

    /// Adds the backlog. Then handles it, while quiet events are added by the clock.
    async fn fairness(
        &mut self,
        index: usize,
        mut watch: impl FnMut(u64),
    ) -> Result<Fairness, BenchError> {
        let Options { tenants, busy, seconds, rate, .. } = self.options;
        let Runs { system, backlog, .. } = self.runs[index];
        let backlog = Work::backlog(tenants, busy, backlog / busy)?;
        let count = usize::try_from(seconds * u64::from(rate)).unwrap_or(usize::MAX);
        let quiet = Work::quiet(tenants, busy, count)?;
        let both = backlog.per_tenant.iter().zip(&quiet.per_tenant);
        let per_tenant = both.map(|(backlog, quiet)| backlog + quiet).collect();
        let plan = Plan { system, measure: Measure::Fairness, per_tenant, rate };
        let programs = self.programs.clone().filter(|_| system.is_node());
        let programs = programs.as_ref();

        let worked = Box::pin(Rig::with(async |rig| {
            self.note_redis(rig).await?;
            Adder::prepare(rig, programs, &plan, &backlog, false).await?.run().await?;
            let adder = Adder::prepare(rig, programs, &plan, &quiet, true).await?;
            self.note(index, "adds quiet events", adder.about());
            let worker = Worker::prepare(rig, programs, &plan).await?;
            self.note(index, "handles beside a backlog", worker.about(&plan));
            let quiet = async {
                tokio::time::sleep(HEAD_START).await;
                adder.run().await
            };
            let (_, handled) = tokio::try_join!(quiet, worker.run(&plan, &mut watch))?;
            Ok::<_, BenchError>(handled)
        }))
        .await?;
        Ok(Fairness {
            waits: quiet_waits(&worked.log, busy),
            backlog_seconds: backlog_seconds(&worked.log, busy),
            verdict: Verdict::of(&worked.log, &plan.per_tenant),
        })
    }

    /// Handles events by the clock in several processes, while faults hit these and Redis.
    async fn faults(
        &mut self,
        index: usize,
        round: usize,
        mut watch: impl FnMut(u64),
    ) -> Result<Survived, BenchError> {
        let Options { seed, fault_seconds, .. } = self.options;
        let system = self.runs[index].system;
        self.runs[index].settings.extend(campaign::settings(system));
        let directory =
            self.programs.as_ref().filter(|_| system.is_node()).map(Programs::directory);
        if let Some(programs) = self.programs.as_ref().filter(|_| system.is_node()) {
            self.versions.extend(programs.versions(system)?);
        }
        let length = Duration::from_secs(fault_seconds);
        let survived =
            campaign::run(system, seed + round as u64, length, directory, &mut watch).await?;
        self.versions.insert("redis".to_owned(), survived.redis.clone());
        Ok(survived)
    }

    fn note(&mut self, index: usize, role: &'static str, about: About) {
        self.versions.extend(about.versions);
        self.runs[index].settings.insert(role, about.settings);
    }

    async fn note_redis(&mut self, rig: &Rig) -> Result<(), BenchError> {
        let info = probe::info(rig, "server").await?;
        let version = info.lines().find_map(|line| line.strip_prefix("redis_version:"));
        let version = version.unwrap_or("unknown").trim().to_owned();
        self.versions.insert("redis".to_owned(), version);
        Ok(())
    }
}
