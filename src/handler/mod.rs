//! Handlers of slices. A handler decides *whether* an event is done. The retry policy
//! (`pool::retry`) decides *when* it is retried, and the worker commits the outcomes.

mod log;
pub(crate) mod portion;
mod push;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::Instant;

pub use self::log::LogHandler;
pub(crate) use self::push::{PushHandler, acknowledgement};
use crate::clock::SharedClock;
use crate::event::Event;
use crate::id::{BotId, Fence, PipelineName, Sequence};
use crate::ledger::LedgerEntry;
use crate::outbound::Response;
use crate::trace::SliceTrace;

/// What a handler may use. Each process has its own.
#[derive(Clone)]
pub struct Environment {
    /// The wall clock.
    pub clock: SharedClock,
    /// The pipeline that the handler serves.
    pub pipeline: PipelineName,
}

impl std::fmt::Debug for Environment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Environment").field("pipeline", &self.pipeline).finish_non_exhaustive()
    }
}

/// An event and its sequence.
#[derive(Debug, Clone)]
pub struct Delivery {
    /// The place of the event in its bot's queue. It may be lower than that of an earlier event: with
    /// `order_by` lanes come one after the other, and redriven dead letters keep their place. A
    /// repetition may have another one: recognise it by the source and the id of the event.
    pub sequence: Sequence,
    /// The event.
    pub event: Event,
}

/// The events taken from one bot's queue under one lease, in order, at least one. With `order_by`,
/// those of one lane.
#[derive(Debug, Clone)]
pub struct Slice {
    /// The tenant.
    pub bot: BotId,
    /// The fence of the lease. Each new lease of the bot has a higher one: pass it to systems that
    /// must refuse a late effect, and let them refuse a lower one. A repetition has a higher one.
    pub fence: Fence,
    /// 1 on the first attempt at the first event.
    pub attempt: u32,
    /// When the slice should end. A handler that reaches this time should return what it has done
    /// ([`Outcomes::first`]); the remaining events are handed out again, in order.
    pub deadline: Instant,
    /// The events.
    pub events: Vec<Delivery>,
    /// The time of Redis when it granted the lease, µs since 1970. After its clock was set back, the fence
    /// and the sequences are ahead of it. A lease that came with a copy has its fence here.
    pub(crate) granted_us: u64,
    /// Its trace, if one of the events belongs to a trace that is recorded.
    pub(crate) trace: Option<Arc<SliceTrace>>,
}

impl Slice {
    /// A slice for a test of a handler.
    #[must_use]
    pub fn new(
        bot: BotId,
        fence: Fence,
        attempt: u32,
        deadline: Instant,
        events: Vec<Delivery>,
    ) -> Self {
        let granted_us = fence.get();
        Self { bot, fence, attempt, deadline, events, granted_us, trace: None }
    }
}

/// Minimum time before a handler that settled nothing is asked again: less would be a busy loop.
const REST_MIN: Duration = Duration::from_millis(20);

/// The outcome of a slice that did not fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcomes {
    /// Number of events from the start that are settled. The others stay in the queue.
    pub(crate) settled: Option<usize>,
    pub(crate) exceptions: Vec<(usize, Outcome)>,
    /// Minimum time before the others are handed out.
    pub(crate) rest: Option<Duration>,
    /// The ledger entries of the settled events, in order; `None`: the handler does not provide
    /// them.
    pub(crate) ledger: Option<Vec<LedgerEntry>>,
    /// The answer of a receiver, for operators.
    pub(crate) response: Option<Response>,
}

/// The outcome of a settled event that is not done.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The event becomes a dead letter, with this reason.
    Dead(String),
    /// The event is queued again after this time, at the end of its bot's queue.
    Later(Duration),
}

impl Outcomes {
    /// Every event is done.
    #[must_use]
    pub fn done() -> Self {
        Self { settled: None, exceptions: Vec::new(), rest: None, ledger: None, response: None }
    }

    /// The first `count` events are settled; the rest is handed out again, in order. A count above
    /// the length of the slice means all.
    #[must_use]
    pub fn first(count: usize) -> Self {
        Self { settled: Some(count), ..Self::done() }
    }

    /// Delays the unsettled events by `delay`, and by at least 20 ms if no event is settled. This
    /// counts no attempt. Without unsettled events it has no effect.
    #[must_use]
    pub fn rest_after(mut self, delay: Duration) -> Self {
        self.rest = Some(delay);
        self
    }

    /// Without progress, the pause has a minimum.
    fn with_pause(mut self) -> Self {
        if self.settled == Some(0) {
            self.rest = self.rest.map(|rest| rest.max(REST_MIN));
        }
        self
    }

    /// The ledger entries of all settled events, in the order of the slice. Events without an entry
    /// are left out. Without this call, the queue asks each leaving event for its entry.
    #[must_use]
    pub fn noting(mut self, entries: Vec<LedgerEntry>) -> Self {
        self.ledger = Some(entries);
        self
    }

    /// Sends the settled event at `index` to the dead letters.
    #[must_use]
    pub fn dead(mut self, index: usize, reason: impl Into<String>) -> Self {
        self.exceptions.push((index, Outcome::Dead(reason.into())));
        self
    }

    /// Queues the settled event at `index` again after `delay`, with a new sequence. This counts no
    /// attempt.
    ///
    /// A bot may hold only so many delayed events (`quotas.delayed_events`, `quotas.delayed_bytes`). One that
    /// exceeds them stays in the queue, as after [`Failure::transient`] at it: the events before it are
    /// settled, and it is tried again with backoff. After the last attempt it becomes a dead letter. The
    /// events after it in the slice are handed out again, also those that the handler has finished.
    #[must_use]
    pub fn later(mut self, index: usize, delay: Duration) -> Self {
        self.exceptions.push((index, Outcome::Later(delay)));
        self
    }

    /// Number of events from the start that are settled; `None`: all.
    #[must_use]
    pub fn settled(&self) -> Option<usize> {
        self.settled
    }

    /// The settled events that are not done: their indexes, and what becomes of them.
    #[must_use]
    pub fn exceptions(&self) -> &[(usize, Outcome)] {
        &self.exceptions
    }
}

/// Whether a retry can help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FailureKind {
    /// Retried in order with backoff; counts as an attempt.
    Transient,
    /// The event becomes a dead letter immediately.
    Permanent,
    /// A store or target is unavailable. The bot is parked and no attempt is counted, so that a
    /// long outage creates no dead letters. The pause grows for as long as every slice of the
    /// pipeline in this process ends so, over all bots. If only the target of one bot is
    /// unavailable, use [`Failure::transient`], or [`Failure::retry_after`] with a growing pause.
    Unavailable,
}

/// Why a slice could not be finished. It names an event; the events before it are settled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub(crate) kind: FailureKind,
    /// `None`: it is unknown which event failed.
    pub(crate) at: Option<usize>,
    pub(crate) reason: String,
    pub(crate) retry_after: Option<Duration>,
    /// Whether the handler, or its receiver, took too long.
    pub(crate) timed_out: bool,
    /// The answer of a receiver, for operators.
    pub(crate) response: Option<Response>,
    /// The events before it that are not done, and what becomes of them.
    pub(crate) before: Vec<(usize, Outcome)>,
}

impl Failure {
    /// The event at `at` failed; a retry may help.
    #[must_use]
    pub fn transient(at: usize, reason: impl Into<String>) -> Self {
        Self::new(FailureKind::Transient, Some(at), reason.into())
    }

    /// The event at `at` can never be handled.
    #[must_use]
    pub fn permanent(at: usize, reason: impl Into<String>) -> Self {
        Self::new(FailureKind::Permanent, Some(at), reason.into())
    }

    /// A store or target that the event at `at` needs is unavailable.
    #[must_use]
    pub fn unavailable(at: usize, reason: impl Into<String>) -> Self {
        Self::new(FailureKind::Unavailable, Some(at), reason.into())
    }

    /// Sets the minimum time before a retry. For [`Failure::unavailable`], it is the time: it says that the
    /// target can be reached, so the pause does not grow with an outage.
    #[must_use]
    pub fn retry_after(mut self, delay: Duration) -> Self {
        self.retry_after = Some(delay);
        self
    }

    /// Whether a retry can help.
    #[must_use]
    pub fn kind(&self) -> FailureKind {
        self.kind
    }

    /// The index of the event that failed. `None`: it is unknown which one.
    #[must_use]
    pub fn at(&self) -> Option<usize> {
        self.at
    }

    /// Why it failed.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.reason
    }

    pub(crate) fn is_unavailable(&self) -> bool {
        self.kind == FailureKind::Unavailable
    }

    /// Whether the target was not reached, or did not say when it can be asked again.
    pub(crate) fn is_outage(&self) -> bool {
        self.is_unavailable() && self.retry_after.is_none()
    }

    pub(crate) fn unknown(reason: String) -> Self {
        Self::new(FailureKind::Transient, None, reason)
    }

    /// The handler, or its receiver, took too long.
    pub(crate) fn timed_out(reason: String) -> Self {
        Self { timed_out: true, ..Self::unknown(reason) }
    }

    fn new(kind: FailureKind, at: Option<usize>, reason: String) -> Self {
        let (timed_out, before) = (false, Vec::new());
        Self { kind, at, reason, retry_after: None, timed_out, response: None, before }
    }
}

/// The store timeout for a handler with this timeout. It is shorter, so that a hanging store is
/// reported as unavailable instead of the handler being cancelled.
pub(crate) fn store_patience(handler_timeout: Duration) -> Duration {
    handler_timeout.mul_f64(0.8)
}

/// Maximum time that a handler waits for an earlier write of its bot that is still running in the
/// store. A longer wait would keep its worker from other bots.
pub(crate) const TURN_PATIENCE: Duration = Duration::from_millis(250);

/// A handler of a pipeline's events.
///
/// One instance serves every worker. Two slices of one bot are handled concurrently in two cases
/// only. With `order_by` and a `concurrency` above 1, [`handle`](Self::handle) runs for several lanes
/// of a bot, with the same fence. And a worker that was frozen, or does not know yet that its lease
/// has ended, may still be running: it cannot commit, and it has a lower [`Slice::fence`]. An event
/// may come again, so store its id together with an effect that must not happen twice.
pub trait Handler: Send + Sync + 'static {
    /// Handles a slice in order.
    ///
    /// The future is dropped when the lease is lost, when `handler_timeout` passes, at the end of
    /// `shutdown_grace`, at a second stop signal, and when Redis does not confirm the slices of this
    /// process under `total_concurrency` in time. A panic counts as one failed attempt.
    ///
    /// The lease is renewed only while the future is pending. A future that blocks its thread before
    /// the first renewal, after 0.6 s, loses the lease 1.6 s after the claim; later, it loses the
    /// lease at the end of `lease_ttl`. Run such work in `tokio::task::spawn_blocking`.
    /// `block_in_place` would stop the renewals too.
    ///
    /// # Errors
    /// A [`Failure`] names the event that could not be handled; the events before it are done.
    fn handle(
        &self,
        environment: &Environment,
        slice: &Slice,
    ) -> impl Future<Output = Result<Outcomes, Failure>> + Send;

    /// Whether most of the time of a slice is a wait for calls that slices of several bots share.
    /// Dividing this time by the number of events would say nothing about an event. So slices double
    /// while they take less than half of `slice_time`, and halve when they take longer than it. A panic is
    /// logged, and counts as `false`.
    fn shares_calls(&self) -> bool {
        false
    }

    /// Called after the completion of a slice is confirmed: its first `settled` events have left the
    /// queue, which may be none. Such an event may come again after [`Outcomes::later`], after a redrive,
    /// or if Redis loses its last writes. Not called if the answer to the completion stays unknown. Must
    /// return quickly. A panic is logged, and changes nothing: the completion is done.
    fn committed(&self, slice: &Slice, settled: usize) {
        let _ = (slice, settled);
    }
}

/// The result of a handling that did not fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The outcome of the events.
    Settled(Outcomes),
    /// A receiver accepted the events, and will complete the lease by its capability.
    Accepted,
}

/// The future of [`AnyHandler::handle_boxed`].
pub(crate) type Handling<'a> = Pin<Box<dyn Future<Output = Result<Answer, Failure>> + Send + 'a>>;

/// [`Handler`] as a trait object.
pub(crate) trait AnyHandler: Send + Sync + 'static {
    /// `capability` is the token of the lease for a receiver; empty unless the handler [is
    /// remote](Self::is_remote).
    fn handle_boxed<'a>(
        &'a self,
        environment: &'a Environment,
        slice: &'a Slice,
        capability: &'a str,
    ) -> Handling<'a>;

    /// Whether a receiver handles the events. Then the slice must be a part of the queue without
    /// gaps, because the receiver counts the events that it acknowledges.
    fn is_remote(&self) -> bool {
        false
    }

    /// As [`Handler::shares_calls`]. A call to a receiver is a wait too.
    fn mostly_waits(&self) -> bool {
        self.is_remote()
    }

    fn committed(&self, slice: &Slice, settled: usize);
}

impl<H: Handler> AnyHandler for H {
    fn handle_boxed<'a>(
        &'a self,
        environment: &'a Environment,
        slice: &'a Slice,
        _: &'a str,
    ) -> Handling<'a> {
        Box::pin(async move {
            let outcomes = caught(self.handle(environment, slice)).await?;
            Ok(Answer::Settled(outcomes.with_pause()))
        })
    }

    fn mostly_waits(&self) -> bool {
        self.shares_calls()
    }

    fn committed(&self, slice: &Slice, settled: usize) {
        Handler::committed(self, slice, settled);
    }
}

/// Converts a panic into a failure.
pub(crate) async fn caught(
    handling: impl Future<Output = Result<Outcomes, Failure>>,
) -> Result<Outcomes, Failure> {
    // Handlers are shared and take `&self`: their state after a panic is their own responsibility,
    // as after an error.
    AssertUnwindSafe(handling).catch_unwind().await.unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".to_owned());
        Err(Failure::unknown(format!("the handler panicked: {text}")))
    })
}

#[test]
fn a_handler_that_settles_nothing_is_not_asked_again_immediately() {
    let rest = |settled, ms| {
        let outcomes = Outcomes::first(settled).rest_after(Duration::from_millis(ms));
        outcomes.with_pause().rest.map(|rest| rest.as_millis())
    };
    assert_eq!([rest(0, 0), rest(0, 500), rest(1, 0)], [Some(20), Some(500), Some(0)]);
    assert_eq!(Outcomes::first(0).with_pause().rest, None, "the pool chooses a pause");
}
