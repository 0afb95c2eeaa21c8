//! The workers of a campaign that are programs of Rust: Fairlane, and the plain worker of a stream.
//! `fairlane-bench` starts itself as such a process.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use fairlane::app::{self, App, Roles};
use fairlane::config::Config;
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane::sandbox::STREAM;
use fairlane_testkit::history::{HistoryLog, Outcome, Record};
use redis::Connection;
use redis::streams::{StreamAutoClaimReply, StreamId, StreamReadReply};
use tokio::time::Instant;

use super::{HANDLING, LOCK};
use crate::error::BenchError;
use crate::faults::worker::{now_us, position};
use crate::peers::system::{Measure, System};

/// The group of the plain workers.
pub(super) const GROUP: &str = "plain";
/// How many events the plain worker reads at a time, and how long it waits for them, ms.
pub(super) const COUNT: usize = 10;
const BLOCK_MS: usize = 500;
/// Time between two looks for events of dead workers, and before a new connection.
const CLAIM_EVERY: Duration = Duration::from_secs(1);
const AGAIN: Duration = Duration::from_millis(100);
/// Maximum time for an answer. Redis may be frozen for 3 s.
const PATIENCE: Duration = Duration::from_secs(10);
/// The pipeline of Fairlane.
pub(super) const PIPELINE: &str = "bench";

/// Where a process notes the starts and the ends of its handlings.
pub(super) fn history(directory: &Path, process: u32) -> PathBuf {
    directory.join(format!("{process}.history"))
}

/// Where a process of Fairlane notes fences and commits.
pub(super) fn fences(directory: &Path, process: u32) -> PathBuf {
    directory.join(format!("{process}.fences"))
}

/// Exists when a process has started.
pub(super) fn ready(directory: &Path, process: u32) -> PathBuf {
    directory.join(format!("{process}.ready"))
}

/// The configuration of Fairlane: the defaults, except for these.
pub(super) fn settings(redis: &str, workers: usize) -> String {
    format!(
        r#"
redis.url = "{redis}"
metrics.listen = "127.0.0.1:0"
bus.streams = ["{STREAM}"]
bus.dedup = "10m"

[pipelines.{PIPELINE}]
handler = "{PIPELINE}"
events = ["*"]
start = "earliest"
lease_ttl = "{}s"
workers.max = {workers}
"#,
        LOCK.as_secs()
    )
}

/// Runs until the process is killed, or the bench has ended.
///
/// # Errors
/// If Redis is unavailable for 5 s at the start.
pub(crate) async fn run(
    system: System,
    url: &str,
    directory: &Path,
    process: u32,
) -> Result<(), BenchError> {
    std::thread::spawn(|| {
        // The bench writes nothing. The pipe ends with it.
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(1);
    });
    if system == System::Xreadgroup {
        let log = Log::open(&history(directory, process))?;
        let (url, ready) = (url.to_owned(), ready(directory, process));
        let reading = tokio::task::spawn_blocking(move || read_stream(&url, process, &log, &ready));
        return reading.await.map_err(|error| BenchError::Campaign(error.to_string()))?;
    }
    let text = settings(url, system.concurrency(Measure::Faults));
    let config = Config::from_toml(&text, "the settings of the bench")
        .map_err(|error| BenchError::Campaign(error.to_string()))?;
    let directory = directory.to_owned();
    let builder = move |config| {
        let recorder = Recorder::open(&directory, process).expect("its histories can be written");
        std::fs::write(ready(&directory, process), "").expect("its directory can be written");
        let roles = Roles { http: false, ..Roles::ALL };
        App::builder(config).handler(PIPELINE, recorder).roles(roles)
    };
    Ok(app::serve(config, builder).await?)
}

/// The history of a process. Nothing is buffered, so a kill loses no line.
struct Log(Mutex<File>);

impl Log {
    fn open(path: &Path) -> Result<Self, BenchError> {
        Ok(Self(Mutex::new(File::options().create(true).append(true).open(path)?)))
    }

    /// Notes a start (`B`) or an end (`E`), and returns its time.
    fn note(&self, kind: char, bot: &str, position: u32) -> u64 {
        let tenant = bot.strip_prefix("bot-").unwrap_or(bot);
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = now_us();
        let line = format!("{kind}\t{tenant}\t{position}\t{at}\n");
        file.write_all(line.as_bytes()).expect("the history of the campaign can be written");
        at
    }
}

/// The handler of Fairlane.
struct Recorder {
    log: Log,
    fences: HistoryLog,
    process: u32,
    /// When the handling of a slice ended, by bot and fence. Its commit was requested later.
    asked: Mutex<HashMap<(String, u64), u64>>,
}

impl Recorder {
    fn open(directory: &Path, process: u32) -> Result<Self, BenchError> {
        let log = Log::open(&history(directory, process))?;
        let fences = HistoryLog::append(&fences(directory, process))?;
        Ok(Self { log, fences, process, asked: Mutex::default() })
    }
}

impl Handler for Recorder {
    async fn handle(&self, _: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        let bot = slice.bot.as_str();
        let mut done = 0;
        for (index, delivery) in slice.events.iter().enumerate() {
            // After a freeze, the lease may be that of another process.
            if index > 0 && Instant::now() >= slice.deadline {
                break;
            }
            if let Some(event) = position(&delivery.event) {
                let started = self.log.note('B', bot, event);
                tokio::time::sleep(HANDLING).await;
                let ended = self.log.note('E', bot, event);
                let record = Record::Handled {
                    bot,
                    event,
                    sequence: delivery.sequence.get(),
                    fence: slice.fence.get(),
                    started,
                    ended,
                    outcome: Outcome::Done,
                    process: self.process,
                };
                self.fences.write([record]).expect("the history of the campaign can be written");
            }
            done = index + 1;
        }
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.insert((bot.to_owned(), slice.fence.get()), now_us());
        Ok(Outcomes::first(done))
    }

    fn committed(&self, slice: &Slice, settled: usize) {
        let key = (slice.bot.as_str().to_owned(), slice.fence.get());
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        let settled = slice.events.iter().take(settled);
        let events: Vec<u32> = settled.filter_map(|it| position(&it.event)).collect();
        let record = Record::Committed {
            bot: slice.bot.as_str(),
            events: Cow::Borrowed(&events),
            fence: slice.fence.get(),
            asked: asked.unwrap_or_default(),
            at: now_us(),
            process: self.process,
        };
        self.fences.write([record]).expect("the history of the campaign can be written");
    }
}

/// The plain worker: reads new events, and takes over those that another worker has held for too long.
/// Connects again after an error. Never returns otherwise.
fn read_stream(url: &str, process: u32, log: &Log, ready: &Path) -> Result<(), BenchError> {
    let client = redis::Client::open(url)?;
    std::fs::write(ready, "")?;
    loop {
        // It has no other way to go on than to connect again.
        let ended = client.get_connection_with_timeout(PATIENCE).and_then(|mut connection| {
            connection.set_read_timeout(Some(PATIENCE))?;
            read_connection(&mut connection, process, log)
        });
        if let Err(error) = ended {
            eprintln!("{error}");
        }
        std::thread::sleep(AGAIN);
    }
}

fn read_connection(connection: &mut Connection, process: u32, log: &Log) -> redis::RedisResult<()> {
    let consumer = format!("worker-{process}");
    let idle = LOCK.as_millis().to_string();
    let mut claimed: Option<Instant> = None;
    loop {
        if claimed.is_none_or(|claimed| claimed.elapsed() >= CLAIM_EVERY) {
            claimed = Some(Instant::now());
            let mut claim = redis::cmd("XAUTOCLAIM");
            claim.arg(STREAM).arg(GROUP).arg(&consumer).arg(&idle).arg("0-0");
            let found: StreamAutoClaimReply = claim.arg("COUNT").arg(COUNT).query(connection)?;
            if !found.claimed.is_empty() {
                // There may be more.
                claimed = None;
            }
            handle(connection, &found.claimed, log)?;
        }
        let mut read = redis::cmd("XREADGROUP");
        read.arg("GROUP").arg(GROUP).arg(&consumer).arg("COUNT").arg(COUNT);
        read.arg("BLOCK").arg(BLOCK_MS).arg("STREAMS").arg(STREAM).arg(">");
        let found: Option<StreamReadReply> = read.query(connection)?;
        for stream in found.into_iter().flat_map(|found| found.keys) {
            handle(connection, &stream.ids, log)?;
        }
    }
}

/// Handles events and confirms each.
fn handle(connection: &mut Connection, events: &[StreamId], log: &Log) -> redis::RedisResult<()> {
    for entry in events {
        let text: Option<Vec<u8>> = entry.get("event");
        let event = text.and_then(|text| serde_json::from_slice::<serde_json::Value>(&text).ok());
        let word = |name: &str| Some(event.as_ref()?.get(name)?.as_str()?.to_owned());
        let position = word("id").and_then(|id| id.parse().ok());
        if let Some((bot, position)) = word("botid").zip(position) {
            log.note('B', &bot, position);
            std::thread::sleep(HANDLING);
            log.note('E', &bot, position);
        }
        let mut confirm = redis::cmd("XACK");
        let () = confirm.arg(STREAM).arg(GROUP).arg(&entry.id).query(connection)?;
    }
    Ok(())
}
