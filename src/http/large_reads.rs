//! Turns for answers of several MiB: one at a time, by turns over tokens.
//!
//! Such an answer keeps a thread, Redis and megabytes of memory busy for a while. Side by side,
//! those of one token would delay the requests of all others. A request that waits holds memory and a
//! connection, so few of a token wait: further ones are refused. It holds no place in flight.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OnceCell, oneshot};

use super::auth::Caller;
use super::problem::{Kind, Problem};
use crate::admission::aside::aside;

/// Gives one turn at a time.
#[derive(Debug, Clone)]
pub(crate) struct LargeReads(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// What the requests are called in a refusal.
    what: &'static str,
    /// Maximum number of requests of a token that wait for a turn.
    waiting_max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    is_taken: bool,
    /// The tokens that wait, each with its requests in order of arrival. The first token is next.
    waiting: VecDeque<(Box<str>, VecDeque<oneshot::Sender<Turn>>)>,
}

impl LargeReads {
    /// Turns for large lists. So many requests of a token wait that four concurrent ones are answered.
    pub(crate) fn lists() -> Self {
        Self::new("large lists", 3)
    }

    /// Turns for searches of the bus, replays, and actions on many dead letters, which take up to some
    /// seconds.
    pub(crate) fn searches() -> Self {
        Self::new("searches, replays or actions on many dead letters", 2)
    }

    /// Turns for checks of rules, which take up to a tenth of a second.
    pub(crate) fn checks() -> Self {
        Self::new("checks of rules", 8)
    }

    /// Turns for dry runs of rules, which take up to some seconds.
    pub(crate) fn trials() -> Self {
        Self::new("tests of rules", 3)
    }

    fn new(what: &'static str, waiting_max: usize) -> Self {
        Self(Arc::new(Shared { what, waiting_max, state: Mutex::default() }))
    }

    /// Waits for the turn of a request of `token`.
    ///
    /// # Errors
    /// The maximum number of requests of this token wait already.
    ///
    /// # Cancel safety
    /// The turn goes to the next request.
    pub(super) async fn take(&self, token: &str) -> Result<Turn, Problem> {
        let told = {
            let mut state = self.state();
            if !state.is_taken {
                state.is_taken = true;
                return Ok(self.turn());
            }
            let (tell, told) = oneshot::channel();
            match state.waiting.iter_mut().find(|(name, _)| **name == *token) {
                Some((_, requests)) => {
                    requests.retain(|one| !one.is_closed());
                    if requests.len() >= self.0.waiting_max {
                        return Err(self.refusal());
                    }
                    requests.push_back(tell);
                }
                None => state.waiting.push_back((token.into(), VecDeque::from([tell]))),
            }
            told
        };
        // The sender is dropped only together with all waiting requests.
        Ok(aside(told).await.unwrap_or_else(|_| self.turn()))
    }

    fn refusal(&self) -> Problem {
        let Shared { what, waiting_max, .. } = &*self.0;
        let detail = format!(
            "nothing was done: {waiting_max} {what} of this token already wait for their turn; send them one after the other, and retry later"
        );
        Problem::new(Kind::Quota, detail).retry_after(1)
    }

    /// The turn of a request that makes several large reads, or none.
    pub(super) fn once<'a>(&'a self, caller: &'a Caller) -> OneTurn<'a> {
        let (token, is_for_certain) = (caller.name(), !caller.covers_all());
        OneTurn { reads: self, token, is_for_certain, turn: OnceCell::new() }
    }

    /// A turn, if no other request has one.
    pub(super) fn take_now(&self) -> Option<Turn> {
        let mut state = self.state();
        let is_free = !std::mem::replace(&mut state.is_taken, true);
        drop(state);
        is_free.then(|| self.turn())
    }

    fn turn(&self) -> Turn {
        Turn(Some(self.clone()))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
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

/// The turn of one request. It is taken before the first large read, once for all of them: a request that
/// waited for another turn while it has one would wait for itself.
pub(super) struct OneTurn<'a> {
    reads: &'a LargeReads,
    token: &'a str,
    /// Whether its token is for certain bots.
    is_for_certain: bool,
    turn: OnceCell<Turn>,
}

impl OneTurn<'_> {
    /// Whether its token is for certain bots.
    pub(super) fn is_for_certain(&self) -> bool {
        self.is_for_certain
    }

    /// Waits for the turn, unless the request has it.
    ///
    /// # Errors
    /// As [`LargeReads::take`].
    ///
    /// # Cancel safety
    /// As [`LargeReads::take`].
    pub(super) async fn take(&self) -> Result<(), Problem> {
        self.turn.get_or_try_init(|| self.reads.take(self.token)).await?;
        Ok(())
    }

    /// The same, but tokens for all bots wait for none.
    ///
    /// # Errors
    /// As [`LargeReads::take`].
    ///
    /// # Cancel safety
    /// As [`LargeReads::take`].
    pub(super) async fn take_of_certain(&self) -> Result<(), Problem> {
        if self.is_for_certain {
            self.take().await?;
        }
        Ok(())
    }

    /// Whether the request may read much now: it has the turn, no other one has it, or its token is for
    /// all bots.
    pub(super) fn take_now_of_certain(&self) -> bool {
        if !self.is_for_certain || self.turn.initialized() {
            return true;
        }
        self.reads.take_now().is_some_and(|turn| self.turn.set(turn).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

    use futures_util::FutureExt as _;

    /// The result of a request that does not wait.
    fn now(taking: impl Future<Output = Result<Turn, Problem>>) -> Option<Turn> {
        taking.now_or_never().and_then(Result::ok)
    }

    #[test]
    fn a_token_with_many_requests_waits_behind_one_with_few() {
        let reads = LargeReads::lists();
        let first = now(reads.take("greedy")).expect("nobody has the turn");
        let mut second = pin!(reads.take("greedy"));
        let mut third = pin!(reads.take("greedy"));
        let mut quiet = pin!(reads.take("quiet"));
        assert!(second.as_mut().now_or_never().is_none());
        assert!(third.as_mut().now_or_never().is_none());
        assert!(quiet.as_mut().now_or_never().is_none());
        drop(first);
        let second = now(second).expect("it arrived first");
        assert!(quiet.as_mut().now_or_never().is_none());
        drop(second);
        assert!(third.as_mut().now_or_never().is_none(), "the other token is next");
        drop(now(quiet).expect("its turn"));
        drop(now(third).expect("nobody else waits"));
        assert!(!reads.state().is_taken);
    }

    #[test]
    fn the_turn_of_a_cancelled_request_goes_to_the_next() {
        let reads = LargeReads::lists();
        let first = now(reads.take("a")).expect("nobody has the turn");
        {
            let mut cancelled = pin!(reads.take("a"));
            assert!(cancelled.as_mut().now_or_never().is_none());
        }
        let mut next = pin!(reads.take("b"));
        assert!(next.as_mut().now_or_never().is_none());
        drop(first);
        assert!(now(next).is_some());
    }

    #[test]
    fn a_third_request_of_a_token_does_not_wait_and_another_token_may() {
        let reads = LargeReads::searches();
        let first = reads.take_now().expect("nobody has the turn");
        assert!(reads.take_now().is_none());
        {
            let mut cancelled = pin!(reads.take("a"));
            assert!(cancelled.as_mut().now_or_never().is_none());
        }
        let mut waiting = [pin!(reads.take("a")), pin!(reads.take("a"))];
        for one in &mut waiting {
            assert!(one.as_mut().now_or_never().is_none(), "it waits");
        }
        let refused = reads.take("a").now_or_never().expect("it does not wait").unwrap_err();
        assert_eq!(refused.status().as_u16(), 429);
        assert!(refused.detail().contains("one after the other"), "{}", refused.detail());
        let mut other = pin!(reads.take("b"));
        assert!(other.as_mut().now_or_never().is_none());
        drop(first);
        let [next, _] = waiting;
        assert!(now(next).is_some());
    }

    /// A token for these bots.
    fn caller(name: &str, bots: &str) -> Caller {
        Caller::new(name, Vec::new(), &[bots.to_owned()])
    }

    #[test]
    fn a_request_takes_one_turn_for_all_its_reads_and_passes_it_on_at_its_end() {
        let reads = LargeReads::lists();
        let (shop, other) = (caller("shop", "shop-*"), caller("other", "other-*"));
        let turn = reads.once(&shop);
        assert!(turn.take().now_or_never().expect("none has it").is_ok());
        let again = [turn.take_of_certain().now_or_never(), turn.take().now_or_never()];
        assert!(again.iter().all(|taken| matches!(taken, Some(Ok(())))), "{again:?}");
        assert!(turn.take_now_of_certain(), "it has it");
        let theirs = reads.once(&other);
        assert!(!theirs.take_now_of_certain(), "another request has it");
        {
            let mut waiting = pin!(theirs.take_of_certain());
            assert!(waiting.as_mut().now_or_never().is_none());
            drop(turn);
            assert!(matches!(waiting.now_or_never(), Some(Ok(()))), "its turn");
        }
        drop(theirs);
        assert!(!reads.state().is_taken);
    }

    #[test]
    fn a_request_that_reads_little_or_is_for_all_bots_takes_no_turn() {
        let reads = LargeReads::lists();
        let (all, shop) = (caller("all", "*"), caller("shop", "shop-*"));
        let turn = reads.once(&all);
        assert!(matches!(turn.take_of_certain().now_or_never(), Some(Ok(()))));
        assert!(turn.take_now_of_certain() && !reads.state().is_taken);
        let little = reads.once(&shop);
        assert!(!reads.state().is_taken);
        assert!(little.take_now_of_certain() && reads.state().is_taken, "it is free");
        assert!(turn.take_now_of_certain(), "it needs none");
        drop(little);
        assert!(!reads.state().is_taken);
    }

    #[test]
    fn a_turn_that_arrives_after_its_request_is_cancelled_is_passed_on() {
        let reads = LargeReads::lists();
        let first = now(reads.take("a")).expect("nobody has the turn");
        {
            let mut late = pin!(reads.take("a"));
            assert!(late.as_mut().now_or_never().is_none());
            drop(first);
        }
        assert!(now(reads.take("b")).is_some());
    }
}
