//! Headers: which of them carry attributes, and how their values are written.

use std::borrow::Cow;

use super::{Binding, RawRecord};
use crate::event::entry::EntryError;
use crate::trace::{PARENT, STATE};

/// Maximum number of headers of a record.
pub const HEADERS_MAX: usize = 1_000;
/// The header of the media type, in upper or lower case.
pub(super) const CONTENT_TYPE: &str = "content-type";
/// The attribute of the media type.
pub(super) const DATA_TYPE: &str = "datacontenttype";
/// Media types that begin like this are event formats.
const FORMATS: &str = "application/cloudevents";
/// One event as JSON.
pub(super) const STRUCTURED: &str = "application/cloudevents+json";
/// Maximum number of characters of a foreign text in a message.
const CUT_CHARS: usize = 64;

impl Binding {
    /// The prefix of headers that carry attributes.
    pub(super) const fn prefix(self) -> &'static str {
        match self {
            Self::Kafka => "ce_",
            Self::Nats => "ce-",
        }
    }

    /// The attribute in lower case that a header of this name carries. NATS says that case does not
    /// matter in names of headers; attributes are in lower case, so this holds for Kafka too.
    pub(super) fn attribute(self, header: &str) -> Option<Cow<'_, str>> {
        let (prefix, name) = header.split_at_checked(self.prefix().len())?;
        if !prefix.eq_ignore_ascii_case(self.prefix()) {
            return None;
        }
        let is_lower = !name.bytes().any(|byte| byte.is_ascii_uppercase());
        Some(if is_lower { name.into() } else { name.to_ascii_lowercase().into() })
    }

    /// The text in the value of a header that carries an attribute, or what is wrong with it.
    pub(super) fn text(self, value: &[u8]) -> Result<String, String> {
        match self {
            Self::Kafka => utf8(value),
            Self::Nats => {
                let value = unquoted(value.trim_ascii());
                String::from_utf8(percent_decoded(&value)?)
                    .map_err(|_| "it is not UTF-8".to_owned())
            }
        }
    }

    /// The value of a header that carries an attribute.
    pub(super) fn value(self, text: &str) -> String {
        const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
        if self == Self::Kafka {
            return text.to_owned();
        }
        let mut value = String::with_capacity(text.len());
        for byte in text.bytes() {
            if matches!(byte, b'!'..=b'~') && !matches!(byte, b'"' | b'%') {
                value.push(char::from(byte));
            } else {
                value.push('%');
                value.push(char::from(DIGITS[usize::from(byte >> 4)]));
                value.push(char::from(DIGITS[usize::from(byte & 15)]));
            }
        }
        value
    }
}

pub(super) fn utf8(value: &[u8]) -> Result<String, String> {
    let text = std::str::from_utf8(value).map_err(|_| "it is not UTF-8".to_owned())?;
    Ok(text.to_owned())
}

/// Without quotes around it, and without the escapes in them.
fn unquoted(value: &[u8]) -> Cow<'_, [u8]> {
    let inner = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\""));
    let Some(inner) = inner else { return value.into() };
    let mut escaped = false;
    let plain = |byte: &u8| {
        escaped = *byte == b'\\' && !escaped;
        (!escaped).then_some(*byte)
    };
    Cow::Owned(inner.iter().filter_map(plain).collect())
}

fn percent_decoded(value: &[u8]) -> Result<Vec<u8>, String> {
    let digit = |at: usize| {
        let digit = char::from(*value.get(at)?).to_digit(16)?;
        u8::try_from(digit).ok()
    };
    let mut decoded = Vec::with_capacity(value.len());
    let mut at = 0;
    while let Some(&byte) = value.get(at) {
        if byte != b'%' {
            decoded.push(byte);
            at += 1;
            continue;
        }
        let (Some(high), Some(low)) = (digit(at + 1), digit(at + 2)) else {
            let why = format!("\"%\" at byte {at} has no two hexadecimal digits; write it as %25");
            return Err(why);
        };
        decoded.push(high << 4 | low);
        at += 3;
    }
    Ok(decoded)
}

/// The headers that matter before the attributes are read.
#[derive(Debug, Default)]
pub(super) struct Found<'a> {
    /// Whether any header carries an attribute.
    pub(super) has_attributes: bool,
    pub(super) content_type: Option<Cow<'a, str>>,
    pub(super) parent: Option<&'a str>,
    pub(super) state: Option<&'a str>,
}

impl<'a> Found<'a> {
    pub(super) fn of(record: &RawRecord<'a>, binding: Binding) -> Result<Self, EntryError> {
        let count = record.headers.len();
        if count > HEADERS_MAX {
            return Err(EntryError::Headers { count, max: HEADERS_MAX });
        }
        let mut found = Self::default();
        for (name, value) in record.headers {
            if binding.attribute(name).is_some() {
                found.has_attributes = true;
            } else if name.eq_ignore_ascii_case(CONTENT_TYPE) {
                let text = std::str::from_utf8(value);
                let text = text.map_err(|_| unusable(name, "it is not UTF-8".to_owned()))?;
                if found.content_type.replace(text.into()).is_some() {
                    return Err(unusable(name, "it is given twice".to_owned()));
                }
            } else if name.eq_ignore_ascii_case(PARENT) {
                found.parent = std::str::from_utf8(value).ok();
            } else if name.eq_ignore_ascii_case(STATE) {
                found.state = std::str::from_utf8(value).ok();
            }
        }
        Ok(found)
    }

    /// Whether the content type is that of a structured event in JSON.
    pub(super) fn is_structured(&self) -> Result<bool, EntryError> {
        let Some(found) = self.content_type.as_deref().filter(|found| is_format(found)) else {
            return Ok(false);
        };
        let media = media(found);
        if media.eq_ignore_ascii_case(STRUCTURED) || media.eq_ignore_ascii_case(FORMATS) {
            return Ok(true);
        }
        Err(EntryError::Format { found: cut(media) })
    }
}

/// Whether a content type is that of whole events.
pub(super) fn is_format(content_type: &str) -> bool {
    let start = content_type.trim_start().as_bytes().get(..FORMATS.len());
    start.is_some_and(|start| start.eq_ignore_ascii_case(FORMATS.as_bytes()))
}

/// Whether a content type is that of JSON.
pub(super) fn is_json(content_type: &str) -> bool {
    let media = media(content_type).to_ascii_lowercase();
    media.ends_with("/json") || media.ends_with("+json")
}

fn media(content_type: &str) -> &str {
    content_type.split(';').next().unwrap_or_default().trim()
}

pub(super) fn unusable(name: &str, why: String) -> EntryError {
    EntryError::Header { name: cut(name), why }
}

/// The start of a text, for a message.
pub(super) fn cut(text: &str) -> String {
    text.chars().take(CUT_CHARS).collect()
}
