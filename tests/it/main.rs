//! One file per promise, against real servers.

mod cli;
mod exhaustive;
mod history_checker;
mod model;
mod protocol;
mod roles;
mod scripts;
mod support;
