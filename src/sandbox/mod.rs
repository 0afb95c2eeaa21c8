//! Servers and instances that the demo and the load tools start for themselves, in a directory that
//! they remove at the end.

mod directory;
mod error;
mod interrupt;
mod server;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;
use redis::{Cmd, Pipeline, Value};
use serde::Serialize;

use self::directory::Directory;
pub use self::error::SandboxError;
pub use self::interrupt::Interrupt;
pub use self::server::{Row, admitted, listen, raise_open_files, serve};
use crate::app::{App, AppError, Roles};
use crate::clock::{Clock, SystemClock, micros};
use crate::config::{self, Config, PipelineConfig, RedisUrl, Start, WorkersConfig};
use crate::event::{Event, EventError};
use crate::handler::Handler;
use crate::id::{BotId, PipelineName};
use crate::lifecycle::Shutdown;
use crate::queue::FAIR_SLICE_US;
use crate::redis::private::{self, PrivateRedis};
use crate::redis::{Link, Target};

/// The stream to which events are published.
pub const STREAM: &str = "fairlane:events";
/// Number of entries per write when publishing.
const PUBLISH_BATCH: usize = 500;
/// Timeout of a call of the private Redis.
const PATIENCE: Duration = Duration::from_secs(30);

/// A private Redis in its own directory. Dropping it kills the server and removes the directory.
pub struct Rig {
    /// Dropped before its directory.
    redis: PrivateRedis,
    directory: Directory,
    target: Target,
    url: RedisUrl,
    /// The connection of the caller.
    link: Link,
}

impl std::fmt::Debug for Rig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rig").field("target", &self.target).finish_non_exhaustive()
    }
}

impl Rig {
    /// Starts the server. Remove it with [`Self::remove`].
    ///
    /// # Errors
    /// If the directory or the server cannot be used. Nothing is left then.
    ///
    /// # Cancel safety
    /// Nothing is left.
    pub async fn start() -> Result<Self, SandboxError> {
        let directory = Directory::create()?;
        let options = private::Options { kill_on_drop: true, ..private::Options::default() };
        let redis = PrivateRedis::start_with(directory.path(), options).await?;
        let url = redis.url().clone();
        let target = Target::new(url.expose())?;
        let link = Link::new(target.clone(), Vec::new(), FAIR_SLICE_US, PATIENCE);
        Ok(Self { redis, directory, target, url, link })
    }

    /// The directory of the server.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The address of the server.
    #[must_use]
    pub fn url(&self) -> &RedisUrl {
        &self.url
    }

    /// The address of the server, in the form of the Redis client.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
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
    ) -> Result<App, SandboxError> {
        let roles = Roles { http: false, ..Roles::ALL };
        let nowhere = ([127, 0, 0, 1], 0).into();
        self.app_as(&pipeline_name(), roles, nowhere, workers, change, handler).await
    }

    /// As [`Self::app`], with another pipeline name, these roles, and the web pages at `http`.
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
    ) -> Result<App, SandboxError> {
        let mut pipeline = PipelineConfig::new(name.as_str(), ["*"]);
        pipeline.start = Start::Earliest;
        let max = std::num::NonZero::new(workers).unwrap_or(std::num::NonZero::<usize>::MIN);
        pipeline.workers = WorkersConfig { min: max, max };
        change(&mut pipeline);
        let mut config = self.config();
        config.bus.streams = vec![STREAM.to_owned()];
        config.http.listen = http;
        config.pipelines.insert(name.clone(), pipeline);
        let app = App::builder(config).handler(name.as_str(), handler).roles(roles);
        // Boxed, because the whole configuration is a part of this future.
        Ok(Box::pin(app.build()).await?)
    }

    /// Starts an instance. Stop it through the returned value.
    pub fn spawn(app: App) -> Running {
        let shutdown = Shutdown::new();
        // `Running::stop` awaits this task. The instance's own shutdown tracks the others.
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
    ) -> Result<(), SandboxError> {
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

    /// The answer of the server to a command.
    ///
    /// # Errors
    /// If Redis refuses or is unavailable.
    pub async fn command(&self, name: &'static str, command: Cmd) -> Result<Value, SandboxError> {
        Ok(self.link.command(name, command).await?)
    }

    /// A further connection.
    #[must_use]
    pub fn producer(&self) -> Producer {
        Producer(Link::new(self.target.clone(), Vec::new(), FAIR_SLICE_US, PATIENCE))
    }

    /// The prefix of every key of an instance, without the colon.
    #[must_use]
    pub fn key_prefix(&self) -> String {
        self.link.prefix().to_string()
    }

    /// Runs `work` on a new server. Then removes the server, also after an error, Ctrl-C, SIGTERM or
    /// SIGHUP.
    ///
    /// # Errors
    /// Those of `work`, [`SandboxError::Interrupted`], or the error of starting or removing the
    /// server.
    pub async fn with<T, E: From<SandboxError>>(
        work: impl AsyncFnOnce(&Self) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut interrupt = Interrupt::listen()?;
        let rig = interrupt.or(Box::pin(Self::start())).await?;
        let result = interrupt.or(work(&rig)).await;
        let removed = rig.remove();
        let value = result?;
        removed?;
        Ok(value)
    }

    /// Kills the server, whose data is not needed any more, and removes its directory.
    ///
    /// # Errors
    /// If the directory cannot be removed.
    pub fn remove(self) -> Result<(), SandboxError> {
        let Self { redis, directory, link, .. } = self;
        link.close();
        drop(redis);
        directory.remove()
    }
}

/// A connection that publishes events.
#[derive(Debug)]
pub struct Producer(Link);

impl Producer {
    /// Sends commands, in order.
    ///
    /// # Errors
    /// If Redis refuses or is unavailable.
    pub async fn send(&self, commands: &Pipeline) -> Result<(), SandboxError> {
        self.0.run_checked("XADD", commands).await?;
        Ok(())
    }
}

/// A running instance.
#[derive(Debug)]
pub struct Running {
    shutdown: Shutdown,
    task: tokio::task::JoinSet<Result<(), AppError>>,
}

impl Drop for Running {
    /// Immediately stops an instance that was not stopped in order.
    fn drop(&mut self) {
        self.shutdown.hard.cancel();
    }
}

impl Running {
    /// Stops it without waiting for the events in progress.
    ///
    /// # Errors
    /// If it failed.
    pub async fn stop_immediately(self) -> Result<(), SandboxError> {
        self.shutdown.hard.cancel();
        self.stop().await
    }

    /// Stops it and waits.
    ///
    /// # Errors
    /// If it failed.
    pub async fn stop(mut self) -> Result<(), SandboxError> {
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
    PipelineName::parse("bench").expect("a constant of small letters is a name")
}

/// An event of `bot` with `id`, padded to `bytes` of JSON.
///
/// # Errors
/// If the id is not valid.
pub fn event(bot: &BotId, id: &str, source: &str, bytes: usize) -> Result<Vec<u8>, SandboxError> {
    #[derive(Serialize)]
    struct Payload<'a> {
        sent: u64,
        fill: &'a str,
    }
    let sent = micros(SystemClock.now());
    let make = |fill: &str| -> Result<Vec<u8>, SandboxError> {
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

/// Waits until `total` events are done. Fails after a minute without progress.
pub async fn drained(
    done: impl Fn() -> u64,
    total: u64,
    mut watch: impl FnMut(u64),
) -> Result<(), SandboxError> {
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
            return Err(SandboxError::Stuck(PATIENCE, format!("{now} of {total} events are done")));
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A histogram of microseconds up to ten minutes, within 1 %.
///
/// # Panics
/// Never: the bounds are constants and legal.
#[must_use]
pub fn waits() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 600_000_000, 2)
        .expect("constants that it takes: from 1 on, and up to 5 digits")
}

/// Milliseconds at a quantile.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "microseconds of a bench")]
pub fn quantile_ms(waits: &Histogram<u64>, quantile: f64) -> f64 {
    waits.value_at_quantile(quantile) as f64 / 1_000.0
}

/// The program of a private MongoDB that the environment names.
#[must_use]
pub fn mongod() -> Option<PathBuf> {
    config::mongod()
}

/// Counts handlings by bot number and checks the order. Bots are named `<prefix><number>`, and the
/// id of an event is its position in the bot.
#[derive(Debug)]
pub struct Meter {
    /// The highest position + 1 per bot.
    next: Vec<AtomicU32>,
    done: AtomicU64,
    reordered: AtomicU64,
}

impl Meter {
    /// A meter for `bots` bots.
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
        self.noted(bot.as_str(), event.id());
    }

    /// As [`Self::handled`], by the names of bot and event.
    pub fn noted(&self, bot: &str, id: &str) {
        let digits = bot.trim_start_matches(|c: char| !c.is_ascii_digit());
        let place = digits.parse::<usize>().ok().and_then(|number| self.next.get(number));
        let (Some(next), Ok(position)) = (place, id.parse::<u32>()) else {
            self.reordered.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let expected = next.fetch_max(position + 1, Ordering::Relaxed);
        if position > expected {
            self.reordered.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Notes completions.
    pub fn committed(&self, events: usize) {
        self.done.fetch_add(events as u64, Ordering::Relaxed);
    }

    /// Number of events completed so far.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Number of events that were first handled before an earlier one.
    #[must_use]
    pub fn reordered(&self) -> u64 {
        self.reordered.load(Ordering::Relaxed)
    }

    /// Number of events handled at least once, by the positions reached.
    #[must_use]
    pub fn reached(&self) -> u64 {
        self.next.iter().map(|next| u64::from(next.load(Ordering::Relaxed))).sum()
    }
}

#[cfg(test)]
mod tests;
