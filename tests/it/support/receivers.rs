//! The receivers of `examples/`, as a user runs them.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde::Deserialize;
use tempfile::TempDir;

use super::process::variable;
use super::redis::free_address;

/// One push, as the Python receiver logged it.
#[derive(Debug, Deserialize)]
pub(crate) struct Pushed {
    pub(crate) bot: String,
    pub(crate) fence: u64,
    /// In µs since 1970, like `ended`.
    #[serde(default)]
    pub(crate) started: u64,
    #[serde(default)]
    pub(crate) ended: u64,
    pub(crate) events: Vec<Handled>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Handled {
    pub(crate) id: String,
    #[serde(default)]
    pub(crate) outcome: String,
}

/// Killed when it is dropped.
#[derive(Debug)]
pub(crate) struct ExampleReceiver {
    child: Child,
    directory: TempDir,
    pub(crate) url: String,
}

pub(crate) fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name)
}

/// The programs that may be missing in CI too, because `.ci/setup test` does not install them.
const OPTIONAL: [&str; 4] = ["groff", "ip", "man", "systemd-analyze"];

/// Whether the program is installed on this machine. A test without it shows less.
pub(crate) fn is_there(program: &str) -> bool {
    let found = Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok();
    let in_ci = variable("CI").is_some();
    assert!(
        found || may_be_missing(program, in_ci),
        "{program} is missing, which a test needs in CI: run `bash .ci/setup test`"
    );
    found
}

fn may_be_missing(program: &str, in_ci: bool) -> bool {
    !in_ci || OPTIONAL.contains(&program)
}

#[test]
fn in_ci_only_listed_programs_may_be_missing() {
    assert!(may_be_missing("php", false) && !may_be_missing("php", true));
    assert!(may_be_missing("man", true));
}

impl ExampleReceiver {
    /// The receiver in Python, on a free port.
    pub(crate) fn python(arguments: &[&str]) -> Self {
        let mut python = Command::new("python3");
        python.arg("-B").arg(example("push_receiver.py"));
        Self::by_options(&mut python, arguments)
    }

    /// The receiver in Node.js, which has the same options as the one in Python.
    pub(crate) fn node(arguments: &[&str]) -> Self {
        let mut node = Command::new("node");
        node.arg(example("push_receiver.mjs"));
        Self::by_options(&mut node, arguments)
    }

    fn by_options(command: &mut Command, arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut child = command
            .args(["--port", "0", "--log"])
            .arg(directory.path().join("log"))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = lines.next().unwrap().unwrap();
        let url = first.strip_prefix("listening on ").unwrap().to_owned();
        // A full pipe would block the receiver. The thread ends with it.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| println!("{line}")));
        Self { child, directory, url }
    }

    /// A receiver of notifications, by its interpreter, on a port that is free now.
    pub(crate) fn notified(interpreter: &str, secret: &str) -> Self {
        Self::with_clock("notified", interpreter, secret, None)
    }

    /// `notified` or `push_receiver`, by its interpreter, on a port that is free just now. Its clock
    /// stands at `now`, in seconds since 1970, if that is set.
    pub(crate) fn with_clock(
        name: &str,
        interpreter: &str,
        secret: &str,
        now: Option<u64>,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let address = free_address();
        let log = fs::File::create(directory.path().join("log")).unwrap();
        let port = address.port().to_string();
        let mut command = Command::new(interpreter);
        match interpreter {
            "php" => {
                let mut script = example(&format!("{name}.php"));
                if let Some(now) = now {
                    let text = format!(
                        "<?php $_SERVER['REQUEST_TIME'] = {now}; require '{}';",
                        script.display()
                    );
                    script = directory.path().join("clock.php");
                    fs::write(&script, text).unwrap();
                }
                command.args(["-S", &address.to_string()]).arg(script);
            }
            "node" => {
                if let Some(now) = now {
                    let clock = format!("data:text/javascript,Date.now=()=>{now}000");
                    command.args(["--import", &clock]);
                }
                command.arg(example(&format!("{name}.mjs")));
            }
            _ => {
                command.arg("-B");
                if let Some(now) = now {
                    let run = "import runpy, sys, time; now = int(sys.argv.pop(1)); \
                               time.time = lambda: now; sys.argv.pop(0); \
                               runpy.run_path(sys.argv[0], run_name='__main__')";
                    command.args(["-c", run]).arg(now.to_string());
                }
                command.arg(example(&format!("{name}.py")));
            }
        }
        match (interpreter, name) {
            ("php", _) => {}
            (_, "notified") => drop(command.arg(&port)),
            _ => drop(command.args(["--port", &port, "--secret", secret])),
        }
        let child = command
            .env("FAIRLANE_SECRET", secret)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let url = format!("http://{address}");
        let listens = || std::net::TcpStream::connect(address).is_ok();
        assert!(
            super::wait::holds_within(super::push::LONG, listens),
            "no receiver in {interpreter} listens"
        );
        Self { child, directory, url }
    }

    /// The log of the receiver.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    /// The receiver in PHP, on a port that is free now.
    pub(crate) fn php(secret: &str) -> Self {
        Self::php_with(secret, |php, address| {
            php.args(["-S", address]).arg(example("push_receiver.php"));
        })
    }

    /// The same receiver, which answers first and completes at this Fairlane later.
    pub(crate) fn php_async(secret: &str, fairlane: &str) -> Self {
        // With this option the receiver replaces the started process, if PHP can do that. Otherwise
        // it would outlive that process.
        let takes_place = Command::new("php")
            .args(["-r", "exit(function_exists('pcntl_exec') ? 0 : 1);"])
            .status()
            .is_ok_and(|status| status.success());
        Self::php_with(secret, |php, address| {
            if takes_place {
                php.arg(example("push_receiver.php"));
                php.args(["--async", fairlane, "--listen", address]);
            } else {
                php.args(["-S", address]).arg(example("push_receiver.php"));
                php.env("FAIRLANE_ASYNC", fairlane);
            }
        })
    }

    fn php_with(secret: &str, arguments: impl FnOnce(&mut Command, &str)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let address = free_address().to_string();
        let mut php = Command::new("php");
        arguments(&mut php, &address);
        let child = php
            .env("FAIRLANE_SECRET", secret)
            .env("RECEIVER_LOG", directory.path().join("log"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, directory, url: format!("http://{address}/") }
    }

    /// Every push so far.
    pub(crate) fn pushes(&self) -> Vec<Pushed> {
        self.complete().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The number of events with this outcome so far. It costs much less than [`Self::pushes`].
    pub(crate) fn count(&self, outcome: &str) -> usize {
        self.complete().matches(&format!("{outcome:?}")).count()
    }

    /// The log, without an incomplete line at the end.
    fn complete(&self) -> String {
        let mut text = fs::read_to_string(self.directory.path().join("log")).unwrap_or_default();
        text.truncate(text.rfind('\n').map_or(0, |end| end + 1));
        text
    }
}

impl Drop for ExampleReceiver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
