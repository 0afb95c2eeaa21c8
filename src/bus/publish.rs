//! Publishing events to the bus.

use redis::{Pipeline, Value};

use crate::id::Offset;
use crate::redis::{Link, RedisError, ReplyError};

/// Adds events, as JSON, to a bus stream: all of them or none. Returns their offsets.
///
/// # Errors
/// After [`RedisError::Unknown`] the events may or may not have been added. A key that is not a
/// stream is refused.
///
/// # Cancel safety
/// After the future is dropped, the events may or may not be added.
pub(crate) async fn publish(
    link: &Link,
    stream: &str,
    events: &[impl AsRef<[u8]>],
) -> Result<Vec<Offset>, RedisError> {
    if events.is_empty() {
        return Ok(Vec::new());
    }
    let mut pipe = Pipeline::with_capacity(events.len() + 2);
    // A transaction: a full server refuses all of it, so the accepted events are always a prefix of
    // the input, and publishing can be resumed.
    pipe.cmd("MULTI");
    for event in events {
        pipe.cmd("XADD").arg(stream).arg("*").arg("event").arg(event.as_ref());
    }
    pipe.cmd("EXEC");
    let misread = |found: String| link.misread("EXEC", ReplyError::unexpected("the ids", &found));
    match link.run_lasting("XADD", &pipe).await?.pop() {
        Some(Value::Array(added)) => {
            if let Some(error) = added.iter().find_map(server_error) {
                return Err(link.refused("XADD", error));
            }
            let offsets: Option<Vec<_>> = added.iter().map(offset).collect();
            offsets.ok_or_else(|| misread("another id".to_owned()))
        }
        other => Err(misread(format!("{other:?}"))),
    }
}

fn offset(added: &Value) -> Option<Offset> {
    let Value::BulkString(offset) = added else { return None };
    std::str::from_utf8(offset).ok()?.parse().ok()
}

fn server_error(value: &Value) -> Option<&redis::ServerError> {
    match value {
        Value::ServerError(error) => Some(error),
        _ => None,
    }
}
