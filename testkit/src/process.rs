//! Signals to processes, and where the programs of the tests are.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use super::wait::holds_within;

/// Sends a signal to a child that was not waited for yet, so the id still belongs to it.
pub fn signal(id: u32, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &id.to_string()]).status();
    assert!(status.unwrap().success(), "kill -{name} {id}");
    if name == "STOP" {
        // A process that has ended counts as stopped. One of its threads must take the signal before all of them stop, and on a busy machine
        // that thread waits for its turn.
        let state = ["-o", "stat=", "-p", &id.to_string()].map(str::to_owned);
        let stopped = || {
            let output = Command::new("ps").args(&state).output().unwrap().stdout;
            output.trim_ascii_start().first().is_none_or(|state| b"TtZ".contains(state))
        };
        assert!(
            holds_within(Duration::from_secs(10), stopped),
            "process {id} still runs after SIGSTOP"
        );
    }
}

/// A program that `.ci/setup test` installed, by its path in the target directory. The running program
/// is in this directory too.
///
/// # Panics
/// If it is not installed.
#[must_use]
pub fn installed(path: &str) -> PathBuf {
    let own = std::env::current_exe().expect("the path of this program");
    let found = own.ancestors().map(|above| above.join(path)).find(|program| program.exists());
    let remedy = "run `bash .ci/setup test`, or `make test`, which does";
    found.unwrap_or_else(|| panic!("{path} is missing in the target directory: {remedy}"))
}
