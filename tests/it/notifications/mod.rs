//! The notifications: each is sent when it is due, once, within its caps, and survives every crash.

mod delivery;
mod faults;
mod http;
mod page;
