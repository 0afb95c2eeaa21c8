//! One file per promise, against real servers.

mod exhaustive;
mod model;
