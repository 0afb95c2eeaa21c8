//! The value of a record as the data of an event, and back.

use std::borrow::Cow;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

use super::header::{DATA_TYPE, cut, is_format, is_json};
use crate::event::entry::EntryError;
use crate::event::{Attributes, Event, EventError};

/// The attribute of data that is not text.
pub(super) const BASE64: &str = "data_base64";

/// Adds the data: JSON as it is, other text as text, and anything else in base 64. Without content
/// type it is the first of these that fits.
pub(super) fn add(
    attributes: &mut Attributes,
    content_type: Option<&str>,
    value: Option<&[u8]>,
) -> Result<(), EntryError> {
    if let Some(content_type) = content_type {
        attributes.add(DATA_TYPE, content_type.to_owned())?;
    }
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(()) };
    if content_type.is_none_or(is_json) {
        match (serde_json::from_slice::<&RawValue>(value), content_type) {
            // Like in structured mode.
            (Ok(json), _) if json.get() == "null" => return Ok(()),
            (Ok(json), _) => {
                attributes.set_data(json.to_owned());
                return Ok(());
            }
            (Err(_), None) => {}
            (Err(error), Some(found)) => {
                return Err(EntryError::Data { found: cut(found), why: error.to_string() });
            }
        }
    }
    match std::str::from_utf8(value) {
        Ok(text) => attributes.set_data(to_raw_value(text).map_err(EventError::Json)?),
        Err(_) => attributes.add(BASE64, BASE64_STANDARD.encode(value))?,
    }
    Ok(())
}

/// The value from which [`add`] makes the data of this event. `None` if there is none.
pub(super) fn value(event: &Event) -> Option<Cow<'_, [u8]>> {
    let content_type = match event.extension(DATA_TYPE) {
        None => None,
        Some(Value::String(text)) if is_format(text) => return None,
        Some(Value::String(text)) => Some(text.as_str()),
        Some(_) => return None,
    };
    let is_other = content_type.is_some_and(|found| !is_json(found));
    match (event.data(), event.extension(BASE64)) {
        (None, None) => Some([].as_slice().into()),
        (Some(json), None) if !is_other => Some(json.as_bytes().into()),
        (Some(json), None) => {
            let text = serde_json::from_str::<String>(json).ok()?;
            (!text.is_empty()).then(|| text.into_bytes().into())
        }
        (None, Some(Value::String(text))) if is_other || content_type.is_none() => {
            let bytes = BASE64_STANDARD.decode(text).ok()?;
            // Text would not come back in base 64, nor would another way to write the same bytes.
            let is_exact = std::str::from_utf8(&bytes).is_err();
            (is_exact && BASE64_STANDARD.encode(&bytes) == *text).then(|| bytes.into())
        }
        _ => None,
    }
}
