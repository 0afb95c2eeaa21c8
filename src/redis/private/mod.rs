//! The embedded default: a private `redis-server` under the data directory.
//!
//! It listens only on a unix socket, writes its AOF every second and never evicts. The first
//! process starts it, other processes adopt it, and the last process stops it. A killed process
//! leaves it running for the next one. Each process shows its presence by one open connection, so
//! that the last one knows that it is the last.
//!
//! A lock on a file beside the data serialises starts and stops; two concurrent starts lead to one
//! server.

mod error;

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ErrorKind, ServerErrorKind};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

pub use self::error::PrivateRedisError;
use super::url::RedisUrl;
use crate::private::{Home, POLL, TELL, outliving};

/// Maximum length of the path of a unix socket, in bytes: 108 on Linux and 104 on macOS, with a
/// closing NUL. Redis silently cuts a longer path.
const SOCKET_PATH_MAX_BYTES: usize = 103;
/// The name of its directory.
const NAME: &str = "redis";
/// The oldest server version with the scripts and commands that Fairlane needs.
const OLDEST_VERSION: (u32, u32) = (7, 0);
/// A server that does not answer for longer hangs, or is busy.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// How long dropped connections of this process may still be listed.
const LINGERING: Duration = Duration::from_secs(1);
/// The log text of a server that found an incomplete end of its append-only file.
const TRUNCATED: &str = "loaded anyway because aof-load-truncated is enabled";
/// Hashes and sorted sets of a shard have some ten entries and change with each event. To search and
/// to move short lists costs more time than a table, and nobody reads the latencies per command.
const CHEAPER: [&str; 6] = [
    "--hash-max-listpack-entries",
    "16",
    "--zset-max-listpack-entries",
    "8",
    "--latency-tracking",
    "no",
];
/// The name of the connection that shows the presence of a process.
const PRESENCE: &str = "fairlane-private";

/// How often the server syncs its append-only file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AppendFsync {
    /// Before each reply. A power cut loses no write.
    Always,
    /// Every second. A power cut loses up to two seconds of writes, a killed server none.
    EverySecond,
    /// When the operating system decides.
    No,
}

/// Options for starting the server. A running server is adopted unchanged.
#[derive(Debug, Clone)]
pub struct Options {
    /// The program; looked up in `PATH` unless it is a path.
    pub program: OsString,
    /// How often it syncs its writes.
    pub append_fsync: AppendFsync,
    /// Further arguments, after all others.
    pub arguments: Vec<OsString>,
    /// How long a starting server may be silent. One that says that it loads its data is awaited
    /// without a limit.
    pub start_within: Duration,
    /// Whether a server that the call starts is killed when the future of the call, or its
    /// [`PrivateRedis`], is dropped, also by a [`PrivateRedis::stop`] that does not stop it.
    pub kill_on_drop: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            program: "redis-server".into(),
            append_fsync: AppendFsync::EverySecond,
            arguments: Vec::new(),
            start_within: Duration::from_secs(60),
            kill_on_drop: false,
        }
    }
}

/// A running private server.
///
/// Dropping it leaves the server running, unless [`Options::kill_on_drop`]: use [`Self::stop`] for an
/// orderly end.
#[derive(Debug)]
pub struct PrivateRedis {
    place: Files,
    url: RedisUrl,
    pid: u32,
    presence: MultiplexedConnection,
    /// `None`: adopted. The runtime reaps a dropped child too.
    child: Option<Child>,
}

impl PrivateRedis {
    /// Adopts the server under `data_dir`, or starts one there and waits until it answers.
    ///
    /// `data_dir` is created with mode 0700. There is no limit to the time in which the server loads
    /// its data.
    ///
    /// # Errors
    /// If the directory is not usable or its path too long, the program is missing or older than
    /// 7.0, or the server ends or does not answer for 60 s.
    ///
    /// # Panics
    /// Outside a tokio runtime with I/O and time.
    ///
    /// # Cancel safety
    /// A started server continues to start, and the next call adopts it.
    pub async fn start(data_dir: &Path) -> Result<Self, PrivateRedisError> {
        Self::start_with(data_dir, Options::default()).await
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
    /// As for [`Self::start`], unless [`Options::kill_on_drop`].
    pub async fn start_with(data_dir: &Path, options: Options) -> Result<Self, PrivateRedisError> {
        let place = Files::create(data_dir)?;
        let _lock = place.home.lock().await?;
        let url = place.url();
        let client = open(&url, &place)?;
        let logged = place.home.logged();
        let (mut presence, child) = place.connect_or_spawn(&client, &options).await?;
        let pid = async {
            let () = redis::cmd("CLIENT")
                .arg("SETNAME")
                .arg(PRESENCE)
                .query_async(&mut presence)
                .await?;
            let info: redis::InfoDict =
                redis::cmd("INFO").arg("server").query_async(&mut presence).await?;
            Ok(info.get::<u32>("process_id").unwrap_or_default())
        }
        .await
        .map_err(|source| place.command(source))?;
        tracing::info!(pid, socket = %place.socket.display(), adopted = child.is_none(), "private Redis is ready");
        if child.is_some() && place.home.says(logged, TRUNCATED) {
            rewrite(&mut presence).await;
        }
        Ok(Self { place, url, pid, presence, child })
    }

    /// The address for clients.
    #[must_use]
    pub fn url(&self) -> &RedisUrl {
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
        self.pid
    }

    /// Releases the server. If no other process and no other client is connected, stops it and
    /// waits for its end. Drop this process's own connections first; dropped connections get a
    /// second to disappear. If another process still starts the server after 5 s, leaves it to that
    /// process.
    ///
    /// Returns whether the server was stopped.
    ///
    /// # Errors
    /// If the server refuses to stop, for example because it cannot write its data, or does not end
    /// within 60 s. It keeps running then.
    ///
    /// # Cancel safety
    /// The server may keep running, or end on its own.
    pub async fn stop(mut self) -> Result<bool, PrivateRedisError> {
        let Some(_lock) = self.place.home.lock_to_stop().await? else { return Ok(false) };
        match self.others_leave().await {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(error) if error.is_connection_dropped() || error.is_unrecoverable_error() => {
                // It died or was stopped manually. A server that answers now belongs to another
                // process.
                let client = open(&self.url, &self.place)?;
                return Ok(matches!(probe(&client, ANSWER_WITHIN).await, Probe::Absent));
            }
            Err(source) => return Err(self.place.command(source)),
        }
        let ended: Result<(), redis::RedisError> =
            redis::cmd("SHUTDOWN").query_async(&mut self.presence).await;
        if let Err(source) = ended
            && matches!(source.kind(), ErrorKind::Server(_) | ErrorKind::Extension)
        {
            return Err(self.place.command(source));
        }
        let within = Options::default().start_within;
        let gone = async {
            match &mut self.child {
                Some(child) => drop(child.wait().await),
                None => {
                    while tokio::net::UnixStream::connect(&self.place.socket).await.is_ok() {
                        sleep(POLL).await;
                    }
                }
            }
        };
        tokio::time::timeout(within, gone).await.map_err(|_| PrivateRedisError::Silent {
            socket: self.place.socket.clone(),
            within,
            source: None,
        })?;
        Ok(true)
    }

    /// Whether no other client is connected, after dropped connections have disappeared.
    async fn others_leave(&mut self) -> Result<bool, redis::RedisError> {
        let started = Instant::now();
        loop {
            let list: String =
                redis::cmd("CLIENT").arg("LIST").query_async(&mut self.presence).await?;
            let presence = format!(" name={PRESENCE} ");
            let processes = list.lines().filter(|line| line.contains(&presence)).count();
            if processes > 1 {
                return Ok(false);
            }
            if list.lines().count() <= 1 {
                return Ok(true);
            }
            if started.elapsed() > LINGERING {
                return Ok(false);
            }
            sleep(POLL).await;
        }
    }
}

/// The socket of the server in its directory.
fn socket(home: &Path) -> PathBuf {
    home.join("redis.sock")
}

/// The log of the server under `data_dir`.
pub(crate) fn log_of(data_dir: &Path) -> PathBuf {
    data_dir.join(NAME).join(format!("{NAME}.log"))
}

/// Whether a server can have its socket under this absolute path of a `data_dir`.
pub(crate) fn fits(data_dir: &Path) -> bool {
    socket(&data_dir.join(NAME)).as_os_str().len() <= SOCKET_PATH_MAX_BYTES
}

/// The files of the server.
#[derive(Debug)]
struct Files {
    home: Home,
    socket: PathBuf,
}

impl Files {
    fn create(data_dir: &Path) -> Result<Self, PrivateRedisError> {
        let home = Home::create(data_dir, NAME)?;
        let socket = socket(&home.dir);
        let bytes = socket.as_os_str().len();
        if bytes > SOCKET_PATH_MAX_BYTES {
            return Err(PrivateRedisError::PathTooLong { path: socket, bytes });
        }
        Ok(Self { home, socket })
    }

    /// `redis+unix://` and the path, with every special byte escaped.
    fn url(&self) -> RedisUrl {
        let mut text = "redis+unix://".to_owned();
        for &byte in self.socket.as_os_str().as_bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'_' | b'.' | b'~' => {
                    text.push(char::from(byte));
                }
                _ => text.extend(['%', hex(byte >> 4), hex(byte & 15)]),
            }
        }
        RedisUrl::parse(&text).expect("an escaped absolute path is a usable address")
    }

    fn spawn(&self, options: &Options) -> Result<Child, PrivateRedisError> {
        // Invalid arguments are reported on stderr, everything else in the log.
        let log = self.home.open_log()?;
        let fsync = match options.append_fsync {
            AppendFsync::Always => "always",
            AppendFsync::EverySecond => "everysec",
            AppendFsync::No => "no",
        };
        outliving(&mut Command::new(&options.program))
            .kill_on_drop(options.kill_on_drop)
            .args(["--port", "0", "--unixsocketperm", "700", "--unixsocket"])
            .arg(&self.socket)
            .args(["--appendonly", "yes", "--appendfsync", fsync, "--save", ""])
            .args(["--maxmemory-policy", "noeviction"])
            .args(CHEAPER)
            .args(["--daemonize", "no", "--dir"])
            .arg(&self.home.dir)
            .arg("--logfile")
            .arg(&self.home.log)
            .args(&options.arguments)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .map_err(|source| PrivateRedisError::Program {
                program: options.program.clone(),
                source,
            })
    }

    /// Waits until a server answers, and starts one if there is none. Called under the lock.
    async fn connect_or_spawn(
        &self,
        client: &redis::Client,
        options: &Options,
    ) -> Result<(MultiplexedConnection, Option<Child>), PrivateRedisError> {
        let within = options.start_within;
        let logged = self.home.logged();
        let (mut heard, mut told) = (Instant::now(), None::<Instant>);
        let mut child: Option<Child> = None;
        loop {
            let last = match (probe(client, within).await, &mut child) {
                (Probe::Ready(connection), _) => return Ok((connection, child)),
                (Probe::Loading, _) => {
                    // However long it takes: another server would start again with the same data.
                    heard = Instant::now();
                    if told.is_none_or(|told| told.elapsed() > TELL) {
                        told = Some(heard);
                        tell_progress(client, within).await;
                    }
                    None
                }
                (Probe::Starting(error), _) => Some(error),
                (Probe::Absent, Some(child)) => {
                    if let Ok(Some(status)) = child.try_wait() {
                        let (log, tail) = (self.home.log.clone(), self.home.tail(logged));
                        return Err(PrivateRedisError::Ended { status, log, tail });
                    }
                    None
                }
                (Probe::Absent, none) => {
                    check_version(&options.program).await?;
                    *none = Some(self.spawn(options)?);
                    None
                }
            };
            if heard.elapsed() > within {
                let socket = self.socket.clone();
                return Err(PrivateRedisError::Silent { socket, within, source: last });
            }
            sleep(POLL).await;
        }
    }

    fn command(&self, source: redis::RedisError) -> PrivateRedisError {
        PrivateRedisError::Command { socket: self.socket.clone(), source }
    }
}

/// Makes the server rewrite its append-only file. If the file ended within a transaction, the
/// server cut that part but kept the start of the transaction: the next start would read later
/// writes as part of it.
async fn rewrite(presence: &mut MultiplexedConnection) {
    match redis::cmd("BGREWRITEAOF").query_async::<redis::Value>(presence).await {
        Ok(_) => {
            tracing::warn!(
                "the private Redis lost its last writes; rewriting its append-only file"
            );
        }
        Err(error) => tracing::error!(%error,
            "the private Redis lost its last writes, and cannot rewrite its append-only file: run BGREWRITEAOF before its next start"),
    }
}

fn hex(digit: u8) -> char {
    char::from(b"0123456789ABCDEF"[usize::from(digit & 15)])
}

fn open(url: &RedisUrl, place: &Files) -> Result<redis::Client, PrivateRedisError> {
    redis::Client::open(url.expose()).map_err(|source| place.command(source))
}

/// The state of the socket.
enum Probe {
    /// No server listens.
    Absent,
    /// A server that says that it loads its data.
    Loading,
    /// A server that is busy, or hangs.
    Starting(redis::RedisError),
    /// A server that answers.
    Ready(MultiplexedConnection),
}

async fn connect(
    client: &redis::Client,
    patience: Duration,
) -> Result<MultiplexedConnection, redis::RedisError> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(patience))
        // A server that is asked to stop first writes its data.
        .set_response_timeout(Some(Duration::from_secs(30)));
    client.get_multiplexed_async_connection_with_config(&config).await
}

async fn probe(client: &redis::Client, patience: Duration) -> Probe {
    let patience = patience.min(ANSWER_WITHIN);
    let answer = async {
        let mut connection = connect(client, patience).await?;
        match redis::cmd("PING").query_async::<()>(&mut connection).await {
            // It cannot write to its disk. A restart does not help.
            Err(error) if error.code() == Some("MISCONF") => {}
            answer => answer?,
        }
        Ok(connection)
    };
    match tokio::time::timeout(patience, answer).await {
        Ok(Ok(connection)) => Probe::Ready(connection),
        // No socket, or one of a killed server.
        Ok(Err(error)) if redis::RedisError::is_connection_refusal(&error) => Probe::Absent,
        Ok(Err(error)) if error.kind() == ErrorKind::Server(ServerErrorKind::BusyLoading) => {
            Probe::Loading
        }
        Ok(Err(error)) => Probe::Starting(error),
        Err(_) => Probe::Starting(io::Error::from(io::ErrorKind::TimedOut).into()),
    }
}

/// Logs how far a server has loaded its data.
async fn tell_progress(client: &redis::Client, patience: Duration) {
    let patience = patience.min(ANSWER_WITHIN);
    let asked = async {
        let mut connection = connect(client, patience).await?;
        redis::cmd("INFO").arg("persistence").query_async::<redis::InfoDict>(&mut connection).await
    };
    let info = tokio::time::timeout(patience, asked).await.ok().and_then(Result::ok);
    let percent = info.as_ref().and_then(|info| info.get::<f64>("loading_loaded_perc"));
    let seconds_left = info.as_ref().and_then(|info| info.get::<u64>("loading_eta_seconds"));
    tracing::info!(percent, seconds_left, "waiting for the private Redis: it loads its data");
}

/// Runs `program --version` and reads `v=7.0.15`.
async fn check_version(program: &OsString) -> Result<(), PrivateRedisError> {
    let output = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .await
        .map_err(|source| PrivateRedisError::Program { program: program.clone(), source })?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text.split_whitespace().find_map(|word| word.strip_prefix("v="));
    let parts = version.and_then(|version| {
        let mut numbers = version.split('.').map(str::parse::<u32>);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    });
    match parts {
        Some(parts) if parts >= OLDEST_VERSION => Ok(()),
        _ => Err(PrivateRedisError::Version {
            program: program.clone(),
            found: version.map_or_else(
                || "not a Redis server with a readable version".to_owned(),
                |version| format!("version {version}"),
            ),
        }),
    }
}

#[cfg(test)]
mod tests;
