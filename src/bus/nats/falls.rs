//! Where the falls of a stream are stored, see [`super::incarnation`]: as metadata of a durable
//! consumer that nobody uses. It lives and dies with the stream, it is in its backups, and whoever
//! may read a stream may make one. A stream with the retention `limits` keeps no message for it.

use std::collections::BTreeMap;

use async_nats::jetstream::ErrorCode;
use serde::Deserialize;
use serde_json::json;

use super::incarnation::{Fall, Incarnations};
use super::link::{Connected, Link};
use crate::bus::BusError;

/// The consumer.
pub(super) const CONSUMER: &str = "fairlane-falls";
/// The key in its metadata: `NUMBER:AFTER`, separated by spaces.
const KEY: &str = "fairlane-falls";
const DESCRIPTION: &str =
    "Fairlane stores here where this stream lost its last messages. Do not delete it.";

#[derive(Debug, Deserialize)]
struct Stored {
    config: Config,
}

#[derive(Debug, Deserialize)]
struct Config {
    #[serde(default)]
    metadata: BTreeMap<String, String>,
}

/// Reads the falls of a stream that was made at `created`, in ms since 1970.
pub(super) async fn read(
    connected: &Connected,
    link: &Link,
    created: u64,
) -> Result<Incarnations, BusError> {
    let name = format!("CONSUMER.INFO.{}.{CONSUMER}", link.settings.stream);
    let stored: Stored = match connected.ask(&name, &json!({})).await? {
        Ok(stored) => stored,
        Err(error) if is_missing(error.error_code()) => return Ok(Incarnations::new(created, [])),
        Err(error) => return Err(link.refused(format!("{name}: {error}"))),
    };
    let text = stored.config.metadata.get(KEY).map_or("", String::as_str);
    let falls: Option<Vec<Fall>> = text.split_whitespace().map(parse).collect();
    let falls = falls.ok_or_else(|| {
        link.refused(format_args!("the consumer {CONSUMER} has the metadata {text:?}; delete it"))
    })?;
    Ok(Incarnations::new(created, falls))
}

/// Stores all falls.
pub(super) async fn write(
    connected: &Connected,
    link: &Link,
    stream: &Incarnations,
) -> Result<(), BusError> {
    let falls: Vec<_> =
        stream.falls().iter().map(|fall| format!("{}:{}", fall.number, fall.after)).collect();
    let name = format!("CONSUMER.CREATE.{}.{CONSUMER}", link.settings.stream);
    let body = json!({
        "stream_name": link.settings.stream,
        "config": {
            "durable_name": CONSUMER,
            "name": CONSUMER,
            "description": DESCRIPTION,
            "deliver_policy": "new",
            "ack_policy": "none",
            "replay_policy": "instant",
            "metadata": { KEY: falls.join(" ") },
        },
    });
    connected.get::<serde::de::IgnoredAny>(&name, &body).await.map(drop)
}

pub(super) fn is_missing(code: ErrorCode) -> bool {
    matches!(code, ErrorCode::CONSUMER_NOT_FOUND | ErrorCode::STREAM_NOT_FOUND)
}

fn parse(text: &str) -> Option<Fall> {
    let (number, after) = text.split_once(':')?;
    Some(Fall { number: number.parse().ok()?, after: after.parse().ok()? })
}
