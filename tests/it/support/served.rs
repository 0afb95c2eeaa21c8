//! `fairlane serve` as a separate process, to be called and killed.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use super::http::until_ready;
use super::process::signal;
use super::wait::{eventually, holds_within};

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_fairlane");
const START: Duration = Duration::from_secs(20);
const ALL: &str = "ingest,work,http,schedule";
/// How a process ends if Redis is unavailable at its start, and how often it is started then.
const UNAVAILABLE: i32 = 69;
const STARTS: u32 = 4;
/// How long such a start waits until the process is ready.
const READY_SOON: Duration = Duration::from_secs(2);

/// Killed when it is dropped.
#[derive(Debug)]
pub(crate) struct Served {
    child: Child,
    directory: TempDir,
}

impl Served {
    /// Starts a process with all roles and waits until it runs. `config` is TOML.
    pub(crate) async fn start(config: &str) -> Self {
        Self::start_as(config, ALL).await
    }

    pub(crate) async fn start_as(config: &str, roles: &str) -> Self {
        Self::spawn(config, roles).running().await
    }

    /// Starts a process as its service manager does: again if it ends because Redis does not answer in
    /// time, which happens on a busy machine.
    pub(crate) async fn start_managed(config: &str) -> Self {
        let mut served = Self::spawn(config, ALL);
        for _ in 0..STARTS {
            eventually(2 * START, "fairlane runs, or ends", async || {
                !served.is_running() || served.log().contains("fairlane is running")
            })
            .await;
            let ended = served.child.try_wait().unwrap();
            if ended.and_then(|ended| ended.code()) != Some(UNAVAILABLE) {
                break;
            }
            println!("Redis was unavailable at a start:\n{}", served.log());
            served = Self::spawn(config, ALL);
        }
        let served = served.runs().await;
        let metrics = served.metrics();
        // Further faults may keep it from becoming ready.
        let _ = tokio::time::timeout(READY_SOON, until_ready(&metrics)).await;
        served
    }

    async fn running(self) -> Self {
        let served = self.runs().await;
        until_ready(&served.metrics()).await;
        served
    }

    async fn runs(mut self) -> Self {
        eventually(START, "fairlane runs", async || {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "fairlane ended before it was running:\n{}", self.log());
            self.log().contains("fairlane is running")
        })
        .await;
        self
    }

    /// Starts a process with all roles and further environment variables.
    pub(crate) async fn start_in(config: &str, environment: &[(&str, &str)]) -> Self {
        Self::spawn_in(PROGRAM, config, ALL, environment).running().await
    }

    pub(crate) fn spawn(config: &str, roles: &str) -> Self {
        Self::spawn_of(PROGRAM, config, roles)
    }

    /// Starts another build, to compare it with this one.
    pub(crate) async fn start_of(program: &str, config: &str) -> Self {
        Self::spawn_of(program, config, ALL).running().await
    }

    fn spawn_of(program: &str, config: &str, roles: &str) -> Self {
        Self::spawn_in(program, config, roles, &[])
    }

    pub(crate) fn spawn_in(
        program: &str,
        config: &str,
        roles: &str,
        environment: &[(&str, &str)],
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("fairlane.toml");
        fs::write(&file, config).unwrap();
        let log = File::create(directory.path().join("log")).unwrap();
        let child = Command::new(program)
            .args(["serve", "--log-format", "json", "--roles", roles, "--config"])
            .arg(file)
            .current_dir(directory.path())
            .env("RUST_LOG", "info")
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        Self { child, directory }
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    /// The address in the last log line about an operator.
    pub(crate) fn operator(&self) -> String {
        let log = self.log();
        let line = log
            .lines()
            .rfind(|line| line.contains("an operator acted"))
            .expect("no operator acted");
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        line["fields"]["address"].as_str().unwrap_or_else(|| panic!("{line}")).to_owned()
    }

    /// The address of `http` or `metrics` in the log line of the start.
    fn address(&self, name: &str) -> String {
        let log = self.log();
        let line = log.lines().find(|line| line.contains("fairlane is running")).unwrap();
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let said = line["fields"][name].as_str().unwrap_or_else(|| panic!("no {name} in {line}"));
        said.trim_start_matches("Some(").trim_end_matches(')').to_owned()
    }

    pub(crate) fn http(&self) -> String {
        self.address("http")
    }

    pub(crate) fn metrics(&self) -> String {
        self.address("metrics")
    }

    /// Its working directory, with its configuration.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Writes a file into its directory, which has its configuration as `fairlane.toml`.
    /// At no time it is incomplete.
    pub(crate) fn write(&self, name: &str, text: &str) {
        let new = self.directory.path().join("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, self.directory.path().join(name)).unwrap();
    }

    /// Writes another configuration and sends SIGHUP.
    pub(crate) fn reload(&self, config: &str) {
        self.write("fairlane.toml", config);
        signal(self.child.id(), "HUP");
    }

    /// A value that the kernel reports about the process.
    pub(crate) fn status_of_kernel(&self, name: &str) -> Option<String> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let mut fields = status.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(known, _)| *known == name).map(|(_, value)| value.trim().to_owned())
    }

    /// The id of the process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn sigterm(&self) {
        signal(self.child.id(), "TERM");
    }

    pub(crate) fn sigstop(&self) {
        signal(self.child.id(), "STOP");
    }

    pub(crate) fn sigcont(&self) {
        signal(self.child.id(), "CONT");
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub(crate) fn kill9(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Returns `None` if it still runs after the timeout.
    pub(crate) fn wait_exit(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let mut status = None;
        holds_within(timeout, || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Both calls fail harmlessly if the process ended and was waited for before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
