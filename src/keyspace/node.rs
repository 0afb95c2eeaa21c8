//! One server, and one multiplexed connection to it, made anew when it breaks.
//!
//! Making a connection: connect → `INFO` (version, run id) → load all scripts → `recover` for every
//! pipeline and shard of the link that lives there. Only then is it used. A call that fails because
//! the connection broke or timed out has an *unknown* outcome; it is not repeated here.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Pipeline, ServerError, Value};
use tokio::time::Instant;
use tracing::info;

use super::error::StoreError;
use super::keys::ShardKeys;
use super::reply::{Reply, ReplyError};
use super::scripts::{self, Call, Recover};
use super::target::{Target, address, connect_error};

/// Oldest server that has every command the scripts use.
const MIN_VERSION: (u32, u32) = (7, 0);
/// A shard whose slot is on the move is tried again this often.
const LIFT: Duration = Duration::from_millis(100);

/// How many connections this process made: no two have the same number.
static CONNECTIONS: AtomicU64 = AtomicU64::new(0);

/// What all nodes of a link have in common.
#[derive(Debug)]
pub(super) struct Wiring {
    pub(super) config: AsyncConnectionConfig,
    /// Shards whose scripts the link calls, each with its slot.
    pub(super) shards: Vec<(u16, ShardKeys)>,
    pub(super) slice_us: u64,
    /// Whether scripts are loaded and the version is checked.
    pub(super) scripts: bool,
    pub(super) cluster: bool,
    /// Knows whether connections are in doubt.
    pub(super) target: Target,
}

impl Wiring {
    /// The primaries of a cluster share no fate: a doubt of one would concern none of the others.
    fn doubts(&self) -> u64 {
        if self.cluster { 0 } else { self.target.doubts() }
    }
}

/// One server.
#[derive(Debug)]
pub(super) struct Node {
    client: Client,
    name: String,
    /// The slots of those of the link's shards that live here.
    slots: Vec<u16>,
    current: RwLock<Option<Connected>>,
    connecting: tokio::sync::Mutex<()>,
}

/// A connection that may be used.
#[derive(Debug, Clone)]
pub(super) struct Connected {
    number: u64,
    connection: MultiplexedConnection,
    run: Arc<str>,
    /// Slots of shards that could not be recovered, since they are on the move: no script of
    /// theirs may run. Tried again.
    barred: Vec<u16>,
    tried: Instant,
    /// How often answers did not come in time before it was made.
    doubts: u64,
}

impl Connected {
    /// Whether a shard in `slot` may not be spoken to yet.
    pub(super) fn bars(&self, slot: u16) -> bool {
        self.barred.contains(&slot)
    }
}

impl Node {
    /// A server that holds `slots` of the link's shards. Connects at the first call.
    pub(super) fn new(client: Client, slots: Vec<u16>) -> Self {
        Self {
            name: address(&client),
            client,
            slots,
            current: RwLock::new(None),
            connecting: tokio::sync::Mutex::new(()),
        }
    }

    /// The same server once it holds `slots`. Its connection is kept unless there are new ones
    /// among them: for those `recover` has to run first.
    pub(super) fn holding(self: &Arc<Self>, slots: Vec<u16>) -> Arc<Self> {
        if slots == self.slots {
            return Arc::clone(self);
        }
        let known = slots.iter().all(|slot| self.slots.contains(slot));
        let node = Self::new(self.client.clone(), slots);
        if known && let Some(current) = self.current() {
            *node.current.write().unwrap_or_else(PoisonError::into_inner) = Some(current);
        }
        Arc::new(node)
    }

    /// Where it is: host and port, or a path.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// Sends commands in one write.
    pub(super) async fn send(
        &self,
        mut connected: Connected,
        pipe: &Pipeline,
    ) -> Result<Vec<Value>, StoreError> {
        match connected.connection.send_packed_commands(pipe, 0, pipe.len()).await {
            Ok(values) => Ok(values),
            Err(source) => {
                self.give_up(connected.number);
                Err(StoreError::Unknown { target: self.name.clone(), source })
            }
        }
    }

    /// The connection, made if there is none. What is on the move is tried again now and then.
    pub(super) async fn connected(&self, wiring: &Wiring) -> Result<Connected, StoreError> {
        if let Some(current) = self.usable(wiring) {
            return Ok(current);
        }
        let _one_at_a_time = self.connecting.lock().await;
        if let Some(current) = self.usable(wiring) {
            return Ok(current);
        }
        let current = match self.undoubted(wiring) {
            Some(barring) => self.lift(wiring, barring).await?,
            None => self.connect(wiring).await?,
        };
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(current.clone());
        Ok(current)
    }

    fn usable(&self, wiring: &Wiring) -> Option<Connected> {
        self.undoubted(wiring).filter(|now| now.barred.is_empty() || now.tried.elapsed() < LIFT)
    }

    fn undoubted(&self, wiring: &Wiring) -> Option<Connected> {
        self.current().filter(|now| now.doubts == wiring.doubts())
    }

    fn current(&self) -> Option<Connected> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The number of the connection in use, if there is one.
    pub(super) fn connection(&self, wiring: &Wiring) -> Option<u64> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        let current = current.as_ref().filter(|now| now.doubts == wiring.doubts());
        current.map(|current| current.number)
    }

    /// Gives the connection up; the next call makes a new one.
    pub(super) fn close(&self) {
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn give_up(&self, number: u64) {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        if current.as_ref().is_some_and(|current| current.number == number) {
            *current = None;
        }
    }

    async fn connect(&self, wiring: &Wiring) -> Result<Connected, StoreError> {
        let doubts = wiring.doubts();
        let connecting = self.client.get_multiplexed_async_connection_with_config(&wiring.config);
        let connection = connecting.await.map_err(|source| self.connect_error(source))?;
        let mut connected = Connected {
            number: CONNECTIONS.fetch_add(1, Ordering::Relaxed),
            connection,
            run: "".into(),
            barred: Vec::new(),
            tried: Instant::now(),
            doubts,
        };
        if wiring.scripts {
            connected.run = self.load_scripts(&mut connected.connection).await?.into();
            self.recover(wiring, &mut connected, &self.slots).await?;
        }
        Ok(connected)
    }

    /// Checks the version and loads every script. Answers the run id.
    async fn load_scripts(
        &self,
        connection: &mut MultiplexedConnection,
    ) -> Result<String, StoreError> {
        let mut pipe = Pipeline::new();
        pipe.cmd("INFO").arg("server");
        for script in scripts::all() {
            pipe.cmd("SCRIPT").arg("LOAD").arg(&script.code);
        }
        let values = self.handshake(connection, &pipe).await?;
        if let Some(error) = values.iter().find_map(server_error) {
            return Err(self.refused("SCRIPT LOAD", error));
        }
        let info = Reply::new(Value::Array(values)).and_then(|mut reply| reply.text());
        let info = info.map_err(|source| misread("INFO", source))?;
        let field = |name: &str| {
            info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap_or("")
        };
        let version = field("redis_version");
        let mut numbers = version.split('.').map(|part| part.parse().unwrap_or(0));
        if (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < MIN_VERSION {
            let (target, version) = (self.name.clone(), version.to_owned());
            return Err(StoreError::Version { target, version });
        }
        Ok(field("run_id").to_owned())
    }

    /// Tries to recover again what is on the move.
    async fn lift(&self, wiring: &Wiring, barring: Connected) -> Result<Connected, StoreError> {
        let slots = barring.barred.clone();
        let mut connected = Connected { barred: Vec::new(), tried: Instant::now(), ..barring };
        let recovered = self.recover(wiring, &mut connected, &slots).await;
        recovered.inspect_err(|_| self.give_up(connected.number))?;
        Ok(connected)
    }

    /// Runs `recover` for the shards in `slots`; bars those that are on the move.
    async fn recover(
        &self,
        wiring: &Wiring,
        connected: &mut Connected,
        slots: &[u16],
    ) -> Result<(), StoreError> {
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
        let values = self.handshake(&mut connected.connection, &pipe).await?;
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
                redis = self.name,
                leases = revoked,
                "Redis is another run than before: its leases were revoked"
            );
        }
        Ok(())
    }

    async fn handshake(
        &self,
        connection: &mut MultiplexedConnection,
        pipe: &Pipeline,
    ) -> Result<Vec<Value>, StoreError> {
        if pipe.is_empty() {
            return Ok(Vec::new());
        }
        let sent = connection.send_packed_commands(pipe, 0, pipe.len()).await;
        sent.map_err(|source| self.connect_error(source))
    }

    fn connect_error(&self, source: redis::RedisError) -> StoreError {
        connect_error(self.name.clone(), &self.client, source)
    }

    fn refused(&self, command: &'static str, error: &ServerError) -> StoreError {
        refused(&self.name, command, error)
    }
}

/// A refusal by the server `target`.
pub(super) fn refused(target: &str, command: &'static str, error: &ServerError) -> StoreError {
    let message = format!("{} {}", error.code(), error.details().unwrap_or_default());
    StoreError::Refused { target: target.to_owned(), command, message }
}

pub(super) fn misread(command: &'static str, source: ReplyError) -> StoreError {
    StoreError::Reply { command, source }
}

pub(super) fn server_error(value: &Value) -> Option<&ServerError> {
    match value {
        Value::ServerError(error) => Some(error),
        _ => None,
    }
}

/// Whether the slot is elsewhere or under way, or nobody knows: the command did not run.
pub(super) fn is_move(error: &ServerError) -> bool {
    matches!(error.code(), "MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN")
}
