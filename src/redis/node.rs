//! One server and the connections to it: either one that all calls share, replaced when it breaks,
//! or a pool ([`super::pooled`]) that lends each call its own.
//!
//! Steps of making a connection, of either kind: connect → `INFO` (version, run id) → load all
//! scripts → `recover` for every pipeline and shard of the link on this server. Only then is the
//! connection used. Behind sentinels the first step asks them for the primary, and `INFO` must say
//! that it is one. A call that fails because the connection broke or timed out has an *unknown*
//! outcome; this module does not repeat it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Pipeline, ServerError, Value};
use tokio::time::Instant;
use tracing::info;

use super::error::{RedisError, is_noscript};
use super::keys::ShardKeys;
use super::latency::Latency;
use super::pooled::{Lent, Pooled};
use super::replicas::run_of;
use super::reply::{Reply, ReplyError};
use super::route::{Destination, place};
use super::scripts::{self, Call, Recover};
use super::silence::Silence;
use super::target::{Target, address, connect_error};

/// The oldest server version with every command that the scripts use.
const MIN_VERSION: (u32, u32) = (7, 0);
/// Interval between attempts to recover a shard whose slot is being migrated.
const LIFT: Duration = Duration::from_millis(100);

/// Number of connections that this process made. Each connection has a different number.
static CONNECTIONS: AtomicU64 = AtomicU64::new(0);

/// The settings that all nodes of a link share.
#[derive(Debug)]
pub(super) struct Wiring {
    pub(super) config: AsyncConnectionConfig,
    /// Timeout of an answer, and before that of waiting for a connection of the pool.
    pub(super) response_timeout: Duration,
    /// Whether each call has its own connection, from a pool.
    pub(super) pooled: bool,
    /// The shards whose scripts the link calls, each with its slot.
    pub(super) shards: Vec<(u16, ShardKeys)>,
    pub(super) slice_us: u64,
    /// Whether scripts are loaded and the version is checked.
    pub(super) scripts: bool,
    pub(super) cluster: bool,
    /// Knows whether connections are in doubt.
    pub(super) target: Target,
}

impl Wiring {
    /// The primaries of a cluster fail independently: a timeout of one says nothing about the
    /// others.
    pub(super) fn doubts(&self) -> u64 {
        if self.cluster { 0 } else { self.target.doubts() }
    }
}

/// One server.
#[derive(Debug)]
pub(super) struct Node {
    setup: Arc<Setup>,
    latency: Arc<Latency>,
    connections: Connections,
}

/// The connections to one server.
#[derive(Debug)]
enum Connections {
    /// One connection that all calls share: commands and answers follow each other.
    Shared { current: Arc<RwLock<Option<Connected>>>, connecting: Arc<tokio::sync::Mutex<()>> },
    /// Several connections, each lent to one call at a time.
    Pooled(Pooled),
}

/// Makes connections to one server.
#[derive(Debug)]
pub(super) struct Setup {
    client: Client,
    name: String,
    /// The slots of the link's shards on this server.
    slots: Vec<u16>,
    pub(super) wiring: Arc<Wiring>,
}

/// A connection that is ready for use.
#[derive(Debug, Clone)]
pub(super) struct Connected {
    number: u64,
    pub(super) connection: MultiplexedConnection,
    run: Arc<str>,
    /// Slots of shards that could not be recovered because they are being migrated. Their scripts
    /// must not run yet; recovery is retried.
    barred: Vec<u16>,
    tried: Instant,
    /// Number of timeouts before the connection was made.
    doubts: u64,
    silence: Arc<Silence>,
}

impl Connected {
    /// Number of timeouts before the connection was made.
    pub(super) fn doubts(&self) -> u64 {
        self.doubts
    }

    /// The run of the server; empty if neither scripts nor replicas need it.
    pub(super) fn run(&self) -> Arc<str> {
        Arc::clone(&self.run)
    }

    /// Whether there was no timeout since the connection was made.
    pub(super) fn is_undoubted(&self, wiring: &Wiring) -> bool {
        self.doubts == wiring.doubts()
    }

    /// Whether no slot is being migrated, or the last recovery attempt is recent.
    pub(super) fn is_settled(&self) -> bool {
        self.barred.is_empty() || self.tried.elapsed() < LIFT
    }

    /// Whether commands for a shard in `slot` are not allowed yet.
    pub(super) fn bars(&self, slot: u16) -> bool {
        self.barred.contains(&slot)
    }
}

impl Node {
    /// A server that holds `slots` of the link's shards. Connects at the first call.
    pub(super) fn new(client: Client, slots: Vec<u16>, wiring: Arc<Wiring>) -> Self {
        let setup = Arc::new(Setup { name: address(&client), client, slots, wiring });
        let connections = if setup.wiring.pooled {
            Connections::Pooled(Pooled::new(Arc::clone(&setup)))
        } else {
            let (current, connecting) = <_>::default();
            Connections::Shared { current, connecting }
        };
        Self { setup, latency: Arc::new(Latency::new()), connections }
    }

    /// The same server with the given `slots`. A shared connection is kept unless there are new
    /// slots, for which `recover` must run first. A pool is replaced, because it would keep making
    /// connections for the old slots.
    pub(super) fn holding(self: &Arc<Self>, slots: Vec<u16>) -> Arc<Self> {
        let Setup { client, slots: old, wiring, .. } = &*self.setup;
        if slots == *old {
            return Arc::clone(self);
        }
        let known = slots.iter().all(|slot| old.contains(slot));
        let mut node = Self::new(client.clone(), slots, Arc::clone(wiring));
        node.latency = Arc::clone(&self.latency);
        if known
            && let Connections::Shared { current: kept, .. } = &self.connections
            && let Connections::Shared { current, .. } = &mut node.connections
        {
            *current = Arc::new(RwLock::new(read(kept)));
        }
        Arc::new(node)
    }

    /// Host and port, or a path.
    pub(super) fn name(&self) -> &str {
        &self.setup.name
    }

    pub(super) fn client(&self) -> &Client {
        &self.setup.client
    }

    /// How long calls take.
    pub(super) fn latency(&self) -> &Latency {
        &self.latency
    }

    /// Sends commands in one write. A timeout puts all earlier connections in doubt. After a
    /// lasting write, waits for replicas if the target asks for that.
    pub(super) async fn send(
        &self,
        connection: Lent<'_>,
        pipe: &Pipeline,
        lasting: bool,
    ) -> Result<Vec<Value>, RedisError> {
        let wiring = &self.setup.wiring;
        let begun = Instant::now();
        let (sent, doubts, run) = match connection {
            Lent::Shared(Connected { number, mut connection, doubts, run, silence, .. }) => {
                let waiting = self.wait(number, silence);
                let sending = connection.send_packed_commands(pipe, 0, pipe.len());
                let sent = self.unless_outlived(sending, doubts).await;
                waiting.end(sent.is_ok());
                (sent, doubts, run)
            }
            // It goes back to the pool before the wait.
            Lent::Own(mut own) => (own.send(pipe).await, own.doubts(), own.run()),
        };
        let values = sent.map_err(|source| {
            // A connection that is already in doubt gives no new information.
            if source.is_timeout() && doubts == wiring.doubts() && !wiring.cluster {
                wiring.target.doubt();
            }
            RedisError::Unknown { target: self.setup.name(), source }
        })?;
        self.latency.observe(begun.elapsed());
        let is_done = || values.iter().any(|value| server_error(value).is_none());
        if let Some(replicas) = wiring.target.replicas().filter(|_| lasting && is_done()) {
            let slot = pipe.cmd_iter().find_map(|command| match place(command) {
                Destination::Slot(slot) if wiring.cluster => Some(slot),
                _ => None,
            });
            // Boxed, since it is rarely needed.
            Box::pin(replicas.confirm(&self.setup, &run, slot)).await?;
        }
        Ok(values)
    }

    /// Waits until there were more timeouts than these.
    pub(super) async fn doubted_since(&self, doubts: u64) {
        self.setup.wiring.target.doubted_since(doubts).await;
    }

    /// The connection for a call; connects if there is none. From time to time, retries the
    /// recovery of shards that are being migrated.
    pub(super) async fn connected(&self) -> Result<Lent<'_>, RedisError> {
        let (current, connecting) = match &self.connections {
            Connections::Shared { current, connecting } => (current, connecting),
            Connections::Pooled(pooled) => return pooled.take().await.map(Lent::Own),
        };
        let wiring = &self.setup.wiring;
        let undoubted = || read(current).filter(|now| now.is_undoubted(wiring));
        let usable = || undoubted().filter(Connected::is_settled);
        if let Some(current) = usable() {
            return Ok(Lent::Shared(current));
        }
        let one_at_a_time = Arc::clone(connecting).lock_owned().await;
        if let Some(current) = usable() {
            return Ok(Lent::Shared(current));
        }
        if let Some(mut barring) = undoubted() {
            let lifted = self.setup.lift(&mut barring).await;
            lifted.inspect_err(|_| self.give_up(barring.number))?;
            *current.write().unwrap_or_else(PoisonError::into_inner) = Some(barring.clone());
            return Ok(Lent::Shared(barring));
        }
        // It goes on without a caller: if a server is slow and all callers give up early, none of them
        // would ever get a connection.
        let (setup, current) = (Arc::clone(&self.setup), Arc::clone(current));
        #[expect(clippy::disallowed_methods, reason = "a stop need not wait for a connection")]
        let connecting = tokio::spawn(async move {
            let connected = setup.connect().await?;
            *current.write().unwrap_or_else(PoisonError::into_inner) = Some(connected.clone());
            drop(one_at_a_time);
            Ok(connected)
        });
        let connected = connecting.await.unwrap_or_else(|_| {
            // The runtime stops.
            Err(self.setup.connect_error(super::timed_out()))
        });
        connected.map(Lent::Shared)
    }

    /// The number of the shared connection, if there is one. `None` for a pool: two calls use two
    /// connections, so no number could show that Redis did not restart between them.
    pub(super) fn connection(&self) -> Option<u64> {
        let Connections::Shared { current, .. } = &self.connections else { return None };
        let current = current.read().unwrap_or_else(PoisonError::into_inner);
        let current = current.as_ref().filter(|now| now.is_undoubted(&self.setup.wiring));
        current.map(|current| current.number)
    }

    /// Closes the connections; the next call makes a new one.
    pub(super) fn close(&self) {
        match &self.connections {
            Connections::Shared { current, .. } => {
                *current.write().unwrap_or_else(PoisonError::into_inner) = None;
            }
            Connections::Pooled(pooled) => pooled.close(),
        }
    }

    /// Closes this connection for further calls.
    pub(super) fn give_up(&self, number: u64) {
        let Connections::Shared { current, .. } = &self.connections else { return };
        let mut current = current.write().unwrap_or_else(PoisonError::into_inner);
        if current.as_ref().is_some_and(|current| current.number == number) {
            *current = None;
        }
    }
}

fn read(current: &RwLock<Option<Connected>>) -> Option<Connected> {
    current.read().unwrap_or_else(PoisonError::into_inner).clone()
}

impl Setup {
    /// Host and port, or a path. Behind sentinels also their service.
    pub(super) fn name(&self) -> String {
        let target = &self.wiring.target;
        if target.is_sentinel() { target.to_string() } else { self.name.clone() }
    }

    /// A name that never changes.
    pub(super) fn key(&self) -> &str {
        &self.name
    }

    /// Connects, behind sentinels to the current primary.
    pub(super) async fn open(
        &self,
        config: &AsyncConnectionConfig,
    ) -> Result<MultiplexedConnection, RedisError> {
        let client = self.wiring.target.primary(&self.client).await?;
        let connecting = client.get_multiplexed_async_connection_with_config(config);
        let mut connection = connecting.await.map_err(|source| self.connect_error(source))?;
        if self.wiring.target.is_sentinel() {
            let mut info = Pipeline::with_capacity(1);
            info.cmd("INFO").arg("replication");
            let values = self.handshake(&mut connection, &info).await?;
            if let Some(error) = values.iter().find_map(server_error) {
                return Err(self.refused("INFO", error));
            }
            let info = text(values)?;
            let role = field(&info, "role");
            if role != "master" {
                let message = format!(
                    "READONLY the sentinels name it as the primary, but its role is {role:?}; if that does not end with a failover, check `sentinel monitor`"
                );
                let (target, command) = (self.name(), "INFO");
                return Err(RedisError::Refused { target, command, message });
            }
        }
        Ok(connection)
    }

    /// Makes a connection that is ready for use.
    pub(super) async fn connect(&self) -> Result<Connected, RedisError> {
        let wiring = &self.wiring;
        let doubts = wiring.doubts();
        let connection = self.open(&wiring.config).await?;
        let mut connected = Connected {
            number: CONNECTIONS.fetch_add(1, Ordering::Relaxed),
            connection,
            run: "".into(),
            barred: Vec::new(),
            tried: Instant::now(),
            doubts,
            silence: Arc::default(),
        };
        if wiring.scripts {
            connected.run = self.load_scripts(&mut connected.connection).await?.into();
            self.recover(&mut connected, &self.slots).await?;
        } else if wiring.target.replicas().is_some() {
            connected.run = run_of(self, &mut connected.connection).await?;
        }
        Ok(connected)
    }

    /// Checks the version and loads every script. Returns the run id.
    async fn load_scripts(
        &self,
        connection: &mut MultiplexedConnection,
    ) -> Result<String, RedisError> {
        let mut pipe = Pipeline::new();
        pipe.cmd("INFO").arg("server");
        for script in scripts::all() {
            pipe.cmd("SCRIPT").arg("LOAD").arg(&script.code);
        }
        let values = self.handshake(connection, &pipe).await?;
        if let Some(error) = values.iter().find_map(server_error) {
            return Err(self.refused("SCRIPT LOAD", error));
        }
        let info = text(values)?;
        let version = field(&info, "redis_version");
        let mut numbers = version.split('.').map(|part| part.parse().unwrap_or(0));
        if (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < MIN_VERSION {
            let (target, version) = (self.name(), version.to_owned());
            return Err(RedisError::Version { target, version });
        }
        Ok(run_id(&info).to_owned())
    }

    /// Retries the recovery of shards that were being migrated. After an error the connection must
    /// not be used.
    pub(super) async fn lift(&self, connected: &mut Connected) -> Result<(), RedisError> {
        let slots = std::mem::take(&mut connected.barred);
        connected.tried = Instant::now();
        self.recover(connected, &slots).await
    }

    /// Runs `recover` for the shards in `slots`; bars those that are being migrated.
    async fn recover(&self, connected: &mut Connected, slots: &[u16]) -> Result<(), RedisError> {
        let wiring = &self.wiring;
        let here = |(slot, _): &&(u16, ShardKeys)| slots.contains(slot);
        let shards: Vec<&(u16, ShardKeys)> = if wiring.cluster {
            wiring.shards.iter().filter(here).collect()
        } else {
            wiring.shards.iter().collect()
        };
        let mut pipe = Pipeline::with_capacity(shards.len());
        for (_, keys) in &shards {
            let call = Recover { keys, run: &connected.run, slice_us: wiring.slice_us };
            pipe.add_command(call.command());
        }
        let mut revoked = 0;
        let mut values = self.handshake(&mut connected.connection, &pipe).await?;
        if values.iter().any(is_noscript) {
            // A SCRIPT FLUSH in between. A repeated recovery does nothing.
            self.load_scripts(&mut connected.connection).await?;
            values = self.handshake(&mut connected.connection, &pipe).await?;
        }
        for ((slot, _), value) in shards.into_iter().zip(values) {
            match value {
                Value::ServerError(error) if wiring.cluster && is_move(&error) => {
                    connected.barred.push(*slot);
                }
                Value::ServerError(error) => return Err(self.refused(Recover::NAME, &error)),
                value => {
                    let reply = Recover::reply(value);
                    let reply = reply.map_err(|source| misread(Recover::NAME, source))?;
                    revoked += reply.unwrap_or(0);
                }
            }
        }
        if revoked > 0 {
            info!(
                redis = self.name(),
                leases = revoked,
                "Redis restarted or failed over: Fairlane revoked the leases of the earlier run, and handles their slices again"
            );
        }
        Ok(())
    }

    pub(super) async fn handshake(
        &self,
        connection: &mut MultiplexedConnection,
        pipe: &Pipeline,
    ) -> Result<Vec<Value>, RedisError> {
        if pipe.is_empty() {
            return Ok(Vec::new());
        }
        let sent = connection.send_packed_commands(pipe, 0, pipe.len()).await;
        sent.map_err(|source| self.connect_error(source))
    }

    fn connect_error(&self, source: redis::RedisError) -> RedisError {
        connect_error(self.name(), &self.client, source)
    }

    pub(super) fn refused(&self, command: &'static str, error: &ServerError) -> RedisError {
        refused(&self.name(), command, error)
    }
}

/// The first of these replies.
pub(super) fn text(values: Vec<Value>) -> Result<String, RedisError> {
    let text = Reply::new(Value::Array(values)).and_then(|mut reply| reply.text());
    text.map_err(|source| misread("INFO", source))
}

/// A field in the reply to `INFO`; empty if it is missing.
fn field<'a>(info: &'a str, name: &str) -> &'a str {
    let found = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    found.unwrap_or_default().trim()
}

/// The id of the run in the reply to `INFO server`.
pub(super) fn run_id(info: &str) -> &str {
    field(info, "run_id")
}

/// A refusal by the server `target`. Of a discarded transaction, it has the reason.
pub(super) fn refused(target: &str, command: &'static str, error: &ServerError) -> RedisError {
    let said = format!("{} {}", error.code(), error.details().unwrap_or_default());
    let reason = said.strip_prefix("EXECABORT Transaction discarded because of: ");
    let message = reason.unwrap_or(&said).to_owned();
    RedisError::Refused { target: target.to_owned(), command, message }
}

pub(super) fn misread(command: &'static str, source: ReplyError) -> RedisError {
    RedisError::Reply { command, source }
}

pub(super) fn server_error(value: &Value) -> Option<&ServerError> {
    match value {
        Value::ServerError(error) => Some(error),
        _ => None,
    }
}

/// Whether the slot moved, is being migrated, or has no primary: the command did not run.
pub(super) fn is_move(error: &ServerError) -> bool {
    matches!(error.code(), "MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN")
}
