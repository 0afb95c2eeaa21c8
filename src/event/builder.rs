//! An event that is built in code.

use jiff::Timestamp;
use serde::Serialize;

use super::attributes::check_size_as_json;
use super::wire::{Fields, attribute, is_core};
use super::{EVENT_MAX_BYTES, Event, EventError};
use crate::id::BotId;

/// Builds an [`Event`] in code. [`EventBuilder::build`] checks the bounds.
#[derive(Debug)]
pub struct EventBuilder {
    fields: Fields,
}

impl EventBuilder {
    pub(super) fn new(kind: String, bot: &BotId) -> Self {
        Self {
            fields: Fields {
                id: Some(uuid::Uuid::now_v7().to_string()),
                source: Some("fairlane".to_owned()),
                kind: Some(kind),
                specversion: Some("1.0".to_owned()),
                botid: Some(bot.as_str().to_owned()),
                ..Fields::default()
            },
        }
    }

    /// Replaces the generated id.
    #[must_use]
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.fields.id = Some(id.into());
        self
    }

    /// Replaces the source.
    #[must_use]
    pub fn source(mut self, source: impl Into<String>) -> Self {
        self.fields.source = Some(source.into());
        self
    }

    /// Sets the subscriber.
    #[must_use]
    pub fn subject(mut self, subject: impl Into<String>) -> Self {
        self.fields.subject = Some(subject.into());
        self
    }

    /// Sets the time of the event.
    #[must_use]
    pub fn time(mut self, time: Timestamp) -> Self {
        self.fields.time = Some(time.to_string());
        self
    }

    /// Sets the time after which the event need not be handled.
    #[must_use]
    pub fn expirytime(mut self, time: Timestamp) -> Self {
        self.fields.expirytime = Some(time.to_string());
        self
    }

    /// The payload. `null` is no payload, as in JSON on the bus.
    ///
    /// # Errors
    /// If the value cannot be written as JSON.
    pub fn data(mut self, data: &impl Serialize) -> Result<Self, serde_json::Error> {
        let data = serde_json::value::to_raw_value(data)?;
        self.fields.data = Some(data).filter(|data| data.get() != "null");
        Ok(self)
    }

    /// An extension attribute. [`Self::build`] refuses `data` and the names of the attributes that are not
    /// extensions, such as `id`.
    #[must_use]
    pub fn extension(mut self, name: impl Into<String>, value: serde_json::Value) -> Self {
        self.fields.extensions.insert(name.into(), value);
        self
    }

    /// Checks every bound.
    ///
    /// # Errors
    /// If an attribute exceeds a bound, if the event is larger than [`EVENT_MAX_BYTES`], or if an extension
    /// attribute has a name that is taken.
    pub fn build(self) -> Result<Event, EventError> {
        if let Some(name) = self.fields.extensions.keys().find(|name| is_core(name)) {
            let why =
                "it is not an extension attribute: Event::builder or a method of its own sets it";
            return Err(attribute(name.as_str(), why.to_owned()));
        }
        let event = self.fields.into_event()?;
        // The texts have bounds of their own, and are far smaller together.
        let data = event.data().map_or(0, str::len);
        if data > EVENT_MAX_BYTES / 2 || event.extensions() > 0 {
            check_size_as_json(&event)?;
        }
        Ok(event)
    }
}
