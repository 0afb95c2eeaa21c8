//! Why a session ended.

use std::time::Duration;

use tokio::time::{Instant, timeout};
use tracing::warn;

use super::super::BusError;
use super::super::source::Log;
use super::turn::Turned;
use super::{MISSING_LAST, RESTART, Reader};
use crate::fanout::FanoutError;
use crate::redis::RedisError;

/// A process that has not read the bus for this long gives its share up when it fails again.
const UNREAD_MAX: Duration = Duration::from_secs(5);

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
        self.interrupted(&ReadError::Panicked);
        let pause = self.gives_up().await;
        self.watch.panicked();
        pause
    }

    /// After an error of the bus: if the bus was not read for a while, gives the share up. The way from this
    /// process alone may be broken, or its rights may be wrong. Returns the wait before the next session.
    pub(super) async fn unread(&mut self, error: &BusError) -> Duration {
        let is_of_bus = !matches!(error, BusError::Redis(_));
        if is_of_bus && self.share.has_some() && self.watch.unread_for() >= UNREAD_MAX {
            return self.gives_up().await;
        }
        RESTART
    }

    /// Other processes read all logs, or there are none. Soon after this one gave its share up, that does not
    /// show that the bus can be read: they may be trying it too.
    pub(super) fn others_read(&self) {
        if self.gave_up_lately().is_none() {
            self.watch.answers();
        }
    }

    /// When the share was given up, and the wait after it, if that was not long ago.
    fn gave_up_lately(&self) -> Option<(Instant, Duration)> {
        self.gave_up.filter(|(at, _)| at.elapsed() < MISSING_LAST * 8)
    }

    /// Gives the share up: another process may be able to read. Returns the wait before the next session,
    /// which grows while this is repeated.
    async fn gives_up(&mut self) -> Duration {
        let again = self.gave_up_lately();
        if again.is_none() {
            warn!(bus = self.bus(), "leaving the bus to other processes: it cannot be read here");
        }
        let pause = again.map_or(RESTART, |(_, before)| (before * 2).min(MISSING_LAST));
        let _ = timeout(RESTART, self.share.give_up()).await;
        self.gave_up = Some((Instant::now(), pause));
        pause
    }
}

/// Why a session leaves out a log of which only the name is known.
pub(super) fn left_out(log: &Log) -> BusError {
    let cause = log.unknown.as_deref().unwrap_or_default().to_owned();
    BusError::Waits { log: log.name.to_string(), cause }
}
