//! A primary, its replicas, and three sentinels that watch them: all of them real processes.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use super::redis::{Options, RedisBackend, RedisServer, free_port, program};
use super::wait::eventually;

/// The name of the service.
pub(crate) const SERVICE: &str = "main";
const SENTINELS: usize = 3;
/// Milliseconds. A primary that is silent for this long is failed over.
const DOWN_AFTER_MS: u32 = 1_500;
const START: Duration = Duration::from_secs(30);

/// Runs until it is dropped, and then leaves neither process nor file behind.
#[derive(Debug)]
pub(crate) struct Watched {
    /// The initial primary, then its replicas.
    pub(crate) servers: Vec<RedisServer>,
    pub(crate) sentinels: Vec<Sentinel>,
}

/// One sentinel.
#[derive(Debug)]
pub(crate) struct Sentinel {
    port: u16,
    child: Child,
    _directory: TempDir,
}

impl RedisBackend for Watched {
    fn url(&self) -> String {
        let at: Vec<_> = self.sentinels.iter().map(Sentinel::address).collect();
        format!("redis+sentinel://{}/{SERVICE}", at.join(","))
    }
}

impl Watched {
    /// Starts all processes, and returns once each sentinel knows all others.
    pub(crate) async fn start(options: Options, replicas: usize) -> Self {
        let primary = RedisServer::start(Options { tcp: true, ..options });
        let mut servers = vec![primary];
        for _ in 0..replicas {
            let replica = servers[0].replica().await;
            servers.push(replica);
        }
        let port = servers[0].tcp_addr().port();
        let sentinels = (0..SENTINELS).map(|_| Sentinel::start(port)).collect();
        let watched = Self { servers, sentinels };
        for sentinel in &watched.sentinels {
            eventually(START, "the sentinel knows all", async || {
                sentinel.number("num-slaves").await == Some(replicas)
                    && sentinel.number("num-other-sentinels").await == Some(SENTINELS - 1)
            })
            .await;
        }
        watched
    }

    /// The place of the primary that most sentinels name.
    pub(crate) async fn primary(&self) -> Option<usize> {
        let mut named = Vec::new();
        for sentinel in &self.sentinels {
            named.push(sentinel.primary().await);
        }
        let votes = |port: u16| named.iter().filter(|named| **named == Some(port)).count();
        let mut places = self.servers.iter().enumerate();
        let most = places.find(|(_, server)| votes(server.tcp_addr().port()) * 2 > SENTINELS);
        most.map(|(place, _)| place)
    }

    /// Waits until the sentinels name another primary than the one at `old`. Returns its place.
    pub(crate) async fn fails_over(&self, old: usize) -> usize {
        eventually(START, "another primary is named", async || {
            self.primary().await.is_some_and(|new| new != old)
        })
        .await;
        self.primary().await.unwrap()
    }
}

impl Sentinel {
    /// Watches the server at this port. Two of three must agree on a failover.
    pub(crate) fn start(watches: u16) -> Self {
        Self::start_with(watches, "port {port}\n")
    }

    /// The same with these settings, in which `{port}` stands for its port.
    pub(crate) fn start_with(watches: u16, settings: &str) -> Self {
        let (directory, port) = (tempfile::tempdir().unwrap(), free_port());
        let settings = settings.replace("{port}", &port.to_string());
        let text = format!(
            "{settings}bind 127.0.0.1\nsentinel monitor {SERVICE} 127.0.0.1 {watches} 2\n\
             sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n\
             sentinel failover-timeout {SERVICE} 6000\n"
        );
        std::fs::write(directory.path().join("sentinel.conf"), text).unwrap();
        let mut child = Command::new(program())
            .current_dir(directory.path())
            .args(["sentinel.conf", "--sentinel"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let started = lines.by_ref().map_while(Result::ok).any(|line| line.contains("+monitor"));
        assert!(started, "the sentinel did not start");
        // A full pipe would block it. The thread ends with it.
        std::thread::spawn(move || lines.for_each(drop));
        Self { port, child, _directory: directory }
    }

    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Starts a planned failover.
    pub(crate) async fn fail_over(&self) {
        self.ask::<String>("FAILOVER").await.expect("the sentinel agrees");
    }

    /// A field of `SENTINEL MASTER`.
    async fn number(&self, field: &str) -> Option<usize> {
        let fields: std::collections::HashMap<String, String> = self.ask("MASTER").await?;
        fields.get(field)?.parse().ok()
    }

    /// The port of the primary.
    async fn primary(&self) -> Option<u16> {
        let (_, port): (String, u16) = self.ask("GET-MASTER-ADDR-BY-NAME").await?;
        Some(port)
    }

    async fn ask<T: redis::FromRedisValue>(&self, command: &str) -> Option<T> {
        let client = redis::Client::open(format!("redis://{}", self.address())).ok()?;
        let mut connection = client.get_multiplexed_async_connection().await.ok()?;
        let mut asked = redis::cmd("SENTINEL");
        asked.arg(command).arg(SERVICE);
        asked.query_async(&mut connection).await.ok()
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
