//! Why a session ended.

use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::super::BusError;
use super::super::source::Log;
use super::turn::Turned;
use super::{MISSING_LAST, RESTART, Reader};
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

impl Reader {
    /// Ends a session that panicked: the bus must be read on, by another process if there is one. Returns the
    /// wait before the next session, which grows while sessions panic.
    pub(super) async fn panicked(&mut self) -> Duration {
        self.fanout.rests();
        self.turns.over();
        let again = self.panicked.filter(|(at, _)| at.elapsed() < MISSING_LAST * 8);
        let pause = again.map_or(RESTART, |(_, before)| (before * 2).min(MISSING_LAST));
        self.interrupted(&ReadError::Panicked);
        self.watch.panicked();
        let _ = timeout(RESTART, self.share.leave()).await;
        self.panicked = Some((Instant::now(), pause));
        pause
    }
}

/// Why a session leaves out a log of which only the name is known.
pub(super) fn left_out(log: &Log) -> BusError {
    let cause = log.unknown.as_deref().unwrap_or_default().to_owned();
    BusError::Waits { log: log.name.to_string(), cause }
}
