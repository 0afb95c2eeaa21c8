//! The queue protocol as a model: every interleaving of a small system, and random operations on the
//! model and on the real scripts side by side.

mod exhaustive;
mod protocol;
mod state_machine;
