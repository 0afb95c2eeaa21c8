//! The servers and processes of a campaign.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fairlane_testkit::directory::Directory;
use fairlane_testkit::mongo::{self, MongoServer};
use fairlane_testkit::mongo_proxy::MongoProxy;
use fairlane_testkit::process::signal;
use fairlane_testkit::proxy::Proxy;
use fairlane_testkit::redis::{RedisBackend as _, free_port};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep};

use super::api::Api;
use super::clock::FakeClock;
use super::servers::{Servers, other};
use crate::error::BenchError;

/// Maximum time until a started process is ready, while no fault is active.
const READY: Duration = Duration::from_secs(60);
/// A process that has ended is started again within this time.
const AGAIN: Duration = Duration::from_millis(500);
/// The log level of the processes.
const LOG_LEVEL: &str = "info";

/// The Redis and the MongoDB of a campaign.
#[derive(Debug, Clone)]
pub(crate) enum Stores {
    /// A durable Redis with a replica.
    Pair,
    Cluster,
    /// As a pair, with data that stays in this directory.
    Kept(PathBuf),
}

impl Stores {
    fn directory(&self, name: &str) -> Directory {
        match self {
            Self::Kept(directory) => Directory::kept(directory.join(name)),
            Self::Pair | Self::Cluster => Directory::temporary(),
        }
    }
}

/// All servers and processes.
pub(crate) struct World {
    pub(crate) directory: PathBuf,
    pub(crate) redis: Mutex<Servers>,
    pub(crate) mongo: Mutex<MongoServer>,
    pub(crate) nodes: Vec<Node>,
    /// How often a process that had ended was started again.
    pub(crate) restarted: AtomicUsize,
}

/// A process, and its network.
pub(crate) struct Node {
    /// `None`: it reaches the nodes of a cluster through their proxies.
    pub(crate) redis: Option<Proxy>,
    pub(crate) mongo: MongoProxy,
    pub(crate) api: Api,
    pub(crate) process: Mutex<Process>,
    /// Taken by faults of its network to Redis, and to MongoDB, so that they do not overlap.
    pub(crate) redis_line: Mutex<()>,
    pub(crate) mongo_line: Mutex<()>,
    /// Its configuration without what reloads change, and the file with all of it.
    settings: String,
    config: PathBuf,
}

/// A running process. It is killed when it is dropped.
pub(crate) struct Process {
    child: Child,
    pub(crate) clock: Option<FakeClock>,
    /// Its number among all processes of the campaign, from 1.
    pub(crate) number: u32,
}

impl Process {
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kill(&mut self) {
        // Both fail harmlessly if the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Stops it as an operator does. Returns whether it ended within the time.
    pub(crate) async fn stop(&mut self, within: Duration) -> bool {
        signal(self.id(), "TERM");
        let until = Instant::now() + within;
        while Instant::now() < until {
            if self.has_ended() {
                return true;
            }
            sleep(Duration::from_millis(20)).await;
        }
        self.kill();
        false
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_some())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

impl World {
    /// Starts the servers and `processes` processes, which call `hooks`.
    pub(crate) async fn start(
        directory: &Path,
        processes: usize,
        stores: Stores,
        hooks: SocketAddr,
    ) -> Result<Self, BenchError> {
        let of_mongo = stores.directory("mongodb");
        let mongo = tokio::task::spawn_blocking(|| {
            MongoServer::start_in(of_mongo, mongo::Options::default())
        });
        let servers = match &stores {
            Stores::Cluster => Servers::cluster().await,
            Stores::Pair | Stores::Kept(_) => Servers::pair(stores.directory("redis")).await?,
        };
        let mongo = mongo.await.map_err(other)?;
        let mut nodes = Vec::with_capacity(processes);
        for place in 0..processes {
            let (redis, to_redis) = match &servers {
                Servers::Pair(pair) => {
                    let proxy = Proxy::start(pair.primary.tcp_addr()).await;
                    let to_redis = format!("redis.url = \"{}\"", proxy.url());
                    (Some(proxy), to_redis)
                }
                Servers::Cluster(cluster) => {
                    let url = cluster.servers.url();
                    (None, format!("redis.url = \"{url}\"\nredis.wait_replicas = 1"))
                }
            };
            let mongo = MongoProxy::start_before(mongo.address()).await;
            let api = Api::at(free_port());
            let config = directory.join(format!("fairlane-{place}.toml"));
            let settings = settings(&to_redis, &mongo.mongo_url(), &api, hooks);
            fs::write(&config, &settings)?;
            let number = u32::try_from(place + 1).unwrap_or(u32::MAX);
            let process = Mutex::new(spawn(directory, &config, place, number)?);
            let (redis_line, mongo_line) = (Mutex::default(), Mutex::default());
            nodes.push(Node {
                redis,
                mongo,
                api,
                process,
                redis_line,
                mongo_line,
                settings,
                config,
            });
        }
        let redis = Mutex::new(servers);
        let (directory, mongo) = (directory.to_owned(), Mutex::new(mongo));
        let world = Self { directory, redis, mongo, nodes, restarted: AtomicUsize::new(0) };
        world.ready().await?;
        // The MongoDB of the tests does not start again if it is killed while it creates indexes.
        world.mongo.lock().await.is_prepared().await;
        Ok(world)
    }

    /// Starts a process in the place of one that has ended.
    pub(crate) fn restart(&self, place: usize, process: &mut Process) -> Result<(), BenchError> {
        let number = process.number + u32::try_from(self.nodes.len()).unwrap_or(u32::MAX);
        *process = spawn(&self.directory, &self.nodes[place].config, place, number)?;
        Ok(())
    }

    /// Starts processes again that have ended, as a service manager does: a process that starts while
    /// Redis is unavailable ends with an error. Never returns.
    pub(crate) async fn supervise(&self) {
        loop {
            sleep(AGAIN).await;
            for (place, node) in self.nodes.iter().enumerate() {
                // A fault of the process has it otherwise.
                let Ok(mut process) = node.process.try_lock() else { continue };
                if process.has_ended() && self.restart(place, &mut process).is_ok() {
                    self.restarted.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }

    /// Waits until every process is ready again.
    pub(crate) async fn ready(&self) -> Result<(), BenchError> {
        for node in &self.nodes {
            node.ready(READY).await?;
        }
        Ok(())
    }
}

impl Node {
    /// Writes its configuration with another size of slices. At no time the file is incomplete.
    pub(crate) fn configure(&self, batch: u64) -> Result<(), BenchError> {
        let (new, plain) = (self.config.with_extension("new"), "[pipelines.plain]\n");
        fs::write(&new, self.settings.replace(plain, &format!("{plain}batch = {batch}\n")))?;
        Ok(fs::rename(new, &self.config)?)
    }

    async fn ready(&self, within: Duration) -> Result<(), BenchError> {
        let until = Instant::now() + within;
        while Instant::now() < until {
            if self.api.is_ready().await {
                return Ok(());
            }
            sleep(Duration::from_millis(50)).await;
        }
        let why = format!("the process at {} does not become ready", self.api.address());
        Err(BenchError::Campaign(why))
    }
}

/// The log of a process, and of those before it in its place.
pub(crate) fn log_file(directory: &Path, place: usize) -> PathBuf {
    directory.join(format!("fairlane-{place}.log"))
}

fn spawn(
    directory: &Path,
    config: &Path,
    place: usize,
    number: u32,
) -> Result<Process, BenchError> {
    let log = File::options().create(true).append(true).open(log_file(directory, place))?;
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["--log-format", "json", "faults-worker", "--config"])
        .arg(config)
        .arg("--directory")
        .arg(directory)
        .args(["--process", &number.to_string()])
        .env("RUST_LOG", LOG_LEVEL)
        .current_dir(directory)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    let clock = FakeClock::prepare(directory, number, &mut command)?;
    Ok(Process { child: command.spawn()?, clock, number })
}

/// The configuration of a process. `redis`: the settings of Redis.
fn settings(redis: &str, mongo: &str, api: &Api, hooks: SocketAddr) -> String {
    let (http, metrics) = (api.address(), free_port());
    let mut text = format!(
        r#"
shutdown_grace = "5s"
{redis}
redis.shards = {SHARDS}
mongodb.url = "{mongo}"
http.listen = "{http}"
metrics.listen = "127.0.0.1:{metrics}"
bus.retention = "30s"
bus.dedup = "10m"
counters.read_timeout = "5s"

[callbacks]
secrets = ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"]
allow_nets = ["127.0.0.1"]
"#
    );
    for (pipeline, more) in [
        ("plain", "handler = \"plain\"".to_owned()),
        ("keyed", "handler = \"keyed\"\norder_by = \"subject\"\nconcurrency = 4".to_owned()),
        ("limited", format!("handler = \"limited\"\nrate = \"{LIMIT}/s\"")),
        ("pushed", format!("handler = \"push\"\nurl = \"http://{hooks}/pushed\"")),
        ("leased", format!("handler = \"push\"\nurl = \"http://{hooks}/leased\"")),
    ] {
        let _ = writeln!(
            text,
            r#"
[pipelines.{pipeline}]
{more}
events = ["{pipeline}", "{pipeline}.*"]
start = "earliest"
lease_ttl = "2s"
handler_timeout = "3s"
max_attempts = {MAX_ATTEMPTS}
workers.max = 8
backoff = {{ initial = "20ms", max = "300ms", jitter = 0.2 }}"#
        );
    }
    text.push_str(
        r#"
[pipelines.automations]
start = "earliest"
lease_ttl = "2s"
handler_timeout = "5s"
workers.max = 4
backoff = { initial = "20ms", max = "300ms", jitter = 0.2 }

[pipelines.counters]
start = "earliest"
lease_ttl = "2s"

[pipelines.notifications]
lease_ttl = "2s"
backoff = { initial = "50ms", max = "500ms", jitter = 0.2 }
"#,
    );
    text
}

/// Shards of each pipeline.
pub(crate) const SHARDS: u16 = 8;
/// The number of failed attempts after which an event becomes a dead letter.
pub(crate) const MAX_ATTEMPTS: u32 = 5;
/// The rate of a bot in the pipeline `limited`, events per second.
pub(crate) const LIMIT: u32 = 10;
