//! What is written is read again.

use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;

use super::*;
use crate::event::{ATTRIBUTE_MAX_BYTES, NESTING_MAX};

fn read(encoded: &Encoded<'_>, binding: Binding) -> Value {
    for (name, value) in &encoded.headers {
        let printable = |byte: u8| matches!(byte, b'!'..=b'~');
        assert!(name.bytes().all(printable), "{name:?}");
        assert!(binding == Binding::Kafka || value.bytes().all(printable), "{value:?}");
    }
    let headers: Vec<_> =
        encoded.headers.iter().map(|(name, value)| (&**name, value.as_bytes())).collect();
    let place = Place { log: "orders", partition: None, offset: 1 };
    let value = Some(&*encoded.value);
    let record =
        RawRecord { place, topic: "orders", key: None, headers: &headers, value, time_ms: 0 };
    event(decode(&record, binding, &mapping("key", "topic"), &[]))
}

fn mode_of(encoded: &Encoded<'_>) -> Mode {
    let is_structured = encoded.headers.iter().any(|(_, value)| value == header::STRUCTURED);
    if is_structured { Mode::Structured } else { Mode::Binary }
}

/// Returns the mode that was used.
fn round_trip(event: &Value, mode: Mode, binding: Binding) -> Mode {
    let json = event.to_string();
    let expected = serde_json::to_value(Event::from_json(json.as_bytes()).unwrap()).unwrap();
    let encoded = encode(json.as_bytes(), mode, binding);
    assert_eq!(read(&encoded, binding), expected, "{encoded:?}");
    mode_of(&encoded)
}

fn with(more: &Value) -> Value {
    let mut event: Value = serde_json::from_str(GOOD).unwrap();
    event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    event
}

#[test]
fn an_event_is_binary_unless_it_would_change() {
    let base64 = |bytes: &[u8]| {
        use base64::Engine as _;
        base64::prelude::BASE64_STANDARD.encode(bytes)
    };
    let long = "ü".repeat(ATTRIBUTE_MAX_BYTES / 2);
    let nested = "[".repeat(NESTING_MAX) + &"]".repeat(NESTING_MAX);
    let nested: Value = serde_json::from_str(&nested).unwrap();
    for event in [
        with(&json!({"data": {"a": [1.5, "ü", null]}})),
        with(&json!({"data": "text that is JSON", "datacontenttype": "application/json"})),
        with(&json!({"data": " ", "datacontenttype": "text/plain; charset=\"utf-8\""})),
        with(&json!({"data_base64": base64(b"\xff\x00"), "datacontenttype": "image/png"})),
        with(&json!({"data_base64": base64(b"\xff\x00")})),
        with(&json!({"data": 1, "subject": "\"50%\" \u{7}\r\n:é😀 ", "id": " ", "source": long})),
        with(
            &json!({"data": 0, "time": "2026-11-25T10:00:00+02:00", "expirytime": "9999-12-31T23:59:59Z",
            "traceparent": "00-x", "tenant1": "%41"}),
        ),
        with(&json!({ "data": nested })),
    ] {
        for binding in BINDINGS {
            assert_eq!(round_trip(&event, Mode::Binary, binding), Mode::Binary, "{event}");
            assert_eq!(round_trip(&event, Mode::Structured, binding), Mode::Structured);
        }
    }
    let many: serde_json::Map<_, _> = (0..EXTENSIONS_MAX)
        .map(|number| (format!("x{number}"), json!("y".repeat(ATTRIBUTE_MAX_BYTES))))
        .collect();
    for event in [
        with(&json!({"data": {"a": 1}, "datacontenttype": "text/plain"})),
        with(&json!({"data": "", "datacontenttype": "text/plain"})),
        with(&json!({"data": 1, "datacontenttype": "application/cloudevents+json"})),
        with(&json!({"data": 1, "datacontenttype": 5})),
        with(&json!({"data": 1, "datacontenttype": ""})),
        with(&json!({"data": 1, "data_base64": base64(b"\xff")})),
        with(&json!({"data_base64": base64(b"text"), "datacontenttype": "image/png"})),
        with(&json!({"data_base64": base64(b"\xff"), "datacontenttype": "application/json"})),
        with(&json!({"data_base64": "not base 64", "datacontenttype": "image/png"})),
        with(&json!({"data_base64": "/x==", "datacontenttype": "image/png"})),
        with(&json!({"data": 1, "number": 5})),
        with(&json!({"data": 1, "nested": {"a": [null]}})),
        with(&json!({"data": 1, "empty": ""})),
        with(&json!({"data": 1, "null": null})),
        with(&json!({"data": 1, "Upper": "x"})),
        with(&json!({"data": 1, "with space": "x"})),
        with(&json!({"data": 1, "": "x"})),
        with(&json!({"data": 1, "long": "x".repeat(ATTRIBUTE_MAX_BYTES + 1)})),
        with(&json!({"data": 1, "long": "x".repeat(EVENT_MAX_BYTES / 2)})),
        with(&Value::Object(many)),
    ] {
        for binding in BINDINGS {
            assert_eq!(round_trip(&event, Mode::Binary, binding), Mode::Structured, "{event}");
        }
    }
    // Compaction deletes the key of a record without value.
    let event = with(&json!({"datacontenttype": "text/plain"}));
    assert_eq!(round_trip(&event, Mode::Binary, Binding::Kafka), Mode::Structured);
    assert_eq!(round_trip(&event, Mode::Binary, Binding::Nats), Mode::Binary);
}

#[test]
fn the_largest_event_comes_back() {
    let text = "x".repeat(EVENT_MAX_BYTES - GOOD.len() - 60);
    for event in [
        with(&json!({ "data": text })),
        with(&json!({ "data": text, "datacontenttype": "text/plain" })),
    ] {
        for binding in BINDINGS {
            assert_eq!(round_trip(&event, Mode::Binary, binding), Mode::Binary);
            round_trip(&event, Mode::Structured, binding);
        }
    }
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        "[ -~]{1,20}",
        r#"[%"\\ \t\r\n0-9a-f]{1,12}"#,
        "\\PC{1,20}",
        vec(any::<char>(), 1..10).prop_map(|chars| chars.into_iter().collect::<String>()),
    ]
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<i32>().prop_map(|number| Value::from(f64::from(number) / 8.0)),
        text().prop_map(Value::from),
        Just(Value::from("")),
    ];
    leaf.prop_recursive(4, 16, 4, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Value::from),
            btree_map(text(), inner, 0..4).prop_map(|map| map.into_iter().collect()),
        ]
    })
}

fn data() -> impl Strategy<Value = Value> {
    let kind = prop_oneof![
        Just("application/json"),
        Just("text/plain"),
        Just("application/octet-stream"),
        Just("application/cloudevents+json"),
        Just("Application/Problem+JSON ; charset=utf-8"),
        Just(""),
        Just(" "),
    ];
    let bytes = vec(any::<u8>(), 0..20).prop_map(|bytes| {
        use base64::Engine as _;
        json!({ "data_base64": base64::prelude::BASE64_STANDARD.encode(bytes) })
    });
    let data = prop_oneof![
        Just(json!({})),
        value().prop_map(|value| json!({ "data": value })),
        text().prop_map(|text| json!({ "data": text })),
        bytes,
    ];
    (data, option::of(kind)).prop_map(|(mut data, kind)| {
        if let Some(kind) = kind {
            data["datacontenttype"] = kind.into();
        }
        data
    })
}

fn events() -> impl Strategy<Value = Value> {
    let extension = prop_oneof![4 => text().prop_map(Value::from), 1 => value()];
    let name = prop_oneof![4 => "x[a-z0-9]{0,6}", 1 => "x\\PC{0,5}"];
    let attributes = [text().boxed(), text().boxed(), text().boxed(), text().boxed()];
    let bot = "[ -~&&[^\u{7f}]]{1,20}";
    (attributes, bot, option::of(0_u8..60), btree_map(name, extension, 0..4), data()).prop_map(
        |([id, source, kind, subject], bot, second, extensions, data)| {
            let mut event = json!({"specversion": "1.0", "id": id, "source": source, "type": kind,
                "botid": bot, "subject": subject});
            if let Some(second) = second {
                event["time"] = format!("2026-11-25T10:00:{second:02}.5+01:00").into();
            }
            let event_map = event.as_object_mut().unwrap();
            event_map.extend(extensions);
            event_map.extend(data.as_object().unwrap().clone());
            event
        },
    )
}

proptest! {
    #[test]
    fn every_event_comes_back_from_both_modes_of_both_bindings(event in events()) {
        for binding in BINDINGS {
            round_trip(&event, Mode::Binary, binding);
            round_trip(&event, Mode::Structured, binding);
        }
    }

    /// Headers of texts only: none of them needs structured mode.
    #[test]
    fn an_event_of_texts_stays_binary(id in text(), subject in text(), extra in text(), data in value()) {
        prop_assume!(!data.is_null());
        let event = with(&json!({"id": id, "subject": subject, "extra": extra, "data": data}));
        for binding in BINDINGS {
            prop_assert_eq!(round_trip(&event, Mode::Binary, binding), Mode::Binary);
        }
    }
}
