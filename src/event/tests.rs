use super::*;
use proptest::prelude::*;

pub(super) fn record(sequence: u64, event: &Event) -> Vec<u8> {
    let mut bytes = vec![0x93, RECORD_VERSION, 0xcf];
    bytes.extend(sequence.to_be_bytes());
    bytes.extend(event.encode());
    bytes
}

fn minimal(extra: &str) -> String {
    format!(r#"{{"specversion":"1.0","id":"1","source":"s","type":"t","botid":"b"{extra}}}"#)
}

#[test]
fn an_event_survives_json_queue_record_and_json_again() {
    let text = minimal(
        r#","subject":"u\u00e9","time":"2026-11-01T10:00:00+02:00","expirytime":"2026-11-02T00:00:00Z","traceparent":"00-x","n":[1,{"a":null}],"data":{"a":[1.5,"ü"],"b":12345678901234567890}"#,
    );
    let event = Event::from_json(text.as_bytes()).unwrap();
    let (sequence, again) = Event::decode(&record(7, &event), event.bot()).unwrap();
    assert_eq!(sequence, Sequence::new(7));
    assert_eq!(Event::sequence_of(&record(7, &event)), Some(Sequence::new(7)));
    let same: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(serde_json::to_value(&again).unwrap(), same);
    assert_eq!(again.subject(), Some("ué"));
    assert_eq!(again.expirytime(), Some("2026-11-02T00:00:00Z".parse().unwrap()));
    assert_eq!(again.extension("traceparent").unwrap(), "00-x");
}

#[test]
fn the_same_map_reads_alike_from_json_and_messagepack() {
    let value: serde_json::Value =
        serde_json::from_str(&minimal(r#","data":{"x":[1,"two",null]},"ext":5"#)).unwrap();
    let packed = rmp_serde::to_vec(&value).unwrap();
    let event = Event::from_msgpack(&packed).unwrap();
    assert_eq!(serde_json::to_value(&event).unwrap(), value);
}

/// Its JSON is stored in queues and sent to receivers.
#[test]
fn an_event_in_messagepack_is_as_small_as_one_in_json() {
    let packed = |data: &str| {
        let mut value: serde_json::Value = serde_json::from_str(&minimal("")).unwrap();
        value["data"] = data.into();
        rmp_serde::to_vec(&value).unwrap()
    };
    let control = "\u{1}".repeat(EVENT_MAX_BYTES / 6);
    assert!(packed(&control).len() < EVENT_MAX_BYTES / 5);
    assert_eq!(Event::from_msgpack(&packed(&control)).unwrap_err().label(), "size");
    let text = "x".repeat(EVENT_MAX_BYTES / 6);
    assert!(Event::from_msgpack(&packed(&text)).is_ok());
    assert!(Event::from_msgpack(&packed(&control[1_000..])).is_ok());
}

#[test]
fn a_malformed_event_is_refused_with_the_attribute_and_the_remedy() {
    let long = "x".repeat(1_025);
    let cases: Vec<(String, &str)> = vec![
        (String::new(), "EOF while parsing"),
        ("[]".into(), "expected a map of CloudEvents attributes"),
        ("null".into(), "expected a map"),
        (r#"{"specversion":"1.0"}"#.into(), r#"required attribute "id" is missing"#),
        (minimal("").replace("1.0", "0.3"), r#""0.3" is not supported, "1.0" is"#),
        (minimal("").replace(r#","botid":"b""#, ""), r#"attribute "botid" is missing"#),
        (minimal("").replace(r#""botid":"b""#, r#""botid":"""#), "bot id is empty"),
        (minimal("").replace(r#""botid":"b""#, r#""botid":"a\u0000""#), "control characters"),
        (minimal("").replace(r#""id":"1""#, r#""id":1"#), r#""id": invalid type: integer"#),
        (minimal("").replace(r#""id":"1""#, r#""id":"""#), "it is empty"),
        (minimal("").replace(r#""id":"1""#, &format!(r#""id":"{long}""#)), "it has 1025 bytes"),
        (minimal(r#","id":"2""#), r#""id" is given twice"#),
        (minimal(r#","subject":null,"subject":"x""#), r#""subject" is given twice"#),
        (minimal(r#","subject":null,"subject":null"#), r#""subject" is given twice"#),
        (minimal(r#","time":"yesterday""#), r#"attribute "time" is not usable"#),
        (minimal(r#","expirytime":"1""#), r#"attribute "expirytime" is not usable"#),
        (minimal(r#","data":"#), "expected"),
    ];
    for (text, part) in cases {
        let error = Event::from_json(text.as_bytes()).expect_err(&text).to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
    let error = Event::from_json(&vec![b' '; EVENT_MAX_BYTES + 1]).unwrap_err();
    assert_eq!(error.label(), "size");
    assert_eq!(Event::from_json(b"\xff\xfe").unwrap_err().label(), "json");
    assert_eq!(Event::from_msgpack(b"\xc1").unwrap_err().label(), "msgpack");
}

#[test]
fn a_built_event_has_each_attribute_once_and_is_not_too_large() {
    let bot = BotId::parse("b").unwrap();
    let core = "specversion id source type botid subject time expirytime data";
    for name in core.split(' ') {
        let error = Event::builder("t", &bot).extension(name, "x".into()).build().unwrap_err();
        assert_eq!(error.attribute().as_deref(), Some(name), "{error}");
        let remedy = "Event::builder or a method of its own sets it";
        assert!(error.to_string().ends_with(remedy), "{error}");
    }
    let large = "x".repeat(EVENT_MAX_BYTES);
    for builder in [
        Event::builder("t", &bot).data(&large).unwrap(),
        Event::builder("t", &bot).extension("x", large.clone().into()),
    ] {
        assert_eq!(builder.build().unwrap_err().label(), "size");
    }
}

/// What is accepted can be stored, read back and sent to a receiver in any language.
#[test]
fn nesting_is_bounded_in_every_form() {
    let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
    // As `MessagePack`: a map of the five required attributes and one more.
    let packed = |name: &str, depth: usize| {
        let mut bytes = vec![0x86];
        for (name, value) in
            [("specversion", "1.0"), ("id", "1"), ("source", "s"), ("type", "t"), ("botid", "b")]
        {
            bytes.extend(rmp_serde::to_vec(name).unwrap());
            bytes.extend(rmp_serde::to_vec(value).unwrap());
        }
        bytes.extend(rmp_serde::to_vec(name).unwrap());
        bytes.extend(vec![0x91; depth - 1]);
        bytes.push(0x90);
        bytes
    };
    for name in ["data", "extra"] {
        let text = minimal(&format!(r#","{name}":{}"#, nested(NESTING_MAX)));
        for event in [
            Event::from_json(text.as_bytes()).unwrap(),
            Event::from_msgpack(&packed(name, NESTING_MAX)).unwrap(),
        ] {
            let (_, read) = Event::decode(&record(7, &event), event.bot()).unwrap();
            let push = serde_json::json!({ "events": [read] }).to_string();
            assert!(serde_json::from_str::<serde_json::Value>(&push).is_ok());
        }
        let error = Event::from_msgpack(&packed(name, NESTING_MAX + 1)).unwrap_err();
        assert_eq!(error.attribute().as_deref(), Some(name), "{error}");
        for depth in [NESTING_MAX + 1, 127, 1_021, 100_000] {
            let text = minimal(&format!(r#","{name}":{}"#, nested(depth)));
            assert!(Event::from_json(text.as_bytes()).is_err(), "{name} {depth}");
            assert!(Event::from_msgpack(&packed(name, depth)).is_err(), "{name} {depth}");
        }
    }
    // Brackets in texts nest nothing.
    let text = minimal(&format!(r#","data":["\"{}\\",1]"#, "[".repeat(500)));
    assert!(Event::from_json(text.as_bytes()).is_ok());
}

#[test]
fn the_end_of_the_year_9999_is_a_time() {
    for time in
        ["9999-12-31T23:59:59Z", "9999-12-31T23:59:59.999999999+00:00", "9999-12-31T00:00:00-23:59"]
    {
        let event = Event::from_json(minimal(&format!(r#","expirytime":"{time}""#)).as_bytes());
        assert_eq!(event.unwrap().expirytime(), Some(Timestamp::MAX), "{time}");
    }
    for time in
        ["9999-12-31", "9999-12-31T23:59:59", "9999-12-32T00:00:00Z", "10000-01-01T00:00:00Z"]
    {
        let event = Event::from_json(minimal(&format!(r#","expirytime":"{time}""#)).as_bytes());
        assert!(event.is_err(), "{time}");
    }
}

#[test]
fn a_record_of_a_version_from_the_future_is_refused() {
    let event = Event::from_json(minimal("").as_bytes()).unwrap();
    let mut bytes = record(1, &event);
    bytes[1] = RECORD_VERSION + 1;
    assert_eq!(Event::decode(&bytes, event.bot()).unwrap_err().label(), "record");
}

/// A record that version 1 wrote. Every later version must be able to read it.
#[test]
fn a_stored_record_of_version_1_is_still_read() {
    let bytes = b"\x93\x01\xcf\x00\x06\x43\x00\x00\x00\x00\x01\x98\xa2e1\xa4shop\xabtag.applied\xa2u7\xc0\xc0\xad{\"tag\":\"vip\"}\xc0";
    let bot = BotId::parse("b").unwrap();
    let (sequence, event) = Event::decode(bytes, &bot).unwrap();
    assert_eq!(sequence.get(), 0x0006_4300_0000_0001);
    assert_eq!((event.id(), event.source(), event.kind()), ("e1", "shop", "tag.applied"));
    assert_eq!((event.subject(), event.data()), (Some("u7"), Some(r#"{"tag":"vip"}"#)));
}

/// A value of JSON. Some are about as large as an event may be.
fn value() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        any::<i64>().prop_map(serde_json::Value::from),
        any::<bool>().prop_map(serde_json::Value::from),
        Just(serde_json::Value::Null),
        "\\PC{0,20}".prop_map(serde_json::Value::from),
    ];
    let list = proptest::collection::vec(leaf.clone(), 0..3).prop_map(serde_json::Value::from);
    // A control character takes six bytes.
    let large = (EVENT_MAX_BYTES / 6 - 50..EVENT_MAX_BYTES / 6)
        .prop_map(|length| serde_json::Value::from("\u{1}".repeat(length)));
    prop_oneof![20 => leaf, 10 => list, 1 => large]
}

proptest! {
    #[test]
    fn every_built_event_is_read_back_from_its_json(
        kind in "\\PC{0,9}",
        id in "\\PC{1,9}",
        subject in proptest::option::of("\\PC{0,9}"),
        expirytime in proptest::option::of(any::<i32>()),
        data in proptest::option::of(value()),
        extensions in proptest::collection::vec(
            (prop_oneof!["[a-z]{1,3}", Just("botid".to_owned()), Just("data".to_owned())], value()),
            0..3,
        ),
    ) {
        let mut builder = Event::builder(kind, &BotId::parse("b").unwrap()).id(id);
        if let Some(subject) = subject {
            builder = builder.subject(subject);
        }
        if let Some(seconds) = expirytime {
            builder = builder.expirytime(Timestamp::from_second(seconds.into()).unwrap());
        }
        if let Some(data) = data {
            builder = builder.data(&data).unwrap();
        }
        for (name, value) in extensions {
            builder = builder.extension(name, value);
        }
        if let Ok(event) = builder.build() {
            let json = serde_json::to_string(&event).unwrap();
            let read = Event::from_json(json.as_bytes()).unwrap();
            prop_assert_eq!(serde_json::to_string(&read).unwrap(), json);
        }
    }

    #[test]
    fn no_bytes_make_a_decoder_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let bot = BotId::parse("b").unwrap();
        let _ = Event::from_json(&bytes);
        let _ = Event::from_msgpack(&bytes);
        let _ = Event::decode(&bytes, &bot);
        let mut headed = vec![0x93, 1, 0xcf, 0, 0, 0, 0, 0, 0, 0, 1];
        headed.extend(&bytes);
        let _ = Event::decode(&headed, &bot);
        let _ = Event::sequence_of(&headed);
    }

    #[test]
    fn a_truncated_record_is_an_error_not_an_event(cut in 0_usize..60) {
        let event = Event::from_json(minimal(r#","data":{"a":"some text that is long enough"}"#).as_bytes()).unwrap();
        let whole = record(1, &event);
        let cut = cut.min(whole.len() - 1);
        prop_assert!(Event::decode(&whole[..cut], event.bot()).is_err());
    }
}
