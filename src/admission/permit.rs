//! A request in flight, and one that waits.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::oneshot;

use super::request::{Class, Operation, Reason, Request};
use super::{Admission, Counted};

/// A request in flight, until it is dropped.
#[derive(Debug)]
pub struct Permit {
    pub(super) admission: Option<Arc<Admission>>,
    pub(super) operation: Operation,
    pub(super) class: Class,
    pub(super) began: Duration,
    /// The time that its caller gave it then.
    pub(super) given: Option<Duration>,
    pub(super) places: usize,
}

impl Permit {
    /// It turned out to be larger: it counts as so many requests, if that is more than before.
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

    /// The request was answered: how long it took counts. One that is only dropped was given up,
    /// and tells nothing about that.
    pub fn answered(mut self) {
        if let Some(admission) = self.admission.take() {
            admission.end(&self, true);
        }
    }

    /// What was done so far does not count: it begins now.
    #[must_use]
    pub fn restarted(mut self) -> Self {
        if let Some(admission) = &self.admission {
            self.began = admission.now();
        }
        self
    }

    /// Whoever calls it gives the first of its places back.
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

/// A place in the room; given up when it is dropped.
#[derive(Debug)]
pub struct Ticket {
    pub(super) admission: Arc<Admission>,
    pub(super) ask: Request,
    pub(super) rank: Class,
    pub(super) serial: u64,
    pub(super) since: Duration,
    pub(super) patience: Duration,
    pub(super) told: oneshot::Receiver<Result<Permit, Reason>>,
}

impl Ticket {
    /// Longest time to wait here.
    #[must_use]
    pub fn patience(&self) -> Duration {
        self.patience
    }

    /// Whether it has waited that long.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.admission.now() > self.since + self.patience
    }

    /// What was decided, if it was.
    pub fn try_answer(&mut self) -> Option<Result<Permit, Reason>> {
        let answer = self.told.try_recv().ok()?;
        Some(self.note(answer))
    }

    /// Waits until it can begin.
    ///
    /// # Errors
    /// Why it cannot.
    ///
    /// # Cancel safety
    /// The place is given up.
    pub async fn wait(mut self) -> Result<Permit, Reason> {
        let answer = tokio::time::timeout(self.patience, &mut self.told).await;
        let answer = match answer {
            Ok(Ok(answer)) => answer,
            // Told in the very moment that the patience ended?
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
            Err(Reason::Wait) if self.rank != self.ask.class => Reason::Share,
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
