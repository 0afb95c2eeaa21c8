//! A client that only asks and commits. It reads nothing and joins no group.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use rdkafka::Offset as KafkaOffset;
use rdkafka::TopicPartitionList;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::metadata::MetadataPartition;
use rdkafka::types::RDKafkaErrorCode as Code;

use super::context::Context;
use super::position::{Committed, Ends};
use super::releasing::Mark;
use super::settings::KafkaSettings;
use super::{Partition, error};
use crate::bus::BusError;

/// Maximum duration of all questions of one call.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(4);
/// How often events of the library are served: its log, commits, questions for a token.
const SERVE: Duration = Duration::from_millis(200);

pub(super) type Consumer = BaseConsumer<Context>;

/// Shares a consumer. The last one drops it in a thread of its own: this may take seconds.
#[derive(Clone)]
pub(super) struct Shared {
    consumer: Option<Arc<Consumer>>,
    pub(super) context: Context,
}

impl Shared {
    /// Creates a client. Connects later, in the background. Reads certificates: call it where
    /// blocking is allowed.
    pub(super) fn new(config: &ClientConfig, settings: &KafkaSettings) -> Result<Self, BusError> {
        let context = Context::new(settings);
        let created = config.create_with_context::<_, Consumer>(context.clone());
        let consumer = created.map_err(|error| error::of_call(&context, &error))?;
        Ok(Self { consumer: Some(Arc::new(consumer)), context })
    }

    pub(super) fn consumer(&self) -> Option<&Arc<Consumer>> {
        self.consumer.as_ref()
    }

    /// Fetches no more of a partition.
    pub(super) fn pause(&self, partition: &Partition) {
        let list = list(std::slice::from_ref(partition), KafkaOffset::Invalid);
        // Otherwise its queue fills, up to its bound.
        if let (Some(consumer), Ok(list)) = (&self.consumer, list) {
            let _ = consumer.pause(&list);
        }
    }

    /// Serves the events of the library in a thread, until the client is dropped.
    pub(super) fn serve(&self) -> Result<(), BusError> {
        let weak = self.consumer.as_ref().map(Arc::downgrade).unwrap_or_default();
        let serve = move |weak: Weak<Consumer>| {
            while let Some(consumer) = weak.upgrade() {
                consumer.poll(SERVE);
            }
        };
        let thread = std::thread::Builder::new().name("kafka-events".to_owned());
        thread.spawn(move || serve(weak)).map(drop).map_err(|error| BusError::Refused {
            bus: self.context.bus().to_owned(),
            cause: format!("no thread can be started: {error}"),
        })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        dropped_aside(self.consumer.take());
    }
}

/// Drops a value of which dropping may take seconds.
pub(super) fn dropped_aside<T: Send + 'static>(value: T) {
    // If no thread can be started, the closure is dropped here, and the value with it.
    let thread = std::thread::Builder::new().name("kafka-close".to_owned());
    drop(thread.spawn(move || drop(value)));
}

/// Asks one cluster.
#[derive(Clone)]
pub(super) struct Asker {
    shared: Shared,
    /// The cluster has several brokers.
    several: Arc<AtomicBool>,
}

impl Asker {
    /// A client with this configuration. Blocks for the time of reading certificates.
    pub(super) fn new(settings: &KafkaSettings, config: &ClientConfig) -> Result<Self, BusError> {
        let shared = Shared::new(config, settings)?;
        shared.serve()?;
        Ok(Self { shared, several: Arc::default() })
    }

    /// Asks where blocking is allowed.
    pub(super) async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Consumer, Deadline) -> KafkaResult<T> + Send + 'static,
    ) -> Result<T, BusError> {
        let Shared { consumer: Some(consumer), context } = &self.shared else {
            return Err(error::of_call(&self.shared.context, &KafkaError::Canceled));
        };
        let (consumer, bus) = (Arc::clone(consumer), context.bus().to_owned());
        let asked = tokio::task::spawn_blocking(move || {
            question(&consumer, Deadline(Instant::now() + ANSWER_WITHIN))
        });
        match asked.await {
            Ok(Ok(answer)) => {
                context.answered();
                Ok(answer)
            }
            Ok(Err(error)) => Err(error::of_call(context, &error)),
            Err(cause) => Err(BusError::Unknown { bus, cause: cause.to_string() }),
        }
    }

    /// The partitions of each of these topics with the numbers of their leaders, in order; `None`: the right
    /// to see it is missing. A topic that does not exist has none. All topics are asked for concurrently, so
    /// that many of them fit into the time of one answer.
    pub(super) async fn partitions(
        &self,
        topics: &[String],
    ) -> Result<Vec<Option<Vec<(Partition, i32)>>>, BusError> {
        try_join_all(topics.iter().map(|topic| self.partitions_of(topic))).await
    }

    async fn partitions_of(&self, topic: &str) -> Result<Option<Vec<(Partition, i32)>>, BusError> {
        let name: Arc<str> = Arc::from(topic);
        let (asked, several) = (Arc::clone(&name), Arc::clone(&self.several));
        let found = self
            .ask(move |consumer, deadline| {
                // Any broker can tell it, and the first one that is asked may not answer.
                if several.load(Ordering::Relaxed)
                    && let Ok(found) = numbers(consumer, &asked, deadline.half(), &several)
                {
                    return Ok(found);
                }
                numbers(consumer, &asked, deadline.left(), &several)
            })
            .await?;
        let of = |(number, leader)| (Partition { topic: Arc::clone(&name), number }, leader);
        Ok(found.map(|found| found.into_iter().map(of).collect()))
    }

    /// The extents of these partitions, in order.
    pub(super) async fn ends(
        &self,
        partitions: &[Partition],
    ) -> Result<Vec<Result<Ends, BusError>>, BusError> {
        if partitions.is_empty() {
            return Ok(Vec::new());
        }
        let (partitions, context) = (partitions.to_vec(), self.shared.context.clone());
        self.ask(move |consumer, deadline| {
            // The last first: entries may be deleted in between, and `first` is never behind `next`.
            let last = offsets(consumer, &partitions, KafkaOffset::End, deadline)?;
            let first = offsets(consumer, &partitions, KafkaOffset::Beginning, deadline)?;
            let ends = first.into_iter().zip(last).map(|(first, next)| {
                let (first, next) = (first?, next?);
                Ok(Ends { first, next: next.max(first) })
            });
            Ok(ends.map(|ends| ends.map_err(|error| error::of_call(&context, &error))).collect())
        })
        .await
    }

    /// The offsets of the next entries of these partitions, in order; `None`: its broker does not tell it.
    pub(super) async fn nexts(
        &self,
        partitions: &[Partition],
    ) -> Result<Vec<Option<i64>>, BusError> {
        if partitions.is_empty() {
            return Ok(Vec::new());
        }
        let partitions = partitions.to_vec();
        self.ask(move |consumer, deadline| {
            let found = offsets(consumer, &partitions, KafkaOffset::End, deadline)?;
            Ok(found.into_iter().map(Result::ok).collect())
        })
        .await
    }

    /// What the group has committed for these partitions, in order; `None`: nothing.
    pub(super) async fn committed(
        &self,
        partitions: &[Partition],
    ) -> Result<Vec<Option<Committed>>, BusError> {
        if partitions.is_empty() {
            return Ok(Vec::new());
        }
        let partitions = partitions.to_vec();
        self.ask(move |consumer, deadline| {
            let asked = list(&partitions, KafkaOffset::Invalid)?;
            let found = consumer.committed_offsets(asked, deadline.left())?;
            let committed = |partition: &Partition| {
                let element = found.find_partition(&partition.topic, partition.number);
                let element = element.ok_or(KafkaError::OffsetFetch(Code::UnknownPartition))?;
                // Not the same as nothing: a start or an incarnation must not be taken from it.
                element.error()?;
                // The binding panics if it is not UTF-8, and another client of the group may commit any
                // bytes.
                let metadata = catch_unwind(AssertUnwindSafe(|| element.metadata()));
                Ok(Committed::read(element.offset(), metadata.unwrap_or_default()))
            };
            partitions.iter().map(committed).collect()
        })
        .await
    }

    /// Whether no entry of the partition is newer than this, ms since 1970.
    pub(super) async fn is_older(
        &self,
        partition: &Partition,
        than_ms: u64,
    ) -> Result<bool, BusError> {
        let partition = partition.clone();
        self.ask(move |consumer, deadline| {
            let time = i64::try_from(than_ms.saturating_add(1)).unwrap_or(i64::MAX);
            let asked = list(&[partition], KafkaOffset::Offset(time))?;
            let found = consumer.offsets_for_times(asked, deadline.left())?;
            let found = found.elements();
            Ok(found
                .iter()
                .all(|element| element.error().is_ok() && element.offset() == KafkaOffset::End))
        })
        .await
    }

    /// Commits without waiting.
    pub(super) async fn commit(&self, marks: Vec<Mark>) -> Result<(), BusError> {
        self.ask(move |consumer, _| {
            let mut list = TopicPartitionList::with_capacity(marks.len());
            for Mark { partition, next, metadata } in &marks {
                let mut element = list.add_partition(&partition.topic, partition.number);
                element.set_offset(KafkaOffset::Offset(*next))?;
                element.set_metadata(metadata.as_str());
            }
            consumer.commit(&list, CommitMode::Async)
        })
        .await
    }
}

/// Until when all questions of one call must be answered.
#[derive(Clone, Copy)]
pub(super) struct Deadline(Instant);

impl Deadline {
    /// At least a little: the answer may be known already.
    pub(super) fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now()).max(Duration::from_millis(50))
    }

    /// Half of that.
    fn half(self) -> Duration {
        self.left() / 2
    }
}

/// The numbers of the partitions of a topic and of their leaders; none if it does not exist. `None`: there
/// is no right to see it.
fn numbers(
    consumer: &Consumer,
    topic: &str,
    within: Duration,
    several: &AtomicBool,
) -> KafkaResult<Option<Vec<(i32, i32)>>> {
    let metadata = match consumer.fetch_metadata(Some(topic), within) {
        Ok(metadata) => metadata,
        Err(error) if is_missing(&error) => return Ok(Some(Vec::new())),
        Err(error) if is_forbidden(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    several.store(metadata.brokers().len() > 1, Ordering::Relaxed);
    let Some(found) = metadata.topics().iter().find(|found| found.name() == topic) else {
        return Ok(Some(Vec::new()));
    };
    match found.error().map(|error| KafkaError::MetadataFetch(error.into())) {
        Some(error) if is_missing(&error) => return Ok(Some(Vec::new())),
        Some(error) if is_forbidden(&error) => return Ok(None),
        Some(error) => return Err(error),
        None => {}
    }
    let of = |found: &MetadataPartition| (found.id(), found.leader());
    let mut numbers: Vec<_> = found.partitions().iter().map(of).collect();
    numbers.sort_unstable();
    Ok(Some(numbers))
}

fn is_forbidden(error: &KafkaError) -> bool {
    error.rdkafka_error_code() == Some(Code::TopicAuthorizationFailed)
}

pub(super) fn is_missing(error: &KafkaError) -> bool {
    let missing = [Code::UnknownTopicOrPartition, Code::UnknownTopic, Code::UnknownPartition];
    error.rdkafka_error_code().is_some_and(|code| missing.contains(&code))
}

fn list(partitions: &[Partition], offset: KafkaOffset) -> KafkaResult<TopicPartitionList> {
    let mut list = TopicPartitionList::with_capacity(partitions.len());
    for Partition { topic, number } in partitions {
        list.add_partition_offset(topic, *number, offset)?;
    }
    Ok(list)
}

/// The first or next offsets of all partitions: one request to each broker. The library treats the
/// two constants as times, as the protocol does.
fn offsets(
    consumer: &Consumer,
    partitions: &[Partition],
    which: KafkaOffset,
    deadline: Deadline,
) -> KafkaResult<Vec<KafkaResult<i64>>> {
    let found = consumer.offsets_for_times(list(partitions, which)?, deadline.left())?;
    Ok(partitions.iter().map(|partition| found_offset(&found, partition)).collect())
}

fn found_offset(found: &TopicPartitionList, partition: &Partition) -> KafkaResult<i64> {
    let missing = KafkaError::OffsetFetch(Code::UnknownPartition);
    let element = found.find_partition(&partition.topic, partition.number).ok_or(missing)?;
    element.error()?;
    match element.offset() {
        KafkaOffset::Offset(offset) => Ok(offset),
        _ => Err(KafkaError::OffsetFetch(Code::NoOffset)),
    }
}
