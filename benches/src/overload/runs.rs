//! Runs of one load against one server, and the evaluation of all runs.

use std::net::SocketAddr;
use std::time::Duration;

use super::load::{self, Load, Phase};
use super::outcome::{Outcome, Processor};
use super::served::Served;
use super::{Figures, Point, Protection, Workload};
use crate::error::BenchError;

/// The values that are equal for every load of one workload.
pub(super) struct Bench {
    requests: [Vec<Vec<u8>>; 4],
    deadline: Duration,
    /// The capacity in requests per second, and the state of the processor when it was measured.
    capacity: f64,
    processor: Processor,
    seed: u64,
    void_runs: u64,
    lag_p99_ms: f64,
    away: f64,
    speed: f64,
}

/// A server without protection, to measure the capacity.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plain {
    pub(super) address: SocketAddr,
    /// Number of concurrent clients that measure the capacity.
    pub(super) clients: usize,
}

/// Health checks per second.
pub(super) const P0_RATE: f64 = 20.0;
/// A run in which more than 1 % of the requests were sent later than this, in ms, is not valid.
pub(crate) const LAG_MAX_MS: f64 = 5.0;
/// A run in which the machine withheld the server's processor for more than this share is not
/// valid.
pub(crate) const AWAY_MAX: f64 = 0.01;
/// A run in which the speed of the processor differs by more than this share from its speed while
/// the capacity was measured is not valid.
pub(crate) const SPEED_MAX: f64 = 0.1;
/// Duration of the capacity measurement.
const MEASURED: Duration = Duration::from_secs(2);
/// Maximum number of attempts at a valid run.
const TRIES: u32 = 5;
/// Pause after a run, so that its remaining work does not affect the next one.
const REST: Duration = Duration::from_millis(500);

impl Bench {
    pub(super) fn new(requests: [Vec<Vec<u8>>; 4], deadline: Duration) -> Self {
        Self {
            requests,
            deadline,
            capacity: 0.0,
            processor: Processor::default(),
            seed: 1,
            void_runs: 0,
            lag_p99_ms: 0.0,
            away: 0.0,
            speed: 0.0,
        }
    }

    /// Measures the capacity.
    pub(super) async fn measure(&mut self, plain: Plain) -> Result<(), BenchError> {
        let Plain { address, clients } = plain;
        let request = self.requests[2][1].clone();
        let (capacity, processor) = load::saturate(1, address, request, clients, MEASURED).await?;
        (self.capacity, self.processor) = (capacity, processor);
        tokio::time::sleep(REST).await;
        Ok(())
    }

    pub(super) fn capacity(&self) -> f64 {
        self.capacity
    }

    /// The rate of each class. The critical classes get half of the capacity, or less if the load
    /// is lower. 70 % of the rest is P2.
    pub(super) fn rates(&self, load: f64) -> [f64; 4] {
        let p1 = (self.capacity * load.min(0.5) - P0_RATE).max(0.0);
        let rest = self.capacity * (load - 0.5).max(0.0);
        [P0_RATE, p1, rest * 0.7, rest * 0.3]
    }

    pub(super) fn load(&self, address: SocketAddr, phases: Vec<Phase>) -> Load {
        Load {
            address,
            phases,
            requests: self.requests.clone(),
            deadline: self.deadline,
            retries: 0,
            heavy: 1.0,
            connections: load::CONNECTIONS,
            seed: self.seed,
        }
    }

    pub(super) async fn steady(
        &mut self,
        address: SocketAddr,
        load: f64,
        seconds: u64,
    ) -> Result<Outcome, BenchError> {
        let phase = Phase { lasts: Duration::from_secs(seconds), rates: self.rates(load) };
        let load = self.load(address, vec![phase]);
        self.send(&load).await
    }

    /// Sends a load with its own schedule.
    pub(super) async fn send(&mut self, load: &Load) -> Result<Outcome, BenchError> {
        self.valid(async |seed| load::send(1, Load { seed, ..load.clone() }).await).await
    }

    /// Repeats the run until neither the generator nor the server was disturbed, at most five
    /// times. Returns the results of the least disturbed run.
    pub(super) async fn valid(
        &mut self,
        mut run: impl AsyncFnMut(u64) -> Result<Outcome, BenchError>,
    ) -> Result<Outcome, BenchError> {
        let mut best: Option<Outcome> = None;
        for attempt in 1..=TRIES {
            self.seed += 1;
            let outcome = run(self.seed).await?;
            tokio::time::sleep(REST).await;
            let disturbed = self.disturbed(&outcome);
            if best.as_ref().is_none_or(|best| disturbed < self.disturbed(best)) {
                best = Some(outcome);
            }
            if disturbed <= 1.0 {
                break;
            }
            self.void_runs += u64::from(attempt < TRIES);
        }
        let best = best.unwrap_or_else(|| unreachable!("there was a try"));
        self.lag_p99_ms = self.lag_p99_ms.max(best.lag_p99_ms);
        self.away = self.away.max(best.processor.away);
        self.speed = self.speed.max(self.speed_off(&best));
        Ok(Outcome { capacity: self.capacity, ..best })
    }

    /// How much a run was disturbed. Above 1 it is not valid.
    fn disturbed(&self, outcome: &Outcome) -> f64 {
        let lag = outcome.lag_p99_ms / LAG_MAX_MS;
        let away = outcome.processor.away / AWAY_MAX;
        lag.max(away).max(self.speed_off(outcome) / SPEED_MAX)
    }

    /// The relative difference between the speed of the processor and its speed while the capacity
    /// was measured.
    fn speed_off(&self, outcome: &Outcome) -> f64 {
        let then = self.processor.work_us;
        if then > 0.0 { (outcome.processor.work_us / then - 1.0).abs() } else { 0.0 }
    }
}

/// Collects the results of all rounds.
#[derive(Default)]
pub(super) struct Curve {
    runs: Vec<(Protection, f64, Outcome)>,
    /// Memory of the server in each round: at the capacity, and at the highest load.
    memory: Vec<(u64, u64)>,
}

impl Curve {
    /// Runs all loads on all servers, one after the other.
    pub(super) async fn sweep(
        &mut self,
        bench: &mut Bench,
        plain: Plain,
        servers: &[(Protection, Served)],
        (loads, seconds): (&[f64], u64),
        mut watch: impl FnMut(u64),
    ) -> Result<(), BenchError> {
        let mut memory = (0, 0);
        for &load in loads {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "%")]
            watch((load * 100.0) as u64);
            bench.measure(plain).await?;
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

    /// The median of all measured capacities.
    fn capacity(&self) -> f64 {
        median(self.runs.iter().map(|(_, _, outcome)| outcome.capacity).collect())
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
                    goodput_per_second: self.median(protection, load, Outcome::share)
                        * self.capacity(),
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

    /// The figures from the curve. The caller adds those of the other runs.
    pub(super) fn figures(&self, workload: Workload, bench: &Bench, loads: &[f64]) -> Figures {
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
            capacity_per_second: self.capacity(),
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
            speed: bench.speed,
            curve,
        }
    }
}

/// Whether two loads are the same step of a sweep.
pub(super) fn same(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
