//! The registry of running processes. Every few seconds each process writes its identity and the
//! rates of its pipelines to Redis. Operators see the sums over all processes. While a process is
//! registered, and for ten seconds after that, the bus keeps the entries that its pipelines still need.

mod bus;
mod calls;
mod long;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::debug;
use utoipa::ToSchema;

pub use self::bus::{BusFailure, BusMeter, BusState, BusView};
use self::calls::Counted;
pub use self::calls::{CallPace, Calls, Failures};
pub use self::long::{Long, LongSlice, Noted};
use crate::clock::millis;
use crate::id::{BotId, PipelineName};
use crate::lifecycle::Shutdown;
use crate::mongo::watch::Reachable;
use crate::outbound::breakers::{Breaker, Breakers};
use crate::redis::scripts::{Beat, Present};
use crate::redis::{Link, RedisError, keys};

/// Interval of updates; rates are means over this time.
const BEAT: Duration = Duration::from_secs(5);
/// After an outage of Redis, each process has made an update within this time, also if its last
/// attempt waited for an answer.
pub(crate) const HEARD: Duration = Duration::from_secs(10);
/// Pause between two attempts at the first update.
const FIRST: Duration = Duration::from_millis(250);
/// Interval of looking for news that do not wait for the next update.
const NEWS: Duration = Duration::from_millis(500);
/// A process without an update for this long counts as gone.
pub(crate) const SILENT: Duration = Duration::from_secs(16);
/// Timeout of the deregistration at the end.
const GOODBYE: Duration = Duration::from_millis(500);

/// Maximum number of hosts with an open breaker that a process reports.
const BREAKERS_MAX: usize = 20;

/// Counters of one process for one pipeline.
#[derive(Debug, Default)]
pub struct Meter {
    /// The calls of its handler, and whether they fail.
    pub calls: Calls,
    /// The slices that take long.
    pub long: Long,
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
    /// The calls of its pipelines, of those with any.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub calls: BTreeMap<PipelineName, CallPace>,
    /// Hosts with an open circuit breaker, at most 20. Those with the most failures come first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub breakers: Vec<Breaker>,
    /// The bus streams of its configuration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub streams: Vec<String>,
    /// The buses beside Redis that it reads.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub buses: Vec<BusState>,
    /// Whether MongoDB answers it; `None`: it uses none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mongodb: Option<bool>,
    /// Its pipelines whose calls have failed since the last success.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failing: BTreeMap<PipelineName, Failures>,
    /// Its slices that take long, at most 20: those that run for longest.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub long: Vec<LongSlice>,
}

impl Process {
    /// Its machine and process id: what operators call it.
    pub(crate) fn at(&self) -> String {
        format!("{}:{}", self.host, self.pid)
    }
}

/// The processes with an update in the last 16 s, sorted by host and start.
///
/// # Errors
/// If Redis is unavailable or refuses.
pub async fn processes(link: &Link) -> Result<Vec<Process>, RedisError> {
    let key = keys::processes(link.prefix());
    let said = link.call(&Present { key: &key, ttl_ms: millis(SILENT) }).await?;
    Ok(read(said.iter().map(String::as_str)))
}

/// The same without a script, for a link that loads none. `now` is the time since 1970 by the clock of
/// Redis.
///
/// # Errors
/// If Redis is unavailable or refuses.
pub(crate) async fn look(link: &Link, now: Duration) -> Result<Vec<Process>, RedisError> {
    let asked = redis::Cmd::hgetall(keys::processes(link.prefix()));
    let answer = link.command("HGETALL", asked).await?;
    let said: BTreeMap<String, String> = link.read("HGETALL", answer)?;
    Ok(read(said.values().filter_map(|said| {
        let (at_ms, words) = said.split_once(' ')?;
        let at_ms: u64 = at_ms.parse().ok()?;
        (at_ms.saturating_add(millis(SILENT)) >= millis(now)).then_some(words)
    })))
}

/// The processes with these states, sorted by host and start.
fn read<'a>(said: impl Iterator<Item = &'a str>) -> Vec<Process> {
    // Another version may use another format.
    let mut found: Vec<Process> =
        said.filter_map(|words| serde_json::from_str(words).ok()).collect();
    found.sort_by(|a, b| (&a.host, a.started_ms, a.pid).cmp(&(&b.host, b.started_ms, b.pid)));
    found
}

/// The process that handles a bot, and since when, if its slice takes long.
#[must_use]
pub fn handler_of<'a>(
    processes: &'a [Process],
    pipeline: &PipelineName,
    bot: &BotId,
) -> Option<(&'a Process, u64)> {
    processes.iter().find_map(|process| {
        let is_it = |slice: &&LongSlice| slice.pipeline == *pipeline && slice.bot == *bot;
        process.long.iter().find(is_it).map(|slice| (process, slice.since_ms))
    })
}

/// Those of `processes` that run `pipeline`.
pub(crate) fn running<'a>(
    processes: &'a [Process],
    pipeline: &PipelineName,
) -> impl Iterator<Item = &'a Process> {
    processes.iter().filter(move |process| process.pipelines.contains_key(pipeline))
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

/// The calls of `pipeline` in all `processes`.
#[must_use]
pub fn calls(processes: &[Process], pipeline: &PipelineName) -> CallPace {
    CallPace::sum(processes.iter().filter_map(|process| process.calls.get(pipeline)))
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

/// What a process reports about itself.
pub(crate) struct Reported {
    pub(crate) meters: BTreeMap<PipelineName, Arc<Meter>>,
    pub(crate) gates: Option<Arc<Breakers>>,
    pub(crate) mongodb: Option<Arc<Reachable>>,
    pub(crate) streams: Vec<String>,
    /// The buses beside Redis that it reads.
    pub(crate) buses: Vec<Arc<BusMeter>>,
    pub(crate) roles: Vec<&'static str>,
    /// The time since 1970.
    pub(crate) started: Duration,
}

impl Reported {
    /// Updates the news of a process: what operators must hear without delay. Returns whether it
    /// changed. A further failure of a pipeline that fails already is no news.
    fn renew(&self, process: &mut Process) -> bool {
        let calls = self.meters.iter();
        let failing: BTreeMap<_, _> = calls
            .filter_map(|(name, meter)| Some((name.clone(), meter.calls.failing()?)))
            .collect();
        let gates = self.gates.as_ref();
        process.long = self.meters.iter().flat_map(|(name, meter)| meter.long.of(name)).collect();
        process.long.sort_by_key(|slice| slice.since_ms);
        process.long.truncate(long::REPORTED_MAX);
        let mut breakers = gates.map(|gates| gates.open(Instant::now())).unwrap_or_default();
        breakers.truncate(BREAKERS_MAX);
        let mongodb = self.mongodb.as_ref().and_then(|mongodb| mongodb.known());
        let buses: Vec<_> = self.buses.iter().map(|meter| meter.state()).collect();
        let hosts = |all: &[Breaker]| all.iter().map(|open| open.host.clone()).collect::<Vec<_>>();
        let changed = mongodb != process.mongodb
            || bus::is_news(&process.buses, &buses)
            || !failing.keys().eq(process.failing.keys())
            || hosts(&breakers) != hosts(&process.breakers);
        (process.failing, process.breakers, process.mongodb) = (failing, breakers, mongodb);
        process.buses = buses;
        changed
    }
}

/// Whether the other processes know of this one.
#[derive(Debug)]
pub(crate) enum Registration {
    /// Not yet, and why the last attempt failed.
    Pending(Option<RedisError>),
    /// Since the first update.
    Done,
}

impl Registration {
    pub(crate) fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }

    /// Why the last attempt failed.
    pub(crate) fn failure(&self) -> Option<&RedisError> {
        match self {
            Self::Pending(error) => error.as_ref(),
            Self::Done => None,
        }
    }
}

/// Updates the registry until the soft stop, and then deregisters.
pub(crate) fn begin(
    reported: Reported,
    link: Arc<Link>,
    shutdown: &Shutdown,
) -> watch::Receiver<Registration> {
    let process = Process {
        id: uuid::Uuid::now_v7().to_string(),
        host: gethostname::gethostname().to_string_lossy().into_owned(),
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        roles: reported.roles.iter().map(|&role| role.to_owned()).collect(),
        started_ms: millis(reported.started),
        pipelines: BTreeMap::new(),
        calls: BTreeMap::new(),
        breakers: Vec::new(),
        streams: reported.streams.clone(),
        buses: Vec::new(),
        mongodb: None,
        failing: BTreeMap::new(),
        long: Vec::new(),
    };
    let (heard, known) = watch::channel(Registration::Pending(None));
    shutdown.spawn(beat(process, reported, link, heard, shutdown.clone()));
    known
}

async fn beat(
    mut process: Process,
    reported: Reported,
    link: Arc<Link>,
    heard: watch::Sender<Registration>,
    shutdown: Shutdown,
) {
    let mut last: BTreeMap<PipelineName, ((u64, u64), Counted)> = BTreeMap::new();
    let key = keys::processes(link.prefix());
    let (mut noted, mut due) = (Instant::now(), Instant::now());
    loop {
        // Rates of a moment would be noise, so news in between repeat the last ones.
        if Instant::now() >= due {
            let seconds = noted.elapsed().as_secs_f64().max(0.001);
            noted = Instant::now();
            for (name, meter) in &reported.meters {
                let before = last.get(name).copied().unwrap_or_default();
                let (pace, counted) = meter.pace(before.0, seconds);
                let (calls, called) = meter.calls.pace(before.1, seconds);
                last.insert(name.clone(), (counted, called));
                process.pipelines.insert(name.clone(), pace);
                match calls {
                    Some(calls) => drop(process.calls.insert(name.clone(), calls)),
                    None => drop(process.calls.remove(name)),
                }
            }
        }
        reported.renew(&mut process);
        let says = serde_json::to_string(&process).unwrap_or_default();
        let beat = Beat { key: &key, id: &process.id, says: &says, ttl_ms: millis(SILENT) };
        match link.call(&beat).await {
            Ok(()) => drop(heard.send_replace(Registration::Done)),
            Err(error) => {
                debug!(%error, "cannot register this process");
                if !heard.borrow().is_done() {
                    heard.send_replace(Registration::Pending(Some(error)));
                }
            }
        }
        let known = heard.borrow().is_done();
        due = noted + if known { BEAT } else { FIRST };
        loop {
            let wake = if known { due.min(Instant::now() + NEWS) } else { due };
            tokio::select! {
                biased;
                () = shutdown.soft.cancelled() => break,
                () = tokio::time::sleep_until(wake) => {}
            }
            if Instant::now() >= due || reported.renew(&mut process) {
                break;
            }
        }
        if shutdown.soft.is_cancelled() {
            break;
        }
    }
    let goodbye = Beat { key: &key, id: &process.id, says: "", ttl_ms: millis(SILENT) };
    let _ = tokio::time::timeout(GOODBYE, link.call(&goodbye)).await;
}

#[cfg(test)]
impl Process {
    /// A process that runs these pipelines, and of which nothing else is known.
    pub(crate) fn running(pipelines: BTreeMap<PipelineName, Pace>) -> Self {
        Self {
            id: "a".to_owned(),
            host: "here".to_owned(),
            pid: 1,
            version: "1".to_owned(),
            roles: Vec::new(),
            started_ms: 0,
            pipelines,
            calls: BTreeMap::new(),
            breakers: Vec::new(),
            streams: Vec::new(),
            buses: Vec::new(),
            mongodb: None,
            failing: BTreeMap::new(),
            long: Vec::new(),
        }
    }
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
        let process = Process::running;
        let all = [
            process([(name.clone(), pace_of(1.5))].into()),
            process([(name.clone(), pace_of(2.0))].into()),
            process(BTreeMap::new()),
        ];
        assert_eq!(pace(&all, &name), Pace { workers_busy: 2, ..pace_of(3.5) });
    }
}
