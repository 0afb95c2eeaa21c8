//! The metrics of the automations.

use metrics::{Counter, counter};

use super::rule::Action;
use crate::metrics::{
    AUTOMATION_ACTIONS, AUTOMATION_DOUBTFUL, AUTOMATION_ERRORS, AUTOMATION_MATCHES,
};

/// Metrics of the automations.
#[derive(Clone)]
pub(crate) struct AutomationMetrics {
    pub(crate) matches: Counter,
    pub(crate) errors: Counter,
    pub(crate) doubtful: Counter,
}

impl AutomationMetrics {
    /// The handles, at 0.
    pub(crate) fn new() -> Self {
        for action in Action::NAMES {
            counter!(AUTOMATION_ACTIONS, "action" => action).absolute(0);
        }
        let metrics = Self {
            matches: counter!(AUTOMATION_MATCHES),
            errors: counter!(AUTOMATION_ERRORS),
            doubtful: counter!(AUTOMATION_DOUBTFUL),
        };
        for counter in [&metrics.matches, &metrics.errors, &metrics.doubtful] {
            counter.absolute(0);
        }
        metrics
    }

    /// A rule caused an action.
    pub(crate) fn action(action: &'static str) {
        counter!(AUTOMATION_ACTIONS, "action" => action).increment(1);
    }
}

impl std::fmt::Debug for AutomationMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AutomationMetrics")
    }
}
