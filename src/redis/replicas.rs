//! Replicas: waits until some of them have a write (`redis.wait_replicas`).
//!
//! Redis answers a write before any replica has it. With `redis.wait_replicas`, the results of
//! lasting writes ([`super::scripts::Call::is_lasting`], published events) are used only once that
//! many replicas have confirmed them. `WAIT` on the connection of the write would not do:
//!
//! * It would hold up all calls behind it on a shared connection, even reads and renewals of
//!   leases.
//! * A repeated call that changes nothing would be confirmed, although the first one, on another
//!   connection, never was.
//!
//! Therefore each server has one connection for confirmations. Once a write has its answer, a round
//! runs there: a small write of its own (the expiry of a key), then `WAIT`. The small write is
//! behind all earlier ones in the replication stream, so its confirmation covers them. One round at
//! a time runs per server. All writes that are answered meanwhile share the next one, so the cost
//! is two commands per round, however many events, calls or connections there are.
//!
//! Invariant: a write is confirmed only by the run of the server that answered it. After a failover
//! the run id differs, and the write counts as not confirmed.
//!
//! `WAIT` does not make Redis consistent. A write without confirmation stays, and a failover to a
//! replica that has not confirmed loses confirmed writes.

use std::collections::HashMap;
use std::num::NonZeroU8;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Pipeline, Value};

use super::error::RedisError;
use super::keys;
use super::node::{Setup, misread, run_id, server_error, text};
use super::reply::ReplyError;
use super::slot::slot_of;
use super::target::CONNECT_TIMEOUT;
use crate::clock::millis;
use crate::metrics;

/// Time to live of the key that each round writes.
const KEY_TTL: Duration = Duration::from_secs(3_600);

/// How many replicas must have a write before its result is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaWait {
    /// Number of replicas.
    pub replicas: NonZeroU8,
    /// How long to wait for them. After it the outcome counts as unknown.
    pub timeout: Duration,
}

/// Why it is not known that the replicas have a write.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Unconfirmed {
    /// Too few have confirmed it in time.
    #[error("{confirmed} did within {within:?}; see INFO replication, and redis.wait_replicas")]
    Few {
        /// The number of those that have.
        confirmed: u64,
        /// The time.
        within: Duration,
    },
    /// Another server, or another run of it, took the place of the one that answered.
    #[error("the server was replaced meanwhile")]
    Replaced,
    /// They could not be asked.
    #[error("they could not be asked: {0}")]
    NotAsked(#[source] Box<RedisError>),
}

/// The rounds of confirmation on each server.
#[derive(Debug)]
pub(super) struct Replicas {
    wait: ReplicaWait,
    servers: Mutex<HashMap<String, Arc<Rounds>>>,
}

/// The rounds on one server.
#[derive(Debug, Default)]
struct Rounds {
    /// Number of rounds that have started.
    started: AtomicU64,
    /// Held during a round. Waiting calls get it in their order.
    state: tokio::sync::Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Taken during a round, so that it is closed if the round is cancelled.
    connection: Option<Confirming>,
    /// The key that is written. Its slot is on the server.
    key: Option<String>,
    /// The last round with its result: the run of the server.
    last: Option<(u64, Result<Arc<str>, Unconfirmed>)>,
}

/// The connection for confirmations, and the run of its server.
#[derive(Debug)]
struct Confirming {
    connection: MultiplexedConnection,
    run: Arc<str>,
}

impl Replicas {
    pub(super) fn new(wait: ReplicaWait) -> Self {
        Self { wait, servers: Mutex::default() }
    }

    /// The number of replicas that must confirm.
    pub(super) fn wanted(&self) -> u8 {
        self.wait.replicas.get()
    }

    /// Waits until enough replicas have every write that the server of `setup`, in its run `run`,
    /// has answered. `slot`: one that the server holds, if it is a node of a cluster.
    ///
    /// # Errors
    /// [`RedisError::Unreplicated`]: the writes are done, and fewer replicas may have them.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(super) async fn confirm(
        &self,
        setup: &Setup,
        run: &Arc<str>,
        slot: Option<u16>,
    ) -> Result<(), RedisError> {
        let rounds = {
            let mut servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(servers.entry(setup.key().to_owned()).or_default())
        };
        // The next round starts after this moment, so it covers the writes.
        let next = rounds.started.load(Ordering::SeqCst) + 1;
        let mut state = rounds.state.lock().await;
        let covered = state.last.clone().filter(|(number, _)| *number >= next);
        let result = match covered {
            Some((_, Err(unconfirmed))) => Err(unconfirmed),
            Some((_, Ok(of))) if of == *run => Ok(()),
            _ => {
                let number = rounds.started.fetch_add(1, Ordering::SeqCst) + 1;
                let result = self.round(&mut state, setup, run, slot).await;
                state.last = Some((number, result.clone().map(|()| Arc::clone(run))));
                result
            }
        };
        result.map_err(|reason| {
            metrics::redis_unconfirmed();
            let (target, wanted) = (setup.name(), self.wanted());
            RedisError::Unreplicated { target, wanted, reason }
        })
    }

    async fn round(
        &self,
        state: &mut State,
        setup: &Setup,
        run: &Arc<str>,
        slot: Option<u16>,
    ) -> Result<(), Unconfirmed> {
        let kept = state.connection.take().filter(|kept| kept.run == *run);
        let mut confirming = match kept {
            Some(kept) => kept,
            None => self.connect(setup).await.map_err(not_asked)?,
        };
        if confirming.run != *run {
            return Err(Unconfirmed::Replaced);
        }
        let prefix = setup.wiring.target.prefix();
        let key = state.key.get_or_insert_with(|| {
            let here = |number: &u32| {
                let of = slot_of(keys::replicas(prefix, *number).as_bytes());
                slot.is_none_or(|slot| of == slot)
            };
            keys::replicas(prefix, (0..=u32::MAX).find(here).unwrap_or(0))
        });
        let key = key.clone();
        let confirmed = match self.ask(setup, &mut confirming, &key).await {
            Ok(confirmed) => confirmed,
            Err(error) => {
                // The slot may have moved.
                state.key = None;
                return Err(not_asked(error));
            }
        };
        state.connection = Some(confirming);
        if confirmed >= u64::from(self.wanted()) {
            return Ok(());
        }
        Err(Unconfirmed::Few { confirmed, within: self.wait.timeout })
    }

    /// Writes the key and waits. Returns how many replicas have confirmed that. After an error the
    /// connection must not be used.
    async fn ask(
        &self,
        setup: &Setup,
        confirming: &mut Confirming,
        key: &str,
    ) -> Result<u64, RedisError> {
        let ttl_ms = millis(KEY_TTL);
        // Unlike SET, it also works on a full server. The key is missing only at first.
        let mut expire = redis::cmd("PEXPIRE");
        expire.arg(key).arg(ttl_ms);
        let [written, confirmed] = self.send(setup, confirming, expire).await?;
        if written != Value::Int(0) {
            return confirms(&confirmed);
        }
        let mut set = redis::cmd("SET");
        set.arg(key).arg("").arg("PX").arg(ttl_ms);
        let [_, confirmed] = self.send(setup, confirming, set).await?;
        confirms(&confirmed)
    }

    async fn send(
        &self,
        setup: &Setup,
        confirming: &mut Confirming,
        write: redis::Cmd,
    ) -> Result<[Value; 2], RedisError> {
        let mut pipe = Pipeline::with_capacity(2);
        pipe.add_command(write);
        pipe.cmd("WAIT").arg(self.wanted()).arg(millis(self.wait.timeout));
        let sent = confirming.connection.send_packed_commands(&pipe, 0, pipe.len()).await;
        let values = sent.map_err(|source| RedisError::Unknown { target: setup.name(), source })?;
        if let Some(error) = values.iter().find_map(server_error) {
            return Err(setup.refused("WAIT", error));
        }
        values.try_into().map_err(|_| unread("two replies"))
    }

    async fn connect(&self, setup: &Setup) -> Result<Confirming, RedisError> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            // More than the time that the server itself waits.
            .set_response_timeout(Some(self.wait.timeout + CONNECT_TIMEOUT));
        let mut connection = setup.open(&config).await?;
        let run = run_of(setup, &mut connection).await?;
        Ok(Confirming { connection, run })
    }
}

/// Asks a server for its run.
pub(super) async fn run_of(
    setup: &Setup,
    connection: &mut MultiplexedConnection,
) -> Result<Arc<str>, RedisError> {
    let mut info = Pipeline::with_capacity(1);
    info.cmd("INFO").arg("server");
    let values = setup.handshake(connection, &info).await?;
    if let Some(error) = values.iter().find_map(server_error) {
        return Err(setup.refused("INFO", error));
    }
    Ok(run_id(&text(values)?).into())
}

fn confirms(answer: &Value) -> Result<u64, RedisError> {
    match answer {
        Value::Int(confirmed) => Ok(confirmed.unsigned_abs()),
        _ => Err(unread("a number")),
    }
}

fn unread(expected: &'static str) -> RedisError {
    misread("WAIT", ReplyError::unexpected(expected, "another reply"))
}

fn not_asked(error: RedisError) -> Unconfirmed {
    Unconfirmed::NotAsked(Box::new(error))
}
