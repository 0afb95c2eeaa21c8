//! Pipelines that exist without being written: tunable like any other, and off with
//! `enabled = false`.

use crate::id::PipelineName;

/// The handler of [`crate::automations::PIPELINE`], which no other pipeline may have.
pub const AUTOMATION: &str = "automation";

/// The handler of [`crate::counters::PIPELINE`], which no other pipeline may have.
pub const COUNTER: &str = "counter";

/// The handler of [`crate::notifications::PIPELINE`], which no other pipeline may have.
pub const NOTIFY: &str = "notify";

/// The handler that sends slices to [`PipelineConfig::url`](super::PipelineConfig::url).
pub const PUSH: &str = "push";

/// Their names, and their defaults over those of every pipeline.
pub(super) const BUILT_IN: [(&str, &str); 3] = [
    (crate::automations::PIPELINE, include_str!("automations.toml")),
    (crate::counters::PIPELINE, include_str!("counters.toml")),
    (crate::notifications::PIPELINE, include_str!("notifications.toml")),
];

/// Whether a pipeline of this name exists without being written.
#[must_use]
pub fn is_built_in(name: &PipelineName) -> bool {
    BUILT_IN.iter().any(|(known, _)| *known == name.as_str())
}
