//! How records that are not CloudEvents become events: the settings of a source.

use std::fmt;
use std::num::NonZeroU8;
use std::str::FromStr;

use super::header::{cut, utf8};
use super::{Binding, RawRecord};
use crate::event::ATTRIBUTE_MAX_BYTES;
use crate::event::entry::EntryError;

/// What plain records, and CloudEvents without `botid`, take from their source.
///
/// A plain record becomes an event with the [`Place`](super::Place) and time of the record as `id`,
/// `NAME:TOPIC` as `source`, the timestamp of the record as `time` and its value as `data`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// The first part of the attribute `source`: `kafka` or `nats`, or a name that tells two clusters
    /// apart.
    pub name: Box<str>,
    /// The bot of plain records and of CloudEvents without `botid`. `None`: both are invalid, and a
    /// record without content type must be a structured CloudEvent.
    pub bot: Option<BotFrom>,
    /// The type of plain records.
    pub kind: TypeFrom,
}

impl Mapping {
    /// Reads only CloudEvents that have the attribute `botid`.
    #[must_use]
    pub fn events_only(name: &str) -> Self {
        Self { name: name.into(), bot: None, kind: TypeFrom::Topic }
    }
}

/// Where the bot of a record is. Written as `key`, `header:NAME` or `token:N`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BotFrom {
    /// The key of a Kafka record.
    Key,
    /// The header of this name, in upper or lower case.
    Header(Box<str>),
    /// A part of the subject or topic between dots; the first one is 1.
    Token(NonZeroU8),
}

/// Where the type of a plain record is. Written as `topic`, `header:NAME` or `text:TYPE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TypeFrom {
    /// The topic or subject.
    Topic,
    /// The header of this name, in upper or lower case.
    Header(Box<str>),
    /// This type for all records.
    Text(Box<str>),
}

/// Why a setting is not usable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MappingError {
    /// Not a place in a record.
    #[error("{found:?} is not a place in a record; use {allowed}")]
    Unknown {
        /// The setting, cut to 64 characters.
        found: String,
        /// The allowed forms.
        allowed: &'static str,
    },
    /// The name or text is empty or too long.
    #[error("the text after the colon has {bytes} bytes; 1 to {ATTRIBUTE_MAX_BYTES} are allowed")]
    Length {
        /// Its length.
        bytes: usize,
    },
}

impl FromStr for BotFrom {
    type Err = MappingError;

    fn from_str(text: &str) -> Result<Self, MappingError> {
        let unknown = || MappingError::Unknown {
            found: cut(text),
            allowed: "\"key\", \"header:NAME\", or \"token:N\" with N from 1 to 255",
        };
        match text.split_once(':') {
            None if text == "key" => Ok(Self::Key),
            Some(("header", name)) => bounded(name).map(Self::Header),
            Some(("token", number)) => number.parse().map(Self::Token).map_err(|_| unknown()),
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for BotFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key => f.write_str("key"),
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Token(number) => write!(f, "token:{number}"),
        }
    }
}

impl FromStr for TypeFrom {
    type Err = MappingError;

    fn from_str(text: &str) -> Result<Self, MappingError> {
        match text.split_once(':') {
            None if matches!(text, "topic" | "subject") => Ok(Self::Topic),
            Some(("header", name)) => bounded(name).map(Self::Header),
            Some(("text", kind)) => bounded(kind).map(Self::Text),
            _ => Err(MappingError::Unknown {
                found: cut(text),
                allowed: "\"topic\", \"header:NAME\" or \"text:TYPE\"",
            }),
        }
    }
}

impl fmt::Display for TypeFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Topic => f.write_str("topic"),
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Text(kind) => write!(f, "text:{kind}"),
        }
    }
}

fn bounded(text: &str) -> Result<Box<str>, MappingError> {
    match text.len() {
        1..=ATTRIBUTE_MAX_BYTES => Ok(text.into()),
        bytes => Err(MappingError::Length { bytes }),
    }
}

impl BotFrom {
    pub(super) fn read(
        &self,
        record: &RawRecord<'_>,
        binding: Binding,
    ) -> Result<String, EntryError> {
        let lacks = |what: &str| EntryError::Mapping {
            attribute: "botid",
            why: format!("`bot` of the source is \"{self}\", but the record {what}"),
        };
        match self {
            Self::Key => match record.key {
                None => Err(lacks("has no key")),
                Some(key) => utf8(key).map_err(|_| lacks("has a key that is not UTF-8")),
            },
            Self::Header(name) => header(record, binding, name).map_err(|what| lacks(&what)),
            Self::Token(number) => {
                let token = record.topic.split('.').nth(usize::from(number.get()) - 1);
                let topic = || format!("has the subject or topic {:?}", cut(record.topic));
                token.map(str::to_owned).ok_or_else(|| lacks(&topic()))
            }
        }
    }
}

impl TypeFrom {
    pub(super) fn read(
        &self,
        record: &RawRecord<'_>,
        binding: Binding,
    ) -> Result<String, EntryError> {
        match self {
            Self::Topic => Ok(record.topic.to_owned()),
            Self::Text(kind) => Ok((**kind).to_owned()),
            Self::Header(name) => header(record, binding, name).map_err(|what| {
                let why = format!("`type` of the source is \"{self}\", but the record {what}");
                EntryError::Mapping { attribute: "type", why }
            }),
        }
    }
}

/// The value of the only header of this name, or what the record has instead.
fn header(record: &RawRecord<'_>, binding: Binding, name: &str) -> Result<String, String> {
    let mut values = record.headers.iter().filter(|(found, _)| found.eq_ignore_ascii_case(name));
    match (values.next(), values.next()) {
        (None, _) => Err("has no such header".to_owned()),
        // Two tenants would both be right.
        (Some(_), Some(_)) => Err("has this header twice".to_owned()),
        (Some((name, value)), None) => {
            let text = match binding.attribute(name) {
                Some(_) => binding.text(value),
                None => utf8(value),
            };
            text.map_err(|why| format!("has such a header that is not usable: {why}"))
        }
    }
}
