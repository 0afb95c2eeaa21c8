//! One server, and the connections to it: one that all calls share, made anew when it breaks, or
//! those of a pool ([`super::pooled`]), of which a call has one to itself.
//!
//! Making a connection, of either kind: connect → `INFO` (version, run id) → load all scripts →
//! `recover` for every pipeline and shard of the link that lives there. Only then is it used. A call
//! that fails because the connection broke or timed out has an *unknown* outcome; it is not repeated
//! here.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Pipeline, RedisResult, ServerError, Value};
use tokio::time::Instant;
use tracing::info;

use super::error::RedisError;
use super::keys::ShardKeys;
use super::pooled::{Lent, Pooled};
use super::reply::{Reply, ReplyError};
use super::scripts::{self, Call, Recover};
use super::target::{Target, address, connect_error};

/// Oldest server that has every command the scripts use.
const MIN_VERSION: (u32, u32) = (7, 0);
/// A shard whose slot is on the move is tried again this often.
const LIFT: Duration = Duration::from_millis(100);
/// The minimum time that a call on a connection in doubt still has when a newer connection answers.
/// The server answers the older call first, unless its answer is lost.
const OUTLIVED: Duration = Duration::from_millis(250);

/// How many connections this process made: no two have the same number.
static CONNECTIONS: AtomicU64 = AtomicU64::new(0);

/// What all nodes of a link have in common.
#[derive(Debug)]
pub(super) struct Wiring {
    pub(super) config: AsyncConnectionConfig,
    /// How long a call waits for its answer, and before that for a connection of a pool.
    pub(super) response_timeout: Duration,
    /// Whether each call has a connection to itself, out of a pool.
    pub(super) pooled: bool,
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
    pub(super) fn doubts(&self) -> u64 {
        if self.cluster { 0 } else { self.target.doubts() }
    }
}

/// One server.
#[derive(Debug)]
pub(super) struct Node {
    setup: Arc<Setup>,
    connections: Connections,
}

/// The connections to one server.
#[derive(Debug)]
enum Connections {
    /// One, which all calls share: their commands and answers follow each other on it.
    Shared { current: RwLock<Option<Connected>>, connecting: tokio::sync::Mutex<()> },
    /// Several, each lent to one call at a time.
    Pooled(Pooled),
}

/// How connections to one server are made.
#[derive(Debug)]
pub(super) struct Setup {
    client: Client,
    name: String,
    /// The slots of those of the link's shards that live here.
    slots: Vec<u16>,
    pub(super) wiring: Arc<Wiring>,
}

/// A connection that may be used.
#[derive(Debug, Clone)]
pub(super) struct Connected {
    number: u64,
    pub(super) connection: MultiplexedConnection,
    run: Arc<str>,
    /// Slots of shards that could not be recovered, since they are on the move: no script of
    /// theirs may run. Tried again.
    barred: Vec<u16>,
    tried: Instant,
    /// How often answers did not come in time before it was made.
    doubts: u64,
}

impl Connected {
    /// How often answers did not come in time before it was made.
    pub(super) fn doubts(&self) -> u64 {
        self.doubts
    }

    /// Whether no answer was late since before it was made.
    pub(super) fn is_undoubted(&self, wiring: &Wiring) -> bool {
        self.doubts == wiring.doubts()
    }

    /// Whether nothing is on the move there, or was still a moment ago.
    pub(super) fn is_settled(&self) -> bool {
        self.barred.is_empty() || self.tried.elapsed() < LIFT
    }

    /// Whether a shard in `slot` may not be spoken to yet.
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
            let connecting = tokio::sync::Mutex::new(());
            Connections::Shared { current: RwLock::new(None), connecting }
        };
        Self { setup, connections }
    }

    /// The same server once it holds `slots`. A shared connection is kept unless there are new ones
    /// among them: for those `recover` has to run first. A pool is made anew: it would go on making
    /// connections for the old ones.
    pub(super) fn holding(self: &Arc<Self>, slots: Vec<u16>) -> Arc<Self> {
        let Setup { client, slots: old, wiring, .. } = &*self.setup;
        if slots == *old {
            return Arc::clone(self);
        }
        let known = slots.iter().all(|slot| old.contains(slot));
        let mut node = Self::new(client.clone(), slots, Arc::clone(wiring));
        if known
            && let Connections::Shared { current: kept, .. } = &self.connections
            && let Connections::Shared { current, .. } = &mut node.connections
        {
            *current = RwLock::new(read(kept));
        }
        Arc::new(node)
    }

    /// Where it is: host and port, or a path.
    pub(super) fn name(&self) -> &str {
        &self.setup.name
    }

    pub(super) fn client(&self) -> &Client {
        &self.setup.client
    }

    /// Sends commands in one write. A timeout puts all connections in doubt that were made before.
    pub(super) async fn send(
        &self,
        connection: Lent<'_>,
        pipe: &Pipeline,
    ) -> Result<Vec<Value>, RedisError> {
        let wiring = &self.setup.wiring;
        let (sent, doubts) = match connection {
            Lent::Shared(Connected { number, mut connection, doubts, .. }) => {
                let sending = connection.send_packed_commands(pipe, 0, pipe.len());
                let sent = self.unless_outlived(sending, doubts).await;
                (sent.inspect_err(|_| self.give_up(number)), doubts)
            }
            Lent::Own(mut own) => (own.send(pipe).await, own.doubts()),
        };
        sent.map_err(|source| {
            // Of a connection that is in doubt already it is no news.
            if source.is_timeout() && doubts == wiring.doubts() && !wiring.cluster {
                wiring.target.doubt();
            }
            RedisError::Unknown { target: self.setup.name.clone(), source }
        })
    }

    /// Waits for the answer to a call on a connection made after `doubts` timeouts. When the
    /// connection is put in doubt, a new one shows whether the server answers. If it does, and the
    /// answer does not come soon, the old connection is dead: the call ends as after a timeout.
    async fn unless_outlived<T>(
        &self,
        sending: impl Future<Output = RedisResult<T>>,
        doubts: u64,
    ) -> RedisResult<T> {
        let outlived = async {
            self.setup.wiring.target.doubted_since(doubts).await;
            let started = Instant::now();
            match self.connected().await {
                // A server or network that is slow is given as long again.
                Ok(_) => tokio::time::sleep(started.elapsed().max(OUTLIVED)).await,
                // The call has its own timeout.
                Err(_) => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            sent = sending => sent,
            () = outlived => {
                let text = "a newer connection answers, and this one does not";
                Err(std::io::Error::new(std::io::ErrorKind::TimedOut, text).into())
            }
        }
    }

    /// The connection that a call is to use, made if there is none. What is on the move is tried
    /// again now and then.
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
        let _one_at_a_time = connecting.lock().await;
        if let Some(current) = usable() {
            return Ok(Lent::Shared(current));
        }
        let connected = match undoubted() {
            Some(mut barring) => {
                let lifted = self.setup.lift(&mut barring).await;
                lifted.inspect_err(|_| self.give_up(barring.number))?;
                barring
            }
            None => self.setup.connect().await?,
        };
        *current.write().unwrap_or_else(PoisonError::into_inner) = Some(connected.clone());
        Ok(Lent::Shared(connected))
    }

    /// The number of the connection that all calls share, if there is one. There is none in a pool:
    /// two calls take two connections, so no number says that Redis was not met as another run
    /// between them.
    pub(super) fn connection(&self) -> Option<u64> {
        let Connections::Shared { current, .. } = &self.connections else { return None };
        let current = current.read().unwrap_or_else(PoisonError::into_inner);
        let current = current.as_ref().filter(|now| now.is_undoubted(&self.setup.wiring));
        current.map(|current| current.number)
    }

    /// Gives its connections up; the next call makes a new one.
    pub(super) fn close(&self) {
        match &self.connections {
            Connections::Shared { current, .. } => {
                *current.write().unwrap_or_else(PoisonError::into_inner) = None;
            }
            Connections::Pooled(pooled) => pooled.close(),
        }
    }

    fn give_up(&self, number: u64) {
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
    /// Where the server is: host and port, or a path.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Makes a connection that may be used.
    pub(super) async fn connect(&self) -> Result<Connected, RedisError> {
        let wiring = &self.wiring;
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
            self.recover(&mut connected, &self.slots).await?;
        }
        Ok(connected)
    }

    /// Checks the version and loads every script. Answers the run id.
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
        let info = Reply::new(Value::Array(values)).and_then(|mut reply| reply.text());
        let info = info.map_err(|source| misread("INFO", source))?;
        let field = |name: &str| {
            info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap_or("")
        };
        let version = field("redis_version");
        let mut numbers = version.split('.').map(|part| part.parse().unwrap_or(0));
        if (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < MIN_VERSION {
            let (target, version) = (self.name.clone(), version.to_owned());
            return Err(RedisError::Version { target, version });
        }
        Ok(field("run_id").to_owned())
    }

    /// Tries to recover again what is on the move. After an error the connection is not to be used.
    pub(super) async fn lift(&self, connected: &mut Connected) -> Result<(), RedisError> {
        let slots = std::mem::take(&mut connected.barred);
        connected.tried = Instant::now();
        self.recover(connected, &slots).await
    }

    /// Runs `recover` for the shards in `slots`; bars those that are on the move.
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
    ) -> Result<Vec<Value>, RedisError> {
        if pipe.is_empty() {
            return Ok(Vec::new());
        }
        let sent = connection.send_packed_commands(pipe, 0, pipe.len()).await;
        sent.map_err(|source| self.connect_error(source))
    }

    fn connect_error(&self, source: redis::RedisError) -> RedisError {
        connect_error(self.name.clone(), &self.client, source)
    }

    fn refused(&self, command: &'static str, error: &ServerError) -> RedisError {
        refused(&self.name, command, error)
    }
}

/// A refusal by the server `target`.
pub(super) fn refused(target: &str, command: &'static str, error: &ServerError) -> RedisError {
    let message = format!("{} {}", error.code(), error.details().unwrap_or_default());
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

/// Whether the slot is elsewhere or under way, or nobody knows: the command did not run.
pub(super) fn is_move(error: &ServerError) -> bool {
    matches!(error.code(), "MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN")
}
