//! Fairlane: a per-tenant event fan-out worker pool on Redis.

pub mod clock;
pub mod event;
pub mod history;
pub mod id;
