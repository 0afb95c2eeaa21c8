//! Completing leases from outside: what `/v1/leases` does.
//!
//! A receiver that answered 202 names the lease by its capability, to any process. What it says is
//! judged as an answer given at once would be: the same retries, backoff and dead letters, by the
//! settings of the process that is asked. Only a receiver's own lease can be meant, so nothing here
//! needs more than the capability.
//!
//! A lease that was not handed over yet, because our side still reads the 202, can be completed,
//! failed and extended too; but what an extension acknowledges is taken only after that, since a
//! worker still counts from the slice's start.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use redis::{Pipeline, Value};

use super::Settings;
use super::settle::{Fitness, Policy, Settlement, given_up, settle};
use crate::clock::SharedClock;
use crate::event::Event;
use crate::handler::{Failure, Outcomes, acknowledgement};
use crate::id::{Fence, PipelineName, Sequence};
use crate::keyspace::scripts::{Attempts, Complete, Completion, Mode, Verdict};
use crate::keyspace::{Reply, ReplyError, StoreError};
use crate::metrics::PipelineMetrics;
use crate::presence::Meter;
use crate::queue::Queue;
use crate::queue::capability::Capability;
use crate::signing::SigningKey;

/// Somebody else may speak for the same lease at the same time; after so many tries it is theirs.
const TRIES: usize = 5;

/// Why a lease is not completed, failed or extended. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LeaseError {
    /// Not a capability that this deployment issued, or of a pipeline it does not have.
    #[error("there is no such lease")]
    NoSuch,
    /// It ended or ran out.
    #[error(
        "the lease is gone: it was completed before, ran out or was revoked; what it held is handed out again, or done"
    )]
    Gone,
    /// More than the slice has.
    #[error("ack is {ack}, but the slice has {n} events")]
    Ack {
        /// What was acknowledged.
        ack: u64,
        /// Events of the slice.
        n: usize,
    },
    /// Redis.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A lease that goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extended {
    /// From now.
    pub(crate) ttl: Duration,
    /// How many events of the slice are done.
    pub(crate) acked: usize,
}

/// A pipeline whose leases may be completed here.
#[derive(Debug)]
pub(crate) struct OpenPipeline {
    queue: Queue,
    settings: Settings,
    metrics: PipelineMetrics,
    meter: Arc<Meter>,
}

impl OpenPipeline {
    pub(crate) fn new(queue: Queue, settings: Settings, meter: Arc<Meter>) -> Self {
        let metrics = PipelineMetrics::new(queue.name());
        Self { queue, settings, metrics, meter }
    }
}

/// The leases that receivers outside hold.
pub(crate) struct OpenLeases {
    key: SigningKey,
    clock: SharedClock,
    pipelines: HashMap<PipelineName, OpenPipeline>,
}

impl std::fmt::Debug for OpenLeases {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenLeases").field("pipelines", &self.pipelines).finish_non_exhaustive()
    }
}

/// What Redis knows of a lease.
struct Current {
    acked: usize,
    handed: bool,
    attempts: Attempts,
}

/// One lease, found.
struct Open<'a> {
    pipeline: &'a OpenPipeline,
    capability: Capability,
}

impl OpenLeases {
    pub(crate) fn new(
        key: &SigningKey,
        clock: &SharedClock,
        pipelines: impl IntoIterator<Item = OpenPipeline>,
    ) -> Self {
        let named = pipelines.into_iter().map(|open| (open.queue.name().clone(), open));
        let (key, clock) = (key.clone(), Arc::clone(clock));
        Self { key, clock, pipelines: named.collect() }
    }

    /// The first `ack` events of the slice are done, or all; the rest is tried again in order, as
    /// after a 200 with `ack`.
    ///
    /// # Errors
    /// See [`LeaseError`].
    pub(crate) async fn complete(&self, lease: &str, ack: Option<u64>) -> Result<(), LeaseError> {
        let open = self.find(lease)?;
        let ack = open.ack(ack)?;
        let n = open.capability.n;
        self.end(&open, |acked| match ack {
            Some(ack) if ack < n => {
                // What was acknowledged before stays so.
                let ack = ack.max(acked);
                Err(Failure::transient(ack - acked, acknowledgement(ack, n)))
            }
            _ => Ok(Outcomes::done()),
        })
        .await
    }

    /// The first `ack` events of the slice are done, and the next one failed; without `ack` any of
    /// them did. Tried again after the backoff, and after `retry_after` at the earliest.
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

    /// The lease goes on for its ttl from now; the first `ack` events of the slice are done.
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
        for _ in 0..TRIES {
            let current = open.current().await?;
            let n = if current.handed { ack.saturating_sub(current.acked) } else { 0 };
            let records = open.records(n).await?;
            let mode = Mode::Keep { ttl_ms: open.capability.ttl_ms };
            let settlement = Settlement { mode, ..self.settled(&open, n) };
            if open.commit(&current, &settlement).await? {
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

    /// Ends a lease with what `answer` says, which is told how many events are done already.
    async fn end(
        &self,
        open: &Open<'_>,
        answer: impl Fn(usize) -> Result<Outcomes, Failure>,
    ) -> Result<(), LeaseError> {
        for _ in 0..TRIES {
            let current = open.current().await?;
            let left = open.capability.n.saturating_sub(current.acked);
            let policy = self.policy(open, current.attempts);
            // With nothing left there is nothing that could have failed.
            let answer = if left == 0 { Ok(Outcomes::done()) } else { answer(current.acked) };
            let settlement = settle(&vec![Fitness::Fit; left], answer, policy);
            let records = open.records(settlement.settled).await?;
            if open.commit(&current, &settlement).await? {
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
                let (queue, now) = (&open.pipeline.queue, self.clock.now());
                settlement.tally.record(&open.pipeline.metrics, sequences(&records), now);
                settlement.note_failure(queue, &open.capability.bot, None, now).await;
                return Ok(());
            }
        }
        Err(LeaseError::Gone)
    }

    /// The first `n` events that are left are done.
    fn settled(&self, open: &Open<'_>, n: usize) -> Settlement {
        let policy = self.policy(open, Attempts::default());
        settle(&vec![Fitness::Fit; n], Ok(Outcomes::done()), policy)
    }

    fn policy(&self, open: &Open<'_>, attempts: Attempts) -> Policy {
        let settings = &open.pipeline.settings;
        Policy {
            max_attempts: settings.max_attempts,
            backoff: settings.backoff,
            attempts,
            unavailable: Duration::ZERO,
            random: rand::random(),
            now: self.clock.now(),
        }
    }
}

impl Open<'_> {
    /// An acknowledgement, as it counts within the slice.
    fn ack(&self, ack: Option<u64>) -> Result<Option<usize>, LeaseError> {
        let n = self.capability.n;
        let Some(ack) = ack else { return Ok(None) };
        match usize::try_from(ack) {
            Ok(count) if count <= n => Ok(Some(count)),
            _ => Err(LeaseError::Ack { ack, n }),
        }
    }

    /// The lease as it stands, if it does.
    async fn current(&self) -> Result<Current, LeaseError> {
        let queue = &self.pipeline.queue;
        let bot = &self.capability.bot;
        let keys = queue.keys(queue.shard_of(bot));
        let mut pipe = Pipeline::with_capacity(2);
        pipe.cmd("HGET").arg(keys.own()).arg(bot.as_str());
        pipe.cmd("HGET").arg(keys.att()).arg(bot.as_str());
        let values = queue.link().run_checked("HGET", &pipe).await?;
        let misread = |source| LeaseError::Store(queue.link().misread("HGET", source));
        let mut reply = Reply::new(Value::Array(values)).map_err(misread)?;
        let (own, att) = (reply.text().map_err(misread)?, reply.text().map_err(misread)?);
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
        Ok(Current { acked, handed: state == 2, attempts })
    }

    /// The records of the next `n` events, for the metrics and the log.
    async fn records(&self, n: usize) -> Result<Vec<Vec<u8>>, LeaseError> {
        let queue = &self.pipeline.queue;
        let bot = &self.capability.bot;
        let mut records = Vec::with_capacity(n);
        if n > 0 {
            let mut command = redis::cmd("LRANGE");
            command.arg(queue.keys(queue.shard_of(bot)).queue(bot)).arg(0).arg(n - 1);
            let value = queue.link().command("LRANGE", command).await?;
            let misread = |source| LeaseError::Store(queue.link().misread("LRANGE", source));
            let mut reply = Reply::new(value).map_err(misread)?;
            while reply.len() > 0 {
                records.push(reply.bytes().map_err(misread)?.unwrap_or_default());
            }
        }
        Ok(records)
    }

    /// Whether it was done; else somebody else acknowledged something meanwhile.
    async fn commit(&self, current: &Current, settlement: &Settlement) -> Result<bool, LeaseError> {
        let queue = &self.pipeline.queue;
        let Capability { bot, run, fence, .. } = &self.capability;
        let item = Completion {
            bot: bot.clone(),
            run: run.as_str().into(),
            fence: Fence::new(*fence),
            before: current.acked,
            n: settlement.n,
            mode: settlement.mode,
            cost: settlement.n as u64,
            exceptions: settlement.exceptions.clone(),
            leaving: None,
        };
        let (keys, dead_max) = (queue.keys(queue.shard_of(bot)), queue.limits().dead_max);
        let (ledger, items) = (queue.ledger().is_some(), std::slice::from_ref(&item));
        let complete = Complete { keys, dead_max, ledger, items };
        let completed = queue.link().call(&complete).await?;
        self.pipeline.metrics.letters_removed.increment(completed.letters_removed);
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
