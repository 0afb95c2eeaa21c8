//! Turns for answers of several MiB: one at a time, by turns over tokens.
//!
//! Such an answer keeps a thread, Redis and megabytes of memory busy for a while. Side by side,
//! those of one token would delay the requests of all others.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Maximum number of requests of a token that wait for a turn, where waiting is bounded.
const WAITING_MAX: usize = 2;

/// Gives one turn at a time.
#[derive(Debug, Clone, Default)]
pub(crate) struct LargeReads(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    is_taken: bool,
    /// The tokens that wait, each with its requests in order of arrival. The first token is next.
    waiting: VecDeque<(Box<str>, VecDeque<oneshot::Sender<Turn>>)>,
}

impl LargeReads {
    /// Waits for the turn of a request of `token`.
    ///
    /// # Cancel safety
    /// The turn goes to the next request.
    pub(super) async fn take(&self, token: &str) -> Turn {
        let told = {
            let mut state = self.state();
            if !state.is_taken {
                state.is_taken = true;
                return self.turn();
            }
            let (tell, told) = oneshot::channel();
            match state.waiting.iter_mut().find(|(name, _)| **name == *token) {
                Some((_, requests)) => requests.push_back(tell),
                None => state.waiting.push_back((token.into(), VecDeque::from([tell]))),
            }
            told
        };
        // The sender is dropped only together with all waiting requests.
        told.await.unwrap_or_else(|_| self.turn())
    }

    /// A turn, if no other request has one.
    pub(super) fn take_now(&self) -> Option<Turn> {
        let mut state = self.state();
        let is_free = !std::mem::replace(&mut state.is_taken, true);
        drop(state);
        is_free.then(|| self.turn())
    }

    /// As [`Self::take`], but not behind many requests of the same token: they would fill the process with
    /// requests that wait. `None`: that many wait already.
    pub(super) async fn take_soon(&self, token: &str) -> Option<Turn> {
        self.take_behind(token, WAITING_MAX).await
    }

    /// As [`Self::take_soon`], behind fewer than `most` requests of the same token.
    pub(super) async fn take_behind(&self, token: &str, most: usize) -> Option<Turn> {
        let waiting = {
            let state = self.state();
            let of_token = state.waiting.iter().find(|(name, _)| **name == *token);
            of_token
                .map_or(0, |(_, requests)| requests.iter().filter(|one| !one.is_closed()).count())
        };
        if waiting >= most {
            return None;
        }
        Some(self.take(token).await)
    }

    fn turn(&self) -> Turn {
        Turn(Some(self.clone()))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes a finished turn to the next request.
    fn pass(&self) {
        loop {
            let mut state = self.state();
            let Some(next) = state.next() else {
                state.is_taken = false;
                return;
            };
            drop(state);
            match next.send(self.turn()) {
                Ok(()) => return,
                // The request was cancelled. Dropping the turn here must not call this function
                // again.
                Err(mut turn) => turn.0 = None,
            }
        }
    }
}

impl State {
    /// The first request of the next token, which then waits behind all other tokens.
    fn next(&mut self) -> Option<oneshot::Sender<Turn>> {
        let (token, mut requests) = self.waiting.pop_front()?;
        let next = requests.pop_front();
        if !requests.is_empty() {
            self.waiting.push_back((token, requests));
        }
        next
    }
}

/// A turn, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn(Option<LargeReads>);

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(reads) = self.0.take() {
            reads.pass();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

    use futures_util::FutureExt as _;

    #[test]
    fn a_token_with_many_requests_waits_behind_one_with_few() {
        let reads = LargeReads::default();
        let first = reads.take("greedy").now_or_never().expect("nobody has the turn");
        let mut second = pin!(reads.take("greedy"));
        let mut third = pin!(reads.take("greedy"));
        let mut quiet = pin!(reads.take("quiet"));
        assert!(second.as_mut().now_or_never().is_none());
        assert!(third.as_mut().now_or_never().is_none());
        assert!(quiet.as_mut().now_or_never().is_none());
        drop(first);
        let second = second.now_or_never().expect("it arrived first");
        assert!(quiet.as_mut().now_or_never().is_none());
        drop(second);
        assert!(third.as_mut().now_or_never().is_none(), "the other token is next");
        drop(quiet.now_or_never().expect("its turn"));
        drop(third.now_or_never().expect("nobody else waits"));
        assert!(!reads.state().is_taken);
    }

    #[test]
    fn the_turn_of_a_cancelled_request_goes_to_the_next() {
        let reads = LargeReads::default();
        let first = reads.take("a").now_or_never().expect("nobody has the turn");
        {
            let mut cancelled = pin!(reads.take("a"));
            assert!(cancelled.as_mut().now_or_never().is_none());
        }
        let mut next = pin!(reads.take("b"));
        assert!(next.as_mut().now_or_never().is_none());
        drop(first);
        assert!(next.now_or_never().is_some());
    }

    #[test]
    fn a_third_request_of_a_token_does_not_wait_and_another_token_may() {
        let reads = LargeReads::default();
        let first = reads.take_now().expect("nobody has the turn");
        assert!(reads.take_now().is_none());
        let mut waiting = [pin!(reads.take_soon("a")), pin!(reads.take_soon("a"))];
        for one in &mut waiting {
            assert!(one.as_mut().now_or_never().is_none(), "it waits");
        }
        assert!(reads.take_soon("a").now_or_never().expect("it does not wait").is_none());
        let mut other = pin!(reads.take_soon("b"));
        assert!(other.as_mut().now_or_never().is_none());
        drop(first);
        let [next, _] = waiting;
        assert!(next.now_or_never().flatten().is_some());
    }

    #[test]
    fn a_turn_that_arrives_after_its_request_is_cancelled_is_passed_on() {
        let reads = LargeReads::default();
        let first = reads.take("a").now_or_never().expect("nobody has the turn");
        {
            let mut late = pin!(reads.take("a"));
            assert!(late.as_mut().now_or_never().is_none());
            drop(first);
        }
        assert!(reads.take("b").now_or_never().is_some());
    }
}
