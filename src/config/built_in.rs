//! Built-in pipelines: they exist without a section in the configuration, can be tuned like any
//! other, and are turned off with `enabled = false`.

use crate::id::PipelineName;

/// The pipeline of the counters.
pub(crate) const COUNTERS: &str = "counters";

/// The pipeline of the notifications.
pub(crate) const NOTIFICATIONS: &str = "notifications";

/// The pipeline of the automations.
pub(crate) const AUTOMATIONS: &str = "automations";

/// The handler of `automations`. No other pipeline may use it.
pub const AUTOMATION: &str = "automation";

/// The handler of `counters`. No other pipeline may use it.
pub const COUNTER: &str = "counter";

/// The handler of `notifications`. No other pipeline may use it.
pub const NOTIFY: &str = "notify";

/// The handler that sends slices to [`PipelineConfig::url`](super::PipelineConfig::url).
pub const PUSH: &str = "push";

/// The names of the built-in pipelines, and their changes to the default pipeline settings.
pub(super) const BUILT_IN: [(&str, &str); 3] = [
    (AUTOMATIONS, include_str!("automations.toml")),
    (COUNTERS, include_str!("counters.toml")),
    (NOTIFICATIONS, include_str!("notifications.toml")),
];

/// Whether a built-in pipeline has this name.
#[must_use]
pub fn is_built_in(name: &PipelineName) -> bool {
    BUILT_IN.iter().any(|(known, _)| *known == name.as_str())
}
