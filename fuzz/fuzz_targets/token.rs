//! Signed tokens.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fairlane::fuzzing::token(data));
