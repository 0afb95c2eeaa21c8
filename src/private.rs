//! The common part of the private servers: a directory under the data directory with a lock and a
//! log, and a program that outlives the process that started it.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;
use tokio::time::{sleep, timeout};

/// Interval at which a starting or stopping server is checked.
pub(crate) const POLL: Duration = Duration::from_millis(20);
/// Interval of the log lines about a server that loads or recovers its data.
pub(crate) const TELL: Duration = Duration::from_secs(10);
/// How long a stop waits for the lock. Another stop holds it for less, because it does not end a server
/// with further users.
const LOCK_WITHIN: Duration = Duration::from_secs(5);
/// Maximum size of the part of the server's log that an error quotes.
const LOG_TAIL_BYTES: u64 = 2_048;
/// Maximum part of the log that a search reads.
const START_LOG_BYTES: u64 = 64 * 1_024;

/// A file or directory that cannot be used.
#[derive(Debug)]
pub(crate) struct Unusable {
    pub(crate) path: PathBuf,
    pub(crate) source: io::Error,
}

impl Unusable {
    pub(crate) fn at(path: &Path) -> impl FnOnce(io::Error) -> Self {
        |source| Self { path: path.to_owned(), source }
    }
}

/// The directory of a private server.
#[derive(Debug)]
pub(crate) struct Home {
    /// Absolute, because the server and later processes have other working directories.
    pub(crate) dir: PathBuf,
    /// The log of the server.
    pub(crate) log: PathBuf,
}

impl Home {
    /// Creates `data_dir/server` with mode 0700. Its log is `server.log`.
    pub(crate) fn create(data_dir: &Path, server: &str) -> Result<Self, Unusable> {
        let wanted = data_dir.join(server);
        let created = DirBuilder::new().recursive(true).mode(0o700).create(&wanted);
        let dir = created.and_then(|()| wanted.canonicalize()).map_err(Unusable::at(&wanted))?;
        Ok(Self { log: dir.join(format!("{server}.log")), dir })
    }

    /// Waits for the lock that serialises starts and stops. The returned file holds it until it is
    /// dropped.
    pub(crate) async fn lock(&self) -> Result<File, Unusable> {
        let path = self.dir.join("lock");
        let file = open_to_lock(&path)?;
        // Polls instead of blocking, so that a cancelled start leaves no thread behind that would
        // take the lock.
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) => sleep(POLL).await,
                Err(TryLockError::Error(source)) => return Err(Unusable { path, source }),
            }
        }
    }

    /// The same for a stop. `None`: another process holds the lock for long, because it starts the
    /// server. It uses the server from then on, so the server must go on.
    pub(crate) async fn lock_to_stop(&self) -> Result<Option<File>, Unusable> {
        timeout(LOCK_WITHIN, self.lock()).await.ok().transpose()
    }

    /// The length of the log.
    pub(crate) fn logged(&self) -> u64 {
        std::fs::metadata(&self.log).map_or(0, |log| log.len())
    }

    /// Whether the log, from byte `from` on, contains `what`.
    pub(crate) fn says(&self, from: u64, what: &str) -> bool {
        let read = || {
            let mut log = File::open(&self.log)?;
            log.seek(SeekFrom::Start(from))?;
            let mut bytes = Vec::new();
            log.take(START_LOG_BYTES).read_to_end(&mut bytes)?;
            io::Result::Ok(String::from_utf8_lossy(&bytes).contains(what))
        };
        read().unwrap_or(false)
    }

    /// The log, opened to append.
    pub(crate) fn open_log(&self) -> Result<File, Unusable> {
        let log = OpenOptions::new().create(true).append(true).open(&self.log);
        log.map_err(Unusable::at(&self.log))
    }

    /// The last lines of the log, but nothing before byte `from`.
    pub(crate) fn tail(&self, from: u64) -> String {
        let read = || {
            let mut log = File::open(&self.log)?;
            let from = from.max(log.metadata()?.len().saturating_sub(LOG_TAIL_BYTES));
            log.seek(SeekFrom::Start(from))?;
            let mut bytes = Vec::new();
            log.take(LOG_TAIL_BYTES).read_to_end(&mut bytes)?;
            io::Result::Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
        };
        read().unwrap_or_else(|error| format!("(not readable: {error})"))
    }
}

/// Opens a lock file, and creates it if necessary.
pub(crate) fn open_to_lock(path: &Path) -> Result<File, Unusable> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path);
    file.map_err(Unusable::at(path))
}

/// Lets a program outlive this process.
pub(crate) fn outliving(command: &mut Command) -> &mut Command {
    command
        .stdin(Stdio::null())
        // Ctrl-C signals the whole process group of the terminal: the server must outlive clients
        // that are still finishing.
        .process_group(0)
        .kill_on_drop(false)
}
