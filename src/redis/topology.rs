//! Which server holds which slot of a cluster.
//!
//! Keys with one hash tag share a slot, so one server holds everything of one pipeline and shard. A
//! single server is a topology with one node that holds all slots.

use std::sync::Arc;
use std::time::Duration;

use redis::{AsyncConnectionConfig, Client, Value};

use super::node::Node;
use super::reply::{Reply, ReplyError};
use super::slot::SLOTS;

/// Timeout of connecting to a node, and of its reply with the topology. It is short because other
/// nodes can be asked instead.
const ASK_TIMEOUT: Duration = Duration::from_secs(1);

/// Slots `from` to `to`, both included, and the address of the primary that holds them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SlotRange {
    pub(super) from: u16,
    pub(super) to: u16,
    pub(super) host: String,
    pub(super) port: u16,
}

/// Asks a node for the primaries and their slots. Over TLS the reply has the TLS ports.
///
/// # Errors
/// If it does not answer within two seconds, is not a member of a cluster, or returns an invalid
/// reply.
pub(super) async fn ask(client: &Client) -> Result<Vec<SlotRange>, redis::RedisError> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(ASK_TIMEOUT))
        .set_response_timeout(Some(ASK_TIMEOUT));
    let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
    let mut command = redis::cmd("CLUSTER");
    command.arg("SLOTS");
    let answer = connection.send_packed_command(&command).await?;
    if let Value::ServerError(error) = answer {
        return Err(error.into());
    }
    let asked = client.get_connection_info().addr();
    let (host, port) = match asked {
        redis::ConnectionAddr::Tcp(host, port)
        | redis::ConnectionAddr::TcpTls { host, port, .. } => (host.as_str(), *port),
        _ => ("", 0),
    };
    parse(answer, host, port).map_err(|error| {
        (redis::ErrorKind::UnexpectedReturnType, "CLUSTER SLOTS", error.to_string()).into()
    })
}

/// Parses the reply of the node at `host` and `port` to `CLUSTER SLOTS`.
fn parse(answer: Value, host: &str, port: u16) -> Result<Vec<SlotRange>, ReplyError> {
    let mut ranges = Vec::new();
    let mut rows = Reply::new(answer)?;
    while let Some(row) = rows.next() {
        let mut row = Reply::new(row)?;
        let (from, to): (u16, u16) = (row.number()?, row.number()?);
        if from > to || to >= SLOTS {
            return Err(ReplyError::unexpected("a range of slots", &format!("{from} to {to}")));
        }
        let mut primary = Reply::new(row.next().unwrap_or(Value::Nil))?;
        // Missing, empty or `?`: the node does not know its own name, so use the address of the
        // query.
        let named = primary.text()?;
        let named = if matches!(&*named, "" | "?") { host.to_owned() } else { named };
        let at: u16 = primary.number()?;
        let at = if at == 0 { port } else { at };
        ranges.push(SlotRange { from, to, host: named, port: at });
    }
    Ok(ranges)
}

/// The distribution of slots at one moment.
#[derive(Debug)]
pub(super) struct Topology {
    /// Every primary that holds a slot; at least one.
    nodes: Vec<Arc<Node>>,
    /// Per slot the index of its primary in `nodes`; empty for a single server.
    holders: Vec<Option<u16>>,
}

impl Topology {
    /// A single server.
    pub(super) fn single(node: Node) -> Self {
        Self { nodes: vec![Arc::new(node)], holders: Vec::new() }
    }

    /// A cluster. `make` creates the node at an address from all its slots.
    pub(super) fn cluster(
        ranges: &[SlotRange],
        mut make: impl FnMut(&str, u16, &dyn Fn(u16) -> bool) -> Arc<Node>,
    ) -> Self {
        let mut addresses: Vec<(&str, u16)> = Vec::new();
        let mut holders = vec![None; SLOTS.into()];
        for range in ranges {
            let address = (range.host.as_str(), range.port);
            let known = addresses.iter().position(|known| *known == address);
            let place = known.unwrap_or_else(|| {
                addresses.push(address);
                addresses.len() - 1
            });
            let holder = u16::try_from(place).ok();
            holders[usize::from(range.from)..=usize::from(range.to)].fill(holder);
        }
        let node = |(place, (host, port)): (usize, (&str, u16))| {
            let holder = u16::try_from(place).ok();
            make(host, port, &|slot| holders[usize::from(slot)] == holder)
        };
        let nodes = addresses.into_iter().enumerate().map(node).collect();
        Self { nodes, holders }
    }

    /// Every primary.
    pub(super) fn nodes(&self) -> &[Arc<Node>] {
        &self.nodes
    }

    /// The index in [`Self::nodes`] of the primary that holds a slot; `None` if there is none.
    pub(super) fn holder(&self, slot: u16) -> Option<usize> {
        if self.holders.is_empty() {
            return Some(0);
        }
        self.holders[usize::from(slot)].map(usize::from)
    }

    /// Number of slots without a primary.
    pub(super) fn slots_missing(&self) -> usize {
        self.holders.iter().filter(|holder| holder.is_none()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn row(from: i64, to: i64, host: Value, port: i64) -> Value {
        let node = |host| Value::Array(vec![host, Value::Int(port), text("id")]);
        let replica = node(text("replica"));
        Value::Array(vec![Value::Int(from), Value::Int(to), node(host), replica])
    }

    #[test]
    fn a_node_that_does_not_know_its_name_is_where_it_was_asked() {
        let rows = [
            row(0, 5, text("10.0.0.1"), 7_000),
            row(6, 9, Value::Nil, 7_001),
            row(10, 10, text(""), 7_002),
            row(11, 11, text("?"), 0),
        ];
        let ranges = parse(Value::Array(rows.to_vec()), "asked", 6_379).unwrap();
        let found: Vec<_> = ranges.iter().map(|r| (r.from, r.to, &*r.host, r.port)).collect();
        assert_eq!(
            found,
            [
                (0, 5, "10.0.0.1", 7_000),
                (6, 9, "asked", 7_001),
                (10, 10, "asked", 7_002),
                (11, 11, "asked", 6_379),
            ]
        );
        for wrong in [row(5, 4, text("a"), 1), row(0, 16_384, text("a"), 1), Value::Int(3)] {
            parse(Value::Array(vec![wrong]), "asked", 1).unwrap_err();
        }
    }
}
