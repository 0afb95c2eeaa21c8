//! `fairlane bench`: measures the whole service, on private servers that it starts and removes.
//!
//! Machines are shared and noisy: compare every figure with the pipelined `redis-benchmark` of the
//! same run, and use the median of several runs.

pub mod automations;
pub mod counters;
mod cpu;
pub mod fairness;
pub mod http;
pub mod latency;
pub mod mongo;
pub mod notifications;
pub mod overload;
pub mod pipeline;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use redis::{Pipeline, Value};
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};

use crate::app::{App, AppError, Roles};
use crate::automations::subscribers::SUBSCRIBERS;
use crate::clock::{Clock, SystemClock, micros};
use crate::config::{Config, ConfigError, PipelineConfig, RedisUrl, WorkersConfig};
use crate::event::{Event, EventError};
use crate::handler::Handler;
use crate::id::{BotId, IdError, PipelineName};
use crate::keyspace::private::{PrivateRedis, PrivateRedisError};
use crate::keyspace::{Link, StoreError, Target};
use crate::lifecycle::Shutdown;
use crate::notifications::AcceptError;
use crate::queue::FAIR_SLICE_US;
use crate::store::mongo::MongoError;
use crate::store::private::PrivateMongoError;

/// The stream that benches publish to.
const STREAM: &str = "fairlane:events";
/// Number of entries per write when publishing.
const PUBLISH_BATCH: usize = 500;

/// Why a bench failed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each is the error of the stage of that name")]
pub enum BenchError {
    #[error(transparent)]
    App(#[from] AppError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    PrivateRedis(#[from] PrivateRedisError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Event(#[from] EventError),
    #[error(transparent)]
    Id(#[from] IdError),
    #[error("cannot use the directory for the private Redis: {0}")]
    Directory(#[from] std::io::Error),
    #[error("the private Redis has an unusable address: {0}")]
    Address(#[from] redis::RedisError),
    #[error("nothing moved for {0:?}: {1}")]
    Stuck(Duration, String),
    #[error("a request of the bench failed: {0}")]
    Http(#[source] std::io::Error),
    #[error(transparent)]
    Notification(#[from] AcceptError),
    #[error(transparent)]
    PrivateMongo(#[from] PrivateMongoError),
    #[error(transparent)]
    Mongo(#[from] MongoError),
    #[error("MongoDB refuses the documents of the bench: {0}")]
    Documents(#[source] mongodb::error::Error),
    #[error("{url} cannot be reached: {why}; correct --url")]
    Unreachable { url: String, why: String },
    #[error("the route {route:?} {why}")]
    Route { route: String, why: String },
    #[error("interrupted")]
    Interrupted,
}

/// A private Redis in its own directory, and a MongoDB database if one is needed. Everything is
/// removed at the end.
pub struct Rig {
    directory: PathBuf,
    redis: Option<PrivateRedis>,
    database: Option<mongo::Database>,
    target: Target,
    url: RedisUrl,
    /// The connection of the bench itself.
    link: Link,
}

impl std::fmt::Debug for Rig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rig").field("target", &self.target).finish_non_exhaustive()
    }
}

impl Rig {
    async fn start() -> Result<Self, BenchError> {
        let name = format!("fairlane-{}", uuid::Uuid::now_v7().simple());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory)?;
        let redis = PrivateRedis::start(&directory).await?;
        let url = redis.url().clone();
        let target = Target::new(url.expose())?;
        let timeout = Duration::from_secs(30);
        let link = Link::new(target.clone(), Vec::new(), FAIR_SLICE_US, timeout);
        Ok(Self { directory, redis: Some(redis), database: None, target, url, link })
    }

    /// The default configuration on this Redis, with free ports.
    #[must_use]
    pub fn config(&self) -> Config {
        let mut config = Config::default();
        config.redis.url = Some(self.url.clone());
        config.metrics.listen = ([127, 0, 0, 1], 0).into();
        config.http.listen = ([127, 0, 0, 1], 0).into();
        config
    }

    /// An instance of the service with one pipeline `bench` for `handler`.
    ///
    /// # Errors
    /// If it cannot be built.
    pub async fn app(
        &self,
        workers: usize,
        change: impl FnOnce(&mut PipelineConfig),
        handler: impl Handler,
    ) -> Result<App, BenchError> {
        let roles = Roles { http: false, ..Roles::ALL };
        let nowhere = ([127, 0, 0, 1], 0).into();
        self.app_as(&pipeline_name(), roles, nowhere, workers, change, handler).await
    }

    /// The same with another pipeline name, these roles, and its pages at `http`.
    ///
    /// # Errors
    /// If it cannot be built.
    pub async fn app_as(
        &self,
        name: &PipelineName,
        roles: Roles,
        http: SocketAddr,
        workers: usize,
        change: impl FnOnce(&mut PipelineConfig),
        handler: impl Handler,
    ) -> Result<App, BenchError> {
        let mut pipeline = PipelineConfig::new(name.as_str(), ["*"]);
        pipeline.start = crate::config::Start::Earliest;
        let max = std::num::NonZero::new(workers).unwrap_or(std::num::NonZero::<usize>::MIN);
        pipeline.workers = WorkersConfig { min: max, max };
        change(&mut pipeline);
        let mut config = self.config();
        config.bus.streams = vec![STREAM.to_owned()];
        config.http.listen = http;
        config.pipelines.insert(name.clone(), pipeline);
        Ok(App::builder(config).handler(name.as_str(), handler).roles(roles).build().await?)
    }

    /// Starts an instance; stop it through the returned value.
    pub fn spawn(app: App) -> Running {
        let shutdown = Shutdown::new();
        // Tracked by the instance's own shutdown, awaited by `Running::stop`.
        let mut task = tokio::task::JoinSet::new();
        task.spawn(app.run(shutdown.clone()));
        Running { shutdown, task }
    }

    /// Publishes events, in order, in bounded writes.
    ///
    /// # Errors
    /// If Redis refuses or is unavailable.
    pub async fn publish<'a>(
        &self,
        events: impl Iterator<Item = &'a Vec<u8>>,
    ) -> Result<(), BenchError> {
        let mut pipe = Pipeline::new();
        for event in events {
            pipe.cmd("XADD").arg(STREAM).arg("*").arg("event").arg(event);
            if pipe.len() >= PUBLISH_BATCH {
                self.link.run_checked("XADD", &pipe).await?;
                pipe.clear();
            }
        }
        if !pipe.is_empty() {
            self.link.run_checked("XADD", &pipe).await?;
        }
        Ok(())
    }

    /// Number of entries of the stream.
    async fn stored(&self) -> Result<u64, BenchError> {
        match self.link.command("XLEN", redis::Cmd::xlen(STREAM)).await? {
            Value::Int(length) => Ok(length.unsigned_abs()),
            _ => Ok(0),
        }
    }

    /// Empties the stream.
    async fn forget(&self) -> Result<(), BenchError> {
        Ok(self.link.command("UNLINK", redis::Cmd::unlink(STREAM)).await.map(drop)?)
    }

    /// Resets the read position of the bus to its start; the queues must be empty, and no instance
    /// may run.
    async fn forget_positions(&self) -> Result<(), BenchError> {
        let mut cursor = 0_u64;
        loop {
            let mut scan = redis::cmd("SCAN");
            scan.arg(cursor)
                .arg("MATCH")
                .arg(format!("{}:*", self.link.prefix()))
                .arg("COUNT")
                .arg(10_000);
            let found = self.link.command("SCAN", scan).await?;
            let (next, keys): (u64, Vec<String>) = redis::from_redis_value(found)
                .map_err(|error| BenchError::Address(error.into()))?;
            if !keys.is_empty() {
                self.link.command("UNLINK", redis::Cmd::unlink(keys)).await?;
            }
            cursor = next;
            if cursor == 0 {
                return Ok(());
            }
        }
    }

    /// Makes every event be decided again.
    async fn forget_profiles(&self, database: &mongo::Database) -> Result<(), BenchError> {
        let profiles = database.documents().collection::<mongodb::bson::Document>(SUBSCRIBERS);
        profiles.drop().await.map_err(BenchError::Documents)
    }

    async fn info(&self, section: &str) -> Result<String, BenchError> {
        let mut command = redis::cmd("INFO");
        command.arg(section);
        let value = self.link.command("INFO", command).await?;
        Ok(match value {
            Value::BulkString(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            _ => String::new(),
        })
    }

    /// CPU time of the server's main thread so far, seconds.
    async fn redis_cpu(&self) -> Result<f64, BenchError> {
        let info = self.info("cpu").await?;
        let field = |name: &str| -> f64 {
            info.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .and_then(|text| text.trim().parse().ok())
                .unwrap_or(0.0)
        };
        Ok(field("used_cpu_user_main_thread") + field("used_cpu_sys_main_thread"))
    }

    /// Number of commands so far, including those of scripts.
    async fn all_commands(&self) -> Result<u64, BenchError> {
        let info = self.info("stats").await?;
        let count = info.lines().find_map(|line| line.strip_prefix("total_commands_processed:"));
        Ok(count.and_then(|count| count.trim().parse().ok()).unwrap_or(0))
    }

    /// Number of calls per command so far: sent to Redis, and inside Redis including those of
    /// scripts.
    async fn commands(&self) -> Result<Commands, BenchError> {
        let info = self.info("commandstats").await?;
        let mut commands = Commands::default();
        for line in info.lines() {
            let Some((name, rest)) =
                line.strip_prefix("cmdstat_").and_then(|line| line.split_once(':'))
            else {
                continue;
            };
            let calls = rest
                .split(',')
                .find_map(|field| field.strip_prefix("calls="))
                .and_then(|calls| calls.parse::<u64>().ok())
                .unwrap_or(0);
            match name {
                "evalsha" => commands.wire += calls,
                // Sent by the pool and the reader, never by a script on the hot path.
                "lrange" | "xread" | "xinfo|stream" => {
                    commands.wire += calls;
                    commands.inner += calls;
                }
                _ => commands.inner += calls,
            }
        }
        Ok(commands)
    }

    /// The rate of a pipelined `redis-benchmark` on this server: RPUSH of 200 bytes, 16 at a time.
    /// `None` if it is not installed.
    async fn redis_benchmark(&self) -> Option<f64> {
        let socket = self.target.to_string();
        let output = tokio::process::Command::new("redis-benchmark")
            .args(["-s", &socket, "-t", "rpush", "-P", "16", "-c", "8", "-d", "200"])
            .args(["-n", "400000", "--csv"])
            .output()
            .await
            .ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = text.lines().find(|line| line.starts_with("\"RPUSH\""))?;
        line.split(',').nth(1)?.trim_matches('"').parse().ok()
    }

    /// Runs `work` on a fresh server, which is stopped and removed in any case, also at Ctrl-C and
    /// SIGTERM.
    ///
    /// # Errors
    /// Those of `work`, [`BenchError::Interrupted`], or the error of starting the server.
    /// Those of `work`, [`BenchError::Interrupted`], or what kept the server from starting.
    pub async fn with<T>(
        work: impl AsyncFnOnce(&Self) -> Result<T, BenchError>,
    ) -> Result<T, BenchError> {
        Self::with_database(None, async |rig, _| work(rig).await).await
    }

    /// The same with a fresh database of the chosen MongoDB.
    async fn with_database<T>(
        choice: Option<&mongo::Choice>,
        work: impl AsyncFnOnce(&Self, Option<&mongo::Database>) -> Result<T, BenchError>,
    ) -> Result<T, BenchError> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut rig = Self::start().await?;
        if let Some(choice) = choice {
            match mongo::Database::open(choice, &rig.directory).await {
                Ok(database) => rig.database = Some(database),
                Err(error) => return rig.remove().await.and(Err(error)),
            }
        }
        let result = tokio::select! {
            result = work(&rig, rig.database.as_ref()) => result,
            _ = terminate.recv() => Err(BenchError::Interrupted),
            _ = tokio::signal::ctrl_c() => Err(BenchError::Interrupted),
        };
        // The components that `work` started have ended, so this is the last user of the server.
        let removed = rig.remove().await;
        result.and_then(|value| removed.map(|()| value))
    }

    async fn remove(mut self) -> Result<(), BenchError> {
        let dropped = match self.database.take() {
            Some(database) => database.close().await,
            None => Ok(()),
        };
        if let Some(redis) = self.redis.take() {
            self.link.close();
            redis.stop().await?;
        }
        std::fs::remove_dir_all(&self.directory)?;
        dropped
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Commands {
    wire: u64,
    inner: u64,
}

/// A running instance.
#[derive(Debug)]
pub struct Running {
    shutdown: Shutdown,
    task: tokio::task::JoinSet<Result<(), AppError>>,
}

impl Drop for Rig {
    /// Runs only after a panic: the server and its directory must not remain.
    fn drop(&mut self) {
        if let Some(redis) = self.redis.take() {
            let _ = std::process::Command::new("kill").arg(redis.pid().to_string()).status();
            let _ = std::fs::remove_dir_all(&self.directory);
        }
    }
}

impl Drop for Running {
    /// An instance that was not stopped in order is stopped immediately.
    fn drop(&mut self) {
        self.shutdown.hard.cancel();
    }
}

impl Running {
    /// Stops it and waits.
    ///
    /// # Errors
    /// If it failed.
    pub async fn stop(mut self) -> Result<(), BenchError> {
        self.shutdown.soft.cancel();
        while let Some(ended) = self.task.join_next().await {
            if let Ok(ended) = ended {
                ended?;
            }
        }
        Ok(())
    }
}

/// The pipeline of the benches.
///
/// # Panics
/// Never: the name is a constant and legal.
#[must_use]
pub fn pipeline_name() -> PipelineName {
    PipelineName::parse("bench").expect("a legal name")
}

/// An event of `bot` with `id`, padded to `bytes` of JSON.
///
/// # Errors
/// If the id is not valid.
pub fn event(bot: &BotId, id: &str, source: &str, bytes: usize) -> Result<Vec<u8>, BenchError> {
    #[derive(Serialize)]
    struct Payload<'a> {
        sent: u64,
        fill: &'a str,
    }
    let sent = micros(SystemClock.now());
    let make = |fill: &str| -> Result<Vec<u8>, BenchError> {
        let builder = Event::builder("bench.event", bot).id(id).source(source);
        let builder = builder.data(&Payload { sent, fill }).map_err(EventError::Json)?;
        Ok(serde_json::to_vec(&builder.build()?).map_err(EventError::Json)?)
    };
    let bare = make("")?;
    if bare.len() >= bytes {
        return Ok(bare);
    }
    make(&"x".repeat(bytes - bare.len()))
}

/// Waits until `total` are done. Fails if nothing moves for a minute.
///
/// # Errors
/// [`BenchError::Stuck`].
pub(crate) async fn drained(
    done: impl Fn() -> u64,
    total: u64,
    mut watch: impl FnMut(u64),
) -> Result<(), BenchError> {
    const PATIENCE: Duration = Duration::from_secs(60);
    let mut last = (done(), tokio::time::Instant::now());
    loop {
        let now = done();
        watch(now);
        if now >= total {
            return Ok(());
        }
        if now != last.0 {
            last = (now, tokio::time::Instant::now());
        } else if last.1.elapsed() > PATIENCE {
            return Err(BenchError::Stuck(PATIENCE, format!("{now} of {total} events are done")));
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Jain's index of fairness: 1 if all shares are equal, 1/n if one bot has everything.
#[must_use]
pub fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    #[expect(clippy::cast_precision_loss, reason = "a handful of bots")]
    let count = shares.len() as f64;
    if squares == 0.0 { 1.0 } else { sum * sum / (count * squares) }
}

/// Counts handlings by bot number and checks the order. Bots are named `<prefix><number>`, and the
/// id of an event is its position in the bot.
#[derive(Debug)]
pub struct Meter {
    /// The highest position + 1 per bot.
    next: Vec<std::sync::atomic::AtomicU32>,
    done: std::sync::atomic::AtomicU64,
    reordered: std::sync::atomic::AtomicU64,
}

impl Meter {
    /// A count for `bots` bots.
    #[must_use]
    pub fn new(bots: usize) -> Arc<Self> {
        Arc::new(Self {
            next: (0..bots).map(|_| 0.into()).collect(),
            done: 0.into(),
            reordered: 0.into(),
        })
    }

    /// Notes a first or repeated handling.
    pub fn handled(&self, bot: &BotId, event: &Event) {
        use std::sync::atomic::Ordering::Relaxed;
        let digits = bot.as_str().trim_start_matches(|c: char| !c.is_ascii_digit());
        let place = digits.parse::<usize>().ok().and_then(|number| self.next.get(number));
        let (Some(next), Ok(position)) = (place, event.id().parse::<u32>()) else {
            self.reordered.fetch_add(1, Relaxed);
            return;
        };
        let expected = next.fetch_max(position + 1, Relaxed);
        if position > expected {
            self.reordered.fetch_add(1, Relaxed);
        }
    }

    /// Notes completions.
    pub fn committed(&self, events: usize) {
        self.done.fetch_add(events as u64, std::sync::atomic::Ordering::Relaxed);
    }

    /// Number of events completed so far.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.done.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Number of first handlings before an earlier event.
    #[must_use]
    pub fn reordered(&self) -> u64 {
        self.reordered.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Number of events handled at least once, by the positions reached.
    #[must_use]
    pub fn reached(&self) -> u64 {
        self.next
            .iter()
            .map(|next| u64::from(next.load(std::sync::atomic::Ordering::Relaxed)))
            .sum()
    }
}
