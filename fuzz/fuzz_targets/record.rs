//! Records of Kafka and NATS, and events in requests.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fairlane::fuzzing::record(data));
