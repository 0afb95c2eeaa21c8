//! Publishes events and waits until the brokers have stored them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use rdkafka::client::Client;
use rdkafka::error::KafkaError;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::future_producer::DeliveryFuture;
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};
use rdkafka::types::RDKafkaErrorCode as Code;

use super::asker::dropped_aside;
use super::context::Context;
use super::error::{of_call, words};
use super::settings::KafkaSettings;
use crate::bus::BusError;
use crate::bus::record::{Binding, Encoded, Mode, encode};
use crate::bus::source::Outgoing;

/// Maximum duration of the first connection.
const CONNECT_WITHIN: Duration = Duration::from_secs(4);

/// A connection for publishing. Dropping it ends its threads later, in a thread of its own.
pub(super) struct Publisher {
    producer: Option<FutureProducer<Context>>,
    context: Context,
    topic: Arc<str>,
    mode: Mode,
    /// A broker answered since the last failure. If not, ask before anything is sent: then nothing is
    /// sent to a cluster that is away.
    answers: AtomicBool,
    /// The library gave up: a new publisher is needed.
    broken: AtomicBool,
}

/// Where an event is stored.
pub(super) struct Stored {
    pub(super) partition: i32,
    pub(super) offset: i64,
}

impl Publisher {
    /// Connects later, in the background. Blocks for the time of reading certificates.
    pub(super) fn new(settings: &KafkaSettings) -> Result<Self, BusError> {
        let context = Context::new(settings);
        let created = settings.producing().create_with_context(context.clone());
        Ok(Self {
            producer: Some(created.map_err(|error| of_call(&context, &error))?),
            context,
            topic: Arc::from(settings.to()),
            mode: settings.mode,
            answers: AtomicBool::new(false),
            broken: AtomicBool::new(false),
        })
    }

    pub(super) fn topic(&self) -> &Arc<str> {
        &self.topic
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// Adds the events in this order. Waits until all brokers that must have them do.
    pub(super) async fn publish(&self, events: &[Outgoing<'_>]) -> Result<Vec<Stored>, BusError> {
        let Some(producer) = &self.producer else {
            return Err(of_call(&self.context, &KafkaError::Canceled));
        };
        if !self.answers.load(Ordering::Relaxed) {
            self.connect(producer).await?;
        }
        let mut sent = Vec::with_capacity(events.len());
        let mut unsent = None;
        for event in events {
            match self.send(producer, event) {
                Ok(delivery) => sent.push(delivery),
                Err(error) => {
                    unsent = Some(error);
                    break;
                }
            }
        }
        if let (Some(error), true) = (&unsent, sent.is_empty()) {
            return Err(self.unsent(error));
        }
        let mut stored = Vec::with_capacity(sent.len());
        let mut failed = unsent;
        let mut maybe_stored = false;
        for delivered in join_all(sent).await {
            match delivered {
                Ok(Ok(delivery)) => {
                    let (partition, offset) = (delivery.partition, delivery.offset);
                    stored.push(Stored { partition, offset });
                }
                Ok(Err((error, _))) => {
                    maybe_stored |= !is_certain(&error);
                    failed = Some(error);
                }
                Err(_) => {
                    maybe_stored = true;
                    failed = Some(KafkaError::Canceled);
                }
            }
        }
        let Some(error) = failed else {
            self.context.answered();
            return Ok(stored);
        };
        // The numbers of what is not confirmed are lost with a topic that is made anew, or with a
        // broker that forgets. The library goes on with the next number, which such a broker refuses.
        if maybe_stored || producer.client().fatal_error().is_some() {
            self.broken.store(true, Ordering::Relaxed);
        }
        self.answers.store(false, Ordering::Relaxed);
        let bus = self.context.bus().to_owned();
        let cause = self.explained(&error);
        Err(match (stored.is_empty(), maybe_stored) {
            (false, _) => BusError::Partly { bus, cause },
            (true, true) => BusError::Unknown { bus, cause },
            (true, false) => self.unsent(&error),
        })
    }

    /// Finds out whether a broker answers.
    async fn connect(&self, producer: &FutureProducer<Context>) -> Result<(), BusError> {
        let (producer, topic) = (producer.clone(), Arc::clone(&self.topic));
        let asked = tokio::task::spawn_blocking(move || {
            let client: &Client<_> = producer.client();
            client.fetch_metadata(Some(&topic), CONNECT_WITHIN).map(drop)
        });
        let bus = self.context.bus().to_owned();
        match asked.await {
            Ok(Ok(())) => {
                self.answers.store(true, Ordering::Relaxed);
                self.context.answered();
                Ok(())
            }
            Ok(Err(error)) => Err(of_call(&self.context, &error)),
            Err(cause) => Err(BusError::Connect { bus, cause: cause.to_string() }),
        }
    }

    fn send(
        &self,
        producer: &FutureProducer<Context>,
        event: &Outgoing<'_>,
    ) -> Result<DeliveryFuture, KafkaError> {
        let Encoded { headers: found, value } = encode(event.json, self.mode, Binding::Kafka);
        let mut headers = OwnedHeaders::new_with_capacity(found.len());
        for (name, value) in &found {
            headers = headers.insert(Header { key: name, value: Some(value.as_str()) });
        }
        let record = FutureRecord::to(&self.topic).key(event.bot).payload(&*value).headers(headers);
        producer.send_result(record).map_err(|(error, _)| error)
    }

    /// Nothing is stored.
    fn unsent(&self, error: &KafkaError) -> BusError {
        let bus = self.context.bus().to_owned();
        match error.rdkafka_error_code() {
            // The queue empties as soon as the brokers are fast enough again.
            Some(Code::QueueFull) => BusError::Connect { bus, cause: self.explained(error) },
            Some(_) => BusError::Refused { bus, cause: self.explained(error) },
            None => BusError::Refused { bus, cause: words(error) },
        }
    }

    fn explained(&self, error: &KafkaError) -> String {
        let topic = &self.topic;
        match error.rdkafka_error_code() {
            Some(Code::QueueFull) => {
                "too many events wait to be sent; the brokers are slower than the publishers"
                    .to_owned()
            }
            Some(Code::MessageSizeTooLarge) => format!(
                "an event is larger than the topic {topic} or this client takes; raise \
                 max.message.bytes of the topic, or publish less data"
            ),
            Some(Code::UnknownTopicOrPartition | Code::UnknownTopic) => {
                format!("the topic {topic} does not exist; create it")
            }
            Some(Code::TopicAuthorizationFailed | Code::ClusterAuthorizationFailed) => {
                format!("no right to write to the topic {topic}")
            }
            Some(Code::NotEnoughReplicas | Code::NotEnoughReplicasAfterAppend) => {
                format!("the topic {topic} has fewer replicas in sync than min.insync.replicas")
            }
            Some(Code::MessageTimedOut) => match self.context.told() {
                Some(told) => format!("not confirmed in time: {told}"),
                None => "not confirmed in time".to_owned(),
            },
            _ => words(error),
        }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        dropped_aside(self.producer.take());
    }
}

/// Whether the event is certainly not stored.
fn is_certain(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(
            Code::MessageSizeTooLarge
                | Code::InvalidMessageSize
                | Code::InvalidMessage
                | Code::InvalidRecord
                | Code::MessageBatchTooLarge
                | Code::UnknownTopicOrPartition
                | Code::UnknownTopic
                | Code::UnknownPartition
                | Code::TopicAuthorizationFailed
                | Code::ClusterAuthorizationFailed
                | Code::NotEnoughReplicas
                | Code::PurgeQueue
                | Code::QueueFull
                | Code::PolicyViolation
                | Code::InvalidTimestamp
        )
    )
}
