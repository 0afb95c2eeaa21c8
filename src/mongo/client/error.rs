//! The errors of MongoDB, with their remedies.

use std::time::Duration;

use mongodb::error::{Error, ErrorKind, WriteFailure};

use super::{OLDEST_VERSION, SELECTION_TIMEOUT};
use crate::admission::Crowded;
use crate::breaker::Away;
use crate::mongo::MongoUrl;

/// The server's code for a forbidden command.
const UNAUTHORIZED: i32 = 13;
/// The server's code for a wrong user or password.
const AUTHENTICATION_FAILED: i32 = 18;
/// The server's code for a duplicate `_id`: two concurrent upserts of one document.
pub(super) const DUPLICATE_KEY: i32 = 11000;
/// The server's code for a write conflict.
pub(super) const WRITE_CONFLICT: i32 = 112;
/// The server's codes for temporary errors: of connections, timeouts, roles and shutdown.
const PASSING: [i32; 13] = [6, 7, 50, 89, 91, 189, 262, 9001, 10107, 11600, 11602, 13435, 13436];

/// The server's codes for timeouts.
const TOO_LONG: [i32; 4] = [50, 64, 89, 262];
/// The commands that change nothing.
const READS: [&str; 3] = ["find", "aggregate", "count"];

/// Why a MongoDB command failed. No text contains a credential.
#[derive(Debug, Clone, thiserror::Error)]
pub enum MongoError {
    /// The options of the URL contradict each other.
    #[error("mongodb.url ({url}) cannot be used: {}; correct its options", plain(source))]
    Options {
        /// The address, without credentials.
        url: MongoUrl,
        /// The error of the driver.
        #[source]
        source: Box<Error>,
    },
    /// A `mongodb+srv` name cannot be resolved.
    #[error(
        "the servers behind {url} cannot be looked up: {}; correct mongodb.url, or check the name server",
        plain(source)
    )]
    Lookup {
        /// The address, without credentials.
        url: MongoUrl,
        /// The error of the driver.
        #[source]
        source: Box<Error>,
    },
    /// No server is usable. Nothing was sent.
    #[error(
        "no MongoDB at {url} can be used within {} s: {reason}; start it, or correct mongodb.url (FAIRLANE__MONGODB__URL)",
        SELECTION_TIMEOUT.as_secs()
    )]
    Away {
        /// The address, without credentials.
        url: MongoUrl,
        /// The last error of each server.
        reason: String,
        /// The error of the driver.
        #[source]
        source: Box<Error>,
    },
    /// The user or password is wrong.
    #[error(
        "MongoDB at {url} refuses the user or password of mongodb.url: {reason}; correct them, or add ?authSource=DATABASE where the user is not kept in \"admin\""
    )]
    Credentials {
        /// The address, without credentials.
        url: MongoUrl,
        /// The message of the server.
        reason: String,
        /// The error of the driver.
        #[source]
        source: Box<Error>,
    },
    /// This user may not run the command.
    #[error(
        "MongoDB at {url} does not allow `{command}`: {reason}; give the user the role readWrite on the database of mongodb.database"
    )]
    Forbidden {
        /// The address, without credentials.
        url: MongoUrl,
        /// The name of the command.
        command: &'static str,
        /// The message of the server.
        reason: String,
        /// The error of the driver.
        #[source]
        source: Box<Error>,
    },
    /// The connection broke: the command may or may not have run.
    #[error("no answer to `{command}` from MongoDB at {url}, the outcome is unknown: {reason}")]
    Broken {
        /// The address, without credentials.
        url: MongoUrl,
        /// The name of the command.
        command: &'static str,
        /// The reason.
        reason: String,
        /// The error of the driver.
        #[source]
        source: Box<Error>,
    },
    /// No answer in time: the command may or may not have run.
    #[error(
        "MongoDB at {url} does not answer `{command}` within {}{}; check whether it runs, hangs or is overloaded",
        humantime::format_duration(*within),
        met.as_deref().map(|met| format!(" ({met})")).unwrap_or_default()
    )]
    Silent {
        /// The address, without credentials.
        url: MongoUrl,
        /// The name of the command.
        command: &'static str,
        /// The timeout.
        within: Duration,
        /// The last error of each unreachable server.
        met: Option<String>,
    },
    /// Write conflicts or a change of the servers' roles interrupted the command: parts of it may
    /// have run.
    #[error(
        "MongoDB at {url} interrupted `{command}`: {reason}; retry, and check its servers if the error persists"
    )]
    Interrupted {
        /// The address, without credentials.
        url: MongoUrl,
        /// The name of the command.
        command: &'static str,
        /// The message of the server.
        reason: String,
        /// The error of the driver.
        #[source]
        source: Box<Error>,
    },
    /// A write did not reach a majority of the servers in time.
    #[error(
        "MongoDB at {url} wrote, but not to a majority of its servers: {reason}; restart the servers that are down"
    )]
    Majority {
        /// The address, without credentials.
        url: MongoUrl,
        /// The message of the server.
        reason: String,
        /// The error of the driver.
        #[source]
        source: Box<Error>,
    },
    /// The server refused the command.
    #[error("MongoDB at {url} refused `{command}`: {reason}")]
    Refused {
        /// The address, without credentials.
        url: MongoUrl,
        /// The name of the command.
        command: &'static str,
        /// The message of the server.
        reason: String,
        /// The error of the driver.
        #[source]
        source: Box<Error>,
    },
    /// The server is too old.
    #[error(
        "MongoDB at {url} is version {version}; at least {}.{} is needed",
        OLDEST_VERSION.0,
        OLDEST_VERSION.1
    )]
    Version {
        /// The address, without credentials.
        url: MongoUrl,
        /// The version of the server.
        version: String,
    },
    /// An answer with an unexpected structure.
    #[error(
        "the answer of MongoDB at {url} to `{command}` is not understood: {expected} was expected"
    )]
    Reply {
        /// The address, without credentials.
        url: MongoUrl,
        /// The name of the command.
        command: &'static str,
        /// The expected content.
        expected: &'static str,
    },
    /// Too many requests of the caller wait for MongoDB. Nothing was sent.
    #[error(transparent)]
    Crowded(#[from] Crowded),
}

impl Away for MongoError {
    fn is_away(&self) -> bool {
        self.is_unreachable() || self.is_timeout()
    }

    fn has_answered(&self) -> bool {
        !self.is_away() && !matches!(self, Self::Broken { .. } | Self::Crowded(_))
    }
}

impl MongoError {
    /// Whether the error is temporary, so that a later retry can help.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        self.is_unreachable() || self.may_have_run()
    }

    /// Whether the command may have run although it failed.
    pub(crate) fn may_have_run(&self) -> bool {
        matches!(
            self,
            Self::Broken { .. }
                | Self::Silent { .. }
                | Self::Interrupted { .. }
                | Self::Majority { .. }
        )
    }

    /// Whether the command may have changed something although it failed.
    pub(crate) fn may_have_written(&self) -> bool {
        let is_read = match self {
            Self::Broken { command, .. }
            | Self::Silent { command, .. }
            | Self::Interrupted { command, .. } => READS.contains(command),
            _ => false,
        };
        self.may_have_run() && !is_read
    }

    /// Whether it was a timeout: a smaller command may succeed.
    pub(crate) fn is_timeout(&self) -> bool {
        match self {
            Self::Silent { .. } | Self::Majority { .. } => true,
            _ => self.is_time_limit(),
        }
    }

    /// Whether the server ended the command because it took too long. So the server answers, and the
    /// error says nothing about other commands.
    pub(crate) fn is_time_limit(&self) -> bool {
        match self {
            Self::Interrupted { source, .. } => {
                code(source).is_some_and(|code| TOO_LONG.contains(&code))
            }
            _ => false,
        }
    }

    /// Whether no server was found. Then any other command fails in the same way.
    pub(crate) fn is_unreachable(&self) -> bool {
        matches!(self, Self::Away { .. } | Self::Lookup { .. })
    }

    /// Converts the driver's error on `command`. `met` holds the last error of each server.
    pub(super) fn new(
        url: &MongoUrl,
        command: &'static str,
        source: Error,
        met: impl FnOnce() -> Option<String>,
    ) -> Self {
        let (url, reason, source) = (url.clone(), plain(&source), Box::new(source));
        match (&*source.kind, code(&source)) {
            (ErrorKind::Authentication { .. }, _) | (_, Some(AUTHENTICATION_FAILED)) => {
                Self::Credentials { url, reason, source }
            }
            (_, Some(UNAUTHORIZED)) => Self::Forbidden { url, command, reason, source },
            (_, Some(code))
                if PASSING.contains(&code) || [DUPLICATE_KEY, WRITE_CONFLICT].contains(&code) =>
            {
                Self::Interrupted { url, command, reason, source }
            }
            (ErrorKind::ServerSelection { .. }, _) => {
                let reason = met().unwrap_or_else(|| {
                    "the servers answer, but none is a primary that accepts writes".to_owned()
                });
                Self::Away { url, reason, source }
            }
            (ErrorKind::DnsResolve { .. }, _) => Self::Lookup { url, source },
            (ErrorKind::Io(_) | ErrorKind::ConnectionPoolCleared { .. }, _) => {
                Self::Broken { url, command, reason, source }
            }
            (ErrorKind::Write(WriteFailure::WriteConcernError(_)), _) => {
                Self::Majority { url, reason, source }
            }
            (ErrorKind::InvalidArgument { .. } | ErrorKind::InvalidTlsConfig { .. }, _) => {
                Self::Options { url, source }
            }
            _ => Self::Refused { url, command, reason, source },
        }
    }
}

fn code(error: &Error) -> Option<i32> {
    match &*error.kind {
        ErrorKind::Command(error) => Some(error.code),
        ErrorKind::Write(WriteFailure::WriteError(error)) => Some(error.code),
        _ => None,
    }
}

/// The message of the server or the system, without the driver's wrapping.
pub(super) fn plain(error: &Error) -> String {
    match &*error.kind {
        ErrorKind::Command(error) => error.message.clone(),
        ErrorKind::Write(WriteFailure::WriteError(error)) => error.message.clone(),
        ErrorKind::Write(WriteFailure::WriteConcernError(error)) => error.message.clone(),
        ErrorKind::Io(error) => error.to_string(),
        kind => kind.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_may_not_wait_says_nothing_about_the_server() {
        let error = MongoError::from(Crowded);
        assert!(!error.is_away() && !error.has_answered() && !error.is_passing());
    }
}
