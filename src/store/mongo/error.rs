//! What can go wrong with MongoDB, said so that it can be mended.

use std::time::Duration;

use mongodb::error::{Error, ErrorKind, WriteFailure};

use super::{OLDEST_VERSION, SELECTION_TIMEOUT};
use crate::breaker::Away;
use crate::config::MongoUrl;

/// The server's code for a command this user may not run.
const UNAUTHORIZED: i32 = 13;
/// The server's code for a wrong user or password.
const AUTHENTICATION_FAILED: i32 = 18;
/// The server's code for an `_id` that is taken: two upserts of one document met.
pub(super) const DUPLICATE_KEY: i32 = 11000;
/// The server's code for a write that met another one.
pub(super) const WRITE_CONFLICT: i32 = 112;
/// The server's codes for what passes: its connections, its time, its role, its stopping.
const PASSING: [i32; 13] = [6, 7, 50, 89, 91, 189, 262, 9001, 10107, 11600, 11602, 13435, 13436];

/// Those among them that mean that it took too long.
const TOO_LONG: [i32; 4] = [50, 64, 89, 262];

/// Why MongoDB did not do what it was asked. No text holds a credential.
#[derive(Debug, Clone, thiserror::Error)]
pub enum MongoError {
    /// The options of the URL contradict each other.
    #[error("mongodb.url ({url}) cannot be used: {}; correct its options", plain(source))]
    Options {
        /// Where, without credentials.
        url: MongoUrl,
        /// What the driver says.
        #[source]
        source: Box<Error>,
    },
    /// A `mongodb+srv` name leads to no servers.
    #[error(
        "the servers behind {url} cannot be looked up: {}; correct mongodb.url, or check the name server",
        plain(source)
    )]
    Lookup {
        /// Where, without credentials.
        url: MongoUrl,
        /// What the driver says.
        #[source]
        source: Box<Error>,
    },
    /// No server can be used; nothing was sent.
    #[error(
        "no MongoDB at {url} can be used within {} s: {reason}; start it, or correct mongodb.url (FAIRLANE__MONGODB__URL)",
        SELECTION_TIMEOUT.as_secs()
    )]
    Away {
        /// Where, without credentials.
        url: MongoUrl,
        /// What was met at each of the servers.
        reason: String,
        /// What the driver says.
        #[source]
        source: Box<Error>,
    },
    /// The user or password is wrong.
    #[error(
        "MongoDB at {url} refuses the user or password of mongodb.url: {reason}; correct them, or add ?authSource=DATABASE where the user is not kept in \"admin\""
    )]
    Credentials {
        /// Where, without credentials.
        url: MongoUrl,
        /// What the server says.
        reason: String,
        /// What the driver says.
        #[source]
        source: Box<Error>,
    },
    /// This user may not do that.
    #[error(
        "MongoDB at {url} does not allow `{command}`: {reason}; give the user the role readWrite on the database of mongodb.database"
    )]
    Forbidden {
        /// Where, without credentials.
        url: MongoUrl,
        /// What was asked.
        command: &'static str,
        /// What the server says.
        reason: String,
        /// What the driver says.
        #[source]
        source: Box<Error>,
    },
    /// The connection broke: it is unknown whether the command ran.
    #[error("no answer to `{command}` from MongoDB at {url}, the outcome is unknown: {reason}")]
    Broken {
        /// Where, without credentials.
        url: MongoUrl,
        /// What was asked.
        command: &'static str,
        /// What happened.
        reason: String,
        /// What the driver says.
        #[source]
        source: Box<Error>,
    },
    /// No answer in time: it is unknown whether the command ran.
    #[error(
        "MongoDB at {url} does not answer `{command}` within {}{}; see whether it runs, hangs or is overloaded",
        humantime::format_duration(*within),
        met.as_deref().map(|met| format!(" ({met})")).unwrap_or_default()
    )]
    Silent {
        /// Where, without credentials.
        url: MongoUrl,
        /// What was asked.
        command: &'static str,
        /// So long it was waited for.
        within: Duration,
        /// What was last met at each of the servers that cannot be reached.
        met: Option<String>,
    },
    /// Other writes or a change of the servers' roles came in between: it is unknown how much of
    /// the command ran.
    #[error(
        "MongoDB at {url} interrupted `{command}`: {reason}; try again, and see to its servers if that goes on"
    )]
    Interrupted {
        /// Where, without credentials.
        url: MongoUrl,
        /// What was asked.
        command: &'static str,
        /// What the server says.
        reason: String,
        /// What the driver says.
        #[source]
        source: Box<Error>,
    },
    /// A write did not reach a majority of the servers in time.
    #[error(
        "MongoDB at {url} wrote, but not to a majority of its servers: {reason}; bring back those that are down"
    )]
    Majority {
        /// Where, without credentials.
        url: MongoUrl,
        /// What the server says.
        reason: String,
        /// What the driver says.
        #[source]
        source: Box<Error>,
    },
    /// The server refused the command.
    #[error("MongoDB at {url} refused `{command}`: {reason}")]
    Refused {
        /// Where, without credentials.
        url: MongoUrl,
        /// What was asked.
        command: &'static str,
        /// What the server says.
        reason: String,
        /// What the driver says.
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
        /// Where, without credentials.
        url: MongoUrl,
        /// What it says it is.
        version: String,
    },
    /// An answer of another shape than promised.
    #[error(
        "the answer of MongoDB at {url} to `{command}` is not understood: {expected} was expected"
    )]
    Reply {
        /// Where, without credentials.
        url: MongoUrl,
        /// What was asked.
        command: &'static str,
        /// What should have been there.
        expected: &'static str,
    },
}

impl Away for MongoError {
    fn is_away(&self) -> bool {
        matches!(self, Self::Away { .. } | Self::Lookup { .. }) || self.is_timeout()
    }
}

impl MongoError {
    /// Whether trying again later can help.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        matches!(
            self,
            Self::Lookup { .. }
                | Self::Away { .. }
                | Self::Broken { .. }
                | Self::Silent { .. }
                | Self::Interrupted { .. }
                | Self::Majority { .. }
        )
    }

    /// Whether it took too long: less at once may go through.
    pub(crate) fn is_timeout(&self) -> bool {
        match self {
            Self::Silent { .. } | Self::Majority { .. } => true,
            Self::Interrupted { source, .. } => {
                code(source).is_some_and(|code| TOO_LONG.contains(&code))
            }
            _ => false,
        }
    }

    /// What the driver's error on `command` means. `met` tells what was last met at each server.
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
                    "the servers answer, but none is a primary that takes writes".to_owned()
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

/// The server's or the system's own words, without the driver's wrapping.
pub(super) fn plain(error: &Error) -> String {
    match &*error.kind {
        ErrorKind::Command(error) => error.message.clone(),
        ErrorKind::Write(WriteFailure::WriteError(error)) => error.message.clone(),
        ErrorKind::Write(WriteFailure::WriteConcernError(error)) => error.message.clone(),
        ErrorKind::Io(error) => error.to_string(),
        kind => kind.to_string(),
    }
}
