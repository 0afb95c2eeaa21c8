//! The integration tests, against real servers. Each folder has the promises of one part, each file
//! one promise; `support` has the servers, networks and processes that they use.

mod automations;
mod core;
mod counters;
mod history_checker;
mod http;
mod model;
mod notifications;
mod operations;
mod overload_bench;
mod support;

use support::cli;
