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
    /// Whether logs cannot be read although the bus answers.
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

    /// Reading the bus panicked. Until it is read again, operators see it.
    pub(super) fn panicked(&self) {
        self.fails_partly.store(true, Ordering::Relaxed);
        self.note("a part of the program panicked; the log of the process has the message and the place in the code");
    }

    /// The meter, unless it shows such a problem.
    fn whole(&self) -> Option<&BusMeter> {
        self.meter.as_deref().filter(|_| !self.fails_partly.load(Ordering::Relaxed))
    }

    /// This process reads so many of the logs. Without any, it knows nothing of their problems.
    pub(super) fn reads(&self, logs: usize) {
        if logs == 0 {
            self.fails_partly.store(false, Ordering::Relaxed);
        }
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
        self.answers();
        if let Some(meter) = &self.meter {
            meter.lags(unread, millis(self.clock.now()));
        }
    }

    /// The bus cannot be read. What is wrong with Redis is found elsewhere.
    pub(super) fn failed(&self, error: &BusError) {
        if !matches!(error, BusError::Redis(_)) {
            self.note(&error.to_string());
        }
    }

    fn note(&self, problem: &str) {
        if let Some(meter) = &self.meter {
            meter.failed(problem, millis(self.clock.now()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;

    #[test]
    fn a_problem_of_some_logs_ends_with_the_share_of_this_process() {
        let meter = Arc::new(BusMeter::new("kafka:k"));
        let watch = Watch::new(Some(Arc::clone(&meter)), Arc::new(SystemClock));
        let problem = BusError::Refused { bus: "kafka:k".to_owned(), cause: "no right".to_owned() };
        watch.reads(2);
        watch.fails_partly(Some(&problem));
        watch.answers();
        watch.lags(5);
        let failing = || meter.state().failing.map(|failing| failing.reason);
        assert_eq!(failing(), Some(problem.to_string()), "some logs are not read");
        assert_eq!(meter.state().unread, 5, "of the others it is known");
        watch.reads(1);
        watch.answers();
        assert!(failing().is_some(), "it may still have these logs");
        watch.reads(0);
        watch.answers();
        assert_eq!(failing(), None, "other processes read all logs");
    }
}
