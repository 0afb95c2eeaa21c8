//! What the processes say of themselves: every few seconds each one notes in Redis who it is and how
//! fast its pipelines go. Adds up to the rates and workers of the whole fleet, for operators; and while a
//! process is heard, the bus keeps what its pipelines have yet to get.

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
use crate::keyspace::scripts::Beat;
use crate::keyspace::{Link, StoreError, keys};
use crate::lifecycle::Shutdown;
use crate::notifications::{Breaker, Gates};

/// Between two notes; rates are means over this time.
const BEAT: Duration = Duration::from_secs(5);
/// Between two tries of the first note.
const FIRST: Duration = Duration::from_millis(250);
/// A process that is silent this long is gone.
const SILENT: Duration = Duration::from_secs(16);
/// At the end, to say so.
const GOODBYE: Duration = Duration::from_millis(500);

/// Hosts that a process tells of.
const BREAKERS_MAX: usize = 20;

/// Counts what one process does for one pipeline.
#[derive(Debug, Default)]
pub struct Meter {
    /// Events this process put into queues.
    pub queued: AtomicU64,
    /// Events this process took out of queues.
    pub settled: AtomicU64,
    /// Slices in the hands of its workers.
    pub busy: AtomicUsize,
    /// How many workers it wants now.
    pub target: AtomicUsize,
    /// How many it may have; 0: it does not handle this pipeline.
    pub max: usize,
}

/// The pace of one pipeline, in one process or all of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Pace {
    /// Events a second copied from the bus into queues.
    pub queued_per_second: f64,
    /// Events a second that left the queues: done, dead or delayed.
    pub settled_per_second: f64,
    /// Workers with a slice in their hands.
    pub workers_busy: usize,
    /// Workers wanted now.
    pub workers_target: usize,
    /// Workers allowed (`workers.max`).
    pub workers_max: usize,
}

/// One running process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Process {
    /// Its id, new with every start.
    pub id: String,
    /// The name of its machine.
    pub host: String,
    /// Its id there.
    pub pid: u32,
    /// Its version of Fairlane.
    pub version: String,
    /// What it does: `ingest`, `work`, `http`, `schedule`.
    pub roles: Vec<String>,
    /// When it started, ms since 1970 by its own clock.
    pub started_ms: u64,
    /// Its pipelines.
    pub pipelines: BTreeMap<PipelineName, Pace>,
    /// Hosts that get no notifications from it for a while: at most 20, the worst first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub breakers: Vec<Breaker>,
}

/// The processes that were heard within the last 16 s, by host and start.
///
/// # Errors
/// When Redis does not answer or refuses.
pub async fn processes(link: &Link) -> Result<Vec<Process>, StoreError> {
    let key = keys::processes(link.prefix());
    let look = Beat { key: &key, id: "", says: "", ttl_ms: millis(SILENT) };
    let said = link.call(&look).await?;
    // One of another version may say it in other words.
    let mut found: Vec<Process> =
        said.iter().filter_map(|words| serde_json::from_str(words).ok()).collect();
    found.sort_by(|a, b| (&a.host, a.started_ms, a.pid).cmp(&(&b.host, b.started_ms, b.pid)));
    Ok(found)
}

/// What `processes` do together for `pipeline`.
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
    /// The pace since `last`, `seconds` ago, and what is counted now.
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

/// Notes what this process does until the soft stop, and that it goes. `started` since 1970. The
/// answer becomes true with the first note.
pub(crate) fn begin(
    meters: BTreeMap<PipelineName, Arc<Meter>>,
    gates: Option<Arc<Gates>>,
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
    (meters, gates): (BTreeMap<PipelineName, Arc<Meter>>, Option<Arc<Gates>>),
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
            Err(error) => debug!(%error, "cannot say that this process runs"),
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
    fn the_pace_is_what_was_counted_since_the_last_note() {
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
