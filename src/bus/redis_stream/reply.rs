//! The replies of Redis about a stream.

use redis::Value;

use super::Extent;
use crate::bus::{Entry, EntryError, InvalidEntry, RAW_MAX};
use crate::event::Event;
use crate::id::Offset;
use crate::redis::{Reply, ReplyError};

/// The offset of an entry; `None` if it cannot be read.
pub(super) fn offset_of(entry: &Value) -> Option<Offset> {
    let Value::Array(entry) = entry else { return None };
    let Value::BulkString(offset) = entry.first()? else { return None };
    std::str::from_utf8(offset).ok()?.parse().ok()
}

/// The entries of the one stream in the reply to `XREAD`.
pub(super) fn raw(value: Value) -> Result<Vec<Value>, ReplyError> {
    let mut streams = Reply::new(value)?;
    let Some(stream) = streams.next() else { return Ok(Vec::new()) };
    let mut stream = Reply::new(stream)?;
    stream.next();
    match stream.next() {
        Some(Value::Array(entries)) => Ok(entries),
        other => Err(ReplyError::unexpected("entries", &format!("{other:?}"))),
    }
}

/// Decodes entries, without the `reserved` attributes.
pub(super) fn entries(found: Vec<Value>, reserved: &[&str]) -> Result<Vec<Entry>, ReplyError> {
    let mut entries = Vec::with_capacity(found.len());
    for entry in found {
        let mut entry = Reply::new(entry)?;
        let offset = entry.parsed()?;
        let fields = Reply::new(entry.next().unwrap_or(Value::Nil))?;
        entries.push(Entry { offset, event: event(fields, reserved)? });
    }
    Ok(entries)
}

fn event(mut fields: Reply, reserved: &[&str]) -> Result<Result<Event, InvalidEntry>, ReplyError> {
    let mut raw = Vec::new();
    while fields.len() > 1 {
        let name = fields.bytes()?.unwrap_or_default();
        let value = fields.bytes()?.unwrap_or_default();
        let decoded = match &*name {
            b"event" => Event::from_json(&value),
            b"msgpack" => Event::from_msgpack(&value),
            _ => {
                raw.extend_from_slice(&name);
                raw.push(b'=');
                raw.extend_from_slice(&value[..value.len().min(RAW_MAX)]);
                raw.push(b' ');
                continue;
            }
        };
        let decoded = decoded.map(|event| {
            reserved.iter().fold(event, |event, name| event.with_extension(name, None))
        });
        return Ok(decoded.map_err(|error| InvalidEntry {
            error: error.into(),
            raw: value[..value.len().min(RAW_MAX)].to_vec(),
        }));
    }
    raw.truncate(RAW_MAX);
    Ok(Err(InvalidEntry { error: EntryError::Field, raw }))
}

/// The reply to `XINFO STREAM`.
pub(super) fn extent(value: Value) -> Result<Extent, ReplyError> {
    let mut fields = Reply::new(value)?;
    let mut extent = Extent::default();
    while fields.len() > 1 {
        match fields.text()?.as_str() {
            "length" => extent.length = fields.number()?,
            "last-generated-id" => extent.last = fields.parsed()?,
            "entries-added" => extent.added = fields.number()?,
            "first-entry" => {
                let mut first = Reply::new(fields.next().unwrap_or(Value::Nil))?;
                if first.len() > 0 {
                    extent.first = Some(first.parsed()?);
                }
            }
            _ => drop(fields.next()),
        }
    }
    Ok(extent)
}
