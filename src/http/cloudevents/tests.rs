use serde_json::{Value, json};

use super::*;

const GOOD: &str = r#"{"specversion":"1.0","id":"1","source":"s","type":"t","botid":"b"}"#;

fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.append(*name, value.parse().unwrap());
    }
    headers
}

fn read(pairs: &[(&'static str, &str)], body: &[u8]) -> Result<Vec<Value>, Value> {
    let headers = headers(pairs);
    let events = Mode::of(&headers).and_then(|mode| mode.read(&headers, body));
    let events = events.map_err(|problem| serde_json::to_value(problem).unwrap())?;
    assert_eq!(events.bots.len(), events.texts.len());
    Ok(events.texts.iter().map(|text| serde_json::from_slice(text).unwrap()).collect())
}

fn read_batch(body: &str) -> Result<Vec<Value>, Value> {
    read(&[("content-type", BATCH)], body.as_bytes())
}

#[test]
fn the_content_type_tells_how_events_are_written_and_headers_make_the_rest_binary() {
    for (pairs, expected) in [
        (&[("content-type", STRUCTURED)][..], Ok(Mode::Structured)),
        (&[("content-type", "Application/CloudEvents+JSON; charset=utf-8")], Ok(Mode::Structured)),
        (&[("content-type", BATCH)], Ok(Mode::Batch)),
        (&[("content-type", JSON)], Ok(Mode::Either)),
        (&[("content-type", JSON), ("ce-id", "1")], Ok(Mode::Binary)),
        (&[("content-type", "text/plain; charset=latin1"), ("ce-id", "1")], Ok(Mode::Binary)),
        (&[("ce-id", "1")], Ok(Mode::Binary)),
        (&[("content-type", STRUCTURED), ("ce-id", "1")], Ok(Mode::Structured)),
        (&[("content-type", "application/cloudevents+avro")], Err(())),
        (&[("content-type", "text/plain")], Err(())),
        (&[("content-type", "application/json; charset=latin1")], Err(())),
        (&[], Err(())),
    ] {
        assert_eq!(Mode::of(&headers(pairs)).map_err(drop), expected, "{pairs:?}");
    }
}

#[test]
fn a_batch_is_passed_on_word_for_word() {
    let odd = r#"{ "botid":"b", "data": {"a": [1, "]", "}"]} ,"specversion":"1.0","id":"2",
        "source":"s","type":"t"}"#;
    let body = format!(" [ {GOOD} ,{odd}\n] ");
    let headers = headers(&[("content-type", BATCH)]);
    let events = Mode::Batch.read(&headers, body.as_bytes()).unwrap();
    assert_eq!(events.texts, [GOOD.as_bytes(), odd.as_bytes()]);
    assert_eq!(read_batch("[]").unwrap().len(), 0);
    assert_eq!(read_batch(" [ ] ").unwrap().len(), 0);
}

#[test]
fn every_bad_event_of_a_batch_is_named_with_its_field() {
    let body = format!(
        r#"[{GOOD},{{"id":1}},{GOOD},[1],"x",{{"specversion":"1.0","id":"1","source":"s","type":"t"}},
        {{"specversion":"1.0","id":"1","source":"s","type":"t","botid":"\u0000"}}]"#
    );
    let problem = read_batch(&body).unwrap_err();
    assert_eq!(problem["type"], "urn:fairlane:problem:invalid-events");
    let errors: Vec<_> = problem["errors"].as_array().unwrap().iter().collect();
    let named: Vec<_> = errors.iter().map(|error| (&error["index"], &error["field"])).collect();
    let expected = [
        (json!(1), json!("id")),
        (json!(3), Value::Null),
        (json!(4), Value::Null),
        (json!(5), json!("botid")),
        (json!(6), json!("botid")),
    ];
    assert_eq!(named, expected.each_ref().map(|(index, field)| (index, field)), "{problem}");
}

#[test]
fn invalid_json_is_refused_with_the_place() {
    for body in [
        "",
        " ",
        "[",
        "[,]",
        "[{]",
        &format!("[{GOOD}"),
        &format!("[{GOOD},]"),
        &format!("[{GOOD}]]"),
        &format!("[{GOOD} {GOOD}]"),
        "nonsense",
        "[1,2",
        "[nul]",
    ] {
        let problem = read_batch(body).unwrap_err();
        assert_eq!(problem["status"], 400, "{body}: {problem}");
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.contains("line 1 column"), "{body}: {problem}");
    }
    assert_eq!(read_batch(GOOD).unwrap_err()["status"], 400);
    let cut = read(&[("content-type", STRUCTURED)], &GOOD.as_bytes()[..30]).unwrap_err();
    assert!(cut["detail"].as_str().unwrap().contains("line 1 column 30"), "{cut}");
    let latin = read(&[("content-type", BATCH)], b"[{\"id\":\"\xff\"}]").unwrap_err();
    assert_eq!(latin["status"], 400);
}

#[test]
fn a_batch_is_bounded() {
    let of = |count: usize| read_batch(&format!("[{}]", vec![GOOD; count].join(",")));
    assert_eq!(of(BATCH_MAX).unwrap().len(), BATCH_MAX);
    assert_eq!(of(BATCH_MAX + 1).unwrap_err()["status"], 413);
}

#[test]
fn headers_are_the_attributes_of_a_binary_event_and_the_body_its_data() {
    let attributes = [
        ("ce-specversion", "1.0"),
        ("ce-id", "\"a\\\"b%20c\""),
        ("ce-source", "/s"),
        ("ce-type", "t"),
        ("ce-botid", "b%C3%A4r"),
        ("ce-traceparent", "00-1"),
    ];
    let of = |kind: Option<&'static str>, body: &[u8]| {
        let mut pairs = attributes.to_vec();
        pairs.extend(kind.map(|kind| ("content-type", kind)));
        let events = read(&pairs, body)?;
        assert_eq!((&events[0]["id"], &events[0]["botid"]), (&json!("a\"b c"), &json!("bär")));
        assert_eq!(events[0]["traceparent"], "00-1");
        assert_eq!(events[0].get("datacontenttype").and_then(Value::as_str), kind);
        Ok::<_, Value>(events.into_iter().next().unwrap())
    };
    assert_eq!(of(Some("application/json"), b"{\"a\": 1}").unwrap()["data"], json!({"a": 1}));
    assert_eq!(of(Some("application/x+json"), b"1").unwrap()["data"], 1);
    assert_eq!(of(Some("text/plain"), b"hello").unwrap()["data"], "hello");
    assert_eq!(of(Some("image/png"), b"\xff\x00").unwrap()["data_base64"], "/wA=");
    assert_eq!(of(None, b"[1]").unwrap()["data"], json!([1]));
    assert_eq!(of(None, b"").unwrap().get("data"), None);
    let broken = of(Some("application/json"), b"{").unwrap_err();
    assert_eq!(broken["errors"][0]["field"], "data");
}

#[test]
fn a_bad_binary_event_is_refused_by_its_attributes() {
    for (pairs, field) in [
        (&[("ce-id", "1")][..], "specversion"),
        (&[("ce-id", "1"), ("ce-id", "2")], "id"),
        (&[("ce-id", "%ff")], "id"),
        (&[("ce-data", "1")], "data"),
    ] {
        let problem = read(pairs, b"").unwrap_err();
        assert_eq!(problem["errors"][0]["field"], field, "{problem}");
        assert_eq!(problem["errors"][0]["index"], 0, "{problem}");
    }
}

#[test]
fn an_event_with_as_many_values_as_may_be_gets_no_trace_context_of_the_request() {
    let own = |values: usize| {
        let mut event: Value = serde_json::from_str(GOOD).unwrap();
        event["list"] = json!(vec![0; values - 1]);
        let (headers, body) = (headers(&[("content-type", STRUCTURED)]), event.to_string());
        let events = Mode::Structured.read(&headers, body.as_bytes()).unwrap();
        (events.texts.len(), events.own.len())
    };
    assert_eq!([own(998), own(999), own(1_000)], [(1, 0), (1, 1), (1, 1)]);
}
