//! The metrics of the notifications.

use metrics::{Gauge, Histogram, counter, gauge, histogram};

use super::record::{NO_KIND, OUTCOMES};
use crate::metrics::{
    NOTIFICATIONS, NOTIFICATIONS_DUE, NOTIFICATIONS_LATENESS, NOTIFICATIONS_OVERDUE,
};
use crate::outbound::breakers::breaker_open;

/// Metrics of the notifications.
#[derive(Clone)]
pub(crate) struct NotificationMetrics {
    /// From due to the first send.
    pub(crate) lateness: Histogram,
}

impl NotificationMetrics {
    /// The handles, at 0.
    pub(crate) fn new() -> Self {
        for outcome in OUTCOMES {
            counter!(NOTIFICATIONS, "type" => NO_KIND, "outcome" => outcome).absolute(0);
        }
        breaker_open("other", 0);
        Self { lateness: histogram!(NOTIFICATIONS_LATENESS) }
    }

    /// A send of a type of the statistics ended.
    pub(crate) fn count(kind: &str, outcome: &str) {
        let (kind, outcome) = (kind.to_owned(), outcome.to_owned());
        counter!(NOTIFICATIONS, "type" => kind, "outcome" => outcome).increment(1);
    }
}

/// Of the due times, for the one process that samples.
#[derive(Clone)]
pub(crate) struct DueMetrics {
    pub(crate) due: Gauge,
    pub(crate) overdue: Gauge,
}

impl DueMetrics {
    /// The handles, at 0.
    pub(crate) fn new() -> Self {
        let metrics =
            Self { due: gauge!(NOTIFICATIONS_DUE), overdue: gauge!(NOTIFICATIONS_OVERDUE) };
        metrics.due.set(0.0);
        metrics.overdue.set(0.0);
        metrics
    }
}
