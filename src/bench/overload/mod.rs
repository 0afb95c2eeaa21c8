//! `fairlane bench overload`: what is answered in time when far more is asked for than can be.
//!
//! A server in a process of its own, pinned to one processor; the generator (`load`) pinned to
//! another. Capacity is measured first. Then the load goes from half of it to ten times of it, the
//! critical classes held at half, against the admission of this program, against none, and against
//! `tower`'s concurrency limit with load shedding, one after the other in every round.
//!
//! Workloads: requests that need the processor for 2 ms; requests that wait for a dependency with 8
//! slots of 4 ms; and totals of the real service, up to three times its capacity, where a refusal
//! costs nearly as much as an answer.

pub mod chart;
mod flood;
mod load;
mod reads;
pub mod server;

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde::Serialize;

use self::load::{Load, Outcome, Phase, TENANTS, TICK, quantile_ms};
use super::BenchError;
use super::mongo::Choice;

/// What a request needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Workload {
    /// The processor for 2 ms.
    Cpu,
    /// A dependency with 8 slots of 4 ms.
    Dependency,
    /// Totals of the real service.
    Reads,
}

/// What stands before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Protection {
    /// The admission of this program.
    Admission,
    /// Nothing.
    None,
    /// `tower`: 64 at once, the others refused.
    Tower,
}

/// What to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// What requests need.
    pub workloads: Vec<Workload>,
    /// Times the capacity that is asked for, in this order; none: half of it to ten times of it.
    pub loads: Vec<f64>,
    /// How long each load lasts.
    pub seconds: u64,
    /// How often it is all done.
    pub rounds: usize,
    /// Where the views of the real service are.
    pub mongo: Choice,
}

/// What came out.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Seconds of each load, and how often it was all done; figures are medians.
    pub seconds: u64,
    /// Rounds.
    pub rounds: usize,
    /// By workload.
    pub workloads: Vec<Figures>,
    /// With 2,000 connections that send slowly or nothing: the share of the critical classes that
    /// was answered in time.
    pub flood: Option<Flood>,
}

/// What came out of a flood.
#[derive(Debug, Clone, Copy, Serialize)]
#[expect(missing_docs, reason = "said above")]
pub struct Flood {
    pub connections: usize,
    pub p0_success: f64,
    pub p1_success: f64,
    pub p1_p99_ms: f64,
}

/// What came out for one workload; medians of the rounds.
#[derive(Debug, Clone, Serialize)]
pub struct Figures {
    /// What requests need.
    pub workload: Workload,
    /// Requests per second that can be answered.
    pub capacity_per_second: f64,
    /// How many times the capacity was asked for at the most.
    pub highest_load: f64,
    /// Answered in time at that load, over the best at any load.
    pub goodput_at_10x_ratio: f64,
    /// The lowest of the rounds, at the highest load.
    pub p0_success: f64,
    /// The lowest of the rounds, at the highest load.
    pub p1_success: f64,
    /// The lowest of the rounds and loads.
    pub p1_success_least: f64,
    /// At the highest load.
    pub admitted_p99_ms: f64,
    /// That requests have.
    pub deadline_ms: u64,
    /// Refused at 0.8 times the capacity and below, in all rounds.
    pub shed_below_capacity: u64,
    /// From the end of ten times the capacity, with clients that try again three times, to the last
    /// refusal.
    pub recovery_ms: Option<f64>,
    /// After that, the share that is answered.
    pub recovered_success: Option<f64>,
    /// One tenant of 100 at ten times its share: the p99 of the others, over theirs without it.
    pub others_p99_ratio: Option<f64>,
    /// And the share of the others' requests that was answered in time.
    pub others_success: Option<f64>,
    /// The dependency becomes ten times slower: answered in time then, over what it can do then.
    pub slow_goodput_ratio: Option<f64>,
    /// And from when it recovers until nothing is refused any more.
    pub slow_recovery_ms: Option<f64>,
    /// Memory of the server at the highest load over that at its capacity.
    pub memory_ratio: f64,
    /// Runs that were done again, because the generator was late or the machine took the server's
    /// processor away.
    pub void_runs: u64,
    /// The generator sent 99 % at most so late, in the worst run that counts; above 5, no try of
    /// five was better, and the figures are void.
    pub lag_p99_ms: f64,
    /// The share of the time in which the machine took the server's processor away, in the worst run
    /// that counts; above 0.01 likewise.
    pub away: f64,
    /// Every load.
    pub curve: Vec<Point>,
}

/// One load.
#[derive(Debug, Clone, Serialize)]
#[expect(missing_docs, reason = "as in the figures")]
pub struct Point {
    pub protection: Protection,
    /// Times the capacity.
    pub load: f64,
    pub goodput_per_second: f64,
    pub p99_ms: f64,
    pub p0_success: f64,
    pub p1_success: f64,
    pub p1_shed: u64,
    pub p1_late: u64,
    pub p1_failed: u64,
    pub shed: u64,
    pub late: u64,
    pub failed: u64,
}

/// Runs it.
///
/// # Errors
/// When a server cannot be started or does not answer.
pub async fn run(
    options: Options,
    mut watch: impl FnMut(&'static str, u64),
) -> Result<Report, BenchError> {
    let (mut workloads, mut flood) = (Vec::new(), None);
    for &workload in &options.workloads {
        workloads.push(match workload {
            Workload::Reads => reads::measure(&options, &mut watch).await?,
            Workload::Cpu | Workload::Dependency => {
                synthetic(workload, &options, &mut watch).await?
            }
        });
        if workload == Workload::Dependency {
            watch("dependency: floods of connections", 0);
            flood = Some(flood::measure().await?);
        }
    }
    let Options { seconds, rounds, .. } = options;
    Ok(Report { seconds, rounds, workloads, flood })
}

/// A server in a process of its own.
struct Served {
    child: Child,
    address: SocketAddr,
}

impl Served {
    /// Starts the server of a workload.
    fn start(workload: Workload, protection: Protection, rounds: u64) -> Result<Self, BenchError> {
        let rounds = rounds.to_string();
        let name = |value: &dyn std::fmt::Debug| format!("{value:?}").to_lowercase();
        let arguments = [
            "bench",
            "overload-server",
            "--workload",
            &name(&workload),
            "--protection",
            &name(&protection),
            "--rounds",
            &rounds,
        ];
        let mut child = Command::new(std::env::current_exe()?)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        let address = line.trim().parse().map_err(|_| {
            BenchError::Stuck(Duration::ZERO, format!("the server said {line:?}, not where it is"))
        });
        // Dropped, and so ended, if that is none.
        let mut served = Self { child, address: SocketAddr::from(([127, 0, 0, 1], 0)) };
        served.address = address?;
        Ok(served)
    }

    /// Makes the dependency take so long.
    fn slow(&mut self, ms: u64) -> Result<(), BenchError> {
        match &mut self.child.stdin {
            Some(stdin) => Ok(writeln!(stdin, "slow {ms}")?),
            None => Ok(()),
        }
    }

    /// Memory that it has in use, bytes.
    fn memory(&self) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1_024)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // The end of its input ends it.
        drop(self.child.stdin.take());
        std::thread::sleep(Duration::from_millis(50));
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Pins the calling thread, and what it starts, to a processor, where there are two at least.
pub(super) fn pin(core: usize) {
    use rustix::thread::{CpuSet, sched_setaffinity};
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return;
    }
    let mut set = CpuSet::new();
    set.set(core);
    // Where that is not allowed, it is measured without.
    let _ = sched_setaffinity(None, &set);
}

/// Pins all threads of a process to a processor.
fn pin_process(pid: u32, core: usize) {
    use rustix::process::Pid;
    use rustix::thread::{CpuSet, sched_setaffinity};
    let mut set = CpuSet::new();
    set.set(core);
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    for thread in threads {
        let id = thread.file_name().to_string_lossy().parse().ok().and_then(Pid::from_raw);
        // Where that is not allowed, it is measured without.
        let _ = sched_setaffinity(id, &set);
    }
}

/// What is the same for every load on one workload.
struct Bench {
    requests: [Vec<Vec<u8>>; 4],
    deadline: Duration,
    capacity: f64,
    seed: u64,
    void_runs: u64,
    lag_p99_ms: f64,
    away: f64,
}

/// Health checks per second.
const P0_RATE: f64 = 20.0;
/// A run in which more than 1 % was sent later than this says nothing of the server, ms.
pub const LAG_MAX_MS: f64 = 5.0;
/// Nor does one in which the machine took away the server's processor for more than this share of it.
pub const AWAY_MAX: f64 = 0.01;
/// How often a run is tried that is void.
const TRIES: u32 = 5;
/// What is left over from a run is not part of the next.
const REST: Duration = Duration::from_millis(500);

impl Bench {
    fn new(requests: [Vec<Vec<u8>>; 4], deadline: Duration) -> Self {
        Self {
            requests,
            deadline,
            capacity: 0.0,
            seed: 1,
            void_runs: 0,
            lag_p99_ms: 0.0,
            away: 0.0,
        }
    }

    /// The critical classes at half of the capacity, or less where less is asked for; of the rest,
    /// 70 % is P2.
    fn rates(&self, load: f64) -> [f64; 4] {
        let p1 = (self.capacity * load.min(0.5) - P0_RATE).max(0.0);
        let rest = self.capacity * (load - 0.5).max(0.0);
        [P0_RATE, p1, rest * 0.7, rest * 0.3]
    }

    fn load(&self, address: SocketAddr, phases: Vec<Phase>) -> Load {
        Load {
            address,
            phases,
            requests: self.requests.clone(),
            deadline: self.deadline,
            retries: 0,
            heavy: 1.0,
            seed: self.seed,
        }
    }

    async fn steady(
        &mut self,
        address: SocketAddr,
        load: f64,
        seconds: u64,
    ) -> Result<Outcome, BenchError> {
        let phase = Phase { lasts: Duration::from_secs(seconds), rates: self.rates(load) };
        let load = self.load(address, vec![phase]);
        self.send(&load).await
    }

    /// Sends a load, with a schedule of its own.
    async fn send(&mut self, load: &Load) -> Result<Outcome, BenchError> {
        self.valid(async |seed| load::send(1, Load { seed, ..load.clone() }).await).await
    }

    /// Runs until neither the generator nor the server was disturbed, and answers the outcome of that
    /// run; of the one in which they were the least, when they always were.
    async fn valid(
        &mut self,
        mut run: impl AsyncFnMut(u64) -> Result<Outcome, BenchError>,
    ) -> Result<Outcome, BenchError> {
        let mut best: Option<Outcome> = None;
        for attempt in 1..=TRIES {
            self.seed += 1;
            let outcome = run(self.seed).await?;
            tokio::time::sleep(REST).await;
            let disturbed = disturbed(&outcome);
            if best.as_ref().is_none_or(|best| disturbed < self::disturbed(best)) {
                best = Some(outcome);
            }
            if disturbed <= 1.0 {
                break;
            }
            self.void_runs += u64::from(attempt < TRIES);
        }
        let best = best.unwrap_or_else(|| unreachable!("there was a try"));
        self.lag_p99_ms = self.lag_p99_ms.max(best.lag_p99_ms);
        self.away = self.away.max(best.away);
        Ok(best)
    }
}

/// Collects the points of all rounds.
#[derive(Default)]
struct Curve {
    runs: Vec<(Protection, f64, Outcome)>,
    /// At the capacity, and at the highest load, of each round.
    memory: Vec<(u64, u64)>,
}

impl Curve {
    /// Every load on every server, one after the other.
    async fn sweep(
        &mut self,
        bench: &mut Bench,
        servers: &[(Protection, Served)],
        loads: &[f64],
        seconds: u64,
        mut watch: impl FnMut(u64),
    ) -> Result<(), BenchError> {
        let mut memory = (0, 0);
        for &load in loads {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "%")]
            watch((load * 100.0) as u64);
            for (protection, server) in servers {
                let outcome = bench.steady(server.address, load, seconds).await?;
                self.runs.push((*protection, load, outcome));
                if *protection == Protection::Admission {
                    let used = server.memory().unwrap_or_default();
                    memory = (if load <= 1.0 { used } else { memory.0 }, used);
                }
            }
        }
        self.memory.push(memory);
        Ok(())
    }

    fn of(&self, protection: Protection, load: f64) -> impl Iterator<Item = &Outcome> {
        let is_of =
            move |run: &&(Protection, f64, Outcome)| run.0 == protection && same(run.1, load);
        self.runs.iter().filter(is_of).map(|(_, _, outcome)| outcome)
    }

    fn median(&self, protection: Protection, load: f64, figure: impl Fn(&Outcome) -> f64) -> f64 {
        median(self.of(protection, load).map(figure).collect())
    }

    fn points(&self, loads: &[f64]) -> Vec<Point> {
        let mut points = Vec::new();
        for protection in [Protection::Admission, Protection::None, Protection::Tower] {
            for &load in loads {
                if self.of(protection, load).next().is_none() {
                    continue;
                }
                let least = |figure: &dyn Fn(&Outcome) -> f64| {
                    self.of(protection, load).map(figure).fold(f64::INFINITY, f64::min)
                };
                let sum =
                    |figure: &dyn Fn(&Outcome) -> u64| self.of(protection, load).map(figure).sum();
                points.push(Point {
                    protection,
                    load,
                    goodput_per_second: self.median(protection, load, Outcome::goodput),
                    p99_ms: self.median(protection, load, Outcome::p99_ms),
                    p0_success: least(&|outcome| outcome.success(0)),
                    p1_success: least(&|outcome| outcome.success(1)),
                    p1_shed: sum(&|outcome| outcome.classes[1].shed),
                    p1_late: sum(&|outcome| outcome.classes[1].late),
                    p1_failed: sum(&|outcome| outcome.classes[1].failed),
                    shed: sum(&|outcome| outcome.sum(|class| class.shed)),
                    late: sum(&|outcome| outcome.sum(|class| class.late)),
                    failed: sum(&|outcome| outcome.sum(|class| class.failed)),
                });
            }
        }
        points
    }

    /// The figures that the curve tells, with `more` to come.
    fn figures(&self, workload: Workload, bench: &Bench, loads: &[f64]) -> Figures {
        let highest = loads.last().copied().unwrap_or(1.0);
        let curve = self.points(loads);
        let ours = |point: &&Point| point.protection == Protection::Admission;
        let best =
            curve.iter().filter(ours).map(|point| point.goodput_per_second).fold(0.0, f64::max);
        let last = curve.iter().filter(ours).find(|point| same(point.load, highest));
        let below = curve.iter().filter(ours).filter(|point| point.load <= 0.8);
        #[expect(clippy::cast_precision_loss, reason = "bytes of memory")]
        let memory = self
            .memory
            .iter()
            .map(|(at_capacity, at_highest)| *at_highest as f64 / (*at_capacity).max(1) as f64);
        Figures {
            workload,
            capacity_per_second: bench.capacity,
            highest_load: highest,
            goodput_at_10x_ratio: last.map_or(0.0, |point| point.goodput_per_second / best),
            p0_success: last.map_or(0.0, |point| point.p0_success),
            p1_success: last.map_or(0.0, |point| point.p1_success),
            p1_success_least: curve
                .iter()
                .filter(ours)
                .map(|point| point.p1_success)
                .fold(f64::INFINITY, f64::min),
            admitted_p99_ms: last.map_or(0.0, |point| point.p99_ms),
            deadline_ms: u64::try_from(bench.deadline.as_millis()).unwrap_or(u64::MAX),
            shed_below_capacity: below.map(|point| point.shed).sum(),
            recovery_ms: None,
            recovered_success: None,
            others_p99_ratio: None,
            others_success: None,
            slow_goodput_ratio: None,
            slow_recovery_ms: None,
            memory_ratio: median(memory.collect()),
            void_runs: bench.void_runs,
            lag_p99_ms: bench.lag_p99_ms,
            away: bench.away,
            curve,
        }
    }
}

/// How much a run was disturbed; above 1 it is void.
fn disturbed(outcome: &Outcome) -> f64 {
    (outcome.lag_p99_ms / LAG_MAX_MS).max(outcome.away / AWAY_MAX)
}

/// Whether two loads are the same step of a sweep.
fn same(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn requests(deadline: Duration) -> [Vec<Vec<u8>>; 4] {
    std::array::from_fn(|class| {
        let request = |tenant| {
            let ms = deadline.as_millis();
            format!(
                "GET /p{class}?bot=t{tenant} HTTP/1.1\r\nhost: 127.0.0.1\r\nx-deadline-ms: {ms}\r\n\r\n"
            )
            .into_bytes()
        };
        (0..TENANTS).map(request).collect()
    })
}

/// The loads that are asked for, or else `all`.
fn loads(options: &Options, all: &[f64]) -> Vec<f64> {
    if options.loads.is_empty() { all.to_vec() } else { options.loads.clone() }
}

const LOADS: [f64; 8] = [0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0];

async fn synthetic(
    workload: Workload,
    options: &Options,
    watch: &mut impl FnMut(&'static str, u64),
) -> Result<Figures, BenchError> {
    let (stage, clients) = match workload {
        Workload::Cpu => ("cpu: requests of 2 ms on the processor, times the capacity in %", 4),
        _ => ("dependency: 8 slots of 4 ms, times the capacity in %", 16),
    };
    let loads = loads(options, &LOADS);
    let deadline = Duration::from_millis(100);
    let requests = requests(deadline);
    let work = server::calibrated();
    let plain = Served::start(workload, Protection::None, work)?;
    let lasts = Duration::from_secs(2);
    let capacity = load::saturate(1, plain.address, requests[2][0].clone(), clients, lasts).await?;
    drop(plain);
    let mut bench = Bench { capacity, ..Bench::new(requests, deadline) };
    let mut curve = Curve::default();
    let (mut recoveries, mut recovered) = (Vec::new(), Vec::new());
    let (mut others, mut others_success) = (Vec::new(), Vec::new());
    let (mut slow, mut slow_recoveries) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        let mut servers = Vec::new();
        for protection in [Protection::Admission, Protection::None, Protection::Tower] {
            servers.push((protection, Served::start(workload, protection, work)?));
        }
        let watch = |percent| watch(stage, percent);
        curve.sweep(&mut bench, &servers, &loads, options.seconds, watch).await?;
        drop(servers);
        let mut server = Served::start(workload, Protection::Admission, work)?;
        let step = step(&mut bench, server.address).await?;
        recoveries.push(step.0);
        recovered.push(step.1);
        let (ratio, success) = heavy(&mut bench, server.address, options.seconds).await?;
        others.push(ratio);
        others_success.push(success);
        if workload == Workload::Dependency {
            let (ratio, recovery) = slower(&mut bench, &mut server).await?;
            slow.push(ratio);
            slow_recoveries.push(recovery);
        }
    }
    let some = |values: Vec<f64>| (!values.is_empty()).then(|| median(values));
    Ok(Figures {
        recovery_ms: some(recoveries),
        recovered_success: some(recovered),
        others_p99_ratio: some(others),
        others_success: some(others_success),
        slow_goodput_ratio: some(slow),
        slow_recovery_ms: some(slow_recoveries),
        ..curve.figures(workload, &bench, &loads)
    })
}

/// From the end of `from` to the last refusal, ms; and the share of all after that, but for the first
/// second, that was answered.
#[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
fn recovery(outcome: &Outcome, from: Duration, rate: f64) -> (f64, f64) {
    let from = usize::try_from(from.as_millis() / TICK.as_millis()).unwrap_or(usize::MAX);
    let after = outcome.timeline.get(from..).unwrap_or_default();
    let last = after.iter().rposition(|(_, shed)| *shed > 0).map_or(0, |place| place + 1);
    let rest = after.get(10..).unwrap_or_default();
    let good: u64 = rest.iter().map(|(good, _)| *good).sum();
    let expected = rate * rest.len() as f64 * TICK.as_secs_f64();
    (last as f64 * TICK.as_secs_f64() * 1_000.0, (good as f64 / expected.max(1.0)).min(1.0))
}

/// Half of the capacity, ten times of it, half of it again, with clients that try again three times.
async fn step(bench: &mut Bench, address: SocketAddr) -> Result<(f64, f64), BenchError> {
    let phase =
        |seconds, load| Phase { lasts: Duration::from_secs(seconds), rates: bench.rates(load) };
    // All of the low load may be refused here: half of it is of the lower classes.
    let [p0, p1, ..] = bench.rates(0.5);
    let low = [p0, p1 / 2.0, p1 * 0.35, p1 * 0.15];
    let low = |seconds| Phase { lasts: Duration::from_secs(seconds), rates: low };
    let phases = vec![low(2), phase(4, 10.0), low(5)];
    let rate = phases[2].rates.iter().sum();
    let load = Load { retries: 3, ..bench.load(address, phases) };
    let outcome = bench.send(&load).await?;
    Ok(recovery(&outcome, Duration::from_secs(6), rate))
}

/// One tenant of 100 at ten times its share: the others' p99 over theirs without, and how many of
/// theirs were answered in time.
#[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
async fn heavy(
    bench: &mut Bench,
    address: SocketAddr,
    seconds: u64,
) -> Result<(f64, f64), BenchError> {
    // 99 tenants at 0.9 times the capacity, all of the class that is shed.
    let others = bench.capacity * 0.9;
    let load = |heavy: f64| {
        let rate = others * (1.0 + heavy / (TENANTS - 1) as f64);
        let lasts = Duration::from_secs(seconds * 2);
        let phase = Phase { lasts, rates: [P0_RATE, 0.0, rate, 0.0] };
        Load { heavy, ..bench.load(address, vec![phase]) }
    };
    let (alone, beside) = (load(1.0), load(10.0));
    let alone = bench.send(&alone).await?;
    let beside = bench.send(&beside).await?;
    let p99 = |outcome: &Outcome| quantile_ms(&outcome.others, 0.99);
    let success = beside.others.len() as f64 / beside.others_offered.max(1) as f64;
    Ok((p99(&beside) / p99(&alone).max(0.001), success))
}

/// The dependency becomes ten times slower for a while: what was answered in time then over what it
/// could do, and how long it took until nothing was refused any more.
#[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
async fn slower(bench: &mut Bench, server: &mut Served) -> Result<(f64, f64), BenchError> {
    let rate = bench.capacity * 0.7;
    let phase = Phase { lasts: Duration::from_secs(16), rates: [P0_RATE, 0.0, rate, 0.0] };
    let load = bench.load(server.address, vec![phase]);
    let run = async |seed| {
        let sending = load::send(1, Load { seed, ..load.clone() });
        let slowing = async {
            tokio::time::sleep(Duration::from_secs(3)).await;
            server.slow(40)?;
            tokio::time::sleep(Duration::from_secs(8)).await;
            server.slow(4)
        };
        let (outcome, slowed) = tokio::join!(sending, slowing);
        slowed.and(outcome)
    };
    let outcome = bench.valid(run).await?;
    // The last four seconds of it; the rest is for finding out.
    let within = outcome.timeline.get(70..110).unwrap_or_default();
    let good: u64 = within.iter().map(|(good, _)| *good).sum();
    let could = bench.capacity / 10.0 * 4.0 + P0_RATE * 4.0;
    let (ms, _) = recovery(&outcome, Duration::from_secs(11), rate);
    Ok((good as f64 / could, ms))
}

/// Where the chart goes, and what it shows.
pub fn draw(report: &Report, path: &PathBuf) -> std::io::Result<()> {
    std::fs::write(path, chart::svg(report))
}
