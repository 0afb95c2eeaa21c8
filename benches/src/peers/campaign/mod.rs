//! The measure `faults`: every system gets the same events and the same faults at the same times.
//!
//! The workers of each system are three processes. Both the events and the faults are drawn from a
//! seed. What the faults meet differs from run to run, because processes are not deterministic.

mod feed;
mod judge;
pub(crate) mod worker;
mod world;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fairlane::sandbox::Interrupt;
use fairlane_testkit::history::Checker;
use futures_util::future::{Either, try_join_all};
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use self::judge::Verdict;
use self::world::World;
use super::system::{Measure, System};
use crate::error::BenchError;
use crate::faults::plan::{self, Planned};
use crate::faults::{Fault, worker::now_us};

/// The faults that a campaign draws.
const KINDS: [Fault; 5] = [
    Fault::ProcessKilled,
    Fault::ProcessFrozen,
    Fault::RedisKilled,
    Fault::RedisFrozen,
    Fault::ClientsKilled,
];
/// The lease, the lock or the idle time after which another worker takes over, in every system.
const LOCK: Duration = Duration::from_secs(3);
/// Time that the handler takes per event.
const HANDLING: Duration = Duration::from_millis(2);
/// A tenant with an event that is not handled this long after the last fault is stranded.
const STRANDED: Duration = Duration::from_secs(60);
/// How long the producer may take for the last acknowledgements.
const ADDS: Duration = Duration::from_secs(90);
/// When everything is handled, an event that comes again does so within this time.
const SETTLES: Duration = Duration::from_secs(6);
/// How often the histories are looked at meanwhile.
const LOOK: Duration = Duration::from_secs(1);

/// One run of a system.
#[derive(Debug, Clone, Default)]
pub(super) struct Survived {
    pub(super) acknowledged: usize,
    pub(super) lost: usize,
    pub(super) reordered: usize,
    pub(super) overlapping: usize,
    pub(super) repeated: usize,
    pub(super) stranded: usize,
    pub(super) waiting: usize,
    /// The first handlings of quiet tenants, in ascending order, µs.
    pub(super) waits: Vec<u32>,
    /// From the end of the last fault until every event was handled. `None`: one never was.
    pub(super) drained: Option<Duration>,
    /// Processes that ended by themselves.
    pub(super) restarted: usize,
    /// Commits of Fairlane that were confirmed although a newer lease was at work.
    pub(super) stale_commits: Option<usize>,
    /// Number of faults by kind.
    pub(super) faults: BTreeMap<String, usize>,
    /// The version of Redis.
    pub(super) redis: String,
}

/// How a system is used.
pub(super) fn settings(system: System) -> BTreeMap<&'static str, String> {
    let lock = LOCK.as_secs();
    let slots = system.concurrency(Measure::Faults);
    let processes = world::PROCESSES;
    let handles = match system {
        System::Fairlane => format!(
            "lease_ttl {lock} s, up to {slots} workers per process, otherwise the defaults; the handler \
             looks at the deadline before each event"
        ),
        System::Groupmq => format!(
            "jobTimeoutMs {lock}000, stalledInterval 1000, stalledGracePeriod 0, maxStalledCount 100, \
             maxAttempts 100, concurrency {slots} per process"
        ),
        System::Bullmq | System::BullmqPerTenant => format!(
            "lockDuration {lock}000, stalledInterval 1500, maxStalledCount 100, concurrency 1, global \
             concurrency 1 per queue"
        ),
        System::Xreadgroup => format!(
            "COUNT {}, XACK per event, XAUTOCLAIM every second with min-idle {lock}000",
            worker::COUNT
        ),
    };
    let adds = match system {
        System::Fairlane => "XADD, repeated until acknowledged; bus.dedup 10m",
        System::Groupmq => "add with a jobId, keepCompleted 100000",
        System::Bullmq | System::BullmqPerTenant => {
            "add with a jobId, removeOnComplete after 600 s"
        }
        System::Xreadgroup => "XADD, repeated until acknowledged; no deduplication",
    };
    BTreeMap::from([
        ("adds under faults", adds.to_owned()),
        ("handles under faults", format!("{processes} processes: {handles}")),
    ])
}

/// Runs one system under the faults of this seed.
pub(super) async fn run(
    system: System,
    seed: u64,
    length: Duration,
    programs: Option<&Path>,
    watch: impl FnMut(u64),
) -> Result<Survived, BenchError> {
    let mut interrupt = Interrupt::listen()?;
    let plan = plan::plan(seed, length, world::PROCESSES, 0, &KINDS);
    // Dropped after all processes, and removed with all histories.
    let directory = tempfile::Builder::new().prefix("fairlane-peers-").tempdir()?;
    let work = run_in(directory.path(), system, seed, length, programs, &plan, watch);
    Box::pin(interrupt.or(work)).await
}

async fn run_in(
    directory: &Path,
    system: System,
    seed: u64,
    length: Duration,
    programs: Option<&Path>,
    plan: &[Planned],
    watch: impl FnMut(u64),
) -> Result<Survived, BenchError> {
    let schedule = feed::schedule(seed, length)?;
    let world = World::start(system, directory, programs).await?;
    let sent = directory.join("sent");
    let started = Instant::now();
    let feeding = if system.is_node() {
        let events = directory.join("events.ndjson");
        feed::write(&schedule, &events)?;
        Either::Left(feed_node(&world, &events, &sent).await?)
    } else {
        let redis = world.redis.lock().await;
        Either::Right(feed::start(schedule, &redis, &sent)?.ended())
    };
    let campaign = async {
        let (over, over_us) = survive(&world, plan, started, length, feeding, watch).await?;
        let is_done = timeout_at(over + STRANDED, async {
            while !world.verdict(&sent).await?.is_done() {
                sleep(LOOK).await;
            }
            Ok::<_, BenchError>(())
        });
        if let Ok(done) = is_done.await {
            done?;
            sleep(SETTLES).await;
        }
        Ok::<_, BenchError>(world.verdict(&sent).await?.survived(over_us))
    };
    let mut survived = tokio::select! {
        survived = campaign => survived?,
        error = world.supervise() => return Err(error),
    };
    survived.redis = world.redis_version().await;
    survived.restarted = world.restarted.load(Ordering::Relaxed);
    for planned in plan {
        *survived.faults.entry(planned.fault.name()).or_default() += 1;
    }
    if system == System::Fairlane {
        survived.stale_commits = Some(world.stale_commits().await?);
    }
    Ok(survived)
}

/// Carries out the faults while events are added. Returns when the last fault ended.
async fn survive(
    world: &World,
    plan: &[Planned],
    started: Instant,
    length: Duration,
    feeding: impl Future<Output = Result<(), BenchError>>,
    watch: impl FnMut(u64),
) -> Result<(Instant, u64), BenchError> {
    let watch = RefCell::new(watch);
    let faults = plan.iter().map(|planned| {
        let watch = &watch;
        async move {
            sleep_until(started + Duration::from_millis(planned.at_ms)).await;
            (watch.borrow_mut())(planned.number as u64 + 1);
            world.inject(*planned).await
        }
    });
    let faults = async {
        try_join_all(faults).await?;
        sleep_until(started + length).await;
        Ok((Instant::now(), now_us()))
    };
    let both = async { tokio::try_join!(faults, feeding) };
    if let Ok(ended) = timeout_at(started + length + ADDS, both).await {
        return Ok(ended?.0);
    }
    let problem = format!("its producer gets no acknowledgement for {ADDS:?}");
    Err(BenchError::Peer { system: world.system.name(), problem })
}

/// Starts the producer of Node.js. Returns when it begins to add events.
async fn feed_node(
    world: &World,
    events: &Path,
    history: &Path,
) -> Result<impl Future<Output = Result<(), BenchError>> + 'static, BenchError> {
    let system = world.system;
    let log = world.directory.join("feed.log");
    let command = world.node("feed", &json!({ "events": events, "history": history }));
    let mut child = Command::from(command)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(&log)?)
        .kill_on_drop(true)
        .spawn()
        .map_err(BenchError::NoNode)?;
    let failed = move || {
        let said = std::fs::read_to_string(&log).unwrap_or_default();
        let last = said.trim().lines().last().unwrap_or_default();
        let problem = format!("its producer ended: {last}");
        BenchError::Peer { system: system.name(), problem }
    };
    let pipes = child.stdin.take().zip(child.stdout.take());
    let Some((input, output)) = pipes else { return Err(failed()) };
    let mut lines = BufReader::new(output).lines();
    match timeout(ADDS, lines.next_line()).await {
        Ok(Ok(Some(line))) if line == "ready" => {}
        _ => return Err(failed()),
    }
    Ok(async move {
        let status = child.wait().await?;
        // It would take the end of this pipe for the end of the bench.
        drop(input);
        if status.success() { Ok(()) } else { Err(failed()) }
    })
}

/// A verdict, with what the end of the campaign needs to know.
struct Judged {
    verdict: Verdict,
    /// When each handled event was due, and when its first handling ended, µs.
    ends: Vec<(u64, u64)>,
}

impl World {
    /// Judges the histories so far.
    async fn verdict(&self, sent: &Path) -> Result<Judged, BenchError> {
        let now = now_us();
        let sent = judge::sent(&judge::read(sent)?);
        let mut handlings = Vec::new();
        for number in self.numbers().await {
            let text = judge::read(&worker::history(&self.directory, number))?;
            handlings.extend(judge::handlings(&text, number, self.end_of(number, now)));
        }
        let mut first_end = BTreeMap::new();
        for handling in handlings.iter().filter(|handling| handling.has_ended) {
            let end = first_end.entry(handling.place).or_insert(handling.until);
            *end = handling.until.min(*end);
        }
        let ends = sent.iter().filter_map(|sent| Some((sent.due, *first_end.get(&sent.place)?)));
        let ends = ends.collect();
        Ok(Judged { verdict: Verdict::of(&sent, &handlings, feed::BUSY), ends })
    }

    async fn redis_version(&self) -> String {
        let info = self.redis.lock().await.ask(&["INFO", "server"]).await;
        let version = info.lines().find_map(|line| line.strip_prefix("redis_version:"));
        version.unwrap_or("unknown").trim().to_owned()
    }

    /// The commits of Fairlane that its fences should have refused.
    async fn stale_commits(&self) -> Result<usize, BenchError> {
        let mut checker = Checker::new();
        for number in self.numbers().await {
            let text = judge::read(&worker::fences(&self.directory, number))?;
            checker
                .read(text.as_bytes())
                .map_err(|error| BenchError::Campaign(error.to_string()))?;
        }
        Ok(checker.report().stale_commits)
    }
}

impl Judged {
    fn is_done(&self) -> bool {
        self.verdict.lost + self.verdict.waiting == 0
    }

    /// `over`: when the last fault ended, µs.
    fn survived(self, over: u64) -> Survived {
        let is_done = self.is_done();
        let Verdict {
            acknowledged,
            lost,
            reordered,
            overlapping,
            repeated,
            stranded,
            waiting,
            waits,
        } = self.verdict;
        // Those that are due later do not show how long the others took.
        let ends = self.ends.iter().filter(|(due, _)| *due <= over).map(|(_, end)| *end);
        let last = ends.max().unwrap_or_default();
        let drained = is_done.then(|| Duration::from_micros(last.saturating_sub(over)));
        Survived {
            acknowledged,
            lost,
            reordered,
            overlapping,
            repeated,
            stranded,
            waiting,
            waits,
            drained,
            ..Survived::default()
        }
    }
}
