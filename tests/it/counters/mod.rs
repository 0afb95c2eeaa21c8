//! The counters: each accepted view counts once, in its total and in its day, whatever fails.

mod behind;
mod edits;
mod faults;
mod hangs;
mod histories;
mod http;
mod imports;
mod outages;
mod primaries;
mod slow;
mod store;
