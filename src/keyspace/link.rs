//! A link: one multiplexed connection, made anew when it breaks.
//!
//! Making a connection: connect → `INFO` (version, run id) → load all scripts → `recover` for
//! every pipeline and shard of the link. Only then is it used. A call that fails because the
//! connection broke or timed out has an *unknown* outcome; the link does not repeat it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Pipeline, Value};
use tokio::time::Instant;
use tracing::{info, warn};

use super::error::StoreError;
use super::keys::ShardKeys;
use super::reply::{Reply, ReplyError};
use super::scripts::{Call, Recover, SCRIPTS};
use super::target::{CONNECT_TIMEOUT, Target};
use crate::metrics;

/// Oldest server that has every command the scripts use.
const MIN_VERSION: (u32, u32) = (7, 0);

/// One multiplexed connection, made anew when it breaks. Calls from many tasks share it and are
/// pipelined by it.
#[derive(Debug)]
pub struct Link {
    target: Target,
    config: AsyncConnectionConfig,
    /// Shards whose scripts this link calls.
    shards: Vec<ShardKeys>,
    slice_us: u64,
    /// Whether scripts are loaded and the version is checked.
    scripts: bool,
    current: RwLock<Option<(u64, MultiplexedConnection)>>,
    connecting: tokio::sync::Mutex<()>,
    generation: AtomicU64,
    /// Commands sent, for the figures of `fairlane bench`.
    sent: AtomicU64,
}

impl Link {
    /// A link that serves the scripts of `shards`. Connects at the first call.
    ///
    /// `response_timeout` bounds every call; it must be longer than a blocking command blocks.
    #[must_use]
    pub fn new(
        target: Target,
        shards: Vec<ShardKeys>,
        slice_us: u64,
        response_timeout: Duration,
    ) -> Self {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(Some(response_timeout))
            .set_pipeline_buffer_size(1_024);
        Self {
            target,
            config,
            shards,
            slice_us,
            scripts: true,
            current: RwLock::new(None),
            connecting: tokio::sync::Mutex::new(()),
            generation: AtomicU64::new(0),
            sent: AtomicU64::new(0),
        }
    }

    /// A link that never runs a script, and takes a server of any version.
    pub(super) fn plain(target: Target, response_timeout: Duration) -> Self {
        Self { scripts: false, ..Self::new(target, Vec::new(), 0, response_timeout) }
    }

    /// Where it leads.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Commands sent so far.
    #[must_use]
    pub fn commands_sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Whether there is a connection that has not failed yet.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.current().is_some()
    }

    /// Calls one script.
    ///
    /// # Errors
    /// [`StoreError::Unknown`] leaves open whether it ran.
    ///
    /// # Cancel safety
    /// Dropping the future leaves open whether the script ran.
    pub async fn call<C: Call>(&self, call: &C) -> Result<C::Reply, StoreError> {
        let mut replies = self.call_all(std::slice::from_ref(call)).await?;
        replies.pop().unwrap_or_else(|| {
            Err(self.misread(C::NAME, ReplyError::unexpected("one reply", "none")))
        })
    }

    /// Calls one script several times in one write; the server runs them in order.
    ///
    /// # Errors
    /// The outer error means that no answer came for any; an inner one concerns its call alone.
    ///
    /// # Cancel safety
    /// Dropping the future leaves open which calls ran.
    pub async fn call_all<C: Call>(
        &self,
        calls: &[C],
    ) -> Result<Vec<Result<C::Reply, StoreError>>, StoreError> {
        let mut pipe = Pipeline::with_capacity(calls.len());
        for call in calls {
            pipe.add_command(call.command());
        }
        let sent = Instant::now();
        let mut values = self.run(&pipe).await?;
        let missing: Vec<usize> =
            (0..values.len()).filter(|&at| is_noscript(&values[at])).collect();
        if !missing.is_empty() {
            // The server forgot its scripts (SCRIPT FLUSH) or is another one: recover, load, resend
            // what did not run.
            warn!(script = C::NAME, "the server does not know the script; loading all again");
            self.drop_connection();
            let mut again = Pipeline::with_capacity(missing.len());
            for &at in &missing {
                again.add_command(calls[at].command());
            }
            for (&at, value) in missing.iter().zip(self.run(&again).await?) {
                values[at] = value;
            }
        }
        metrics::script_seconds(C::NAME, sent.elapsed());
        Ok(values
            .into_iter()
            .map(|value| match value {
                Value::ServerError(error) => Err(self.refused(C::NAME, &error)),
                value => C::reply(value).map_err(|source| self.misread(C::NAME, source)),
            })
            .collect())
    }

    /// Sends plain commands in one write. An element of the answer may be
    /// [`Value::ServerError`].
    ///
    /// # Errors
    /// When no answer came.
    ///
    /// # Cancel safety
    /// Dropping the future leaves open which commands ran.
    pub async fn run(&self, pipe: &Pipeline) -> Result<Vec<Value>, StoreError> {
        let (generation, mut connection) = self.connection().await?;
        self.sent.fetch_add(pipe.len() as u64, Ordering::Relaxed);
        match connection.send_packed_commands(pipe, 0, pipe.len()).await {
            Ok(values) => Ok(values),
            Err(source) => {
                self.drop_generation(generation);
                Err(self.target.unknown(source))
            }
        }
    }

    /// Sends plain commands in one write; the first that is refused makes the whole an error.
    ///
    /// # Errors
    /// When no answer came or the server refused one.
    pub(crate) async fn run_checked(
        &self,
        name: &'static str,
        pipe: &Pipeline,
    ) -> Result<Vec<Value>, StoreError> {
        let values = self.run(pipe).await?;
        match values.iter().find_map(|value| match value {
            Value::ServerError(error) => Some(error),
            _ => None,
        }) {
            Some(error) => Err(self.refused(name, error)),
            None => Ok(values),
        }
    }

    /// Sends one plain command.
    ///
    /// # Errors
    /// When no answer came or the server refused.
    pub(crate) async fn command(
        &self,
        name: &'static str,
        command: redis::Cmd,
    ) -> Result<Value, StoreError> {
        let mut pipe = Pipeline::with_capacity(1);
        pipe.add_command(command);
        match self.run(&pipe).await?.pop() {
            Some(Value::ServerError(error)) => Err(self.refused(name, &error)),
            value => Ok(value.unwrap_or(Value::Nil)),
        }
    }

    pub(crate) fn refused(&self, command: &'static str, error: &redis::ServerError) -> StoreError {
        let message = format!("{} {}", error.code(), error.details().unwrap_or_default());
        StoreError::Refused { target: self.target.shown.clone(), command, message }
    }

    #[expect(clippy::unused_self, reason = "reads like its siblings")]
    pub(crate) fn misread(&self, command: &'static str, source: ReplyError) -> StoreError {
        StoreError::Reply { command, source }
    }

    fn current(&self) -> Option<(u64, MultiplexedConnection)> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Gives the connection up; the next call makes a new one.
    pub(crate) fn close(&self) {
        self.drop_connection();
    }

    fn drop_connection(&self) {
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn drop_generation(&self, generation: u64) {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        if current.as_ref().is_some_and(|(number, _)| *number == generation) {
            *current = None;
        }
    }

    async fn connection(&self) -> Result<(u64, MultiplexedConnection), StoreError> {
        if let Some(current) = self.current() {
            return Ok(current);
        }
        let _one_at_a_time = self.connecting.lock().await;
        if let Some(current) = self.current() {
            return Ok(current);
        }
        let connection = self.connect().await?;
        let generation = self.generation.fetch_add(1, Ordering::Relaxed) + 1;
        let current = (generation, connection);
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(current.clone());
        Ok(current)
    }

    async fn connect(&self) -> Result<MultiplexedConnection, StoreError> {
        let mut connection = self
            .target
            .client
            .get_multiplexed_async_connection_with_config(&self.config)
            .await
            .map_err(|source| self.target.connect_error(source))?;
        if !self.scripts {
            return Ok(connection);
        }
        let mut pipe = Pipeline::new();
        pipe.cmd("INFO").arg("server");
        for script in SCRIPTS.iter() {
            pipe.cmd("SCRIPT").arg("LOAD").arg(&script.code);
        }
        let values = self.handshake(&mut connection, &pipe, "SCRIPT LOAD").await?;
        let info = Reply::new(Value::Array(values)).and_then(|mut reply| reply.text());
        let info = info.map_err(|source| self.misread("INFO", source))?;
        let field = |name: &str| {
            info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap_or("")
        };
        let version = field("redis_version");
        let mut numbers = version.split('.').map(|part| part.parse().unwrap_or(0));
        if (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < MIN_VERSION {
            let (target, version) = (self.target.shown.clone(), version.to_owned());
            return Err(StoreError::Version { target, version });
        }
        let run = field("run_id");
        let mut pipe = Pipeline::with_capacity(self.shards.len());
        for keys in &self.shards {
            pipe.add_command(Recover { keys, run, slice_us: self.slice_us }.command());
        }
        let mut revoked = 0;
        for value in self.handshake(&mut connection, &pipe, Recover::NAME).await? {
            let reply =
                Recover::reply(value).map_err(|source| self.misread(Recover::NAME, source))?;
            revoked += reply.unwrap_or(0);
        }
        if revoked > 0 {
            info!(leases = revoked, "Redis is another run than before: its leases were revoked");
        }
        Ok(connection)
    }

    async fn handshake(
        &self,
        connection: &mut MultiplexedConnection,
        pipe: &Pipeline,
        command: &'static str,
    ) -> Result<Vec<Value>, StoreError> {
        if pipe.is_empty() {
            return Ok(Vec::new());
        }
        let values = connection
            .send_packed_commands(pipe, 0, pipe.len())
            .await
            .map_err(|source| self.target.connect_error(source))?;
        match values.iter().find_map(|value| match value {
            Value::ServerError(error) => Some(error),
            _ => None,
        }) {
            Some(error) => Err(self.refused(command, error)),
            None => Ok(values),
        }
    }
}

fn is_noscript(value: &Value) -> bool {
    matches!(value, Value::ServerError(error) if error.code() == "NOSCRIPT")
}
