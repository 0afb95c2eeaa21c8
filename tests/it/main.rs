//! One file per promise, against real servers.

mod exhaustive;
mod history_checker;
mod model;
mod roles;
mod support;
