//! A broker of Kafka's protocol for one test. It can be killed and frozen. `.ci/setup test` installs
//! two: no package of Apache Kafka itself exists that could be installed the same way.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use tempfile::TempDir;

use super::papers::Papers;
use super::process::{bus_program, signal};
use super::redis::free_port;

/// Of requests of the tests. Long, because they may keep the machine busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The two brokers. What a reader relies on must hold with both, or be known as a fault of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    /// `noida-db`, on disk.
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
    /// With TLS. Only Tansu has it.
    papers: Option<Papers>,
    port: u16,
    child: Option<Child>,
}

impl KafkaBroker {
    /// Starts a broker and returns once it answers.
    pub(crate) fn start(engine: Engine) -> Self {
        Self::start_with(engine, None)
    }

    /// Starts Tansu with TLS on its only port.
    pub(crate) fn encrypted() -> Self {
        Self::start_with(Engine::Tansu, Some(Papers::new()))
    }

    fn start_with(engine: Engine, papers: Option<Papers>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut broker = Self { engine, directory, papers, port: 0, child: None };
        // Another process may take the port before the broker does.
        for _ in 0..10 {
            broker.port = free_port();
            match broker.launch() {
                Ok(child) => {
                    broker.child = Some(child);
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
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// The certificates, if TLS is on.
    pub(crate) fn papers(&self) -> &Papers {
        self.papers.as_ref().expect("started with TLS")
    }

    /// The configuration of a client: the address and, if TLS is on, the authority.
    pub(crate) fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", self.brokers());
        if let Some(papers) = &self.papers {
            config.set("security.protocol", "ssl");
            config.set("ssl.ca.location", papers.path("ca").display().to_string());
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

    /// Kills the process, so that it cannot clean up.
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

    /// Restarts on the same directory and port, and kills the broker first if it still runs.
    pub(crate) fn restart(&mut self) {
        if self.child.is_some() {
            self.kill9();
        }
        let child = self.launch();
        self.child = Some(
            child.unwrap_or_else(|output| panic!("{:?} did not restart:\n{output}", self.engine)),
        );
    }

    /// The running broker, or its output if it ended.
    fn launch(&self) -> Result<Child, String> {
        let address = self.brokers();
        let (mut command, ready) = match self.engine {
            Engine::Noida => {
                let mut command = Command::new(bus_program("noida-db"));
                command.args(["start", "--only", "kafka", "--host", "127.0.0.1"]);
                command.args(["--kafka-port", &self.port.to_string()]);
                command.arg("--data-dir").arg(self.data());
                (command, "press Ctrl-C to stop")
            }
            Engine::Tansu => {
                let mut command = Command::new(bus_program("tansu"));
                command.args(["--listener-url", &format!("tcp://{address}")]);
                command.args(["--advertised-listener-url", &format!("tcp://{address}")]);
                command.args(["--storage-engine", "memory://tansu/"]);
                if let Some(papers) = &self.papers {
                    command.arg("--cert").arg(papers.path("cert"));
                    command.arg("--key").arg(papers.path("key"));
                }
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

/// Options of requests of [`KafkaBroker::admin`].
pub(crate) fn patient() -> AdminOptions {
    AdminOptions::new().request_timeout(Some(PATIENCE)).operation_timeout(Some(PATIENCE))
}

/// What a broker cannot serve correctly, and why. Each list has at least one broker, so every promise
/// is shown.
pub(crate) mod known {
    use super::Engine::{self, Noida, Tansu};

    /// Brokers that can delete records. Tansu answers every fetch before the first record as if the
    /// log began there.
    pub(crate) const WITH_DELETED_RECORDS: [Engine; 1] = [Noida];
    /// Brokers whose topics can be deleted and made anew.
    pub(crate) const WITH_DELETED_TOPICS: [Engine; 2] = [Noida, Tansu];
    /// Brokers that keep committed offsets with their texts.
    pub(crate) const WITH_COMMITS: [Engine; 2] = [Noida, Tansu];
    /// Brokers whose topics can get further partitions.
    pub(crate) const WITH_NEW_PARTITIONS: [Engine; 2] = [Noida, Tansu];
    /// Brokers with transactions.
    pub(crate) const WITH_TRANSACTIONS: [Engine; 2] = [Noida, Tansu];
}
