//! One circuit breaker.

use std::time::Duration;

use tokio::time::Instant;

/// Number of consecutive failures that open a breaker.
pub(super) const FAILURES: u32 = 5;
/// The first and the longest time that a breaker is open.
pub(super) const OPEN_FIRST: Duration = Duration::from_secs(5);
pub(super) const OPEN_MAX: Duration = Duration::from_secs(60);

/// Open after failures, for a time that doubles until something succeeds.
#[derive(Debug, Default)]
pub(super) struct Circuit {
    /// Number of consecutive failures.
    pub(super) failures: u32,
    /// Requests are refused until then.
    open_until: Option<Instant>,
    open_for: Duration,
}

/// What a breaker does with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// It lets the request pass.
    Closed,
    /// It refuses the request until then.
    Open(Instant),
    /// It lets a probe pass.
    HalfOpen,
}

impl Circuit {
    pub(super) fn stage(&self, now: Instant) -> Stage {
        match self.open_until {
            None => Stage::Closed,
            Some(until) if now < until => Stage::Open(until),
            Some(_) => Stage::HalfOpen,
        }
    }

    /// Whether it is open or half open.
    pub(super) fn is_open(&self) -> bool {
        self.open_until.is_some()
    }

    /// When it lets the next probe pass.
    pub(super) fn open_until(&self) -> Option<Instant> {
        self.open_until
    }

    /// Opens. A breaker that is open already stays so for the same time: a failure of a request
    /// that started before is not new information.
    pub(super) fn open(&mut self, now: Instant) {
        if !matches!(self.stage(now), Stage::Open(_)) {
            self.open_for = (self.open_for * 2).clamp(OPEN_FIRST, OPEN_MAX);
            self.open_until = Some(now + self.open_for);
        }
    }

    /// Closes, and forgets the failures.
    pub(super) fn close(&mut self) {
        *self = Self::default();
    }
}
