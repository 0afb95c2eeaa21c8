//! What a [`WorkerProcess`](crate::support::process::WorkerProcess) can be.

pub(crate) mod worker;

use std::io::Write;

use tokio::signal::unix::{SignalKind, signal};

use crate::support::process::variable;

/// The role of this name. It runs on the main thread of a test, without a runtime.
pub(crate) fn role(name: &str) -> Option<fn()> {
    match name {
        "echo" => Some(echo),
        "worker" => Some(worker::run),
        _ => None,
    }
}

/// Prints a text, then waits for SIGTERM.
fn echo() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).unwrap();
        say(&variable("FAIRLANE_TEST_TEXT").unwrap_or_default());
        terminate.recv().await;
        say("stopped");
    });
}

/// A line on standard output, at once.
fn say(text: &str) {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{text}").unwrap();
    output.flush().unwrap();
}
