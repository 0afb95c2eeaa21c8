//! Records of Kafka and NATS, and events in requests.

use axum::http::{HeaderMap, HeaderName, HeaderValue};

use super::event::{alike, json};
use super::halves;
use crate::bus::record::{
    Binding, BotFrom, Decoded, Mapping, Mode, Place, RawRecord, TypeFrom, decode, encode,
};
use crate::event::{EVENT_MAX_BYTES, Event};

/// An attribute that only a pipeline sets.
const RESERVED: &str = "counter";

/// A record with its settings. Not all of it is in a record of every protocol.
struct Input<'a> {
    headers: Vec<(&'a str, &'a [u8])>,
    topic: &'a str,
    key: Option<&'a [u8]>,
    value: Option<&'a [u8]>,
    time_ms: u64,
    mapping: Mapping,
}

/// A record as Kafka, as NATS and, with the same headers and the same body, as HTTP deliver it.
///
/// The input is a line `name: value` for each header, an empty line, and the value. Names that begin
/// with a colon are no headers: `:topic`, `:key`, `:time`, `:null`, and the settings `:bot` and `:type`.
///
/// # Panics
/// If an accepted event would change when it is published again, if a reserved attribute passes, or if
/// the value of a plain record chooses its bot.
pub fn record(data: &[u8]) {
    let input = read(data);
    let raw = RawRecord {
        place: Place { log: "log", partition: Some(1), offset: 7 },
        topic: input.topic,
        key: input.key,
        headers: &input.headers,
        value: input.value,
        time_ms: input.time_ms,
    };
    for binding in [Binding::Kafka, Binding::Nats] {
        match decode(&raw, binding, &input.mapping, &[RESERVED]) {
            Decoded::Event(event) => {
                assert_eq!(event.extension(RESERVED), None);
                check_bot(&raw, binding, &input.mapping, &event);
                for mode in [Mode::Binary, Mode::Structured] {
                    comes_back(&event, mode, binding);
                }
            }
            Decoded::Invalid(entry) => {
                assert!(!entry.error.to_string().is_empty() && !entry.error.label().is_empty());
                assert!(entry.raw.len() <= 64 << 10, "{} bytes are kept", entry.raw.len());
            }
            Decoded::Tombstone => assert!(raw.value.is_none()),
        }
    }
    crate::http::fuzzing::events(&header_map(&input.headers), input.value.unwrap_or_default());
}

fn read(data: &[u8]) -> Input<'_> {
    let (head, value) = halves(data, b"\n\n");
    let mut input = Input {
        headers: Vec::new(),
        topic: "orders.eu.shop",
        key: None,
        value: Some(value),
        time_ms: 0,
        mapping: Mapping::events_only("bus"),
    };
    for line in head.split(|byte| *byte == b'\n') {
        let (name, value) = halves(line, b": ");
        let (Ok(name), text) = (std::str::from_utf8(name), std::str::from_utf8(value)) else {
            continue;
        };
        match (name, text) {
            ("", _) => {}
            (":topic", Ok(text)) => input.topic = text,
            (":key", _) => input.key = Some(value),
            (":time", Ok(text)) => input.time_ms = text.parse().unwrap_or_default(),
            (":null", _) => input.value = None,
            (":bot", Ok(text)) => input.mapping.bot = setting::<BotFrom>(text),
            (":type", Ok(text)) => {
                input.mapping.kind = setting(text).unwrap_or(TypeFrom::Topic);
            }
            _ => input.headers.push((name, value)),
        }
    }
    input
}

/// A setting, which is written as it was read.
fn setting<T: std::str::FromStr + std::fmt::Display>(text: &str) -> Option<T> {
    let read: T = text.parse().ok()?;
    let again = read.to_string();
    assert!(again.parse::<T>().is_ok(), "{again:?}");
    Some(read)
}

/// Only the settings choose the bot of a record without attributes: a tenant may have written its value.
fn check_bot(raw: &RawRecord<'_>, binding: Binding, mapping: &Mapping, event: &Event) {
    let prefix = if binding == Binding::Kafka { "ce_" } else { "ce-" };
    let is = |header: &str, start: &str| {
        let found = header.as_bytes().get(..start.len());
        found.is_some_and(|found| found.eq_ignore_ascii_case(start.as_bytes()))
    };
    let is_event = raw.headers.iter().any(|(name, value)| {
        let structured = is(name, "content-type")
            && value.to_ascii_lowercase().windows(11).any(|window| window == b"cloudevents");
        is(name, prefix) || structured
    });
    if mapping.bot == Some(BotFrom::Key) && !is_event {
        assert_eq!(Some(event.bot().as_str().as_bytes()), raw.key);
    }
}

/// As it is written to the bus and read there.
fn comes_back(event: &Event, mode: Mode, binding: Binding) {
    let text = json(event);
    if text.len() > EVENT_MAX_BYTES {
        return;
    }
    let encoded = encode(text.as_bytes(), mode, binding);
    for (name, value) in &encoded.headers {
        let printable = |byte: u8| matches!(byte, b'!'..=b'~');
        assert!(!name.is_empty() && name.bytes().all(printable), "{name:?}");
        assert!(binding == Binding::Kafka || value.bytes().all(printable), "{value:?}");
    }
    let headers: Vec<_> =
        encoded.headers.iter().map(|(name, value)| (&**name, value.as_bytes())).collect();
    let raw = RawRecord {
        place: Place { log: "log", partition: None, offset: 8 },
        topic: "other",
        key: Some(b"other"),
        headers: &headers,
        value: Some(&*encoded.value),
        time_ms: 1,
    };
    match decode(&raw, binding, &Mapping::events_only("bus"), &[]) {
        Decoded::Event(again) => alike(&again, event),
        other => panic!("{other:?}, though it was written as {encoded:?}"),
    }
}

fn header_map(headers: &[(&str, &[u8])]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        let name = HeaderName::from_bytes(name.as_bytes());
        if let (Ok(name), Ok(value)) = (name, HeaderValue::from_bytes(value)) {
            map.append(name, value);
        }
    }
    map
}
