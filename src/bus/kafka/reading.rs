//! Reads partitions: one queue for each, all filled by the client library in the background.
//!
//! The client library is told where to read and never moves by itself. Each session has a consumer of
//! its own, so that nothing of the session before remains in its queues.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::TopicPartitionList;
use rdkafka::consumer::Consumer as _;
use rdkafka::consumer::base_consumer::PartitionQueue;
use rdkafka::error::KafkaError;
use rdkafka::{Message as _, Offset as KafkaOffset};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::asker::{Shared, dropped_aside};
use super::context::Context;
use super::position::{Start, offset};
use super::raw::RawBatch;
use super::settings::KafkaSettings;
use super::{Partition, error};
use crate::bus::BusError;

/// Maximum size in memory of what one fetch returns, in bytes; one entry more may be in it.
const FETCH_MAX_BYTES: usize = 8 * 1_024 * 1_024;
/// Maximum number of entries that are taken from the queues before other tasks run.
const BETWEEN_YIELDS: usize = 256;
/// A partition that failed is left alone for this time. Then reading starts again, behind what an operator
/// has passed over meanwhile.
const FAILED_FOR: Duration = Duration::from_secs(15);
/// Maximum number of entries that one partition gives before the next has its turn.
const TURN: usize = 64;

/// Partitions that are read.
pub(super) struct Reading {
    parts: Option<Vec<Part>>,
    shared: Shared,
    ready: Arc<Notify>,
    /// The partition that has the next turn.
    turn: usize,
    /// An error behind entries that were returned already.
    failed: Option<BusError>,
}

struct Part {
    queue: PartitionQueue<Context>,
    partition: Partition,
    name: Arc<str>,
    incarnation: u64,
    /// The offset of the next entry. Entries before it are returned.
    next: i64,
    /// Why it cannot be read, and since when. It gives nothing more: the client would go on behind what it
    /// could not read.
    failed: Option<(BusError, Instant)>,
}

impl Reading {
    /// Reads these partitions from now on. Blocks for the time of reading certificates.
    pub(super) fn new(
        settings: &KafkaSettings,
        from: &[(Partition, Arc<str>, Start)],
    ) -> Result<Self, BusError> {
        let shared = Shared::new(&settings.reading(from.len()), settings)?;
        let ready = Arc::new(Notify::new());
        let mut parts = Vec::with_capacity(from.len());
        let refused = |error: &KafkaError| error::of_call(&shared.context, error);
        let Some(consumer) = shared.consumer() else {
            return Err(refused(&KafkaError::Canceled));
        };
        let mut assigned = TopicPartitionList::with_capacity(from.len());
        for (partition, name, start) in from {
            let Partition { topic, number } = partition;
            // The queues are split before the assignment. Otherwise entries that arrive first are
            // in the common queue, out of order.
            let mut queue = consumer
                .split_partition_queue(topic, *number)
                .ok_or_else(|| refused(&KafkaError::Canceled))?;
            let wakes = Arc::clone(&ready);
            queue.set_nonempty_callback(move || wakes.notify_one());
            let at = KafkaOffset::Offset(start.next);
            let added = assigned.add_partition_offset(topic, *number, at);
            added.map_err(|error| refused(&error))?;
            let (incarnation, next) = (start.incarnation, start.next);
            let (partition, name) = (partition.clone(), Arc::clone(name));
            parts.push(Part { queue, partition, name, incarnation, next, failed: None });
        }
        consumer.assign(&assigned).map_err(|error| refused(&error))?;
        shared.serve()?;
        Ok(Self { parts: Some(parts), shared, ready, turn: 0, failed: None })
    }

    /// The partitions that cannot be read while the others are.
    pub(super) fn problems(&self) -> Vec<(Partition, BusError)> {
        let failed = |part: &Part| Some((part.partition.clone(), part.failed.as_ref()?.0.clone()));
        self.parts.iter().flatten().filter_map(failed).collect()
    }

    /// The error of a partition, if none is left to read, or if it is time to try it again.
    fn failed(&self) -> Option<BusError> {
        let parts = self.parts.as_deref().unwrap_or_default();
        let mut failed = parts.iter().filter_map(|part| part.failed.as_ref());
        let (error, _) = if parts.iter().all(|part| part.failed.is_some()) {
            failed.next()?
        } else {
            failed.find(|(_, since)| since.elapsed() >= FAILED_FOR)?
        };
        Some(error.clone())
    }

    /// The next entries, at most `max`; waits up to `wait` for the first one.
    ///
    /// # Cancel safety
    /// Entries may be lost when the future is dropped: drop this too.
    pub(super) async fn fetch(
        &mut self,
        max: usize,
        wait: Duration,
    ) -> Result<Vec<RawBatch>, BusError> {
        let until = Instant::now() + wait;
        loop {
            if let Some(failed) = self.failed.take().or_else(|| self.failed()) {
                return Err(failed);
            }
            let batches = self.sweep(max).await;
            if !batches.is_empty() {
                self.shared.context.answered();
                return Ok(batches);
            }
            if self.failed.is_some() || self.failed().is_some() {
                continue;
            }
            let waited = tokio::time::timeout_at(until, self.ready.notified()).await;
            if waited.is_err() {
                let context = &self.shared.context;
                return match context.told() {
                    Some(cause) if context.is_refused() => {
                        Err(BusError::Refused { bus: context.bus().to_owned(), cause })
                    }
                    Some(cause) if context.is_down() => {
                        Err(BusError::Connect { bus: context.bus().to_owned(), cause })
                    }
                    _ => Ok(batches),
                };
            }
        }
    }

    /// Takes what is in the queues. The partitions take turns, so that one with many entries does not
    /// keep the others waiting.
    async fn sweep(&mut self, max: usize) -> Vec<RawBatch> {
        let parts = self.parts.as_mut().map_or(&mut [][..], Vec::as_mut_slice);
        let mut batches: Vec<RawBatch> = Vec::new();
        // Where the batch of a partition is.
        let mut places: Vec<Option<usize>> = vec![None; parts.len()];
        let (mut taken, mut bytes, mut since_yield) = (0, 0, 0);
        // The number of partitions in a row that had nothing.
        let mut idle = 0;
        while idle < parts.len() && taken < max && bytes < FETCH_MAX_BYTES {
            let at = self.turn % parts.len();
            self.turn = at + 1;
            let part = &mut parts[at];
            let mut given = 0;
            while part.failed.is_none() && given < TURN.min(max - taken) && bytes < FETCH_MAX_BYTES
            {
                let polled = part.queue.poll(Duration::ZERO);
                let Some(polled) = polled else { break };
                let end = match &polled {
                    Err(KafkaError::PartitionEOF(_)) => self.shared.context.end(),
                    _ => None,
                };
                let batch = match polled {
                    Ok(message) => {
                        given += 1;
                        let batch = batch(&mut batches, &mut places[at], at, part);
                        bytes += batch.push(&message);
                        part.next = message.offset() + 1;
                        batch
                    }
                    // Markers and aborted entries of transactions have offsets too.
                    Err(KafkaError::PartitionEOF(_)) => match end {
                        Some(end) if end > part.next => {
                            part.next = end;
                            batch(&mut batches, &mut places[at], at, part)
                        }
                        _ => continue,
                    },
                    Err(cause) => {
                        let after = offset(part.incarnation, part.next);
                        let context = &self.shared.context;
                        let failed = error::of_partition(context, &cause, &part.name, after);
                        if error::is_of_one(&cause) {
                            self.shared.pause(&part.partition);
                            part.failed = Some((failed, Instant::now()));
                            break;
                        }
                        self.failed = Some(failed);
                        return batches;
                    }
                };
                batch.end = offset(part.incarnation, part.next);
            }
            taken += given;
            idle = if given == 0 { idle + 1 } else { 0 };
            since_yield += given;
            if since_yield >= BETWEEN_YIELDS {
                since_yield = 0;
                tokio::task::yield_now().await;
            }
        }
        batches
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        // The queues keep the consumer alive.
        dropped_aside(self.parts.take());
    }
}

fn batch<'a>(
    batches: &'a mut Vec<RawBatch>,
    place: &mut Option<usize>,
    log: usize,
    part: &Part,
) -> &'a mut RawBatch {
    let at = *place.get_or_insert_with(|| {
        batches.push(RawBatch::new(log, part.partition.clone(), part.incarnation));
        batches.len() - 1
    });
    &mut batches[at]
}
