//! One file per promise, against real servers.

mod async_push;
mod bus;
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
mod push;
mod readme;
mod roles;
mod running;
mod scripts;
mod support;
