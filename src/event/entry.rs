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
pub enum EntryError {
    /// It has neither of the two fields.
    #[error("the entry has no field `event` (JSON) or `msgpack` (MessagePack)")]
    Field,
    /// The field does not contain a valid event.
    #[error(transparent)]
    Event(#[from] EventError),
}

impl EntryError {
    /// The metric label `reason`.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::Field => "field",
            Self::Event(error) => error.label(),
        }
    }
}
