//! The three stages of a stop.
//!
//! 1. **Leaving**: `/readyz` answers 503, so that load balancers send requests elsewhere.
//!    Everything else continues: connections are accepted, requests answered, events handled.
//!    Starts with the first SIGTERM or SIGINT and lasts `shutdown_delay`.
//! 2. **Soft**: accept no new work, finish the work in progress. Starts after the delay, or when a
//!    part of the process fails and cancels [`Shutdown::soft`].
//! 3. **Hard**: stop at the next await. Starts when the grace period ends, or at a second signal.
//!
//! Every task is spawned on the tracker, so the process ends after the last task. A hard stop loses
//! nothing: an interrupted slice's lease expires, and another worker handles the slice again.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Time that tasks get to end after the hard stop.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// `shutdown_delay` and `shutdown_grace`. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Times(Arc<Mutex<(Duration, Duration)>>);

impl Times {
    pub(crate) fn new(times: (Duration, Duration)) -> Self {
        Self(Arc::new(Mutex::new(times)))
    }

    pub(crate) fn set(&self, times: (Duration, Duration)) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = times;
    }

    fn get(&self) -> (Duration, Duration) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The stages, and the tasks to wait for. Clones share both.
#[derive(Debug, Clone)]
pub struct Shutdown {
    /// Cancelled: another instance of this process accepts the connections from now on. Requests on
    /// open connections are answered, and each answer asks the client to connect again.
    pub handed: CancellationToken,
    /// Cancelled: not ready any more. Load balancers should stop sending requests; requests are
    /// still answered.
    pub leaving: CancellationToken,
    /// Cancelled: accept no new work, finish the work in progress. Implies `leaving`.
    pub soft: CancellationToken,
    /// Cancelled: stop at the next await. Implies `soft`.
    pub hard: CancellationToken,
    /// All tasks of the process.
    pub tracker: TaskTracker,
}

impl Default for Shutdown {
    fn default() -> Self {
        Self::new()
    }
}

impl Shutdown {
    /// A process that is not stopping.
    #[must_use]
    pub fn new() -> Self {
        let hard = CancellationToken::new();
        let soft = hard.child_token();
        let (leaving, handed) = (soft.child_token(), CancellationToken::new());
        Self { handed, leaving, soft, hard, tracker: TaskTracker::new() }
    }

    /// The stages of one instance of this process. They follow those of the process, and can also be
    /// cancelled alone: `hard` after `soft`.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub(crate) fn of_an_instance(&self) -> Self {
        let soft = self.soft.child_token();
        let leaving = soft.child_token();
        let (of_process, of_instance) = (self.leaving.clone(), leaving.clone());
        self.spawn(async move {
            tokio::select! {
                () = of_process.cancelled() => of_instance.cancel(),
                () = of_instance.cancelled() => {}
            }
        });
        let (handed, hard) = (CancellationToken::new(), self.hard.child_token());
        Self { handed, leaving, soft, hard, tracker: TaskTracker::new() }
    }

    /// Starts a task that [`Self::wait`] waits for.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn spawn<F>(&self, task: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.tracker.spawn(task)
    }

    /// Makes SIGTERM and SIGINT stop this process in stages instead of killing it. The first signal
    /// cancels `leaving`, and `soft` is cancelled after `delay`. `hard` is cancelled at the second
    /// signal, or `grace` after `soft`. The grace period also starts if another component cancels
    /// `soft`.
    ///
    /// # Errors
    /// If the operating system refuses a signal handler.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn listen_for_signals(&self, delay: Duration, grace: Duration) -> io::Result<()> {
        self.listen_with(&Times::new((delay, grace)))
    }

    /// The same with times that can change until the signal.
    pub(crate) fn listen_with(&self, times: &Times) -> io::Result<()> {
        // Registered before the task is spawned, so that an immediate signal finds its handler.
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let signals = stream::poll_fn(move |context| {
            if terminate.poll_recv(context).is_ready() {
                return Poll::Ready(Some("SIGTERM"));
            }
            interrupt.poll_recv(context).map(|_| Some("SIGINT"))
        });
        let listening = self.clone().escalate(signals, times.clone());
        #[expect(
            clippy::disallowed_methods,
            reason = "a finished process must not wait for a signal"
        )]
        drop(tokio::spawn(listening));
        Ok(())
    }

    async fn escalate(self, signals: impl Stream<Item = &'static str>, times: Times) {
        let mut signals = pin!(signals);
        tokio::select! {
            biased;
            () = self.soft.cancelled() => {}
            Some(signal) = signals.next() => {
                let (delay, grace) = times.get();
                tracing::info!(signal, ?delay, ?grace, "stopping: not ready any more; after the delay no new work is taken; a second signal stops immediately");
                self.leaving.cancel();
            }
        }
        let (delay, grace) = times.get();
        tokio::select! {
            biased;
            () = self.soft.cancelled() => {}
            Some(signal) = signals.next() => {
                tracing::warn!(signal, "stopping immediately");
                self.hard.cancel();
                return;
            }
            () = tokio::time::sleep(delay) => self.soft.cancel(),
        }
        tokio::select! {
            biased;
            () = self.hard.cancelled() => {}
            Some(signal) = signals.next() => tracing::warn!(signal, "stopping immediately"),
            () = self.outlast(grace) => {}
        }
        self.hard.cancel();
    }

    /// Waits for the end of the grace period, and says so if tasks still run then.
    async fn outlast(&self, grace: Duration) {
        tokio::time::sleep(grace).await;
        if !self.tracker.is_empty() {
            tracing::warn!(
                tasks = self.tracker.len(),
                "the grace period is over; stopping immediately"
            );
        }
    }

    /// Stops from code as after a signal, without the delay: cancels `soft`, and `hard` once every
    /// task has ended, or after `grace`. Returns after the last task, as [`Self::wait`] does. It does
    /// not wait for [`App::run`](crate::app::App::run), which then still answers its last requests and
    /// stops private servers: await both, for example with `tokio::join!`.
    ///
    /// A program that handles its signals itself calls it while
    /// [`App::run`](crate::app::App::run) runs, with the `shutdown_grace` of its configuration.
    ///
    /// # Cancel safety
    /// `soft` stays cancelled, but nothing cancels `hard` at the end of the grace period. The call can
    /// be repeated.
    pub async fn stop_within(&self, grace: Duration) {
        self.soft.cancel();
        tokio::select! {
            biased;
            _ = self.ended() => self.hard.cancel(),
            () = self.outlast(grace) => {
                self.hard.cancel();
                self.ended().await;
            }
        }
    }

    /// Waits until every spawned task has ended. After the hard stop it waits at most two seconds,
    /// because a task may wait long for an unavailable store. Does not stop the tasks: cancel
    /// `soft` or `hard` for that.
    ///
    /// # Cancel safety
    /// Nothing is lost; the call can be repeated.
    pub async fn wait(&self) {
        if !self.ended().await {
            tracing::warn!(
                tasks = self.tracker.len(),
                "some tasks did not end in time; going on without them"
            );
        }
    }

    /// Waits in the same way. Whether every task has ended.
    async fn ended(&self) -> bool {
        self.tracker.close();
        let late = async {
            self.hard.cancelled().await;
            tokio::time::sleep(LAST_WORDS).await;
        };
        tokio::select! {
            biased;
            () = self.tracker.wait() => true,
            () = late => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(3_600);

    fn by_hand() -> (mpsc::UnboundedSender<&'static str>, impl Stream<Item = &'static str>) {
        let (sender, mut receiver) = mpsc::unbounded_channel();
        (sender, stream::poll_fn(move |context| receiver.poll_recv(context)))
    }

    #[tokio::test]
    async fn the_first_signal_is_soft_and_the_second_is_hard() {
        let shutdown = Shutdown::new();
        let (signals, stream) = by_hand();
        let escalating = shutdown.clone().escalate(stream, Times::new((Duration::ZERO, LONG)));
        let listener = shutdown.spawn(escalating);
        assert!(!shutdown.soft.is_cancelled() && !shutdown.leaving.is_cancelled());

        signals.send("SIGTERM").unwrap();
        shutdown.soft.cancelled().await;
        assert!(!shutdown.hard.is_cancelled());

        signals.send("SIGTERM").unwrap();
        shutdown.hard.cancelled().await;
        listener.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn for_the_delay_it_is_only_leaving_and_then_it_stops_softly() {
        let shutdown = Shutdown::new();
        let (signals, stream) = by_hand();
        shutdown
            .spawn(shutdown.clone().escalate(stream, Times::new((Duration::from_secs(5), LONG))));
        signals.send("SIGTERM").unwrap();
        shutdown.leaving.cancelled().await;
        tokio::time::sleep(Duration::from_millis(4_900)).await;
        assert!(!shutdown.soft.is_cancelled());
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(shutdown.soft.is_cancelled() && !shutdown.hard.is_cancelled());
    }

    #[tokio::test]
    async fn a_second_signal_during_the_delay_stops_immediately() {
        let shutdown = Shutdown::new();
        let (signals, stream) = by_hand();
        let listener = shutdown.spawn(shutdown.clone().escalate(stream, Times::new((LONG, LONG))));
        signals.send("SIGTERM").unwrap();
        shutdown.leaving.cancelled().await;
        assert!(!shutdown.soft.is_cancelled());
        signals.send("SIGTERM").unwrap();
        shutdown.hard.cancelled().await;
        listener.await.unwrap();
    }

    #[tokio::test]
    async fn a_soft_stop_becomes_hard_when_the_grace_is_over() {
        let shutdown = Shutdown::new();
        let (_signals, stream) = by_hand();
        shutdown
            .spawn(shutdown.clone().escalate(stream, Times::new((LONG, Duration::from_millis(1)))));
        shutdown.soft.cancel();
        shutdown.hard.cancelled().await;
        shutdown.wait().await;
    }

    #[tokio::test]
    async fn a_hard_stop_is_also_a_soft_one_but_not_the_other_way_round() {
        let shutdown = Shutdown::new();
        shutdown.soft.cancel();
        assert!(!shutdown.hard.is_cancelled() && shutdown.leaving.is_cancelled());
        let shutdown = Shutdown::new();
        shutdown.hard.cancel();
        assert!(shutdown.soft.is_cancelled() && shutdown.leaving.is_cancelled());
    }

    #[tokio::test]
    async fn waiting_ends_with_the_last_task() {
        let shutdown = Shutdown::new();
        let soft = shutdown.soft.clone();
        let task = shutdown.spawn(async move { soft.cancelled().await });
        let mut waiting = pin!(shutdown.wait());
        assert!(futures_util::poll!(&mut waiting).is_pending());
        shutdown.soft.cancel();
        waiting.await;
        assert!(task.is_finished());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_from_code_ends_with_the_last_task_and_becomes_hard_after_the_grace() {
        for (takes, expected) in [(1, 1), (7_200, 5)] {
            let shutdown = Shutdown::new();
            let (hard, work) = (shutdown.hard.clone(), Duration::from_secs(takes));
            let task = shutdown.spawn(
                hard.run_until_cancelled_owned(async move { tokio::time::sleep(work).await }),
            );
            let begun = tokio::time::Instant::now();
            shutdown.stop_within(Duration::from_secs(5)).await;
            assert!(shutdown.soft.is_cancelled() && task.is_finished());
            assert_eq!(begun.elapsed().as_secs(), expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_hard_stop_waiting_is_bounded() {
        let shutdown = Shutdown::new();
        shutdown.spawn(std::future::pending::<()>());
        shutdown.soft.cancel();
        let mut waiting = pin!(shutdown.wait());
        assert!(futures_util::poll!(&mut waiting).is_pending());
        shutdown.hard.cancel();
        waiting.await;
        assert!(!shutdown.ended().await);
    }
}
