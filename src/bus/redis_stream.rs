//! The bus on Redis Streams. An entry has one field: `event` = the CloudEvent as JSON, or `msgpack`
//! = the same map as MessagePack.

use std::sync::Arc;
use std::time::Duration;

use redis::{Pipeline, Value};

use super::{Entry, EntryError, Extent, Fetched, InvalidEntry, Source};
use crate::clock::millis;
use crate::event::Event;
use crate::id::Offset;
use crate::redis::scripts::{Hold, Note, Trim};
use crate::redis::{Link, RedisError, Reply, ReplyError, keys};

/// Approximate number of unreadable entries that are kept.
const INVALID_MAX: usize = 10_000;
/// Maximum number of bytes kept of an unreadable entry.
const RAW_MAX: usize = 64 * 1_024;

/// One Redis stream.
#[derive(Debug)]
pub struct RedisStream {
    name: String,
    reader_key: String,
    read_key: String,
    /// The stream for unreadable entries.
    invalid: String,
    /// The id of this reader for the lock.
    token: String,
    /// Attributes that events of the bus must not have.
    reserved: Vec<&'static str>,
    /// The connection for blocking reads only.
    blocking: Arc<Link>,
    link: Arc<Link>,
}

impl RedisStream {
    /// Maximum wait of one read. The response timeout of `blocking` must be longer.
    pub const WAIT_MAX: Duration = Duration::from_secs(2);

    /// The stream `name`. Blocking reads use `blocking`, all other calls use `link`.
    #[must_use]
    pub fn new(name: &str, blocking: Arc<Link>, link: Arc<Link>) -> Self {
        Self {
            name: name.to_owned(),
            reader_key: keys::reader(link.prefix(), name),
            read_key: keys::read(link.prefix(), name),
            invalid: link.prefix().invalid_stream(),
            token: uuid::Uuid::now_v7().to_string(),
            reserved: Vec::new(),
            blocking,
            link,
        }
    }

    /// Removes these attributes from every event: pipelines set them on their own events.
    #[must_use]
    pub fn reserving(self, reserved: Vec<&'static str>) -> Self {
        Self { reserved, ..self }
    }

    /// The entries after `after`, up to those of `until_ms`, at most `max`.
    ///
    /// # Errors
    /// If Redis is unavailable or refuses.
    pub(crate) async fn between(
        &self,
        after: Offset,
        until_ms: u64,
        max: usize,
    ) -> Result<Vec<Entry>, RedisError> {
        let mut command = redis::cmd("XRANGE");
        command.arg(&self.name).arg(format!("({after}")).arg(until_ms).arg("COUNT").arg(max);
        let misread = self.misread("XRANGE");
        let found = match self.link.command("XRANGE", command).await? {
            Value::Array(found) => found,
            other => return Err(misread(ReplyError::unexpected("entries", &format!("{other:?}")))),
        };
        entries(Raw(found), &self.reserved).map_err(misread)
    }

    fn misread(&self, command: &'static str) -> impl Fn(ReplyError) -> RedisError {
        let link = Arc::clone(&self.link);
        move |source| link.misread(command, source)
    }
}

impl Source for RedisStream {
    type Fetched = Raw;

    fn name(&self) -> &str {
        &self.name
    }

    async fn hold(&self, ttl: Duration) -> Result<bool, RedisError> {
        let hold = Hold { key: &self.reader_key, token: &self.token, ttl_ms: millis(ttl) };
        self.link.call(&hold).await
    }

    async fn fetch(&self, after: Offset, max: usize, wait: Duration) -> Result<Raw, RedisError> {
        let mut command = redis::cmd("XREAD");
        command.arg("COUNT").arg(max).arg("BLOCK").arg(millis(wait.min(Self::WAIT_MAX)).max(1));
        command.arg("STREAMS").arg(&self.name).arg(after.to_string());
        let value = self.blocking.command("XREAD", command).await?;
        raw(value).map_err(self.misread("XREAD"))
    }

    fn decode(&self, fetched: Raw) -> Result<Vec<Entry>, RedisError> {
        entries(fetched, &self.reserved).map_err(self.misread("XREAD"))
    }

    async fn extent(&self) -> Result<Extent, RedisError> {
        let mut command = redis::cmd("XINFO");
        command.arg("STREAM").arg(&self.name);
        match self.link.command("XINFO", command).await {
            Ok(value) => extent(value).map_err(self.misread("XINFO")),
            // No event was published to the stream yet.
            Err(RedisError::Refused { message, .. }) if message.contains("no such key") => {
                Ok(Extent::default())
            }
            Err(error) => Err(error),
        }
    }

    async fn noted(&self) -> Result<Option<(Offset, u64)>, RedisError> {
        let command = redis::Cmd::hmget(&self.read_key, &["offset", "entries"]);
        let value = self.link.command("HMGET", command).await?;
        let misread = self.misread("HMGET");
        let mut reply = Reply::new(value).map_err(&misread)?;
        let offset = reply.text().map_err(&misread)?;
        let entries = reply.optional().map_err(&misread)?;
        Ok(offset.parse().ok().zip(entries))
    }

    async fn note(&self, offset: Offset, entries: u64) -> Result<(), RedisError> {
        self.link.call(&Note { key: &self.read_key, offset, entries }).await
    }

    async fn tell(&self, offset: Offset) -> Result<(), RedisError> {
        let command = redis::Cmd::hset(&self.read_key, "copied", offset.to_string());
        self.link.command("HSET", command).await.map(drop)
    }

    async fn raise(&self, last: Offset) -> Result<(), RedisError> {
        let mut command = redis::cmd("XSETID");
        command.arg(&self.name).arg(last.to_string());
        match self.link.command("XSETID", command).await {
            // The stream is gone, or has later entries already, because the server's clock is ahead
            // of the lost entries.
            Err(RedisError::Refused { message, .. }) if message.starts_with("ERR") => Ok(()),
            raised => raised.map(drop),
        }
    }

    async fn trim(&self, keep: Offset) -> Result<u64, RedisError> {
        self.link.call(&Trim { stream: &self.name, keep }).await
    }

    fn aside(&self) -> &str {
        &self.invalid
    }

    async fn put_aside(&self, entries: &[(Offset, &InvalidEntry)]) -> Result<(), RedisError> {
        let mut pipe = Pipeline::with_capacity(entries.len());
        for (offset, invalid) in entries {
            pipe.cmd("XADD").arg(&self.invalid).arg("MAXLEN").arg("~").arg(INVALID_MAX).arg("*");
            pipe.arg("stream").arg(&self.name).arg("offset").arg(offset.to_string());
            pipe.arg("reason").arg(invalid.error.to_string()).arg("entry").arg(&invalid.raw);
        }
        self.link.run_checked("XADD", &pipe).await.map(drop)
    }
}

/// The entries of one stream in the reply to `XREAD`.
#[derive(Debug)]
pub struct Raw(Vec<Value>);

impl Fetched for Raw {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn last(&self) -> Option<Offset> {
        let Value::Array(entry) = self.0.last()? else { return None };
        let Value::BulkString(offset) = entry.first()? else { return None };
        std::str::from_utf8(offset).ok()?.parse().ok()
    }
}

fn raw(value: Value) -> Result<Raw, ReplyError> {
    let mut streams = Reply::new(value)?;
    let Some(stream) = streams.next() else { return Ok(Raw(Vec::new())) };
    let mut stream = Reply::new(stream)?;
    stream.next();
    match stream.next() {
        Some(Value::Array(entries)) => Ok(Raw(entries)),
        other => Err(ReplyError::unexpected("entries", &format!("{other:?}"))),
    }
}

fn entries(Raw(found): Raw, reserved: &[&str]) -> Result<Vec<Entry>, ReplyError> {
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

fn extent(value: Value) -> Result<Extent, ReplyError> {
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
