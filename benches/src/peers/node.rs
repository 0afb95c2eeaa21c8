//! A program of another queue, run by Node.js. `benches/peers/main.mjs` describes the lines that it
//! reads and writes.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use fairlane::sandbox::Rig;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::Instant;

use super::judge::Entry;
use super::system::{BATCH, HANDLING, Measure, System};
use super::work::Work;
use super::workers::{IDLE, Plan, Worked};
use crate::error::BenchError;

/// How long a program may take to connect, and to add all events.
const PATIENCE: Duration = Duration::from_secs(120);
/// Maximum number of lines of a program's errors in a message.
const ERROR_LINES: usize = 5;

/// The packages and the programs.
#[derive(Debug, Clone)]
pub(super) struct Programs(PathBuf);

/// A running program. Killed when dropped.
pub(super) struct Program {
    system: System,
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    errors: PathBuf,
    /// Where a worker writes its log.
    log: PathBuf,
    pub(super) about: About,
}

/// The versions and the settings of a program.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct About {
    pub(super) versions: BTreeMap<String, String>,
    pub(super) settings: String,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "state", rename_all = "lowercase")]
enum Message {
    Ready(About),
    Progress { done: u64 },
    Done { done: u64, seconds: f64 },
}

impl Programs {
    /// The programs in this directory, with their packages.
    pub(super) fn find(directory: &Path) -> Result<Self, BenchError> {
        let missing =
            |problem| Err(BenchError::NoPackages { directory: directory.to_owned(), problem });
        if !directory.join("main.mjs").is_file() {
            return missing("it has no main.mjs");
        }
        let has = |name| directory.join("node_modules").join(name).join("package.json").is_file();
        if !["groupmq", "bullmq", "ioredis"].into_iter().all(has) {
            return missing("its npm packages are not installed");
        }
        Ok(Self(directory.to_owned()))
    }

    /// The directory of the programs.
    pub(super) fn directory(&self) -> &Path {
        &self.0
    }

    /// The versions of the packages that a system needs, and of Node.js.
    pub(super) fn versions(&self, system: System) -> Result<BTreeMap<String, String>, BenchError> {
        let queue = if system == System::Groupmq { "groupmq" } else { "bullmq" };
        let mut versions = BTreeMap::new();
        for name in [queue, "ioredis"] {
            let file = self.0.join("node_modules").join(name).join("package.json");
            let package: Value = serde_json::from_slice(&fs::read(file)?).unwrap_or_default();
            let version = package["version"].as_str().unwrap_or("unknown");
            versions.insert(name.to_owned(), version.to_owned());
        }
        let told = std::process::Command::new("node").arg("--version").output();
        let told = told.map_err(BenchError::NoNode)?.stdout;
        let told = String::from_utf8_lossy(&told).trim().trim_start_matches('v').to_owned();
        versions.insert("node".to_owned(), told);
        Ok(versions)
    }

    /// A program that adds the events.
    pub(super) async fn add(
        &self,
        rig: &Rig,
        plan: &Plan,
        work: &Work,
    ) -> Result<Program, BenchError> {
        self.start(rig, plan, "add", Some(work)).await
    }

    /// A program that adds each of the events when it is due.
    pub(super) async fn pace(
        &self,
        rig: &Rig,
        plan: &Plan,
        work: &Work,
    ) -> Result<Program, BenchError> {
        self.start(rig, plan, "pace", Some(work)).await
    }

    /// A program that handles events.
    pub(super) async fn work(&self, rig: &Rig, plan: &Plan) -> Result<Program, BenchError> {
        self.start(rig, plan, "work", None).await
    }

    async fn start(
        &self,
        rig: &Rig,
        plan: &Plan,
        role: &str,
        work: Option<&Work>,
    ) -> Result<Program, BenchError> {
        let file = |end: &str| rig.directory().join(format!("{role}.{end}"));
        let (events, errors, log) = (file("ndjson"), file("err"), file("log"));
        if let Some(work) = work {
            work.write(&events)?;
        }
        let options = options(rig, plan, &events, &log);
        let mut child = Command::new("node")
            .arg(self.0.join("main.mjs"))
            .args([plan.system.name(), role, &options.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&errors)?)
            .kill_on_drop(true)
            .spawn()
            .map_err(BenchError::NoNode)?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let Some((input, output)) = pipes else {
            return Err(failed(plan.system, "it has no pipes".to_owned()));
        };
        let output = BufReader::new(output).lines();
        let about = About::default();
        let mut program = Program { system: plan.system, child, input, output, errors, log, about };
        match program.next(PATIENCE).await? {
            Message::Ready(about) => program.about = about,
            other => return Err(program.confused(&other)),
        }
        Ok(program)
    }
}

impl Program {
    /// Adds the events, and returns their number and the time in seconds.
    pub(super) async fn added(mut self) -> Result<(u64, f64), BenchError> {
        self.tell("go").await?;
        match self.next(PATIENCE).await? {
            Message::Done { done, seconds } => {
                self.end().await?;
                Ok((done, seconds))
            }
            other => Err(self.confused(&other)),
        }
    }

    /// Handles events until `total` are done or nothing moves.
    pub(super) async fn worked(
        mut self,
        total: u64,
        mut watch: impl FnMut(u64),
    ) -> Result<Worked, BenchError> {
        self.tell("go").await?;
        let mut last = (0, Instant::now());
        loop {
            match self.next(IDLE).await? {
                Message::Done { .. } => break,
                Message::Progress { done } => {
                    watch(done);
                    if done != last.0 {
                        last = (done, Instant::now());
                    } else if last.1.elapsed() > IDLE {
                        break;
                    }
                }
                other @ Message::Ready(_) => return Err(self.confused(&other)),
            }
        }
        self.tell("stop").await?;
        let (done, seconds) = loop {
            // A report of progress may have been sent before.
            if let Message::Done { done, seconds } = self.next(PATIENCE).await? {
                break (done, seconds);
            }
        };
        let log = Entry::parse(&fs::read(&self.log)?);
        self.end().await?;
        Worked::new(self.system, total, done, seconds, log)
    }

    async fn tell(&mut self, word: &str) -> Result<(), BenchError> {
        let told = self.input.write_all(format!("{word}\n").as_bytes()).await;
        match told {
            Ok(()) => Ok(self.input.flush().await?),
            Err(_) => Err(self.ended().await),
        }
    }

    async fn next(&mut self, patience: Duration) -> Result<Message, BenchError> {
        let Ok(line) = tokio::time::timeout(patience, self.output.next_line()).await else {
            let problem = format!("it says nothing for {patience:?}");
            return Err(failed(self.system, problem + &self.said()));
        };
        let Some(line) = line? else { return Err(self.ended().await) };
        serde_json::from_str(&line)
            .map_err(|_| failed(self.system, format!("its line {line:?} is not a report")))
    }

    /// Waits for the end of the process, so that Redis has no more clients.
    async fn end(&mut self) -> Result<(), BenchError> {
        let ended = tokio::time::timeout(PATIENCE, self.child.wait()).await;
        match ended {
            Ok(Ok(status)) if status.success() => Ok(()),
            _ => Err(self.ended().await),
        }
    }

    async fn ended(&mut self) -> BenchError {
        let _ = self.child.kill().await;
        failed(self.system, "its program ended".to_owned() + &self.said())
    }

    fn confused(&self, message: &Message) -> BenchError {
        failed(self.system, format!("its program says {message:?} too early"))
    }

    /// The end of its errors.
    fn said(&self) -> String {
        let text = fs::read_to_string(&self.errors).unwrap_or_default();
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        let first = lines.len().saturating_sub(ERROR_LINES);
        if lines.is_empty() { String::new() } else { format!(":\n{}", lines[first..].join("\n")) }
    }
}

fn failed(system: System, problem: String) -> BenchError {
    BenchError::Peer { system: system.name(), problem }
}

/// What a program needs to know.
fn options(rig: &Rig, plan: &Plan, events: &Path, log: &Path) -> Value {
    let handling = if plan.measure == Measure::Fairness { HANDLING } else { Duration::ZERO };
    json!({
        "socket": rig.target().to_string(),
        "events": events,
        "log": log,
        "batch": BATCH,
        "concurrency": plan.system.concurrency(plan.measure),
        "tenants": plan.per_tenant.len(),
        "stride": plan.per_tenant.iter().max(),
        "total": plan.total(),
        "handling_ms": handling.as_secs_f64() * 1_000.0,
        "rate": plan.rate,
    })
}
