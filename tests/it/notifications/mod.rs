//! The notifications: each is sent once when it is due, within its caps, and survives every crash.

mod commands;
mod delivery;
mod faults;
mod http;
mod page;
