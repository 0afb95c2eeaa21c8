//! The Redis of a campaign: a durable server with a replica, or a cluster whose primaries each have one.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use fairlane_testkit::directory::Directory;
use fairlane_testkit::redis::{Options, Persistence, RedisServer};
use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, FromRedisValue, Pipeline, ServerErrorKind, Value};
use tokio::time::{Instant, sleep};

use super::cluster::RedisCluster;
use crate::error::BenchError;

/// How long a replica may take to have everything, and a cluster to agree.
pub(super) const FOLLOWS: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);

/// All servers and replicas.
pub(crate) enum Servers {
    Pair(Box<RedisPair>),
    Cluster(Box<RedisCluster>),
}

/// The primary, and its replica.
pub(crate) struct RedisPair {
    pub(crate) primary: RedisServer,
    pub(crate) replica: RedisServer,
}

impl Servers {
    /// Starts three primaries and their replicas.
    pub(crate) async fn cluster() -> Self {
        Self::Cluster(Box::new(RedisCluster::start().await))
    }

    /// Starts a primary with this data, and its replica.
    pub(crate) async fn pair(data: Directory) -> Result<Self, BenchError> {
        let primary =
            tokio::task::spawn_blocking(|| RedisServer::start_in(data, OPTIONS, &arguments(None)));
        let primary = primary.await.map_err(other)?;
        let replica = redis(Some(primary.tcp_addr()));
        Ok(Self::Pair(Box::new(RedisPair { primary, replica })))
    }

    /// The primary that a fault hits, once a fault can hit it without a loss that nobody promises to
    /// prevent: in a cluster, that of a primary whose replica has not all data yet.
    pub(crate) async fn target(&mut self, dice: u64) -> Result<&mut RedisServer, BenchError> {
        match self {
            Self::Pair(pair) => Ok(&mut pair.primary),
            Self::Cluster(cluster) => {
                let primary = cluster.primary(dice).await?;
                Ok(&mut cluster.servers.nodes[primary])
            }
        }
    }

    /// A connection to each primary.
    pub(crate) async fn primaries(&self) -> Vec<MultiplexedConnection> {
        match self {
            Self::Pair(pair) => vec![pair.primary.connection().await],
            Self::Cluster(cluster) => {
                let mut connections = Vec::new();
                for node in cluster.primaries().await {
                    connections.push(cluster.servers.nodes[node].connection().await);
                }
                connections
            }
        }
    }

    /// Copies the append-only files of all primaries into a new directory.
    pub(crate) async fn keep_data(&self, to: &Path) {
        match self {
            Self::Pair(pair) => pair.primary.keep_data(to),
            Self::Cluster(cluster) => {
                for node in cluster.primaries().await {
                    cluster.servers.nodes[node].keep_data(&to.join(node.to_string()));
                }
            }
        }
    }
}

/// Asks the primary that has the keys of `commands`. All are in one slot.
pub(super) async fn ask_holder<T: FromRedisValue>(
    primaries: &mut [MultiplexedConnection],
    commands: &Pipeline,
) -> Result<T, BenchError> {
    for primary in primaries {
        match commands.query_async(primary).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::Moved) => {}
            answer => return Ok(answer?),
        }
    }
    Err(BenchError::Campaign("no primary has the keys of a shard".to_owned()))
}

/// The options of every server: durable.
pub(super) const OPTIONS: Options =
    Options { persistence: Persistence::Always, max_memory: 0, tcp: true };

/// A durable Redis that permits `DEBUG`. `primary`: it is a replica of this server.
pub(super) fn redis(primary: Option<SocketAddr>) -> RedisServer {
    RedisServer::start_with(OPTIONS, &arguments(primary))
}

/// The arguments of a primary, or of a replica of this server.
pub(super) fn arguments(primary: Option<SocketAddr>) -> Vec<String> {
    let mut arguments = vec!["--enable-debug-command".to_owned(), "local".to_owned()];
    if let Some(primary) = primary {
        arguments.extend(["--replicaof".to_owned(), primary.ip().to_string()]);
        arguments.push(primary.port().to_string());
    }
    arguments
}

impl RedisPair {
    /// The replica takes over, as in a planned failover: no write is lost. The old primary is killed,
    /// and a new replica starts. `lead` is told the address of the new primary.
    pub(super) async fn fail_over(&mut self, lead: impl Fn(SocketAddr)) -> Result<(), BenchError> {
        let mut old = self.primary.connection().await;
        let mut new = self.replica.connection().await;
        let until = Instant::now() + FOLLOWS;
        while !follows(&mut new).await? {
            late(until, "the replica does not follow the primary")?;
            sleep(POLL).await;
        }
        while !is_durable(&mut new).await? {
            late(until, "the replica does not rewrite its append-only file")?;
            sleep(POLL).await;
        }
        ask(&mut old, &["CLIENT", "PAUSE", "60000", "WRITE"]).await?;
        reaches(&mut new, &mut old, until).await?;
        ask(&mut new, &["REPLICAOF", "NO", "ONE"]).await?;
        self.primary.kill9();
        let address = self.replica.tcp_addr();
        lead(address);
        let follower = tokio::task::block_in_place(|| redis(Some(address)));
        self.primary = std::mem::replace(&mut self.replica, follower);
        self.primary.set_arguments(&arguments(None));
        Ok(())
    }
}

/// Waits until a replica has what its primary has now.
pub(super) async fn reaches(
    replica: &mut MultiplexedConnection,
    primary: &mut MultiplexedConnection,
    until: Instant,
) -> Result<(), BenchError> {
    let target = offset(&info(primary, "replication").await?, "master_repl_offset:");
    while offset(&info(replica, "replication").await?, "slave_repl_offset:") < target {
        late(until, "a replica does not reach its primary")?;
        sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

pub(super) async fn ask(
    connection: &mut MultiplexedConnection,
    words: &[&str],
) -> Result<(), BenchError> {
    let mut command = redis::cmd(words[0]);
    command.arg(&words[1..]);
    let _: Value = command.query_async(connection).await?;
    Ok(())
}

/// A section of `INFO`.
pub(crate) async fn info(
    connection: &mut MultiplexedConnection,
    section: &str,
) -> Result<String, BenchError> {
    Ok(redis::cmd("INFO").arg(section).query_async(connection).await?)
}

/// Whether this replica is connected to its primary and has its data.
pub(super) async fn follows(replica: &mut MultiplexedConnection) -> Result<bool, BenchError> {
    Ok(info(replica, "replication").await?.contains("master_link_status:up"))
}

/// Whether a restart finds all commands in the append-only file. After a full synchronisation, a replica
/// writes its commands into a temporary file until it has rewritten its append-only file. A kill before
/// that loses its data.
pub(super) async fn is_durable(server: &mut MultiplexedConnection) -> Result<bool, BenchError> {
    let states =
        ["aof_rewrite_in_progress:0", "aof_rewrite_scheduled:0", "aof_last_bgrewrite_status:ok"];
    let found = info(server, "persistence").await?;
    Ok(states.iter().all(|state| found.contains(state)))
}

fn offset(info: &str, name: &str) -> u64 {
    let line = info.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or_default()
}

pub(super) fn late(until: Instant, what: &str) -> Result<(), BenchError> {
    if Instant::now() < until { Ok(()) } else { Err(BenchError::Campaign(what.to_owned())) }
}

pub(super) fn other(error: impl std::fmt::Display) -> BenchError {
    BenchError::Campaign(error.to_string())
}
