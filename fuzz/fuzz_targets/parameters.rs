//! Parameters, bodies and headers of the HTTP API.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fairlane::fuzzing::parameters(data));
