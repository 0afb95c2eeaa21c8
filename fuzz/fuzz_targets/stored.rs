//! What is read back from Redis and `MongoDB`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fairlane::fuzzing::stored(data));
