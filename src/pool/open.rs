//! Completing leases over HTTP: the implementation of `/v1/leases`.
//!
//! A receiver that answered 202 names the lease by its capability, and may call any process. Its
//! report is treated like an immediate answer: the same retries, backoff and dead letters, by the
//! settings of the process that is called. A capability can only name a lease that was handed to a
//! receiver, so no further check is necessary.
//!
//! The receiver may call before the lease is handed over, while the worker still reads the 202. It
//! can complete, fail and extend the lease then too. But events that such an extension acknowledges
//! are committed only after the handover, because the worker still counts from the start of the
//! slice.
//!
//! In a process, the calls for a bot run one after the other. A receiver may make any number of them, and
//! each may read the events of the slice, up to 4 MiB. So only the first call that ends a lease reads
//! them, and the others see that the lease has ended. All calls together read few large slices at a time.

mod line;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use redis::{Pipeline, Value};

use self::line::{BotLines, Line, Place};
use super::Settings;
use super::note::{Of, Tried};
use super::settle::{Fitness, Policy, Settlement, given_up, settle};
use crate::clock::SharedClock;
use crate::event::Event;
use crate::handler::{Failure, Outcomes, acknowledgement};
use crate::history::Recorder;
use crate::id::{Fence, PipelineName, Sequence};
use crate::metrics::PipelineMetrics;
use crate::presence::Meter;
use crate::queue::Queue;
use crate::queue::capability::Capability;
use crate::redis::scripts::{Attempts, Complete, Completion, Mode, Verdict};
use crate::redis::{Link, RedisError, Reply, ReplyError};
use crate::signed_token::SigningKey;

/// Number of attempts when another call changes the same lease concurrently.
const TRIES: usize = 5;
/// The slices of a queue of more bytes are large. A small one is read over the connection of short calls,
/// which wait behind it.
const SMALL_BYTES: u64 = 256 << 10;
/// The scripts count the bytes of a queue that has an event of 64 KiB. So many smaller ones are read in one
/// call.
const UNCOUNTED_EVENTS: usize = 8;
/// Maximum number of large slices that are read at a time from a server: half of the pooled connections.
const LARGE_RUNNING: usize = 4;
/// Maximum number of calls that wait for that. With those that read, they have half of the places of their
/// class (`admission::CRITICAL_MAX`).
const LARGE_WAITING: usize = 124;
/// Number of lines for large slices: a slow server of a cluster delays no calls for others.
const LARGE_LINES: usize = 8;

/// Why a lease cannot be completed, failed or extended. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LeaseError {
    /// Not a capability of this deployment, or its pipeline does not exist here.
    #[error("there is no such lease")]
    NoSuch,
    /// The lease was completed, revoked or has expired.
    #[error(
        "the lease has ended: it was completed, expired or was revoked; its remaining events are handed out again"
    )]
    Gone,
    /// The acknowledged number exceeds the slice.
    #[error("ack is {ack}, but the slice has {n} events")]
    Ack {
        /// The acknowledged number.
        ack: u64,
        /// Number of events in the slice.
        n: usize,
    },
    /// As many calls wait as may.
    #[error(
        "nothing was changed: as many calls for leases of this bot, or for large slices, wait here as may; retry later, those for one bot one after the other"
    )]
    Busy,
    /// Redis failed.
    #[error(transparent)]
    Store(#[from] RedisError),
}

/// An extended lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extended {
    /// The duration of the lease from now.
    pub(crate) ttl: Duration,
    /// Number of committed events of the slice.
    pub(crate) acked: usize,
}

/// A pipeline whose leases can be completed here.
#[derive(Debug)]
pub(crate) struct OpenPipeline {
    queue: Queue,
    settings: Settings,
    metrics: PipelineMetrics,
    meter: Arc<Meter>,
    /// Keeps attempts for operators.
    recorder: Option<Recorder>,
    calls: BotLines,
}

impl OpenPipeline {
    pub(crate) fn new(
        queue: Queue,
        settings: Settings,
        meter: Arc<Meter>,
        recorder: Option<Recorder>,
    ) -> Self {
        let metrics = PipelineMetrics::new(queue.name());
        Self { queue, settings, metrics, meter, recorder, calls: BotLines::default() }
    }
}

/// The leases that receivers hold.
pub(crate) struct OpenLeases {
    key: SigningKey,
    clock: SharedClock,
    /// Reads large slices: a pooled link, and the line before it.
    large: (Arc<Link>, [Line; LARGE_LINES]),
    pipelines: HashMap<PipelineName, OpenPipeline>,
}

impl std::fmt::Debug for OpenLeases {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenLeases").field("pipelines", &self.pipelines).finish_non_exhaustive()
    }
}

/// The state of a lease in Redis.
struct Current {
    acked: usize,
    handed: bool,
    attempts: Attempts,
    /// Bytes of the queue; `None`: not counted, because it has few and small events.
    queued_bytes: Option<u64>,
}

/// A lease with its pipeline.
struct Open<'a> {
    pipeline: &'a OpenPipeline,
    capability: Capability,
}

impl OpenLeases {
    /// `large` is a pooled link, for large slices. Other calls use the links of the queues.
    pub(crate) fn new(
        key: &SigningKey,
        clock: &SharedClock,
        large: Arc<Link>,
        pipelines: impl IntoIterator<Item = OpenPipeline>,
    ) -> Self {
        let named = pipelines.into_iter().map(|open| (open.queue.name().clone(), open));
        let (key, clock) = (key.clone(), Arc::clone(clock));
        let lines = std::array::from_fn(|_| Line::new(LARGE_RUNNING, LARGE_WAITING));
        let large = (large, lines);
        Self { key, clock, large, pipelines: named.collect() }
    }

    /// Completes a lease: the first `ack` events of the slice are done, or all. The others are
    /// retried in order, as after a 200 with `ack`.
    ///
    /// # Errors
    /// See [`LeaseError`].
    pub(crate) async fn complete(&self, lease: &str, ack: Option<u64>) -> Result<(), LeaseError> {
        let open = self.find(lease)?;
        let ack = open.ack(ack)?;
        let n = open.capability.n;
        self.end(&open, |acked| match ack {
            Some(ack) if ack < n => {
                // Events acknowledged by an extension stay committed.
                let ack = ack.max(acked);
                Err(Failure::transient(ack - acked, acknowledgement(ack, n)))
            }
            _ => Ok(Outcomes::done()),
        })
        .await
    }

    /// Fails a lease: the first `ack` events of the slice are done, and the next one failed.
    /// Without `ack`, any of them may have failed. Retried after the backoff, and after
    /// `retry_after` at the earliest.
    ///
    /// # Errors
    /// See [`LeaseError`].
    pub(crate) async fn fail(
        &self,
        lease: &str,
        ack: Option<u64>,
        retry_after: Option<Duration>,
        reason: &str,
    ) -> Result<(), LeaseError> {
        let open = self.find(lease)?;
        let ack = open.ack(ack)?;
        self.end(&open, |acked| {
            let failure = match ack {
                Some(ack) if ack == open.capability.n => return Ok(Outcomes::done()),
                Some(ack) => Failure::transient(ack.saturating_sub(acked), reason),
                None => Failure::unknown(reason.to_owned()),
            };
            Err(match retry_after {
                Some(pause) => failure.retry_after(pause),
                None => failure,
            })
        })
        .await
    }

    /// Extends the lease by its ttl from now; the first `ack` events of the slice are done.
    ///
    /// # Errors
    /// See [`LeaseError`].
    pub(crate) async fn extend(
        &self,
        lease: &str,
        ack: Option<u64>,
    ) -> Result<Extended, LeaseError> {
        let open = self.find(lease)?;
        let ack = open.ack(ack)?.unwrap_or(0);
        let line = open.pipeline.calls.of(&open.capability.bot);
        let _turn = line.take().await?;
        for _ in 0..TRIES {
            let current = open.current().await?;
            let n = if current.handed { ack.saturating_sub(current.acked) } else { 0 };
            let (records, _place) = self.records(&open, &current, n).await?;
            let mode = Mode::Keep { ttl_ms: open.capability.ttl_ms };
            let settlement = Settlement { mode, ..self.settled(&open, n) };
            if open.commit(&current, &settlement, &records).await? {
                let now = self.clock.now();
                settlement.tally.record(&open.pipeline.metrics, sequences(&records), now);
                let ttl = Duration::from_millis(open.capability.ttl_ms);
                return Ok(Extended { ttl, acked: current.acked + n });
            }
        }
        Err(LeaseError::Gone)
    }

    fn find(&self, lease: &str) -> Result<Open<'_>, LeaseError> {
        let capability = Capability::read(&self.key, lease).ok_or(LeaseError::NoSuch)?;
        let pipeline = self.pipelines.get(&capability.pipeline).ok_or(LeaseError::NoSuch)?;
        Ok(Open { pipeline, capability })
    }

    /// Ends a lease as `answer` decides. `answer` gets the number of events that are already done.
    async fn end(
        &self,
        open: &Open<'_>,
        answer: impl Fn(usize) -> Result<Outcomes, Failure>,
    ) -> Result<(), LeaseError> {
        let line = open.pipeline.calls.of(&open.capability.bot);
        let _turn = line.take().await?;
        for _ in 0..TRIES {
            let current = open.current().await?;
            let left = open.capability.n.saturating_sub(current.acked);
            let policy = self.policy(open, current.attempts);
            // Without remaining events, none of them can have failed.
            let answer = if left == 0 { Ok(Outcomes::done()) } else { answer(current.acked) };
            let settlement = settle(&vec![Fitness::Fit; left], answer, policy);
            // The note of a failure names all events that were tried.
            let notes_all = settlement.failure.is_some() && open.pipeline.recorder.is_some();
            let tried = if notes_all { left } else { settlement.settled };
            let (records, place) = self.records(open, &current, tried).await?;
            if open.commit(&current, &settlement, &records).await? {
                let slice = vec![Fitness::Fit; left];
                if let Some(given_up) = given_up(&slice, &settlement.exceptions) {
                    let event = records.get(given_up.index);
                    let event =
                        event.and_then(|record| Event::decode(record, &open.capability.bot).ok());
                    let event = event.as_ref().map(|(_, event)| event);
                    given_up.warn(open.pipeline.queue.name(), &open.capability.bot, event);
                } else if let Some(reason) = &settlement.failure {
                    let (bot, mode) = (&open.capability.bot, settlement.mode);
                    tracing::debug!(%bot, reason, ?mode, "a receiver did not finish its slice");
                }
                let (pipeline, now) = (&open.pipeline, self.clock.now());
                let done = sequences(&records).take(settlement.settled);
                settlement.tally.record(&open.pipeline.metrics, done, now);
                open.note(&records, current.attempts, now, &settlement);
                drop((records, place));
                settlement.count(&pipeline.meter, now);
                let bot = (&open.capability.bot, false);
                settlement.note_failure(&pipeline.queue, bot, None, now).await;
                return Ok(());
            }
        }
        Err(LeaseError::Gone)
    }

    /// The records of the next `n` events, for their bytes, the metrics and the log. Large ones have a
    /// place as long as they are in memory.
    async fn records(
        &self,
        open: &Open<'_>,
        current: &Current,
        n: usize,
    ) -> Result<(Vec<Vec<u8>>, Option<Place<'_>>), LeaseError> {
        if n == 0 {
            return Ok((Vec::new(), None));
        }
        let (queue, bot) = (&open.pipeline.queue, &open.capability.bot);
        let keys = queue.keys(queue.shard_of(bot));
        let (link, place) = if current.queued_bytes.is_some_and(|bytes| bytes > SMALL_BYTES) {
            let (link, of_servers) = &self.large;
            let server = queue.link().holder(keys) % LARGE_LINES;
            (link, Some(of_servers[server].take().await?))
        } else {
            (queue.link(), None)
        };
        // The queue changes meanwhile only by calls of other processes, and then the commit finds that.
        let page = current.queued_bytes.map_or(UNCOUNTED_EVENTS, |_| n);
        let misread = |source| LeaseError::Store(link.misread("LRANGE", source));
        let mut records = Vec::with_capacity(n);
        for first in (0..n).step_by(page) {
            let mut command = redis::cmd("LRANGE");
            command.arg(keys.queue(bot)).arg(first).arg((first + page).min(n) - 1);
            let answer = link.command("LRANGE", command).await?;
            let mut reply = Reply::new(answer).map_err(misread)?;
            while reply.len() > 0 {
                records.push(reply.bytes().map_err(misread)?.unwrap_or_default());
            }
        }
        Ok((records, place))
    }

    /// Commits the first `n` remaining events.
    fn settled(&self, open: &Open<'_>, n: usize) -> Settlement {
        let policy = self.policy(open, Attempts::default());
        settle(&vec![Fitness::Fit; n], Ok(Outcomes::done()), policy)
    }

    fn policy(&self, open: &Open<'_>, attempts: Attempts) -> Policy {
        let settings = &open.pipeline.settings;
        Policy {
            max_attempts: settings.max_attempts,
            backoff: settings.backoff,
            batch: settings.batch,
            attempts,
            unavailable: Duration::ZERO,
            random: rand::random(),
            now: self.clock.now(),
        }
    }
}

impl Open<'_> {
    /// Converts an acknowledgement into a position in the slice.
    fn ack(&self, ack: Option<u64>) -> Result<Option<usize>, LeaseError> {
        let n = self.capability.n;
        let Some(ack) = ack else { return Ok(None) };
        match usize::try_from(ack) {
            Ok(count) if count <= n => Ok(Some(count)),
            _ => Err(LeaseError::Ack { ack, n }),
        }
    }

    /// The current state of the lease, if it is still held.
    async fn current(&self) -> Result<Current, LeaseError> {
        let queue = &self.pipeline.queue;
        let bot = &self.capability.bot;
        let keys = queue.keys(queue.shard_of(bot));
        let mut pipe = Pipeline::with_capacity(3);
        pipe.cmd("HGET").arg(keys.owners()).arg(bot.as_str());
        pipe.cmd("HGET").arg(keys.attempts()).arg(bot.as_str());
        pipe.cmd("HGET").arg(keys.held()).arg(format!("q{bot}"));
        let values = queue.link().run_checked("HGET", &pipe).await?;
        let misread = |source| LeaseError::Store(queue.link().misread("HGET", source));
        let mut reply = Reply::new(Value::Array(values)).map_err(misread)?;
        let (own, att) = (reply.text().map_err(misread)?, reply.text().map_err(misread)?);
        let queued_bytes = reply.optional().map_err(misread)?;
        let mut parts = own.split('|').map(str::parse::<u64>);
        let mut part = || parts.next().and_then(Result::ok);
        let (Some(fence), Some(acked), Some(_), Some(state)) = (part(), part(), part(), part())
        else {
            return Err(LeaseError::Gone);
        };
        if fence != self.capability.fence {
            return Err(LeaseError::Gone);
        }
        let attempts =
            Attempts::parse(&att).ok_or_else(|| misread(ReplyError::unexpected("att", &att)))?;
        let acked = usize::try_from(acked).unwrap_or(usize::MAX);
        Ok(Current { acked, handed: state == 2, attempts, queued_bytes })
    }

    /// Notes how the lease ended.
    fn note(
        &self,
        records: &[Vec<u8>],
        attempts: Attempts,
        now: Duration,
        settlement: &Settlement,
    ) {
        let Some(recorder) = &self.pipeline.recorder else { return };
        let bot = &self.capability.bot;
        if let Some(tried) = Tried::read(records, bot) {
            Of { bot, attempts, took: None, now }.settled(recorder, tried, settlement);
        }
    }

    /// Whether the change was made; otherwise another call acknowledged events meanwhile.
    async fn commit(
        &self,
        current: &Current,
        settlement: &Settlement,
        records: &[Vec<u8>],
    ) -> Result<bool, LeaseError> {
        let queue = &self.pipeline.queue;
        let Capability { bot, run, fence, .. } = &self.capability;
        let item = Completion {
            bot: bot.clone(),
            run: run.as_str().into(),
            fence: Fence::new(*fence),
            before: current.acked,
            n: settlement.n,
            bytes: records.iter().take(settlement.n).map(|record| record.len() as u64).sum(),
            mode: settlement.mode,
            cost: settlement.n as u64,
            exceptions: settlement.exceptions.clone(),
            leaving: None,
            aside: None,
        };
        let (keys, dead_max) = (queue.keys(queue.shard_of(bot)), queue.limits().dead_max);
        let (ledger, items) = (queue.ledger().is_some(), std::slice::from_ref(&item));
        let quotas = queue.quotas();
        let complete = Complete { keys, dead_max, quotas, ledger, items };
        let completed = queue.link().call(&complete).await?;
        self.pipeline.metrics.letters_removed.increment(completed.letters_removed);
        queue.letters_over_quota(completed.letters_over_quota);
        match completed.verdicts.first() {
            Some(Verdict::Ok | Verdict::Full) => {
                self.pipeline.meter.settled.fetch_add(settlement.n as u64, Ordering::Relaxed);
                Ok(true)
            }
            Some(Verdict::Bad) => Ok(false),
            Some(Verdict::Stale) | None => Err(LeaseError::Gone),
        }
    }
}

fn sequences(records: &[Vec<u8>]) -> impl Iterator<Item = Sequence> {
    records.iter().filter_map(|record| Event::sequence_of(record))
}
