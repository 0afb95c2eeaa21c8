//! One file per promise, against real servers.

mod cli;
