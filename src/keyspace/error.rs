//! What can go wrong between a caller and Redis, and what it means for the caller.

use super::reply::ReplyError;
use crate::breaker::Away;

/// Why a call did not give an answer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// No connection could be made; nothing was sent.
    #[error("cannot connect to Redis at {target}: {source}")]
    Connect {
        /// Where, without credentials.
        target: String,
        /// What the client says.
        #[source]
        source: redis::RedisError,
    },
    /// The connection broke or the answer did not come in time: it is unknown whether the
    /// command ran.
    #[error("no answer from Redis at {target}, the outcome is unknown: {source}")]
    Unknown {
        /// Where, without credentials.
        target: String,
        /// What the client says.
        #[source]
        source: redis::RedisError,
    },
    /// The server refused the command; nothing was changed.
    #[error("Redis at {target} refused `{command}`: {message}")]
    Refused {
        /// Where, without credentials.
        target: String,
        /// The script or command.
        command: &'static str,
        /// The server's words.
        message: String,
    },
    /// The server is older than 7.0.
    #[error("Redis at {target} is version {version}; at least 7.0 is needed")]
    Version {
        /// Where, without credentials.
        target: String,
        /// What it says it is.
        version: String,
    },
    /// An answer of another shape than promised.
    #[error("the answer to `{command}` is not understood: {source}")]
    Reply {
        /// The script or command.
        command: &'static str,
        /// What was expected.
        #[source]
        source: ReplyError,
    },
}

impl Away for StoreError {
    fn is_away(&self) -> bool {
        matches!(self, Self::Connect { .. })
    }
}

impl StoreError {
    /// Whether the server has no memory left (`maxmemory`).
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Refused { message, .. } if message.starts_with("OOM"))
    }

    /// Whether the server did not answer in time; the connection may be dead, or the server slow.
    pub(super) fn is_timeout(&self) -> bool {
        matches!(self, Self::Unknown { source, .. } if source.is_timeout())
    }

    /// Whether trying again later can help.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::Unknown { .. } => true,
            Self::Refused { message, .. } => {
                // The last four: a cluster that is moving a slot or replacing a primary.
                const PASSING: [&str; 10] = [
                    "OOM",
                    "LOADING",
                    "BUSY",
                    "READONLY",
                    "MASTERDOWN",
                    "MISCONF",
                    "MOVED",
                    "ASK ",
                    "TRYAGAIN",
                    "CLUSTERDOWN",
                ];
                PASSING.iter().any(|code| message.starts_with(code))
            }
            Self::Version { .. } | Self::Reply { .. } => false,
        }
    }
}
