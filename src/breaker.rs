//! A circuit breaker for readers: does a store answer in time?
//!
//! A hanging store reports no error, so each reader would wait for its whole timeout. Instead, the
//! first timeout opens the breaker. While it is open, readers immediately get an answer from
//! another source. Every quarter of a second one reader asks the store as a probe. The first answer
//! of the store closes the breaker.
//!
//! | state | a reader |
//! |---|---|
//! | closed | asks the store, and waits up to its timeout |
//! | open | does not ask |
//! | half open: a quarter of a second after the last probe | asks, as the probe |

use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use metrics::Counter;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::metrics as table;
use crate::request_deadline;
use crate::telemetry::{Outage, Recovered};

/// Interval between two probes.
const PROBE_EVERY: Duration = Duration::from_millis(250);
/// Work that only the store can do is attempted until the store has been silent for this long.
const HANGS_AFTER: Duration = Duration::from_secs(1);

/// The breaker of one store.
#[derive(Debug)]
pub(crate) struct Breaker {
    store: &'static str,
    refused: Counter,
    /// `None`: closed.
    open: Mutex<Option<Open>>,
    /// Limits the log lines: questions that are sometimes late open and close the breaker several times a
    /// second.
    outage: Outage,
}

#[derive(Debug, Clone, Copy)]
struct Open {
    since: Instant,
    /// When the next probe is sent to the store.
    probe_at: Instant,
}

/// Whether a question without an answer in time opens the breaker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Opens {
    IfLate,
    Never,
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Unanswered<E> {
    /// The breaker is open: the store was not asked.
    Open,
    /// The store did not answer within this time.
    Late(Duration),
    /// The store answered with an error, or is unreachable.
    Failed(E),
}

/// Classifies errors for a breaker.
pub(crate) trait Away {
    /// Whether the store did not answer; false if it answered with a refusal.
    fn is_away(&self) -> bool;

    /// Whether the store answered. Of a connection that broke, neither is known.
    fn has_answered(&self) -> bool;
}

impl Breaker {
    /// A closed breaker. `store` names it in metrics and the log.
    pub(crate) fn new(store: &'static str) -> Self {
        let (refused, outage) = (table::reads_refused(store), Outage::new(Duration::ZERO));
        Self { store, refused, open: Mutex::default(), outage }
    }

    /// Asks the store, with the timeout `within`, or the caller's remaining deadline if that is
    /// shorter. A deadline that passes does not open the breaker.
    ///
    /// # Errors
    /// If there is no answer in time, or the breaker is open.
    ///
    /// # Cancel safety
    /// Same as that of `question`. A cancelled question does not change the breaker.
    pub(crate) fn read<T, E: Away>(
        &self,
        within: Duration,
        question: impl Future<Output = Result<T, E>>,
    ) -> impl Future<Output = Result<T, Unanswered<E>>> {
        self.ask(within, question, Opens::IfLate)
    }

    /// Like [`Self::read`], for a question that may take too long although the store works. So it
    /// does not open the breaker. An answer closes it.
    ///
    /// # Errors
    /// Those of [`Self::read`].
    ///
    /// # Cancel safety
    /// Same as that of `question`.
    pub(crate) fn read_much<T, E: Away>(
        &self,
        within: Duration,
        question: impl Future<Output = Result<T, E>>,
    ) -> impl Future<Output = Result<T, Unanswered<E>>> {
        self.ask(within, question, Opens::Never)
    }

    async fn ask<T, E: Away>(
        &self,
        within: Duration,
        question: impl Future<Output = Result<T, E>>,
        opens: Opens,
    ) -> Result<T, Unanswered<E>> {
        let allowed = request_deadline::at_most(within);
        if !self.lets_through(Duration::ZERO) {
            self.refused.increment(1);
            return Err(Unanswered::Open);
        }
        let question = request_deadline::until(Instant::now() + allowed, question);
        let answered = tokio::time::timeout(allowed, question).await;
        match &answered {
            Ok(Err(error)) if error.has_answered() => self.answers(),
            Ok(Ok(_)) => self.answers(),
            _ if opens == Opens::Never => {}
            Err(_) if allowed < within => {}
            Ok(Err(error)) if !error.is_away() => {}
            _ => self.fails(within),
        }
        match answered {
            Ok(answer) => answer.map_err(Unanswered::Failed),
            Err(_) => Err(Unanswered::Late(allowed)),
        }
    }

    /// Runs work that only the store can do, without a timeout. If the store has not answered for a
    /// second, the work runs only as a probe.
    ///
    /// # Errors
    /// If the work fails, or the store was not asked.
    ///
    /// # Cancel safety
    /// Same as that of `work`.
    pub(crate) async fn write<T, E: Away>(
        &self,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, Unanswered<E>> {
        if !self.lets_through(HANGS_AFTER) {
            self.refused.increment(1);
            return Err(Unanswered::Open);
        }
        let started = Instant::now();
        let done = work.await;
        match &done {
            Ok(_) => self.answers(),
            Err(error) if error.has_answered() => self.answers(),
            Err(error) if error.is_away() || started.elapsed() > HANGS_AFTER => {
                self.fails(started.elapsed());
            }
            Err(_) => {}
        }
        done.map_err(Unanswered::Failed)
    }

    /// Whether a caller may ask the store. `patience` is how long the store may be silent before
    /// only probes may ask it.
    fn lets_through(&self, patience: Duration) -> bool {
        let mut state = self.state();
        let now = Instant::now();
        match &mut *state {
            None => true,
            Some(open) if now < open.since + patience => true,
            Some(open) if now < open.probe_at => false,
            Some(open) => {
                open.probe_at = now + PROBE_EVERY;
                true
            }
        }
    }

    fn answers(&self) {
        let mut state = self.state();
        let recovered = state.take().and_then(|_| self.outage.succeeded());
        drop(state);
        if let Some(Recovered { lasted, failures }) = recovered {
            info!(
                store = self.store,
                ?lasted,
                failures,
                "the store answers a probe; its circuit breaker closes"
            );
        }
    }

    fn fails(&self, within: Duration) {
        let now = Instant::now();
        let mut state = self.state();
        let since = state.map_or(now, |open| open.since);
        *state = Some(Open { since, probe_at: now + PROBE_EVERY });
        // Noted under the lock, so that the lines follow the states.
        let told = self.outage.failed();
        drop(state);
        if let Some(suppressed) = told {
            let within = humantime::format_duration(within);
            warn!(store = self.store, %within, suppressed,
                "the store does not answer reads; its circuit breaker is open, and only probes reach the store until one succeeds");
        }
    }

    fn state(&self) -> MutexGuard<'_, Option<Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;
    use crate::telemetry::captured::Lines;

    const WITHIN: Duration = Duration::from_millis(100);

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Error {
        Away,
        /// The connection broke.
        Unknown,
        Refused,
    }

    impl Away for Error {
        fn is_away(&self) -> bool {
            *self == Self::Away
        }

        fn has_answered(&self) -> bool {
            *self == Self::Refused
        }
    }

    type Read = Result<u32, Unanswered<Error>>;

    async fn hangs(breaker: &Breaker) -> Read {
        breaker.read(WITHIN, pending()).await
    }

    async fn answers(breaker: &Breaker) -> Read {
        breaker.read(WITHIN, ready(Ok(7))).await
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_timeout_opens_it_and_one_probe_at_a_time_finds_the_store_again() {
        let breaker = Breaker::new("test");
        assert_eq!(answers(&breaker).await, Ok(7));
        assert_eq!(hangs(&breaker).await, Err(Unanswered::Late(WITHIN)));
        assert_eq!(answers(&breaker).await, Err(Unanswered::Open));
        tokio::time::advance(PROBE_EVERY).await;
        let (probe, other) = tokio::join!(hangs(&breaker), answers(&breaker));
        assert_eq!((probe, other), (Err(Unanswered::Late(WITHIN)), Err(Unanswered::Open)));
        tokio::time::advance(PROBE_EVERY).await;
        assert_eq!(answers(&breaker).await, Ok(7));
        assert_eq!(answers(&breaker).await, Ok(7), "closed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_waits_for_the_store_until_it_has_been_silent_for_a_second() {
        let breaker = Breaker::new("test");
        let write = || breaker.write(ready(Ok::<_, Error>(7)));
        hangs(&breaker).await.unwrap_err();
        let unknown = breaker.write(ready(Err::<u32, _>(Error::Unknown))).await;
        assert_eq!(unknown, Err(Unanswered::Failed(Error::Unknown)));
        let still = answers(&breaker).await;
        assert_eq!(still, Err(Unanswered::Open), "a broken connection closes nothing");
        tokio::time::advance(HANGS_AFTER).await;
        hangs(&breaker).await.unwrap_err();
        assert_eq!(write().await, Err(Unanswered::Open));
        tokio::time::advance(PROBE_EVERY).await;
        assert_eq!(write().await, Ok(7), "a probe");
        assert_eq!(answers(&breaker).await, Ok(7), "it closed the breaker");
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_cannot_be_reached_opens_it_and_one_that_refuses_does_not() {
        let breaker = Breaker::new("test");
        let open: Read = Err(Unanswered::Open);
        for (error, then) in
            [(Error::Refused, Ok(7)), (Error::Unknown, Ok(7)), (Error::Away, open.clone())]
        {
            let read = breaker.read(WITHIN, ready(Err::<u32, _>(error))).await;
            assert_eq!(read, Err(Unanswered::Failed(error)));
            assert_eq!(answers(&breaker).await, then);
        }
        tokio::time::advance(PROBE_EVERY).await;
        breaker.read(WITHIN, ready(Err::<u32, _>(Error::Unknown))).await.unwrap_err();
        assert_eq!(answers(&breaker).await, open, "a broken connection closes nothing");
    }

    /// Its answer is a refusal: the probe must not be spent for nothing.
    #[tokio::test(start_paused = true)]
    async fn a_store_that_refuses_a_write_has_answered() {
        let breaker = Breaker::new("test");
        hangs(&breaker).await.unwrap_err();
        tokio::time::advance(HANGS_AFTER).await;
        let slow = async {
            tokio::time::sleep(2 * HANGS_AFTER).await;
            Err::<u32, _>(Error::Refused)
        };
        assert_eq!(breaker.write(slow).await, Err(Unanswered::Failed(Error::Refused)));
        assert_eq!(answers(&breaker).await, Ok(7), "closed");
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_or_departure_of_a_caller_says_nothing_of_the_store() {
        let breaker = Breaker::new("test");
        let soon = Duration::from_millis(5);
        let read = request_deadline::until(Instant::now() + soon, hangs(&breaker)).await;
        assert_eq!(read, Err(Unanswered::Late(soon)));
        drop(tokio::time::timeout(soon, hangs(&breaker)).await);
        assert_eq!(answers(&breaker).await, Ok(7));
    }

    #[tokio::test(start_paused = true)]
    async fn a_large_question_opens_nothing_and_its_answer_closes_it() {
        let breaker = Breaker::new("test");
        let late = breaker.read_much(WITHIN, pending::<Result<u32, Error>>()).await;
        assert_eq!(late, Err(Unanswered::Late(WITHIN)));
        let failed = breaker.read_much(WITHIN, ready(Err::<u32, _>(Error::Away))).await;
        assert_eq!(failed, Err(Unanswered::Failed(Error::Away)));
        assert_eq!(answers(&breaker).await, Ok(7));
        hangs(&breaker).await.unwrap_err();
        let refused = breaker.read_much(WITHIN, ready(Ok::<u32, Error>(7))).await;
        assert_eq!(refused, Err(Unanswered::Open), "only a probe asks");
        tokio::time::advance(PROBE_EVERY).await;
        assert_eq!(breaker.read_much(WITHIN, ready(Ok::<u32, Error>(7))).await, Ok(7));
        assert_eq!(answers(&breaker).await, Ok(7), "closed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_breaker_that_opens_and_closes_all_the_time_writes_twelve_lines_a_minute() {
        let lines = Lines::default();
        let _logging = tracing::subscriber::set_default(lines.subscriber());
        let breaker = Breaker::new("test");
        let begun = Instant::now();
        let mut opened = 0;
        while begun.elapsed() < Duration::from_secs(60) {
            opened += u32::from(hangs(&breaker).await == Err(Unanswered::Late(WITHIN)));
            tokio::time::advance(PROBE_EVERY).await;
            assert_eq!(answers(&breaker).await, Ok(7), "a probe closes it");
        }
        assert!(opened > 100, "{opened}");
        let text = lines.text();
        let count = |words: &str| text.lines().filter(|line| line.contains(words)).count();
        assert_eq!([count("breaker is open"), count("breaker closes")], [6, 6], "{text}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_to_a_question_from_before_closes_it() {
        let breaker = Breaker::new("test");
        let late = async {
            tokio::time::sleep(WITHIN / 2).await;
            Ok::<_, Error>(7)
        };
        let (_, late) = tokio::join!(
            breaker.read(WITHIN / 4, pending::<Result<u32, Error>>()),
            breaker.read(WITHIN, late),
        );
        assert_eq!(late, Ok(7));
        assert_eq!(answers(&breaker).await, Ok(7));
    }
}
