//! One file per promise, against real servers.
fn main() {}
