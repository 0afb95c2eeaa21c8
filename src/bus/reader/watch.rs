//! What is noted of a bus that Redis knows nothing of, so that operators see it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::BusError;
use crate::clock::{SharedClock, millis};
use crate::presence::BusMeter;

/// The notes of one reader.
#[derive(Clone)]
pub(super) struct Watch {
    pub(super) meter: Option<Arc<BusMeter>>,
    pub(super) clock: SharedClock,
    /// Whether some logs cannot be read, while others can.
    fails_partly: Arc<AtomicBool>,
}

impl Watch {
    pub(super) fn new(meter: Option<Arc<BusMeter>>, clock: SharedClock) -> Self {
        Self { meter, clock, fails_partly: Arc::default() }
    }

    /// Why some logs cannot be read, while others can. Until there is no such problem any more, operators
    /// see it.
    pub(super) fn fails_partly(&self, problem: Option<&BusError>) {
        self.fails_partly.store(problem.is_some(), Ordering::Relaxed);
        if let Some(problem) = problem {
            self.failed(problem);
        }
    }

    /// The meter, unless it shows such a problem.
    fn whole(&self) -> Option<&BusMeter> {
        self.meter.as_deref().filter(|_| !self.fails_partly.load(Ordering::Relaxed))
    }

    /// This process reads so many of the logs.
    pub(super) fn reads(&self, logs: usize) {
        if let Some(meter) = &self.meter {
            meter.reads(logs);
        }
    }

    /// The bus has answered.
    pub(super) fn answers(&self) {
        if let Some(meter) = self.whole() {
            meter.answers();
        }
    }

    /// The bus has answered, and so many entries are not read yet.
    pub(super) fn lags(&self, unread: u64) {
        if let Some(meter) = self.whole() {
            meter.lags(unread, millis(self.clock.now()));
        }
    }

    /// The bus cannot be read. What is wrong with Redis is found elsewhere.
    pub(super) fn failed(&self, error: &BusError) {
        if let Some(meter) = &self.meter
            && !matches!(error, BusError::Redis(_))
        {
            meter.failed(&error.to_string(), millis(self.clock.now()));
        }
    }
}
