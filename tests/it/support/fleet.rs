//! Several worker processes on one Redis, events for them, and the history of their handlings.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fairlane::redis::Link;
use rustc_hash::{FxHashMap, FxHashSet};
use tempfile::TempDir;

use super::bus::{Publisher, wire};
use super::config::{SHARDS, STREAM, config};
use super::history::{Checker, Outcome, Record, Report};
use super::http;
use super::process::WorkerProcess;
use super::redis::{Options, RedisBackend, RedisServer};
use super::roles::worker::{BEHAVIOUR, Behaviour, CONFIG, READY};
use super::wait::eventually;

const START: Duration = Duration::from_secs(20);

pub(crate) struct Fleet<S = RedisServer> {
    pub(crate) server: S,
    pub(crate) publisher: Publisher,
    /// The configuration, in TOML, of every worker that is started from now on.
    pub(crate) config: String,
    pub(crate) behaviour: Behaviour,
    pub(crate) workers: Vec<WorkerProcess>,
    /// The test's own connection.
    link: Link,
    directory: TempDir,
    started: u32,
    seen: Seen,
}

/// The content of the logs that was read so far.
#[derive(Default)]
struct Seen {
    read: FxHashMap<PathBuf, u64>,
    bots: FxHashMap<String, u32>,
    settled: FxHashSet<(u32, u32)>,
}

impl Fleet {
    /// Starts a Redis without a worker. The publisher has `bots` bots.
    pub(crate) fn new(options: Options, bots: usize, settings: &[(&str, &str)]) -> Self {
        Self::on(RedisServer::start(options), bots, settings)
    }
}

impl<S: RedisBackend> Fleet<S> {
    /// The same on an existing server or cluster.
    pub(crate) fn on(server: S, bots: usize, settings: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let config = config(&server, "test", settings);
        let publisher = Publisher::new(bots, &directory.path().join("sent.log"));
        let antidote = directory.path().join("antidote");
        Self {
            link: wire(&server),
            server,
            publisher,
            config,
            behaviour: Behaviour { antidote, ..Behaviour::default() },
            workers: Vec::new(),
            directory,
            started: 0,
            seen: Seen::default(),
        }
    }

    /// Starts `count` workers and waits until they run. Their places are those in `workers`.
    pub(crate) async fn start(&mut self, count: usize) {
        for _ in 0..count {
            let worker = self.spawn();
            self.workers.push(worker);
        }
        for worker in &self.workers {
            self.ready(worker).await;
        }
    }

    /// Starts a worker in the place of one that ended.
    pub(crate) async fn restart(&mut self, place: usize) {
        self.workers[place] = self.spawn();
        self.ready(&self.workers[place]).await;
    }

    fn spawn(&mut self) -> WorkerProcess {
        self.started += 1;
        let history = self.directory.path().join(format!("worker-{}.log", self.started));
        let behaviour = Behaviour { history, process: self.started, ..self.behaviour.clone() };
        let behaviour = serde_json::to_string(&behaviour).unwrap();
        WorkerProcess::spawn("worker", &[(CONFIG, self.config.clone()), (BEHAVIOUR, behaviour)])
    }

    async fn ready(&self, worker: &WorkerProcess) {
        eventually(START, "the worker runs", async || metrics_address(worker).is_some()).await;
    }

    pub(crate) async fn publish(&mut self, each: u32) {
        self.publisher.publish(&self.server, STREAM, each).await;
    }

    /// Lets every handling of a poison event succeed from now on.
    pub(crate) fn cure(&self) {
        File::create(&self.behaviour.antidote).unwrap();
    }

    /// The number of events that were done, or left their queue in another way that a handler saw.
    pub(crate) fn settled(&mut self) -> usize {
        for path in self.logs() {
            self.seen.read(&path);
        }
        self.seen.settled.len()
    }

    /// Waits until `count` events are settled.
    pub(crate) async fn settles(&mut self, count: usize, timeout: Duration) {
        let what = format!("{count} events settled");
        eventually(timeout, &what, async || self.settled() >= count).await;
    }

    /// Waits until every published event is settled and every queue is empty.
    pub(crate) async fn drains(&mut self, timeout: Duration) {
        self.settles(self.publisher.total(), timeout).await;
        eventually(timeout, "the queues are empty", async || {
            let depth = self.sum("HGET", "meta", Some("depth")).await;
            depth == Some(0) && self.sum("HLEN", "own", None).await == Some(0)
        })
        .await;
    }

    /// The number of leases that are held now.
    pub(crate) async fn leases(&self) -> u64 {
        self.sum("HLEN", "own", None).await.unwrap()
    }

    /// Asks every shard for a number and returns the sum, or `None` if a shard does not answer.
    async fn sum(&self, command: &str, key: &str, argument: Option<&str>) -> Option<u64> {
        let mut pipe = redis::Pipeline::new();
        for shard in 0..SHARDS {
            pipe.cmd(command).arg(format!("fl:{{test:{shard}}}:{key}")).arg(argument);
        }
        let values = redis::Value::Array(self.link.run(&pipe).await.ok()?);
        let numbers: Vec<Option<u64>> = redis::from_redis_value(values).ok()?;
        Some(numbers.into_iter().flatten().sum())
    }

    /// The result of the check of everything written so far.
    pub(crate) fn report(&self) -> Report {
        let mut checker = Checker::new();
        checker.read_file(&self.directory.path().join("sent.log")).unwrap();
        for path in self.logs() {
            checker.read_file(&path).unwrap();
        }
        checker.report()
    }

    /// The same, once `commits` events are noted as committed, or after a while. A worker notes a commit
    /// after the answer of Redis, so the queues may be empty before.
    pub(crate) async fn report_of(&self, commits: usize) -> Report {
        let until = Instant::now() + START;
        loop {
            let report = self.report();
            if report.committed >= commits || Instant::now() > until {
                return report;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Every record that the workers wrote, without an incomplete one at the end of a log.
    pub(crate) fn records(&self, mut each: impl FnMut(&Record<'_>)) {
        for path in self.logs() {
            let text = std::fs::read_to_string(&path).unwrap();
            let complete = text.rfind('\n').map_or(0, |end| end + 1);
            text[..complete].lines().for_each(|line| each(&Record::parse(line).unwrap()));
        }
    }

    /// The longest time for which no process handled a bot that was not done yet, and how long a bot usually
    /// waits for its next lease: the median over all leases of all bots.
    pub(crate) fn rests(&self) -> (Duration, Duration) {
        let (mut longest, mut turns) = (0, Vec::new());
        self.each_rest(|rest, _, is_turn| {
            longest = longest.max(rest);
            if is_turn {
                turns.push(rest);
            }
        });
        turns.sort_unstable();
        let usual = turns.get(turns.len() / 2).copied().unwrap_or_default();
        (Duration::from_micros(longest), Duration::from_micros(usual))
    }

    /// The longest of these times that ended before `before_us`.
    pub(crate) fn longest_rest(&self, before_us: u64) -> Duration {
        let mut longest = 0;
        self.each_rest(|rest, ended, _| {
            if ended < before_us {
                longest = longest.max(rest);
            }
        });
        Duration::from_micros(longest)
    }

    /// Calls `each` with every time between two handlings of a bot: how long it was and when it ended, in us,
    /// and whether another lease began then.
    fn each_rest(&self, mut each: impl FnMut(u64, u64, bool)) {
        let mut bots: FxHashMap<String, Vec<(u64, u64, u64)>> = FxHashMap::default();
        self.records(|record| {
            if let Record::Handled { bot, fence, started, ended, .. } = *record {
                bots.entry(bot.to_owned()).or_default().push((started, ended, fence));
            }
        });
        for handlings in bots.values_mut() {
            handlings.sort_unstable();
            let (_, mut until, mut lease) = handlings[0];
            for &(started, ended, fence) in &handlings[1..] {
                each(started.saturating_sub(until), started, fence != lease);
                (until, lease) = (until.max(ended), fence);
            }
        }
    }

    /// `/metrics` of a worker.
    pub(crate) async fn metrics(&self, place: usize) -> String {
        let address = metrics_address(&self.workers[place]).unwrap();
        http::get(&address, "/metrics").await.1
    }

    /// Asserts that the first worker says that seven entries of a log are gone, and that eight events were
    /// handled.
    pub(crate) async fn misses_seven(&self, log: &str) {
        let metrics = self.metrics(0).await;
        let gaps = http::metric(&metrics, "fairlane_bus_gap_total", &[("stream", log)]);
        assert_eq!(gaps, Some(1.0), "{log}");
        let lines = self.workers[0].lines();
        let told = |line: &&String| line.contains("ERROR") && line.contains("events are missing");
        let line = lines.iter().find(told).unwrap_or_else(|| panic!("no error in {lines:?}"));
        assert!(line.contains("missing=7"), "{line}");
        let report = self.report();
        assert!(report.is_clean() && report.sent == 8, "{report}");
    }

    fn logs(&self) -> Vec<PathBuf> {
        let log = |number| self.directory.path().join(format!("worker-{number}.log"));
        (1..=self.started).map(log).filter(|path| path.exists()).collect()
    }
}

/// The address of a worker's metrics.
pub(crate) fn metrics_address(worker: &WorkerProcess) -> Option<String> {
    worker.lines().iter().find_map(|line| line.strip_prefix(READY).map(str::to_owned))
}

impl Seen {
    fn read(&mut self, path: &Path) {
        let offset = self.read.entry(path.to_owned()).or_default();
        let mut file = File::open(path).unwrap();
        file.seek(SeekFrom::Start(*offset)).unwrap();
        let mut lines = BufReader::new(file);
        let mut line = String::new();
        while lines.read_line(&mut line).unwrap() > 0 && line.ends_with('\n') {
            *offset += line.len() as u64;
            match Record::parse(line.trim_end_matches('\n')).unwrap() {
                Record::Handled { bot, event, outcome: Outcome::Done, .. } => {
                    let bot = number_of(&mut self.bots, bot);
                    self.settled.insert((bot, event));
                }
                Record::Committed { bot, events, .. } => {
                    let bot = number_of(&mut self.bots, bot);
                    self.settled.extend(events.iter().map(|&event| (bot, event)));
                }
                _ => {}
            }
            line.clear();
        }
    }
}

fn number_of(bots: &mut FxHashMap<String, u32>, bot: &str) -> u32 {
    if let Some(&number) = bots.get(bot) {
        return number;
    }
    let number = u32::try_from(bots.len()).unwrap();
    bots.insert(bot.to_owned(), number);
    number
}
