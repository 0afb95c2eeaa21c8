//! Events are read from Kafka completely and in order, whatever happens to the brokers.

mod faults;
mod leaders;
mod positions;
mod publishing;
mod rig;
