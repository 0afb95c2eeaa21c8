//! Events in JSON and in `MessagePack`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fairlane::fuzzing::event(data));
