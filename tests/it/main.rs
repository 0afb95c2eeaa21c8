//! The integration tests, against real servers. Each folder tests one part, and each file one
//! promise of that part. `support` has the servers, networks and processes that the tests use.

mod automations;
#[cfg(all(feature = "kafka", feature = "nats"))]
mod bus;
mod core;
mod counters;
mod http;
mod isolation;
mod model;
mod notifications;
mod operations;
mod support;
