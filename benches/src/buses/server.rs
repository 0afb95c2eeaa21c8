//! The server of a bus: a private one, or one that the user names.

use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use fairlane_testkit::redis::free_address;
use tokio::process::{Child, Command};
use tokio::time::Instant;

use super::Bus;
use crate::error::BenchError;

/// Time for a private server to start.
const START: Duration = Duration::from_secs(30);

/// A server. A private one is killed when this is dropped.
#[derive(Debug)]
pub(super) struct Server {
    /// Where it listens, as `HOST:PORT`.
    pub(super) address: String,
    private: Option<Child>,
}

impl Server {
    /// Takes the server at `address`, or starts one with its files under `directory`.
    pub(super) async fn open(
        bus: Bus,
        address: Option<String>,
        directory: &Path,
    ) -> Result<Self, BenchError> {
        match address {
            Some(address) => Ok(Self { address, private: None }),
            None => Self::start(bus, directory).await,
        }
    }

    async fn start(bus: Bus, directory: &Path) -> Result<Self, BenchError> {
        let address = free_address();
        let data = directory.join(bus.as_str());
        std::fs::create_dir_all(&data)?;
        let (variable, default) = match bus {
            Bus::Nats => ("FAIRLANE_NATS_SERVER", "nats-server"),
            Bus::Kafka => ("FAIRLANE_NOIDA_DB", "noida-db"),
        };
        #[expect(
            clippy::disallowed_methods,
            reason = "it belongs to the machine, not to the settings"
        )]
        let named = std::env::var_os(variable);
        let program = named.map_or_else(|| default.into(), PathBuf::from);
        let mut command = Command::new(&program);
        match bus {
            Bus::Nats => {
                let file = data.join("server.conf");
                std::fs::write(&file, nats_configuration(address, &data))?;
                command.arg("--config").arg(file);
            }
            Bus::Kafka => {
                command.args(["start", "--only", "kafka", "--host", "127.0.0.1"]);
                command.args(["--kafka-port", &address.port().to_string()]);
                command.arg("--data-dir").arg(data.join("data"));
            }
        }
        let log = std::fs::File::create(data.join("log"))?;
        let child = command
            .current_dir(&data)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn();
        let refused = |problem: String| BenchError::NoBusServer {
            program: program.clone(),
            variable,
            problem,
        };
        let mut child = child.map_err(|error| refused(error.to_string()))?;
        let until = Instant::now() + START;
        while TcpStream::connect(address).is_err() {
            if child.try_wait()?.is_some() || Instant::now() > until {
                let log = std::fs::read_to_string(data.join("log")).unwrap_or_default();
                let last = log.lines().last().unwrap_or("it does not answer");
                return Err(refused(last.to_owned()));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(Self { address: address.to_string(), private: Some(child) })
    }

    /// The process of a private server.
    pub(super) fn pid(&self) -> Option<u32> {
        self.private.as_ref().and_then(Child::id)
    }

    /// Ends a private server.
    pub(super) async fn close(mut self) -> Result<(), BenchError> {
        if let Some(mut child) = self.private.take() {
            child.kill().await?;
        }
        Ok(())
    }
}

/// As by default, with messages on the disk.
fn nats_configuration(address: SocketAddr, data: &Path) -> String {
    let (port, store) = (address.port(), data.display());
    format!(
        "host: \"127.0.0.1\"\nport: {port}\nserver_name: bench\n\
         jetstream {{ store_dir: \"{store}\" }}\n"
    )
}
