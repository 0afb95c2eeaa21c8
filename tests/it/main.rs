//! The integration tests, against real servers. Each folder has the promises of one part, each file
//! one promise; `support` has the servers, networks and processes that they use.

mod automations;
mod core;
mod counters;
mod http;
mod isolation;
mod model;
mod notifications;
mod operations;
mod support;
