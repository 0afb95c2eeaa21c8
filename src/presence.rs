//! The registry of running processes. Every few seconds each process writes its identity and the
//! rates of its pipelines to Redis. Operators see the sums over all processes. While a process is
//! registered, the bus keeps the entries that its pipelines still need.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::debug;
use utoipa::ToSchema;

use crate::clock::millis;
use crate::id::PipelineName;
use crate::lifecycle::Shutdown;
use crate::outbound::breakers::{Breaker, Breakers};
use crate::redis::scripts::Beat;
use crate::redis::{Link, RedisError, keys};

/// Interval of updates; rates are means over this time.
const BEAT: Duration = Duration::from_secs(5);
/// Pause between two attempts at the first update.
const FIRST: Duration = Duration::from_millis(250);
/// A process without an update for this long counts as gone.
const SILENT: Duration = Duration::from_secs(16);
/// Timeout of the deregistration at the end.
const GOODBYE: Duration = Duration::from_millis(500);

/// Maximum number of hosts with an open breaker that a process reports.
const BREAKERS_MAX: usize = 20;

/// Counters of one process for one pipeline.
#[derive(Debug, Default)]
pub struct Meter {
    /// Number of events copied into queues.
    pub queued: AtomicU64,
    /// Number of events removed from queues.
    pub settled: AtomicU64,
    /// Number of slices being handled.
    pub busy: AtomicUsize,
    /// The current target number of workers.
    pub target: AtomicUsize,
    /// The maximum number of workers; 0: the process does not handle this pipeline.
    pub max: usize,
}

/// The rates and workers of one pipeline, in one process or all of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Pace {
    /// Events per second copied from the bus into queues.
    pub queued_per_second: f64,
    /// Events per second that left the queues: done, dead or delayed.
    pub settled_per_second: f64,
    /// Busy workers.
    pub workers_busy: usize,
    /// The target number of workers.
    pub workers_target: usize,
    /// The maximum number of workers (`workers.max`).
    pub workers_max: usize,
}

/// One running process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Process {
    /// Its id, new at every start.
    pub id: String,
    /// The name of its machine.
    pub host: String,
    /// Its process id on that machine.
    pub pid: u32,
    /// Its version of Fairlane.
    pub version: String,
    /// Its roles: `ingest`, `work`, `http`, `schedule`.
    pub roles: Vec<String>,
    /// When it started, ms since 1970 by its own clock.
    pub started_ms: u64,
    /// Its pipelines.
    pub pipelines: BTreeMap<PipelineName, Pace>,
    /// Hosts with an open circuit breaker, at most 20. Those with the most failures come first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub breakers: Vec<Breaker>,
}

/// The processes with an update in the last 16 s, sorted by host and start.
///
/// # Errors
/// If Redis is unavailable or refuses.
pub async fn processes(link: &Link) -> Result<Vec<Process>, RedisError> {
    let key = keys::processes(link.prefix());
    let look = Beat { key: &key, id: "", says: "", ttl_ms: millis(SILENT) };
    let said = link.call(&look).await?;
    // Another version may use another format.
    let mut found: Vec<Process> =
        said.iter().filter_map(|words| serde_json::from_str(words).ok()).collect();
    found.sort_by(|a, b| (&a.host, a.started_ms, a.pid).cmp(&(&b.host, b.started_ms, b.pid)));
    Ok(found)
}

/// The sum of the rates and workers of `pipeline` over `processes`.
#[must_use]
pub fn pace(processes: &[Process], pipeline: &PipelineName) -> Pace {
    let mut sum = Pace::default();
    for pace in processes.iter().filter_map(|process| process.pipelines.get(pipeline)) {
        sum.queued_per_second += pace.queued_per_second;
        sum.settled_per_second += pace.settled_per_second;
        sum.workers_busy += pace.workers_busy;
        sum.workers_target += pace.workers_target;
        sum.workers_max += pace.workers_max;
    }
    sum
}

impl Meter {
    /// The rates since `last`, `seconds` ago, and the current counts.
    fn pace(&self, last: (u64, u64), seconds: f64) -> (Pace, (u64, u64)) {
        let counted = (self.queued.load(Ordering::Relaxed), self.settled.load(Ordering::Relaxed));
        let rate = |now: u64, then: u64| {
            #[expect(clippy::cast_precision_loss, reason = "events of a few seconds")]
            let events = now.saturating_sub(then) as f64;
            (events / seconds * 10.0).round() / 10.0
        };
        let pace = Pace {
            queued_per_second: rate(counted.0, last.0),
            settled_per_second: rate(counted.1, last.1),
            workers_busy: self.busy.load(Ordering::Relaxed),
            workers_target: self.target.load(Ordering::Relaxed),
            workers_max: self.max,
        };
        (pace, counted)
    }
}

/// Updates the registry until the soft stop, and then deregisters. `started` is the time since
/// 1970. The returned value becomes true after the first update.
pub(crate) fn begin(
    meters: BTreeMap<PipelineName, Arc<Meter>>,
    gates: Option<Arc<Breakers>>,
    roles: &[&str],
    link: Arc<Link>,
    started: Duration,
    shutdown: &Shutdown,
) -> watch::Receiver<bool> {
    let process = Process {
        id: uuid::Uuid::now_v7().to_string(),
        host: gethostname::gethostname().to_string_lossy().into_owned(),
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        roles: roles.iter().map(|&role| role.to_owned()).collect(),
        started_ms: millis(started),
        pipelines: BTreeMap::new(),
        breakers: Vec::new(),
    };
    let (heard, known) = watch::channel(false);
    shutdown.spawn(beat(process, (meters, gates), link, heard, shutdown.clone()));
    known
}

async fn beat(
    mut process: Process,
    (meters, gates): (BTreeMap<PipelineName, Arc<Meter>>, Option<Arc<Breakers>>),
    link: Arc<Link>,
    heard: watch::Sender<bool>,
    shutdown: Shutdown,
) {
    let mut last: BTreeMap<PipelineName, (u64, u64)> = BTreeMap::new();
    let key = keys::processes(link.prefix());
    let mut noted = Instant::now();
    loop {
        let seconds = noted.elapsed().as_secs_f64().max(0.001);
        noted = Instant::now();
        for (name, meter) in &meters {
            let before = last.get(name).copied().unwrap_or_default();
            let (pace, counted) = meter.pace(before, seconds);
            last.insert(name.clone(), counted);
            process.pipelines.insert(name.clone(), pace);
        }
        if let Some(gates) = &gates {
            process.breakers = gates.open(noted);
            process.breakers.truncate(BREAKERS_MAX);
        }
        let says = serde_json::to_string(&process).unwrap_or_default();
        let beat = Beat { key: &key, id: &process.id, says: &says, ttl_ms: millis(SILENT) };
        match link.call(&beat).await {
            Ok(_) => drop(heard.send_replace(true)),
            Err(error) => debug!(%error, "cannot register this process"),
        }
        let pause = if *heard.borrow() { BEAT } else { FIRST };
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => break,
            () = tokio::time::sleep(pause) => {}
        }
    }
    let goodbye = Beat { key: &key, id: &process.id, says: "", ttl_ms: millis(SILENT) };
    let _ = tokio::time::timeout(GOODBYE, link.call(&goodbye)).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_is_the_count_since_the_last_note() {
        let meter = Meter { max: 64, ..Meter::default() };
        meter.queued.store(1_500, Ordering::Relaxed);
        meter.settled.store(500, Ordering::Relaxed);
        meter.busy.store(3, Ordering::Relaxed);
        let (pace, counted) = meter.pace((500, 500), 5.0);
        assert_eq!(counted, (1_500, 500));
        let expected =
            Pace { queued_per_second: 200.0, workers_busy: 3, workers_max: 64, ..Pace::default() };
        assert_eq!(pace, expected);
    }

    #[test]
    fn the_pace_of_the_fleet_is_the_sum_of_its_processes() {
        let name = PipelineName::parse("p").unwrap();
        let pace_of = |rate| Pace { settled_per_second: rate, workers_busy: 1, ..Pace::default() };
        let process = |pipelines| Process {
            id: String::new(),
            host: String::new(),
            pid: 1,
            version: String::new(),
            roles: Vec::new(),
            started_ms: 0,
            pipelines,
            breakers: Vec::new(),
        };
        let all = [
            process([(name.clone(), pace_of(1.5))].into()),
            process([(name.clone(), pace_of(2.0))].into()),
            process(BTreeMap::new()),
        ];
        assert_eq!(pace(&all, &name), Pace { workers_busy: 2, ..pace_of(3.5) });
    }
}
