//! The `fairlane` command.
fn main() {}
