//! A request in flight, and a waiting one.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::oneshot;

use super::request::{Class, Mode, Operation, Rank, Reason, Request};
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
    /// The number of its caller.
    pub(super) caller: u64,
    /// While it waits for something other than capacity.
    aside: Option<Left>,
    /// It gave up such a wait, so its duration is no sample.
    gave_up: bool,
}

/// What a request left while parts of it wait.
#[derive(Debug, Clone, Copy)]
struct Left {
    /// The parts that wait.
    parts: usize,
    places: usize,
    since: Duration,
}

impl Permit {
    /// With one place.
    pub(super) fn new(
        admission: Arc<Admission>,
        ask: &Request,
        began: Duration,
        given: Option<Duration>,
    ) -> Self {
        let Request { operation, class, caller, .. } = *ask;
        let admission = Some(admission);
        let (aside, gave_up) = (None, false);
        Self { admission, operation, class, began, given, places: 1, caller, aside, gave_up }
    }

    /// Raises the number of places to that of a large request. Never lowers it.
    pub(super) fn grow(&mut self, places: usize) {
        let Some(admission) = self.admission.as_ref().filter(|_| self.class != Class::P0) else {
            return;
        };
        let places = places.min(places_max(admission, self.class));
        if places > self.places {
            admission.in_flight.fetch_add(places - self.places, Ordering::SeqCst);
            self.places = places;
        }
    }

    /// Raises the number of places of a request that turns out to be larger, if a request of its class could
    /// start in its stead, or if its class is not enforced. Never lowers it.
    pub fn try_grow(&mut self, places: usize) -> bool {
        let Some(admission) = self.admission.as_ref().filter(|_| self.class != Class::P0) else {
            return true;
        };
        let places = places.min(places_max(admission, self.class)).max(self.places);
        if places == self.places {
            return true;
        }
        let (own, allowed) = (self.places, admission.allowed(self.class.rank()));
        let more = |count: usize| (count - own < allowed).then_some(count - own + places);
        let grows = admission.in_flight.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more);
        if grows.is_err() {
            match admission.mode(self.class) {
                Mode::Enforce | Mode::Refuse => return false,
                Mode::Shadow => admission.metrics.decided(self.class, Counted::Shadow),
                Mode::Off => {}
            }
            admission.in_flight.fetch_add(places - own, Ordering::SeqCst);
        }
        self.places = places;
        true
    }

    /// The request was answered: its duration counts as a sample. A permit that is only dropped was
    /// cancelled, and gives no sample.
    pub fn answered(mut self) {
        if let Some(admission) = self.admission.take() {
            admission.end(&self, !self.gave_up);
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

    /// Leaves the places: a part of the request waits for something other than capacity. A critical one has
    /// none.
    pub(super) fn step_aside(&mut self) {
        let Some(admission) = self.admission.as_ref().filter(|_| self.class != Class::P0) else {
            return;
        };
        let now = admission.now();
        let left = Left { parts: 0, places: self.places, since: now };
        self.aside.get_or_insert(left).parts += 1;
        admission.in_flight.fetch_sub(std::mem::take(&mut self.places), Ordering::SeqCst);
        admission.fill(now);
    }

    /// Ends the wait of a part. Once no part waits, the request takes its places again, above the limit if
    /// need be, and the time since the first [`Self::step_aside`] is left out of the measurement. If the
    /// wait is not over, the request gave it up.
    pub(super) fn come_back(&mut self, is_over: bool) {
        self.gave_up |= !is_over;
        let (Some(admission), Some(left)) = (&self.admission, &mut self.aside) else { return };
        left.parts -= 1;
        if left.parts > 0 {
            return;
        }
        let Left { places, since, .. } = *left;
        admission.in_flight.fetch_add(places, Ordering::SeqCst);
        self.began += admission.now().saturating_sub(since);
        (self.places, self.aside) = (places, None);
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

/// Maximum number of places for one request: it leaves places for others of its class and of higher
/// classes.
fn places_max(admission: &Admission, class: Class) -> usize {
    let limit = admission.limit.load(Ordering::Relaxed);
    let max = admission.limit_max.load(Ordering::Relaxed);
    (class.rank().allowed(limit, max) / 2).max(1)
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

    use super::super::{Decision, Settings, system_ticks};
    use super::*;

    fn ask(places: usize) -> Request {
        Request {
            class: Class::P1,
            operation: Operation(0),
            continues: false,
            caller: 0,
            asks_again: false,
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
        first.come_back(true);
        assert_eq!(admission.state().in_flight, 1, "another part of it waits");
        first.come_back(true);
        assert_eq!(admission.state().in_flight, 2);
        assert_eq!(first.began, Duration::from_millis(5), "it did not work meanwhile");
        drop(second);
        drop(first);
        assert_eq!(admission.state().in_flight, 0);
    }

    #[test]
    fn a_request_that_gave_up_a_wait_is_no_sample_of_the_latency() {
        let admission = Admission::new(Settings::default(), system_ticks());
        for is_over in [false, true] {
            let Decision::Begin(mut permit) = admission.ask(&ask(1)) else { panic!("it is free") };
            permit.step_aside();
            permit.come_back(is_over);
            permit.answered();
            let begun = admission.limiter.lock().unwrap().begun();
            assert_eq!(begun.is_some(), is_over);
        }
    }

    #[test]
    fn a_request_takes_the_places_of_its_body_only_where_it_could_also_start() {
        let admission = Admission::new(Settings::default(), system_ticks());
        let begin = || match admission.ask(&Request { class: Class::P2, ..ask(1) }) {
            Decision::Begin(permit) => permit,
            other => panic!("{other:?}"),
        };
        let in_flight = || admission.state().in_flight;
        // Its class may use 28 places; one request gets at most half of them.
        let [mut first, mut second, mut third] = [begin(), begin(), begin()];
        assert!(first.try_grow(1));
        assert_eq!(in_flight(), 3, "a small body takes no more");
        assert!(first.try_grow(1_000) && second.try_grow(14));
        assert_eq!(in_flight(), 29);
        assert!(third.try_grow(1), "it has its place");
        assert!(!third.try_grow(2));
        assert_eq!(in_flight(), 29);
        drop(first);
        assert!(third.try_grow(2) && third.try_grow(1));
        assert_eq!(in_flight(), 16);
        drop((second, third));
        assert_eq!(in_flight(), 0);
    }

    #[test]
    fn a_request_of_a_class_that_is_not_enforced_takes_the_places_of_its_body_beyond_the_limit() {
        for mode in [Mode::Off, Mode::Shadow] {
            let settings = Settings { modes: [mode; 4], ..Settings::default() };
            let admission = Admission::new(settings, system_ticks());
            let begin = || match admission.ask(&Request { class: Class::P2, ..ask(1) }) {
                Decision::Begin(permit) => permit,
                other => panic!("{other:?}"),
            };
            let mut permits = [begin(), begin(), begin(), begin()];
            assert!(permits.iter_mut().all(|permit| permit.try_grow(14)), "{mode:?}");
            assert_eq!(admission.state().in_flight, 4 * 14);
        }
    }
}
