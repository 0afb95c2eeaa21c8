//! One file per promise, against real servers.

mod exhaustive;
mod history_checker;
mod model;
mod order;
mod roles;
mod support;
