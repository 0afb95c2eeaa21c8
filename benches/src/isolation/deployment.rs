//! One process of the service, with its own Redis, tokens of a quiet and a hostile tenant, and a
//! receiver.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fairlane::sandbox::Rig;
use fairlane_testkit::redis::free_address;
use serde_json::Value;
use tokio::time::Instant;

use super::client::{Client, request};
use super::receiver::Receiver;
use super::resource::Resource;
use crate::error::BenchError;
use crate::mongo::Database;
use crate::probe;

/// How long a process may take to start, and a preparation to take effect.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// The pipeline of the events of all bots.
pub(super) const EVENTS: &str = "push";
/// The pipeline whose receiver fails for the hostile bot.
pub(super) const FAILING: &str = "failing";
/// The tenants: a token for the quiet bots, one for the hostile ones, and one of the operator.
pub(super) const QUIET: &str = "quiet-bench-token-0001";
pub(super) const HOSTILE: &str = "hostile-bench-token-01";
pub(super) const OPERATOR: &str = "operator-bench-token-1";
/// The memory of Redis where it is the resource, MB.
const REDIS_MB: u64 = 64;
const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// Killed when dropped.
pub(super) struct Deployment<'a> {
    pub(super) rig: &'a Rig,
    pub(super) http: SocketAddr,
    pub(super) receiver: Receiver,
    child: Child,
    log: PathBuf,
}

impl<'a> Deployment<'a> {
    /// Starts the process and waits until it is ready.
    pub(super) async fn start(
        rig: &'a Rig,
        database: Option<&Database>,
        resource: Resource,
        name_server: SocketAddr,
    ) -> Result<Self, BenchError> {
        let receiver = Receiver::start().await?;
        let (http, metrics) = (free_address(), free_address());
        let text = config(
            rig,
            database,
            resource,
            &Addresses { http, metrics, receiver: receiver.address, name_server },
        )?;
        let path = rig.directory().join("fairlane.toml");
        fs::write(&path, text)?;
        if resource == Resource::RedisMemory {
            let mut set = redis::cmd("CONFIG");
            set.arg("SET").arg("maxmemory").arg(format!("{REDIS_MB}mb"));
            rig.command("CONFIG", set).await?;
        }
        let log = rig.directory().join("serve.log");
        let child = Command::new(std::env::current_exe()?)
            .args(["serve", "--log-format", "json", "--", "--config"])
            .arg(&path)
            .current_dir(rig.directory())
            .env("RUST_LOG", "info")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            .spawn()?;
        let deployment = Self { rig, http, receiver, child, log };
        deployment.ready(database.is_some()).await?;
        Ok(deployment)
    }

    async fn ready(&self, needs_mongo: bool) -> Result<(), BenchError> {
        let (client, asked) = (Client::new(self.http), request("GET", "/readyz", self.http, None));
        let is_ready = async || match client.ask(&asked).await {
            Ok((200, answer)) => {
                !needs_mongo || String::from_utf8_lossy(&answer).contains("\"mongodb\":\"up\"")
            }
            _ => false,
        };
        if until(is_ready).await {
            return Ok(());
        }
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let tail = log.lines().rev().take(3).collect::<Vec<_>>().join("\n");
        Err(BenchError::stuck(PATIENCE, format!("the service does not become ready:\n{tail}")))
    }

    /// What the process answers the operator.
    pub(super) async fn shown(&self, path: &str) -> Option<Value> {
        let asked = request("GET", path, self.http, Some(OPERATOR));
        let (_, answer) = Client::new(self.http).ask(&asked).await.ok()?;
        let body = answer.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
        serde_json::from_slice(&answer[body..]).ok()
    }

    /// The memory in use since the last call of [`Self::forget_memory`], at most, MB.
    pub(super) fn memory_mb(&self) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib / 1_024)
    }

    /// Starts the measurement of the memory again.
    pub(super) fn forget_memory(&self) {
        // If it is not permitted, the largest memory since the start is shown.
        let _ = fs::write(format!("/proc/{}/clear_refs", self.child.id()), "5");
    }

    /// Lines of the log so far.
    pub(super) fn log_lines(&self) -> usize {
        let log = fs::read(&self.log).unwrap_or_default();
        log.split(|byte| *byte == b'\n').count() - 1
    }

    /// Memory that Redis uses for data, bytes.
    pub(super) async fn redis_bytes(&self) -> Result<u64, BenchError> {
        let info = probe::info(self.rig, "memory").await?;
        let used = info.lines().find_map(|line| line.strip_prefix("used_memory:"));
        Ok(used.and_then(|used| used.trim().parse().ok()).unwrap_or(0))
    }
}

impl Drop for Deployment<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for a condition. `false`: in vain.
pub(crate) async fn until(is_so: impl AsyncFn() -> bool) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        if is_so().await {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    false
}

struct Addresses {
    http: SocketAddr,
    metrics: SocketAddr,
    receiver: SocketAddr,
    name_server: SocketAddr,
}

/// The configuration: defaults, but for the addresses and two pipelines.
fn config(
    rig: &Rig,
    database: Option<&Database>,
    resource: Resource,
    at: &Addresses,
) -> Result<String, BenchError> {
    let Addresses { http, metrics, receiver, name_server } = at;
    let mut text = format!(
        "[redis]\nurl = {url:?}\n[http]\nlisten = \"{http}\"\n[metrics]\nlisten = \"{metrics}\"\n\
         [callbacks]\nallow_nets = [\"127.0.0.0/8\"]\nsecrets = [{SECRET:?}]\n",
        url = rig.url().expose(),
    );
    if resource == Resource::Dns {
        let _ = writeln!(text, "name_servers = [\"{name_server}\"]");
    }
    if let Some(database) = database {
        let (url, name) = (database.url.expose(), &database.name);
        let _ = writeln!(text, "[mongodb]\nurl = {url:?}\ndatabase = {name:?}");
    }
    // Where dead letters are the resource, few fill it.
    let dead_max = if resource == Resource::DeadLetters { 320 } else { 1_600 };
    for (name, kinds, path) in [(EVENTS, "bench.*", "push"), (FAILING, "failing.*", "failing")] {
        let _ = writeln!(
            text,
            "[pipelines.{name}]\nhandler = \"push\"\nevents = [{kinds:?}]\n\
             url = \"http://{receiver}/{path}\"\nstart = \"earliest\"\nmax_attempts = 1\n\
             dead = {{ max = {dead_max} }}\n\
             backoff = {{ initial = \"10ms\", max = \"1s\", jitter = 0.2 }}",
        );
    }
    for (name, token, scopes, bots) in [
        ("quiet", QUIET, "\"publish\", \"read\", \"operate\"", "quiet-*"),
        ("hostile", HOSTILE, "\"publish\", \"read\", \"operate\"", "hostile*"),
        ("operator", OPERATOR, "\"read\", \"operate\"", "*"),
    ] {
        let file = rig.directory().join(format!("{name}.token"));
        fs::write(&file, token)?;
        let _ = writeln!(
            text,
            "[[auth.tokens]]\nname = {name:?}\ntoken_file = {file:?}\nscopes = [{scopes}]\n\
             bots = [{bots:?}]",
            file = file.display().to_string(),
        );
    }
    Ok(text)
}
