//! The event: one CloudEvents 1.0 event with the extension attribute `botid`, and its three wire
//! forms: JSON and `MessagePack` on the bus, a versioned `MessagePack` record in the queues.
//!
//! A record is `[version, sequence, event]`. The script that queues the event writes the first two
//! (`lua/shared.lua`), [`Event::encode`] writes the third. `data` is kept as JSON text and parsed
//! only when it is read.

mod attributes;
mod builder;
pub mod entry;
mod glimpse;
mod values;
mod wire;

use std::collections::BTreeMap;
use std::marker::PhantomData;

use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::ser::SerializeMap;
use serde::{Deserialize as _, Serialize, Serializer};
use serde_json::value::RawValue;

pub(crate) use self::attributes::Attributes;
use self::attributes::{ESCAPE_BYTES, check_size_as_json};
pub use self::builder::EventBuilder;
pub use self::glimpse::Glimpse;
use self::values::JsonText;
use self::wire::{Fields, Wire};
use crate::id::{BotId, IdError, Sequence};

/// Maximum size of an event, in bytes of any wire form.
pub const EVENT_MAX_BYTES: usize = 1 << 20;
/// Maximum length of `id`, `source`, `type`, `subject` or the name of an extension, in bytes.
pub const ATTRIBUTE_MAX_BYTES: usize = 1_024;
/// Maximum number of extension attributes in addition to those that Fairlane knows.
pub const EXTENSIONS_MAX: usize = 64;
/// Maximum number of values in all extension attributes of an event together. Each text and number counts,
/// and so does each array and object.
pub const EXTENSION_VALUES_MAX: usize = 1_000;
/// Maximum nesting of `data` and of each extension attribute: arrays and objects inside each other.
/// With the levels that a push puts around an event, common parsers still read it: they stop at 128.
pub const NESTING_MAX: usize = 100;
/// The version of the queue record that this crate writes. It reads all versions up to this.
pub const RECORD_VERSION: u8 = 1;

/// Why bytes are not an event.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EventError {
    /// Larger than [`EVENT_MAX_BYTES`].
    #[error("the event has {bytes} bytes; at most {EVENT_MAX_BYTES} are allowed")]
    TooLarge {
        /// Its size.
        bytes: usize,
    },
    /// Not JSON, or an attribute of the wrong type.
    #[error("not a CloudEvent in JSON: {0}")]
    Json(#[source] serde_json::Error),
    /// Not `MessagePack`, or an attribute of the wrong type.
    #[error("not a CloudEvent in MessagePack: {0}")]
    MessagePack(#[source] rmp_serde::decode::Error),
    /// A required attribute is missing.
    #[error("the required attribute {name:?} is missing")]
    Missing {
        /// Its name.
        name: &'static str,
    },
    /// An attribute has an invalid value.
    #[error("the attribute {name:?} is not usable: {why}")]
    Attribute {
        /// Its name.
        name: String,
        /// What is wrong and what is allowed.
        why: String,
    },
    /// `botid` is not a bot id.
    #[error("the attribute \"botid\" is not usable: {0}")]
    BotId(#[from] IdError),
    /// A queue record of a newer version, or a damaged one.
    #[error("not a queue record of a version up to {RECORD_VERSION}")]
    Record(#[source] Option<rmp_serde::decode::Error>),
}

impl EventError {
    /// The invalid attribute, if it is a single one.
    #[must_use]
    pub fn attribute(&self) -> Option<String> {
        match self {
            Self::Missing { name } => Some((*name).to_owned()),
            Self::Attribute { name, .. } => Some(name.clone()),
            Self::BotId(_) => Some("botid".to_owned()),
            // The visitor below puts the name in front.
            Self::Json(error) => error.to_string().strip_prefix('"').and_then(|text| {
                let name = text.split('"').next().unwrap_or_default();
                (!name.is_empty()).then(|| name.to_owned())
            }),
            Self::TooLarge { .. } | Self::MessagePack(_) | Self::Record(_) => None,
        }
    }

    /// The value of the metric label `reason`.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::TooLarge { .. } => "size",
            Self::Json(_) => "json",
            Self::MessagePack(_) => "msgpack",
            Self::Missing { .. } | Self::Attribute { .. } => "attribute",
            Self::BotId(_) => "botid",
            Self::Record(_) => "record",
        }
    }
}

/// One CloudEvents 1.0 event of one bot.
///
/// Built by [`Event::from_json`], [`Event::from_msgpack`] or [`EventBuilder`]; all three check the
/// same bounds.
#[derive(Debug, Clone)]
pub struct Event {
    id: Box<str>,
    source: Box<str>,
    kind: Box<str>,
    bot: BotId,
    subject: Option<Box<str>>,
    time: Option<Box<str>>,
    expirytime: Option<Box<str>>,
    data: Option<Box<RawValue>>,
    /// All other attributes, including `traceparent`.
    extensions: BTreeMap<String, serde_json::Value>,
}

impl Event {
    /// Starts a new event with a fresh UUID v7 as `id` and `fairlane` as `source`.
    #[must_use]
    pub fn builder(kind: impl Into<String>, bot: &BotId) -> EventBuilder {
        EventBuilder::new(kind.into(), bot)
    }

    /// Reads a structured CloudEvent in JSON.
    ///
    /// # Errors
    /// If the text is not JSON, lacks a required attribute or exceeds a bound.
    pub fn from_json(bytes: &[u8]) -> Result<Self, EventError> {
        check_size(bytes)?;
        serde_json::from_slice::<Wire<Box<RawValue>>>(bytes)
            .map_err(EventError::Json)?
            .0
            .into_event()
    }

    /// Reads the structured CloudEvent in JSON at the start of `bytes`. Also returns its length.
    pub(crate) fn from_json_prefix(bytes: &[u8]) -> Result<(Self, usize), EventError> {
        let mut values =
            serde_json::Deserializer::from_slice(bytes).into_iter::<Wire<Box<RawValue>>>();
        let wire = values.next().unwrap_or_else(|| Ok(Wire(Fields::default(), PhantomData)));
        let fields = wire.map_err(EventError::Json)?.0;
        let taken = values.byte_offset();
        check_size(&bytes[..taken])?;
        Ok((fields.into_event()?, taken))
    }

    /// Reads the same map as `MessagePack`.
    ///
    /// # Errors
    /// If the bytes are not `MessagePack`, lack a required attribute or exceed a bound.
    pub fn from_msgpack(bytes: &[u8]) -> Result<Self, EventError> {
        check_size(bytes)?;
        let mut packed = rmp_serde::Deserializer::from_read_ref(bytes);
        // Deep values must not take the stack before the nesting of each attribute is checked.
        packed.set_max_depth(NESTING_MAX + 16);
        let event = Wire::<JsonText>::deserialize(&mut packed)
            .map_err(EventError::MessagePack)?
            .0
            .into_event()?;
        // No byte of MessagePack takes more in JSON than one of a text.
        if bytes.len() * ESCAPE_BYTES > EVENT_MAX_BYTES {
            check_size_as_json(&event)?;
        }
        Ok(event)
    }

    /// Unique together with [`Self::source`].
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The producer of the event.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The attribute `type`, for example `tag.applied`.
    #[must_use]
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// The tenant.
    #[must_use]
    pub fn bot(&self) -> &BotId {
        &self.bot
    }

    /// The subscriber that the event is about.
    #[must_use]
    pub fn subject(&self) -> Option<&str> {
        self.subject.as_deref()
    }

    /// When it happened, as the producer wrote it (RFC 3339).
    #[must_use]
    pub fn time(&self) -> Option<&str> {
        self.time.as_deref()
    }

    /// After this time the event is not handled any more.
    #[must_use]
    pub fn expirytime(&self) -> Option<Timestamp> {
        // The text was parsed once when the event was built.
        self.expirytime.as_deref().and_then(|text| wire::instant(text).ok())
    }

    /// As the producer wrote it, see [`Self::expirytime`].
    pub(crate) fn expirytime_text(&self) -> Option<&str> {
        self.expirytime.as_deref()
    }

    /// `data` as JSON text.
    #[must_use]
    pub fn data(&self) -> Option<&str> {
        self.data.as_deref().map(RawValue::get)
    }

    /// `data` parsed; missing data reads as `null`.
    ///
    /// # Errors
    /// If the data does not have the structure of `T`.
    pub fn data_as<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        serde_json::from_str(self.data().unwrap_or("null"))
    }

    /// An extension attribute, or one of the optional attributes that Fairlane does not use
    /// itself (`datacontenttype`, `dataschema`, `traceparent`).
    #[must_use]
    pub fn extension(&self, name: &str) -> Option<&serde_json::Value> {
        self.extensions.get(name)
    }

    /// Number of its extension attributes.
    pub(crate) fn extensions(&self) -> usize {
        self.extensions.len()
    }

    /// Whether so many more extension attributes of one value each may be added.
    pub(crate) fn has_room_for(&self, more: usize) -> bool {
        wire::has_room(&self.extensions, more)
    }

    /// Its extension attributes, see [`Self::extension`].
    pub(crate) fn extension_attributes(&self) -> &BTreeMap<String, serde_json::Value> {
        &self.extensions
    }

    /// The same event with this extension attribute, or with `None` without it.
    #[must_use]
    pub(crate) fn with_extension(mut self, name: &str, value: Option<serde_json::Value>) -> Self {
        match value {
            Some(value) => drop(self.extensions.insert(name.to_owned(), value)),
            None => drop(self.extensions.remove(name)),
        }
        self
    }

    /// The same event without an expiry time.
    #[must_use]
    pub(crate) fn without_expirytime(self) -> Self {
        Self { expirytime: None, ..self }
    }

    /// The event part of a queue record.
    ///
    /// # Panics
    /// Never: texts and JSON values always encode.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let stored = (
            &*self.id,
            &*self.source,
            &*self.kind,
            self.subject(),
            self.time(),
            self.expirytime.as_deref(),
            self.data(),
            (!self.extensions.is_empty()).then_some(&self.extensions),
        );
        let mut bytes = Vec::with_capacity(64 + self.id.len() + self.data().map_or(0, str::len));
        rmp_serde::encode::write(&mut bytes, &stored)
            .expect("a Vec takes every byte, and strings, options and JSON values always encode");
        bytes
    }

    /// The queue record of an encoded event: as the scripts write it.
    pub(crate) fn record(sequence: u64, encoded: &[u8]) -> Vec<u8> {
        let mut record = Vec::with_capacity(11 + encoded.len());
        record.extend([0x93, RECORD_VERSION, 0xcf]);
        record.extend(sequence.to_be_bytes());
        record.extend(encoded);
        record
    }

    /// Reads a queue record of `bot`.
    ///
    /// # Errors
    /// If the record is damaged or of a newer version.
    pub fn decode(record: &[u8], bot: &BotId) -> Result<(Sequence, Self), EventError> {
        type Stored<'a> = (
            &'a str,
            &'a str,
            &'a str,
            Option<&'a str>,
            Option<&'a str>,
            Option<&'a str>,
            Option<&'a str>,
            Option<BTreeMap<String, serde_json::Value>>,
        );
        if record.get(1) != Some(&RECORD_VERSION) {
            return Err(EventError::Record(None));
        }
        let (_, sequence, stored): (u8, u64, Stored<'_>) =
            rmp_serde::from_slice(record).map_err(|source| EventError::Record(Some(source)))?;
        let (id, source, kind, subject, time, expirytime, data, extensions) = stored;
        let data = data
            .map(|text| RawValue::from_string(text.to_owned()))
            .transpose()
            .map_err(|_| EventError::Record(None))?;
        let event = Self {
            id: id.into(),
            source: source.into(),
            kind: kind.into(),
            bot: bot.clone(),
            subject: subject.map(Into::into),
            time: time.map(Into::into),
            expirytime: expirytime.map(Into::into),
            data,
            extensions: extensions.unwrap_or_default(),
        };
        Ok((Sequence::new(sequence), event))
    }

    /// The sequence of a queue record, without reading the rest. `None` if the bytes are not a
    /// record.
    #[must_use]
    pub fn sequence_of(record: &[u8]) -> Option<Sequence> {
        match record {
            [0x93, _, 0xcf, rest @ ..] => {
                Some(Sequence::new(u64::from_be_bytes(*rest.first_chunk()?)))
            }
            _ => None,
        }
    }
}

impl utoipa::PartialSchema for Event {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
        use utoipa::openapi::schema::{Object, Type};
        let texts = [
            ("specversion", "Always \"1.0\""),
            ("id", "Unique together with `source`"),
            ("source", "Who produced it"),
            ("type", "What happened, for example `tag.applied`"),
            ("botid", "The tenant"),
            ("subject", "The subscriber"),
            ("time", "When it happened, RFC 3339"),
            ("expirytime", "Not handled after it, RFC 3339"),
        ];
        let mut schema = utoipa::openapi::ObjectBuilder::new()
            .description(Some("A CloudEvents 1.0 event with the extension attribute `botid`"));
        for (name, description) in texts {
            let mut text = Object::with_type(Type::String);
            text.description = Some(description.to_owned());
            schema = schema.property(name, text);
        }
        for name in ["specversion", "id", "source", "type", "botid"] {
            schema = schema.required(name);
        }
        schema.property("data", utoipa::openapi::schema::empty()).into()
    }
}

impl utoipa::ToSchema for Event {}

/// Structured CloudEvents JSON.
impl Serialize for Event {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("specversion", "1.0")?;
        map.serialize_entry("id", &self.id)?;
        map.serialize_entry("source", &self.source)?;
        map.serialize_entry("type", &self.kind)?;
        map.serialize_entry("botid", &self.bot)?;
        let optional =
            [("subject", &self.subject), ("time", &self.time), ("expirytime", &self.expirytime)];
        for (name, value) in optional {
            if let Some(value) = value {
                map.serialize_entry(name, value)?;
            }
        }
        for (name, value) in &self.extensions {
            map.serialize_entry(name, value)?;
        }
        if let Some(data) = &self.data {
            map.serialize_entry("data", data)?;
        }
        map.end()
    }
}

fn check_size(bytes: &[u8]) -> Result<(), EventError> {
    if bytes.len() > EVENT_MAX_BYTES {
        return Err(EventError::TooLarge { bytes: bytes.len() });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
