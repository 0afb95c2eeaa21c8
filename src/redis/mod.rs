//! Redis: connections, the key table, the scripts, the private server. All other modules access
//! Redis only through this one.
//!
//! Invariant: before any script runs on a connection, `recover` has run there for every pipeline
//! and shard that the connection serves. Therefore the crate uses neither a connection that
//! reconnects by itself nor a cluster client: [`Link`] finds the node of a key itself.
//!
//! | file | holds |
//! |---|---|
//! | `url` | the address of Redis, which may contain a password |
//! | `target` | the Redis deployment, and remedies for connection errors |
//! | `topology`, `route` | which node holds which slot; the slot of a command |
//! | `node` | one server: connects and runs `recover` first |
//! | `pooled` | connections for one call at a time |
//! | `sentinel` | asks sentinels for the primary |
//! | `replicas` | waits until replicas have a write |
//! | `link`, `cluster` | send each command to its node, again if its slot was migrated |
//! | `serving` | which primaries answer, and serve |
//! | `subscriber` | connections for subscriptions |
//! | `server`, `primary` | inspection for operators: Redis as a whole, and one of its servers |

pub mod aside;
mod cluster;
mod error;
pub mod keys;
mod latency;
mod link;
mod node;
pub(crate) mod pages;
mod pooled;
mod primary;
pub mod private;
mod replicas;
mod reply;
mod route;
pub mod scripts;
mod sentinel;
mod server;
mod serving;
mod silence;
mod slot;
mod subscriber;
mod target;
mod topology;
mod url;

pub use error::RedisError;
pub use link::Link;
pub use pooled::POOLED_MAX;
pub use primary::{Primary, Replication, ServerInfo};
pub use replicas::{ReplicaWait, Unconfirmed};
pub use reply::ReplyError;
pub(crate) use reply::{Reply, parse_score};
pub use server::{GroupView, Server, StreamKind, StreamView};
pub(crate) use serving::Serving;
pub use target::Target;
pub(crate) use target::timed_out;
pub use url::{RedisUrl, RedisUrlError};
