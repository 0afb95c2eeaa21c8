//! Buses beside Redis Streams, with the servers that `.ci/setup test` installs.

mod brokers;
mod engines;
#[cfg(all(feature = "nats", feature = "kafka"))]
mod fleets;
#[cfg(feature = "kafka")]
mod kafka;
#[cfg(feature = "nats")]
mod nats;
