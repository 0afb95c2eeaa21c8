//! The durable stores beside Redis. They are remote and may fail for a night: what needs one says
//! so and waits, everything else goes on.

pub(crate) mod groups;
pub mod mongo;
pub mod private;
pub(crate) mod turns;
pub mod watch;
