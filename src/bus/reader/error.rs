//! Why a session ended.

use super::super::BusError;
use super::super::source::Log;
use super::turn::Turned;
use crate::fanout::FanoutError;
use crate::redis::RedisError;

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    #[error(transparent)]
    Fanout(#[from] FanoutError),
    #[error(transparent)]
    Bus(#[from] BusError),
    /// The session read for some shards long enough.
    #[error("it is the turn of other shards")]
    Turned(Turned),
    /// An error in this program.
    #[error(
        "a part of the program panicked; the log above has the message and the place in the code"
    )]
    Panicked,
}

impl From<RedisError> for ReadError {
    fn from(error: RedisError) -> Self {
        Self::Fanout(error.into())
    }
}

impl ReadError {
    pub(super) fn is_full(&self) -> bool {
        match self {
            Self::Fanout(error) => error.is_full(),
            Self::Bus(error) => error.is_full(),
            Self::Turned(..) | Self::Panicked => false,
        }
    }
}

/// Why a session leaves out a log of which only the name is known.
pub(super) fn left_out(log: &Log) -> BusError {
    let cause = log.unknown.as_deref().unwrap_or_default().to_owned();
    BusError::Waits { log: log.name.to_string(), cause }
}
