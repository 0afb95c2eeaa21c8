//! The Redis and the worker processes of one system, and the faults that hit them.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex as StdMutex, PoisonError};
use std::time::Duration;

use fairlane_testkit::process::signal;
use fairlane_testkit::redis::{Options, Persistence, RedisServer};
use serde_json::{Value, json};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep};

use super::{HANDLING, LOCK, worker};
use crate::error::BenchError;
use crate::faults::Fault;
use crate::faults::plan::Planned;
use crate::faults::worker::now_us;
use crate::peers::system::{Measure, System};

/// Number of worker processes.
pub(super) const PROCESSES: usize = 3;
/// Redis writes each command to its file before it answers, so a kill of its process loses nothing. A
/// sync of the disk would protect from a loss of power, and would measure the disk. `everysec` would
/// sometimes write later.
const WRITES: [&str; 2] = ["--appendfsync", "no"];
/// Maximum time until the first processes are ready.
const READY: Duration = Duration::from_secs(120);
/// A process that has ended is started again within this time.
const AGAIN: Duration = Duration::from_millis(500);

/// The Redis and the processes of a system.
pub(super) struct World {
    pub(super) system: System,
    pub(super) directory: PathBuf,
    pub(super) redis: Mutex<RedisServer>,
    socket: String,
    url: String,
    /// The directory of the programs of Node.js.
    programs: Option<PathBuf>,
    workers: Vec<Mutex<Worker>>,
    /// When processes have ended, µs, by number.
    ends: StdMutex<BTreeMap<u32, u64>>,
    /// How often a process that had ended by itself was started again.
    pub(super) restarted: AtomicUsize,
}

/// A running process. It is killed when it is dropped.
struct Worker {
    child: Child,
    /// Its number among all processes, from 1.
    number: u32,
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Both fail harmlessly if the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl World {
    /// Starts Redis and the processes.
    pub(super) async fn start(
        system: System,
        directory: &Path,
        programs: Option<&Path>,
    ) -> Result<Self, BenchError> {
        let options = Options { persistence: Persistence::Always, ..Options::default() };
        let redis = tokio::task::spawn_blocking(move || {
            RedisServer::start_with(options, &WRITES.map(str::to_owned))
        })
        .await
        .map_err(|error| BenchError::Campaign(error.to_string()))?;
        let url = redis.url();
        let socket = url.trim_start_matches("redis+unix://").to_owned();
        if system == System::Xreadgroup {
            let words =
                ["XGROUP", "CREATE", fairlane::sandbox::STREAM, worker::GROUP, "0", "MKSTREAM"];
            redis.ask(&words).await;
        }
        let mut world = Self {
            system,
            directory: directory.to_owned(),
            redis: Mutex::new(redis),
            socket,
            url,
            programs: programs.map(Path::to_owned),
            workers: Vec::new(),
            ends: StdMutex::default(),
            restarted: AtomicUsize::new(0),
        };
        for number in 1..=PROCESSES {
            let number = u32::try_from(number).unwrap_or(u32::MAX);
            let started = world.spawn(number)?;
            world.workers.push(Mutex::new(started));
        }
        world.ready().await?;
        Ok(world)
    }

    /// What a program of Node.js needs to know.
    pub(super) fn options(&self, more: &Value) -> String {
        let mut options = json!({
            "socket": self.socket,
            "batch": 1,
            "concurrency": self.system.concurrency(Measure::Faults),
            "tenants": super::feed::BUSY + super::feed::QUIET,
            "handling_ms": HANDLING.as_secs_f64() * 1_000.0,
            "lock_ms": u64::try_from(LOCK.as_millis()).unwrap_or(u64::MAX),
        });
        if let (Some(options), Some(more)) = (options.as_object_mut(), more.as_object()) {
            options.extend(more.clone());
        }
        options.to_string()
    }

    /// A program of Node.js for this role.
    pub(super) fn node(&self, role: &str, more: &Value) -> Command {
        let mut command = Command::new("node");
        command.arg(self.programs.clone().unwrap_or_default().join("campaign.mjs")).args([
            self.system.name(),
            role,
            &self.options(more),
        ]);
        command
    }

    fn spawn(&self, number: u32) -> Result<Worker, BenchError> {
        let mut command = if self.system.is_node() {
            let history = worker::history(&self.directory, number);
            let ready = worker::ready(&self.directory, number);
            self.node("work", &json!({ "history": history, "ready": ready }))
        } else {
            let mut command = Command::new(std::env::current_exe()?);
            command
                .args(["peers-worker", "--system", self.system.name(), "--url", &self.url])
                .arg("--directory")
                .arg(&self.directory)
                .args(["--process", &number.to_string()]);
            command
        };
        let log = self.directory.join(format!("{number}.log"));
        // The pipe tells the process when the bench has ended.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(File::create(log)?);
        let is_node = self.system.is_node();
        let failed =
            |error| if is_node { BenchError::NoNode(error) } else { BenchError::from(error) };
        let child = command.spawn().map_err(failed)?;
        Ok(Worker { child, number })
    }

    /// Waits until the first processes have started.
    async fn ready(&self) -> Result<(), BenchError> {
        let until = Instant::now() + READY;
        for (number, worker) in (1..).zip(&self.workers) {
            let file = worker::ready(&self.directory, number);
            while !file.exists() {
                let has_ended = worker.lock().await.child.try_wait()?.is_some();
                if has_ended || Instant::now() >= until {
                    let what = if has_ended { "has ended" } else { "does not become ready" };
                    return Err(self.failed(&format!("worker {number} {what}"), number));
                }
                sleep(Duration::from_millis(50)).await;
            }
        }
        Ok(())
    }

    fn failed(&self, problem: &str, number: u32) -> BenchError {
        let log = self.directory.join(format!("{number}.log"));
        let said = std::fs::read_to_string(log).unwrap_or_default();
        let last = said.trim().lines().last().unwrap_or("it said nothing").to_owned();
        BenchError::Peer { system: self.system.name(), problem: format!("{problem}: {last}") }
    }

    /// When the process with this number ended, µs. `now` if it still runs.
    pub(super) fn end_of(&self, number: u32, now: u64) -> u64 {
        let ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.get(&number).copied().unwrap_or(now)
    }

    /// Starts a process in the place of one that has ended.
    fn restart(&self, worker: &mut Worker, ended: u64) -> Result<(), BenchError> {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.insert(worker.number, ended);
        drop(ends);
        let places = u32::try_from(PROCESSES).unwrap_or(u32::MAX);
        *worker = self.spawn(worker.number + places)?;
        Ok(())
    }

    /// Starts processes again that have ended, as a service manager does. Ends only with an error.
    pub(super) async fn supervise(&self) -> BenchError {
        loop {
            sleep(AGAIN).await;
            for worker in &self.workers {
                // A fault of the process has it otherwise.
                let Ok(mut worker) = worker.try_lock() else { continue };
                if worker.child.try_wait().is_ok_and(|ended| ended.is_some()) {
                    self.restarted.fetch_add(1, Ordering::Relaxed);
                    if let Err(error) = self.restart(&mut worker, now_us()) {
                        return error;
                    }
                }
            }
        }
    }

    /// Carries out a fault and ends it. Waits before that while its target has another one.
    pub(super) async fn inject(&self, planned: Planned) -> Result<(), BenchError> {
        match planned.fault {
            Fault::ProcessKilled => {
                let mut worker = self.workers[planned.process].lock().await;
                let _ = worker.child.kill();
                let _ = worker.child.wait();
                let ended = now_us();
                sleep(planned.lasts()).await;
                self.restart(&mut worker, ended)?;
            }
            Fault::ProcessFrozen => {
                let worker = self.workers[planned.process].lock().await;
                let id = worker.child.id();
                send(id, "STOP").await?;
                sleep(planned.lasts()).await;
                send(id, "CONT").await?;
            }
            Fault::RedisKilled => {
                let mut redis = self.redis.lock().await;
                redis.kill9();
                sleep(planned.lasts()).await;
                tokio::task::block_in_place(|| redis.restart());
            }
            Fault::RedisFrozen => {
                let redis = self.redis.lock().await;
                send(redis.id(), "STOP").await?;
                sleep(planned.lasts()).await;
                send(redis.id(), "CONT").await?;
            }
            Fault::ClientsKilled => {
                let redis = self.redis.lock().await;
                redis.ask(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
            }
            other => {
                let why = format!("the campaign of peers has no fault {}", other.name());
                return Err(BenchError::Campaign(why));
            }
        }
        Ok(())
    }

    /// The numbers of all processes so far.
    pub(super) async fn numbers(&self) -> Vec<u32> {
        let mut numbers: Vec<u32> =
            self.ends.lock().unwrap_or_else(PoisonError::into_inner).keys().copied().collect();
        for worker in &self.workers {
            numbers.push(worker.lock().await.number);
        }
        numbers
    }
}

/// Sends a signal, and waits until a process that it stops has stopped.
async fn send(id: u32, name: &'static str) -> Result<(), BenchError> {
    let sent = tokio::task::spawn_blocking(move || signal(id, name)).await;
    sent.map_err(|error| BenchError::Campaign(error.to_string()))
}
