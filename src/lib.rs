//! Fairlane: a per-tenant event fan-out worker pool on Redis.

#[doc(hidden)]
pub mod cli;
pub mod clock;
pub mod config;
pub mod event;
pub mod handler;
pub mod id;
pub mod keyspace;
pub mod lifecycle;
pub mod metrics;
pub mod pool;
pub mod queue;
pub mod telemetry;
