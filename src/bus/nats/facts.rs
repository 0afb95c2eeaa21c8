//! What `JetStream` tells about a stream.

use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::stream::{Config, RetentionPolicy};
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::json;

use super::link::{Connected, Link};
use super::settings::NatsSettings;
use crate::bus::BusError;

/// A stream: its settings and its extent.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Facts {
    pub(super) config: Config,
    created: Timestamp,
    pub(super) state: State,
}

#[derive(Debug, Clone, Deserialize)]
pub(super) struct State {
    pub(super) messages: u64,
    pub(super) bytes: u64,
    first_seq: u64,
    first_ts: Timestamp,
    pub(super) last_seq: u64,
    pub(super) consumer_count: u64,
}

impl Facts {
    /// `None` if the stream does not exist.
    pub(super) async fn of(connected: &Connected, link: &Link) -> Result<Option<Self>, BusError> {
        let name = format!("STREAM.INFO.{}", link.settings.stream);
        match connected.ask(&name, &json!({})).await? {
            Ok(facts) => Ok(Some(facts)),
            Err(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND => Ok(None),
            Err(error) => Err(link.refused(format!("{name}: {error}"))),
        }
    }

    /// When the stream was made, ms since 1970.
    pub(super) fn created(&self) -> u64 {
        u64::try_from(self.created.as_millisecond()).unwrap_or_default()
    }

    /// The sequence of the first message, or the next one if there is none.
    pub(super) fn first(&self) -> u64 {
        if self.state.messages == 0 { self.state.last_seq + 1 } else { self.state.first_seq }
    }

    /// When the first message was added, ms since 1970. Zero or less without any.
    pub(super) fn first_ms(&self) -> i64 {
        self.state.first_ts.as_millisecond()
    }

    /// Messages below this sequence never existed.
    pub(super) fn base(&self) -> u64 {
        self.config.first_sequence.unwrap_or(1).max(1)
    }

    /// Refuses streams that delete messages by acknowledgements.
    pub(super) fn check(&self, link: &Link) -> Result<(), BusError> {
        let retention = match self.config.retention {
            RetentionPolicy::Limits => return Ok(()),
            RetentionPolicy::Interest => "interest",
            RetentionPolicy::WorkQueue => "workqueue",
        };
        let NatsSettings { name, stream, .. } = &*link.settings;
        Err(link.refused(format_args!(
            "the stream {stream:?} has the retention \"{retention}\", which deletes messages that \
             consumers have acknowledged; Fairlane acknowledges none, so the source {name:?} needs \
             a stream with the retention \"limits\""
        )))
    }
}

/// The stream must exist for this call.
pub(super) fn missing(link: &Link) -> String {
    let NatsSettings { name, stream, .. } = &*link.settings;
    format!(
        "the stream {stream:?} does not exist; make it, or correct `stream` of the source {name:?}"
    )
}
