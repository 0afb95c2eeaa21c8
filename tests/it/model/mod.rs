//! The queue protocol as a model. One test explores every interleaving of a small system. Another
//! runs random operations, also with lanes, on the model and on the real scripts side by side. A third
//! explores the lanes of one bot. A fourth tests the checker that judges recorded runs. [`mutants`] changes
//! the scripts, to see whether the random operations notice.

mod exhaustive;
mod history_checker;
mod lanes;
mod mutants;
mod protocol;
mod state_machine;
