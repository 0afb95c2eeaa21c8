//! The queue protocol as a model: every interleaving of a small system, and random operations on the
//! model and on the real scripts side by side; and the checker that judges recorded runs.

mod exhaustive;
mod history_checker;
mod protocol;
mod state_machine;
