//! Connections for subscriptions.
//!
//! The nodes of a cluster pass messages on to each other. A node that was removed, or that is cut off from
//! the others, still answers its clients, but gets no messages. Its refusal of all keys is also that of every
//! node while the whole cluster is down. Then no script can publish a message.

use std::time::Duration;

use redis::aio::PubSub;
use redis::{Client, Cmd, Pipeline, ServerError};
use tokio::time::timeout;

use super::error::RedisError;
use super::keys;
use super::link::Link;
use super::node::{Node, is_move, refused, server_error};
use super::target::{CONNECT_TIMEOUT, address, connect_error, timed_out};
use super::topology::Topology;

/// How long a node may take to say whether it has its keys.
const ASK_TIMEOUT: Duration = Duration::from_secs(1);

/// What a node says of a key that it should have.
enum Said {
    Serves,
    Refuses(ServerError),
    /// It gave no answer: it is frozen, or only busy.
    Silent,
}

impl Link {
    /// A separate connection for subscriptions, and the address of its server. In a cluster it leads to a
    /// primary that is not cut off from the others, because messages reach all of these, and to a random one
    /// at every call. One that does not answer is tried last. The connection does not come from a pool: it
    /// stays open as long as the process runs, needs neither scripts nor `recover`, and can send no other
    /// command. Behind sentinels it leads to the primary.
    ///
    /// # Errors
    /// If no connection can be made, no primary is known, or the cluster is down.
    ///
    /// # Cancel safety
    /// Nothing has changed.
    pub async fn subscriber(&self) -> Result<(PubSub, String), RedisError> {
        if !self.wiring.cluster {
            let client = self.target.primary(self.target.client()).await?;
            let connected = connect(&client).await;
            let connection = connected.map_err(|source| self.target.connect_error(source))?;
            return Ok((connection, address(&client)));
        }
        let topology = self.topology().await?;
        let nodes = topology.nodes();
        let first = usize::from(rand::random::<u16>());
        let mut failed = self.target.connect_error(timed_out());
        // A frozen node accepts connections, too.
        let mut silent = Vec::new();
        for at in (first..).map(|at| at % nodes.len()).take(nodes.len()) {
            let node = &nodes[at];
            match self.ask_for_key(&topology, at).await {
                Said::Silent => silent.push(node),
                Said::Refuses(error) if is_cut_off(&error) => {
                    failed = refused(node.name(), "GET", &error);
                }
                Said::Serves | Said::Refuses(_) => match connect_to(node).await {
                    Ok(connected) => return Ok(connected),
                    Err(error) => failed = error,
                },
            }
        }
        for node in silent {
            match connect_to(node).await {
                Ok(connected) => return Ok(connected),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    /// Whether messages still reach the subscriptions at this server. A node of a cluster that does not
    /// answer counts as one that they reach.
    ///
    /// # Cancel safety
    /// Nothing has changed.
    pub async fn hears(&self, server: &str) -> bool {
        if !self.wiring.cluster {
            return true;
        }
        let place =
            |topology: &Topology| topology.nodes().iter().position(|node| node.name() == server);
        let Some(topology) = self.current() else { return true };
        let Some(at) = place(&topology) else { return false };
        match self.ask_for_key(&topology, at).await {
            Said::Refuses(error) if is_cut_off(&error) => false,
            // It may hold no slot any more. While this process is idle, no other call finds out.
            Said::Refuses(error) if is_move(&error) => {
                self.topology().await.is_ok_and(|now| place(&now).is_some())
            }
            _ => true,
        }
    }

    /// Asks the node at this place for a key that it should have.
    async fn ask_for_key(&self, topology: &Topology, at: usize) -> Said {
        let mut shards = self.wiring.shards.iter();
        let here = shards.find(|(slot, _)| topology.holder(*slot) == Some(at));
        let key = here.map(|(_, keys)| keys.wake().to_owned());
        let probe = Cmd::get(key.unwrap_or_else(|| keys::shards(self.prefix())));
        let mut pipe = Pipeline::with_capacity(1);
        pipe.add_command(probe);
        let asked =
            timeout(ASK_TIMEOUT, self.send(&topology.nodes()[at], (&pipe, false), &[])).await;
        let Ok(Ok(answers)) = asked else { return Said::Silent };
        let Some(refusal) = answers.iter().find_map(server_error) else { return Said::Serves };
        // Without a shard here, the key may be elsewhere.
        if here.is_none() && refusal.code() == "MOVED" {
            return Said::Serves;
        }
        if is_move(refusal) {
            self.mark_stale();
        }
        Said::Refuses(refusal.clone())
    }
}

/// Whether a node refuses all keys: it does not reach most primaries, or the whole cluster is down.
fn is_cut_off(error: &ServerError) -> bool {
    error.code() == "CLUSTERDOWN" && error.details() != Some("Hash slot not served")
}

/// The connection, and the address of the node.
async fn connect_to(node: &Node) -> Result<(PubSub, String), RedisError> {
    let name = node.name().to_owned();
    match connect(node.client()).await {
        Ok(connection) => Ok((connection, name)),
        Err(source) => Err(connect_error(name, node.client(), source)),
    }
}

async fn connect(client: &Client) -> Result<PubSub, redis::RedisError> {
    let connecting = timeout(CONNECT_TIMEOUT, client.get_async_pubsub());
    connecting.await.unwrap_or_else(|_| Err(timed_out()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_reaches_too_few_others_is_told_from_one_that_lacks_a_slot() {
        let error = |line: &str| {
            let answer = redis::parse_redis_value(line.as_bytes()).unwrap();
            server_error(&answer).unwrap().clone()
        };
        assert!(is_cut_off(&error("-CLUSTERDOWN The cluster is down\r\n")));
        for line in ["-CLUSTERDOWN Hash slot not served\r\n", "-MOVED 1 a:1\r\n", "-BUSY it is\r\n"]
        {
            assert!(!is_cut_off(&error(line)), "{line}");
        }
    }
}
