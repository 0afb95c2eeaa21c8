//! What is done with a slice. A handler decides *whether* an event is done; the retry policy
//! (`pool::retry`) decides *when* it is tried again, and the worker commits the outcomes.

mod log;
pub(crate) mod portion;
mod push;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::Instant;

pub use self::log::LogHandler;
pub(crate) use self::push::{PushHandler, acknowledgement};
use crate::clock::SharedClock;
use crate::event::Event;
use crate::id::{BotId, Fence, PipelineName, Sequence};
use crate::ledger::LedgerEntry;

/// What a handler may use. Each instance of the service has its own.
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
    /// Grows within the bot; tells a repetition from news.
    pub sequence: Sequence,
    /// The event.
    pub event: Event,
}

/// The events taken from one bot's queue under one lease, in order, at least one.
#[derive(Debug, Clone)]
pub struct Slice {
    /// The tenant.
    pub bot: BotId,
    /// The lease. It only grows per bot: pass it on where a late effect must be refused.
    pub fence: Fence,
    /// 1 for the first time that the first event is tried.
    pub attempt: u32,
    /// When the slice should end. A handler that sees it pass returns what it has
    /// ([`Outcomes::first`]); the rest is handed out again, in order.
    pub deadline: Instant,
    /// The events.
    pub events: Vec<Delivery>,
}

/// What became of a slice whose handling ended well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcomes {
    /// How many events from the start are settled; the rest stays in the queue.
    pub(crate) settled: Option<usize>,
    pub(crate) exceptions: Vec<(usize, Outcome)>,
    /// The rest is not handed out before this long.
    pub(crate) rest: Option<Duration>,
    /// What the ledger has of the settled events, in order; `None`: the handler does not say.
    pub(crate) ledger: Option<Vec<LedgerEntry>>,
}

/// What becomes of one settled event that is not done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It gives up: to the dead letters, with the reason.
    Dead(String),
    /// It comes again after this long, at the end of the queue of its bot.
    Later(Duration),
}

impl Outcomes {
    /// Every event is done.
    #[must_use]
    pub fn done() -> Self {
        Self { settled: None, exceptions: Vec::new(), rest: None, ledger: None }
    }

    /// The first `count` events are settled, the rest is to be handed out again, in order. More
    /// than the slice has means all.
    #[must_use]
    pub fn first(count: usize) -> Self {
        Self { settled: Some(count), exceptions: Vec::new(), rest: None, ledger: None }
    }

    /// The events that are not settled are handed out again after `delay` only. Nothing is counted
    /// against them. Without any, it means nothing.
    #[must_use]
    pub fn rest_after(mut self, delay: Duration) -> Self {
        self.rest = Some(delay);
        self
    }

    /// What the ledger of the queue has of the settled events, in the order of the slice: all of it,
    /// events that post nothing aside. Without it, each event that leaves is asked for its entry.
    #[must_use]
    pub fn noting(mut self, entries: Vec<LedgerEntry>) -> Self {
        self.ledger = Some(entries);
        self
    }

    /// The settled event at `index` goes to the dead letters instead of being done.
    #[must_use]
    pub fn dead(mut self, index: usize, reason: impl Into<String>) -> Self {
        self.exceptions.push((index, Outcome::Dead(reason.into())));
        self
    }

    /// The settled event at `index` comes again after `delay`.
    #[must_use]
    pub fn later(mut self, index: usize, delay: Duration) -> Self {
        self.exceptions.push((index, Outcome::Later(delay)));
        self
    }
}

/// Whether trying again can help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// Retried in order with backoff; counts as an attempt.
    Transient,
    /// The event goes to the dead letters at once.
    Permanent,
    /// A store or target cannot be reached: the bot is parked and no attempt is counted, so that
    /// an outage of a night makes no dead letters.
    Unavailable,
}

/// Why a slice could not be finished. It names an event; those before it are done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub(crate) kind: FailureKind,
    /// `None`: unknown which event it was.
    pub(crate) at: Option<usize>,
    pub(crate) reason: String,
    pub(crate) retry_after: Option<Duration>,
}

impl Failure {
    /// The event at `at` failed; trying it again may help.
    #[must_use]
    pub fn transient(at: usize, reason: impl Into<String>) -> Self {
        Self::new(FailureKind::Transient, Some(at), reason.into())
    }

    /// The event at `at` can never be handled.
    #[must_use]
    pub fn permanent(at: usize, reason: impl Into<String>) -> Self {
        Self::new(FailureKind::Permanent, Some(at), reason.into())
    }

    /// What the event at `at` needs cannot be reached now.
    #[must_use]
    pub fn unavailable(at: usize, reason: impl Into<String>) -> Self {
        Self::new(FailureKind::Unavailable, Some(at), reason.into())
    }

    /// Do not try again before this long.
    #[must_use]
    pub fn retry_after(mut self, delay: Duration) -> Self {
        self.retry_after = Some(delay);
        self
    }

    pub(crate) fn is_unavailable(&self) -> bool {
        self.kind == FailureKind::Unavailable
    }

    pub(crate) fn unknown(reason: String) -> Self {
        Self::new(FailureKind::Transient, None, reason)
    }

    fn new(kind: FailureKind, at: Option<usize>, reason: String) -> Self {
        Self { kind, at, reason, retry_after: None }
    }
}

/// How long a handler with this timeout waits for the store that it writes to: less than that, so
/// that a store that hangs is found unavailable and the handler is not cancelled.
pub(crate) fn store_patience(handler_timeout: Duration) -> Duration {
    handler_timeout.mul_f64(0.8)
}

/// A handler waits so long for an earlier write of its bot that is still under way in the store:
/// longer, and it would keep its worker from other bots.
pub(crate) const TURN_PATIENCE: Duration = Duration::from_millis(250);

/// What is done with the events of a pipeline.
///
/// One instance serves every worker. Two slices of one bot are never handled at once, except by a
/// consumer that was frozen past its lease: such a one can commit nothing, and effects that must
/// not happen twice check [`Slice::fence`] or [`Delivery::sequence`].
pub trait Handler: Send + Sync + 'static {
    /// Handles a slice in order.
    ///
    /// The future is dropped when the lease is lost, when `handler_timeout` passes and when a
    /// second stop signal comes. A panic is one failed attempt. The lease is extended while the
    /// future rests: one that blocks its thread for longer than `lease_ttl` loses it.
    ///
    /// # Errors
    /// A [`Failure`] names the event that could not be handled; those before it are done.
    fn handle(
        &self,
        environment: &Environment,
        slice: &Slice,
    ) -> impl Future<Output = Result<Outcomes, Failure>> + Send;

    /// Called after the completion of a slice was confirmed: `settled` of its events will never
    /// be handed out again. Must return quickly.
    fn committed(&self, slice: &Slice, settled: usize) {
        let _ = (slice, settled);
    }
}

/// How a handling ended that did not fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// What became of the events.
    Settled(Outcomes),
    /// Somebody outside took them over, and will complete the lease by its capability.
    Accepted,
}

/// What [`AnyHandler::handle_boxed`] answers.
pub(crate) type Handling<'a> = Pin<Box<dyn Future<Output = Result<Answer, Failure>> + Send + 'a>>;

/// [`Handler`] behind a pointer.
pub(crate) trait AnyHandler: Send + Sync + 'static {
    /// `capability` names the lease to a receiver outside; empty unless the handler
    /// [is remote](Self::is_remote).
    fn handle_boxed<'a>(
        &'a self,
        environment: &'a Environment,
        slice: &'a Slice,
        capability: &'a str,
    ) -> Handling<'a>;

    /// Whether a receiver outside handles the events. Then the slice is a piece of the queue
    /// without gaps, because the receiver counts what it acknowledges.
    fn is_remote(&self) -> bool {
        false
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
        Box::pin(async move { caught(self.handle(environment, slice)).await.map(Answer::Settled) })
    }

    fn committed(&self, slice: &Slice, settled: usize) {
        Handler::committed(self, slice, settled);
    }
}

/// Makes a panic a failure.
pub(crate) async fn caught(
    handling: impl Future<Output = Result<Outcomes, Failure>>,
) -> Result<Outcomes, Failure> {
    // Handlers are shared and behind `&self`: what a panic leaves behind is the handler's own
    // affair, as it would be after an error.
    AssertUnwindSafe(handling).catch_unwind().await.unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".to_owned());
        Err(Failure::unknown(format!("the handler panicked: {text}")))
    })
}
