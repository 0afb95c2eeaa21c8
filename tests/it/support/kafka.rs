//! A broker of Kafka's protocol for one test. It can be killed and frozen. `.ci/setup test` installs
//! two: no package of Apache Kafka itself exists that could be installed the same way.
//!
//! Neither is a Kafka, so a promise holds only if it holds with both, or with the one that is right
//! in that matter. `bus::brokers` asserts each line of this table.
//!
//! | a reader needs | `noida-db` 0.2.3 | Tansu 0.6 |
//! |---|---|---|
//! | the first and the end offset | right | the end is wrong: the first offset of the last batch + 1 |
//! | the end while a transaction is open | right: its begin | wrong: both are 0 |
//! | an error for an offset out of range | right | none: the client waits forever |
//! | a read from the middle of a batch | right | right |
//! | the offset for a time | right | wrong: always 0 |
//! | commit and read offsets of a group, without members | right | right, without the metadata |
//! | members of a group (`subscribe`) | right | not within 10 s |
//! | transactions: markers occupy offsets | right | right |
//! | hides what an aborted transaction wrote | right | wrong: shows it |
//! | idempotent producers | right | right |
//! | deletes records (`DeleteRecords`) | right | no: closes the connection |
//! | adds partitions (`CreatePartitions`) | right | no |
//! | topic ids | wrong: all are zero | right: a new one for a topic made anew |
//! | a topic made anew begins at 0 | right | right |
//! | creates unknown topics when asked for them | yes, as Kafka by default | yes |
//! | headers, also without a value and repeated | right | right |
//! | null values beside empty ones, null keys | right | right |
//! | gzip, snappy, lz4 and zstd | right | right |
//! | the settings of a topic | right | only those that were set |
//! | the settings of a broker | 3 of them | none |
//! | refuses records that are too large | right: 1 MB | no |
//! | the id of the cluster | the same for every installation | `tansu_cluster` |
//! | leader epochs | none: always 0 | none: always 0 |
//! | TLS | no | no: a proxy in front speaks it |
//! | SASL | PLAIN, with any password | none: with `--authentication` it refuses everybody |
//! | keeps data when it is killed | what is older than about 1 s | nothing |

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use tempfile::TempDir;

use super::papers::Papers;
use super::redis::free_port;
use super::wait::holds_within;
use fairlane_testkit::directory::temporary;
use fairlane_testkit::process::{installed, signal};

/// Of requests of the tests. Long, because they may keep the machine busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The two brokers. What a reader relies on must hold with both, or be known as a fault of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    /// `noida-db`, on disk. It writes its data once a second.
    Noida,
    /// Tansu, in memory: a restart loses everything.
    Tansu,
}

/// Both brokers, for tests of what both must do.
pub(crate) const ENGINES: [Engine; 2] = [Engine::Noida, Engine::Tansu];

/// Runs until it is dropped, and then leaves neither process nor file behind.
#[derive(Debug)]
pub(crate) struct KafkaBroker {
    engine: Engine,
    directory: TempDir,
    tls: Option<Front>,
    /// The port that it tells its clients, if not its own.
    told: Option<u16>,
    port: u16,
    child: Option<Child>,
}

impl KafkaBroker {
    /// Starts a broker and returns once it answers.
    pub(crate) fn start(engine: Engine) -> Self {
        Self::start_with(engine, None, None)
    }

    /// Starts Tansu, which sends its clients to this port. The test forwards it to
    /// [`Self::own_address`].
    pub(crate) fn start_behind(port: u16) -> Self {
        Self::start_with(Engine::Tansu, None, Some(port))
    }

    /// Where it listens.
    pub(crate) fn own_address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Starts Tansu behind a proxy that speaks TLS, and that requires a certificate of the client
    /// if `mutual`.
    pub(crate) fn encrypted(mutual: bool) -> Self {
        Self::start_with(Engine::Tansu, Some(Front::reserve(mutual)), None)
    }

    fn start_with(engine: Engine, tls: Option<Front>, told: Option<u16>) -> Self {
        let directory = temporary();
        let mut broker = Self { engine, directory, tls, told, port: 0, child: None };
        // Another process may take the port before the broker does.
        for _ in 0..10 {
            broker.port = free_port();
            match broker.launch() {
                Ok(child) => {
                    broker.child = Some(child);
                    if let Some(front) = &mut broker.tls {
                        front.start(broker.port);
                    }
                    return broker;
                }
                Err(output) if output.contains("in use") => {}
                Err(output) => panic!("{engine:?} did not start:\n{output}"),
            }
        }
        panic!("no free port in ten tries");
    }

    /// The value of `brokers` of a source, and of `bootstrap.servers`. It stays the same after a
    /// restart.
    pub(crate) fn brokers(&self) -> String {
        self.address().to_string()
    }

    pub(crate) fn address(&self) -> SocketAddr {
        let told = self.told.unwrap_or(self.port);
        (Ipv4Addr::LOCALHOST, self.tls.as_ref().map_or(told, |front| front.port)).into()
    }

    /// The certificates, if TLS is on.
    pub(crate) fn papers(&self) -> &Papers {
        &self.tls.as_ref().expect("started with TLS").papers
    }

    /// The configuration of a client: the address and, if TLS is on, the authority and the
    /// certificate.
    pub(crate) fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", self.brokers());
        if let Some(Front { papers, mutual, .. }) = &self.tls {
            let file = |name| papers.path(name).display().to_string();
            config.set("security.protocol", "ssl").set("ssl.ca.location", file("ca"));
            if *mutual {
                config.set("ssl.certificate.location", file("cert"));
                config.set("ssl.key.location", file("key"));
            }
        }
        config
    }

    pub(crate) fn admin(&self) -> AdminClient<DefaultClientContext> {
        self.config().create().unwrap()
    }

    /// Creates a topic.
    pub(crate) async fn create_topic(&self, name: &str, partitions: i32) {
        let topic = NewTopic::new(name, partitions, TopicReplication::Fixed(1));
        let created = self.admin().create_topics([&topic], &patient()).await.unwrap();
        created[0].as_ref().unwrap();
    }

    /// Deletes a topic. A topic of this name can be created again.
    pub(crate) async fn delete_topic(&self, name: &str) {
        let deleted = self.admin().delete_topics(&[name], &patient()).await.unwrap();
        deleted[0].as_ref().unwrap();
    }

    /// Stops the process, so that it writes its data. [`Engine::Tansu`] has none.
    pub(crate) fn stop(&mut self) {
        let mut child = self.child.take().expect("the broker runs");
        signal(child.id(), "TERM");
        child.wait().unwrap();
    }

    /// Kills the process, so that it cannot clean up. [`Engine::Noida`] loses about the last second.
    pub(crate) fn kill9(&mut self) {
        let mut child = self.child.take().expect("the broker runs");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    pub(crate) fn sigstop(&self) {
        signal(self.child.as_ref().expect("the broker runs").id(), "STOP");
    }

    pub(crate) fn sigcont(&self) {
        signal(self.child.as_ref().expect("the broker runs").id(), "CONT");
    }

    /// Restarts on the same directory and port, and stops the broker first if it still runs.
    pub(crate) fn restart(&mut self) {
        if self.child.is_some() {
            self.stop();
        }
        let child = self.launch();
        self.child = Some(
            child.unwrap_or_else(|output| panic!("{:?} did not restart:\n{output}", self.engine)),
        );
    }

    /// The running broker, or its output if it ended.
    fn launch(&self) -> Result<Child, String> {
        let (mut command, ready) = match self.engine {
            Engine::Noida => {
                let mut command = Command::new(installed("buses/noida-db"));
                command.args(["start", "--only", "kafka", "--host", "127.0.0.1"]);
                command.args(["--kafka-port", &self.port.to_string()]);
                command.arg("--data-dir").arg(self.data());
                (command, "press Ctrl-C to stop")
            }
            Engine::Tansu => {
                let mut command = Command::new(installed("buses/tansu"));
                command.args(["--listener-url", &format!("tcp://127.0.0.1:{}", self.port)]);
                command.args(["--advertised-listener-url", &format!("tcp://{}", self.brokers())]);
                command.args(["--storage-engine", "memory://tansu/"]);
                (command, "ready in ")
            }
        };
        let log = self.directory.path().join("log");
        let mut child = command
            .current_dir(self.directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut output = String::new();
        for line in lines.by_ref().map_while(Result::ok) {
            if line.starts_with(ready) {
                // A full pipe would block the broker. The thread ends with it.
                std::thread::spawn(move || lines.for_each(drop));
                return Ok(child);
            }
            output.push_str(&line);
            output.push('\n');
        }
        child.wait().unwrap();
        Err(output + &fs::read_to_string(log).unwrap_or_default())
    }

    /// The records of [`Engine::Noida`].
    fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }
}

impl Drop for KafkaBroker {
    fn drop(&mut self) {
        if self.child.is_some() {
            self.kill9();
        }
    }
}

/// A HAProxy that speaks TLS in front of a broker. It ends with the broker.
#[derive(Debug)]
struct Front {
    papers: Papers,
    mutual: bool,
    port: u16,
    child: Option<Child>,
}

impl Front {
    /// Chooses the port, because the broker tells it to its clients.
    fn reserve(mutual: bool) -> Self {
        Self { papers: Papers::new(), mutual, port: free_port(), child: None }
    }

    fn start(&mut self, broker: u16) {
        let read = |name| fs::read_to_string(self.papers.path(name)).unwrap();
        fs::write(self.papers.path("both"), read("cert") + &read("key")).unwrap();
        let (both, ca) = (self.papers.path("both"), self.papers.path("ca"));
        let verify = if self.mutual { "required" } else { "none" };
        let configuration = format!(
            "defaults\n  mode tcp\n  timeout connect 60s\n  timeout client 1h\n  timeout server 1h\n\
             listen tls\n  bind 127.0.0.1:{} ssl crt {} ca-file {} verify {verify}\n  \
             server broker 127.0.0.1:{broker}\n",
            self.port,
            both.display(),
            ca.display(),
        );
        let file = self.papers.path("haproxy");
        fs::write(&file, configuration).unwrap();
        let mut haproxy = Command::new("haproxy");
        haproxy.args(["-db", "-f"]).arg(file).stdin(Stdio::null()).stderr(Stdio::null());
        let child = haproxy.spawn().expect("run `bash .ci/setup test`, or `make test`, which does");
        self.child = Some(child);
        let listens = || TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_ok();
        assert!(holds_within(PATIENCE, listens), "HAProxy does not listen");
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

/// Options of requests of [`KafkaBroker::admin`].
pub(crate) fn patient() -> AdminOptions {
    AdminOptions::new().request_timeout(Some(PATIENCE)).operation_timeout(Some(PATIENCE))
}
