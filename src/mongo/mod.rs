//! MongoDB, the durable store besides Redis. It may be unavailable for hours. Components that need
//! it report this and wait. All others continue.

pub mod client;
pub(crate) mod coalescer;
pub(crate) mod indexes;
pub(crate) mod large;
pub mod private;
pub(crate) mod turns;
mod url;
pub mod watch;

pub(crate) use url::server;
pub use url::{MongoUrl, MongoUrlError};
