//! The processes of the service, of which one is killed and replaced.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use fairlane::sandbox::Rig;
use fairlane_testkit::redis::free_address;
use serde_json::Value;

use super::Options;
use crate::error::BenchError;
use crate::isolation::{Client, PATIENCE, request, until};

struct Process {
    number: usize,
    http: SocketAddr,
    child: Child,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Killed when dropped.
pub(super) struct Fleet<'a> {
    rig: &'a Rig,
    options: Options,
    receiver: SocketAddr,
    processes: Vec<Process>,
    started: usize,
}

impl<'a> Fleet<'a> {
    /// Starts the processes and waits until they are ready.
    pub(super) async fn start(
        rig: &'a Rig,
        options: Options,
        receiver: SocketAddr,
        count: usize,
    ) -> Result<Self, BenchError> {
        let mut fleet = Self { rig, options, receiver, processes: Vec::new(), started: 0 };
        for _ in 0..count {
            let process = fleet.spawn()?;
            fleet.processes.push(process);
        }
        for process in &fleet.processes {
            let (client, asked) =
                (Client::new(process.http), request("GET", "/readyz", process.http, None));
            if !until(async || matches!(client.ask(&asked).await, Ok((200, _)))).await {
                return Err(BenchError::stuck(PATIENCE, fleet.complaint(process)));
            }
        }
        Ok(fleet)
    }

    fn complaint(&self, process: &Process) -> String {
        let log = self.rig.directory().join(format!("limits-{}.log", process.number));
        let log = fs::read_to_string(log).unwrap_or_default();
        let tail = log.lines().rev().take(3).collect::<Vec<_>>().join("\n");
        format!("a process does not become ready:\n{tail}")
    }

    fn spawn(&mut self) -> Result<Process, BenchError> {
        let (number, http, metrics) = (self.started, free_address(), free_address());
        self.started += 1;
        let path = self.rig.directory().join(format!("limits-{number}.toml"));
        fs::write(&path, self.config(http, metrics))?;
        let log = self.rig.directory().join(format!("limits-{number}.log"));
        let child = Command::new(std::env::current_exe()?)
            .args(["serve", "--log-format", "json", "--", "--config"])
            .arg(&path)
            .current_dir(self.rig.directory())
            .env("RUST_LOG", "warn")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            .spawn()?;
        Ok(Process { number, http, child })
    }

    /// Kills one process so that it can end nothing.
    pub(super) fn kill(&mut self) {
        // Its drop waits for its end.
        drop(self.processes.pop());
    }

    /// Starts another process.
    pub(super) fn replace(&mut self) -> Result<(), BenchError> {
        let process = self.spawn()?;
        self.processes.push(process);
        Ok(())
    }

    /// The configuration: defaults, but for the addresses and three pipelines.
    fn config(&self, http: SocketAddr, metrics: SocketAddr) -> String {
        let (Options { rate, .. }, receiver) = (self.options, self.receiver);
        let mut text = format!(
            "[redis]\nurl = {url:?}\n[http]\nlisten = \"{http}\"\n[metrics]\nlisten = \"{metrics}\"\n",
            url = self.rig.url().expose(),
        );
        let rates = [
            ("limited", format!("rate = \"{rate}/s\"\nburst = {rate}\n")),
            ("parked", "rate = \"1/m\"\nburst = 1\n".to_owned()),
            ("quiet", String::new()),
        ];
        for (name, limits) in rates {
            text.extend([
                &format!("[pipelines.{name}]\nhandler = \"push\"\nevents = [\"{name}.*\"]\n"),
                &*format!("url = \"http://{receiver}/{name}\"\nstart = \"earliest\"\n"),
                &*limits,
            ]);
        }
        text
    }

    /// Pauses or resumes a pipeline.
    pub(super) async fn set_paused(&self, pipeline: &str, paused: bool) -> Result<(), BenchError> {
        let verb = if paused { "pause" } else { "resume" };
        let http = self.processes[0].http;
        let asked = request("POST", &format!("/v1/pipelines/{pipeline}/{verb}"), http, None);
        match Client::new(http).ask(&asked).await.map_err(BenchError::Http)? {
            (204, _) => Ok(()),
            (status, _) => {
                let why = format!("the {verb} of the pipeline was answered with {status}");
                Err(BenchError::stuck(PATIENCE, why))
            }
        }
    }

    /// Waits until this many events are in the queues of the pipeline with the rate.
    pub(super) async fn queued(&self, events: u64) -> Result<(), BenchError> {
        let http = self.processes[0].http;
        let (client, asked) =
            (Client::new(http), request("GET", "/v1/pipelines/limited", http, None));
        let are_there = async || match client.ask(&asked).await {
            Ok((200, answer)) => {
                let body = answer.windows(4).position(|window| window == b"\r\n\r\n");
                let body = body.map_or(&[][..], |at| &answer[at + 4..]);
                let view: Value = serde_json::from_slice(body).unwrap_or_default();
                view["depth"].as_u64().is_some_and(|depth| depth >= events)
            }
            _ => false,
        };
        if until(are_there).await {
            return Ok(());
        }
        Err(BenchError::stuck(PATIENCE, format!("{events} events do not reach the queues")))
    }
}
