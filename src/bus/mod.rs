//! The buses that events are read from and published to. A [`Source`] knows one bus; [`reader`]
//! copies its logs into the queues.
//!
//! The position in a log is stored with the data (`hwm` per shard, see `lua/enqueue.lua`), not with
//! the bus. So the queues and the position roll back together if Redis loses its last writes, and
//! each entry is copied exactly once, regardless of which process repeats the copy.

mod aside;
pub(crate) mod backlog;
mod error;
mod gap;
#[cfg(feature = "kafka")]
pub mod kafka;
#[cfg(feature = "nats")]
pub mod nats;
mod publish;
pub mod reader;
pub mod record;
pub mod redis_stream;
pub mod source;

pub use self::error::BusError;
pub(crate) use self::publish::publish;
pub use self::source::Source;
pub use crate::event::entry::{Entry, EntryError, InvalidEntry};

/// The bus that events are published to, if it is not in Redis.
#[derive(Debug, Clone)]
pub(crate) struct Published(pub(crate) std::sync::Arc<dyn Source>);

/// Maximum number of bytes kept of an unreadable entry.
const RAW_MAX: usize = 64 * 1_024;
