//! A Redis Cluster for one test, of real `redis-server` processes.

use std::net::SocketAddr;
use std::time::Duration;

use redis::Value;

use super::proxy::Proxy;
use super::redis::{Options, RedisBackend, RedisServer};
use super::wait::eventually;

/// A node that is silent for this long is failed over.
const NODE_TIMEOUT_MS: u32 = 1_500;
const START: Duration = Duration::from_secs(30);
const SLOTS: usize = 16_384;

/// Runs until it is dropped, and then leaves neither process nor file behind. With three primaries,
/// the second one has the bus stream of the tests, and each has a part of the shards of the
/// pipeline `test`.
#[derive(Debug)]
pub struct Cluster {
    /// The initial primaries, then their replicas in the same order.
    pub nodes: Vec<RedisServer>,
    /// A proxy before each node, in their order, if clients reach the nodes through proxies.
    pub proxies: Vec<Proxy>,
    /// The ids of the nodes in the cluster.
    ids: Vec<String>,
}

impl RedisBackend for Cluster {
    fn url(&self) -> String {
        let nodes = (0..self.nodes.len()).map(|place| self.announced(place).to_string());
        format!("redis+cluster://{}", nodes.collect::<Vec<_>>().join(","))
    }
}

impl Cluster {
    /// Starts a cluster and returns once every node sees all of it.
    pub async fn start(options: Options, primaries: usize, replicas: bool) -> Self {
        Self::start_with(options, primaries, replicas, &[]).await
    }

    /// The same with further arguments for each `redis-server`.
    pub async fn start_with(
        options: Options,
        primaries: usize,
        replicas: bool,
        arguments: &[String],
    ) -> Self {
        let count = if replicas { 2 * primaries } else { primaries };
        let nodes = (0..count).map(|_| node(options, arguments)).collect();
        let cluster = Self { nodes, proxies: Vec::new(), ids: Vec::new() };
        cluster.formed(primaries, arguments).await
    }

    /// The same with a proxy before each node. The nodes announce the addresses of the proxies, so
    /// clients never learn another one.
    pub async fn behind_proxies(options: Options, primaries: usize, arguments: &[String]) -> Self {
        let nodes: Vec<_> = (0..2 * primaries).map(|_| node(options, arguments)).collect();
        let mut cluster = Self { nodes, proxies: Vec::new(), ids: Vec::new() };
        for place in 0..2 * primaries {
            let proxy = Proxy::start(cluster.nodes[place].tcp_addr()).await;
            let port = proxy.address().port().to_string();
            cluster.tell(place, &["CONFIG", "SET", "cluster-announce-port", &port]).await;
            let own = ["--cluster-announce-port".to_owned(), port];
            let all = [&base_arguments()[..], arguments, &own].concat();
            cluster.nodes[place].set_arguments(&all);
            cluster.proxies.push(proxy);
        }
        cluster.formed(primaries, arguments).await
    }

    /// The address that clients are told.
    fn announced(&self, place: usize) -> SocketAddr {
        let proxy = self.proxies.get(place).map(Proxy::address);
        proxy.unwrap_or_else(|| self.nodes[place].tcp_addr())
    }

    /// Makes a cluster of the nodes.
    async fn formed(mut self, primaries: usize, arguments: &[String]) -> Self {
        let (count, cluster) = (self.nodes.len(), &mut self);
        for place in 0..count {
            let id = cluster.ask(place, &["CLUSTER", "MYID"]).await;
            cluster.ids.push(id);
            let epoch = (place + 1).to_string();
            cluster.tell(place, &["CLUSTER", "SET-CONFIG-EPOCH", &epoch]).await;
            if place < primaries {
                let from = (place * SLOTS).div_ceil(primaries).to_string();
                let to = (((place + 1) * SLOTS).div_ceil(primaries) - 1).to_string();
                cluster.tell(place, &["CLUSTER", "ADDSLOTSRANGE", &from, &to]).await;
            }
        }
        for place in 1..count {
            let node = &cluster.nodes[place];
            let tls = arguments.iter().any(|argument| argument == "--tls-cluster");
            let port = if tls { node.tls_port() } else { cluster.announced(place).port() };
            let (port, bus) = (port.to_string(), node.other_port().to_string());
            cluster.tell(0, &["CLUSTER", "MEET", "127.0.0.1", &port, &bus]).await;
        }
        cluster.agrees(count).await;
        for place in primaries..count {
            let of = cluster.ids[place - primaries].clone();
            cluster.tell(place, &["CLUSTER", "REPLICATE", &of]).await;
        }
        for place in primaries..count {
            eventually(START, "the replica is in step", async || {
                cluster.ask(place, &["INFO", "replication"]).await.contains("master_link_status:up")
            })
            .await;
        }
        self
    }

    /// A cluster of three nodes that also serve clients over TLS. The arguments name the
    /// certificates.
    pub async fn encrypted(certificates: &[String]) -> Self {
        let mut arguments = certificates.to_vec();
        // Redis 7.0 announces the TLS ports to clients only if the nodes also use TLS between each
        // other.
        let tls = ["--tls-port", "{tls}", "--tls-cluster", "yes", "--tls-replication", "yes"];
        arguments.extend(tls.map(str::to_owned));
        Self::start_with(Options::default(), 3, false, &arguments).await
    }

    /// The URL with the TLS ports of the nodes.
    pub fn encrypted_url(&self) -> String {
        let node = |node: &RedisServer| format!("127.0.0.1:{}", node.tls_port());
        let nodes: Vec<_> = self.nodes.iter().map(node).collect();
        format!("rediss+cluster://{}", nodes.join(","))
    }

    /// Waits until every running node knows `count` nodes and sees every slot served.
    async fn agrees(&self, count: usize) {
        let known = format!("cluster_known_nodes:{count}\r");
        for place in 0..self.nodes.len() {
            eventually(START, "the nodes agree", async || {
                let info = self.ask(place, &["CLUSTER", "INFO"]).await;
                // Without full coverage, the state is `ok` before a node knows the owner of every
                // slot.
                ["cluster_state:ok\r", "cluster_slots_ok:16384\r", &known]
                    .iter()
                    .all(|part| info.contains(part))
            })
            .await;
        }
    }

    /// Waits until the replica of a killed primary has taken its place.
    pub async fn promotes(&self, replica: usize) {
        eventually(START, "the replica is promoted", async || {
            self.ask(replica, &["ROLE"]).await.contains("master")
        })
        .await;
    }

    /// Moves a slot with all its keys to another primary, as `redis-cli --cluster reshard` does.
    pub async fn move_slot(&self, slot: u16, from: usize, to: usize) {
        let slot = slot.to_string();
        let port = self.nodes[to].tcp_addr().port().to_string();
        let (source, target) = (&self.ids[from], &self.ids[to]);
        self.tell(to, &["CLUSTER", "SETSLOT", &slot, "IMPORTING", source]).await;
        self.tell(from, &["CLUSTER", "SETSLOT", &slot, "MIGRATING", target]).await;
        let mut connection = self.nodes[from].connection().await;
        loop {
            let mut list = redis::cmd("CLUSTER");
            list.arg("GETKEYSINSLOT").arg(&slot).arg(10);
            let keys: Vec<Vec<u8>> = list.query_async(&mut connection).await.unwrap();
            if keys.is_empty() {
                break;
            }
            let mut migrate = redis::cmd("MIGRATE");
            migrate.arg("127.0.0.1").arg(&port).arg("").arg(0).arg(10_000).arg("KEYS").arg(keys);
            let () = migrate.query_async(&mut connection).await.unwrap();
        }
        for place in [to, from] {
            self.tell(place, &["CLUSTER", "SETSLOT", &slot, "NODE", target]).await;
        }
    }

    /// The slot of a key in the cluster.
    pub async fn slot_of(&self, key: &str) -> u16 {
        self.ask(0, &["CLUSTER", "KEYSLOT", key]).await.parse().unwrap()
    }

    /// Sends a command to one node.
    pub async fn tell(&self, place: usize, command: &[&str]) {
        drop(self.ask(place, command).await);
    }

    /// Sends a command to one node. Returns its answer, and of a list the first element.
    pub async fn ask(&self, place: usize, command: &[&str]) -> String {
        let mut connection = self.nodes[place].connection().await;
        let mut cmd = redis::cmd(command[0]);
        cmd.arg(&command[1..]);
        let value: Value = cmd.query_async(&mut connection).await.unwrap();
        let first = match value {
            Value::Array(values) if values.is_empty() => return String::new(),
            Value::Array(mut values) => values.swap_remove(0),
            value => value,
        };
        redis::from_redis_value(first).unwrap()
    }
}

fn node(options: Options, more: &[String]) -> RedisServer {
    let arguments = [&base_arguments()[..], more].concat();
    RedisServer::start_with(Options { tcp: true, ..options }, &arguments)
}

/// The arguments of every node.
fn base_arguments() -> Vec<String> {
    let timeout = NODE_TIMEOUT_MS.to_string();
    let arguments = [
        ["--cluster-enabled", "yes"],
        ["--cluster-config-file", "nodes.conf"],
        ["--cluster-node-timeout", &timeout],
        // An unavailable node does not stop the others.
        ["--cluster-require-full-coverage", "no"],
        ["--cluster-port", "{port}"],
        ["--cluster-replica-validity-factor", "0"],
    ];
    arguments.concat().into_iter().map(str::to_owned).collect()
}
