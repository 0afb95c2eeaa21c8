//! The errors of a private server, with their remedies.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use super::SOCKET_PATH_MAX_BYTES;
use crate::private::Unusable;

/// Why the private server could not be started or stopped.
#[derive(Debug, thiserror::Error)]
pub enum PrivateRedisError {
    /// A file or directory of the server cannot be used.
    #[error("{}: not usable for a private Redis: {source}; choose another data_dir or set redis.url", path.display())]
    Directory {
        /// The path.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The path of the socket is too long for an address.
    #[error(
        "{}: this path has {bytes} bytes, and a unix socket at most {SOCKET_PATH_MAX_BYTES}; choose a shorter data_dir or set redis.url", path.display()
    )]
    PathTooLong {
        /// The path of the socket.
        path: PathBuf,
        /// Its length.
        bytes: usize,
    },
    /// The program is missing.
    #[error(
        "{program:?} cannot be run: {source}; install the package redis-server (7.0 or newer), or set redis.url to a running Redis"
    )]
    Program {
        /// The program.
        program: OsString,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The program is too old, or not Redis.
    #[error(
        "{program:?} is {found}; install the package redis-server in version 7.0 or newer, or set redis.url to a running Redis"
    )]
    Version {
        /// The program.
        program: OsString,
        /// Its version, if any.
        found: String,
    },
    /// The server ended instead of starting.
    #[error("redis-server ended while starting ({status}); the end of {}:\n{tail}", log.display())]
    Ended {
        /// Its exit status.
        status: ExitStatus,
        /// Its log.
        log: PathBuf,
        /// The last log lines of this start.
        tail: String,
    },
    /// The server does not answer.
    #[error(
        "the private Redis at {} did not answer within {within:?}; see redis.log beside it", socket.display()
    )]
    Silent {
        /// The path of its socket.
        socket: PathBuf,
        /// The timeout.
        within: Duration,
        /// The last answer, if any.
        #[source]
        source: Option<redis::RedisError>,
    },
    /// The server answered a command with an error.
    #[error("the private Redis at {}: {source}", socket.display())]
    Command {
        /// The path of its socket.
        socket: PathBuf,
        /// The error of the server.
        #[source]
        source: redis::RedisError,
    },
}

impl From<Unusable> for PrivateRedisError {
    fn from(Unusable { path, source }: Unusable) -> Self {
        Self::Directory { path, source }
    }
}
