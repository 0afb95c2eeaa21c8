//! For `crate::fuzzing`: reads parameters, bodies, headers and cursors.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use futures_util::FutureExt as _;

use super::cloudevents::{BATCH_MAX, Mode};
use super::extract;
use super::forwarded::Proxies;
use super::notifications::new_notification;
use super::page::Cursors;
use super::parameters::Parameters;
use super::problem::Problem;
use super::proxy_protocol;
use crate::automations::rule::Rule;
use crate::event::Event;
use crate::id::LetterId;
use crate::outbound::{CheckedUrl, Policy};
use crate::queue::{BotCursor, EventCursor};
use crate::signed_token::SigningKey;
use crate::trace::TraceContext;
use crate::trail::Position;

fn tenants() -> Policy {
    Policy::Tenant(Arc::default())
}

fn refused(problem: &Problem) {
    assert!(problem.status().is_client_error(), "{}", problem.detail());
    assert!(serde_json::to_value(problem).is_ok_and(|value| value.is_object()));
}

/// See [`crate::fuzzing::parameters`].
pub(crate) fn parameters(data: &[u8]) {
    let end = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let (kind, rest) = (&data[..end], data.get(end + 1..).unwrap_or_default());
    let text = std::str::from_utf8(rest);
    match (kind, text) {
        (b"form", Ok(text)) => {
            let mut given = Parameters::default();
            match given.add_form(text, "the form") {
                Ok(()) => in_every_notation(given),
                Err(problem) => refused(&problem),
            }
        }
        (b"json", _) => {
            let mut given = Parameters::default();
            match given.add_json(rest) {
                Ok(()) => in_every_notation(given),
                Err(problem) => refused(&problem),
            }
        }
        (b"rule", _) => match extract::parse::<Rule>(rest) {
            Ok(rule) => rule_is_read_again(&rule),
            Err(problem) => refused(&problem),
        },
        (b"forwarded", Ok(text)) => forwarded(text),
        (b"proxy", _) => {
            let mut left = rest;
            let read = proxy_protocol::read(&mut left).now_or_never();
            let read = read.expect("bytes in memory are there at once");
            assert!(rest.len() - left.len() <= 16 + (1 << 16));
            assert!(!matches!(read, Ok(Some(address)) if address != address.to_canonical()));
        }
        (b"trace", Ok(text)) => {
            let (parent, state) = text.split_once('\n').unwrap_or((text, ""));
            if let Some(context) = TraceContext::parse(parent, Some(state)) {
                assert_eq!(TraceContext::from_text(&context.to_text()), Some(context));
            }
        }
        _ => {}
    }
}

/// A form and JSON with the same parameters are read alike.
fn in_every_notation(given: Parameters) {
    // The values of JSON that are no text are texts in a form.
    let json = serde_json::to_vec(&given.0).expect("texts are values of JSON");
    let mut form = String::new();
    for (name, value) in &given.0 {
        for (text, before) in [(name, '&'), (value, '=')] {
            form.push(before);
            for byte in text.bytes() {
                // Writing to a string does not fail.
                let _ = write!(form, "%{byte:02x}");
            }
        }
    }
    let (mut by_form, mut by_json) = (Parameters::default(), Parameters::default());
    by_form.add_form(&form, "the form").expect("its own form is read");
    by_json.add_json(&json).expect("its own JSON is read");
    assert_eq!(by_form, given, "{form}");
    assert_eq!(by_json, given);
    match new_notification(given, &tenants()) {
        Ok(new) => {
            for url in [&new.url, &new.recheck] {
                assert!(url.is_empty() || CheckedUrl::parse(url, &tenants()).is_ok(), "{url}");
            }
            let _ = new.check(Duration::from_secs(1_760_000_000));
            let _ = new.when.parts();
        }
        Err(problem) => refused(&problem),
    }
}

fn rule_is_read_again(rule: &Rule) {
    let text = serde_json::to_vec(rule).expect("rules are values of JSON");
    let again = extract::parse::<Rule>(&text).unwrap_or_else(|problem| {
        panic!("{}: {}", String::from_utf8_lossy(&text), problem.detail())
    });
    assert_eq!(&again, rule);
    let (one, other) = (rule.check(&tenants()), again.check(&tenants()));
    assert_eq!(one, other);
    if let Err(unusable) = one {
        assert!(!unusable.field.is_empty() && !unusable.problem.is_empty());
    }
}

/// Lines `name: value` from a client behind a proxy that is trusted.
fn forwarded(text: &str) {
    let mut headers = HeaderMap::new();
    for line in text.lines() {
        let Some((name, value)) = line.split_once(": ") else { continue };
        let parsed = (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_str(value));
        if let (Ok(name), Ok(value)) = parsed {
            headers.append(name, value);
        }
    }
    let (near, far) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from(Ipv4Addr::new(192, 0, 2, 1)));
    let proxies = Proxies::new(&["10.0.0.0/8".parse().expect("a network")], false);
    assert_eq!(proxies.client(far, &headers), far, "nobody else is believed");
    let client = proxies.client(near, &headers);
    assert!(!headers.is_empty() || client == near, "{client}");
    let _ = TraceContext::of_headers(&headers);
}

/// The events of a request.
pub(crate) fn events(headers: &HeaderMap, body: &[u8]) {
    match Mode::of(headers).and_then(|mode| mode.read(headers, body)) {
        Ok(events) => {
            assert!(events.texts.len() <= BATCH_MAX);
            assert_eq!(events.bots.len(), events.texts.len());
            assert_eq!(events.kinds.len(), events.texts.len());
            let about = events.bots.iter().zip(&events.kinds);
            for (text, (bot, kind)) in events.texts.iter().zip(about) {
                let event = Event::from_json(text).expect("what is published is an event");
                assert_eq!((event.bot(), event.kind()), (bot, &**kind));
            }
        }
        Err(problem) => refused(&problem),
    }
}

/// Reads a cursor as that of each list.
pub(crate) fn cursor(key: &SigningKey, path: &str, text: &str) {
    let cursors = Cursors::default();
    cursors.sign_with(key.clone());
    let text = Some(text);
    let refusals = [
        cursors.read::<BotCursor>(path, text).err(),
        cursors.read::<EventCursor>(path, text).err(),
        cursors.read::<LetterId>(path, text).err(),
        cursors.read::<Position>(path, text).err(),
        cursors.read::<(u64, String)>(path, text).err(),
        cursors.read::<(String, String)>(path, text).err(),
        super::replay::fuzz(&cursors, path, text),
    ];
    for problem in refusals.into_iter().flatten() {
        refused(&problem);
    }
}
