//! The properties that a product sets for its own pipeline. Other pipelines have the default
//! properties.

use std::sync::Arc;

use crate::ledger::Ledger;

/// How the queues of a pipeline differ from ordinary ones.
#[derive(Debug, Clone, Default)]
pub struct Kind {
    /// The pipeline has its own entry points: no event of the bus is copied for it.
    pub off_bus: bool,
    /// The product selects which events of its types are copied for their bot.
    pub selective: bool,
    /// Attributes that the product sets on its own events. They are removed from events of the bus.
    pub reserved: &'static [&'static str],
    /// The ledger of its events; `None`: no ledger. With one, no event becomes a dead letter because its
    /// attempts failed: `max_attempts` has no effect, and only a
    /// [permanent](crate::handler::Failure::permanent) failure or the
    /// [outcome](crate::handler::Outcomes::dead) of a handler makes one. After any other failure, the events
    /// are tried again in slices, not one by one.
    pub ledger: Option<Arc<dyn Ledger>>,
    /// Whether a redriven dead letter gets a new sequence. Needed if the handler skips events up to
    /// the highest sequence it has seen.
    pub renews: bool,
    /// Why operators cannot purge its queues; `None`: they can.
    pub protected: Option<Protected>,
}

/// Why the events of a pipeline cannot be purged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Protected {
    /// The code of the HTTP problem: `urn:fairlane:problem:<code>`.
    pub code: &'static str,
    /// The title of the problem: names the events that cannot be purged.
    pub title: &'static str,
    /// The explanation for users: why, and what to do instead.
    pub reason: &'static str,
}
