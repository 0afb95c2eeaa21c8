//! The bodies of notifications and pushes that contain their event.

use std::sync::Arc;

use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use crate::automations::decide::Deed;
use crate::event::Event;
use crate::id::RuleId;
use crate::notifications::record::BODY_MAX_BYTES;

/// Whether the body of the deed contains its event.
pub(super) fn sends_event(deed: &Deed) -> bool {
    match deed {
        Deed::Push(_) => true,
        Deed::Notify(notify) => {
            notify.body.is_none() && !matches!(&*notify.method(), "GET" | "DELETE")
        }
        _ => false,
    }
}

/// An event as JSON, or its length if it is too large for a body: it is not built in vain then, because
/// one event may have hundreds of effects.
pub(super) fn written(event: &Event) -> Result<Arc<RawValue>, usize> {
    let data = event.data().map_or(0, str::len);
    if data > BODY_MAX_BYTES {
        return Err(data);
    }
    // Strings and JSON values always serialise.
    let text = to_raw_value(event).unwrap_or_default();
    if text.get().len() > BODY_MAX_BYTES { Err(text.get().len()) } else { Ok(text.into()) }
}

pub(super) fn too_large(bytes: usize) -> String {
    format!("the event has {bytes} bytes; a body has at most {BODY_MAX_BYTES}")
}

/// The default body of a notification.
#[derive(Serialize)]
struct Told<'a> {
    botid: &'a str,
    subject: Option<&'a str>,
    rule: &'a str,
    event: &'a RawValue,
}

/// It, with the JSON of the event.
pub(super) fn told(event: &Event, rule: &RuleId, text: &RawValue) -> String {
    let (botid, subject, rule) = (event.bot().as_str(), event.subject(), rule.as_str());
    serde_json::to_string(&Told { botid, subject, rule, event: text }).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(bytes: usize) -> Event {
        let spaces = " ".repeat(bytes);
        let json = format!(
            r#"{{"specversion":"1.0","id":"1","source":"s","type":"t","botid":"b","subject":"ann","data":[{spaces}]}}"#
        );
        Event::from_json(json.as_bytes()).unwrap()
    }

    #[test]
    fn the_default_body_names_the_bot_the_subscriber_and_the_rule_and_has_the_event_as_it_came() {
        let event = event(3);
        let text = written(&event).unwrap();
        let body = told(&event, &RuleId::parse("r").unwrap(), &text);
        let start =
            r#"{"botid":"b","subject":"ann","rule":"r","event":{"specversion":"1.0","id":"1","#;
        assert!(body.starts_with(start), "{body}");
        assert!(body.ends_with("\"data\":[   ]}}"), "{body}");
    }

    #[test]
    fn an_event_that_exceeds_a_body_is_refused_by_its_length() {
        let bytes = written(&event(BODY_MAX_BYTES)).unwrap_err();
        assert_eq!(bytes, BODY_MAX_BYTES + 2, "that of its data");
        let bytes = written(&event(BODY_MAX_BYTES - 10)).unwrap_err();
        assert!(bytes > BODY_MAX_BYTES, "with its attributes");
        assert!(written(&event(BODY_MAX_BYTES - 300)).is_ok());
        assert_eq!(
            too_large(bytes),
            format!("the event has {bytes} bytes; a body has at most 65536")
        );
    }
}
