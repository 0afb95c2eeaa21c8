//! The durable stores beside Redis. They are remote and may fail for a night: what needs one says
//! so and waits, everything else goes on.

pub mod automations;
pub mod counters;
mod groups;
pub mod mongo;
pub mod private;
pub mod subscribers;
pub(crate) mod turns;
pub mod watch;
