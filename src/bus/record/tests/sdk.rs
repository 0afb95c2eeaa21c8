//! Records that the official CloudEvents SDK made, see `tests/it/fixtures/cloudevents_producer.py`.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

use super::*;

const RECORDS: &str = include_str!("../../../../tests/it/fixtures/cloudevents_records.json");

#[test]
fn events_of_the_official_sdk_are_read_in_both_modes_of_both_bindings() {
    let records: Vec<Value> = serde_json::from_str(RECORDS).unwrap();
    assert!(records.len() >= 20, "{}", records.len());
    for record in records {
        let text = |name: &str| record[name].as_str().unwrap();
        let binding = if text("engine") == "kafka" { Binding::Kafka } else { Binding::Nats };
        let headers: Vec<(String, String)> =
            serde_json::from_value(record["headers"].clone()).unwrap();
        let headers: Pairs =
            headers.into_iter().map(|(name, value)| (name, value.into_bytes())).collect();
        let value = BASE64_STANDARD.decode(text("body_base64")).unwrap();
        let mut expected = record["event"].clone();
        if text("mode") == "binary" {
            // Headers have no numbers.
            expected["priority"] = json!("5");
        }
        let found = decoded(binding, &headers, None, Some(&value), &mapping("", "topic"));
        assert_eq!(event(found), expected, "{record}");
        // A producer that keys by bot needs no extension attribute.
        if let (Some(key), "binary") = (record["key"].as_str(), text("mode")) {
            let headers: Pairs =
                headers.into_iter().filter(|(name, _)| !name.ends_with("botid")).collect();
            let key = Some(key.as_bytes());
            let found = decoded(binding, &headers, key, Some(&value), &mapping("key", "topic"));
            assert_eq!(event(found), expected, "{record}");
        }
    }
}
