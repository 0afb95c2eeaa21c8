//! Why a bus gave no valid answer.

use crate::fanout::FanoutError;
use crate::id::Offset;
use crate::redis::RedisError;

/// Why a call to a bus failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum BusError {
    /// The bus on Redis Streams.
    #[error(transparent)]
    Redis(#[from] RedisError),
    /// No connection; nothing was sent.
    #[error("cannot connect to {bus}: {cause}")]
    Connect {
        /// The kind and the address, without credentials.
        bus: String,
        /// The error of the client.
        cause: String,
    },
    /// No answer in time, or the connection broke: the call may or may not have had its effect.
    #[error("no answer from {bus}, the outcome is unknown: {cause}")]
    Unknown {
        /// The kind and the address, without credentials.
        bus: String,
        /// The error of the client.
        cause: String,
    },
    /// The bus refused; nothing was changed.
    #[error("{bus} refused: {cause}")]
    Refused {
        /// The kind and the address, without credentials.
        bus: String,
        /// The error of the client.
        cause: String,
    },
    /// Only some of the events may be stored.
    #[error("{bus} stored only a part of the events: {cause}")]
    Partly {
        /// The kind and the address, without credentials.
        bus: String,
        /// The error of the client.
        cause: String,
    },
    /// The next entries are gone, or the log was made anew: opening it again tells what is lost.
    #[error("{log} no longer continues behind {after}: {cause}")]
    Moved {
        /// The log.
        log: String,
        /// The last entry that was read.
        after: Offset,
        /// The error of the client.
        cause: String,
    },
    /// A log that cannot be read now, while others of its bus can.
    #[error("{log} cannot be read now: {cause}")]
    Waits {
        /// The log.
        log: String,
        /// Why not.
        cause: String,
    },
    /// Entries that the client cannot read, for example a batch in an unknown compression.
    #[error(
        "the entries of {log} after {after} cannot be read: {cause}; `fairlane bus skip` passes over them"
    )]
    Unreadable {
        /// The log.
        log: String,
        /// The last entry that can be read.
        after: Offset,
        /// The error of the client.
        cause: String,
    },
}

/// Why the positions in the logs cannot be read.
impl From<FanoutError> for BusError {
    fn from(error: FanoutError) -> Self {
        match error {
            FanoutError::Store(error) => Self::Redis(error),
            error => {
                let log = match &error {
                    FanoutError::NoStart { log, .. } | FanoutError::Moved { log, .. } => {
                        log.clone()
                    }
                    _ => "the bus".to_owned(),
                };
                Self::Refused { bus: log, cause: error.to_string() }
            }
        }
    }
}

impl BusError {
    /// Whether Redis has no memory left.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Redis(error) if error.is_full())
    }

    /// Whether the error is temporary, so that a later retry can help.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Redis(error) => error.is_passing(),
            Self::Connect { .. }
            | Self::Unknown { .. }
            | Self::Partly { .. }
            | Self::Moved { .. }
            | Self::Waits { .. } => true,
            Self::Refused { .. } | Self::Unreadable { .. } => false,
        }
    }
}
