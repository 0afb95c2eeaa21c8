//! A request in flight, and a waiting one.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::oneshot;

use super::request::{Class, Operation, Rank, Reason, Request};
use super::{Admission, Counted};

/// A request in flight, until it is dropped.
#[derive(Debug)]
pub struct Permit {
    pub(super) admission: Option<Arc<Admission>>,
    pub(super) operation: Operation,
    pub(super) class: Class,
    pub(super) began: Duration,
    /// The remaining deadline when it started.
    pub(super) given: Option<Duration>,
    pub(super) places: usize,
    /// While it waits for something other than capacity: the places that it left, and since when.
    pub(super) aside: Option<(usize, Duration)>,
}

impl Permit {
    /// With one place.
    pub(super) fn new(
        admission: Arc<Admission>,
        ask: &Request,
        began: Duration,
        given: Option<Duration>,
    ) -> Self {
        let Request { operation, class, .. } = *ask;
        let admission = Some(admission);
        Self { admission, operation, class, began, given, places: 1, aside: None }
    }

    /// Raises the number of places of a request that turns out to be larger. Never lowers it.
    pub fn grow(&mut self, places: usize) {
        let Some(admission) = self.admission.as_ref().filter(|_| self.class != Class::P0) else {
            return;
        };
        let places = places.min(admission.places_max(self.class));
        if places > self.places {
            admission.in_flight.fetch_add(places - self.places, Ordering::SeqCst);
            self.places = places;
        }
    }

    /// The request was answered: its duration counts as a sample. A permit that is only dropped was
    /// cancelled, and gives no sample.
    pub fn answered(mut self) {
        if let Some(admission) = self.admission.take() {
            admission.end(&self, true);
        }
    }

    /// Restarts the measurement: the request starts now.
    #[must_use]
    pub fn restarted(mut self) -> Self {
        if let Some(admission) = &self.admission {
            self.began = admission.now();
        }
        self
    }

    /// Leaves a time out of the measurement: the request waited for something other than capacity.
    #[must_use]
    pub fn without(mut self, waited: Duration) -> Self {
        self.began += waited;
        self
    }

    /// Leaves the places: the request waits for something other than capacity. A critical one has none.
    pub fn step_aside(&mut self) {
        let Some(admission) = self.admission.as_ref().filter(|_| self.class != Class::P0) else {
            return;
        };
        let now = admission.now();
        self.aside = self.aside.or(Some((self.places, now)));
        admission.in_flight.fetch_sub(std::mem::take(&mut self.places), Ordering::SeqCst);
        admission.fill(now);
    }

    /// Takes the places again, above the limit if need be, and leaves the time since
    /// [`Self::step_aside`] out of the measurement.
    pub fn come_back(&mut self) {
        if let (Some(admission), Some((places, since))) = (&self.admission, self.aside.take()) {
            admission.in_flight.fetch_add(places, Ordering::SeqCst);
            self.places = places;
            self.began += admission.now().saturating_sub(since);
        }
    }

    /// Drops the permit without freeing its first place; the caller frees it.
    pub(super) fn forget(mut self) {
        if let Some(admission) = self.admission.take() {
            admission.in_flight.fetch_sub(self.places - 1, Ordering::SeqCst);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(admission) = self.admission.take() {
            admission.end(self, false);
        }
    }
}

/// A waiting request. Dropping it gives up its place in the queue.
#[derive(Debug)]
pub struct Ticket {
    pub(super) admission: Arc<Admission>,
    pub(super) ask: Request,
    pub(super) rank: Rank,
    pub(super) serial: u64,
    pub(super) since: Duration,
    pub(super) patience: Duration,
    pub(super) told: oneshot::Receiver<Result<Permit, Reason>>,
}

impl Ticket {
    /// Maximum waiting time.
    #[must_use]
    pub fn patience(&self) -> Duration {
        self.patience
    }

    /// Whether it has waited that long.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.admission.now() > self.since + self.patience
    }

    /// The decision, if there is one.
    pub fn try_answer(&mut self) -> Option<Result<Permit, Reason>> {
        let answer = self.told.try_recv().ok()?;
        Some(self.note(answer))
    }

    /// Waits until the request can start.
    ///
    /// # Errors
    /// The reason why it cannot start.
    ///
    /// # Cancel safety
    /// The place in the queue is given up.
    pub async fn wait(mut self) -> Result<Permit, Reason> {
        let answer = tokio::time::timeout(self.patience, &mut self.told).await;
        let answer = match answer {
            Ok(Ok(answer)) => answer,
            // The decision may have come at the same moment as the timeout.
            Err(_) | Ok(Err(_)) => self.told.try_recv().unwrap_or(Err(Reason::Wait)),
        };
        self.note(answer)
    }

    fn note(&self, answer: Result<Permit, Reason>) -> Result<Permit, Reason> {
        let reason = match answer {
            Ok(permit)
                if self.ask.deadline.is_some_and(|deadline| deadline <= self.admission.now()) =>
            {
                drop(permit);
                Reason::Deadline
            }
            Ok(permit) => {
                self.admission.metrics.decided(self.ask.class, Counted::Waited);
                return Ok(permit);
            }
            // Only heavy callers wait with the last rank.
            Err(Reason::Wait | Reason::Displaced) if self.rank == Rank::Last => Reason::Share,
            Err(reason) => reason,
        };
        self.admission.refused(self.ask.class, reason);
        Err(reason)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut room = self.admission.room();
        if room.remove(self.rank, self.serial) {
            self.admission.waiting[self.rank as usize].fetch_sub(1, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::super::{Decision, Settings};
    use super::*;

    fn ask(places: usize) -> Request {
        Request {
            class: Class::P1,
            operation: Operation(0),
            continues: false,
            caller: 0,
            is_stranger: false,
            deadline: None,
            places,
        }
    }

    #[test]
    fn a_request_that_steps_aside_lets_a_waiting_one_in_and_comes_back_above_the_limit() {
        let clock = Arc::new(AtomicU64::new(0));
        let read = Arc::clone(&clock);
        let ticks = Arc::new(move || Duration::from_micros(read.load(Ordering::SeqCst)));
        let admission = Admission::new(Settings { limit_max: 1, ..Settings::default() }, ticks);
        let Decision::Begin(mut first) = admission.ask(&ask(1)) else { panic!("it is free") };
        let Decision::Wait(mut second) = admission.ask(&ask(1)) else { panic!("it is full") };
        clock.fetch_add(1_000, Ordering::SeqCst);
        first.step_aside();
        first.step_aside();
        let second = second.try_answer().and_then(Result::ok).expect("its place is free");
        assert_eq!(admission.state().in_flight, 1);
        clock.fetch_add(5_000, Ordering::SeqCst);
        first.come_back();
        first.come_back();
        assert_eq!(admission.state().in_flight, 2);
        assert_eq!(first.began, Duration::from_millis(5), "it did not work meanwhile");
        drop(second);
        drop(first);
        assert_eq!(admission.state().in_flight, 0);
    }
}
