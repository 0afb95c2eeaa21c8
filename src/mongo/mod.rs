//! The durable stores besides Redis. They are remote and may be unavailable for hours. Components
//! that need one report this and wait; all others continue.

pub mod client;
pub(crate) mod coalescer;
pub mod private;
pub(crate) mod turns;
mod url;
pub mod watch;

pub(crate) use url::server;
pub use url::{MongoUrl, MongoUrlError};
