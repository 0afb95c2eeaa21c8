//! A real `redis-server` for one test. It can be killed, frozen, and deprived of the tail of its
//! file.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use super::directory::Directory;
use super::process::signal;
use super::wait::eventually;
use redis::AsyncConnectionConfig;
use redis::aio::MultiplexedConnection;

/// The options of a [`RedisServer`].
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    pub persistence: Persistence,
    /// In bytes. Zero means no bound. Redis never evicts keys.
    pub max_memory: u64,
    /// Also listens on a free port of the loopback, for a proxy in between.
    pub tcp: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Persistence {
    #[default]
    None,
    EverySecond,
    Always,
}

/// A server or a cluster for an instance.
pub trait RedisBackend {
    /// The value of `redis.url`.
    fn url(&self) -> String;
}

impl RedisBackend for RedisServer {
    fn url(&self) -> String {
        self.url()
    }
}

/// Runs until it is dropped, and then leaves no process behind, and no file unless told so.
#[derive(Debug)]
pub struct RedisServer {
    directory: Directory,
    options: Options,
    /// Additional arguments, after all others.
    arguments: Vec<String>,
    port: u16,
    /// More free ports, for `{port}` and `{tls}` in the arguments.
    other_port: u16,
    tls_port: u16,
    child: Option<Child>,
}

impl RedisServer {
    /// Starts a server and returns once it answers.
    pub fn start(options: Options) -> Self {
        Self::start_with(options, &[])
    }

    /// The same with additional arguments for `redis-server`. `{port}` and `{tls}` in them stand
    /// for free ports.
    pub fn start_with(options: Options, arguments: &[String]) -> Self {
        Self::start_in(Directory::temporary(), options, arguments)
    }

    /// The same with the data of this directory.
    pub fn start_in(directory: Directory, options: Options, arguments: &[String]) -> Self {
        let port = if options.tcp { free_port() } else { 0 };
        let arguments = arguments.to_vec();
        let mut server =
            Self { directory, options, arguments, port, other_port: 0, tls_port: 0, child: None };
        (server.other_port, server.tls_port) = (free_port(), free_port());
        // Another process may take the port before the server does.
        for _ in 0..10 {
            match server.launch() {
                Ok(child) => {
                    server.child = Some(child);
                    return server;
                }
                Err(output) if output.contains("Address already in use") => {
                    server.port = if options.tcp { free_port() } else { 0 };
                    (server.other_port, server.tls_port) = (free_port(), free_port());
                }
                Err(output) => panic!("redis-server did not start:\n{output}"),
            }
        }
        panic!("no free port in ten tries");
    }

    /// The URL of the unix socket.
    pub fn url(&self) -> String {
        format!("redis+unix://{}", self.socket().display())
    }

    /// The TCP address, if [`Options::tcp`] is set. It stays the same after a restart.
    pub fn tcp_addr(&self) -> SocketAddr {
        assert!(self.options.tcp, "started without TCP");
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// A connection with long timeouts, because the test may keep the machine busy.
    pub async fn connection(&self) -> MultiplexedConnection {
        connect(&redis::Client::open(self.url()).unwrap()).await
    }

    /// How often it ran a command.
    pub async fn calls(&self, command: &str) -> u64 {
        let mut connection = self.connection().await;
        let mut info = redis::cmd("INFO");
        let text: String = info.arg("commandstats").query_async(&mut connection).await.unwrap();
        let start = format!("cmdstat_{command}:calls=");
        let line = text.lines().find_map(|line| line.strip_prefix(&start));
        line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
    }

    /// Notes commands from now on, for [`Self::noted`].
    pub async fn note_commands(&self) {
        for (setting, value) in [("slowlog-log-slower-than", "0"), ("slowlog-max-len", "10000")] {
            self.ask(&["CONFIG", "SET", setting, value]).await;
        }
    }

    /// The words of the last 10,000 commands that it noted, in their order. Redis cuts long words, and
    /// commands with many words.
    pub async fn noted(&self) -> Vec<Vec<String>> {
        /// Its id, its time, how long it took, its words, its client, and the name of that.
        type Noted = (u64, u64, u64, Vec<Vec<u8>>, String, String);

        let mut noted = redis::cmd("SLOWLOG");
        noted.arg(&["GET", "-1"]);
        let mut connection = self.connection().await;
        let noted: Vec<Noted> = noted.query_async(&mut connection).await.unwrap();
        let text = |word: &Vec<u8>| String::from_utf8_lossy(word).into_owned();
        noted.iter().rev().map(|noted| noted.3.iter().map(text).collect()).collect()
    }

    /// The id of the running process.
    pub fn id(&self) -> u32 {
        self.child.as_ref().expect("the server runs").id()
    }

    /// Replaces the additional arguments of later starts.
    pub fn set_arguments(&mut self, arguments: &[String]) {
        self.arguments = arguments.to_vec();
    }

    /// Kills the process, so that it cannot clean up.
    pub fn kill9(&mut self) {
        let mut child = self.child.take().expect("the server runs");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// The port of `{tls}` in the additional arguments.
    pub fn tls_port(&self) -> u16 {
        self.tls_port
    }

    /// The port of `{port}` in the additional arguments. It stays the same after a restart.
    pub fn other_port(&self) -> u16 {
        self.other_port
    }

    pub fn sigstop(&self) {
        signal(self.child.as_ref().expect("the server runs").id(), "STOP");
    }

    pub fn sigcont(&self) {
        signal(self.child.as_ref().expect("the server runs").id(), "CONT");
    }

    /// A replica of this server, which has its data already.
    pub async fn replica(&self) -> Self {
        let port = self.tcp_addr().port().to_string();
        let arguments = ["--replicaof", "127.0.0.1", &port].map(str::to_owned);
        let replica = Self::start_with(
            Options { persistence: Persistence::None, ..self.options },
            &arguments,
        );
        replica.in_step().await;
        // The primary counts it only after its first report, which comes within a second.
        let counted = format!("port={},state=online", replica.tcp_addr().port());
        eventually(Duration::from_secs(30), "the primary counts the replica", async || {
            self.ask(&["INFO", "replication"]).await.contains(&counted)
        })
        .await;
        replica
    }

    /// Waits until this replica has the data of its primary.
    pub async fn in_step(&self) {
        eventually(Duration::from_secs(30), "the replica is in step", async || {
            self.ask(&["INFO", "replication"]).await.contains("master_link_status:up")
        })
        .await;
    }

    /// Copies its append-only files into a new directory, to be looked at later.
    pub fn keep_data(&self, to: &Path) {
        let aof = self.aof();
        let files = aof.parent().into_iter().flat_map(|from| fs::read_dir(from).unwrap());
        fs::create_dir_all(to).unwrap();
        for file in files.map(Result::unwrap) {
            fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    }

    /// Sends a command. Returns its answer as text.
    pub async fn ask(&self, command: &[&str]) -> String {
        let mut connection = self.connection().await;
        let mut cmd = redis::cmd(command[0]);
        cmd.arg(&command[1..]);
        let value: redis::Value = cmd.query_async(&mut connection).await.unwrap();
        redis::from_redis_value(value.clone()).unwrap_or_else(|_| format!("{value:?}"))
    }

    /// Restarts on the same directory, and kills the server first if it still runs.
    pub fn restart(&mut self) {
        if self.child.is_some() {
            self.kill9();
        }
        self.child = Some(
            self.launch()
                .unwrap_or_else(|output| panic!("redis-server did not restart:\n{output}")),
        );
    }

    /// The length of the append-only file.
    pub fn aof_bytes(&self) -> u64 {
        fs::metadata(self.aof()).unwrap().len()
    }

    /// Cuts bytes off the end of the append-only file while the server is down. A machine that
    /// loses power before they reach the disk does the same. It cuts at most the whole file.
    pub fn truncate_aof(&self, bytes: u64) {
        assert!(self.child.is_none(), "kill the server first");
        let file = OpenOptions::new().write(true).open(self.aof()).unwrap();
        let length = file.metadata().unwrap().len();
        file.set_len(length.saturating_sub(bytes)).unwrap();
    }

    /// Cuts the append-only file within its last transaction while the server is down. The commands
    /// up to the first one of this name stay, and the start of the next one.
    pub fn cut_transaction_after(&self, command: &str) {
        let bytes = fs::read(self.aof()).unwrap();
        let find = |from: usize, part: &[u8]| {
            let found = bytes[from..].windows(part.len()).position(|window| window == part);
            from + found.unwrap_or_else(|| panic!("no {command} in the last transaction"))
        };
        let multi = b"*1\r\n$5\r\nMULTI\r\n";
        let begin = bytes.windows(multi.len()).rposition(|window| window == multi);
        let name = format!("${}\r\n{command}\r\n", command.len());
        let next = find(find(begin.expect("a transaction"), name.as_bytes()), b"\r\n*") + 2;
        self.truncate_aof(u64::try_from(bytes.len() - next - 3).unwrap());
    }

    /// The part of the append-only file that grows.
    fn aof(&self) -> PathBuf {
        let parts = fs::read_dir(self.directory.path().join("appendonlydir")).unwrap();
        let part = parts.map(|entry| entry.unwrap().path());
        part.filter(|path| path.to_string_lossy().ends_with(".incr.aof"))
            .max_by_key(|path| fs::metadata(path).unwrap().modified().unwrap())
            .expect("started with persistence")
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("redis.sock")
    }

    /// The running server, or its output if it ended.
    fn launch(&self) -> Result<Child, String> {
        let (appendonly, appendfsync) = match self.options.persistence {
            Persistence::None => ("no", "no"),
            Persistence::EverySecond => ("yes", "everysec"),
            Persistence::Always => ("yes", "always"),
        };
        // A write beyond a limit of its files must fail, and not end the server.
        let mut child = Command::new("sh")
            .args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\"", &program()])
            .current_dir(self.directory.path())
            .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1"])
            .args(["--unixsocket", &self.socket().to_string_lossy()])
            .args(["--save", "", "--appendonly", appendonly, "--appendfsync", appendfsync])
            .args(["--maxmemory", &self.options.max_memory.to_string()])
            .args(["--maxmemory-policy", "noeviction"])
            // A replica does not wait for others.
            .args(["--repl-diskless-sync-delay", "0"])
            .args(self.arguments.iter().map(|argument| {
                let argument = argument.replace("{port}", &self.other_port.to_string());
                argument.replace("{tls}", &self.tls_port.to_string())
            }))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("redis-server is installed");
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut output = String::new();
        for line in lines.by_ref().map_while(Result::ok) {
            // Redis prints one of these for its last listener, after the data is loaded: up to 7.0
            // the first one, later and in Valkey the second one.
            let ready = ["eady to accept connections at", "Ready to accept connections unix"];
            if ready.iter().any(|text| line.contains(text)) {
                // A full pipe would block the server. The thread ends with it.
                std::thread::spawn(move || lines.for_each(drop));
                return Ok(child);
            }
            output.push_str(&line);
            output.push('\n');
        }
        child.wait().unwrap();
        Err(output)
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        if self.child.is_some() {
            self.kill9();
        }
    }
}

/// The program of the servers: `redis-server`, or the one that `FAIRLANE_TEST_REDIS` names, for
/// example a `valkey-server`.
#[expect(clippy::disallowed_methods, reason = "the setting of the tests, which no program reads")]
pub fn program() -> String {
    std::env::var("FAIRLANE_TEST_REDIS").unwrap_or_else(|_| "redis-server".to_owned())
}

/// Below the ports that systems give to outgoing connections (Linux: from 32768, others: from 49152). A
/// connection would otherwise take the port of a server that was killed and starts again. Chromium
/// refuses none of them.
const PORTS: RangeInclusive<u16> = 16_000..=32_767;

/// A free port that this process has not returned before.
pub fn free_port() -> u16 {
    static TOLD: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    loop {
        let random = RandomState::new().build_hasher().finish() % PORTS.len() as u64;
        let port = PORTS.start() + u16::try_from(random).unwrap();
        let is_free = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
        if is_free && TOLD.lock().unwrap().insert(port) {
            return port;
        }
    }
}

/// A free port of this machine, see [`free_port`].
pub fn free_address() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, free_port()).into()
}

/// Connects with long timeouts: those of the client are 1 s to connect and 500 ms for an answer.
pub async fn connect(client: &redis::Client) -> MultiplexedConnection {
    let long = Some(Duration::from_secs(60));
    let config =
        AsyncConnectionConfig::new().set_connection_timeout(long).set_response_timeout(long);
    client.get_multiplexed_async_connection_with_config(&config).await.unwrap()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use redis::AsyncCommands;

    use super::*;
    use crate::wait::eventually;

    /// A kill loses no written data, even if the file is synced only every second.
    #[tokio::test]
    async fn a_killed_server_comes_back_with_its_data() {
        let options =
            Options { persistence: Persistence::EverySecond, tcp: true, ..Options::default() };
        let mut server = RedisServer::start(options);
        let () = server.connection().await.set("a", 1).await.unwrap();
        server.kill9();
        server.restart();
        assert_eq!(server.connection().await.get::<_, i32>("a").await.unwrap(), 1);
        let client = redis::Client::open(format!("redis://{}", server.tcp_addr())).unwrap();
        let mut connection = connect(&client).await;
        assert_eq!(connection.get::<_, i32>("a").await.unwrap(), 1);
    }

    #[tokio::test]
    async fn a_cut_tail_is_gone_and_the_rest_is_there() {
        let options = Options { persistence: Persistence::Always, ..Options::default() };
        let mut server = RedisServer::start(options);
        let () = server.connection().await.set("kept", 1).await.unwrap();
        let before = server.aof_bytes();
        let () = server.connection().await.set("lost", 1).await.unwrap();
        server.kill9();
        server.truncate_aof(server.aof_bytes() - before);
        server.restart();
        let mut connection = server.connection().await;
        assert!(connection.exists::<_, bool>("kept").await.unwrap());
        assert!(!connection.exists::<_, bool>("lost").await.unwrap());
    }

    #[tokio::test]
    async fn a_frozen_server_answers_when_it_thaws() {
        let server = RedisServer::start(Options::default());
        let mut connection = server.connection().await;
        server.sigstop();
        assert!(connection.set::<_, _, ()>("a", 1).await.is_err(), "it is frozen");
        server.sigcont();
        eventually(Duration::from_secs(10), "the write arrives", async || {
            connection.get::<_, Option<i32>>("a").await.is_ok_and(|value| value == Some(1))
        })
        .await;
    }

    #[tokio::test]
    async fn a_full_server_refuses_writes() {
        let options = Options { max_memory: 2 << 20, ..Options::default() };
        let server = RedisServer::start(options);
        let mut connection = server.connection().await;
        let refused = connection.set::<_, _, ()>("a", vec![0_u8; 4 << 20]).await;
        let refused = refused.and(connection.set::<_, _, ()>("b", 1).await);
        assert!(refused.unwrap_err().to_string().contains("OOM"));
    }

    #[test]
    fn a_dropped_server_leaves_nothing() {
        let server = RedisServer::start(Options::default());
        let (path, id) = (server.directory.path().to_owned(), server.child.as_ref().unwrap().id());
        drop(server);
        assert!(!path.exists());
        assert!(!PathBuf::from(format!("/proc/{id}")).exists());
    }
}
