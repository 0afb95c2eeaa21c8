//! Records of Kafka and NATS as events, and events as records: the CloudEvents protocol bindings of
//! both, binary and structured mode, and plain records by a [`Mapping`].
//!
//! Pure functions; the clients of both are elsewhere. All work is linear in the size of the record.

mod data;
mod encode;
mod header;
mod mapping;

use std::borrow::Cow;
use std::fmt::{self, Write as _};

use jiff::Timestamp;

pub use self::encode::{Encoded, Mode, encode};
pub use self::header::HEADERS_MAX;
use self::header::{DATA_TYPE, Found, unusable};
pub use self::mapping::{BotFrom, Mapping, MappingError, TypeFrom};
use crate::event::entry::{EntryError, InvalidEntry};
use crate::event::{Attributes, EVENT_MAX_BYTES, Event, EventError};
use crate::trace::{PARENT, STATE, TraceContext};

/// Maximum number of bytes kept of an unreadable record.
const RAW_MAX_BYTES: usize = 64 * 1_024;
/// No more headers are kept of an unreadable record after this many bytes.
const RAW_HEADERS_BYTES: usize = 16 * 1_024;
/// Maximum number of bytes kept of each of its texts and header values.
const RAW_TEXT_BYTES: usize = 1_024;

/// How a protocol carries events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Binding {
    /// Attributes in headers `ce_…`, in UTF-8; the media type of the data in `content-type`.
    Kafka,
    /// Attributes in headers `ce-…`, percent-encoded.
    Nats,
}

/// The place of a record, unique in its cluster while the topic or stream exists. Shown as
/// `TOPIC/PARTITION/OFFSET` or `STREAM/SEQUENCE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place<'a> {
    /// The Kafka topic or the NATS stream.
    pub log: &'a str,
    /// The partition, if the log has some.
    pub partition: Option<i32>,
    /// The offset or sequence.
    pub offset: u64,
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.partition {
            Some(partition) => write!(f, "{}/{partition}/{}", self.log, self.offset),
            None => write!(f, "{}/{}", self.log, self.offset),
        }
    }
}

/// A record as the client delivers it.
#[derive(Debug, Clone, Copy)]
pub struct RawRecord<'a> {
    /// Where it is.
    pub place: Place<'a>,
    /// The Kafka topic or the NATS subject.
    pub topic: &'a str,
    /// The key of a Kafka record.
    pub key: Option<&'a [u8]>,
    /// Names and values of the headers, in their order. A null value is empty.
    pub headers: &'a [(&'a str, &'a [u8])],
    /// The value of a Kafka record, or the payload of a NATS message.
    pub value: Option<&'a [u8]>,
    /// The timestamp of the record, in ms since 1970; 0 for none.
    pub time_ms: u64,
}

/// What a record is.
#[derive(Debug)]
pub enum Decoded {
    /// An event.
    Event(Event),
    /// Not an event.
    Invalid(InvalidEntry),
    /// A null value without attributes: it deletes a key in a compacted topic of Kafka.
    Tombstone,
}

/// Reads a record. Removes the attributes `reserved` from the event: pipelines set them on their own
/// events.
#[must_use]
pub fn decode(
    record: &RawRecord<'_>,
    binding: Binding,
    mapping: &Mapping,
    reserved: &[&str],
) -> Decoded {
    match read(record, binding, mapping) {
        Ok(Some(event)) => {
            let plain = |event: Event, name: &&str| event.with_extension(name, None);
            Decoded::Event(reserved.iter().fold(event, plain))
        }
        Ok(None) => Decoded::Tombstone,
        Err(error) => Decoded::Invalid(InvalidEntry { error, raw: raw(record) }),
    }
}

fn read(
    record: &RawRecord<'_>,
    binding: Binding,
    mapping: &Mapping,
) -> Result<Option<Event>, EntryError> {
    let found = Found::of(record, binding)?;
    let value = record.value.unwrap_or_default();
    if value.len() > EVENT_MAX_BYTES {
        return Err(EventError::TooLarge { bytes: value.len() }.into());
    }
    let is_structured = found.is_structured()?;
    let attributes = match (record.value, mapping.bot.is_some()) {
        // An event without data has a null value in binary mode.
        (None, _) if is_structured || !found.has_attributes => return Ok(None),
        _ if is_structured => Attributes::from_json(value)?,
        _ if found.has_attributes => binary(record, binding, &found)?,
        // The tenant may have written the value: it must not choose the bot.
        (_, true) => plain(record, binding, &found, mapping)?,
        (_, false) => bare(value, &found, binding)?,
    };
    finish(attributes, record, binding, &found, mapping).map(Some)
}

/// The attributes in the headers, and the data in the value.
fn binary(
    record: &RawRecord<'_>,
    binding: Binding,
    found: &Found<'_>,
) -> Result<Attributes, EntryError> {
    let mut attributes = Attributes::default();
    let mut declared = None;
    for (header, value) in record.headers {
        let Some(name) = binding.attribute(header) else { continue };
        if matches!(&*name, "" | "data" | "data_base64") {
            let why = "it is not an attribute, and the value of the record is the data; remove it";
            return Err(unusable(header, why.to_owned()));
        }
        if value.len() > EVENT_MAX_BYTES {
            let why =
                format!("it has {} bytes; at most {EVENT_MAX_BYTES} are allowed", value.len());
            return Err(unusable(header, why));
        }
        let text = binding.text(value).map_err(|why| unusable(header, why))?;
        if name == DATA_TYPE {
            if declared.replace(Cow::Owned(text)).is_some() {
                return Err(unusable(header, "it is given twice".to_owned()));
            }
        } else {
            attributes.add(&name, text).map_err(|error| match error {
                EventError::Attribute { name, why } if name != "extensions" => {
                    unusable(&format!("{}{name}", binding.prefix()), why)
                }
                error => error.into(),
            })?;
        }
    }
    // The one that the binding demands comes first.
    let content_type = found.content_type.clone();
    let content_type = match binding {
        Binding::Kafka => content_type.or(declared),
        Binding::Nats => declared.or(content_type),
    };
    data::add(&mut attributes, content_type.as_deref(), record.value)?;
    Ok(attributes)
}

/// A record that is not a CloudEvent.
fn plain(
    record: &RawRecord<'_>,
    binding: Binding,
    found: &Found<'_>,
    mapping: &Mapping,
) -> Result<Attributes, EntryError> {
    let mut attributes = Attributes::default();
    let time = match i64::try_from(record.time_ms) {
        Ok(0) | Err(_) => None,
        Ok(ms) => Timestamp::from_millisecond(ms).ok(),
    };
    // A topic that is made anew has old offsets again. With the time their events are new.
    let id = match &time {
        Some(time) => format!("{}@{}", record.place, time.as_millisecond()),
        None => record.place.to_string(),
    };
    attributes.add("specversion", "1.0".to_owned())?;
    attributes.add("id", id)?;
    attributes.add("source", format!("{}:{}", mapping.name, record.topic))?;
    attributes.add("type", mapping.kind.read(record, binding)?)?;
    if let Some(time) = time {
        attributes.add("time", time.to_string())?;
    }
    data::add(&mut attributes, found.content_type.as_deref(), record.value)?;
    Ok(attributes)
}

/// A structured event without content type: clients without headers send it.
fn bare(value: &[u8], found: &Found<'_>, binding: Binding) -> Result<Attributes, EntryError> {
    let plain = |why: String| EntryError::Plain { why };
    if let Some(other) = found.content_type.as_deref().filter(|found| !header::is_json(found)) {
        let (other, prefix) = (header::cut(other), binding.prefix());
        return Err(plain(format!(
            "its content type is {other:?}, and it has no header {prefix}…"
        )));
    }
    let prefix = binding.prefix();
    let no_json = |error| plain(format!("it has no header {prefix}…, and its value is {error}"));
    let mut attributes = Attributes::from_json(value).map_err(no_json)?;
    if attributes.has("specversion") {
        return Ok(attributes);
    }
    Err(plain(format!("it has no header {prefix}…, and no \"specversion\" in its value")))
}

fn finish(
    mut attributes: Attributes,
    record: &RawRecord<'_>,
    binding: Binding,
    found: &Found<'_>,
    mapping: &Mapping,
) -> Result<Event, EntryError> {
    let mut from = None;
    if !attributes.has("botid") {
        let Some(bot) = &mapping.bot else {
            let why = "the event has no attribute \"botid\"; add it, or set `bot` of the source in [[bus.sources]]";
            return Err(EntryError::Mapping { attribute: "botid", why: why.to_owned() });
        };
        attributes.add("botid", bot.read(record, binding)?)?;
        from = Some(bot);
    }
    trace(&mut attributes, found)?;
    attributes.into_event().map_err(|error| match (error, from) {
        (EventError::BotId(error), Some(from)) => {
            let why =
                format!("`bot` of the source is \"{from}\", but this value is not usable: {error}");
            EntryError::Mapping { attribute: "botid", why }
        }
        (error, _) => error.into(),
    })
}

/// Adds the trace context that the client of the producer put in headers, if the event has none.
fn trace(attributes: &mut Attributes, found: &Found<'_>) -> Result<(), EntryError> {
    let Some(parent) = found.parent else { return Ok(()) };
    let is_own = [PARENT, STATE].iter().any(|name| attributes.has(name));
    if is_own || !attributes.has_room_for(2) {
        return Ok(());
    }
    if let Some(context) = TraceContext::parse(parent, found.state) {
        attributes.add(PARENT, parent.to_owned())?;
        if let Some(state) = context.state() {
            attributes.add(STATE, state.to_owned())?;
        }
    }
    Ok(())
}

/// An unreadable record for an operator: topic, key and headers as text, then the value as it is.
fn raw(record: &RawRecord<'_>) -> Vec<u8> {
    let mut text = String::new();
    let mut line = |name: &dyn fmt::Display, value: &[u8]| {
        let shown = String::from_utf8_lossy(&value[..value.len().min(RAW_TEXT_BYTES)]);
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name}: {shown:?}");
        text.len() < RAW_HEADERS_BYTES
    };
    line(&"topic", record.topic.as_bytes());
    if let Some(key) = record.key {
        line(&"key", key);
    }
    for (name, value) in record.headers {
        let name: String = header::cut(name).escape_debug().collect();
        if !line(&name, value) {
            line(&"…", b"more headers");
            break;
        }
    }
    text.push('\n');
    let mut raw = text.into_bytes();
    let value = record.value.unwrap_or_default();
    raw.extend_from_slice(&value[..value.len().min(RAW_MAX_BYTES.saturating_sub(raw.len()))]);
    raw
}

#[cfg(test)]
mod tests;
