//! The errors of a private server, with their remedies.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use crate::mongo::client::MongoError;
use crate::private::Unusable;

/// Why the private server could not be started or stopped.
#[derive(Debug, thiserror::Error)]
pub enum PrivateMongoError {
    /// A file or directory of the server cannot be used.
    #[error("{}: not usable for a private MongoDB: {source}; choose another data_dir or set mongodb.url", path.display())]
    Directory {
        /// The path.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The program cannot be run.
    #[error(
        "{program:?} cannot be run: {source}; install MongoDB (6.0 or newer), name its program in FAIRLANE_MONGOD, or set mongodb.url to a running one"
    )]
    Program {
        /// The program.
        program: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// There is no program that can be run, but there is data of an earlier start.
    #[error(
        "{} holds the data of a private MongoDB, but {program:?} cannot be run: {source}; install MongoDB (6.0 or newer), name its program in FAIRLANE_MONGOD, set mongodb.url to a running one with that data, or set enabled = false for the pipelines that need MongoDB", data.display()
    )]
    ProgramGone {
        /// The directory of the data.
        data: PathBuf,
        /// The program.
        program: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The server is too old.
    #[error("{0}; install a newer one, name it in FAIRLANE_MONGOD, or set mongodb.url")]
    Version(#[source] MongoError),
    /// The server ended instead of starting.
    #[error(
        "{} ended while starting ({status}); correct the cause, set mongodb.url, or disable the pipelines that need MongoDB; the end of {}:\n{tail}", program.display(), log.display()
    )]
    Ended {
        /// The program.
        program: PathBuf,
        /// Its exit status.
        status: ExitStatus,
        /// Its log.
        log: PathBuf,
        /// The last log lines of this start.
        tail: String,
        /// Whether there is data of this or an earlier start.
        has_data: bool,
    },
    /// The server neither answers nor makes progress.
    #[error(
        "the private MongoDB on port {port} made no progress for {within:?}; start again, set mongodb.url, or disable the pipelines that need MongoDB; see {}", log.display()
    )]
    Silent {
        /// Its port.
        port: u16,
        /// Its log.
        log: PathBuf,
        /// The timeout.
        within: Duration,
        /// The last answer, if any.
        #[source]
        source: Option<Box<MongoError>>,
    },
    /// The server cannot be stopped, not even by killing it.
    #[error("the private MongoDB, process {pid}, cannot be stopped: {source}; end it by hand")]
    Signal {
        /// Its process id.
        pid: u32,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
}

impl PrivateMongoError {
    /// Whether this machine has no program that works, and no data of an earlier start. Another try would
    /// not help.
    pub(crate) fn lacks_program(&self) -> bool {
        match self {
            Self::Program { source, .. } => Self::is_missing(source),
            // A server this old cannot open the data of one that is new enough.
            Self::Version(_) => true,
            // Such as one without its libraries.
            Self::Ended { has_data, .. } => !has_data,
            // To run without the data would lose events without a word.
            Self::ProgramGone { .. }
            | Self::Directory { .. }
            | Self::Silent { .. }
            | Self::Signal { .. } => false,
        }
    }

    /// Whether there is no such program on this machine, or it is one for another processor. Other errors
    /// may pass, such as a lack of memory.
    pub(super) fn is_missing(source: &io::Error) -> bool {
        use io::ErrorKind::{NotADirectory, NotFound, PermissionDenied};
        matches!(source.kind(), NotFound | NotADirectory | PermissionDenied)
            || source.raw_os_error() == Some(rustix::io::Errno::NOEXEC.raw_os_error())
    }
}

impl From<Unusable> for PrivateMongoError {
    fn from(Unusable { path, source }: Unusable) -> Self {
        Self::Directory { path, source }
    }
}
