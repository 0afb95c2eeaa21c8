//! Publishing to a stream.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::context::{PublishError, PublishErrorKind};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::publish::PublishAck;
use async_nats::jetstream::response::Response;
use async_nats::jetstream::{self, ErrorCode};
use async_nats::{HeaderMap, RequestErrorKind};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest as _, Sha256};
use tokio::time::timeout;

use super::facts::{Facts, missing};
use super::incarnation::Incarnations;
use super::link::{Connected, chain};
use super::settings::NatsSettings;
use super::{NatsSource, lock};
use crate::bus::BusError;
use crate::bus::record::{Binding, encode};
use crate::bus::source::Outgoing;
use crate::id::Offset;

/// What is known of a stream is asked again after this time.
const KNOWN_FOR: Duration = Duration::from_secs(1);
/// Maximum time of one call. The server is asked for each acknowledgement for a shorter time.
const PUBLISH_WITHIN: Duration = Duration::from_secs(10);
/// Maximum number of events that a server adds as one.
const ATOMIC_MAX: usize = 1_000;
/// Headers that the server reads.
const MESSAGE_ID: &str = "Nats-Msg-Id";
const EXPECTED_STREAM: &str = "Nats-Expected-Stream";
const BATCH_ID: &str = "Nats-Batch-Id";
const BATCH_SEQUENCE: &str = "Nats-Batch-Sequence";
const BATCH_COMMIT: &str = "Nats-Batch-Commit";
/// Bytes of the first line and the last of headers, and between a name and its value.
const HEADERS_BYTES: usize = 12 + 2;
const HEADER_BYTES: usize = 4;

/// A message to publish.
struct Message {
    subject: String,
    headers: HeaderMap,
    payload: Vec<u8>,
}

/// Why a message is not stored.
enum Failure {
    /// It may be stored.
    Unknown(String),
    /// No server could answer for the stream.
    Away(String),
    Refused(String),
}

impl NatsSource {
    /// Adds events. The messages of a call go over one connection in their order, and the stream
    /// keeps it. If the stream permits atomic batches, all or none are added.
    pub(super) async fn add(&self, events: &[Outgoing<'_>]) -> Result<Vec<Offset>, BusError> {
        if events.is_empty() {
            return Ok(Vec::new());
        }
        let connected = self.link.connected().await?;
        let (facts, stream) = self.recent(&connected).await?;
        let template = self.template(&facts)?;
        let sizes = Sizes::of(&connected, &facts);
        let message = |event: &Outgoing<'_>| self.message(event, &template, sizes);
        let messages = events.iter().map(message).collect::<Result<Vec<_>, _>>()?;
        let adding = async {
            if facts.config.allow_atomic_publish
                && (2..=ATOMIC_MAX).contains(&messages.len())
                && let Some(last) = self.add_atomically(&connected, &messages).await?
            {
                let first = (last + 1).saturating_sub(messages.len() as u64);
                return Ok((first..=last).collect());
            }
            self.add_each(&connected, messages).await
        };
        let added = match timeout(PUBLISH_WITHIN, adding).await {
            Ok(added) => added?,
            Err(_) => return Err(connected.no_answer("not all acknowledgements came in time")),
        };
        Ok(added.into_iter().map(|seq| stream.offset(seq)).collect())
    }

    /// The stream, as it was at most a second ago.
    async fn recent(
        &self,
        connected: &Connected,
    ) -> Result<(Arc<Facts>, Arc<Incarnations>), BusError> {
        let known = lock(&self.known).stream.clone();
        if let Some((at, facts, stream)) = known
            && at.elapsed() < KNOWN_FOR
        {
            return Ok((facts, stream));
        }
        self.look(connected).await?.ok_or_else(|| self.link.refused(missing(&self.link)))
    }

    /// The subject, perhaps with [`NatsSettings::BOT`].
    fn template<'a>(&'a self, facts: &'a Facts) -> Result<Cow<'a, str>, BusError> {
        if let Some(template) = &self.link.settings.publish_subject {
            return Ok(template.into());
        }
        let plain = |subject: &&String| !subject.contains(['*', '>']);
        match facts.config.subjects.first().filter(plain) {
            Some(subject) => Ok(subject.into()),
            None => Err(self.link.refused(format_args!(
                "the stream {:?} does not begin with a subject without wildcards; set \
                 `publish_subject` of the source {:?}",
                self.link.settings.stream, self.link.settings.name
            ))),
        }
    }

    fn message(
        &self,
        event: &Outgoing<'_>,
        template: &str,
        sizes: Sizes,
    ) -> Result<Message, BusError> {
        let encoded = encode(event.json, self.link.settings.mode, Binding::Nats);
        let mut headers = HeaderMap::new();
        let mut bytes = HEADERS_BYTES + encoded.value.len();
        let name = event.name();
        let (source, event_id) = name.as_ref().map_or(("", ""), |name| (&*name.source, &*name.id));
        let id = message_id(event.bot, source, event_id);
        let own: [(Cow<'static, str>, String); 2] =
            [(MESSAGE_ID.into(), id), (EXPECTED_STREAM.into(), self.link.settings.stream.clone())];
        for (name, value) in own.into_iter().chain(encoded.headers) {
            bytes += name.len() + value.len() + HEADER_BYTES;
            let name: async_nats::HeaderName =
                name.parse().map_err(|error| self.link.refused(format_args!("{name}: {error}")))?;
            let value: async_nats::HeaderValue = value
                .parse()
                .map_err(|error| self.link.refused(format_args!("{name}: {error}")))?;
            headers.insert(name, value);
        }
        if bytes > sizes.max {
            return Err(self.link.refused(format_args!(
                "the event {:?} has {bytes} bytes with its headers; {} allows {}; raise that",
                event_id, sizes.by, sizes.max
            )));
        }
        let subject = subject(template, event.bot);
        Ok(Message { subject, headers, payload: encoded.value.into_owned() })
    }

    /// Adds all or none. Returns the last sequence; `None` if the server cannot do it with these
    /// events, and none is added.
    async fn add_atomically(
        &self,
        connected: &Connected,
        messages: &[Message],
    ) -> Result<Option<u64>, BusError> {
        let batch = uuid::Uuid::now_v7().to_string();
        let (last, before) = messages.split_last().unzip();
        let (last, before): (&Message, &[Message]) =
            (last.unwrap_or(&messages[0]), before.unwrap_or_default());
        let headers = |message: &Message, number: usize| {
            let mut headers = message.headers.clone();
            headers.insert(BATCH_ID, batch.as_str());
            headers.insert(BATCH_SEQUENCE, number.to_string());
            headers
        };
        for (number, message) in (1..).zip(before) {
            let (subject, payload) = (message.subject.clone(), message.payload.clone());
            let headers = headers(message, number);
            let sent =
                connected.client.publish_with_headers(subject, headers, payload.into()).await;
            // Without the last one, the server forgets the batch.
            sent.map_err(|error| self.link.refused(chain(&error)))?;
        }
        let mut headers = headers(last, messages.len());
        headers.insert(BATCH_COMMIT, "1");
        let (subject, payload) = (last.subject.clone(), last.payload.clone());
        let answer =
            connected.client.request_with_headers(subject.clone(), headers, payload.into());
        let answer = tokio::select! {
            biased;
            answer = answer => answer,
            error = connected.denial(&subject) => return Err(error),
        };
        let answer = answer.map_err(|error| match error.kind() {
            RequestErrorKind::NoResponders => self.link.away(self.no_subject(&subject)),
            RequestErrorKind::MaxPayloadExceeded | RequestErrorKind::InvalidSubject => {
                self.link.refused(chain(&error))
            }
            _ => connected.no_answer(chain(&error)),
        })?;
        match serde_json::from_slice::<Response<PublishAck>>(&answer.payload) {
            Ok(Response::Ok(ack)) => Ok(Some(ack.sequence)),
            Ok(Response::Err { error }) => match error.error_code() {
                // An event that is there already, or a server that does not know message ids in
                // batches: one by one, these are told.
                ErrorCode::ATOMIC_PUBLISH_CONTAINS_DUPLICATE_MESSAGE
                | ErrorCode::ATOMIC_PUBLISH_UNSUPPORTED_HEADER
                | ErrorCode::ATOMIC_PUBLISH_DISABLED
                | ErrorCode::ATOMIC_PUBLISH_TOO_LARGE_BATCH
                | ErrorCode::ATOMIC_PUBLISH_TOO_MANY_INFLIGHT => Ok(None),
                // The stream has a limit, and discards new messages.
                ErrorCode::STREAM_STORE_FAILED => Err(self.link.refused(error)),
                _ if error.code() == 503 => Err(self.link.away(error)),
                _ => Err(self.link.refused(error)),
            },
            Err(error) => {
                Err(connected.no_answer(format_args!("an answer cannot be read: {error}")))
            }
        }
    }

    async fn add_each(
        &self,
        connected: &Connected,
        messages: Vec<Message>,
    ) -> Result<Vec<u64>, BusError> {
        let mut acks = Vec::with_capacity(messages.len());
        for Message { subject, headers, payload } in messages {
            let publish = PublishMessage::build().headers(headers).payload(payload.into());
            let sent = connected.context.send_publish(subject.clone(), publish).await;
            let failed = sent.is_err();
            acks.push((subject, sent));
            if failed {
                // Those behind it must not be stored without it.
                break;
            }
        }
        let mut stored = Vec::with_capacity(acks.len());
        let mut failures = Vec::new();
        for (subject, sent) in acks {
            let ack = match sent {
                Ok(ack) => tokio::select! {
                    biased;
                    ack = std::future::IntoFuture::into_future(ack) => ack.map_err(|error| self.failure(&subject, &error)),
                    error = connected.denial(&subject) => Err(Failure::Refused(cause(&error))),
                },
                Err(error) => Err(self.failure(&subject, &error)),
            };
            match ack {
                Ok(ack) => stored.push(ack.sequence),
                Err(failure) => failures.push(failure),
            }
            // The others would take as long.
            if let Some(Failure::Unknown(cause)) = failures.last() {
                return Err(connected.no_answer(cause));
            }
        }
        match failures.into_iter().next() {
            None => Ok(stored),
            Some(Failure::Unknown(cause)) => Err(connected.no_answer(cause)),
            Some(Failure::Refused(cause) | Failure::Away(cause)) if !stored.is_empty() => {
                Err(self.link.partly(cause))
            }
            Some(Failure::Away(cause)) => Err(self.link.away(cause)),
            Some(Failure::Refused(cause)) => Err(self.link.refused(cause)),
        }
    }

    fn failure(&self, subject: &str, error: &PublishError) -> Failure {
        let source = std::error::Error::source(error);
        if let Some(error) = source.and_then(|source| source.downcast_ref::<jetstream::Error>()) {
            let text = error.to_string();
            let is_full = error.error_code() == ErrorCode::STREAM_STORE_FAILED;
            let is_away = error.code() == 503 && !is_full;
            return if is_away { Failure::Away(text) } else { Failure::Refused(text) };
        }
        match error.kind() {
            PublishErrorKind::StreamNotFound => Failure::Away(self.no_subject(subject)),
            PublishErrorKind::MaxPayloadExceeded => Failure::Refused(chain(error)),
            _ => Failure::Unknown(chain(error)),
        }
    }

    fn no_subject(&self, subject: &str) -> String {
        let NatsSettings { name, stream, .. } = &*self.link.settings;
        format!(
            "no stream takes the subject {subject:?}: the stream {stream:?} has no leader now, or \
             `publish_subject` of the source {name:?} is not one of its subjects"
        )
    }
}

/// The bound on a message, and whose it is.
#[derive(Clone, Copy)]
struct Sizes {
    max: usize,
    by: &'static str,
}

impl Sizes {
    fn of(connected: &Connected, facts: &Facts) -> Self {
        let server = connected.client.max_payload();
        match usize::try_from(facts.config.max_message_size) {
            Ok(stream @ 1..) if stream < server => {
                Self { max: stream, by: "`max_msg_size` of the stream" }
            }
            _ => Self { max: server, by: "`max_payload` of the server" },
        }
    }
}

fn cause(error: &BusError) -> String {
    match error {
        BusError::Refused { cause, .. } => cause.clone(),
        other => other.to_string(),
    }
}

/// The message id: by it, the server drops repetitions. As with `bus.dedup`, events of two bots are no
/// repetitions of each other. 43 characters.
fn message_id(bot: &str, source: &str, id: &str) -> String {
    let mut hash = Sha256::new();
    for part in [bot, source] {
        // Where a part ends matters.
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.update(id);
    URL_SAFE_NO_PAD.encode(hash.finalize())
}

/// The subject of a bot. Another bot has another one.
pub(super) fn subject(template: &str, bot: &str) -> String {
    if template.contains(NatsSettings::BOT) {
        template.replace(NatsSettings::BOT, &token(bot))
    } else {
        template.to_owned()
    }
}

/// A bot as one token of a subject: other bytes than letters, digits, `-` and `_` of ASCII are written
/// as in URLs.
fn token(bot: &str) -> String {
    let mut token = String::with_capacity(bot.len());
    for byte in bot.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_') {
            token.push(byte.into());
        } else {
            // Writing to a string does not fail.
            let _ = write!(token, "%{byte:02X}");
        }
    }
    token
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bot_has_a_subject_of_its_own_and_none_has_a_wildcard() {
        let bots =
            ["shop-7", "a.b", "a%2Eb", "*", ">", "a b", "日本", "a", "A", "$JS.API.>", "a\u{a0}b"];
        let subjects: std::collections::BTreeSet<_> =
            bots.iter().map(|bot| subject("events.{bot}.in", bot)).collect();
        assert_eq!(subjects.len(), bots.len());
        for subject in &subjects {
            let tokens: Vec<_> = subject.split('.').collect();
            assert!(matches!(tokens[..], ["events", bot, "in"] if !bot.is_empty()), "{subject}");
            assert!(!subject.contains(['*', '>', ' ']) && subject.is_ascii(), "{subject}");
        }
        assert_eq!(subject("events.{bot}", "shop-7"), "events.shop-7");
        assert_eq!(subject("events", "a.b"), "events");
    }

    #[test]
    fn message_ids_tell_bots_sources_and_ids_apart() {
        assert_eq!(message_id("bot", "a", "b"), message_id("bot", "a", "b"));
        assert_ne!(message_id("bot", "a", "b"), message_id("other", "a", "b"));
        assert_ne!(message_id("bot", "a/b", "c"), message_id("bot", "a", "b/c"));
        assert_ne!(message_id("bot", "ab", "c"), message_id("bot", "a", "bc"));
        assert_ne!(message_id("ab", "c", "d"), message_id("a", "bc", "d"));
        assert_eq!(message_id("bot", "/shops/7", &"x".repeat(5_000)).len(), 43);
    }
}
