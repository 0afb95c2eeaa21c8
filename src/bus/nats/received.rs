//! Messages of a stream, and their events.

use std::sync::Arc;

use async_nats::HeaderMap;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use serde::Deserialize;

use super::incarnation::Incarnations;
use super::settings::NatsSettings;
use crate::bus::BusError;
use crate::bus::record::{Binding, Decoded, Place, RawRecord, decode};
use crate::bus::source::{Batch, Fetched};
use crate::bus::{Entry, InvalidEntry};
use crate::event::Event;

/// Marks the messages that the server adds when it deletes others. They are no events.
const MARKER: &str = "Nats-Marker-Reason";

/// What the reply subject of a delivered message tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Delivery {
    /// The sequence in the stream.
    pub(super) seq: u64,
    /// How many messages the consumer has delivered, with this one.
    pub(super) number: u64,
    /// When the message was added, ns since 1970.
    pub(super) time_ns: u64,
}

impl Delivery {
    /// Parses `$JS.ACK.[DOMAIN.ACCOUNT.]STREAM.CONSUMER.DELIVERIES.SEQ.NUMBER.TIME.PENDING[.RANDOM]`.
    pub(super) fn parse(reply: &str) -> Option<Self> {
        let tokens: Vec<_> = reply.strip_prefix("$JS.ACK.")?.split('.').collect();
        let tokens = match tokens.len() {
            7 => &tokens[..],
            9.. => &tokens[2..],
            _ => return None,
        };
        let number = |at: usize| tokens[at].parse().ok();
        Some(Self { seq: number(3)?, number: number(4)?, time_ns: number(5)? })
    }
}

/// A message with its place.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) seq: u64,
    pub(super) time_ns: u64,
    body: Body,
}

#[derive(Debug)]
enum Body {
    Parsed(Box<async_nats::Message>),
    Stored(Box<Stored>),
}

impl Received {
    pub(super) fn delivered(delivery: Delivery, message: async_nats::Message) -> Self {
        let Delivery { seq, time_ns, .. } = delivery;
        Self { seq, time_ns, body: Body::Parsed(Box::new(message)) }
    }

    pub(super) fn stored(stored: Stored) -> Self {
        let (seq, time_ns) = (stored.seq, stored.time_ns());
        Self { seq, time_ns, body: Body::Stored(Box::new(stored)) }
    }

    /// Whether the client can parse its headers, as far as known.
    pub(super) fn is_parsable(&self) -> bool {
        match &self.body {
            Body::Parsed(_) => true,
            Body::Stored(stored) => is_parsable(&STANDARD.decode(&stored.hdrs).unwrap_or_default()),
        }
    }

    /// Its size in bytes, about.
    pub(super) fn len(&self) -> usize {
        match &self.body {
            Body::Parsed(message) => message.length,
            Body::Stored(stored) => stored.hdrs.len() + stored.data.len(),
        }
    }

    fn event(&self, settings: &NatsSettings) -> Option<Result<Event, InvalidEntry>> {
        match &self.body {
            Body::Parsed(message) => {
                let headers = message.headers.as_ref().map(headers).unwrap_or_default();
                self.decode(settings, &message.subject, &headers, &message.payload)
            }
            Body::Stored(stored) => {
                let header = STANDARD.decode(&stored.hdrs).unwrap_or_default();
                let data = STANDARD.decode(&stored.data).unwrap_or_default();
                self.decode(settings, &stored.subject, &lines(&header), &data)
            }
        }
    }

    fn decode(
        &self,
        settings: &NatsSettings,
        subject: &str,
        headers: &[(&str, &[u8])],
        payload: &[u8],
    ) -> Option<Result<Event, InvalidEntry>> {
        if payload.is_empty() && headers.iter().any(|(name, _)| *name == MARKER) {
            return None;
        }
        let record = RawRecord {
            place: Place { log: &settings.stream, partition: None, offset: self.seq },
            topic: subject,
            key: None,
            headers,
            value: Some(payload),
            time_ms: self.time_ms(),
        };
        match decode(&record, Binding::Nats, &settings.mapping, &settings.reserved) {
            Decoded::Event(event) => Some(Ok(event)),
            Decoded::Invalid(invalid) => Some(Err(invalid)),
            Decoded::Tombstone => None,
        }
    }

    fn time_ms(&self) -> u64 {
        self.time_ns / 1_000_000
    }
}

fn headers(map: &HeaderMap) -> Vec<(&str, &[u8])> {
    let each = |(name, values)| {
        let (name, values): (&async_nats::HeaderName, &Vec<async_nats::HeaderValue>) =
            (name, values);
        values.iter().map(move |value| (name.as_ref(), value.as_str().as_bytes()))
    };
    map.iter().flat_map(each).collect()
}

/// As the client does, which takes more in some details.
fn is_parsable(header: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(header) else { return false };
    let mut lines = text.lines();
    let is_name = |name: &str| name.parse::<async_nats::HeaderName>().is_ok();
    let is_field = |line: &str| {
        let name = line.split_once(':').map(|(name, _)| name);
        line.is_empty() || line.starts_with(char::is_whitespace) || name.is_some_and(is_name)
    };
    lines.next().is_none_or(|version| version.trim_end() == "NATS/1.0") && lines.all(is_field)
}

/// The headers that can be read. Others may be among them, see [`Stored`].
fn lines(header: &[u8]) -> Vec<(&str, &[u8])> {
    let pair = |line| {
        let line: &[u8] = line;
        let colon = line.iter().position(|byte| *byte == b':')?;
        let name = std::str::from_utf8(&line[..colon]).ok()?;
        Some((name, line[colon + 1..].trim_ascii()))
    };
    header.split(|byte| *byte == b'\n').skip(1).filter_map(pair).collect()
}

/// A message in an answer of the API, where headers are base64: the client gives up the connection
/// when it gets headers that it cannot parse.
#[derive(Debug, Deserialize)]
pub(super) struct Stored {
    subject: String,
    seq: u64,
    #[serde(default)]
    hdrs: String,
    #[serde(default)]
    data: String,
    time: Timestamp,
}

impl Stored {
    pub(super) fn time_ns(&self) -> u64 {
        u64::try_from(self.time.as_nanosecond()).unwrap_or_default()
    }
}

/// Consecutive messages that are not decoded yet.
#[derive(Debug)]
pub(super) struct Messages {
    pub(super) stream: Arc<Incarnations>,
    pub(super) settings: Arc<NatsSettings>,
    pub(super) received: Vec<Received>,
    /// The last sequence up to which there are no others.
    pub(super) end: u64,
    /// Whether the server said that there are no others now.
    pub(super) is_all: bool,
}

impl Fetched for Messages {
    fn len(&self) -> usize {
        self.received.len()
    }

    fn bytes(&self) -> usize {
        self.received.iter().map(Received::len).sum()
    }

    fn is_all(&self) -> bool {
        self.is_all
    }

    fn decode(self: Box<Self>) -> Result<Vec<Batch>, BusError> {
        let entry = |received: &Received| {
            let event = received.event(&self.settings)?;
            Some(Entry { offset: self.stream.offset(received.seq), event })
        };
        let entries: Vec<_> = self.received.iter().filter_map(entry).collect();
        Ok(vec![Batch {
            skipped: self.received.len() - entries.len(),
            entries,
            end: self.stream.reached(self.end),
            added_ms: self.received.last().map_or(0, Received::time_ms),
            ..Batch::default()
        }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reply_subject_tells_the_place_of_a_message() {
        let expected = Some(Delivery { seq: 12, number: 7, time_ns: 1_795_630_979_577_096_047 });
        for reply in [
            "$JS.ACK.S.c1.1.12.7.1795630979577096047.5",
            "$JS.ACK.hub.A1B2.S.c1.1.12.7.1795630979577096047.5",
            "$JS.ACK.hub.A1B2.S.c1.1.12.7.1795630979577096047.5.x9",
        ] {
            assert_eq!(Delivery::parse(reply), expected, "{reply}");
        }
        for reply in
            ["", "$JS.ACK.", "$JS.ACK.S.c1.1.x.7.1.5", "_INBOX.a.b", "$JS.ACK.S.c1.1.12.7.1"]
        {
            assert_eq!(Delivery::parse(reply), None, "{reply}");
        }
    }

    #[test]
    fn headers_that_the_client_cannot_parse_are_known() {
        for good in [&b""[..], b"NATS/1.0\r\n\r\n", b"NATS/1.0\r\na: 1\r\n  2\r\nb:\r\n\r\n"] {
            assert!(is_parsable(good), "{}", good.escape_ascii());
        }
        for bad in [
            &b"NATS/1.0\r\na: \xff\r\n\r\n"[..],
            b"NATS/1.0\r\nno colon\r\n\r\n",
            b"NATS/1.0 x\r\na: b\r\n\r\n",
            b"HTTP/1.1\r\n\r\n",
        ] {
            assert!(!is_parsable(bad), "{}", bad.escape_ascii());
        }
    }

    #[test]
    fn of_broken_headers_those_that_can_be_read_are_kept() {
        let header = b"NATS/1.0\r\nno colon\r\na: 1\r\n\xff: 2\r\nb:\xff\r\n\r\n";
        assert_eq!(lines(header), [("a", &b"1"[..]), ("b", &b"\xff"[..])]);
        assert_eq!(lines(b""), []);
    }
}
