mod hostile;
mod round_trip;
mod sdk;

use serde_json::{Value, json};

use super::*;
use crate::event::EXTENSIONS_MAX;

const REQUIRED: [(&str, &str); 5] =
    [("specversion", "1.0"), ("id", "1"), ("source", "s"), ("type", "t"), ("botid", "b")];
const GOOD: &str = r#"{"specversion":"1.0","id":"1","source":"s","type":"t","botid":"b"}"#;
const BINDINGS: [Binding; 2] = [Binding::Kafka, Binding::Nats];

fn mapping(bot: &str, kind: &str) -> Mapping {
    let bot = (!bot.is_empty()).then(|| bot.parse().unwrap());
    Mapping { name: "kafka".into(), bot, kind: kind.parse().unwrap() }
}

type Pairs = Vec<(String, Vec<u8>)>;

fn pairs(headers: &[(&str, &str)]) -> Pairs {
    headers.iter().map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec())).collect()
}

/// The required attributes as headers, changed and extended by `more`. An empty name removes the
/// attribute in the value.
fn binary_headers(binding: Binding, more: &[(&str, &str)]) -> Pairs {
    let removed = |name: &str| {
        more.iter().any(|(other, value)| *other == name || (other.is_empty() && *value == name))
    };
    let required = REQUIRED.iter().filter(|(name, _)| !removed(name));
    let mut headers: Pairs = Vec::new();
    for (name, value) in required.chain(more.iter().filter(|(name, _)| !name.is_empty())) {
        let is_attribute = !name.contains('-') && !name.contains('_');
        let prefix = if is_attribute { binding.prefix() } else { "" };
        headers.push((format!("{prefix}{name}"), value.as_bytes().to_vec()));
    }
    headers
}

fn decoded(
    binding: Binding,
    headers: &[(String, Vec<u8>)],
    key: Option<&[u8]>,
    value: Option<&[u8]>,
    mapping: &Mapping,
) -> Decoded {
    let headers: Vec<_> = headers.iter().map(|(name, value)| (&**name, &**value)).collect();
    let (log, partition, topic) = match binding {
        Binding::Kafka => ("orders", Some(3), "orders"),
        Binding::Nats => ("EVENTS", None, "orders.acme.created"),
    };
    let place = Place { log, partition, offset: 117 };
    let time_ms = 1_763_800_000_123;
    let record = RawRecord { place, topic, key, headers: &headers, value, time_ms };
    decode(&record, binding, mapping, &["reserved"])
}

fn event(decoded: Decoded) -> Value {
    match decoded {
        Decoded::Event(event) => serde_json::to_value(event).unwrap(),
        other => panic!("{other:?}"),
    }
}

fn invalid(decoded: Decoded) -> (&'static str, String, String) {
    match decoded {
        Decoded::Invalid(entry) => {
            assert!(entry.raw.len() <= RAW_MAX_BYTES, "{}", entry.raw.len());
            let raw = String::from_utf8_lossy(&entry.raw).into_owned();
            let text = entry.error.to_string();
            assert!(text.len() < 1_000, "{} bytes: {text}", text.len());
            (entry.error.label(), text, raw)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn headers_are_the_attributes_of_a_binary_event_and_the_value_its_data() {
    for binding in BINDINGS {
        let of = |kind: &[(&str, &str)], value: &[u8]| {
            let more = [&[("subject", "Ann"), ("traceparent", "00-1")], kind].concat();
            let headers = binary_headers(binding, &more);
            let found = event(decoded(binding, &headers, None, Some(value), &mapping("", "topic")));
            assert_eq!((&found["id"], &found["subject"]), (&json!("1"), &json!("Ann")));
            assert_eq!((&found["botid"], &found["traceparent"]), (&json!("b"), &json!("00-1")));
            found
        };
        for kind in [("content-type", "application/json"), ("datacontenttype", "text/json")] {
            let found = of(&[kind], b"{\"a\": 1}");
            assert_eq!(
                (&found["data"], &found["datacontenttype"]),
                (&json!({"a": 1}), &json!(kind.1))
            );
        }
        assert_eq!(of(&[("Content-Type", "Application/X+JSON; a=b")], b" 1 ")["data"], 1);
        assert_eq!(of(&[("content-type", "text/plain")], b"1")["data"], "1");
        assert_eq!(of(&[("content-type", "image/png")], b"\xff\x00")["data_base64"], "/wA=");
        assert_eq!(of(&[("content-type", "image/png")], b"").get("data"), None);
        // Without content type it is what it looks like.
        assert_eq!(of(&[], b"[1]")["data"], json!([1]));
        assert_eq!(of(&[], b"one")["data"], "one");
        assert_eq!(of(&[], b"\xff\x00")["data_base64"], "/wA=");
        assert_eq!(of(&[], b"null").get("data"), None);
    }
}

#[test]
fn the_content_type_that_a_binding_demands_comes_first() {
    let more = [("content-type", "text/plain"), ("datacontenttype", "application/json")];
    for (binding, data) in [(Binding::Kafka, json!("1")), (Binding::Nats, json!(1))] {
        let headers = binary_headers(binding, &more);
        let found = decoded(binding, &headers, None, Some(b"1"), &mapping("", "topic"));
        assert_eq!(event(found)["data"], data);
    }
}

#[test]
fn names_of_headers_are_read_in_upper_and_lower_case() {
    for (binding, prefix) in [(Binding::Kafka, "CE_"), (Binding::Nats, "Ce-")] {
        let headers: Pairs = REQUIRED
            .iter()
            .chain(&[("Fancy", "x")])
            .map(|(name, value)| {
                (format!("{prefix}{}", name.to_uppercase()), value.as_bytes().into())
            })
            .collect();
        let found = event(decoded(binding, &headers, None, Some(b""), &mapping("", "topic")));
        assert_eq!((&found["type"], &found["fancy"]), (&json!("t"), &json!("x")));
    }
}

#[test]
fn values_of_nats_headers_are_unquoted_and_percent_decoded_once() {
    for (value, subject) in [
        ("Euro%20%E2%82%AC%20%F0%9F%98%80", "Euro € 😀"),
        ("  padded\t", "padded"),
        ("\"a\\\"b%20c\\\\\"", "a\"b c\\"),
        ("\"", "\""),
        ("%e2%82%ac%2525", "€%25"),
        ("Müller", "Müller"),
    ] {
        let headers = binary_headers(Binding::Nats, &[("subject", value)]);
        let found = decoded(Binding::Nats, &headers, None, None, &mapping("", "topic"));
        assert_eq!(event(found)["subject"], subject);
        // Kafka has the value as it is.
        let headers = binary_headers(Binding::Kafka, &[("subject", value)]);
        let found = decoded(Binding::Kafka, &headers, None, None, &mapping("", "topic"));
        assert_eq!(event(found)["subject"], value);
    }
}

#[test]
fn a_structured_event_is_its_value_and_its_headers_do_not_count() {
    for binding in BINDINGS {
        for kind in [
            "application/cloudevents+json",
            "application/cloudevents",
            " Application/CloudEvents+JSON; charset=UTF-8",
        ] {
            let headers = binary_headers(binding, &[("content-type", kind), ("id", "2")]);
            let value = Some(GOOD.as_bytes());
            let found = event(decoded(binding, &headers, None, value, &mapping("key", "topic")));
            assert_eq!(found, serde_json::from_str::<Value>(GOOD).unwrap());
        }
    }
}

#[test]
fn an_event_without_headers_is_read_where_plain_records_are_not() {
    for binding in BINDINGS {
        for headers in [&[][..], &[("content-type", "application/json")]] {
            let value = Some(GOOD.as_bytes());
            let found = decoded(binding, &pairs(headers), None, value, &mapping("", "topic"));
            assert_eq!(event(found)["botid"], "b");
        }
        // A tenant that writes such a value does not choose its bot.
        let from_key = mapping("key", "topic");
        let found = decoded(binding, &[], Some(b"mine"), Some(GOOD.as_bytes()), &from_key);
        let found = event(found);
        assert_eq!((&found["botid"], &found["data"]["botid"]), (&json!("mine"), &json!("b")));
    }
}

#[test]
fn a_plain_record_becomes_an_event_by_the_settings_of_its_source() {
    let headers = pairs(&[("Tenant", "acme%20"), ("kind", "made"), ("content-type", "text/plain")]);
    let of = |binding, bot, kind| {
        event(decoded(binding, &headers, Some(b"key"), Some(b"x"), &mapping(bot, kind)))
    };
    assert_eq!(
        of(Binding::Kafka, "key", "topic"),
        json!({"specversion": "1.0", "id": "orders/3/117@1763800000123", "source": "kafka:orders",
            "type": "orders", "botid": "key", "time": "2025-11-22T08:26:40.123Z", "data": "x",
            "datacontenttype": "text/plain"})
    );
    let found = of(Binding::Nats, "token:2", "subject");
    assert_eq!((&found["botid"], &found["type"]), (&json!("acme"), &json!("orders.acme.created")));
    assert_eq!(found["id"], "EVENTS/117@1763800000123");
    let found = of(Binding::Nats, "header:tenant", "header:KIND");
    assert_eq!((&found["botid"], &found["type"]), (&json!("acme%20"), &json!("made")));
    assert_eq!(of(Binding::Kafka, "key", "text:made")["type"], "made");

    let place = Place { log: "orders", partition: Some(0), offset: 1 };
    let (key, value) = (Some(&b"b"[..]), Some(&b"1"[..]));
    for time_ms in [0, u64::MAX] {
        let record = RawRecord { place, topic: "orders", key, headers: &[], value, time_ms };
        let found = event(decode(&record, Binding::Kafka, &mapping("key", "topic"), &[]));
        assert_eq!((&found["id"], found.get("time")), (&json!("orders/0/1"), None));
    }
}

#[test]
fn an_event_without_bot_takes_it_from_the_setting_and_an_own_one_wins() {
    for binding in BINDINGS {
        let without = binary_headers(binding, &[("", "botid"), ("tenant-id", "acme")]);
        let with = binary_headers(binding, &[("tenant-id", "acme")]);
        let structured = pairs(&[("content-type", header::STRUCTURED), ("tenant-id", "acme")]);
        let anonymous = GOOD.replace(r#","botid":"b""#, "");
        let by_header = mapping("header:tenant-id", "topic");
        for (headers, value, bot) in [
            (&without, "1", "acme"),
            (&with, "1", "b"),
            (&structured, &*anonymous, "acme"),
            (&structured, GOOD, "b"),
        ] {
            let found = decoded(binding, headers, None, Some(value.as_bytes()), &by_header);
            assert_eq!(event(found)["botid"], bot);
        }
    }
}

#[test]
fn a_null_value_without_attributes_is_a_tombstone_and_an_empty_one_is_not() {
    let by_key = mapping("key", "topic");
    let of = |headers: &Pairs, value| decoded(Binding::Kafka, headers, Some(b"b"), value, &by_key);
    assert!(matches!(of(&Vec::new(), None), Decoded::Tombstone));
    let structured = pairs(&[("content-type", header::STRUCTURED)]);
    assert!(matches!(of(&structured, None), Decoded::Tombstone));
    let only_events = Mapping::events_only("kafka");
    let found = decoded(Binding::Kafka, &[], Some(b"b"), None, &only_events);
    assert!(matches!(found, Decoded::Tombstone));
    // The binding writes an event without data like this.
    let found = event(of(&binary_headers(Binding::Kafka, &[]), None));
    assert_eq!(found, serde_json::from_str::<Value>(GOOD).unwrap());
    assert_eq!(event(of(&Vec::new(), Some(b""))).get("data"), None);
}

#[test]
fn a_trace_context_in_headers_goes_on_in_an_event_without_one() {
    const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let structured = (header::CONTENT_TYPE, header::STRUCTURED);
    let own = GOOD.replace('}', r#","traceparent":"own"}"#);
    for (parent, value, seen) in [
        (TRACE, GOOD, json!([TRACE, "a=1"])),
        ("nonsense", GOOD, json!([null, null])),
        (TRACE, &*own, json!(["own", null])),
    ] {
        for names in [["traceparent", "tracestate"], ["TraceParent", "TRACESTATE"]] {
            let headers = pairs(&[structured, (names[0], parent), (names[1], "a=1")]);
            let found = decoded(
                Binding::Nats,
                &headers,
                None,
                Some(value.as_bytes()),
                &mapping("", "topic"),
            );
            let found = event(found);
            let of = |name: &str| found.get(name).cloned().unwrap_or_default();
            assert_eq!(json!([of("traceparent"), of("tracestate")]), seen);
        }
    }
}

#[test]
fn reserved_attributes_are_removed_in_every_mode() {
    let value = GOOD.replace('}', r#","reserved":1,"kept":2}"#);
    let structured = pairs(&[("content-type", header::STRUCTURED)]);
    for binding in BINDINGS {
        let headers = binary_headers(binding, &[("Reserved", "1"), ("kept", "2")]);
        for (headers, value) in [(&headers, "1"), (&structured, &*value)] {
            let value = Some(value.as_bytes());
            let found = event(decoded(binding, headers, None, value, &mapping("", "topic")));
            assert_eq!((found.get("reserved"), found.get("kept").is_some()), (None, true));
        }
    }
}

#[test]
fn settings_are_read_as_they_are_shown_and_others_are_refused_with_what_is_allowed() {
    for text in ["key", "header:X-Tenant", "token:2"] {
        assert_eq!(text.parse::<BotFrom>().unwrap().to_string(), text);
    }
    for text in ["topic", "header:X-Type", "text:order:made"] {
        assert_eq!(text.parse::<TypeFrom>().unwrap().to_string(), text);
    }
    assert_eq!("subject".parse(), Ok(TypeFrom::Topic));
    for text in ["", "Key", "key:", "token:0", "token:x", "token:256", "token", "header"] {
        let error = text.parse::<BotFrom>().unwrap_err().to_string();
        assert!(error.contains("use \"key\", \"header:NAME\""), "{error}");
    }
    for text in ["", "order.made", "text"] {
        let error = text.parse::<TypeFrom>().unwrap_err().to_string();
        assert!(error.contains("\"topic\", \"header:NAME\" or \"text:TYPE\""), "{error}");
    }
    for text in ["header:".to_owned(), format!("header:{}", "x".repeat(1_025))] {
        assert!(matches!(text.parse::<BotFrom>(), Err(MappingError::Length { .. })));
    }
}
