//! `fairlane check`: probes everything that Fairlane needs, and explains each result.
//!
//! Every probe runs, even if others fail. Independent probes run concurrently, and each has a
//! timeout of seconds, except the audit. Only the audit changes data. The other probes remove the
//! keys and documents that they write to test rights.

mod audit;
mod bus;
mod configuration;
mod formats;
mod machine;
mod mongo;
mod redis;
mod sources;
mod target;

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::error::CliError;
use super::exit::Exit;
use super::output::{Output, Table, Tone, count, duration, plain};
use crate::clock::millis;
use crate::config::{Config, ConfigError};

/// Timeout of one answer to a probe.
const ANSWER: Duration = Duration::from_secs(5);
/// Maximum difference between two clocks without a warning.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(1);
/// Update interval of the progress line.
const TICK: Duration = Duration::from_millis(100);

const EXAMPLES: &str = "\
Examples:
  fairlane check
  fairlane check --config /etc/fairlane/fairlane.toml
  fairlane check --audit
  fairlane check --json | jq '.[] | select(.state != \"ok\")'

Exit codes: 0 no check failed, 1 a check failed, 64 the configuration is wrong, 69 a needed
service is unavailable. Warnings do not change the exit code.";

/// Arguments of `fairlane check`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct CheckArgs {
    /// Print a JSON list instead of a table.
    #[arg(long)]
    json: bool,
    /// Also check every notification, and reschedule those that are in no schedule or queue; compare the
    /// depth of every shard with its queues, and what bots hold with what they store, and correct both.
    #[arg(long)]
    audit: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    Warn,
    Fail,
}

/// The result of one check.
#[derive(Debug, Serialize)]
struct Finding {
    state: State,
    /// The subject of the check.
    check: String,
    /// What the check found.
    found: String,
    /// Why the finding matters. Set for every warning and failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    /// The remedy. Set for every warning and failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
    /// The exit code of a failure.
    #[serde(skip)]
    exit: Exit,
}

impl Finding {
    fn ok(check: impl Into<String>, found: impl Into<String>) -> Self {
        let (check, found) = (check.into(), found.into());
        Self { state: State::Ok, check, found, why: None, remedy: None, exit: Exit::Failed }
    }

    fn warn(
        check: impl Into<String>,
        found: impl Into<String>,
        why: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (why, remedy) = (Some(why.into()), Some(remedy.into()));
        Self { state: State::Warn, why, remedy, ..Self::ok(check, found) }
    }

    fn fail(
        check: impl Into<String>,
        found: impl Into<String>,
        why: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { state: State::Fail, ..Self::warn(check, found, why, remedy) }
    }

    fn exits(self, exit: Exit) -> Self {
        Self { exit, ..self }
    }
}

/// Runs all checks, even after a failure.
pub(super) async fn check(
    config: Result<Config, ConfigError>,
    args: &CheckArgs,
) -> Result<(), CliError> {
    let findings = match config {
        Ok(config) => Box::pin(examine(&config, args.audit)).await,
        Err(error) => vec![configuration::refused(&error)],
    };
    let output = Output::new(args.json);
    output.show(&findings, |findings| text(output, findings))?;
    let failed = findings.iter().filter(|finding| finding.state == State::Fail);
    match failed.clone().map(|finding| finding.exit).max() {
        Some(exit) => Err(CliError::Findings { failed: failed.count(), exit }),
        None => Ok(()),
    }
}

async fn examine(config: &Config, audits: bool) -> Vec<Finding> {
    let progress = Progress::begin();
    let (redis, mongo, sources, targets, machine) = tokio::join!(
        progress.step("Redis", redis::check(config)),
        progress.step("MongoDB", mongo::check(config)),
        progress.step("buses", sources::check(config)),
        progress.step("push targets", target::check(config)),
        progress.step("this machine", machine::check(config)),
    );
    let audit = if audits {
        Box::pin(progress.step("every notification and queue", audit::check(config))).await
    } else {
        Vec::new()
    };
    progress.0.finish_and_clear();
    let found = [configuration::check(config), redis, mongo, sources, targets, machine, audit];
    found.into_iter().flatten().collect()
}

/// Shows the pending checks, on a terminal only.
struct Progress(ProgressBar, RefCell<Vec<&'static str>>);

impl Progress {
    fn begin() -> Self {
        let bar = ProgressBar::new_spinner();
        let style = ProgressStyle::with_template("{spinner} checking {msg}  {elapsed}");
        bar.set_style(style.expect("a constant, and well-formed"));
        bar.enable_steady_tick(TICK);
        Self(bar, RefCell::default())
    }

    async fn step<T>(&self, what: &'static str, probe: impl Future<Output = T>) -> T {
        self.1.borrow_mut().push(what);
        self.show();
        let found = probe.await;
        self.1.borrow_mut().retain(|open| *open != what);
        self.show();
        found
    }

    fn show(&self) {
        self.0.set_message(self.1.borrow().join(", "));
    }
}

fn text(output: Output, findings: &[Finding]) -> String {
    let mut table = Table::new(&["STATE", "CHECK", "FOUND"]);
    for Finding { state, check, found, .. } in findings {
        let (tone, word) = look(*state);
        table.toned_row(tone, &[word.to_owned(), check.clone(), found.clone()]);
    }
    let mut text = output.table(&table);
    text.push('\n');
    for Finding { state, check, found, why, remedy, .. } in findings {
        let (Some(why), Some(remedy)) = (why, remedy) else { continue };
        let (tone, word) = look(*state);
        text.extend(["\n", &output.paint(tone, word), "  "]);
        text.push_str(&output.paint(Tone::Strong, &plain(check)));
        text.extend([": ", &plain(found), "\n      ", &plain(why), "; ", &plain(remedy)]);
    }
    let number = |state| findings.iter().filter(|found| found.state == state).count() as u64;
    let (warnings, failures) = (number(State::Warn), number(State::Fail));
    if warnings + failures > 0 {
        text.push_str("\n\n");
    } else {
        text.push('\n');
    }
    let summary = format!(
        "{}: {} ok, {}, {}",
        count(findings.len() as u64, "check"),
        number(State::Ok),
        count(warnings, "warning"),
        count(failures, "failure"),
    );
    text.push_str(&summary);
    text
}

fn look(state: State) -> (Tone, &'static str) {
    match state {
        State::Ok => (Tone::Good, "ok"),
        State::Warn => (Tone::Warning, "warn"),
        State::Fail => (Tone::Bad, "fail"),
    }
}

/// Judges a clock that differs from the local one by `difference`.
fn clock(check: impl Into<String>, difference: Duration, whose: impl fmt::Display) -> Finding {
    let found = format!("differs from ours by {}", duration(millis(difference)));
    if difference <= CLOCK_TOLERANCE {
        return Finding::ok(check, found);
    }
    Finding::warn(
        check,
        found,
        "ages, delays and expiry are off by that much",
        format!("synchronise this machine and that of {whose} (NTP)"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_that_is_not_fine_is_explained() {
        let findings = [
            Finding::ok("version", "7.0.15"),
            Finding::warn("durability", "off", "a restart loses events", "turn it on"),
            Finding::fail("role", "slave", "nothing can be written", "use the primary"),
        ];
        let shown = text(Output::new(false), &findings);
        let expected = "\
STATE  CHECK       FOUND
ok     version     7.0.15
warn   durability  off
fail   role        slave

warn  durability: off
      a restart loses events; turn it on
fail  role: slave
      nothing can be written; use the primary

3 checks: 1 ok, 1 warning, 1 failure";
        assert_eq!(shown, expected);
    }

    #[test]
    fn json_names_state_check_and_found_and_explains_each_problem() {
        let findings = [Finding::ok("a", "b"), Finding::fail("c", "d", "e", "f")];
        let json = serde_json::to_string(&findings).unwrap();
        let expected = r#"[{"state":"ok","check":"a","found":"b"},{"state":"fail","check":"c","found":"d","why":"e","remedy":"f"}]"#;
        assert_eq!(json, expected);
    }

    #[test]
    fn a_clock_may_be_a_second_off() {
        let at = |ms| clock("clock", Duration::from_millis(ms), "Redis").state;
        assert_eq!((at(1_000), at(1_001)), (State::Ok, State::Warn));
    }
}
