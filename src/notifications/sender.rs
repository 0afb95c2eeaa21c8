//! All sends of a process.
//!
//! A slice of events only starts sends; they run outside the lease, so a slow destination holds
//! nobody. One that is never ended, because its process was killed, is begun anew by any process after
//! [`HOLD`]; until then nobody else sends it, and later nobody believes the old one.
//!
//! A process that lives tells how a send ended, however long Redis is full or unavailable: it tries
//! again every second, and the hold does not end before Redis was reachable for `patience`. So what
//! was answered with success is not sent again, unless the process dies before it could tell.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng as _;
use tokio::time::Instant;
use tracing::warn;

use super::gate::{Gates, Told};
use super::send::{Calls, LONGEST};
use crate::clock::SharedClock;
use crate::event::Event;
use crate::handler::{Failure, Slice};
use crate::id::Sequence;
use crate::keyspace::StoreError;
use crate::lifecycle::Shutdown;
use crate::metrics::NotificationMetrics;
use crate::notifications::record::{Begun, Ended, Ending, NotificationId};
use crate::notifications::scripts::{SendHold, Throttle};
use crate::outbound::Outbound;
use crate::outbound::headers::HeaderSets;
use crate::outbound::sign::Secret;
use crate::queue::Queue;
use crate::telemetry::OncePerMinute;

/// A send that is not ended by then is looked after, and begun anew a little later. The patience is
/// longer than a process needs to reach a Redis that is back.
const HOLD: SendHold = SendHold { send: Duration::from_secs(20), patience: Duration::from_secs(5) };
/// A send that begins so late would not be over before another process begins it.
const TOO_LATE: Duration = HOLD.send.saturating_add(HOLD.patience).saturating_sub(LONGEST);
/// Sends of a process at once.
const SENDS_MAX: usize = 1_000;
/// Sends of a process that one host gets at once.
pub(crate) const PER_HOST: usize = 16;
/// Events that are judged by one call.
const JUDGED_MAX: usize = 100;
/// All hosts, as the gate of a process calls them.
const EVERYWHERE: &str = "";
/// Between two tries to tell Redis how a send ended: first, and at most, with as much again at random.
const TELL_AGAIN: Duration = Duration::from_millis(100);
const TELL_AGAIN_MAX: Duration = Duration::from_millis(800);

/// When an end that Redis never heard of was last logged.
static UNTOLD: OncePerMinute = OncePerMinute::new();

/// What sends are made with.
#[derive(Debug, Clone)]
pub(crate) struct Sending {
    pub(crate) outbound: Outbound,
    /// Each one signs.
    pub(crate) secrets: Vec<Secret>,
    /// What notifications may have sent with them.
    pub(crate) sets: HeaderSets,
    /// How often a user gets a notification.
    pub(crate) throttle: Throttle,
    /// Whether a host gets another request.
    pub(crate) gates: Arc<Gates>,
}

/// Sends what is due. Clones share everything.
#[derive(Clone)]
pub(crate) struct Sender(Arc<Inner>);

struct Inner {
    queue: Queue,
    calls: Calls,
    throttle: Throttle,
    clock: SharedClock,
    /// For all hosts together: who finds no place comes again when there will be one.
    places: Arc<Gates>,
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
    ) -> Self {
        let Sending { outbound, secrets, sets, throttle, gates } = sending;
        let calls = Calls { outbound, gates, secrets, sets };
        let (places, metrics) = (Gates::new(SENDS_MAX, 0), NotificationMetrics::new());
        Self(Arc::new(Inner { queue, calls, throttle, clock, places, shutdown, metrics }))
    }

    /// Judges the notifications of a slice and starts to send those that may be sent.
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
                Failure::unavailable(begun, format!("notifications cannot be judged: {error}"))
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
    ) -> Result<(), StoreError> {
        if events.is_empty() {
            return Ok(());
        }
        let Inner { queue, throttle, clock, .. } = &*self.0;
        let asked = Instant::now();
        let judged = queue.begin_sends(&slice.bot, events, throttle, HOLD, clock.now()).await?;
        for (outcome, label) in judged.ended {
            NotificationMetrics::count(&label, &outcome);
        }
        for begun in judged.begun {
            let sender = self.clone();
            self.0.shutdown.spawn(async move { sender.run(begun, asked).await });
        }
        Ok(())
    }

    /// Sends one and tells Redis how it ended. Cut off by the hard stop it comes due again.
    async fn run(&self, begun: Begun, asked: Instant) {
        let inner = &*self.0;
        // The process was frozen: there is no time left before another one sends it.
        if asked.elapsed() > TOO_LATE {
            return;
        }
        let ended = async {
            let now = inner.clock.now();
            let ending = match inner.places.ask(EVERYWHERE, 0, Instant::now()) {
                Told::Go(place) => {
                    let ending = inner.calls.send(&begun, now).await;
                    // What was put off says nothing about how long a place is taken.
                    if !matches!(ending, Ending::Postpone(..)) {
                        place.say(true, Instant::now());
                    }
                    ending
                }
                Told::Open(after) | Told::Full(after) => {
                    let reason = format!("the process has {SENDS_MAX} sends under way");
                    Ending::Postpone(after, reason)
                }
            };
            // What is put off is not sent yet.
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

    /// Repeats until Redis has it, or has taken the send for lost. A Redis that is full or unavailable
    /// will take it some time; one that refuses it for good is given up when another process may have
    /// begun the send.
    async fn tell(&self, ended: Ended) {
        let inner = &*self.0;
        let Some(shard) = ended.begun.id.shard(inner.queue.shard_count()) else { return };
        let label = ended.begun.label.clone();
        let endings = [ended];
        let (until, mut pause) = (Instant::now() + HOLD.send + HOLD.patience, TELL_AGAIN);
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
                            "Redis does not accept how a notification was sent; it comes due again");
                    }
                    return;
                }
                Err(_) => {
                    // Many sends end while Redis is unavailable: they do not all tell it at once.
                    let spread = rand::rng().random_range(1.0..=2.0);
                    tokio::time::sleep(pause.mul_f64(spread)).await;
                    pause = (pause * 2).min(TELL_AGAIN_MAX);
                }
            }
        }
    }
}

/// The notification that an event stands for.
fn named(event: &Event) -> Result<NotificationId, String> {
    event.id().parse().map_err(|_| {
        format!("the event {:?} is no notification; send it by /send_delayed", event.id())
    })
}
