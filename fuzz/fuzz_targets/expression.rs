//! CEL expressions and globs.
#![no_main]

libfuzzer_sys::fuzz_target!(
    init: fairlane::fuzzing::tolerate_panics_of_the_parser(),
    |data: &[u8]| fairlane::fuzzing::expression(data)
);
