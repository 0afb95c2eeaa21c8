//! Requests that need the processor, and requests that wait for a dependency.

use std::net::SocketAddr;
use std::time::Duration;

use super::load::{self, Load, Phase, TENANTS, TICK};
use super::outcome::{Outcome, quantile_ms};
use super::runs::{Bench, Curve, P0_RATE, Plain, median};
use super::served::Served;
use super::{Figures, Options, Protection, Workload, server};
use crate::error::BenchError;

pub(super) fn requests(deadline: Duration) -> [Vec<Vec<u8>>; 4] {
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

/// The requested loads, or all of them.
pub(super) fn loads(options: &Options, all: &[f64]) -> Vec<f64> {
    if options.loads.is_empty() { all.to_vec() } else { options.loads.clone() }
}

const LOADS: [f64; 8] = [0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0];

pub(super) async fn measure(
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
    let work = server::calibrated();
    let mut bench = Bench::new(requests(deadline), deadline);
    let mut curve = Curve::default();
    let (mut recoveries, mut recovered) = (Vec::new(), Vec::new());
    let (mut others, mut others_success) = (Vec::new(), Vec::new());
    let (mut slow, mut slow_recoveries) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        let mut servers = Vec::new();
        for protection in [Protection::Admission, Protection::None, Protection::Tower] {
            servers.push((protection, Served::start(workload, protection, work)?));
        }
        let plain = Plain { address: servers[1].1.address, clients };
        let watch = |percent| watch(stage, percent);
        curve.sweep(&mut bench, plain, &servers, (&loads, options.seconds), watch).await?;
        bench.measure(plain).await?;
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

/// The time from `from` to the last refusal, ms. Also the share of good answers after `from`,
/// without the first second.
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

/// Runs half of the capacity, ten times the capacity, and half again, with clients that retry three
/// times.
async fn step(bench: &mut Bench, address: SocketAddr) -> Result<(f64, f64), BenchError> {
    let phase =
        |seconds, load| Phase { lasts: Duration::from_secs(seconds), rates: bench.rates(load) };
    // Half of this low load belongs to the lower classes, which the server may refuse.
    let [p0, p1, ..] = bench.rates(0.5);
    let low = [p0, p1 / 2.0, p1 * 0.35, p1 * 0.15];
    let low = |seconds| Phase { lasts: Duration::from_secs(seconds), rates: low };
    let phases = vec![low(2), phase(4, 10.0), low(5)];
    let rate = phases[2].rates.iter().sum();
    let load = Load { retries: 3, ..bench.load(address, phases) };
    let outcome = bench.send(&load).await?;
    Ok(recovery(&outcome, Duration::from_secs(6), rate))
}

/// Runs one tenant of 100 at ten times its share. Returns the others' p99 divided by their p99
/// without it, and their share of good answers.
#[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
async fn heavy(
    bench: &mut Bench,
    address: SocketAddr,
    seconds: u64,
) -> Result<(f64, f64), BenchError> {
    // 99 tenants send 0.9 times the capacity, all in the class that is shed.
    let others = bench.capacity() * 0.9;
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

/// Makes the dependency ten times slower for a while. Returns the goodput during that time divided
/// by the capacity of the dependency, and the time until no request is refused any more.
#[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
async fn slower(bench: &mut Bench, server: &mut Served) -> Result<(f64, f64), BenchError> {
    let rate = bench.capacity() * 0.7;
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
    // Counts only the last four seconds of it. Before that the limit adapts.
    let within = outcome.timeline.get(70..110).unwrap_or_default();
    let good: u64 = within.iter().map(|(good, _)| *good).sum();
    let could = bench.capacity() / 10.0 * 4.0 + P0_RATE * 4.0;
    let (ms, _) = recovery(&outcome, Duration::from_secs(11), rate);
    Ok((good as f64 / could, ms))
}
