//! The Redis servers of a row: the private one, or a cluster of primaries in its directory.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use fairlane::config::RedisUrl;
use fairlane::sandbox::{Rig, STREAM};
use fairlane_testkit::redis::free_port;
use redis::{Client, Connection};
use tokio::process::{Child, Command};
use tokio::time::Instant;

use crate::error::BenchError;
use crate::probe::{Commands, commands_of, cpu_of, field_of};

const SLOTS: usize = 16_384;
/// How long a cluster may take to form.
const FORMING: Duration = Duration::from_secs(30);

/// What the servers have used so far.
pub(super) struct Usage {
    /// CPU seconds of each main thread.
    pub(super) cpu: Vec<f64>,
    pub(super) commands: Commands,
    /// Number of commands, with those inside scripts.
    pub(super) processed: f64,
    pub(super) peak_bytes: f64,
}

/// The servers. Those of a cluster are killed when it is dropped.
pub(super) struct Servers {
    url: RedisUrl,
    clients: Vec<Client>,
    /// The server with the bus.
    bus: usize,
    _nodes: Vec<Child>,
}

impl Servers {
    /// The private server, or a cluster with this number of primaries.
    pub(super) async fn start(rig: &Rig, primaries: usize) -> Result<Self, BenchError> {
        if primaries < 2 {
            let client = Client::open(format!("redis+unix://{}", rig.target()))?;
            let url = rig.url().clone();
            return Ok(Self { url, clients: vec![client], bus: 0, _nodes: Vec::new() });
        }
        let (mut nodes, mut clients, mut ports) = (Vec::new(), Vec::new(), Vec::new());
        for number in 0..primaries {
            let (port, peers) = (free_port(), free_port());
            nodes.push(node(&rig.directory().join(format!("node-{number}")), port, peers)?);
            clients.push(Client::open(format!("redis://127.0.0.1:{port}"))?);
            ports.push((port, peers));
        }
        form(&clients, &ports).await?;
        let mut first = clients[0].get_connection()?;
        let slot: usize = redis::cmd("CLUSTER").arg("KEYSLOT").arg(STREAM).query(&mut first)?;
        let bus = (0..primaries).find(|place| slot < begin(place + 1, primaries)).unwrap_or(0);
        let hosts: Vec<String> =
            ports.iter().map(|(port, _)| format!("127.0.0.1:{port}")).collect();
        let url = RedisUrl::parse(&format!("redis+cluster://{}", hosts.join(",")));
        let url = url.map_err(|error| BenchError::Cluster(error.to_string()))?;
        Ok(Self { url, clients, bus, _nodes: nodes })
    }

    pub(super) fn url(&self) -> &RedisUrl {
        &self.url
    }

    /// A connection to the server with the bus.
    pub(super) fn bus(&self) -> Result<Connection, BenchError> {
        Ok(self.clients[self.bus].get_connection()?)
    }

    /// What the servers have used so far.
    pub(super) async fn usage(&self) -> Result<Usage, BenchError> {
        let mut usage = Usage {
            cpu: Vec::new(),
            commands: Commands::default(),
            processed: 0.0,
            peak_bytes: 0.0,
        };
        for client in &self.clients {
            let mut connection = client.get_multiplexed_async_connection().await?;
            let info: String =
                redis::cmd("INFO").arg("everything").query_async(&mut connection).await?;
            usage.cpu.push(cpu_of(&info));
            let commands = commands_of(&info);
            usage.commands.wire += commands.wire;
            usage.commands.inner += commands.inner;
            usage.processed += field_of(&info, "total_commands_processed");
            usage.peak_bytes += field_of(&info, "used_memory_peak");
        }
        Ok(usage)
    }
}

/// The first slot of a primary.
fn begin(place: usize, primaries: usize) -> usize {
    (place * SLOTS).div_ceil(primaries)
}

/// A server with the settings of the private one.
fn node(directory: &Path, port: u16, peers: u16) -> Result<Child, BenchError> {
    std::fs::create_dir_all(directory)?;
    let child = Command::new("redis-server")
        .current_dir(directory)
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""])
        .args(["--cluster-enabled", "yes", "--cluster-port", &peers.to_string()])
        .args(["--appendonly", "yes", "--appendfsync", "everysec"])
        .args(["--hash-max-listpack-entries", "16", "--zset-max-listpack-entries", "8"])
        .args(["--latency-tracking", "no"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    Ok(child)
}

/// Makes one cluster of the servers, with the slots divided evenly.
async fn form(clients: &[Client], ports: &[(u16, u16)]) -> Result<(), BenchError> {
    let started = Instant::now();
    let mut connections = Vec::new();
    for client in clients {
        loop {
            match client.get_connection() {
                Ok(connection) => break connections.push(connection),
                Err(error) if started.elapsed() > FORMING => return Err(error.into()),
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }
    for (place, connection) in connections.iter_mut().enumerate() {
        let (from, to) = (begin(place, ports.len()), begin(place + 1, ports.len()) - 1);
        let mut epoch = redis::cmd("CLUSTER");
        epoch.arg("SET-CONFIG-EPOCH").arg(place + 1).exec(connection)?;
        let mut slots = redis::cmd("CLUSTER");
        slots.arg("ADDSLOTSRANGE").arg(from).arg(to).exec(connection)?;
    }
    for (port, peers) in &ports[1..] {
        let mut meet = redis::cmd("CLUSTER");
        meet.arg("MEET").arg("127.0.0.1").arg(port).arg(peers).exec(&mut connections[0])?;
    }
    let known = format!("cluster_known_nodes:{}\r", ports.len());
    for connection in &mut connections {
        loop {
            let info: String = redis::cmd("CLUSTER").arg("INFO").query(connection)?;
            let wanted = ["cluster_state:ok\r", "cluster_slots_ok:16384\r", &known];
            if wanted.iter().all(|part| info.contains(part)) {
                break;
            }
            if started.elapsed() > FORMING {
                return Err(BenchError::Cluster("its nodes do not agree".to_owned()));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    Ok(())
}
