//! The order in which admitted requests start: as many concurrently as there are processors,
//! highest class first.
//!
//! Without it, a request that needs much processor time would delay all requests admitted after it,
//! and a place in flight would be of little use to the first class.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::Class;

/// One turn in this many goes to the lowest class, which would otherwise wait for ever if the first
/// class uses all of them.
const LOWEST_EVERY: u64 = 16;

/// Assigns turns.
#[derive(Debug)]
pub(crate) struct Turns {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    free: usize,
    given: u64,
    /// Per class, in order of arrival. A cancelled request is detected at its turn.
    waiting: [VecDeque<oneshot::Sender<Turn>>; 4],
}

impl Turns {
    /// Allows `free` concurrent turns.
    pub(crate) fn new(free: usize) -> Arc<Self> {
        let state = State { free, given: 0, waiting: Default::default() };
        Arc::new(Self { state: Mutex::new(state) })
    }

    /// Waits for a turn.
    ///
    /// # Cancel safety
    /// The turn goes to the next request.
    pub(crate) async fn take(self: &Arc<Self>, class: Class) -> Turn {
        let told = {
            let mut state = self.state();
            if state.free > 0 {
                state.free -= 1;
                return self.turn();
            }
            let (tell, told) = oneshot::channel();
            state.waiting[class as usize].push_back(tell);
            told
        };
        // The sender is dropped only together with all waiting requests.
        told.await.unwrap_or_else(|_| self.turn())
    }

    fn turn(self: &Arc<Self>) -> Turn {
        Turn { turns: Some(Arc::clone(self)) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes a finished turn to the next request.
    fn pass(self: &Arc<Self>) {
        loop {
            let mut state = self.state();
            let Some(next) = state.next() else {
                state.free += 1;
                return;
            };
            drop(state);
            match next.send(self.turn()) {
                Ok(()) => return,
                // The request was cancelled. Dropping the turn here must not call this function
                // again.
                Err(mut turn) => turn.turns = None,
            }
        }
    }
}

impl State {
    fn next(&mut self) -> Option<oneshot::Sender<Turn>> {
        self.given += 1;
        let lowest_first = self.given.is_multiple_of(LOWEST_EVERY);
        let mut queues = self.waiting.iter_mut().filter(|queue| !queue.is_empty());
        let queue = if lowest_first { queues.next_back() } else { queues.next() };
        queue?.pop_front()
    }
}

/// A turn, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    turns: Option<Arc<Turns>>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(turns) = self.turns.take() {
            turns.pass();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    type Waiting = Pin<Box<dyn Future<Output = Turn>>>;

    fn wait(turns: &Arc<Turns>, class: Class) -> Waiting {
        let turns = Arc::clone(turns);
        let mut waiting: Waiting = Box::pin(async move { turns.take(class).await });
        assert!(poll(&mut waiting).is_none());
        waiting
    }

    fn poll(waiting: &mut Waiting) -> Option<Turn> {
        match waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(turn) => Some(turn),
            Poll::Pending => None,
        }
    }

    fn begin(turns: &Arc<Turns>) -> Turn {
        let turns = Arc::clone(turns);
        poll(&mut (Box::pin(async move { turns.take(Class::P3).await }) as Waiting)).unwrap()
    }

    #[test]
    fn all_free_turns_start_immediately_and_then_the_highest_class_in_order() {
        let turns = Turns::new(2);
        let (first, second) = (begin(&turns), begin(&turns));
        let mut low = wait(&turns, Class::P3);
        let mut high = wait(&turns, Class::P1);
        let mut higher = wait(&turns, Class::P1);
        drop(first);
        let high = poll(&mut high).unwrap();
        assert!(poll(&mut low).is_none() && poll(&mut higher).is_none());
        drop(second);
        let higher = poll(&mut higher).unwrap();
        assert!(poll(&mut low).is_none());
        drop(high);
        drop((poll(&mut low).unwrap(), higher));
        assert_eq!(turns.state().free, 2);
    }

    #[test]
    fn a_caller_that_gave_up_before_or_after_its_turn_takes_none() {
        let turns = Turns::new(1);
        let first = begin(&turns);
        let gone = wait(&turns, Class::P1);
        let given = wait(&turns, Class::P2);
        let mut last = wait(&turns, Class::P3);
        drop(gone);
        drop(first);
        assert!(poll(&mut last).is_none(), "it is another's");
        drop(given);
        drop(poll(&mut last).unwrap());
        assert_eq!(turns.state().free, 1);
    }

    #[test]
    fn the_lowest_class_has_some_turns_however_many_are_asked_for_above_it() {
        let turns = Turns::new(1);
        let mut turn = begin(&turns);
        let mut low = wait(&turns, Class::P3);
        for n in 1..=LOWEST_EVERY {
            let mut high = wait(&turns, Class::P1);
            drop(turn);
            match poll(&mut low) {
                Some(_) => return assert_eq!(n, LOWEST_EVERY),
                None => turn = poll(&mut high).unwrap(),
            }
        }
        unreachable!("it had no turn");
    }
}
