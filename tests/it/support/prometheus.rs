//! A real Prometheus for one test that scrapes one process. `.ci/setup test` installs it.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use url::form_urlencoded::byte_serialize;

use super::http::Client;
use super::redis::free_port;
use super::wait::eventually;

const START: Duration = Duration::from_secs(60);
const MISSING: &str = "run `bash .ci/setup test`, or `make test`, which does";

/// Runs until it is dropped, and then leaves neither process nor file behind.
#[derive(Debug)]
pub(crate) struct Prometheus {
    child: Child,
    client: Client,
    directory: TempDir,
}

impl Prometheus {
    /// Starts it with this configuration and these rules, and waits until it answers.
    pub(crate) async fn start(config: &str, rules: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("prometheus.yml"), config).unwrap();
        fs::write(directory.path().join("alerts.yml"), rules).unwrap();
        let address = format!("127.0.0.1:{}", free_port());
        let log = File::create(directory.path().join("log")).unwrap();
        let child = Command::new("prometheus")
            .current_dir(directory.path())
            .args(["--config.file=prometheus.yml", "--storage.tsdb.path=data"])
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("prometheus: {error}; {MISSING}"));
        let mut started = Self { child, client: Client::new(&address), directory };
        eventually(START, "Prometheus is ready", async || {
            let ended = started.child.try_wait().unwrap();
            assert!(ended.is_none(), "Prometheus ended:\n{}", started.log());
            started.client.get("/-/ready").await.code == 200
        })
        .await;
        started
    }

    /// The current series of an expression, each with its value, or the error.
    pub(crate) async fn query(&self, expression: &str) -> Result<Vec<(Value, f64)>, String> {
        let query: String = byte_serialize(expression.as_bytes()).collect();
        let answer = self.api(&format!("query?query={query}")).await;
        if answer["status"] != "success" {
            return Err(answer["error"].to_string());
        }
        let series = answer["data"]["result"].as_array().expect("a vector").iter();
        let value = |one: &Value| one["value"][1].as_str().expect("a number").parse().unwrap();
        Ok(series.map(|one| (one["metric"].clone(), value(one))).collect())
    }

    /// Every alert that Prometheus evaluates.
    pub(crate) async fn alerts(&self) -> Vec<Value> {
        let answer = self.api("rules?type=alert").await;
        let groups = answer["data"]["groups"].as_array().expect("groups").clone();
        let rules = |group: &Value| group["rules"].as_array().expect("rules").clone();
        groups.iter().flat_map(rules).collect()
    }

    /// The request uses HTTP/1.0, because longer answers to newer clients are chunked.
    async fn api(&self, path: &str) -> Value {
        let head = format!("GET /api/v1/{path} HTTP/1.0\r\n\r\n");
        let answer = self.client.raw(head.as_bytes()).await;
        let end = answer.windows(4).position(|window| window == b"\r\n\r\n");
        let body = end.map_or(&[][..], |end| &answer[end + 4..]);
        serde_json::from_slice(body).unwrap_or_else(|error| {
            panic!("{error}: {path}: {}\n{}", String::from_utf8_lossy(&answer), self.log())
        })
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // Both calls fail harmlessly if the process ended and was waited for before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `promtool` in a directory.
///
/// # Panics
/// With the output of `promtool`, if it fails.
pub(crate) fn promtool(directory: &Path, arguments: &[&str]) {
    let mut promtool = Command::new("promtool");
    // It allocates much and keeps little: with more room it needs a quarter less of the processor.
    promtool.current_dir(directory).env("GOGC", "800").args(arguments);
    let output = promtool.output();
    let output = output.unwrap_or_else(|error| panic!("promtool: {error}; {MISSING}"));
    assert!(
        output.status.success(),
        "promtool {}:\n{}{}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}
