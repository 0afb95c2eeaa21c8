//! Imports of counters.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fairlane::fuzzing::import(data));
