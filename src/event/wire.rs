//! Incoming attributes in JSON or `MessagePack`, and the check of their bounds.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use jiff::Timestamp;
use jiff::fmt::temporal::Pieces;
use serde::Deserialize;
use serde::de::{self, DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::values::{JsonText, Tree, count, too_many};
use super::{
    ATTRIBUTE_MAX_BYTES, EXTENSION_VALUES_MAX, EXTENSIONS_MAX, Event, EventError, NESTING_MAX,
};
use crate::id::BotId;

/// The attributes before the bounds are checked.
#[derive(Debug, Default)]
pub(super) struct Fields {
    pub(super) specversion: Option<String>,
    pub(super) id: Option<String>,
    pub(super) source: Option<String>,
    pub(super) kind: Option<String>,
    pub(super) botid: Option<String>,
    pub(super) subject: Option<String>,
    pub(super) time: Option<String>,
    pub(super) expirytime: Option<String>,
    pub(super) data: Option<Box<RawValue>>,
    pub(super) extensions: BTreeMap<String, serde_json::Value>,
}

impl Fields {
    /// The place of an attribute that is text; `None` for `data` and extension attributes.
    pub(super) fn slot(&mut self, name: &str) -> Option<&mut Option<String>> {
        Some(match name {
            "specversion" => &mut self.specversion,
            "id" => &mut self.id,
            "source" => &mut self.source,
            "type" => &mut self.kind,
            "botid" => &mut self.botid,
            "subject" => &mut self.subject,
            "time" => &mut self.time,
            "expirytime" => &mut self.expirytime,
            _ => return None,
        })
    }

    pub(super) fn into_event(self) -> Result<Event, EventError> {
        let specversion = required("specversion", self.specversion)?;
        if specversion != "1.0" {
            let why = format!("{specversion:?} is not supported, \"1.0\" is");
            return Err(attribute("specversion", why));
        }
        if let Some(data) = &self.data {
            check_nesting("data", nesting_of_text(data.get()))?;
        }
        for (name, value) in &self.extensions {
            check_nesting(name, nesting_of(value))?;
        }
        let event = Event {
            id: bounded("id", required("id", self.id)?)?,
            source: bounded("source", required("source", self.source)?)?,
            kind: bounded("type", required("type", self.kind)?)?,
            bot: BotId::parse(&required("botid", self.botid)?)?,
            subject: self.subject.map(|text| bounded("subject", text)).transpose()?,
            time: self.time.map(|text| rfc3339("time", text)).transpose()?,
            expirytime: self.expirytime.map(|text| rfc3339("expirytime", text)).transpose()?,
            data: self.data,
            extensions: self.extensions,
        };
        check_count(event.extensions.len())?;
        if !has_room(&event.extensions, 0) {
            return Err(attribute("extensions", too_many()));
        }
        if let Some(name) = event.extensions.keys().find(|name| name.len() > ATTRIBUTE_MAX_BYTES) {
            let why = format!("its name has more than {ATTRIBUTE_MAX_BYTES} bytes");
            return Err(attribute(name.chars().take(32).collect::<String>(), why));
        }
        Ok(event)
    }
}

/// Whether an attribute of this name is not an extension.
pub(super) fn is_core(name: &str) -> bool {
    name == "data" || Fields::default().slot(name).is_some()
}

pub(super) fn check_count(extensions: usize) -> Result<(), EventError> {
    if extensions <= EXTENSIONS_MAX {
        return Ok(());
    }
    let why = format!("there are more than {EXTENSIONS_MAX} extension attributes");
    Err(attribute("extensions", why))
}

/// Whether so many more extension attributes of one value each may be added.
pub(super) fn has_room(extensions: &BTreeMap<String, serde_json::Value>, more: usize) -> bool {
    let values = extensions.values().map(count).sum::<usize>();
    extensions.len() + more <= EXTENSIONS_MAX && values + more <= EXTENSION_VALUES_MAX
}

pub(super) fn attribute(name: impl Into<String>, why: String) -> EventError {
    EventError::Attribute { name: name.into(), why }
}

fn required(name: &'static str, value: Option<String>) -> Result<String, EventError> {
    value.ok_or(EventError::Missing { name })
}

fn bounded(name: &'static str, text: String) -> Result<Box<str>, EventError> {
    match text.len() {
        0 => Err(attribute(name, "it is empty".to_owned())),
        bytes if bytes > ATTRIBUTE_MAX_BYTES => {
            let why = format!("it has {bytes} bytes; at most {ATTRIBUTE_MAX_BYTES} are allowed");
            Err(attribute(name, why))
        }
        _ => Ok(text.into()),
    }
}

fn rfc3339(name: &'static str, text: String) -> Result<Box<str>, EventError> {
    match instant(&text) {
        Ok(_) => Ok(text.into()),
        Err(source) => Err(attribute(name, format!("it is not an RFC 3339 time: {source}"))),
    }
}

/// A time of RFC 3339. The last two days of the year 9999 read as the last [`Timestamp`]: producers
/// write them for "never", and they are later than some time zones allow.
pub(super) fn instant(text: &str) -> Result<Timestamp, jiff::Error> {
    text.parse().or_else(|error| {
        let late = Pieces::parse(text).is_ok_and(|pieces| {
            let whole = pieces.time().is_some() && pieces.offset().is_some();
            whole && pieces.date() >= jiff::civil::date(9999, 12, 30)
        });
        if late { Ok(Timestamp::MAX) } else { Err(error) }
    })
}

fn check_nesting(name: &str, nesting: usize) -> Result<(), EventError> {
    if nesting <= NESTING_MAX {
        return Ok(());
    }
    let why = format!("it is nested {nesting} deep; at most {NESTING_MAX} levels are allowed");
    Err(attribute(name.chars().take(32).collect::<String>(), why))
}

/// The nesting of a JSON text; 0 for a value that is neither an array nor an object.
fn nesting_of_text(json: &str) -> usize {
    let (mut depth, mut deepest, mut quoted, mut escaped) = (0_usize, 0, false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = quoted,
            b'"' => quoted = !quoted,
            b'[' | b'{' if !quoted => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' if !quoted => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

fn nesting_of(value: &serde_json::Value) -> usize {
    match value {
        serde_json::Value::Array(values) => 1 + values.iter().map(nesting_of).max().unwrap_or(0),
        serde_json::Value::Object(map) => 1 + map.values().map(nesting_of).max().unwrap_or(0),
        _ => 0,
    }
}

/// An incoming map of attributes. `D` is the type in which the format delivers `data`.
pub(super) struct Wire<D>(pub(super) Fields, pub(super) PhantomData<D>);

trait DataForm: DeserializeOwned {
    fn into_raw<E: de::Error>(self) -> Result<Box<RawValue>, E>;
}

impl DataForm for Box<RawValue> {
    fn into_raw<E: de::Error>(self) -> Result<Box<RawValue>, E> {
        Ok(self)
    }
}

impl DataForm for JsonText {
    fn into_raw<E: de::Error>(self) -> Result<Box<RawValue>, E> {
        Ok(self.0)
    }
}

impl<'de, D: DataForm> Deserialize<'de> for Wire<D> {
    fn deserialize<T: Deserializer<'de>>(deserializer: T) -> Result<Self, T::Error> {
        deserializer.deserialize_map(WireVisitor(PhantomData))
    }
}

struct WireVisitor<D>(PhantomData<D>);

impl<'de, D: DataForm> Visitor<'de> for WireVisitor<D> {
    type Value = Wire<D>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of CloudEvents attributes")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Wire<D>, A::Error> {
        let mut fields = Fields::default();
        // Given as null, which leaves no trace in `fields`.
        let mut empty: Vec<Cow<'_, str>> = Vec::new();
        let mut values = EXTENSION_VALUES_MAX;
        let named = |name: &str, error: A::Error| -> A::Error {
            de::Error::custom(format_args!("{name:?}: {error}"))
        };
        while let Some(Name(name)) = map.next_key::<Name>()? {
            if name == "data" {
                fields.data = map.next_value::<Option<D>>()?.map(D::into_raw).transpose()?;
                continue;
            }
            let Some(slot) = fields.slot(&name) else {
                let value = map.next_value_seed(Tree(&mut values));
                let value = value.map_err(|error| named(&name, error))?;
                fields.extensions.insert(name.into_owned(), value);
                continue;
            };
            let value = map.next_value::<Option<String>>().map_err(|error| named(&name, error))?;
            if slot.is_some() || empty.contains(&name) {
                return Err(de::Error::custom(format_args!("{name:?} is given twice")));
            }
            if value.is_none() {
                empty.push(name);
            }
            *slot = value;
        }
        Ok(Wire(fields, PhantomData))
    }
}

/// A key, borrowed from the input if possible.
pub(super) struct Name<'a>(pub(super) Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Name<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameVisitor;
        impl<'de> Visitor<'de> for NameVisitor {
            type Value = Name<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of an attribute")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Name<'de>, E> {
                Ok(Name(text.into()))
            }
            fn visit_str<E>(self, text: &str) -> Result<Name<'de>, E> {
                Ok(Name(text.to_owned().into()))
            }
        }
        deserializer.deserialize_str(NameVisitor)
    }
}
