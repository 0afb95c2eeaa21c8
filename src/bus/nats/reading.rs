//! Reads a stream in order.
//!
//! By an ephemeral pull consumer without acknowledgements, not by direct gets of batches: these are
//! no faster, need `allow_direct` and a server from 2.11 on, have one subject filter instead of many,
//! cannot wait for the next message, and any replica may answer, even one that is behind. A
//! consumer numbers what it delivers, so a lost message shows, and what is missing in between was
//! deleted or has another subject. It lives in the memory of the server, which deletes it
//! when nobody pulls for a while.

use std::sync::Arc;
use std::time::Duration;

use async_nats::{StatusCode, Subscriber};
use futures_util::StreamExt as _;
use serde::Deserialize;
use serde_json::json;
use tokio::time::{Instant, timeout_at};

use super::incarnation::Incarnations;
use super::link::{ANSWER_WITHIN, Connected, Link};
use super::received::{Delivery, Received};
use crate::bus::BusError;

/// The server deletes a consumer after this time without a pull.
const INACTIVE: Duration = Duration::from_secs(30);
/// Maximum size of one batch. One message of any size is read even so. Headers of a few bytes take many
/// times their size in the memory of the client.
pub(super) const BATCH_BYTES_MAX: usize = 8 << 20;
/// What the names of consumers begin with, for operators.
const PREFIX: &str = "fairlane-";

/// What is told of a consumer.
#[derive(Debug, Deserialize)]
pub(super) struct ConsumerFacts {
    pub(super) delivered: Sequences,
    #[serde(default)]
    pub(super) ack_floor: Sequences,
    #[serde(default)]
    pub(super) num_pending: u64,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Sequences {
    pub(super) stream_seq: u64,
}

/// A consumer, and what it has delivered.
#[derive(Debug)]
pub(super) struct Reading {
    pub(super) connected: Connected,
    pub(super) stream: Arc<Incarnations>,
    pub(super) consumer: String,
    /// The last sequence that was read.
    pub(super) at: u64,
    /// Whether a message was read.
    pub(super) moved: bool,
    /// Number of messages that the consumer has delivered.
    number: u64,
    subscriber: Subscriber,
    /// Answers to the n-th pull go to `INBOX.n`.
    inbox: String,
    pulls: u64,
}

/// What one pull got.
#[derive(Debug, Default)]
pub(super) struct Pulled {
    pub(super) received: Vec<Received>,
    /// Whether the connection ended behind these.
    pub(super) ended: bool,
    /// Whether the server said that there are no others now.
    pub(super) is_all: bool,
}

impl Reading {
    /// Makes a consumer that begins behind `at`.
    pub(super) async fn begin(
        connected: Connected,
        link: &Link,
        stream: Arc<Incarnations>,
        at: u64,
    ) -> Result<Self, BusError> {
        let inbox = connected.client.new_inbox();
        let subscriber = connected.client.subscribe(format!("{inbox}.*")).await;
        let subscriber = subscriber.map_err(|error| connected.no_answer(error))?;
        let consumer = consumer_name();
        let start = json!({ "deliver_policy": "by_start_sequence", "opt_start_seq": at + 1 });
        let subjects = &link.settings.subjects;
        create(&connected, link, &consumer, subjects, INACTIVE, start).await?;
        Ok(Self {
            connected,
            stream,
            consumer,
            at,
            moved: false,
            number: 0,
            subscriber,
            inbox,
            pulls: 0,
        })
    }

    /// Reads up to `max` messages, and waits up to `wait` for the first one.
    pub(super) async fn pull(
        &mut self,
        link: &Link,
        max: usize,
        wait: Duration,
    ) -> Result<Pulled, BusError> {
        let mut pulled = Pulled::default();
        let mut asked = max;
        let mut reply = self.ask(link, asked, wait, Some(BATCH_BYTES_MAX)).await?;
        let mut deadline = Instant::now() + wait + ANSWER_WITHIN;
        while pulled.received.len() < asked {
            let next = match timeout_at(deadline, self.subscriber.next()).await {
                Ok(Some(next)) => next,
                // What came before is whole.
                _ if !pulled.received.is_empty() => {
                    pulled.ended = true;
                    break;
                }
                Ok(None) => return Err(self.connected.no_answer("the connection broke")),
                Err(_) => return Err(self.connected.silent(&self.name(link))),
            };
            if next.subject.as_str().starts_with(&self.inbox) {
                if next.subject.as_str() != reply {
                    continue;
                }
                let status = next.status.unwrap_or(StatusCode::OK);
                let text = next.description.unwrap_or_default();
                match status {
                    StatusCode::IDLE_HEARTBEAT => continue,
                    StatusCode::NOT_FOUND | StatusCode::TIMEOUT => {
                        pulled.is_all = true;
                        break;
                    }
                    StatusCode::REQUEST_TERMINATED if text.contains("MaxBytes") => {
                        if !pulled.received.is_empty() {
                            break;
                        }
                        asked = 1;
                        reply = self.ask(link, asked, wait, None).await?;
                    }
                    StatusCode::NO_RESPONDERS => return Err(link.unknown("the consumer is gone")),
                    other => return Err(link.unknown(format_args!("{other} {text}"))),
                }
                continue;
            }
            let delivery = next.reply.as_deref().and_then(Delivery::parse);
            let delivery = delivery.ok_or_else(|| link.unknown("a message without its place"))?;
            if delivery.number != self.number + 1 || delivery.seq <= self.at {
                return Err(link.unknown("messages were lost between the server and the client"));
            }
            self.number = delivery.number;
            self.at = delivery.seq;
            self.moved = true;
            pulled.received.push(Received::delivered(delivery, next));
            deadline = Instant::now() + ANSWER_WITHIN;
        }
        Ok(pulled)
    }

    fn name(&self, link: &Link) -> String {
        format!("CONSUMER.MSG.NEXT.{}.{}", link.settings.stream, self.consumer)
    }

    /// Asks for a batch; returns where the answers go.
    async fn ask(
        &mut self,
        link: &Link,
        max: usize,
        wait: Duration,
        max_bytes: Option<usize>,
    ) -> Result<String, BusError> {
        self.pulls += 1;
        let reply = format!("{}.{}", self.inbox, self.pulls);
        // With both, the server sends what there is, and only waits if there is nothing.
        let mut body = json!({ "batch": max, "no_wait": true });
        if !wait.is_zero() {
            body["expires"] = nanos(wait).into();
        }
        if let Some(bytes) = max_bytes {
            body["max_bytes"] = bytes.into();
        }
        self.connected.send(&self.name(link), Some(&reply), &body).await?;
        Ok(reply)
    }
}

pub(super) fn consumer_name() -> String {
    format!("{PREFIX}{}", uuid::Uuid::now_v7().simple())
}

/// Makes an ephemeral consumer that needs no acknowledgements.
pub(super) async fn create(
    connected: &Connected,
    link: &Link,
    consumer: &str,
    subjects: &[String],
    inactive: Duration,
    mut config: serde_json::Value,
) -> Result<ConsumerFacts, BusError> {
    let stream = &link.settings.stream;
    config["name"] = consumer.into();
    config["ack_policy"] = "none".into();
    config["replay_policy"] = "instant".into();
    config["mem_storage"] = true.into();
    config["num_replicas"] = 1.into();
    config["inactive_threshold"] = nanos(inactive).into();
    match subjects {
        [] => {}
        // Servers before 2.10 know only this.
        [subject] => config["filter_subject"] = subject.as_str().into(),
        subjects => config["filter_subjects"] = subjects.into(),
    }
    let mut name = format!("CONSUMER.CREATE.{stream}.{consumer}");
    if let [subject] = subjects {
        // The server wants to see it, so that rights can depend on it.
        name = format!("{name}.{subject}");
    }
    let body = json!({ "stream_name": stream, "config": config, "action": "create" });
    connected.get(&name, &body).await
}

pub(super) async fn delete(
    connected: &Connected,
    link: &Link,
    consumer: &str,
) -> Result<(), BusError> {
    let name = format!("CONSUMER.DELETE.{}.{consumer}", link.settings.stream);
    connected.send(&name, None, &json!({})).await
}

/// The facts of a consumer; `None` if there is none.
pub(super) async fn facts(
    connected: &Connected,
    link: &Link,
    consumer: &str,
) -> Result<Option<ConsumerFacts>, BusError> {
    let name = format!("CONSUMER.INFO.{}.{consumer}", link.settings.stream);
    match connected.ask(&name, &json!({})).await? {
        Ok(facts) => Ok(Some(facts)),
        Err(error) if super::falls::is_missing(error.error_code()) => Ok(None),
        Err(error) => Err(link.refused(format!("{name}: {error}"))),
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
