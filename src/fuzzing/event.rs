//! Events in their three forms.

use serde_json::Value;

use crate::event::{EVENT_MAX_BYTES, Event, EventError, Glimpse};
use crate::id::Sequence;

/// An event in JSON or `MessagePack`.
///
/// # Panics
/// If an accepted event changes in one of its other forms, or is refused in one.
pub fn event(data: &[u8]) {
    match Event::from_json(data) {
        Ok(event) => {
            let (same, taken) = Event::from_json_prefix(data).expect("a whole is a start");
            assert!(taken <= data.len());
            assert_eq!(json(&same), json(&event));
            forms_agree(&event);
        }
        Err(error) => told(&error),
    }
    if let Ok((_, taken)) = Event::from_json_prefix(data) {
        assert!(Event::from_json(&data[..taken]).is_ok(), "a start that is an event is one");
    }
    match Event::from_msgpack(data) {
        Ok(event) => {
            assert!(json(&event).len() <= EVENT_MAX_BYTES);
            forms_agree(&event);
        }
        Err(error) => told(&error),
    }
}

fn told(error: &EventError) {
    assert!(!error.to_string().is_empty() && !error.label().is_empty());
    if let Some(attribute) = error.attribute() {
        assert!(!attribute.is_empty());
    }
}

pub(super) fn json(event: &Event) -> String {
    serde_json::to_string(event).expect("events are values of JSON")
}

/// The event as a value. `None`: it has a number that only a text can hold.
pub(super) fn value(event: &Event) -> Option<Value> {
    serde_json::to_value(event).ok()
}

fn forms_agree(event: &Event) {
    let text = json(event);
    if text.len() <= EVENT_MAX_BYTES {
        let again = Event::from_json(text.as_bytes()).expect("its own JSON is accepted");
        alike(&again, event);
    }
    if let Some(value) = value(event) {
        let packed = rmp_serde::to_vec(&value).expect("values of JSON are packed");
        if packed.len() <= EVENT_MAX_BYTES && text.len() <= EVENT_MAX_BYTES {
            let again = Event::from_msgpack(&packed).expect("the same in MessagePack is accepted");
            alike(&again, event);
        }
    }
    comes_back_from_a_queue(event);
}

/// The same but for the last digit of fractions, which the parser of JSON does not always read exactly.
pub(super) fn alike(one: &Event, other: &Event) {
    match (value(one), value(other)) {
        (Some(one), Some(other)) => assert!(near(&one, &other), "{one} {other}"),
        _ => assert_eq!(one.data(), other.data()),
    }
    assert_eq!((one.bot(), one.id(), one.kind()), (other.bot(), other.id(), other.kind()));
}

fn near(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(a), Value::Number(b)) if a.is_f64() && b.is_f64() => {
            let (a, b) = (a.as_f64().unwrap_or_default(), b.as_f64().unwrap_or_default());
            (a - b).abs() <= a.abs() * 1e-14
        }
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| near(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            let has = |(name, a): (&String, &Value)| b.get(name).is_some_and(|b| near(a, b));
            a.len() == b.len() && a.iter().all(has)
        }
        _ => one == other,
    }
}

/// As it is written to a queue and read there.
pub(super) fn comes_back_from_a_queue(event: &Event) {
    let record = Event::record(7, &event.encode());
    let (sequence, again) = Event::decode(&record, event.bot()).expect("its own record is read");
    assert_eq!(sequence, Sequence::new(7));
    assert_eq!(Event::sequence_of(&record), Some(sequence));
    assert_eq!(json(&again), json(event));
    assert_eq!(again.expirytime(), event.expirytime());
    let start = &record[..record.len().min(Glimpse::BYTES)];
    let seen = Glimpse::read(start).expect("the start of a record is enough");
    assert_eq!((&*seen.id, &*seen.kind), (event.id(), event.kind()));
    assert_eq!(seen.data.is_some(), event.data().is_some());
    assert!(event.data().unwrap_or_default().starts_with(&seen.data.unwrap_or_default()));
}
