//! Built-in pipelines: they exist without a section in the configuration, can be tuned like any
//! other, and are turned off with `enabled = false`.

use crate::id::PipelineName;

/// The handler of [`crate::automations::PIPELINE`]. No other pipeline may use it.
pub const AUTOMATION: &str = "automation";

/// The handler of [`crate::counters::PIPELINE`]. No other pipeline may use it.
pub const COUNTER: &str = "counter";

/// The handler of [`crate::notifications::PIPELINE`]. No other pipeline may use it.
pub const NOTIFY: &str = "notify";

/// The handler that sends slices to [`PipelineConfig::url`](super::PipelineConfig::url).
pub const PUSH: &str = "push";

/// The names of the built-in pipelines, and their changes to the default pipeline settings.
pub(super) const BUILT_IN: [(&str, &str); 3] = [
    (crate::automations::PIPELINE, include_str!("automations.toml")),
    (crate::counters::PIPELINE, include_str!("counters.toml")),
    (crate::notifications::PIPELINE, include_str!("notifications.toml")),
];

/// Whether a built-in pipeline has this name.
#[must_use]
pub fn is_built_in(name: &PipelineName) -> bool {
    BUILT_IN.iter().any(|(known, _)| *known == name.as_str())
}
