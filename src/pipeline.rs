//! What kind of pipeline a product makes of its own. A pipeline that no product has is of the
//! default kind.

use std::sync::Arc;

use crate::ledger::Ledger;

/// How the queues of a pipeline differ from others.
#[derive(Debug, Clone, Default)]
pub struct Kind {
    /// The pipeline has entrances of its own: no event of the bus is copied for it.
    pub off_bus: bool,
    /// Of the events of its types, only those are copied that it wants for their bot.
    pub selective: bool,
    /// Attributes that it sets on events of its own: those of the bus lose them.
    pub reserved: &'static [&'static str],
    /// What its events post while they are queued; `None`: nothing.
    pub ledger: Option<Arc<dyn Ledger>>,
    /// A dead letter that is put back gets a new sequence, for a handler that passes over what is
    /// not above the last one it saw.
    pub renews: bool,
    /// Why operators cannot purge its queues; `None`: they can.
    pub protected: Option<Protected>,
}

/// Why the events of a pipeline are not purged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Protected {
    /// The name of the problem over HTTP: `urn:fairlane:problem:<code>`.
    pub code: &'static str,
    /// For people: why, and what to do instead.
    pub reason: &'static str,
}
