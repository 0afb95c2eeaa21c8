//! Putting events on the bus.

use redis::{Pipeline, Value};

use crate::keyspace::{Link, ReplyError, StoreError};

/// Adds events, as JSON, to a bus stream: all of them or none.
///
/// # Errors
/// With [`StoreError::Unknown`] it is unknown whether they were added. A stream that is none is
/// refused.
///
/// # Cancel safety
/// Dropping the future leaves open whether they are added.
pub(crate) async fn publish(
    link: &Link,
    stream: &str,
    events: &[impl AsRef<[u8]>],
) -> Result<(), StoreError> {
    if events.is_empty() {
        return Ok(());
    }
    let mut pipe = Pipeline::with_capacity(events.len() + 2);
    // A transaction: a server whose memory is full refuses all, so that what was accepted is
    // always a beginning and can be continued.
    pipe.cmd("MULTI");
    for event in events {
        pipe.cmd("XADD").arg(stream).arg("*").arg("event").arg(event.as_ref());
    }
    pipe.cmd("EXEC");
    match link.run_checked("XADD", &pipe).await?.pop() {
        Some(Value::Array(added)) => match added.iter().find_map(server_error) {
            Some(error) => Err(link.refused("XADD", error)),
            None => Ok(()),
        },
        other => {
            let found = format!("{other:?}");
            Err(link.misread("EXEC", ReplyError::unexpected("the ids", &found)))
        }
    }
}

fn server_error(value: &Value) -> Option<&redis::ServerError> {
    match value {
        Value::ServerError(error) => Some(error),
        _ => None,
    }
}
