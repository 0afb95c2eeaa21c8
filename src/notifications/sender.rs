//! All sends of a process.
//!
//! A slice of events only starts sends. They run outside the lease, so a slow target does not block
//! a bot. If a send never ends, because its process was killed, any process starts it again after
//! [`HOLD`]. Until then no other process sends it, and afterwards the result of the old send is
//! ignored. A process that was suspended starts no call that could last longer: it postpones the send.
//!
//! A living process reports the result of a send even if Redis is full or unavailable for long. It
//! retries about every second, and the hold does not end before Redis was reachable for `patience`.
//! So a notification that the receiver accepted is not sent again, unless the process dies before
//! it can report the result.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng as _;
use tokio::time::Instant;
use tracing::warn;

use super::send::Calls;
use crate::clock::SharedClock;
use crate::event::Event;
use crate::handler::{Failure, Slice};
use crate::id::Sequence;
use crate::lifecycle::Shutdown;
use crate::notifications::metrics::NotificationMetrics;
use crate::notifications::record::{Begun, Ended, Ending, NotificationId};
use crate::notifications::scripts::{SendHold, Throttle};
use crate::outbound::Outbound;
use crate::outbound::breakers::Breakers;
use crate::outbound::headers::HeaderSets;
use crate::outbound::places::Places;
use crate::outbound::sign::Secret;
use crate::queue::Queue;
use crate::redis::RedisError;
use crate::telemetry::OncePerMinute;
use crate::trace::Tracer;

/// How long a started send belongs to its process. The patience is longer than a process needs to
/// reconnect to Redis after an outage.
const HOLD: SendHold = SendHold { send: Duration::from_secs(20), patience: Duration::from_secs(5) };
/// No other process starts the send again before this time has passed since it was asked for.
const OWN: Duration = HOLD.send.saturating_add(HOLD.patience);
/// Maximum number of concurrent sends of a process.
const SENDS_MAX: usize = 1_000;
/// Maximum number of concurrent sends of a bot in a process to one host.
pub(crate) const PER_HOST: usize = 16;
/// Maximum number of events that one call decides about.
const JUDGED_MAX: usize = 100;
/// First and longest pause between two attempts to report a result to Redis. Each pause is
/// prolonged at random, to at most twice its length.
const TELL_AGAIN: Duration = Duration::from_millis(100);
const TELL_AGAIN_MAX: Duration = Duration::from_millis(800);

/// When an unreported result was last logged.
static UNTOLD: OncePerMinute = OncePerMinute::new();
/// When a notification without a record was last logged.
static GONE: OncePerMinute = OncePerMinute::new();

/// The resources of sends.
#[derive(Debug, Clone)]
pub(crate) struct Sending {
    pub(crate) outbound: Outbound,
    /// The signing secrets; each signs every send.
    pub(crate) secrets: Vec<Secret>,
    /// The header sets that notifications may use.
    pub(crate) sets: HeaderSets,
    /// The limits per user.
    pub(crate) throttle: Throttle,
    /// The limits and breakers per host and bot.
    pub(crate) gates: Arc<Breakers>,
}

/// Sends due notifications. Clones share everything.
#[derive(Clone)]
pub(crate) struct Sender(Arc<Inner>);

struct Inner {
    queue: Queue,
    calls: Calls,
    throttle: Throttle,
    clock: SharedClock,
    /// The limit over all hosts, shared by the bots. A notification beyond it is postponed until its
    /// bot is expected to have a place.
    places: Arc<Places>,
    shutdown: Shutdown,
    metrics: NotificationMetrics,
}

impl std::fmt::Debug for Sender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sender").field("calls", &self.0.calls).finish_non_exhaustive()
    }
}

impl Sender {
    pub(crate) fn new(
        queue: Queue,
        sending: Sending,
        clock: SharedClock,
        shutdown: Shutdown,
        tracer: Tracer,
    ) -> Self {
        let Sending { outbound, secrets, sets, throttle, gates } = sending;
        let calls = Calls { outbound, gates, secrets, sets, tracer };
        let (places, metrics) = (Places::new(SENDS_MAX), NotificationMetrics::new());
        Self(Arc::new(Inner { queue, calls, throttle, clock, places, shutdown, metrics }))
    }

    /// Decides about the notifications of a slice, and starts those that may be sent.
    pub(crate) async fn start(&self, slice: &Slice) -> Result<(), Failure> {
        let mut begun = 0;
        let parsed = slice.events.iter().map(|delivery| {
            let event = &delivery.event;
            Ok((named(event)?, event.subject().unwrap_or_default(), delivery.sequence))
        });
        let parsed: Vec<Result<(NotificationId, &str, Sequence), String>> = parsed.collect();
        for part in parsed.chunks(JUDGED_MAX) {
            let good: Vec<_> =
                part.iter().map_while(|event| event.as_ref().ok().copied()).collect();
            self.begin(slice, &good).await.map_err(|error| {
                Failure::unavailable(begun, format!("cannot read the notifications: {error}"))
            })?;
            begun += good.len();
            if let Some(Err(reason)) = part.get(good.len()) {
                return Err(Failure::permanent(begun, reason));
            }
        }
        Ok(())
    }

    async fn begin(
        &self,
        slice: &Slice,
        events: &[(NotificationId, &str, Sequence)],
    ) -> Result<(), RedisError> {
        if events.is_empty() {
            return Ok(());
        }
        let Inner { queue, throttle, clock, .. } = &*self.0;
        let asked = Instant::now();
        let judged = queue.begin_sends(&slice.bot, events, throttle, HOLD, clock.now()).await?;
        for ended in judged.ended {
            NotificationMetrics::count(&ended.label, &ended.outcome);
        }
        if judged.gone > 0 {
            NotificationMetrics::count_gone(judged.gone);
            if let Some(suppressed) = GONE.take() {
                warn!(
                    bot = slice.bot.as_str(),
                    count = judged.gone,
                    suppressed,
                    "due notifications have no record, so they are not sent: they were cancelled or replaced, and their results have ended, or Redis lost their records"
                );
            }
        }
        for begun in judged.begun {
            let sender = self.clone();
            self.0.shutdown.spawn(async move { sender.run(begun, asked).await });
        }
        Ok(())
    }

    /// Sends one notification and reports the result to Redis. After a hard stop it becomes due
    /// again.
    async fn run(&self, begun: Begun, asked: Instant) {
        let inner = &*self.0;
        let ended = async {
            let now = inner.clock.now();
            let ending = match inner.places.take(&begun.bot, Instant::now()) {
                Ok(place) => {
                    let ending = inner.calls.send(&begun, now, asked + OWN).await;
                    if matches!(ending, Ending::Postpone(..)) {
                        place.unused();
                    }
                    ending
                }
                Err(after) => {
                    let max = inner.places.max();
                    let reason = format!(
                        "the process has {max} sends in flight, the maximum, or this bot its part of it"
                    );
                    Ending::Postpone(after, reason)
                }
            };
            // A postponed notification is not sent yet.
            let is_first = begun.counts_late && !matches!(ending, Ending::Postpone(..));
            let late = is_first.then(|| now.saturating_sub(Duration::from_millis(begun.ready_ms)));
            if let Some(late) = late {
                inner.metrics.lateness.record(late.as_secs_f64());
            }
            self.tell(Ended { begun, ending, late }).await;
        };
        tokio::select! {
            biased;
            () = inner.shutdown.hard.cancelled() => {}
            () = ended => {}
        }
    }

    /// Reports a result. Retries until Redis has stored it, or replies that the send was considered
    /// lost. A full or unavailable Redis accepts it eventually. If Redis refuses for good, the
    /// report is dropped once another process may have started the send again.
    async fn tell(&self, ended: Ended) {
        let inner = &*self.0;
        let Some(shard) = ended.begun.id.shard(inner.queue.shard_count()) else { return };
        let label = ended.begun.label.clone();
        let endings = [ended];
        let (until, mut pause) = (Instant::now() + OWN, TELL_AGAIN);
        loop {
            let now = inner.clock.now();
            match inner.queue.finish_sends(shard, &endings, &inner.throttle, now).await {
                Ok(finished) => {
                    let outcome = finished.outcomes.into_iter().flatten().next();
                    match outcome.as_deref() {
                        None | Some("postpone") => {}
                        Some("retry") => NotificationMetrics::count(&label, "retried"),
                        Some(ended) => NotificationMetrics::count(&label, ended),
                    }
                    return;
                }
                Err(error) if !error.is_passing() && Instant::now() > until => {
                    if let Some(suppressed) = UNTOLD.take() {
                        warn!(notification = %endings[0].begun.id, %error, suppressed,
                            "cannot store the result of a notification; it becomes due again");
                    }
                    return;
                }
                Err(_) => {
                    // Random pauses: many sends end while Redis is unavailable, and should not
                    // report in one burst.
                    let spread = rand::rng().random_range(1.0..=2.0);
                    tokio::time::sleep(pause.mul_f64(spread)).await;
                    pause = (pause * 2).min(TELL_AGAIN_MAX);
                }
            }
        }
    }
}

/// The id of the notification that an event names.
fn named(event: &Event) -> Result<NotificationId, String> {
    event.id().parse().map_err(|_| {
        format!(
            "the event {:?} is not a notification; use /send_delayed to schedule one",
            event.id()
        )
    })
}
