//! Events as records.

use std::borrow::Cow;

use serde_json::Value;

use super::header::{CONTENT_TYPE, DATA_TYPE, STRUCTURED};
use super::{Binding, data};
use crate::event::{ATTRIBUTE_MAX_BYTES, Event};

/// Maximum size of all headers in binary mode, in bytes. `JetStream` refuses more than 64 KiB, and
/// clients add some of their own.
const HEADERS_MAX_BYTES: usize = 32 * 1_024;

/// Where the attributes of an event are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// In the headers; the value is the data.
    Binary,
    /// With the data in the value, as JSON.
    Structured,
}

/// The headers and the value of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded<'a> {
    /// Names and values; each name once. For NATS the values are printable ASCII.
    pub headers: Vec<(Cow<'static, str>, String)>,
    /// The value.
    pub value: Cow<'a, [u8]>,
}

/// Writes an event that is given as JSON.
///
/// An event that would not come back unchanged from binary mode is written in structured mode: one
/// with an attribute that is not text, or that has no regular name, or with data that its content
/// type does not describe. So is one without data for Kafka, as compaction would delete its key.
#[must_use]
pub fn encode(json: &[u8], mode: Mode, binding: Binding) -> Encoded<'_> {
    let written = match mode {
        Mode::Binary => Event::from_json(json).ok().and_then(|event| binary(&event, binding)),
        Mode::Structured => None,
    };
    written.unwrap_or_else(|| Encoded {
        headers: vec![(CONTENT_TYPE.into(), STRUCTURED.to_owned())],
        value: json.into(),
    })
}

fn binary(event: &Event, binding: Binding) -> Option<Encoded<'static>> {
    let value = data::value(event)?;
    if value.is_empty() && binding == Binding::Kafka {
        return None;
    }
    let expiry = event.expirytime_text();
    let known = [
        ("specversion", Some("1.0")),
        ("id", Some(event.id())),
        ("source", Some(event.source())),
        ("type", Some(event.kind())),
        ("botid", Some(event.bot().as_str())),
        ("subject", event.subject()),
        ("time", event.time()),
        ("expirytime", expiry),
    ];
    let known = known.into_iter().filter_map(|(name, text)| Some((name, text?)));
    let mut headers: Vec<_> = known.map(|(name, text)| header(binding, name, text)).collect();
    for (name, value) in event.extension_attributes() {
        if name == data::BASE64 {
            continue;
        }
        let Value::String(text) = value else { return None };
        let is_regular = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let fits = (1..=ATTRIBUTE_MAX_BYTES).contains(&text.len());
        if name.is_empty() || !name.bytes().all(is_regular) || !fits {
            return None;
        }
        headers.push(header(binding, name, text));
    }
    let bytes: usize = headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    let value = Cow::Owned(value.into_owned());
    (bytes <= HEADERS_MAX_BYTES).then_some(Encoded { headers, value })
}

fn header(binding: Binding, name: &str, text: &str) -> (Cow<'static, str>, String) {
    if name == DATA_TYPE && binding == Binding::Kafka {
        return (CONTENT_TYPE.into(), text.to_owned());
    }
    (format!("{}{name}", binding.prefix()).into(), binding.value(text))
}
