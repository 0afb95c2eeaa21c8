//! An event that is put together from attributes that come one by one, for example from headers.

use std::io;
use std::marker::PhantomData;

use serde_json::Value;
use serde_json::value::RawValue;

use super::wire::{Fields, Wire, attribute, check_count, has_room};
use super::{EVENT_MAX_BYTES, Event, EventError, check_size};

/// The JSON form of a character has at most so many bytes for each of its bytes.
pub(super) const ESCAPE_BYTES: usize = 6;

/// Attributes before their bounds are checked.
#[derive(Debug, Default)]
pub(crate) struct Attributes {
    fields: Fields,
    /// An upper bound of the size as JSON, in bytes.
    bytes: usize,
}

impl Attributes {
    /// Reads a structured CloudEvent in JSON, which may lack attributes.
    ///
    /// # Errors
    /// If the text is too large, is not JSON, or an attribute has the wrong type.
    pub(crate) fn from_json(json: &[u8]) -> Result<Self, EventError> {
        check_size(json)?;
        let Wire::<Box<RawValue>>(fields, PhantomData) =
            serde_json::from_slice(json).map_err(EventError::Json)?;
        Ok(Self { fields, bytes: json.len() })
    }

    /// Whether there is an attribute of this name.
    pub(crate) fn has(&mut self, name: &str) -> bool {
        match self.fields.slot(name) {
            Some(slot) => slot.is_some(),
            None => self.fields.extensions.contains_key(name),
        }
    }

    /// Whether so many more extension attributes of one value each may be added.
    pub(crate) fn has_room_for(&self, more: usize) -> bool {
        has_room(&self.fields.extensions, more)
    }

    /// Adds an attribute.
    ///
    /// # Errors
    /// If it is there already, or if there are too many.
    pub(crate) fn add(&mut self, name: &str, value: String) -> Result<(), EventError> {
        self.bytes = self.bytes.saturating_add(ESCAPE_BYTES * (name.len() + value.len() + 1));
        let is_new = if let Some(slot) = self.fields.slot(name) {
            slot.replace(value).is_none()
        } else {
            let value = Value::String(value);
            self.fields.extensions.insert(name.to_owned(), value).is_none()
        };
        if is_new {
            return check_count(self.fields.extensions.len());
        }
        let name: String = name.chars().take(32).collect();
        Err(attribute(name, "it is given twice".to_owned()))
    }

    /// Sets the data.
    pub(crate) fn set_data(&mut self, data: Box<RawValue>) {
        self.bytes = self.bytes.saturating_add(data.get().len() + 16);
        self.fields.data = Some(data);
    }

    /// Checks every bound.
    ///
    /// # Errors
    /// If a required attribute is missing or a bound is exceeded.
    pub(crate) fn into_event(self) -> Result<Event, EventError> {
        let may_be_large = self.bytes > EVENT_MAX_BYTES;
        let event = self.fields.into_event()?;
        if may_be_large {
            check_size_as_json(&event)?;
        }
        Ok(event)
    }
}

/// Checks the size of an event that did not come as JSON.
pub(super) fn check_size_as_json(event: &Event) -> Result<(), EventError> {
    let mut size = Size(0);
    serde_json::to_writer(&mut size, event).map_err(EventError::Json)?;
    if size.0 > EVENT_MAX_BYTES {
        return Err(EventError::TooLarge { bytes: size.0 });
    }
    Ok(())
}

/// Counts the bytes that are written to it.
struct Size(usize);

impl io::Write for Size {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
