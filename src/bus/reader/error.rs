//! Why a session ended.

use super::super::BusError;
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
            Self::Turned(..) => false,
        }
    }
}
