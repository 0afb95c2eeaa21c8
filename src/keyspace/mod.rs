//! Redis.

pub mod private;
