//! Searches the streams of the bus, the newest entries first.

use std::time::Duration;

use redis::Value;
use serde::Serialize;
use tokio::time::Instant;
use utoipa::ToSchema;
use uuid::Uuid;

use super::{Places, Wanted};
use crate::event::Event;
use crate::id::Offset;
use crate::redis::{Link, RedisError, Reply, ReplyError, pages};

/// Maximum number of bytes of all streams that a search reads.
const BYTES_MAX: u64 = 512 << 20;
/// An id that contains its time was most likely published within this time.
const BEFORE: Duration = Duration::from_secs(5);
const AFTER: Duration = Duration::from_secs(60);

/// An entry of the bus.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct OnBus {
    /// The stream.
    pub(crate) stream: String,
    /// The offset of the entry.
    #[schema(value_type = String)]
    #[serde(serialize_with = "as_text")]
    pub(crate) offset: Offset,
    /// When it was published, ms since 1970.
    pub(crate) time_ms: u64,
}

/// An entry of the bus that is not an event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct Unreadable {
    /// The stream of the bus.
    pub(crate) stream: String,
    /// The offset there.
    pub(crate) offset: String,
    /// Why it is not an event.
    pub(crate) reason: String,
}

/// What was read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct Searched {
    /// Number of entries of the bus.
    pub(crate) entries: u64,
    /// Whether all entries of the bus were read, or all since the wanted time. Otherwise the time or the bytes of
    /// the search were used up.
    pub(crate) complete: bool,
    /// Whether the attempts and the dead letters of all bots were read, as far as they were needed to find
    /// the bot. Otherwise the time of the search was used up.
    pub(crate) attempts_complete: bool,
    /// The time of the oldest entry that was read, ms since 1970.
    pub(crate) oldest_ms: Option<u64>,
}

fn as_text<S: serde::Serializer>(offset: &Offset, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(offset)
}

/// Searches all streams.
pub(super) async fn search(
    places: &Places<'_>,
    wanted: &Wanted,
    deadline: Instant,
) -> Result<(Option<(OnBus, Event)>, Searched), RedisError> {
    let mut searched = Searched { complete: true, attempts_complete: true, ..Searched::default() };
    let mut bytes = 0;
    for stream in places.streams {
        if let Some((from, until)) = likely(&wanted.id) {
            // A short range, whatever the rest of the stream is.
            let range = Range { stream, from, until, deadline };
            if let Some(found) =
                range.search(places.link, wanted, &mut searched, &mut bytes).await?
            {
                return Ok((Some(found), searched));
            }
        }
    }
    for stream in places.streams {
        let from = wanted.since.map_or("-".to_owned(), |at| crate::clock::millis(at).to_string());
        let range = Range { stream, from, until: "+".to_owned(), deadline };
        if let Some(found) = range.search(places.link, wanted, &mut searched, &mut bytes).await? {
            return Ok((Some(found), searched));
        }
    }
    Ok((None, searched))
}

/// The times between which an event with this id was most likely published: a UUID of version 7
/// contains its time.
fn likely(id: &str) -> Option<(String, String)> {
    let uuid = Uuid::parse_str(id).ok().filter(|uuid| uuid.get_version_num() == 7)?;
    let (seconds, nanos) = uuid.get_timestamp()?.to_unix();
    let at = Duration::new(seconds, nanos);
    let ms = |at: Duration| crate::clock::millis(at).to_string();
    Some((ms(at.saturating_sub(BEFORE)), ms(at + AFTER)))
}

/// A part of a stream.
struct Range<'a> {
    stream: &'a str,
    from: String,
    until: String,
    deadline: Instant,
}

impl Range<'_> {
    async fn search(
        &self,
        link: &Link,
        wanted: &Wanted,
        searched: &mut Searched,
        bytes: &mut u64,
    ) -> Result<Option<(OnBus, Event)>, RedisError> {
        let mut until = self.until.clone();
        let mut count = pages::FIRST;
        loop {
            let mut command = redis::cmd("XREVRANGE");
            command.arg(self.stream).arg(&until).arg(&self.from).arg("COUNT").arg(count);
            let page = link.command("XREVRANGE", command).await?;
            let read = pages::bytes(&page);
            *bytes += read;
            let misread = |source: ReplyError| link.misread("XREVRANGE", source);
            let mut page = Reply::new(page).map_err(misread)?;
            let entries = page.len();
            while let Some(entry) = page.next() {
                let Entry { offset, value, packed } = entry_of(entry).map_err(misread)?;
                until = format!("({offset}");
                searched.entries += 1;
                let oldest = searched.oldest_ms.get_or_insert(offset.ms);
                *oldest = (*oldest).min(offset.ms);
                if let Some(event) = event(&value, packed, wanted) {
                    let on_bus =
                        OnBus { stream: self.stream.to_owned(), offset, time_ms: offset.ms };
                    return Ok(Some((on_bus, event)));
                }
            }
            if entries < count {
                return Ok(None);
            }
            count = pages::next(count, read);
            if Instant::now() > self.deadline || *bytes > BYTES_MAX {
                searched.complete = false;
                return Ok(None);
            }
        }
    }
}

struct Entry {
    offset: Offset,
    value: Vec<u8>,
    /// Whether it is MessagePack.
    packed: bool,
}

fn entry_of(entry: Value) -> Result<Entry, ReplyError> {
    let mut entry = Reply::new(entry)?;
    let offset = entry.parsed()?;
    let mut fields = Reply::new(entry.next().unwrap_or(Value::Nil))?;
    while fields.len() > 1 {
        let name = fields.bytes()?.unwrap_or_default();
        let value = fields.bytes()?.unwrap_or_default();
        match &*name {
            b"event" => return Ok(Entry { offset, value, packed: false }),
            b"msgpack" => return Ok(Entry { offset, value, packed: true }),
            _ => {}
        }
    }
    Ok(Entry { offset, value: Vec::new(), packed: false })
}

/// The event in an entry, if it is the wanted one.
fn event(value: &[u8], packed: bool, wanted: &Wanted) -> Option<Event> {
    // Most entries are others. JSON may write characters of an id in several ways.
    let id = wanted.id.as_bytes();
    let plain =
        wanted.id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte));
    if plain && !value.windows(id.len().max(1)).any(|part| part == id) && !value.contains(&b'\\') {
        return None;
    }
    let event = if packed { Event::from_msgpack(value) } else { Event::from_json(value) }.ok()?;
    let is_it = event.id() == wanted.id
        && wanted.source.as_deref().is_none_or(|source| event.source() == source)
        && wanted.bot.as_ref().is_none_or(|bot| event.bot() == bot);
    is_it.then_some(event)
}

/// Searches the entries that cannot be read.
pub(super) async fn search_unreadable(
    link: &Link,
    id: &str,
    deadline: Instant,
) -> Result<Option<Unreadable>, RedisError> {
    let stream = link.prefix().invalid_stream();
    let mut count = pages::FIRST;
    let misread = |source: ReplyError| link.misread("XREVRANGE", source);
    let mut until = "+".to_owned();
    loop {
        let mut command = redis::cmd("XREVRANGE");
        command.arg(&stream).arg(&until).arg("-").arg("COUNT").arg(count);
        let page = link.command("XREVRANGE", command).await?;
        let bytes = pages::bytes(&page);
        let mut page = Reply::new(page).map_err(misread)?;
        let entries = page.len();
        while let Some(entry) = page.next() {
            let mut entry = Reply::new(entry).map_err(misread)?;
            until = format!("({}", entry.text().map_err(misread)?);
            let mut fields = Reply::new(entry.next().unwrap_or(Value::Nil)).map_err(misread)?;
            let mut found =
                Unreadable { stream: String::new(), offset: String::new(), reason: String::new() };
            let mut contains = false;
            while fields.len() > 1 {
                let name = fields.text().map_err(misread)?;
                let value = fields.bytes().map_err(misread)?.unwrap_or_default();
                let text = || String::from_utf8_lossy(&value).into_owned();
                match name.as_str() {
                    "stream" => found.stream = text(),
                    "offset" => found.offset = text(),
                    "reason" => found.reason = text(),
                    "entry" => {
                        contains = value.windows(id.len().max(1)).any(|part| part == id.as_bytes());
                    }
                    _ => {}
                }
            }
            if contains {
                return Ok(Some(found));
            }
        }
        // The stream is bounded to about 10,000 entries, of up to 64 KiB each.
        if entries < count || Instant::now() > deadline {
            return Ok(None);
        }
        count = pages::next(count, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::BotId;

    fn wanted(id: &str) -> Wanted {
        Wanted { id: id.to_owned(), source: None, bot: None, since: None }
    }

    #[test]
    fn the_wanted_event_is_recognised_however_its_id_is_written() {
        let json = |id: &str| {
            format!(r#"{{"specversion":"1.0","id":"{id}","source":"s","type":"t","botid":"b"}}"#)
        };
        let found = |text: &str, wanted: &Wanted| event(text.as_bytes(), false, wanted).is_some();
        assert!(found(&json("e-1"), &wanted("e-1")));
        assert!(found(&json(r"e\u002d1"), &wanted("e-1")));
        assert!(found(&json("a b"), &wanted("a b")));
        assert!(!found(&json("e-11"), &wanted("e-1")), "only the start");
        let of = |source: &str| Wanted { source: Some(source.to_owned()), ..wanted("e-1") };
        assert!(found(&json("e-1"), &of("s")) && !found(&json("e-1"), &of("other")));
        let bot = |id: &str| Wanted { bot: BotId::parse(id).ok(), ..wanted("e-1") };
        assert!(found(&json("e-1"), &bot("b")) && !found(&json("e-1"), &bot("c")));
        assert!(!found("damaged e-1", &wanted("e-1")));
    }

    #[test]
    fn an_id_that_contains_its_time_tells_where_to_look_first() {
        let (from, until) = likely("01890a5d-ac96-774b-bcce-b302099a8057").unwrap();
        assert_eq!((from.as_str(), until.as_str()), ("1688096053518", "1688096118518"));
        for id in ["e-1", "", "9c5b94b1-35ad-49bb-b118-8e8fc24abf80"] {
            assert_eq!(likely(id), None, "{id}");
        }
    }
}
