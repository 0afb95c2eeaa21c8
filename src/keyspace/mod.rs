//! Redis: connections, the key table, the scripts, the private server. Nothing else in the crate
//! speaks to Redis in its own words.
//!
//! Invariant: no script runs on a connection before `recover` ran there for every pipeline and
//! shard that the connection serves. That is why no connection that reconnects by itself is used.

mod error;
pub mod keys;
mod link;
mod node;
mod primary;
pub mod private;
mod reply;
mod route;
pub mod scripts;
mod server;
mod target;
mod topology;

pub use error::StoreError;
pub use link::Link;
pub use primary::{Primary, ServerInfo};
pub use reply::ReplyError;
pub(crate) use reply::{Reply, parse_score};
pub use server::{GroupView, Server, StreamKind, StreamView};
pub use target::Target;
