//! The embedded default: a private MongoDB server under the data directory.
//!
//! It listens only on 127.0.0.1 and has no passwords, so every program on this machine can reach
//! it. It acknowledges writes once they are in the journal. The first process starts it, other
//! processes adopt it, and the last process stops it. A killed process leaves it running for the
//! next one. Each process shows its presence by a shared lock on a file. The operating system
//! releases the lock when the process ends.
//!
//! | file | content |
//! |---|---|
//! | `lock` | empty: a process locks it to start or stop the server |
//! | `users` | empty: each process that uses the server holds a shared lock |
//! | `server` | process id and port of the last started server |
//! | `mongodb.log` | the log of the server |
//! | `data/` | the data |

mod error;
mod process;
mod progress;

use std::ffi::OsString;
use std::fs::{File, TryLockError};
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rand::Rng;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

pub use self::error::PrivateMongoError;
use self::process::{has_argument, signal};
use self::progress::Progress;
use super::MongoUrl;
use super::client::{Mongo, MongoError};
use crate::private::{Home, POLL, Unusable, open_to_lock, outliving};

/// Operating systems do not assign these ports to outgoing connections. So no connection takes the
/// port while the server is down.
const PORTS: std::ops::RangeInclusive<u16> = 20_000..=31_999;
/// Number of ports to try if another program takes one first.
const TRIES: usize = 5;
/// How long the lock of a terminated process may remain: a child process inherits all open files
/// for a moment while it starts.
const LINGERING: Duration = Duration::from_millis(100);
/// How long a killed server may still hold its port. The system reports it as ended while some of
/// its threads still run, and the last of them closes the port.
const PORT_HELD: Duration = Duration::from_secs(2);

/// The directory of the server under the data directory, and the one of its data there.
const SERVER: &str = "mongodb";
const DATA: &str = "data";

/// The directory of the data of a private server under `data_dir`; `None` if no server has written
/// anything.
pub(crate) fn data_of(data_dir: &Path) -> Option<PathBuf> {
    let data = data_dir.join(SERVER).join(DATA);
    has_data(&data).then_some(data)
}

/// Whether a server has written anything there. A directory that cannot be read may have data.
fn has_data(data: &Path) -> bool {
    match std::fs::read_dir(data) {
        Ok(mut files) => files.next().is_some(),
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// Options for starting and stopping the server. A running server is adopted unchanged.
#[derive(Debug, Clone)]
pub struct Options {
    /// The program: a path, or a name that is looked up in `PATH`. If its name contains `secantus`,
    /// it gets the arguments of that server; otherwise it gets those of `mongod`.
    pub program: PathBuf,
    /// Further arguments, after all others.
    pub arguments: Vec<OsString>,
    /// How long a starting server may make no progress: it neither answers nor writes to its log.
    pub start_within: Duration,
    /// Time limit for a regular stop, before the server is killed.
    pub stop_within: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            program: "mongod".into(),
            arguments: Vec::new(),
            start_within: Duration::from_secs(60),
            stop_within: Duration::from_secs(10),
        }
    }
}

/// A running private server.
///
/// Dropping it leaves the server running. Use [`Self::stop`] for an orderly end.
#[derive(Debug)]
pub struct PrivateMongo {
    place: Files,
    url: MongoUrl,
    server: Server,
    stop_within: Duration,
    /// Holds the shared lock.
    users: File,
    /// `None`: this process adopted the server. The runtime reaps a dropped child too.
    child: Option<Child>,
}

impl PrivateMongo {
    /// Adopts the server under `data_dir`, or starts one there and waits until it answers.
    ///
    /// `data_dir` is created with mode 0700. `program` defaults to `mongod` in `PATH`. A restarted
    /// server gets its former port, unless another program uses it.
    ///
    /// # Errors
    /// If the directory is not usable, the program is missing or older than 6.0, or the server ends
    /// or makes no progress for 60 s.
    ///
    /// # Panics
    /// Outside a tokio runtime with I/O and time.
    ///
    /// # Cancel safety
    /// A started server continues to start, and the next call adopts it.
    pub async fn start(data_dir: &Path, program: Option<&Path>) -> Result<Self, PrivateMongoError> {
        let mut options = Options::default();
        if let Some(program) = program {
            program.clone_into(&mut options.program);
        }
        Self::start_with(data_dir, options).await
    }

    /// [`Self::start`] with other options, for tests and measurements.
    ///
    /// # Errors
    /// As for [`Self::start`].
    ///
    /// # Panics
    /// As for [`Self::start`].
    ///
    /// # Cancel safety
    /// As for [`Self::start`].
    pub async fn start_with(data_dir: &Path, options: Options) -> Result<Self, PrivateMongoError> {
        let place = Files::create(data_dir)?;
        let _lock = place.home.lock().await?;
        let users = place.users()?;
        // This does not wait: only a process that stops the server holds this lock exclusively, and
        // it then also holds the other lock.
        users.lock_shared().map_err(Unusable::at(&place.users_path()))?;
        let (server, child) = match place.adopt(&options).await? {
            Some(server) => (server, None),
            None => place
                .spawn_until_ready(&options)
                .await
                .map(|(server, child)| (server, Some(child)))?,
        };
        tracing::info!(
            pid = server.pid,
            port = server.port,
            adopted = child.is_none(),
            "private MongoDB is ready"
        );
        let (url, stop_within) = (server.url(), options.stop_within);
        Ok(Self { place, url, server, stop_within, users, child })
    }

    /// The address for clients.
    #[must_use]
    pub fn url(&self) -> &MongoUrl {
        &self.url
    }

    /// Whether this call started it; otherwise it was already running.
    #[must_use]
    pub fn was_started(&self) -> bool {
        self.child.is_some()
    }

    /// The server's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.server.pid
    }

    /// Releases the server. If no other process uses it, the server is stopped, and killed if it
    /// has not ended within 10 s. Acknowledged writes are in its journal. If another process still
    /// starts the server after 5 s, leaves it to that process.
    ///
    /// Returns whether no server runs any more.
    ///
    /// # Errors
    /// If the files are not usable, or the server cannot be stopped. It then keeps running.
    ///
    /// # Cancel safety
    /// The server may keep running, or end on its own.
    pub async fn stop(self) -> Result<bool, PrivateMongoError> {
        let Self { place, server, users, stop_within, child, .. } = self;
        let Some(_lock) = place.home.lock_to_stop().await? else { return Ok(false) };
        drop(users);
        // Kept until the end, although no process can take it while the other lock is held.
        let Some(_alone) = place.last_one().await? else { return Ok(false) };
        // Another process may have replaced the server meanwhile, and may have ended since.
        for server in place.recorded().into_iter().chain([server]) {
            place.end(server, stop_within).await?;
        }
        if let Some(mut child) = child {
            // Reaps the ended child.
            let _ = tokio::time::timeout(LINGERING, child.wait()).await;
        }
        Ok(true)
    }
}

/// The server in the file `server`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Server {
    pid: u32,
    port: u16,
}

impl Server {
    /// A direct connection, regardless of any replica set configuration. Without `journal`, a
    /// standalone server acknowledges writes before they are in its journal.
    fn url(self) -> MongoUrl {
        let port = self.port;
        let text =
            format!("mongodb://127.0.0.1:{port}/?directConnection=true&w=majority&journal=true");
        MongoUrl::parse(&text).expect("something answers at the port, so it is not 0")
    }
}

/// The result of probing a server that should answer.
enum Probe {
    /// The port is not open yet.
    Absent,
    /// The port is open, but there is no answer.
    Starting(MongoError),
    /// The server answers.
    Ready,
}

/// The files of the server.
#[derive(Debug)]
struct Files {
    home: Home,
    data: PathBuf,
}

impl Files {
    fn create(data_dir: &Path) -> Result<Self, PrivateMongoError> {
        let home = Home::create(data_dir, SERVER)?;
        let data = home.dir.join(DATA);
        std::fs::create_dir_all(&data).map_err(Unusable::at(&data))?;
        Ok(Self { home, data })
    }

    fn users_path(&self) -> PathBuf {
        self.home.dir.join("users")
    }

    fn users(&self) -> Result<File, Unusable> {
        open_to_lock(&self.users_path())
    }

    /// The exclusive lock on `users`; `None` if another process uses the server. The caller must
    /// hold the file `lock`.
    async fn last_one(&self) -> Result<Option<File>, PrivateMongoError> {
        let users = self.users()?;
        let started = Instant::now();
        loop {
            match users.try_lock() {
                Ok(()) => return Ok(Some(users)),
                Err(TryLockError::WouldBlock) if started.elapsed() > LINGERING => return Ok(None),
                Err(TryLockError::WouldBlock) => sleep(POLL).await,
                Err(TryLockError::Error(source)) => {
                    return Err(Unusable { path: self.users_path(), source }.into());
                }
            }
        }
    }

    /// The last started server, if the file is readable.
    fn recorded(&self) -> Option<Server> {
        let text = std::fs::read_to_string(self.home.dir.join("server")).ok()?;
        let (pid, port) = text.trim().split_once(' ')?;
        Some(Server { pid: pid.parse().ok()?, port: port.parse().ok()? })
    }

    fn record(&self, server: Server) -> Result<(), Unusable> {
        let path = self.home.dir.join("server");
        let new = self.home.dir.join("server.new");
        let written = std::fs::write(&new, format!("{} {}\n", server.pid, server.port));
        written.and_then(|()| std::fs::rename(&new, &path)).map_err(Unusable::at(&path))
    }

    /// Whether that process is the server of this directory, and not another one with the same id.
    async fn runs(&self, server: Server) -> bool {
        has_argument(server.pid, self.data.as_os_str()).await
    }

    /// Waits until a running server answers. `None` if no server runs.
    async fn adopt(&self, options: &Options) -> Result<Option<Server>, PrivateMongoError> {
        let Some(server) = self.recorded() else { return Ok(None) };
        let mut progress = Progress::of(&self.home);
        let mut last = None;
        while self.runs(server).await {
            match probe(server, options.start_within).await? {
                Probe::Ready => return Ok(Some(server)),
                Probe::Starting(error) => last = Some(error),
                Probe::Absent => progress.look(&self.home),
            }
            self.in_time(server, &progress, options, &mut last)?;
            sleep(POLL).await;
        }
        Ok(None)
    }

    /// Starts a server and waits until it answers. The caller must hold the file `lock`.
    async fn spawn_until_ready(
        &self,
        options: &Options,
    ) -> Result<(Server, Child), PrivateMongoError> {
        let mut wanted = self.recorded().map(|server| server.port);
        if let Some(port) = wanted {
            let started = Instant::now();
            while is_taken(port) && started.elapsed() < PORT_HELD {
                sleep(POLL).await;
            }
        }
        for tries_left in (0..TRIES).rev() {
            let port = free_port(wanted.take());
            let logged = self.home.logged();
            let mut child = self.spawn(port, options)?;
            let pid = child.id().unwrap_or_default();
            let server = Server { pid, port };
            self.record(server)?;
            let mut progress = Progress::of(&self.home);
            let mut last = None;
            loop {
                if let Ok(Some(status)) = child.try_wait() {
                    if tries_left > 0 && is_taken(port) {
                        break;
                    }
                    let (log, tail) = (self.home.log.clone(), self.home.tail(logged));
                    let (program, has_data) = (options.program.clone(), has_data(&self.data));
                    return Err(PrivateMongoError::Ended { program, status, log, tail, has_data });
                }
                match probe(server, options.start_within).await {
                    Ok(Probe::Ready) => return Ok((server, child)),
                    Ok(Probe::Starting(error)) => last = Some(error),
                    Ok(Probe::Absent) => progress.look(&self.home),
                    Err(error) => {
                        // It is too old, so no process can use it.
                        self.end(server, options.stop_within).await?;
                        return Err(error);
                    }
                }
                self.in_time(server, &progress, options, &mut last)?;
                sleep(POLL).await;
            }
        }
        unreachable!("the last try answers or fails")
    }

    fn spawn(&self, port: u16, options: &Options) -> Result<Child, PrivateMongoError> {
        let (log, port) = (self.home.open_log()?, port.to_string());
        let errors = log.try_clone().map_err(Unusable::at(&self.home.log))?;
        let failed = |source: io::Error| {
            let program = options.program.clone();
            if PrivateMongoError::is_missing(&source) && has_data(&self.data) {
                return PrivateMongoError::ProgramGone { data: self.data.clone(), program, source };
            }
            PrivateMongoError::Program { program, source }
        };
        // A path is relative to this process's directory; a name is looked up in `PATH`.
        let program = match options.program.components().count() {
            0 | 1 => options.program.clone(),
            _ => std::path::absolute(&options.program).map_err(failed)?,
        };
        let name = options.program.file_name().unwrap_or_default().to_string_lossy();
        let mut command = Command::new(program);
        if name.contains("secantus") {
            command.args(["--host", "127.0.0.1", "--port", &port, "--sync-on-commit"]);
            command.arg("--storage-path");
        } else {
            // Without `--nounixsocket` it would also create a socket in /tmp.
            command.args(["--bind_ip", "127.0.0.1", "--port", &port, "--nounixsocket"]);
            command.arg("--dbpath");
        }
        outliving(command.arg(&self.data).args(&options.arguments))
            // Programs may read configuration files of their working directory. This directory has
            // no foreign ones.
            .current_dir(&self.home.dir)
            .stdout(log)
            .stderr(errors)
            .spawn()
            .map_err(failed)
    }

    /// Fails when the server has made no progress for the time of the options.
    fn in_time(
        &self,
        server: Server,
        progress: &Progress,
        options: &Options,
        last: &mut Option<MongoError>,
    ) -> Result<(), PrivateMongoError> {
        let within = options.start_within;
        if progress.at.elapsed() <= within {
            return Ok(());
        }
        let (port, log) = (server.port, self.home.log.clone());
        Err(PrivateMongoError::Silent { port, log, within, source: last.take().map(Box::new) })
    }

    /// Stops the server, and kills it if necessary. A server that has already ended is not an
    /// error.
    async fn end(&self, server: Server, within: Duration) -> Result<(), PrivateMongoError> {
        for what in ["TERM", "KILL"] {
            if !self.runs(server).await {
                return Ok(());
            }
            signal(server.pid, what)
                .await
                .map_err(|source| PrivateMongoError::Signal { pid: server.pid, source })?;
            let told = Instant::now();
            while self.runs(server).await && told.elapsed() < within {
                sleep(POLL).await;
            }
        }
        if self.runs(server).await {
            let source = std::io::ErrorKind::TimedOut.into();
            return Err(PrivateMongoError::Signal { pid: server.pid, source });
        }
        Ok(())
    }
}

/// Probes the server. An error means that it answers, but is not usable.
async fn probe(server: Server, patience: Duration) -> Result<Probe, PrivateMongoError> {
    if TcpStream::connect((Ipv4Addr::LOCALHOST, server.port)).await.is_err() {
        return Ok(Probe::Absent);
    }
    // Long enough for the timeout of each step to fire first.
    let patience = patience.min(Duration::from_secs(10));
    let asked = async {
        let mongo = Mongo::open(&server.url(), "admin").await?;
        let answer = async {
            mongo.ping().await?;
            mongo.accept(&mongo.info().await?)
        }
        .await;
        mongo.close().await;
        answer
    };
    match tokio::time::timeout(patience, asked).await {
        Ok(Ok(())) => Ok(Probe::Ready),
        Ok(Err(error @ MongoError::Version { .. })) => Err(PrivateMongoError::Version(error)),
        Ok(Err(error)) => Ok(Probe::Starting(error)),
        Err(_) => {
            let (url, within) = (server.url(), patience);
            Ok(Probe::Starting(MongoError::Silent { url, command: "ping", within, met: None }))
        }
    }
}

/// A free port: the wanted one if possible.
fn free_port(wanted: Option<u16>) -> u16 {
    let mut random = rand::rng();
    let mut port = wanted.unwrap_or_else(|| random.random_range(PORTS));
    for _ in 0..1_000 {
        if !is_taken(port) {
            break;
        }
        port = random.random_range(PORTS);
    }
    port
}

fn is_taken(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_directory_that_is_missing_or_empty_has_no_data() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("mongodb/data");
        assert_eq!(data_of(dir.path()), None);
        std::fs::create_dir_all(&data).unwrap();
        assert_eq!(data_of(dir.path()), None);
        std::fs::remove_dir(&data).unwrap();
        std::fs::write(&data, "no directory").unwrap();
        assert_eq!(data_of(dir.path()), Some(data));
    }
}
