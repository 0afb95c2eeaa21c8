//! One file per promise, against real servers.

mod bus;
mod check;
mod cli;
mod exhaustive;
mod fairness;
mod fanout;
mod faults;
mod health;
mod history_checker;
mod hostile;
mod lifecycle;
mod limits;
mod listing;
mod model;
mod order;
mod outbound;
mod outcomes;
mod poison;
mod presence;
mod protocol;
mod readme;
mod roles;
mod running;
mod scripts;
mod store;
mod support;
