//! Additional processes, to be killed and frozen. Each runs this test binary in another role.

use std::fs::{self, File};
use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use super::wait::holds_within;
pub(crate) use fairlane_testkit::process::signal;

const ROLE: &str = "FAIRLANE_TEST_ROLE";

/// A process that plays a role of [`roles`](super::roles). It is killed when it is dropped, and
/// ends on its own when its test is killed.
#[derive(Debug)]
pub(crate) struct WorkerProcess {
    child: Child,
    directory: TempDir,
}

impl WorkerProcess {
    pub(crate) fn spawn(role: &str, env: &[(&str, String)]) -> Self {
        Self::spawn_with(role, env, |_| Stdio::inherit())
    }

    /// The same. Its lines include those on standard error.
    pub(crate) fn spawn_heard(role: &str, env: &[(&str, String)]) -> Self {
        Self::spawn_with(role, env, |output| output.try_clone().unwrap().into())
    }

    fn spawn_with(role: &str, env: &[(&str, String)], errors: fn(&File) -> Stdio) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let output = File::create(directory.path().join("stdout")).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "support::process::entry", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .envs(env.iter().map(|(name, value)| (name, value)))
            // It must not find the fairlane.toml of a developer.
            .current_dir(directory.path())
            // The test never writes to this pipe. Its end tells the worker that the test is gone.
            .stdin(Stdio::piped())
            .stderr(errors(&output))
            .stdout(output)
            .spawn()
            .unwrap();
        Self { child, directory }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// The complete lines printed so far, including a few of the test harness.
    pub(crate) fn lines(&self) -> Vec<String> {
        let output = fs::read(self.directory.path().join("stdout")).unwrap();
        let complete = output.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        String::from_utf8_lossy(&output[..complete]).lines().map(str::to_owned).collect()
    }

    /// Whether it lost a lease before its slice was completed. On a slow machine that is no fault.
    pub(crate) fn lost_a_lease(&self) -> bool {
        self.lines().iter().any(|line| line.contains("the lease was lost before"))
    }

    pub(crate) fn kill9(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn sigstop(&self) {
        signal(self.id(), "STOP");
    }

    pub(crate) fn sigcont(&self) {
        signal(self.id(), "CONT");
    }

    pub(crate) fn sigterm(&self) {
        signal(self.id(), "TERM");
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

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        // Both calls fail harmlessly if the process ended and was waited for before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A variable that a test gave to a worker process, or a person to the tests.
#[expect(clippy::disallowed_methods, reason = "the way in which a test speaks to its workers")]
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The number in a variable that a person gave to the tests, or else this one.
pub(crate) fn number(name: &str, otherwise: u32) -> u32 {
    let parse = |text: String| {
        text.parse().unwrap_or_else(|_| panic!("{name} is {text:?} instead of a number"))
    };
    variable(name).map_or(otherwise, parse)
}

/// The start of a worker process. In the test run itself, it does nothing.
#[test]
fn entry() {
    let Some(name) = variable(ROLE) else { return };
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(1);
    });
    let role = super::roles::role(&name).unwrap_or_else(|| panic!("no role {name:?}"));
    // The harness has already started a line.
    println!();
    role();
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;
    use crate::support::wait::eventually;

    const LONG: Duration = Duration::from_secs(20);

    async fn echo(text: &str) -> WorkerProcess {
        let worker = WorkerProcess::spawn("echo", &[("FAIRLANE_TEST_TEXT", text.to_owned())]);
        eventually(LONG, "the worker speaks", async || worker.lines().iter().any(|l| l == text))
            .await;
        worker
    }

    #[tokio::test]
    async fn a_worker_plays_its_role_until_it_is_asked_to_stop() {
        let mut worker = echo("hello there").await;
        worker.sigterm();
        assert!(worker.wait_exit(LONG).unwrap().success());
        assert!(worker.lines().iter().any(|line| line == "stopped"));
    }

    #[tokio::test]
    async fn a_killed_worker_says_nothing_more() {
        let mut worker = echo("x").await;
        worker.kill9();
        assert_eq!(worker.wait_exit(Duration::ZERO).unwrap().signal(), Some(9));
        assert!(!worker.lines().iter().any(|line| line == "stopped"));
    }

    #[tokio::test]
    async fn a_frozen_worker_hears_the_signal_when_it_thaws() {
        let mut worker = echo("x").await;
        worker.sigstop();
        let state = || fs::read_to_string(format!("/proc/{}/stat", worker.id())).unwrap();
        eventually(LONG, "it is frozen", async || state().contains(") T ")).await;
        worker.sigterm();
        assert!(!worker.lines().iter().any(|line| line == "stopped"));
        worker.sigcont();
        assert!(worker.wait_exit(LONG).unwrap().success());
    }

    #[tokio::test]
    async fn a_worker_ends_with_the_test_that_started_it() {
        let mut worker = echo("x").await;
        drop(worker.child.stdin.take());
        assert_eq!(worker.wait_exit(LONG).unwrap().code(), Some(1));
    }
}
