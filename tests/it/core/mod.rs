//! The pipeline from the bus to the handler: order, fairness, leases and bounds, and the promises
//! of each script. No fault of a process, a network or a store loses, repeats or reorders an event.

mod async_push;
mod bus;
mod clocks;
mod cluster;
mod copied_leases;
mod copy_first;
mod damage;
mod elsewhere;
mod fairness;
mod fanout;
mod faults;
mod history;
mod hostile_ids;
mod lanes;
mod limits;
mod links;
mod missing_primary;
mod order;
mod outbound;
mod outcomes;
mod poison;
mod pooled;
mod push;
mod push_order;
mod rate;
mod recovery;
mod replay;
mod replicas;
mod scripts;
mod sentinel;
mod starting;
mod store;
mod throttled;
mod total;
mod wakes;
