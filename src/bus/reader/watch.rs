//! What is noted of a bus that Redis knows nothing of, so that operators see it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::super::BusError;
use super::super::source::Fetched;
use crate::clock::{SharedClock, millis};
use crate::presence::BusMeter;

/// The notes of one reader.
#[derive(Clone)]
pub(super) struct Watch {
    pub(super) meter: Option<Arc<BusMeter>>,
    pub(super) clock: SharedClock,
    /// Whether logs cannot be read although the bus answers.
    fails_partly: Arc<AtomicBool>,
    /// Whether the bus told its logs when it was asked last.
    told: Arc<AtomicBool>,
    /// When the bus was read last.
    read_at: Arc<Mutex<Instant>>,
}

impl Watch {
    pub(super) fn new(meter: Option<Arc<BusMeter>>, clock: SharedClock) -> Self {
        let told = Arc::new(AtomicBool::new(true));
        let read_at = Arc::new(Mutex::new(Instant::now()));
        Self { meter, clock, fails_partly: Arc::default(), told, read_at }
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

    /// This process gave its share up. What it knows of these logs stays shown.
    pub(super) fn gives_up(&self) {
        if let Some(meter) = &self.meter {
            meter.gives_up();
        }
    }

    /// Whether the bus has told its logs.
    pub(super) fn tells(&self, told: bool) {
        self.told.store(told, Ordering::Relaxed);
    }

    /// A read has ended without an error. One without entries shows that the bus is read only if the bus said
    /// that there are none, or has told its logs: some clients do not notice for a while that no server
    /// answers.
    pub(super) fn fetched(&self, fetched: &dyn Fetched) {
        if !fetched.is_empty() || fetched.is_all() || self.told.load(Ordering::Relaxed) {
            self.answers();
        }
    }

    /// The bus is read, or this process has nothing to read. Answers to other questions do not show that it
    /// can be read: the right may be missing.
    pub(super) fn answers(&self) {
        *self.read_at.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        if let Some(meter) = self.whole() {
            meter.answers();
        }
    }

    /// How long ago the bus was read last.
    pub(super) fn unread_for(&self) -> Duration {
        self.read_at.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }

    /// So many entries are not read yet.
    pub(super) fn lags(&self, unread: u64) {
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
    use super::super::super::source::Batch;
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
        watch.failed(&problem);
        watch.lags(5);
        assert!(failing().is_some(), "the lag is known without the right to read");
    }

    /// An answer of so many entries, which may say that they are all.
    struct Answer(usize, bool);

    impl Fetched for Answer {
        fn len(&self) -> usize {
            self.0
        }

        fn bytes(&self) -> usize {
            0
        }

        fn is_all(&self) -> bool {
            self.1
        }

        fn decode(self: Box<Self>) -> Result<Vec<Batch>, BusError> {
            unreachable!("only its size counts")
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_empty_read_does_not_show_that_a_bus_is_read_that_does_not_tell_its_logs() {
        let meter = Arc::new(BusMeter::new("kafka:k"));
        let watch = Watch::new(Some(Arc::clone(&meter)), Arc::new(SystemClock));
        let cause = "no answer".to_owned();
        let problem = BusError::Unknown { bus: "kafka:k".to_owned(), cause };
        let shows = async |told: bool, answer: Answer| {
            watch.failed(&problem);
            watch.tells(told);
            tokio::time::advance(Duration::from_secs(1)).await;
            watch.fetched(&answer);
            (meter.state().failing.is_none(), watch.unread_for() == Duration::ZERO)
        };
        assert_eq!(shows(false, Answer(0, false)).await, (false, false));
        assert_eq!(shows(false, Answer(1, false)).await, (true, true), "it has read an entry");
        assert_eq!(shows(false, Answer(0, true)).await, (true, true), "the bus said so");
        assert_eq!(shows(true, Answer(0, false)).await, (true, true), "it answers");
    }
}
