//! Pipelines that exist without being written: tunable like any other, and off with
//! `enabled = false`.

use crate::id::PipelineName;

/// The handler of [`PipelineName::AUTOMATIONS`], which no other pipeline may have.
pub const AUTOMATION: &str = "automation";

/// The handler of [`PipelineName::COUNTERS`], which no other pipeline may have.
pub const COUNTER: &str = "counter";

/// The handler of [`PipelineName::NOTIFICATIONS`], which no other pipeline may have.
pub const NOTIFY: &str = "notify";

/// The handler that sends slices to [`PipelineConfig::url`](super::PipelineConfig::url).
pub const PUSH: &str = "push";

/// Their names, and their defaults over those of every pipeline.
pub(super) const BUILT_IN: [(&str, &str); 3] = [
    (PipelineName::AUTOMATIONS, include_str!("automations.toml")),
    (PipelineName::COUNTERS, include_str!("counters.toml")),
    (PipelineName::NOTIFICATIONS, include_str!("notifications.toml")),
];

/// Whether a pipeline of this name exists without being written.
#[must_use]
pub fn is_built_in(name: &PipelineName) -> bool {
    BUILT_IN.iter().any(|(known, _)| *known == name.as_str())
}
