//! Totals of the real service: this program runs `fairlane serve` with its counters in a separate
//! process.

use std::io::Write as _;
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::Duration;

use fairlane::sandbox::Rig;
use fairlane_testkit::redis::free_address;

use super::load::{self, TENANTS};
use super::runs::{Bench, Curve, Plain};
use super::served::{Served, pin, pin_process};
use super::{Figures, Options, Protection, Workload};
use crate::error::BenchError;
use crate::{mongo, probe};

/// Number of ads per request.
const ADS: usize = 10;
const LOADS: [f64; 6] = [0.5, 0.8, 1.0, 1.5, 2.0, 3.0];
/// The deadline of each request.
const DEADLINE: Duration = Duration::from_millis(50);

pub(super) async fn measure(
    options: &Options,
    watch: &mut impl FnMut(&'static str, u64),
) -> Result<Figures, BenchError> {
    mongo::with_database(&options.mongo, async |rig, database| {
        let mongodb = (database.url.expose().to_owned(), database.name.clone());
        // The stores run on processor 0, because the generator needs the other one alone.
        let redis = probe::info(rig, "server").await?;
        let redis = redis.lines().find_map(|line| line.strip_prefix("process_id:"));
        let redis = redis.and_then(|pid| pid.trim().parse().ok());
        for pid in redis.into_iter().chain(database.pid()) {
            pin_process(pid, 0);
        }
        let mut curve = Curve::default();
        let (requests, loads) = (requests(), super::synthetic::loads(options, &LOADS));
        let mut bench = Bench::new(requests, DEADLINE);
        for _ in 0..options.rounds {
            let mut servers = Vec::new();
            for protection in [Protection::Admission, Protection::None] {
                servers.push((protection, start(rig, &mongodb, protection)?));
            }
            for (_, server) in &servers {
                ready(server.address).await?;
            }
            settled(servers[0].1.address).await?;
            let plain = Plain { address: servers[1].1.address, clients: 48 };
            let stage = "reads: totals of the real service, times the capacity in %";
            let watch = |percent| watch(stage, percent);
            curve.sweep(&mut bench, plain, &servers, (&loads, options.seconds), watch).await?;
        }
        Ok(curve.figures(Workload::Reads, &bench, &loads))
    })
    .await
}

fn requests() -> [Vec<Vec<u8>>; 4] {
    let ids = (0..ADS).map(|ad| format!("ad-{ad}")).collect::<Vec<_>>().join(",");
    let head = format!("host: 127.0.0.1\r\nx-deadline-ms: {}\r\n", DEADLINE.as_millis());
    std::array::from_fn(|class| {
        let request = |tenant: usize| {
            let path = match class {
                0 => "/healthz".to_owned(),
                _ => format!("/v1/bots/t{tenant}/counters?ids={ids}"),
            };
            let lowered =
                if class > 1 { format!("x-priority: p{class}\r\n") } else { String::new() };
            format!("GET {path} HTTP/1.1\r\n{head}{lowered}\r\n").into_bytes()
        };
        (0..TENANTS).map(request).collect()
    })
}

/// Starts the service on the same processor as its Redis.
fn start(
    rig: &Rig,
    (url, database): &(String, String),
    protection: Protection,
) -> Result<Served, BenchError> {
    let (address, metrics) = (free_address(), free_address());
    let mode = if protection == Protection::None { "off" } else { "enforce" };
    let path = rig.directory().join(format!("serve-{}.toml", address.port()));
    let mut file = std::fs::File::create(&path)?;
    writeln!(
        file,
        "[redis]\nurl = {:?}\n[mongodb]\nurl = {url:?}\ndatabase = {database:?}\n[http]\nlisten = \"{address}\"\nmax_connections_per_address = 4096\n[metrics]\nlisten = \"{metrics}\"\n[admission]\np1 = \"{mode}\"\np2 = \"{mode}\"\np3 = \"{mode}\"",
        rig.url().expose(),
    )?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["serve", "--", "--roles", "http,work", "--config"]).arg(&path);
    command.env("RUST_LOG", "error").stdin(Stdio::null()).stdout(Stdio::null());
    // Child processes inherit the processor of the thread that starts them.
    let spawning = std::thread::spawn(move || {
        pin(0);
        command.spawn()
    });
    match spawning.join() {
        Ok(child) => Ok(Served { child: child?, address }),
        Err(_) => Err(BenchError::stuck(Duration::ZERO, "no server could be started".to_owned())),
    }
}

/// Waits until the counted views are in MongoDB, because writing them needs the same processor.
async fn settled(address: SocketAddr) -> Result<(), BenchError> {
    const PATIENCE: Duration = Duration::from_secs(60);
    let request = b"GET /v1/pipelines/counters HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n";
    let begun = tokio::time::Instant::now();
    while begun.elapsed() < PATIENCE {
        let answer = load::read_once(address, request).await.unwrap_or_default();
        if answer.contains("\"depth\":0,") {
            // Also wait for the work that follows the write.
            tokio::time::sleep(Duration::from_secs(3)).await;
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Err(BenchError::stuck(PATIENCE, "views are not written to MongoDB".to_owned()))
}

/// Waits until totals are available, and counts each ad once.
async fn ready(address: SocketAddr) -> Result<(), BenchError> {
    for tenant in 0..TENANTS {
        for ad in 0..ADS {
            let request = format!(
                "POST /v1/bots/t{tenant}/counters/ad-{ad}/views HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 7\r\n\r\n{{\"n\":1}}"
            );
            let mut tries = 0;
            while load::ask_once(address, request.as_bytes()).await != Some(200) {
                tries += 1;
                if tries > 200 {
                    let what = "the service counts no view".to_owned();
                    return Err(BenchError::stuck(Duration::from_secs(20), what));
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    Ok(())
}
