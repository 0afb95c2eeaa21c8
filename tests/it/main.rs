//! One file per promise, against real servers.

mod cli;
mod exhaustive;
mod history_checker;
mod model;
mod readme;
mod roles;
mod support;
