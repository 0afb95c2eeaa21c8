//! One file per promise, against real servers.

mod acl;
mod bus;
mod cli;
mod cluster;
mod exhaustive;
mod fairness;
mod fanout;
mod faults;
mod health;
mod history_checker;
mod hostile;
mod lifecycle;
mod limits;
mod model;
mod order;
mod outcomes;
mod poison;
mod protocol;
mod readme;
mod roles;
mod running;
mod scripts;
mod support;
mod tls;
