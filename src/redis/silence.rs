//! Shared connections on which no answer comes any more.
//!
//! A network can lose every answer and end no connection. A call then ends with the timeout of its
//! answer, and the next one makes a new connection. But most calls of the HTTP API are cancelled
//! earlier, at the deadline of their request. So a connection also counts as dead once calls have
//! waited for [`SILENT`] without any answer, whoever they were.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::RedisResult;
use tokio::time::{Instant, sleep};

use super::node::Node;

/// A connection that has not answered for this long is given up when one of its calls is cancelled. It
/// is longer than a script may run, so that a busy server keeps its connections.
const SILENT: Duration = Duration::from_secs(1);
/// After a newer connection answers, a call on a connection in doubt keeps at least this much time.
/// The server answers the older call first, unless its answer is lost.
const OUTLIVED: Duration = Duration::from_millis(250);

/// How long calls have waited on a connection since its last answer.
#[derive(Debug, Default)]
pub(super) struct Silence(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Number of calls that wait.
    waiting: usize,
    /// When the first of them started to wait, or the last answer came.
    since: Option<Instant>,
    /// How long cancelled calls had waited before.
    before: Duration,
}

impl State {
    fn leave(&mut self) {
        self.waiting -= 1;
        if self.waiting == 0 {
            self.before = self.lasts();
            self.since = None;
        }
    }

    fn lasts(&self) -> Duration {
        self.before + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

impl Silence {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self) {
        let mut state = self.state();
        state.waiting += 1;
        state.since.get_or_insert_with(Instant::now);
    }

    fn answered(&self) {
        let mut state = self.state();
        state.waiting -= 1;
        state.since = (state.waiting > 0).then(Instant::now);
        state.before = Duration::ZERO;
    }

    /// Notes a call that ended without an answer. Returns whether the connection is silent.
    fn cancelled(&self) -> bool {
        let mut state = self.state();
        let is_silent = state.lasts() >= SILENT;
        state.leave();
        is_silent
    }
}

/// A call that waits for its answer on a shared connection. If it is cancelled and the connection has been
/// silent for too long, the next call makes another one.
pub(super) struct Waiting<'a> {
    node: &'a Node,
    /// The number of the connection.
    number: u64,
    silence: Option<Arc<Silence>>,
}

impl Waiting<'_> {
    /// The call has ended, `answered` or with an error.
    pub(super) fn end(mut self, answered: bool) {
        let Some(silence) = self.silence.take() else { return };
        if answered {
            silence.answered();
        } else {
            self.node.give_up(self.number);
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.silence.take().is_some_and(|silence| silence.cancelled()) {
            self.node.give_up(self.number);
        }
    }
}

impl Node {
    /// Begins to wait for an answer on the connection of this number.
    pub(super) fn wait(&self, number: u64, silence: Arc<Silence>) -> Waiting<'_> {
        silence.wait();
        Waiting { node: self, number, silence: Some(silence) }
    }

    /// Waits for the answer to a call on a connection made after `doubts` timeouts.
    ///
    /// When the connection is put in doubt, a new connection shows whether the server answers. If the
    /// server answers there, but the awaited answer does not follow soon, the old connection is dead: the
    /// call ends as after a timeout.
    pub(super) async fn unless_outlived<T>(
        &self,
        sending: impl Future<Output = RedisResult<T>>,
        doubts: u64,
    ) -> RedisResult<T> {
        let outlived = async {
            self.doubted_since(doubts).await;
            let started = Instant::now();
            // Boxed, since it is rarely needed: every call would carry its size.
            match Box::pin(self.connected()).await {
                // For a slow server or network, the call waits as long again.
                Ok(_) => sleep(started.elapsed().max(OUTLIVED)).await,
                // The call has its own timeout.
                Err(_) => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            sent = sending => sent,
            () = outlived => {
                let text = "a newer connection answers, and this one does not";
                Err(std::io::Error::new(std::io::ErrorKind::TimedOut, text).into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_silent_after_a_second_of_waits_without_an_answer() {
        let silence = Silence::default();
        for _ in 0..2 {
            silence.wait();
            advance((SILENT / 2).saturating_sub(Duration::from_millis(1))).await;
            assert!(!silence.cancelled());
            // Idle time does not count.
            advance(SILENT * 60).await;
        }
        silence.wait();
        advance(Duration::from_millis(2)).await;
        assert!(silence.cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_to_any_call_ends_the_silence() {
        let silence = Silence::default();
        for _ in 0..3 {
            silence.wait();
        }
        advance(SILENT).await;
        silence.answered();
        advance(SILENT / 2).await;
        assert!(!silence.cancelled());
        advance(SILENT / 2).await;
        assert!(silence.cancelled(), "the last call has waited since that answer");
    }
}
