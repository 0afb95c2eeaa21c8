//! Records that are broken, by accident or on purpose.

use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::*;

/// Invalid with this label and with all of these texts in the reason.
fn refused(found: Decoded, label: &str, parts: &[&str]) {
    let (found, why, _) = invalid(found);
    assert_eq!(found, label, "{why}");
    for part in parts {
        assert!(why.contains(part), "{part:?} is not in: {why}");
    }
}

#[test]
fn a_bad_header_is_refused_by_its_name_with_the_remedy() {
    let only_events = mapping("", "topic");
    let megabyte = "x".repeat(1_000_000);
    let of = |binding, more: &[(&str, &str)]| {
        decoded(binding, &binary_headers(binding, more), None, Some(b"1"), &only_events)
    };
    for (binding, id, data) in
        [(Binding::Kafka, "\"ce_id\"", "\"ce_data\""), (Binding::Nats, "\"ce-id\"", "\"ce-data\"")]
    {
        refused(of(binding, &[("specversion", "0.3")]), "attribute", &["0.3", "\"1.0\" is"]);
        refused(of(binding, &[("", "specversion")]), "attribute", &["\"specversion\" is missing"]);
        refused(of(binding, &[("", "id")]), "attribute", &["\"id\" is missing"]);
        refused(of(binding, &[("", "botid")]), "mapping", &["\"botid\"; add it, or set `bot`"]);
        refused(of(binding, &[("botid", "a\0")]), "botid", &["control characters"]);
        refused(of(binding, &[("id", "1"), ("ID", "2")]), "header", &[id, "given twice"]);
        refused(of(binding, &[("id", &megabyte)]), "attribute", &["1000000 bytes; at most 1024"]);
        refused(of(binding, &[("extra", &megabyte), ("other", &megabyte)]), "size", &["1048576"]);
        refused(of(binding, &[("id", "")]), "attribute", &["\"id\"", "empty"]);
        refused(of(binding, &[("time", "soon")]), "attribute", &["\"time\"", "RFC 3339"]);
        refused(of(binding, &[("data", "1")]), "header", &[data, "remove it"]);
        let twice = [("content-type", "text/plain"), ("Content-Type", "text/plain")];
        refused(of(binding, &twice), "header", &["\"Content-Type\"", "twice"]);
        let names = [binding.prefix().to_owned(), format!("{}data_base64", binding.prefix())];
        for name in names {
            let mut headers = binary_headers(binding, &[]);
            headers.push((name, b"1".to_vec()));
            refused(decoded(binding, &headers, None, None, &only_events), "header", &["remove"]);
        }
        for name in [id.trim_matches('"'), "content-type"] {
            let mut headers = binary_headers(binding, &[("", "id")]);
            headers.push((name.to_owned(), b"\xff\xfe".to_vec()));
            let found = decoded(binding, &headers, None, None, &only_events);
            refused(found, "header", &[name, "not UTF-8"]);
        }
    }
    for value in ["50% off", "%", "%4", "%zz", "%%20"] {
        let found = of(Binding::Nats, &[("subject", value)]);
        refused(found, "header", &["\"ce-subject\"", "write it as %25"]);
    }
    for value in ["%C0%A0", "%ff", "%ED%A0%80"] {
        refused(of(Binding::Nats, &[("subject", value)]), "header", &["not UTF-8"]);
    }
}

#[test]
fn too_many_headers_are_refused_before_they_are_read() {
    for binding in BINDINGS {
        let of = |count: usize, name: &dyn Fn(usize) -> String| {
            let mut headers = binary_headers(binding, &[]);
            headers.extend((0..count).map(|number| (name(number), b"x".to_vec())));
            decoded(binding, &headers, None, Some(b"1"), &mapping("", "topic"))
        };
        let foreign = |number: usize| format!("x{number}");
        let attribute = |number: usize| format!("{}x{number}", binding.prefix());
        event(of(HEADERS_MAX - REQUIRED.len(), &foreign));
        refused(of(10_000, &foreign), "header", &["10005 headers; at most 1000"]);
        refused(of(10_000, &attribute), "header", &["at most 1000"]);
        event(of(EXTENSIONS_MAX, &attribute));
        refused(of(EXTENSIONS_MAX + 1, &attribute), "attribute", &["more than 64"]);
        refused(of(900, &|_| attribute(1)), "header", &["given twice"]);
    }
}

#[test]
fn another_format_and_a_batch_are_refused_with_what_is_read() {
    for binding in BINDINGS {
        for kind in ["application/cloudevents-batch+json", "application/cloudevents+avro; a=b"] {
            let headers = binary_headers(binding, &[("content-type", kind)]);
            let found = decoded(binding, &headers, None, Some(b"[]"), &mapping("key", "topic"));
            let (kind, _) = kind.split_once(';').unwrap_or((kind, ""));
            refused(found, "format", &[kind, "one event per record", "+json"]);
        }
        let structured = pairs(&[("content-type", header::STRUCTURED)]);
        for (value, label, part) in [
            (&b""[..], "json", "EOF"),
            (b"[]", "json", "a map of CloudEvents attributes"),
            (b"\xff", "json", "line 1 column 1"),
            (b"{\"specversion\":\"0.3\"}", "attribute", "\"1.0\" is"),
        ] {
            let found =
                decoded(binding, &structured, Some(b"b"), Some(value), &mapping("key", "topic"));
            refused(found, label, &[part]);
        }
        let deep = GOOD.replace('}', &format!(",\"x\":{}1{}}}", "[".repeat(110), "]".repeat(110)));
        let found =
            decoded(binding, &structured, None, Some(deep.as_bytes()), &mapping("", "topic"));
        refused(found, "attribute", &["\"x\"", "at most 100 levels"]);
    }
}

#[test]
fn a_value_that_breaks_a_bound_or_its_content_type_is_refused() {
    let large = vec![b'['; EVENT_MAX_BYTES + 1];
    let control = vec![1_u8; EVENT_MAX_BYTES / 5];
    let bytes = vec![0xff_u8; EVENT_MAX_BYTES * 4 / 5];
    let deep = "[".repeat(100_000) + &"]".repeat(100_000);
    for binding in BINDINGS {
        let structured = pairs(&[("content-type", header::STRUCTURED)]);
        let json = binary_headers(binding, &[("content-type", "application/json")]);
        let other = binary_headers(binding, &[("content-type", "x/y")]);
        let plain = pairs(&[]);
        let of = |headers: &Pairs, value: &[u8]| {
            decoded(binding, headers, Some(b"b"), Some(value), &mapping("key", "topic"))
        };
        for headers in [&structured, &json, &other, &plain] {
            refused(of(headers, &large), "size", &["1048577 bytes; at most 1048576"]);
        }
        // In JSON it is too large.
        for headers in [&other, &plain] {
            refused(of(headers, &control), "size", &["at most 1048576"]);
            refused(of(headers, &bytes), "size", &["at most 1048576"]);
        }
        refused(of(&json, b"{"), "data", &["\"application/json\"", "EOF", "line 1"]);
        refused(of(&json, b"\xff"), "data", &["not JSON"]);
        for headers in [&json, &plain] {
            refused(of(headers, deep.as_bytes()), "attribute", &["\"data\"", "100 levels"]);
        }
    }
}

#[test]
fn a_plain_record_without_what_the_settings_name_is_refused_by_them() {
    let of = |headers: &[(&str, &str)], key: Option<&[u8]>, bot: &str, kind: &str| {
        let found = pairs(headers);
        decoded(Binding::Nats, &found, key, Some(b"x"), &mapping(bot, kind))
    };
    refused(of(&[], None, "", "topic"), "plain", &["not a CloudEvent", "ce-", "set `bot`"]);
    let typed = [("content-type", "text/plain")];
    refused(of(&typed, None, "", "topic"), "plain", &["\"text/plain\"", "set `bot`"]);
    refused(
        of(&[], None, "key", "topic"),
        "mapping",
        &["`bot` of the source is \"key\"", "no key"],
    );
    refused(of(&[], Some(b"\xff"), "key", "topic"), "mapping", &["key", "not UTF-8"]);
    refused(of(&[], Some(b""), "key", "topic"), "mapping", &["\"key\"", "bot id is empty"]);
    refused(of(&[], Some(&[b'x'; 300]), "key", "topic"), "mapping", &["300 bytes; at most 256"]);
    // The Schema Registry puts five bytes before a text.
    refused(of(&[], Some(b"\0\0\0\0\x01x"), "key", "topic"), "mapping", &["control characters"]);
    refused(of(&[], None, "header:a", "topic"), "mapping", &["\"header:a\"", "no such header"]);
    let twice = [("A", "1"), ("a", "1")];
    refused(of(&twice, None, "header:a", "topic"), "mapping", &["twice"]);
    let part = ["\"token:4\"", "\"orders.acme.created\""];
    refused(of(&[], None, "token:4", "topic"), "mapping", &part);
    let part = ["no type", "`type` of the source is \"header:a\"", "no such header"];
    refused(of(&[], Some(b"b"), "key", "header:a"), "mapping", &part);
}

#[test]
fn an_unreadable_record_is_kept_readably_and_cut() {
    let headers = pairs(&[("ce-id", "1\n\"x\""), ("odd\nname", "y"), ("nul", "\0")]);
    let found =
        decoded(Binding::Nats, &headers, Some(b"k\xff"), Some(b"the value"), &mapping("", "topic"));
    let (_, _, raw) = invalid(found);
    let expected = "topic: \"orders.acme.created\"\nkey: \"k\u{fffd}\"\nce-id: \"1\\n\\\"x\\\"\"\n\
        odd\\nname: \"y\"\nnul: \"\\0\"\n\nthe value";
    assert_eq!(raw, expected);

    let mut headers = vec![("n".repeat(1_000_000), vec![0xff; 1_000_000])];
    headers.extend((0..10_000).map(|_| ("\u{10ffff}".repeat(64), vec![1_u8; 2_000])));
    let value = vec![b'v'; EVENT_MAX_BYTES * 2];
    let (_, _, raw) = invalid(decoded(
        Binding::Kafka,
        &headers,
        Some(&value),
        Some(&value),
        &mapping("", "topic"),
    ));
    assert!(raw.contains("\n…: \"more headers\"\n\nvvv") && raw.ends_with("vvv"));
}

/// Not a measurement: it would take minutes if the work were not linear.
#[test]
fn the_largest_records_take_no_long_time() {
    let start = Instant::now();
    let quoted = format!("\"{}\"", "\\\\".repeat(500_000));
    let headers = binary_headers(Binding::Nats, &[("x", &quoted), ("y", &"%25".repeat(300_000))]);
    invalid(decoded(
        Binding::Nats,
        &headers,
        None,
        Some(&vec![b'['; EVENT_MAX_BYTES]),
        &mapping("", "topic"),
    ));
    let headers: Pairs = (0..HEADERS_MAX).map(|_| ("t".repeat(10_000), vec![b'x'; 100])).collect();
    let value = vec![b'['; EVENT_MAX_BYTES];
    invalid(decoded(Binding::Kafka, &headers, None, Some(&value), &mapping("header:t", "topic")));
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

fn name() -> impl Strategy<Value = String> {
    let attribute = prop_oneof![
        Just("id"),
        Just("specversion"),
        Just("source"),
        Just("type"),
        Just("botid"),
        Just("time"),
        Just("data"),
        Just("datacontenttype"),
        Just(""),
        Just("X"),
        Just("é"),
    ];
    prop_oneof![
        4 => ("[cC][eE][_-]", attribute).prop_map(|(prefix, name)| format!("{prefix}{name}")),
        1 => Just("content-type".to_owned()),
        1 => Just("traceparent".to_owned()),
        1 => "\\PC{0,6}",
    ]
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        vec(any::<u8>(), 0..20),
        "[%\"\\\\a-f0-9]{0,8}".prop_map(String::into_bytes),
        Just(b"1.0".to_vec()),
        Just(b"application/cloudevents+json".to_vec()),
        Just(b"application/json".to_vec()),
        Just(GOOD.as_bytes().to_vec()),
    ]
}

proptest! {
    #[test]
    fn no_record_makes_the_decoder_panic(
        headers in vec((name(), bytes()), 0..10),
        key in option::of(bytes()),
        value in option::of(bytes()),
        bot in prop_oneof![Just(""), Just("key"), Just("token:2"), Just("header:ce_id")],
        kind in prop_oneof![Just("topic"), Just("header:é"), Just("text:t")],
        time_ms in any::<u64>(),
        topic in "\\PC{0,5}",
    ) {
        let mapping = mapping(bot, kind);
        let headers: Vec<_> = headers.iter().map(|(name, value)| (&**name, &**value)).collect();
        let place = Place { log: &topic, partition: Some(-1), offset: u64::MAX };
        let (key, value) = (key.as_deref(), value.as_deref());
        let record = RawRecord { place, topic: &topic, key, headers: &headers, value, time_ms };
        for binding in BINDINGS {
            if let Decoded::Event(event) = decode(&record, binding, &mapping, &["x"]) {
                let json = serde_json::to_vec(&event).unwrap();
                let again = Event::from_json(&json).unwrap();
                prop_assert_eq!(serde_json::to_vec(&again).unwrap(), json);
            }
        }
    }
}
