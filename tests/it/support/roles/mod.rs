//! The roles of a [`WorkerProcess`](crate::support::process::WorkerProcess).

#[path = "../../../../examples/custom_handler.rs"]
mod custom_handler;
pub(crate) mod own;
mod panicking;
pub(crate) mod worker;

use std::io::Write;
use std::time::Duration;

use fairlane::app::{App, AppError};
use fairlane::config::Config;
use fairlane::outbound::{CheckedUrl, HeaderMap, Method, Outbound, Policy, Request, Settings};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

use crate::support::process::variable;

/// The role of this name. It runs on the main thread of a test, without a runtime.
pub(crate) fn role(name: &str) -> Option<fn()> {
    match name {
        "caller" => Some(caller),
        "custom_handler" => Some(custom_handler::main),
        "echo" => Some(echo),
        "measured" => Some(measured),
        "own" => Some(own::run),
        "panicking" => Some(panicking::run),
        "worker" => Some(worker::run),
        _ => None,
    }
}

/// Calls a URL as the operator's own and prints the status.
fn caller() {
    let url = variable("FAIRLANE_TEST_URL").unwrap();
    let url = CheckedUrl::parse(&url, &Policy::Operator).unwrap();
    let outbound = Outbound::new(&Settings::default()).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let answer = runtime.block_on(outbound.call(Request {
        bot: &fairlane::id::BotId::parse("bot").unwrap(),
        method: Method::GET,
        url: &url,
        headers: HeaderMap::new(),
        body: Vec::new(),
        deadline,
        place_by: deadline,
        keep_connection: true,
        tell_deadline: false,
    }));
    say(&format!("answered {}", answer.unwrap().status.as_u16()));
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

/// Installs a recorder of metrics, and prints why Fairlane then cannot start.
fn measured() {
    metrics::set_global_recorder(metrics::NoopRecorder).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let error = runtime.block_on(App::builder(Config::default()).build()).unwrap_err();
    assert!(matches!(error, AppError::Recorder(_)), "{error:?}");
    say(&format!("error: {error}"));
}

/// Prints a line on standard output immediately.
fn say(text: &str) {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{text}").unwrap();
    output.flush().unwrap();
}
