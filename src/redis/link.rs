//! A link: the access of one part of the program to Redis, a single server or a cluster.
//!
//! A link has one [`Node`] per server, and knows which node holds which slot. It sends the commands
//! of one write to their nodes concurrently and returns the answers in order. Commands of one slot
//! keep their order. A single server is a topology with one node.
//!
//! There are two kinds of links. On the hot paths, all calls share one connection per server. It
//! carries most commands with the fewest packets, but answers come in the order of the calls, so a
//! large answer delays all behind it. All other paths use a pooled link: each call has its own
//! connection and delays no other call.
//!
//! In a cluster, `MOVED` means that the command did not run: the link asks for the topology again
//! and sends the command once more. `ASK`, `TRYAGAIN` (the slot is being migrated) and
//! `CLUSTERDOWN` also mean that it did not run; they are temporary refusals. If a connection
//! breaks, the outcome of its commands is unknown. After each of these cases the link asks for the
//! topology again, with one query at a time and at most one every 100 ms.
//!
//! The link routes commands itself because no client that reconnects by itself may run scripts: see
//! [`super`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use futures_util::future::join_all;
use redis::{AsyncConnectionConfig, Pipeline, Value};
use tokio::time::Instant;
use tracing::warn;

use super::error::{RedisError, is_noscript};
use super::keys::ShardKeys;
use super::node::{self, Node, Wiring, is_move, server_error};
use super::reply::ReplyError;
use super::route::{Destination, place};
use super::scripts::{Call, exceeded};
use super::target::{CONNECT_TIMEOUT, Target};
use super::topology::Topology;
use crate::id::Prefix;
use crate::metrics;
use crate::telemetry::OncePerMinute;

/// Limits the log line about scripts that a server had forgotten.
static FORGOTTEN: OncePerMinute = OncePerMinute::new();

/// The answer to each command or call of a write.
pub(super) type Answers<T> = Vec<Result<T, RedisError>>;

/// The access of one part of the program to Redis. Calls from many tasks are pipelined on shared
/// connections; in a pooled link, each call has its own connection.
#[derive(Debug)]
pub struct Link {
    pub(super) target: Target,
    pub(super) wiring: Arc<Wiring>,
    /// `None` until the first query to the cluster.
    pub(super) topology: RwLock<Option<Arc<Topology>>>,
    /// Whether an answer contradicted the topology.
    pub(super) stale: AtomicBool,
    /// Time of the last query for the topology.
    pub(super) looking: tokio::sync::Mutex<Option<Instant>>,
    /// Number of commands sent.
    pub(super) sent: AtomicU64,
}

impl Link {
    /// A link that runs the scripts of `shards`. Connects at the first call.
    ///
    /// `response_timeout` limits every call; it must be longer than the longest blocking command.
    #[must_use]
    pub fn new(
        target: Target,
        shards: Vec<ShardKeys>,
        slice_us: u64,
        response_timeout: Duration,
    ) -> Self {
        Self::of(Self::wiring(target, shards, slice_us, response_timeout))
    }

    /// As [`Self::new`], but each call has its own connection: one of at most [`super::POOLED_MAX`]
    /// per server. A call waits up to `response_timeout` for a connection, and as long for its
    /// answer. Concurrent calls run in any order.
    #[must_use]
    pub fn pooled(
        target: Target,
        shards: Vec<ShardKeys>,
        slice_us: u64,
        response_timeout: Duration,
    ) -> Self {
        let wiring = Self::wiring(target, shards, slice_us, response_timeout);
        Self::of(Wiring { pooled: true, ..wiring })
    }

    /// A pooled link that never runs a script, and accepts servers of any version.
    pub(super) fn plain(target: Target, response_timeout: Duration) -> Self {
        let wiring = Self::wiring(target, Vec::new(), 0, response_timeout);
        Self::of(Wiring { pooled: true, scripts: false, ..wiring })
    }

    fn wiring(
        target: Target,
        shards: Vec<ShardKeys>,
        slice_us: u64,
        response_timeout: Duration,
    ) -> Wiring {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(Some(response_timeout))
            .set_pipeline_buffer_size(1_024);
        let with_slot = |keys: ShardKeys| (keys.slot(), keys);
        Wiring {
            config,
            response_timeout,
            pooled: false,
            shards: shards.into_iter().map(with_slot).collect(),
            slice_us,
            scripts: true,
            cluster: target.is_cluster(),
            target,
        }
    }

    fn of(wiring: Wiring) -> Self {
        let wiring = Arc::new(wiring);
        let target = wiring.target.clone();
        let alone = || Node::new(target.client().clone(), Vec::new(), Arc::clone(&wiring));
        let topology = (!wiring.cluster).then(|| Arc::new(Topology::single(alone())));
        Self {
            topology: RwLock::new(topology),
            wiring,
            target,
            stale: AtomicBool::new(false),
            looking: tokio::sync::Mutex::new(None),
            sent: AtomicU64::new(0),
        }
    }

    /// The Redis deployment.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The prefix of all keys.
    #[must_use]
    pub fn prefix(&self) -> &Prefix {
        self.target.prefix()
    }

    /// Number of commands sent so far.
    #[must_use]
    pub fn commands_sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Calls one script.
    ///
    /// # Errors
    /// After [`RedisError::Unknown`], the script may or may not have run.
    ///
    /// # Cancel safety
    /// If the future is dropped, the script may or may not have run.
    pub async fn call<C: Call>(&self, call: &C) -> Result<C::Reply, RedisError> {
        let mut replies = self.call_all(std::slice::from_ref(call)).await?;
        replies.pop().unwrap_or_else(|| {
            Err(self.misread(C::NAME, ReplyError::unexpected("one reply", "none")))
        })
    }

    /// Calls one script several times in one write. A server runs the calls in one slot in order.
    ///
    /// # Errors
    /// The outer error means that no call got an answer. An inner error concerns its call alone. If
    /// a node gives no answer, each of its calls gets its own [`RedisError::Unknown`].
    ///
    /// # Cancel safety
    /// If the future is dropped, any of the calls may have run.
    pub async fn call_all<C: Call>(&self, calls: &[C]) -> Result<Answers<C::Reply>, RedisError> {
        if calls.is_empty() {
            // The client refuses a pipeline without commands.
            return Ok(Vec::new());
        }
        let mut pipe = Pipeline::with_capacity(calls.len());
        for call in calls {
            pipe.add_command(call.command());
        }
        let lasting = calls.iter().any(C::is_lasting);
        let sent = Instant::now();
        let mut values = self.send_each(&pipe, lasting).await?;
        let missing: Vec<usize> =
            (0..values.len()).filter(|&at| values[at].as_ref().is_ok_and(is_noscript)).collect();
        if !missing.is_empty() {
            // The server forgot its scripts (SCRIPT FLUSH) or is another one: recover, load, and
            // resend the calls that did not run.
            if let Some(suppressed) = FORGOTTEN.take() {
                warn!(
                    script = C::NAME,
                    suppressed, "the server does not know the script; loading all again"
                );
            }
            let mut again = Pipeline::with_capacity(missing.len());
            for &at in &missing {
                let command = calls[at].command();
                self.close_holder(place(&command));
                again.add_command(command);
            }
            for (&at, value) in missing.iter().zip(self.send_each(&again, lasting).await?) {
                values[at] = value;
            }
        }
        metrics::script_seconds(C::NAME, sent.elapsed());
        let read = |value| match value {
            Value::ServerError(error) => Err(self.refused(C::NAME, &error)),
            value => match exceeded(&value) {
                Some(exceeded) => {
                    metrics::quota_refused(exceeded.name, 1);
                    Err(exceeded.into())
                }
                None => C::reply(value).map_err(|source| self.misread(C::NAME, source)),
            },
        };
        Ok(values.into_iter().map(|value| value.and_then(read)).collect())
    }

    /// Sends plain commands in one write. A command without a key goes to every primary; the result
    /// is the first refusal, else the first answer. An element of the result may be
    /// [`Value::ServerError`].
    ///
    /// # Errors
    /// If one of them gets no answer.
    ///
    /// # Cancel safety
    /// If the future is dropped, any of the commands may have run.
    pub async fn run(&self, pipe: &Pipeline) -> Result<Vec<Value>, RedisError> {
        self.run_each(pipe).await?.into_iter().collect()
    }

    /// Sends plain commands in one write, see [`Self::run`]. Each command has its own answer or
    /// error, so an unavailable node does not affect the commands for other nodes.
    ///
    /// # Errors
    /// If none of them gets an answer.
    ///
    /// # Cancel safety
    /// If the future is dropped, any of the commands may have run.
    pub async fn run_each(&self, pipe: &Pipeline) -> Result<Answers<Value>, RedisError> {
        self.send_each(pipe, false).await
    }

    async fn send_each(
        &self,
        pipe: &Pipeline,
        lasting: bool,
    ) -> Result<Answers<Value>, RedisError> {
        let topology = self.topology().await?;
        if self.wiring.cluster {
            return self.run_cluster(topology, pipe, lasting).await;
        }
        let node = &topology.nodes()[0];
        self.sent.fetch_add(pipe.len() as u64, Ordering::Relaxed);
        let begun = Instant::now();
        let sent = async { node.send(node.connected().await?, pipe, lasting).await }.await;
        node.latency().observe_wait(begun.elapsed());
        let values = sent?;
        if values.iter().filter_map(server_error).any(|error| error.code() == "READONLY") {
            // The server is a replica now. Its name may resolve to the new primary, and sentinels
            // name it.
            node.close();
        }
        Ok(values.into_iter().map(Ok).collect())
    }

    /// Sends plain commands in one write. The first refusal is returned as an error.
    ///
    /// # Errors
    /// If there is no answer or the server refuses one of them.
    pub(crate) async fn run_checked(
        &self,
        name: &'static str,
        pipe: &Pipeline,
    ) -> Result<Vec<Value>, RedisError> {
        self.checked(name, self.run(pipe).await?)
    }

    /// As [`Self::run_checked`], and waits for replicas if the target asks for that.
    ///
    /// # Errors
    /// If there is no answer, the server refuses one of them, or too few replicas confirm them.
    pub(crate) async fn run_lasting(
        &self,
        name: &'static str,
        pipe: &Pipeline,
    ) -> Result<Vec<Value>, RedisError> {
        let values = self.send_each(pipe, true).await?;
        self.checked(name, values.into_iter().collect::<Result<_, _>>()?)
    }

    fn checked(&self, name: &'static str, values: Vec<Value>) -> Result<Vec<Value>, RedisError> {
        match values.iter().find_map(server_error) {
            Some(error) => Err(self.refused(name, error)),
            None => Ok(values),
        }
    }

    /// Sends one plain command.
    ///
    /// # Errors
    /// If there is no answer or the server refuses.
    pub(crate) async fn command(
        &self,
        name: &'static str,
        command: redis::Cmd,
    ) -> Result<Value, RedisError> {
        let mut pipe = Pipeline::with_capacity(1);
        pipe.add_command(command);
        match self.run(&pipe).await?.pop() {
            Some(Value::ServerError(error)) => Err(self.refused(name, &error)),
            value => Ok(value.unwrap_or(Value::Nil)),
        }
    }

    /// The clock of a server, since 1970.
    ///
    /// # Errors
    /// If there is no answer or the server refuses.
    pub(crate) async fn time(&self) -> Result<Duration, RedisError> {
        let time = self.command("TIME", redis::cmd("TIME")).await?;
        let (seconds, micros) = self.read("TIME", time)?;
        Ok(Duration::from_secs(seconds) + Duration::from_micros(micros))
    }

    /// Sends one command to every primary; returns one answer each.
    ///
    /// # Errors
    /// If one of them does not answer or refuses.
    pub(crate) async fn ask_every(
        &self,
        name: &'static str,
        command: &redis::Cmd,
    ) -> Result<Vec<Value>, RedisError> {
        self.ask_each(name, command).await?.into_iter().collect()
    }

    /// Sends one command to every primary; returns what each answers, or why it does not.
    ///
    /// # Errors
    /// If no primary is known.
    pub(crate) async fn ask_each(
        &self,
        name: &'static str,
        command: &redis::Cmd,
    ) -> Result<Vec<Result<Value, RedisError>>, RedisError> {
        let topology = self.topology().await?;
        let mut pipe = Pipeline::with_capacity(1);
        pipe.add_command(command.clone());
        let asked = topology.nodes().iter().map(|node| self.send(node, (&pipe, false), &[]));
        let answers = join_all(asked).await.into_iter().map(|answer| {
            match answer.inspect_err(|_| self.mark_stale())?.pop().unwrap_or(Value::Nil) {
                Value::ServerError(error) => Err(self.refused(name, &error)),
                value => Ok(value),
            }
        });
        Ok(answers.collect())
    }

    /// Every primary as a separate target, with its name and one of the slots it holds.
    pub(super) async fn primaries(&self) -> Result<Vec<(Target, Option<u16>)>, RedisError> {
        let topology = self.topology().await?;
        if self.target.is_sentinel() {
            let primary = self.target.primary(self.target.client()).await?;
            return Ok(vec![(self.target.alone(primary), None)]);
        }
        let held = |place| (0..=u16::MAX >> 2).find(|&slot| topology.holder(slot) == Some(place));
        let nodes = topology.nodes().iter().enumerate();
        Ok(nodes.map(|(at, node)| (self.target.alone(node.client().clone()), held(at))).collect())
    }

    /// Number of slots without a primary.
    pub(super) async fn slots_missing(&self) -> Result<usize, RedisError> {
        Ok(self.topology().await?.slots_missing())
    }

    /// A number for the server that holds a shard, as far as known. Shards with the same number
    /// depend on the same server.
    pub(crate) fn holder(&self, keys: &ShardKeys) -> usize {
        if !self.wiring.cluster {
            return 0;
        }
        self.current().and_then(|now| now.holder(keys.slot())).unwrap_or(0)
    }

    /// How long calls for a shard take at present, see [`super::latency`]; zero while
    /// it is not known which server holds it.
    pub(crate) fn latency(&self, keys: &ShardKeys) -> Duration {
        let Some(topology) = self.current() else { return Duration::ZERO };
        let at = if self.wiring.cluster { topology.holder(keys.slot()) } else { Some(0) };
        at.map_or(Duration::ZERO, |at| topology.nodes()[at].latency().present())
    }

    /// The share of the work for these shards that should continue, see [`Pressure`]. That of their
    /// quickest server counts: one slow primary must not lower that of the others.
    ///
    /// [`Pressure`]: crate::pressure::Pressure
    pub(crate) fn share(&self, shards: &[ShardKeys]) -> f64 {
        let Some(topology) = self.current() else { return 1.0 };
        let at = |keys: &ShardKeys| topology.holder(keys.slot());
        let of_each = shards.iter().filter_map(at).map(|at| topology.nodes()[at].latency().share());
        of_each.reduce(f64::max).unwrap_or(1.0)
    }

    /// The number of the shared connection that calls for a shard use; `None` if there is none.
    /// Each connection of the process has a different number. While the number stays the same,
    /// Redis did not restart.
    pub(crate) fn connection(&self, keys: &ShardKeys) -> Option<u64> {
        let topology = self.current()?;
        let at = if self.wiring.cluster { topology.holder(keys.slot())? } else { 0 };
        topology.nodes()[at].connection()
    }

    pub(crate) fn refused(&self, command: &'static str, error: &redis::ServerError) -> RedisError {
        match node::refused(&self.target.to_string(), command, error) {
            RedisError::Refused { target, message, .. }
                if is_move(error) && !self.wiring.cluster =>
            {
                let remedy = "this is a node of a cluster, write redis+cluster:// in redis.url";
                RedisError::Refused { target, command, message: format!("{message} ({remedy})") }
            }
            refused => refused,
        }
    }

    #[expect(clippy::unused_self, reason = "reads like its siblings")]
    pub(crate) fn misread(&self, command: &'static str, source: ReplyError) -> RedisError {
        node::misread(command, source)
    }

    /// Converts an answer to the expected type.
    pub(crate) fn read<T: redis::FromRedisValue>(
        &self,
        name: &'static str,
        value: Value,
    ) -> Result<T, RedisError> {
        redis::from_redis_value(value).map_err(|error| {
            self.misread(name, ReplyError::unexpected("another shape", &error.to_string()))
        })
    }

    /// Closes the connections; the next calls make new ones.
    pub(crate) fn close(&self) {
        self.current().iter().flat_map(|now| now.nodes()).for_each(|node| node.close());
    }

    fn close_holder(&self, place: Destination) {
        let Some(topology) = self.current() else { return };
        match place {
            Destination::Slot(slot) => {
                if let Some(at) = topology.holder(slot) {
                    topology.nodes()[at].close();
                }
            }
            Destination::Everywhere => self.close(),
        }
    }
}
