//! An entry of the bus: an event, or something that cannot be read as one.

use super::{Event, EventError};
use crate::id::Offset;

/// One entry of a bus stream.
#[derive(Debug)]
pub struct Entry {
    /// Its position in the stream.
    pub offset: Offset,
    /// The event, or why it cannot be read.
    pub event: Result<Event, InvalidEntry>,
}

/// An entry that is not an event.
#[derive(Debug)]
pub struct InvalidEntry {
    /// The reason.
    pub error: EntryError,
    /// The content of the entry, cut to 64 KiB.
    pub raw: Vec<u8>,
}

/// Why an entry is not an event.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EntryError {
    /// It has neither of the two fields.
    #[error("the entry has no field `event` (JSON) or `msgpack` (MessagePack)")]
    Field,
    /// The field does not contain a valid event.
    #[error(transparent)]
    Event(#[from] EventError),
    /// A record with an unusable header.
    #[error("the header {name:?} is not usable: {why}")]
    Header {
        /// Its name, cut to 64 characters.
        name: String,
        /// What is wrong and what is allowed.
        why: String,
    },
    /// A record with more headers than are read.
    #[error("the record has {count} headers; at most {max} are allowed")]
    Headers {
        /// Their number.
        count: usize,
        /// The bound.
        max: usize,
    },
    /// A record in an event format that is not supported.
    #[error(
        "the content type {found:?} is not supported; send one event per record, as \"application/cloudevents+json\" or with the attributes in headers"
    )]
    Format {
        /// The media type, cut to 64 characters.
        found: String,
    },
    /// The value of a record is not what its content type says.
    #[error("the value is not JSON, but the content type {found:?} says so: {why}")]
    Data {
        /// The content type, cut to 64 characters.
        found: String,
        /// The error of the parser.
        why: String,
    },
    /// A record that is not a CloudEvent, from a source that reads only these.
    #[error(
        "the record is not a CloudEvent: {why}; send CloudEvents, or set `bot` of the source in [[bus.sources]] to read plain records"
    )]
    Plain {
        /// What is missing.
        why: String,
    },
    /// A record without the value that a setting of the source names.
    #[error("the record gives no {attribute}: {why}")]
    Mapping {
        /// The attribute: `botid` or `type`.
        attribute: &'static str,
        /// The setting, and what the record lacks.
        why: String,
    },
}

impl EntryError {
    /// The metric label `reason`.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::Field => "field",
            Self::Event(error) => error.label(),
            Self::Header { .. } | Self::Headers { .. } => "header",
            Self::Format { .. } => "format",
            Self::Data { .. } => "data",
            Self::Plain { .. } => "plain",
            Self::Mapping { .. } => "mapping",
        }
    }
}
