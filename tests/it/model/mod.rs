//! The queue protocol as a model. One test runs random operations, also with lanes, on the model and on the
//! real scripts side by side. [`rules`] tests the model itself, and another file the checker that judges
//! recorded runs. [`mutants`] changes the scripts, to see whether the random operations notice.
//!
//! The package `fairlane-model` explores every interleaving of small systems, in optimised code.

mod history_checker;
mod mutants;
mod protocol;
mod rules;
mod state_machine;
