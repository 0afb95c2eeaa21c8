//! Events are read from Kafka completely and in order, whatever happens to the brokers.

mod faults;
mod positions;
mod publishing;
mod rig;
