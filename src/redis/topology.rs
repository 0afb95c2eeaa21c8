//! Which server holds which slot of a cluster.
//!
//! Keys with one hash tag share a slot, so one server holds everything of one pipeline and shard. A
//! single server is a topology with one node that holds all slots.

use std::sync::Arc;
use std::time::Duration;

use redis::{AsyncConnectionConfig, Client, Value};

use super::node::Node;
use super::reply::{Reply, ReplyError};

/// Number of slots of a cluster.
const SLOTS: u16 = 16_384;
/// Timeout of connecting to a node, and of its reply with the topology. It is short because other
/// nodes can be asked instead.
const ASK_TIMEOUT: Duration = Duration::from_secs(1);

/// The slot of a key: CRC16 (XMODEM) of its hash tag, or of all of it.
pub(super) fn slot_of(key: &[u8]) -> u16 {
    crc16(hash_tag(key)) % SLOTS
}

/// The part between the first `{` and the next `}`, if not empty; otherwise the whole key.
fn hash_tag(key: &[u8]) -> &[u8] {
    let position = |bytes: &[u8], wanted: u8| bytes.iter().position(|&byte| byte == wanted);
    let tag = position(key, b'{').and_then(|open| {
        let rest = &key[open + 1..];
        position(rest, b'}').map(|close| &rest[..close])
    });
    tag.filter(|tag| !tag.is_empty()).unwrap_or(key)
}

fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, &byte| {
        let index = usize::from((crc >> 8) as u8 ^ byte);
        (crc << 8) ^ CRC_TABLE[index]
    })
}

const CRC_TABLE: [u16; 256] = {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        #[expect(clippy::cast_possible_truncation, reason = "below 256")]
        let mut crc = (index as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
};

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

    /// The first is the check value of CRC-16/XMODEM; the others are the answers of `CLUSTER
    /// KEYSLOT`.
    #[test]
    fn slots_are_those_of_redis() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        let cases: [(&str, u16); 10] = [
            ("foo", 12_182),
            ("somekey", 11_058),
            ("foo{hash_tag}", 2_515),
            ("bar{hash_tag}", 2_515),
            ("hash_tag", 2_515),
            ("", 0),
            ("{}", 15_257),
            ("foo{}{bar}", 8_363),
            ("foo{{bar}}zap", 4_015),
            ("foo{bar}{zap}", 5_061),
        ];
        for (key, slot) in cases {
            assert_eq!(slot_of(key.as_bytes()), slot, "{key}");
        }
    }

    #[test]
    fn a_hash_tag_is_the_first_that_is_not_empty_else_there_is_none() {
        let cases = [
            ("fl:{p:3}:q:a", "p:3"),
            ("fl:{p:3}:q:{b}", "p:3"),
            ("{}", "{}"),
            ("{}{a}", "{}{a}"),
            ("a}b{c", "a}b{c"),
            ("{{a}}", "{a"),
            ("plain", "plain"),
        ];
        for (key, tag) in cases {
            assert_eq!(hash_tag(key.as_bytes()), tag.as_bytes(), "{key}");
        }
    }

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
