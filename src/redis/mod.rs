//! Redis: connections, the key table, the scripts, the private server. Nothing else in the crate
//! speaks to Redis in its own words.
//!
//! Invariant: no script runs on a connection before `recover` ran there for every pipeline and
//! shard that the connection serves. That is why no connection that reconnects by itself is used,
//! nor a client of clusters: [`Link`] finds the node of a key itself.
//!
//! | file | holds |
//! |---|---|
//! | `url` | the address of Redis, which may hold a password |
//! | `target` | where Redis is, and what helps when it cannot be reached |
//! | `topology`, `route` | which node holds which slot; which slot a command is for |
//! | `node` | one server: making connections, `recover` first |
//! | `pooled` | connections that a call has to itself |
//! | `link`, `cluster` | sending commands, in a cluster each to its node; what is done when a slot has moved |
//! | `server`, `primary` | questions of operators, about Redis as a whole and one server of it |

mod cluster;
mod error;
pub mod keys;
mod link;
mod node;
mod pooled;
mod primary;
pub mod private;
mod reply;
mod route;
pub mod scripts;
mod server;
mod target;
mod topology;
mod url;

pub use error::RedisError;
pub use link::Link;
pub use pooled::POOLED_MAX;
pub use primary::{Primary, ServerInfo};
pub use reply::ReplyError;
pub(crate) use reply::{Reply, parse_score};
pub use server::{GroupView, Server, StreamKind, StreamView};
pub use target::Target;
pub use url::{RedisUrl, RedisUrlError};
