//! The CloudEvents HTTP binding: extracts the events of a request and finds invalid ones.
//!
//! Each event is parsed once, to validate it, and published as the original text.

use std::borrow::Cow;
use std::collections::BTreeMap;

use axum::http::{HeaderMap, header};
use base64::Engine as _;
use serde::de::IgnoredAny;
use serde_json::value::{RawValue, to_raw_value};

use super::extract::{media_type, percent_decoded, unsupported};
use super::problem::{Flaw, Kind, Problem};
use crate::event::{Event, EventError};
use crate::id::BotId;
use crate::trace::{PARENT, STATE, TraceContext};

/// Maximum number of events per request.
pub(super) const BATCH_MAX: usize = 1_000;

/// One event, as JSON.
pub(super) const STRUCTURED: &str = "application/cloudevents+json";
/// A list of events, as JSON.
pub(super) const BATCH: &str = "application/cloudevents-batch+json";
const JSON: &str = "application/json";
/// The prefix of headers that carry an attribute.
const PREFIX: &str = "ce-";

/// The encoding of the events in a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// The body is one event.
    Structured,
    /// The body is a list of events.
    Batch,
    /// The body is one event or a list.
    Either,
    /// The body is the data, the headers are the attributes.
    Binary,
}

/// The valid events of a request.
#[derive(Debug, Default)]
pub(super) struct Events<'a> {
    /// The bot of each.
    pub(super) bots: Vec<BotId>,
    /// The type of each.
    pub(super) kinds: Vec<Box<str>>,
    /// The JSON text of each.
    pub(super) texts: Vec<Cow<'a, [u8]>>,
    /// The events that get no trace context of the request, each with its own valid one, if any.
    pub(super) own: Vec<(usize, Option<TraceContext>)>,
}

impl<'a> Events<'a> {
    fn one(event: &Event, text: Cow<'a, [u8]>) -> Self {
        let mut events = Self::default();
        events.add(event, text);
        events
    }

    fn add(&mut self, event: &Event, text: Cow<'a, [u8]>) {
        let is_own = [PARENT, STATE].iter().any(|name| event.extension(name).is_some());
        // An event has only so many attributes, and values in them.
        if is_own || !event.has_room_for(2) {
            self.own.push((self.texts.len(), TraceContext::of_event(event)));
        }
        self.bots.push(event.bot().clone());
        self.kinds.push(event.kind().into());
        self.texts.push(text);
    }
}

impl Mode {
    /// Determines the encoding from the content type. A body of another media type is the data of
    /// an event in binary mode, if headers carry attributes.
    pub(super) fn of(headers: &HeaderMap) -> Result<Self, Problem> {
        let media = media_type(headers);
        let attributes = headers.keys().any(|name| name.as_str().starts_with(PREFIX));
        match media.as_ref().map(Option::as_deref) {
            Ok(Some(STRUCTURED)) => Ok(Self::Structured),
            Ok(Some(BATCH)) => Ok(Self::Batch),
            Ok(Some(other)) if other.starts_with("application/cloudevents") => {
                Err(unsupported(other, &format!("{STRUCTURED} or {BATCH}")))
            }
            // The data may have any charset.
            _ if attributes => Ok(Self::Binary),
            Ok(Some(JSON)) => Ok(Self::Either),
            Ok(other) => {
                let wanted = format!("{STRUCTURED}, {BATCH}, or attributes in headers ce-…");
                Err(unsupported(other.unwrap_or("missing"), &wanted))
            }
            Err(_) => media.map(|_| Self::Either),
        }
    }

    /// The events of a request, or all its errors.
    pub(super) fn read<'a>(
        self,
        headers: &HeaderMap,
        body: &'a [u8],
    ) -> Result<Events<'a>, Problem> {
        match self {
            Self::Binary => binary(headers, body),
            Self::Batch => batch(body),
            Self::Either if body.trim_ascii_start().starts_with(b"[") => batch(body),
            Self::Structured | Self::Either => structured(body),
        }
    }
}

fn structured(body: &[u8]) -> Result<Events<'_>, Problem> {
    match Event::from_json(body) {
        Ok(event) => Ok(Events::one(&event, body.into())),
        Err(error) => {
            check_json(body)?;
            Err(invalid(1, vec![flaw(0, &error)]))
        }
    }
}

fn batch(body: &[u8]) -> Result<Events<'_>, Problem> {
    let Some(mut rest) = body.trim_ascii_start().strip_prefix(b"[") else {
        check_json(body)?;
        let detail = "the body is not a JSON array; a batch must be one";
        return Err(Problem::new(Kind::InvalidRequest, detail));
    };
    let (mut events, mut flaws, mut count) = (Events::default(), Vec::new(), 0);
    rest = rest.trim_ascii_start();
    if let Some(rest) = rest.strip_prefix(b"]") {
        return end(rest, body).map(|()| events);
    }
    loop {
        if count == BATCH_MAX {
            let detail = format!("the batch has more than {BATCH_MAX} events; send it in parts");
            return Err(Problem::new(Kind::BodyTooLarge, detail));
        }
        let taken = match Event::from_json_prefix(rest) {
            Ok((event, taken)) => {
                events.add(&event, rest[..taken].trim_ascii().into());
                taken
            }
            Err(error) => {
                flaws.push(flaw(count, &error));
                length(rest).ok_or_else(|| not_json(body))?
            }
        };
        count += 1;
        rest = rest[taken..].trim_ascii_start();
        match rest.split_first() {
            Some((b',', after)) => rest = after,
            Some((b']', after)) => {
                end(after, body)?;
                break;
            }
            _ => return Err(not_json(body)),
        }
    }
    if flaws.is_empty() { Ok(events) } else { Err(invalid(count, flaws)) }
}

/// The length in bytes of the JSON value at the start of `bytes`.
fn length(bytes: &[u8]) -> Option<usize> {
    let mut values = serde_json::Deserializer::from_slice(bytes).into_iter::<IgnoredAny>();
    values.next()?.ok()?;
    Some(values.byte_offset())
}

fn end(rest: &[u8], body: &[u8]) -> Result<(), Problem> {
    if rest.trim_ascii().is_empty() { Ok(()) } else { Err(not_json(body)) }
}

fn check_json(body: &[u8]) -> Result<(), Problem> {
    match serde_json::from_slice::<&RawValue>(body) {
        Ok(_) => Ok(()),
        Err(error) => {
            let detail = format!("the body is not JSON: {error}");
            Err(Problem::new(Kind::InvalidRequest, detail))
        }
    }
}

fn not_json(body: &[u8]) -> Problem {
    let general = || Problem::new(Kind::InvalidRequest, "the body is not JSON");
    check_json(body).err().unwrap_or_else(general)
}

/// The event with its attributes in headers and its data in the body.
fn binary<'a>(headers: &HeaderMap, body: &[u8]) -> Result<Events<'a>, Problem> {
    let mut attributes: BTreeMap<&str, Box<RawValue>> = BTreeMap::new();
    let mut flaws = Vec::new();
    let mut bad = |name: &str, why: &str| {
        let (field, detail) = (Some(name.to_owned()), format!("{PREFIX}{name}: {why}"));
        flaws.push(Flaw { index: Some(0), field, detail });
    };
    for name in headers.keys() {
        let Some(attribute) = name.as_str().strip_prefix(PREFIX) else { continue };
        let mut values = headers.get_all(name).iter();
        let value = values.next().map(|value| decoded(value.as_bytes()));
        match value {
            _ if matches!(attribute, "data" | "data_base64") => {
                bad(attribute, "in binary mode the body is the data; remove this header");
            }
            _ if values.next().is_some() => bad(attribute, "it is given twice"),
            Some(Some(text)) => drop(attributes.insert(attribute, raw(&text))),
            _ => bad(attribute, "it is not UTF-8"),
        }
    }
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    if let Some(kind) = kind {
        attributes.insert("datacontenttype", raw(kind));
    }
    match data(kind, body) {
        Ok(Some((name, data))) => drop(attributes.insert(name, data)),
        Ok(None) => {}
        Err(error) => bad("data", &format!("the content type says JSON, but {error}")),
    }
    if !flaws.is_empty() {
        return Err(invalid(1, flaws));
    }
    // Strings and JSON values always serialise.
    let text = serde_json::to_vec(&attributes).unwrap_or_default();
    match Event::from_json(&text) {
        Ok(event) => Ok(Events::one(&event, text.into())),
        Err(error) => Err(invalid(1, vec![flaw(0, &error)])),
    }
}

/// The data of an event by its content type: JSON unchanged, text as a string, anything else in
/// base 64.
fn data(
    kind: Option<&str>,
    body: &[u8],
) -> Result<Option<(&'static str, Box<RawValue>)>, serde_json::Error> {
    if body.is_empty() {
        return Ok(None);
    }
    let media = kind.unwrap_or(JSON).split(';').next().unwrap_or_default().trim();
    if media.eq_ignore_ascii_case(JSON) || media.to_ascii_lowercase().ends_with("+json") {
        return Ok(Some(("data", serde_json::from_slice::<&RawValue>(body)?.to_owned())));
    }
    Ok(Some(match std::str::from_utf8(body) {
        Ok(text) => ("data", raw(text)),
        Err(_) => ("data_base64", raw(&base64::prelude::BASE64_STANDARD.encode(body))),
    }))
}

/// Decodes the value of a header: removes quotes and decodes percent sequences.
fn decoded(value: &[u8]) -> Option<String> {
    let quoted = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\""));
    let value = match quoted {
        None => Cow::Borrowed(value),
        Some(quoted) => {
            let mut escaped = false;
            let plain = |byte: &u8| {
                escaped = *byte == b'\\' && !escaped;
                (!escaped).then_some(*byte)
            };
            Cow::Owned(quoted.iter().filter_map(plain).collect())
        }
    };
    String::from_utf8(percent_decoded(&value)).ok()
}

fn raw(text: &str) -> Box<RawValue> {
    to_raw_value(text).unwrap_or_default()
}

fn flaw(index: usize, error: &EventError) -> Flaw {
    Flaw { index: Some(index), field: error.attribute(), detail: error.to_string() }
}

fn invalid(count: usize, flaws: Vec<Flaw>) -> Problem {
    let detail = match (count, flaws.as_slice()) {
        (1, [only]) => format!("nothing was stored: {}", only.detail),
        (_, flaws) => {
            format!("nothing was stored: {} of {count} events cannot be used", flaws.len())
        }
    };
    Problem::new(Kind::InvalidEvents, detail).errors(flaws)
}

#[cfg(test)]
mod tests;
